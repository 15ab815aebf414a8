package kvparams

import (
	"errors"
	"fmt"
)

// The conditions a router can tell apart with errors.Is. Every error of this
// package wraps one of them.
var (
	// ErrNoHandoff: the answer carries no kv_transfer_params, or null. P has no
	// KV connector, was not asked to keep its blocks, or did not finish the
	// request normally. D must compute the prompt itself.
	ErrNoHandoff = errors.New("no handoff")
	// ErrUnusable: params came, but nothing can be read with them, or the answer
	// is no JSON object. [Error.Key] names the key. D must compute the prompt
	// itself.
	ErrUnusable = errors.New("handoff unusable")
	// ErrUnsplittable: the request cannot run as a prefill and a decode leg
	// that share one handoff. Send it to one instance.
	ErrUnsplittable = errors.New("request cannot be split")
	// ErrMalformed: a client's body is not one JSON object without duplicate
	// keys.
	ErrMalformed = errors.New("malformed body")
	// ErrTooLarge: an event or answer is larger than [MaxCapture].
	ErrTooLarge = errors.New("too large to capture")
	// ErrInvalid: an argument or header breaks its contract.
	ErrInvalid = errors.New("invalid")
)

// Error says what failed, and at which key. It unwraps to one of the sentinels
// above.
type Error struct {
	Op     string // what was attempted, for example "prefill body"
	Key    string // JSON key, "" when it is the whole
	Detail string // what is wrong
	Err    error  // a sentinel, or what caused it
}

func (e *Error) Error() string {
	s := "kvparams: " + e.Op + ": "
	if e.Key != "" {
		s += e.Key + ": "
	}
	if e.Detail != "" {
		s += e.Detail + ": "
	}
	return s + e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

func fail(sentinel error, op, key, format string, args ...any) error {
	return &Error{Op: op, Key: key, Detail: fmt.Sprintf(format, args...), Err: sentinel}
}
