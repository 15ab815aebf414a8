package rdmatest_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// recorder notes what a Trace is told.
type recorder struct {
	calls []string
	open  int // that have begun and not ended
}

func (c *recorder) begin(format string, a ...any) func(err error) {
	what := fmt.Sprintf(format, a...)
	c.calls = append(c.calls, what)
	c.open++
	return func(err error) {
		c.open--
		c.calls = append(c.calls, fmt.Sprintf("%s: %v", what, lease.CauseOf(err)))
	}
}

func (c *recorder) trace() rdma.Trace {
	return rdma.Trace{
		Handshake: func(p lease.Peer) func(time.Duration, error) {
			end := c.begin("handshake %s", p.Engine)
			return func(took time.Duration, err error) {
				if took <= 0 {
					err = fmt.Errorf("took %v", took)
				}
				end(err)
			}
		},
		Read:   func(p lease.Pull, bytes int64) func(error) { return c.begin("read %s %d", p.Request, bytes) },
		Verify: func(p lease.Pull) func(error) { return c.begin("verify %s", p.Request) },
		Lease:  lease.TableTrace{Ended: func(e lease.Ended, _, _ time.Duration) { c.calls = append(c.calls, "ended "+e.Request) }},
	}
}

func (c *recorder) take() []string {
	calls := c.calls
	c.calls = nil
	return calls
}

func tracedBy(c *recorder) setting {
	return func(wc *rdma.WorkerConfig, _ *lease.SchedulerConfig) { wc.Trace = c.trace() }
}

func TestATraceIsToldWhenAPartOfAPullBeginsAndEnds(t *testing.T) {
	c := &recorder{}
	d := newDuo(t, tracedBy(c)) // both sides
	require.Equal(t, []string{"handshake owner", "handshake owner: none", "read first 128", "read first 128: none", "verify first", "verify first: none",
		"ended first"}, c.take())
	pull := func(id string, block int) {
		d.reader.pull(id, d.owner.publish(id, uint64(block+10), block), block)
		d.reader.step()
	}
	d.net.HoldReads(true)

	pull("lapsed", 1)
	d.held(0, false).Deliver()
	d.reader.step()
	d.net.HoldReads(false)
	require.NoError(t, d.owner.sched.Revoke(*d.now, "lapsed"))
	require.Equal(t, []string{"read lapsed 128", "read lapsed 128: none", "verify lapsed"}, c.take())
	d.owner.step()
	d.reader.step()
	require.Equal(t, []string{"ended lapsed", "verify lapsed: lapsed"}, c.take())

	d.net.HoldReads(true)
	pull("late", 2)
	d.pass(61)
	d.reader.step()
	require.Equal(t, []string{"read late 128", "read late 128: timeout"}, c.take(), "its caller knows, though the READ is active")
	pull("given up", 3)
	d.reader.over("given up")
	d.reader.step()
	require.Equal(t, []string{"read given up 128", "read given up 128: aborted"}, c.take())
	for _, r := range d.net.Reads() {
		r.Deliver()
	}
	d.reader.step()
	require.Empty(t, c.take(), "nothing is verified for nobody")

	pull("lost", 4)
	d.held(0, false).Fail(nil)
	d.reader.step()
	require.Equal(t, []string{"read lost 128", "read lost 128: peer lost"}, c.take()[:2])
	d.net.HoldReads(false)
	d.reader.over("lost") // which is to be told to the owner
	d.reader.connected(1)
	require.Equal(t, []string{"handshake owner", "handshake owner: none"}, c.take()[0:2])

	d.net.HoldReads(true)
	pull("open", 5)
	require.NoError(t, d.reader.ranks[0].w.Close())
	calls := c.take()
	require.Equal(t, []string{"read open 128", "read open 128: transfer"}, calls[len(calls)-2:], "Close ends what has begun")
	require.Zero(t, c.open)
}

