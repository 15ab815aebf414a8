package nixl

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
)

// Status is a result of the C API (nixl_capi_status_t). A negative one is an
// error; errors of this package that stem from one match it with errors.Is.
type Status int32

// The statuses of the C API. It folds many causes into StatusBackend: not
// posted, posted twice, peer disconnected, cancelled, mismatch.
const (
	StatusSuccess      Status = 0
	StatusInProgress   Status = 1
	StatusInvalidParam Status = -1
	StatusBackend      Status = -2
	StatusInvalidState Status = -3
	StatusException    Status = -4
	StatusNoTelemetry  Status = -5
	StatusNotFound     Status = -6

	statusNoMemory Status = -100
	statusGarbled  Status = -101
	statusIndex    Status = -102
	statusLacks    Status = -1000 // minus the index of the function that the library lacks
)

var statusText = map[Status]string{
	StatusSuccess:      "success",
	StatusInProgress:   "in progress",
	StatusInvalidParam: "invalid parameter",
	StatusBackend:      "backend error",
	StatusInvalidState: "invalid state",
	StatusException:    "exception in the library",
	StatusNoTelemetry:  "no telemetry",
	StatusNotFound:     "not found",
	statusNoMemory:     "out of memory",
	statusGarbled:      "the library contradicted itself",
}

func (s Status) Error() string {
	if t, ok := statusText[s]; ok {
		return t + " (" + strconv.Itoa(int(s)) + ")"
	}
	if s <= statusLacks {
		name := functionName(int(statusLacks - s))
		return name + " is not in the loaded library; the first with it is NIXL " + firstVersion(name)
	}
	return "status " + strconv.Itoa(int(s))
}

// Is lets a Status match the sentinel that stands for it.
func (s Status) Is(target error) bool {
	switch target {
	case ErrInvalid:
		return s == StatusInvalidParam
	case ErrBackend:
		return s == StatusBackend
	case ErrState:
		return s == StatusInvalidState
	case ErrNoTelemetry:
		return s == StatusNoTelemetry
	case ErrNotFound:
		return s == StatusNotFound
	case errors.ErrUnsupported:
		return s <= statusLacks
	}
	return false
}

// Conditions that callers tell apart with errors.Is.
var (
	// ErrClosed: the object or its agent was closed. Matches net.ErrClosed.
	ErrClosed error = closedError{}
	// ErrInvalid: an argument is wrong. Nothing was changed.
	ErrInvalid = errors.New("invalid argument")
	// ErrActive: the library may still write the memory, or the object is still used. Nothing was changed.
	ErrActive = errors.New("still active")
	// ErrNotFound: no metadata of that agent, or none that covers the descriptors.
	ErrNotFound = errors.New("not found")
	// ErrBackend: the transport failed, or the peer is gone.
	ErrBackend = errors.New("backend error")
	// ErrState: the object is not in a state that allows the call.
	ErrState = errors.New("invalid state")
	// ErrPeer: a sound request failed: the peer is gone, or the transport to it.
	ErrPeer = errors.New("peer or transport failed")
	// ErrStale: the list or transfer belongs to metadata that was replaced or invalidated since.
	ErrStale = errors.New("stale remote metadata")
	// ErrNoTelemetry: the agent was created without Config.Telemetry.
	ErrNoTelemetry = errors.New("no telemetry")
	// ErrLibrary: no usable library was found.
	ErrLibrary = errors.New("no usable NIXL library")
	// ErrStub: the library was built without NIXL behind it.
	ErrStub = errors.New("stub library without NIXL behind it")
)

// firstVersion returns the first release of NIXL that has a function of the C API.
func firstVersion(name string) string {
	switch strings.TrimPrefix(name, "nixl_capi_") {
	case "opt_args_set_custom_param", "opt_args_get_custom_param",
		"create_remote_dlist", "destroy_remote_dlist", "remote_dlist_add_desc",
		"prep_mem_view_local", "prep_mem_view_remote", "release_mem_view":
		return "1.5.0"
	}
	return "0.10.1 or older"
}

type closedError struct{}

func (closedError) Error() string        { return "closed" }
func (closedError) Is(target error) bool { return target == net.ErrClosed }

// Error is a failed call. It unwraps to its Status and to its cause, if it has one.
type Error struct {
	Op     string // what was tried, "post" or "load remote metadata"
	Remote string // the peer's agent name, or ""
	Status Status // what the C API answered, 0 when the call was refused before it
	Detail string // what is known beside, and what to do
	Cause  error  // a sentinel of this package, or nil
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("nixl: ")
	b.WriteString(e.Op)
	if e.Remote != "" {
		fmt.Fprintf(&b, " (peer %s)", e.Remote)
	}
	if e.Cause != nil {
		b.WriteString(": ")
		b.WriteString(e.Cause.Error())
	}
	if e.Status != 0 {
		b.WriteString(": ")
		b.WriteString(e.Status.Error())
	}
	if e.Detail != "" {
		b.WriteString(": ")
		b.WriteString(e.Detail)
	}
	return b.String()
}

// Unwrap makes errors.Is see the cause and the status.
func (e *Error) Unwrap() []error {
	var errs []error
	if e.Cause != nil {
		errs = append(errs, e.Cause)
	}
	if e.Status < 0 {
		errs = append(errs, e.Status)
	}
	return errs
}

func invalid(op, format string, args ...any) error {
	return &Error{Op: op, Cause: ErrInvalid, Detail: fmt.Sprintf(format, args...)}
}

func closed(op string) error { return &Error{Op: op, Cause: ErrClosed} }

// failed turns a status of a call into an error, nil for success.
func failed(op, remote string, s Status) error {
	if s >= 0 {
		return nil
	}
	return &Error{Op: op, Remote: remote, Status: s}
}
