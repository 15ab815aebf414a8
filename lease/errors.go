package lease

import (
	"errors"
	"fmt"
)

// The conditions a caller can tell apart with errors.Is. Every error of this
// package wraps one of them.
var (
	// ErrLapsed: a check found another value than the nonce, so the blocks
	// may have been reused while they were read.
	ErrLapsed = errors.New("lease lapsed")
	// ErrUnverifiable: the lease could not be checked: the lease fields are
	// missing or the slot READ failed.
	ErrUnverifiable = errors.New("lease unverifiable")
	// ErrPeerLost: the peer is gone.
	ErrPeerLost = errors.New("peer lost")
	// ErrTransfer: a READ failed.
	ErrTransfer = errors.New("transfer failed")
	// ErrTimeout: a READ did not end in time.
	ErrTimeout = errors.New("timed out")
	// ErrHandshake: the peer could not be reached or was refused.
	ErrHandshake = errors.New("handshake failed")
	// ErrExpired: the owner's deadline had passed before anything was read.
	ErrExpired = errors.New("lease expired")
	// ErrInvalid: an argument, parameter or message breaks its contract.
	ErrInvalid = errors.New("invalid")
	// ErrAborted: the request was given up.
	ErrAborted = errors.New("aborted")
	// ErrUnknown: no request or lease of that name.
	ErrUnknown = errors.New("unknown")
	// ErrBusy: the request still has work that must end first.
	ErrBusy = errors.New("busy")
	// ErrMalformed: a notification cannot be read. It also matches ErrInvalid.
	ErrMalformed = fmt.Errorf("malformed notification: %w", ErrInvalid)
	// ErrMismatch: the blocks to fill and those that the owner offers cannot be
	// paired, so the pull is over.
	ErrMismatch = errors.New("blocks do not match")
	// ErrPlan: a rank got a plan that is not for it: of a scheduler that it does not
	// fit, or that was replaced, or for an earlier life of the rank, or while READs
	// of an earlier scheduler may still write the engine's blocks.
	ErrPlan = errors.New("plan refused")
)

// Error says what failed and for which request. It unwraps to one of the
// sentinels above.
type Error struct {
	Op      string // what was attempted, for example "admit"
	Request string // request id, "" when there is none
	Detail  string // what is wrong and what to do about it
	Err     error  // a sentinel, or what caused it
}

func (e *Error) Error() string {
	s := "lease: " + e.Op
	if e.Request != "" {
		s += fmt.Sprintf(" %q", e.Request)
	}
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	return s + ": " + e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// caused reads as the sentinel of a cause, and also matches what a rank in this process saw.
type caused struct{ sentinel, err error }

func (c caused) Error() string   { return c.sentinel.Error() }
func (c caused) Unwrap() []error { return []error{c.sentinel, c.err} }

func invalid(op, request, format string, args ...any) error {
	return &Error{Op: op, Request: request, Detail: fmt.Sprintf(format, args...), Err: ErrInvalid}
}

// Reason says how a lease ended.
type Reason uint8

const (
	// ReasonRead: every reader reported that it is done.
	ReasonRead Reason = iota + 1
	// ReasonExpired: the deadline passed on at least one rank.
	ReasonExpired
	// ReasonAborted: ended by its owner, before export or by a revocation.
	ReasonAborted
	reasonEnd
)

var reasonNames = [...]string{"none", "read", "expired", "aborted"}

func (r Reason) String() string { return nameOf(reasonNames[:], int(r)) }

// MarshalText writes the reason's name.
func (r Reason) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads a name written by MarshalText.
func (r *Reason) UnmarshalText(b []byte) error {
	i, err := indexOf(reasonNames[:], "reason", b)
	if err == nil {
		*r = Reason(i)
	}
	return err
}

// Cause says why a pull failed. Zero means that it did not.
type Cause uint8

// The causes of a failed pull, each with its sentinel (see [Cause.Err]).
const (
	CauseLapsed Cause = iota + 1
	CauseUnverifiable
	CausePeerLost
	CauseTransfer
	CauseTimeout
	CauseHandshake
	CauseInvalid // its sentinel is ErrMismatch: ErrInvalid says that nothing was begun
	CauseAborted
	CauseExpired
	causeEnd
)

var (
	causeNames = [...]string{"none", "lapsed", "unverifiable", "peer lost", "transfer", "timeout", "handshake", "invalid", "aborted", "expired"}
	causeErrs  = [...]error{nil, ErrLapsed, ErrUnverifiable, ErrPeerLost, ErrTransfer, ErrTimeout, ErrHandshake, ErrMismatch, ErrAborted, ErrExpired}
)

func (c Cause) String() string { return nameOf(causeNames[:], int(c)) }

// Err is the sentinel of the cause, nil for zero.
func (c Cause) Err() error {
	if c >= causeEnd {
		return ErrTransfer
	}
	return causeErrs[c]
}

// CauseOf maps an error to its cause: by sentinel, else CauseTransfer. A nil
// error has no cause.
func CauseOf(err error) Cause {
	if err == nil {
		return 0
	}
	for c := CauseLapsed; c < causeEnd; c++ {
		if errors.Is(err, causeErrs[c]) {
			return c
		}
	}
	if errors.Is(err, ErrInvalid) {
		return CauseInvalid
	}
	return CauseTransfer
}

// MarshalText writes the cause's name.
func (c Cause) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText reads a name written by MarshalText.
func (c *Cause) UnmarshalText(b []byte) error {
	i, err := indexOf(causeNames[:], "cause", b)
	if err == nil {
		*c = Cause(i)
	}
	return err
}

func nameOf(names []string, i int) string {
	if i < len(names) {
		return names[i]
	}
	return fmt.Sprintf("%d", i)
}

func indexOf(names []string, what string, b []byte) (int, error) {
	for i, n := range names {
		if n == string(b) {
			return i, nil
		}
	}
	return 0, invalid("parse "+what, "", "%q is not one of %q", b, names)
}
