package rdmatest_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

func engineTTL(ttl time.Duration) setting {
	return func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.EngineTTL = ttl }
}

// peer-tests A3.33: an engine that was not used for engine_ttl is forgotten, to the second.
func TestEngineIsForgottenWhenItsTimeIsOver(t *testing.T) {
	d := newDuo(t, engineTTL(time.Minute))
	w := d.reader.ranks[0].w
	for i := range 3 {
		d.pass(59.9)
		d.reader.step()
		require.Equal(t, 1, w.Stats().Peers)
		if i == 0 { // a use starts the time anew
			require.NoError(t, read(d.owner, d.reader, "again", 7))
			d.pass(59.9)
			d.reader.step()
			require.Equal(t, 1, w.Stats().Peers)
		}
		d.pass(0.1)
		d.reader.step()
		s := w.Stats()
		require.Zero(t, s.Peers+s.PeersIdle+s.PeersBroken)
		require.EqualValues(t, i+1, s.PeersEvicted)
		require.NoError(t, read(d.owner, d.reader, "next", 8))
		require.EqualValues(t, i+2, w.Stats().HandshakeTime.Count)
	}
	d.owner.step()
	d.pass(31)
	d.owner.step()
	clean(t, d.owner, d.reader)
}

// A hold uses its engine by heartbeats, also where engine_ttl is less than their interval.
func TestHeldEngineIsNotForgotten(t *testing.T) {
	for _, ttl := range []time.Duration{time.Minute, time.Second} {
		d := newDuo(t, engineTTL(ttl))
		p := d.owner.publish("req", 7, 3)
		require.NoError(t, d.reader.sched.Hold(*d.now, "held", p))
		for range 1000 {
			d.reader.step()
			d.owner.step()
			d.pass(1)
		}
		require.Empty(t, d.owner.freed["req"])
		s := d.reader.ranks[0].w.Stats()
		require.Zero(t, s.PeersEvicted)
		require.EqualValues(t, 1, s.HandshakeTime.Count)
	}
}

// Nor is one from which a READ is under way: here one that nobody wants any more, so that nothing else uses the engine.
func TestEngineThatIsReadFromIsNotForgotten(t *testing.T) {
	d := newDuo(t, engineTTL(10*time.Second))
	d.net.HoldReads(true)
	d.reader.pull("slow", d.owner.publish("slow", 7, 3), 5)
	d.reader.step()
	d.pass(61)
	d.reader.step()
	require.ErrorIs(t, failure(d.reader, "slow"), lease.ErrTimeout)
	require.True(t, d.reader.over("slow"))
	w := d.reader.ranks[0].w
	for range 100 {
		d.pass(60)
		d.reader.step()
	}
	require.Zero(t, w.Stats().PeersEvicted)
	require.Equal(t, []int{5}, reading(d.reader))
	deliver(t, d.reader, 5)
	d.reader.step()
	require.True(t, d.reader.settled["slow"])
	d.reader.step() // tells the owner
	d.pass(9.9)
	d.reader.step()
	require.Zero(t, w.Stats().PeersEvicted)
	d.pass(0.1)
	d.reader.step()
	require.EqualValues(t, 1, w.Stats().PeersEvicted)
}
