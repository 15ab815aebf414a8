package nixl

import (
	"time"

	"golang.org/x/sys/unix"
)

// Telemetry is what the library recorded about the last post of a transfer.
type Telemetry struct {
	Start       time.Time     // of the post
	Post        time.Duration // that the post took
	Transfer    time.Duration // from the start of the post until the transfer was found done; Post is part of it
	Bytes       uint64
	Descriptors uint64 // of the request, after merging
}

// Rate returns bytes per second, 0 when the transfer took less than a microsecond.
func (t Telemetry) Rate() float64 {
	if t.Transfer <= 0 {
		return 0
	}
	return float64(t.Bytes) / t.Transfer.Seconds()
}

// wallClock turns a start time of the library into wall-clock time. The header
// says microseconds since the epoch, but the library uses the clock that counts
// from the boot of the machine.
func wallClock(micros uint64) time.Time {
	const thisCentury = 946_684_800_000_000
	if micros > thisCentury {
		return time.UnixMicro(int64(micros))
	}
	var boot unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &boot); err != nil {
		return time.Time{}
	}
	ago := time.Duration(boot.Nano()) - time.Duration(micros)*time.Microsecond
	return time.Now().Add(-ago).Round(0)
}

// rawTimes is nixlgo_times: microseconds, bytes and a count.
type rawTimes struct{ start, post, transfer, bytes, descs uint64 }

// Telemetry returns what was recorded about the last post of a transfer that is
// done; before that it is ErrState. ErrNoTelemetry says that nothing is recorded:
// the agent was created without Config.Telemetry, or with NIXL_TELEMETRY_ENABLE=n
// in the environment, which wins from NIXL 1.4 on.
//
// Implements:
//
//	nixl_capi_get_xfer_telemetry
func (t *Transfer) Telemetry() (Telemetry, error) {
	const op = "get telemetry"
	if err := t.lock(op); err != nil {
		return Telemetry{}, err
	}
	defer t.remote.a.mu.Unlock()
	remote := t.remote.remote
	if t.s.state != Done {
		return Telemetry{}, &Error{Op: op, Remote: remote, Cause: ErrState, Detail: "the transfer is " + t.s.state.String() + ", not done"}
	}
	raw, st := rawTelemetry(t.remote.a.h, t.s.h)
	switch {
	case st == StatusNoTelemetry:
		return Telemetry{}, &Error{Op: op, Remote: remote, Status: st, Detail: "create the agent with Config.Telemetry, and without NIXL_TELEMETRY_ENABLE=n"}
	case st < 0:
		return Telemetry{}, failed(op, remote, st)
	}
	return Telemetry{
		Start:       wallClock(raw.start),
		Post:        time.Duration(raw.post) * time.Microsecond,
		Transfer:    time.Duration(raw.transfer) * time.Microsecond,
		Bytes:       raw.bytes,
		Descriptors: raw.descs,
	}, nil
}
