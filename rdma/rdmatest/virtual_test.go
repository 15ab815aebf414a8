package rdmatest_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// virtual is an engine in a bubble of testing/synctest: its handshakes go over the network of the fabric, and its steps are at the
// time of the bubble.
type virtual struct {
	*engine
	net     *rdmatest.Network
	address string
	side    *rdma.SideChannel
}

func newVirtual(t testing.TB, network *rdmatest.Network, now *time.Time, name string, change ...setting) *virtual {
	t.Helper()
	v := &virtual{net: network, address: name + ":1"}
	v.engine = newEngine(t, network, now, name, append(change, func(w *rdma.WorkerConfig, s *lease.SchedulerConfig) {
		w.Dial, w.HandshakeTimeout = network.Dial, 0
		s.Host, s.Port = name, 1
	})...)
	v.up(t)
	t.Cleanup(func() { v.down(t) })
	return v
}

// up opens the side channel.
func (v *virtual) up(t testing.TB) {
	l, err := v.net.Listen(v.address)
	require.NoError(t, err)
	v.side = rdma.NewSideChannel(l, nil)
	for _, r := range v.ranks {
		v.side.Serve(r.w)
	}
}

// down closes it; again does nothing.
func (v *virtual) down(t testing.TB) {
	if v.side != nil {
		require.NoError(t, v.side.Close())
		v.side = nil
	}
}

// pass steps engines every so often for a time.
func pass(now *time.Time, d, every time.Duration, engines ...*virtual) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		for _, e := range engines {
			*now = time.Now()
			e.step()
		}
		synctest.Wait() // for handshakes, which take no time
		time.Sleep(every)
	}
	*now = time.Now()
}

// An hour of virtual time in a moment: a handshake, a READ, and a lease that heartbeats keep.
func TestEnginesRunInVirtualTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		network := rdmatest.NewNetwork()
		owner, reader := newVirtual(t, network, &now, "owner"), newVirtual(t, network, &now, "reader")
		p := owner.publish("req", 7, 3)
		reader.arrive("local", p)
		pass(&now, time.Hour, time.Second, owner, reader)
		require.NotContains(t, owner.freed, "req")
		require.NoError(t, reader.sched.OnBlocksAllocated(now, "local", p, [][]int{{5}}))
		pass(&now, 3*time.Second, time.Second, reader, owner)
		require.True(t, reader.ran["local"])
		require.Zero(t, reader.wrong(7, 5))
		require.Equal(t, lease.ReasonRead, owner.freed["req"])
	})
}

// E4: back-off, handshake and heartbeat are one design. However long the owner's side channel was away, and however it was, a
// lease that is granted after that, or has an interval and a handshake left then, is renewed in time; and a request that comes
// two seconds later is read.
func TestLeasesSurviveAnOutageOfAnyLength(t *testing.T) {
	step := 1
	if testing.Short() {
		step = 17
	}
	for _, duration := range []time.Duration{3 * time.Second, 30 * time.Second, 60 * time.Second} {
		for name, kind := range map[string]outage{"refuses": refuses, "loses packets": losesPackets, "is stopped": isStopped} {
			t.Run(fmt.Sprintf("leases of %s, the owner %s", duration, name), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					for away := 0; away <= 300; away += step {
						phase := lease.Config{Duration: duration}.Interval() * time.Duration(away%10) / 10
						survives(t, duration, time.Duration(away)*time.Second+phase, kind)
					}
				})
			})
		}
	}
}

// outage is how a side channel is away.
type outage int

const (
	refuses outage = iota
	losesPackets
	isStopped
)

func (o outage) begin(t *testing.T, v *virtual) {
	switch o {
	case refuses:
		v.down(t)
	case losesPackets:
		v.net.Swallow(v.address, true)
	case isStopped:
		v.net.Mute(v.address, true)
	}
}

func (o outage) end(t *testing.T, v *virtual) {
	switch o {
	case refuses:
		v.up(t)
	case losesPackets:
		v.net.Swallow(v.address, false)
	case isStopped:
		v.net.Mute(v.address, false)
	}
}

