package hold

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nixlgo/nixlgo/lease"
)

// The resources of the daemon.
//
//	POST   /v1/holds                         Request → 201 Hold; 200 when the lease was held already: see Client.Hold
//	GET    /v1/holds                         → 200 List
//	GET    /v1/holds/ID                      → 200 Hold
//	DELETE /v1/holds/ID?release=true|false   → 204; there is no default
//	GET    /healthz                          → 200 Health
//
// Every other answer is an Error in JSON.
const (
	HoldsPath  = "/v1/holds"
	HealthPath = "/healthz"
)

// Hold is a lease that the daemon renews.
type Hold struct {
	ID      string    `json:"id"`
	Engine  string    `json:"engine"`  // remote_engine_id, the owner
	Request string    `json:"request"` // remote_request_id
	Expires time.Time `json:"expires"` // when the daemon stops renewing, on its clock
}

// Request is the body of a POST. Other keys are ignored, so that an owner's whole answer will do.
type Request struct {
	Params json.RawMessage `json:"kv_transfer_params"`
	TTL    string          `json:"ttl,omitempty"` // such as "90s"; empty: the daemon's default
}

// List are all holds, by ID.
type List struct {
	Holds []Hold `json:"holds"`
}

// Health is the state of the daemon.
type Health struct {
	Holds int `json:"holds"`
	Max   int `json:"max_holds"`
}

// Code says what kind of error an answer is.
type Code string

// The codes, with their HTTP status.
const (
	CodeInvalid     Code = "invalid"                // 400: the request breaks its contract
	CodeForbidden   Code = "forbidden"              // 403: a Host that is not this machine's
	CodeUnknown     Code = "unknown_hold"           // 404: no such hold, or not any more
	CodeNoResource  Code = "no_resource"            // 404: no such path or method
	CodeTooLarge    Code = "too_large"              // 413: the body
	CodeMediaType   Code = "unsupported_media_type" // 415: not application/json
	CodeFull        Code = "too_many_holds"         // 429
	CodeUnavailable Code = "unavailable"            // 503: the daemon cannot do it now; nothing changed, unless the message says so
)

var (
	// ErrFull: the daemon has as many holds as it may.
	ErrFull = errors.New("too many holds")
	// ErrUnavailable: there is no daemon at the address, or it cannot serve now.
	ErrUnavailable = errors.New("hold daemon unavailable")
)

// Error is an answer of the daemon that is no success. It matches lease.ErrInvalid, lease.ErrUnknown, ErrFull or
// ErrUnavailable.
type Error struct {
	Op      string `json:"-"` // what was attempted
	Status  int    `json:"-"` // of HTTP
	Code    Code   `json:"code"`
	Message string `json:"error"` // what is wrong and what to do about it
}

func (e *Error) Error() string {
	return fmt.Sprintf("hold: %s: %s (%s, HTTP %d)", e.Op, e.Message, e.Code, e.Status)
}

func (e *Error) Unwrap() error {
	switch e.Code {
	case CodeUnknown:
		return lease.ErrUnknown
	case CodeFull:
		return ErrFull
	case CodeInvalid, CodeForbidden, CodeNoResource, CodeTooLarge, CodeMediaType:
		return lease.ErrInvalid
	}
	return ErrUnavailable
}
