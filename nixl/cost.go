package nixl

import "time"

// Cost is an estimate of how long a transfer takes.
type Cost struct {
	Duration, Margin time.Duration
}

// EstimateCost asks the backend how long the transfer will take.
// errors.ErrUnsupported says that the library has no such call.
//
// Implements:
//
//	nixl_capi_estimate_xfer_cost
func (t *Transfer) EstimateCost() (Cost, error) {
	const op = "estimate cost"
	if err := t.lock(op); err != nil {
		return Cost{}, err
	}
	defer t.remote.a.mu.Unlock()
	duration, margin, st := rawEstimate(t.remote.a.h, t.s.h)
	if st < 0 {
		return Cost{}, &Error{Op: op, Remote: t.remote.remote, Status: st, Detail: "not every backend can tell"}
	}
	return Cost{time.Duration(duration) * time.Microsecond, time.Duration(margin) * time.Microsecond}, nil
}