// A failure leaves its cause in the numbers, and no two causes the same one.
func TestFailedTransfersAreCountedByCause(t *testing.T) {
	d := newDuo(t)
	d.net.HoldReads(true)
	stats := func() rdma.WorkerStats { return d.reader.ranks[0].w.Stats() }
	pull := func(id string, block int) {
		d.reader.pull(id, d.owner.publish(id, uint64(block+10), block), block)
		d.reader.step()
	}
	before := stats()
	require.EqualValues(t, 1, before.ReadTime.Count)
	require.EqualValues(t, 1, before.PostTime.Count)
	require.EqualValues(t, 1, before.CheckTime.Count)
	require.EqualValues(t, layers*blockLen, before.ReadSize.Sum)
	require.EqualValues(t, layers, before.ReadDescriptors.Sum)
	require.EqualValues(t, 1, before.HandshakeTime.Count)
	require.Equal(t, 1, before.Peers)

	pull("refused", 1)
	d.held(0, false).Fail(fmt.Errorf("a remote key is wrong"))
	d.reader.step()
	require.EqualValues(t, 1, stats().ReadsFailed)
	require.Zero(t, stats().ReadsLost)
	d.net.HoldReads(false)
	d.reader.over("refused") // which is to be told to the owner
	d.reader.connected(1)
	d.net.HoldReads(true)

	pull("unchecked", 2)
	d.held(0, false).Deliver()
	d.reader.step()
	d.held(0, true).Fail(nil)
	d.reader.step()
	require.EqualValues(t, 1, stats().ChecksLost)
	require.Zero(t, stats().ReadsLost+stats().ChecksFailed)
	require.EqualValues(t, 1, stats().ReadsFailed)
	require.EqualValues(t, 1, stats().Unverifiable)

	d.net.HoldReads(false)
	d.reader.over("unchecked")
	d.reader.connected(1)
	require.Zero(t, stats().NotifyLost+stats().NotifyFailed)
	d.reader.ranks[0].f.Fail(rdmatest.OpNotify, 1, nil)
	pull("untold", 3)
	until(t, "the notification", func() bool { return stats().NotifyLost == 1 }, d.reader)
	require.Zero(t, stats().NotifyFailed)
	d.reader.ranks[0].f.Fail(rdmatest.OpNotify, 1, fmt.Errorf("too long"))
	pull("untold again", 4)
	until(t, "the notification", func() bool { return stats().NotifyFailed == 1 }, d.reader)
	require.EqualValues(t, 1, stats().NotifyLost)
}

// nothing is a Trace of hooks that do nothing.
func nothing() rdma.Trace {
	return rdma.Trace{
		BeforeCheck: func(string, int, int) {},
		Handshake:   func(lease.Peer) func(time.Duration, error) { return nil },
		Read:        func(lease.Pull, int64) func(error) { return nil },
		Verify:      func(lease.Pull) func(error) { return nil },
		Lease: lease.TableTrace{Granted: func(lease.Grant) {}, Heartbeat: func(string, int, int) {},
			Ended: func(lease.Ended, time.Duration, time.Duration) {}},
	}
}

// oneRead returns a function that takes one request from its publication to its release.
func oneRead(t testing.TB, trace rdma.Trace) func() {
	d := newDuo(t, func(wc *rdma.WorkerConfig, _ *lease.SchedulerConfig) { wc.Trace = trace })
	return func() {
		d.reader.pull("req", d.owner.publish("req", 1, 3), 5)
		for !d.reader.ran["req"] {
			d.reader.step()
		}
		d.reader.over("req")
		d.reader.step()
		d.owner.step()
	}
}

// The cost of the hooks: a step calls none, and allocates nothing for them, when there are none.
func TestHooksThatAreNotUsedAllocateNothing(t *testing.T) {
	unused := testing.AllocsPerRun(200, oneRead(t, rdma.Trace{}))
	require.Equal(t, testing.AllocsPerRun(200, oneRead(t, nothing())), unused, "nothing is made for a hook but what the hook makes")

	d := newDuo(t)
	w := d.reader.ranks[0].w
	require.Zero(t, testing.AllocsPerRun(200, func() {
		if _, err := w.Step(*d.now, lease.Plan{}); err != nil {
			t.Error(err)
		}
	}), "a step with nothing to do")
}

// BenchmarkHooks is the life of a request, on both sides, without hooks and with hooks that do nothing.
func BenchmarkHooks(b *testing.B) {
	for _, c := range []struct {
		name  string
		trace rdma.Trace
	}{{"none", rdma.Trace{}}, {"all", nothing()}} {
		b.Run(c.name, func(b *testing.B) {
			run := oneRead(b, c.trace)
			b.ReportAllocs()
			least := time.Hour
			for b.Loop() {
				from := time.Now()
				run()
				least = min(least, time.Since(from))
			}
			b.ReportMetric(float64(least.Nanoseconds()), "min-ns")
		})
	}
}