func survives(t *testing.T, duration, away time.Duration, kind outage) {
	t.Helper()
	now := time.Now()
	network := rdmatest.NewNetwork()
	lasts := func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.Duration = duration }
	owner, reader := newVirtual(t, network, &now, "owner", lasts), newVirtual(t, network, &now, "reader", lasts)
	defer func() {
		for _, e := range []*virtual{owner, reader} {
			e.down(t)
			for _, r := range e.ranks {
				require.NoError(t, r.w.Close())
			}
		}
	}()
	interval := lease.Config{Duration: duration}.Interval()
	every := interval / 4
	// what a lease needs to have left: a handshake that hangs, a back-off, and a step
	need := min(5*time.Second, max(time.Second, duration/3)) + interval + every

	kind.begin(t, owner)
	reader.arrive("first", owner.publish("first", 7, 0)) // queued all the time
	until := away - (duration - need)
	if until > 0 {
		pass(&now, until, every, reader, owner)
	}
	reader.arrive("alive", owner.publish("alive", 8, 1))
	pass(&now, min(away, duration-need), every, reader, owner)
	require.NotContains(t, owner.freed, "alive", "away for %s", away)

	kind.end(t, owner)
	reader.arrive("fresh", owner.publish("fresh", 9, 2))
	if kind == isStopped { // what hangs has to end
		pass(&now, need, every, reader, owner)
	}
	pass(&now, 2*time.Second, every, reader, owner)
	reader.pull("new", owner.publish("new", 10, 3), 4)
	pass(&now, 2*duration, every, reader, owner)
	require.NotContains(t, owner.freed, "fresh", "away for %s", away)
	require.NotContains(t, owner.freed, "alive", "away for %s", away)
	require.True(t, reader.ran["new"], "away for %s: %v", away, failure(reader.engine, "new"))
}

// G8: an owner whose leases last two seconds is renewed in time by a reader whose own last thirty, which learns it in the handshake.
func TestAShortLeaseIsRenewedByAReaderOfLongOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		network := rdmatest.NewNetwork()
		owner := newVirtual(t, network, &now, "owner", func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.Duration = 2 * time.Second })
		reader := newVirtual(t, network, &now, "reader")
		reader.arrive("local", owner.publish("req", 7, 3))
		pass(&now, time.Minute, 50*time.Millisecond, reader, owner)
		require.NotContains(t, owner.freed, "req")
		require.InDelta(t, 60*3, reader.ranks[0].w.Stats().HeartbeatsSent, 30, "every third of a second")
	})
}

// A heartbeat that finds its connection lost leaves over the next one, and not an interval later.
func TestAHeartbeatThatFindsItsConnectionLostIsSentAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		network := rdmatest.NewNetwork()
		owner, reader := newVirtual(t, network, &now, "owner"), newVirtual(t, network, &now, "reader")
		reader.pull("read", owner.publish("read", 7, 3), 5)
		pass(&now, time.Second, 100*time.Millisecond, reader, owner)
		require.True(t, reader.ran["read"], "the connection works")
		reader.over("read")
		reader.arrive("local", owner.publish("req", 7, 3))
		pass(&now, 10*time.Second, 100*time.Millisecond, reader, owner)
		renewed := func() int64 { return owner.ranks[0].w.Stats().Leases.Renewals }
		require.NoError(t, reader.ranks[0].f.Forget(owner.ranks[0].f.Name()))
		before := renewed()
		failed := reader.sched.Stats().HeartbeatsFailed
		for reader.sched.Stats().HeartbeatsFailed == failed {
			pass(&now, 100*time.Millisecond, 100*time.Millisecond, reader, owner)
		}
		pass(&now, time.Second, 100*time.Millisecond, reader, owner)
		require.Greater(t, renewed(), before)
	})
}

// G8: so is one of an owner that nobody asked anything of for a minute, and that is connected all the time.
func TestAShortLeaseIsRenewedAgainAfterAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		network := rdmatest.NewNetwork()
		owner := newVirtual(t, network, &now, "owner", func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.Duration = 2 * time.Second })
		reader := newVirtual(t, network, &now, "reader")
		reader.pull("first", owner.publish("first", 7, 3), 5)
		pass(&now, time.Second, 50*time.Millisecond, reader, owner)
		require.True(t, reader.ran["first"])
		reader.over("first")
		pass(&now, time.Minute, time.Second, reader, owner)
		require.Equal(t, 1, reader.ranks[0].w.Stats().Peers)
		reader.arrive("local", owner.publish("req", 7, 3))
		pass(&now, time.Minute, 50*time.Millisecond, reader, owner)
		require.NotContains(t, owner.freed, "req")
	})
}
