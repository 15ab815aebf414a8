package lease

import (
	"math"
	"time"
)

const (
	// ExpiryMargin is how long before the owner's deadline a readback is declined
	// (vLLM 0.33.0: 5 s): the READ takes time, too.
	ExpiryMargin = 5 * time.Second

	// clockDrift is how far two clocks may part, per second: 100 ppm on either
	// side, more than any quartz does.
	clockDrift = 200e-6
)

// ClockOffset relates the clock of an owner in another process, of which the
// handshake tells seconds since some zero of its own, to ours. The zero value
// knows nothing. Of several samples it keeps the one with the smallest error.
type ClockOffset struct {
	known  bool
	local  time.Time // the middle of the round trip
	remote float64   // the owner's seconds at that moment, ± rtt/2
	rtt    time.Duration
}

// Add takes one sample: the request was sent at sent, the answer with the
// owner's clock came at received.
func (c *ClockOffset) Add(sent, received time.Time, remote float64) error {
	rtt := received.Sub(sent)
	if rtt < 0 || math.IsNaN(remote) || math.IsInf(remote, 0) {
		return invalid("clock sample", "", "round trip of %v, clock %v", rtt, remote)
	}
	// A sample ages, so that the offset follows the clocks over days.
	if c.Known() && rtt/2 > c.Error(received) {
		return nil
	}
	*c = ClockOffset{true, sent.Add(rtt / 2), remote, rtt}
	return nil
}

// Known reports whether there is a sample.
func (c *ClockOffset) Known() bool { return c.known }

// Error bounds how far Local may be off at the moment now: half the round trip,
// and the drift since.
func (c *ClockOffset) Error(now time.Time) time.Duration {
	age := max(now.Sub(c.local), 0)
	return c.rtt/2 + time.Duration(float64(age)*clockDrift)
}

// Age is how old the sample is.
func (c *ClockOffset) Age(now time.Time) time.Duration { return now.Sub(c.local) }

// Local is when the owner's clock shows these seconds, on our clock, and at most
// MaxTTL from now. What is no number is long past.
func (c *ClockOffset) Local(now time.Time, remote float64) time.Time {
	if math.IsNaN(remote) {
		remote = math.Inf(-1)
	}
	left := remote - c.remote - now.Sub(c.local).Seconds()
	left = min(max(left, -MaxTTL.Seconds()), MaxTTL.Seconds())
	return now.Add(time.Duration(left * float64(time.Second)))
}

// Check says whether a pull may still be read, before anything is posted. A pull
// without a deadline of its owner may, and so may one that fills no blocks. One
// whose deadline has passed, or will within ExpiryMargin and the error, is
// ErrExpired. With an unknown offset the pull may if its lease is verified after
// the READ, and is ErrUnverifiable if not.
func (c *ClockOffset) Check(now time.Time, p Pull) error {
	const op = "read back"
	if p.Expiry == nil || countBlocks(p.LocalBlocks) == 0 {
		return nil
	}
	if !c.Known() {
		if p.Verify {
			return nil
		}
		return &Error{Op: op, Request: p.Request, Err: ErrUnverifiable, Detail: "the owner's clock is unknown, so is whether its deadline has passed"}
	}
	if left := c.Local(now, *p.Expiry).Sub(now); left <= ExpiryMargin+c.Error(now) {
		return &Error{Op: op, Request: p.Request, Err: ErrExpired, Detail: "the owner keeps the blocks for " + left.String() + " only; prefill them"}
	}
	return nil
}
