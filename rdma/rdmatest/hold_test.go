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

// shaped is an engine of tp ranks for a model of heads KV heads, 0 if it does not say.
func shaped(tp, heads int) setting {
	return func(w *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.TPSize, w.KV.Heads = tp, heads }
}

// replicated is an engine of tp ranks each of which holds the whole cache, so that engines of any size can read from another.
func replicated(tp int) setting {
	return func(w *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.TPSize, w.KV.Replicated = tp, true }
}

// llm-d-router#2273: an engine with a KV cache of its own holds and releases a lease of an owner of any shape. Every rank of
// the owner is renewed and let go of, whether the engine could read from it or not.
func TestLeaseOfAnyShapeIsHeldAndReleased(t *testing.T) {
	for name, c := range map[string]struct {
		owner, holder setting
		readable      bool
	}{
		"one rank of one":             {shaped(1, 1), shaped(1, 1), true},
		"tp 2 here and there":         {shaped(2, 4), shaped(2, 4), true},
		"tp 1 here, 4 there":          {replicated(4), replicated(1), true},
		"tp 2 here, 4 there":          {replicated(4), replicated(2), true},
		"tp 4 here, 2 there":          {replicated(2), replicated(4), true},
		"another block length":        {shaped(4, 4), shaped(1, 4), false},
		"heads not known here":        {shaped(4, 4), shaped(1, 0), false},
		"tp 3 here, 2 there":          {replicated(2), replicated(3), false},
		"another hash":                {shaped(2, 2), func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) { w.Compatibility = "another" }, false},
		"another hash, more ranks":    {shaped(2, 2), func(w *rdma.WorkerConfig, s *lease.SchedulerConfig) { w.Compatibility, s.TPSize = "another", 2 }, false},
		"another attention back end":  {shaped(1, 1), func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) { w.KV.Heads, w.KV.Attention = 1, "FLASH_ATTN" }, false},
		"context parallelism is told": {func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.TPSize, s.DCPSize = 2, 2 }, shaped(1, 1), false},
	} {
		t.Run(name, func(t *testing.T) {
			start := time.Unix(1_000_000, 0)
			network := rdmatest.NewNetwork()
			owner, holder := newEngine(t, network, &start, "owner", c.owner), newEngine(t, network, &start, "holder", c.holder)
			renewed := func(n int64) func() bool {
				return func() bool {
					for _, r := range owner.ranks {
						if r.w.Stats().Leases.Renewals < n {
							return false
						}
					}
					return true
				}
			}
			p := owner.publish("req", 7, 3)
			require.NoError(t, holder.sched.Hold(start, "held", p))
			for i := range 10 { // 50 s: the lease would be over
				until(t, "a renewal on every rank", renewed(int64(i+1)), holder, owner)
				start = start.Add(5 * time.Second)
			}
			require.Empty(t, owner.freed["req"])
			require.NoError(t, holder.sched.Unhold(start, "held", true))
			until(t, "the release on every rank", func() bool { return owner.freed["req"] == lease.ReasonRead }, holder, owner)

			// What cannot be read is refused as before, and let go of at once.
			q := owner.publish("req-2", 8, 4)
			holder.pull("local", q, 5)
			until(t, "the verdict", func() bool { return holder.ran["local"] || failure(holder, "local") != nil }, holder, owner)
			require.Equal(t, c.readable, holder.ran["local"], "%v", failure(holder, "local"))
			if !c.readable {
				require.ErrorIs(t, failure(holder, "local"), lease.ErrHandshake)
			}
			holder.over("local")
			until(t, "the end of the lease", func() bool { return owner.freed["req-2"] == lease.ReasonRead }, holder, owner)
			clean(t, owner, holder)
		})
	}
}

// A release of a hold that meets nobody it has to wait for: the engine has not been dealt with before, and is restarted after.
func TestReleaseAloneReachesEveryRank(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network := rdmatest.NewNetwork()
	holder := newEngine(t, network, &start, "holder", replicated(2))
	for life := range 3 {
		owner := newEngine(t, network, &start, "owner", replicated(4))
		id := fmt.Sprint("req-", life)
		p := owner.publish(id, 7, 3)
		require.NoError(t, holder.sched.Hold(start, id, p))
		require.NoError(t, holder.sched.Unhold(start, id, true))
		until(t, "the release", func() bool { return owner.freed[id] == lease.ReasonRead }, holder, owner)
		for _, r := range owner.ranks {
			r.f.Kill()
		}
		holder.step()
	}
	require.Zero(t, holder.ranks[1].w.Stats().HandshakeTime.Count, "one rank of the engine is enough")
}

// An engine that is read from, and told things as one of another shape, is connected to anew after its transport gave up: a
// connection that is let go of while the other one keeps the agent loaded would meet the same dead transport again.
func TestEngineThatIsReadAndToldIsReadAgainAfterItsLinkBroke(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network := rdmatest.NewNetwork()
	owner, holder := newEngine(t, network, &start, "owner", replicated(4)), newEngine(t, network, &start, "holder", replicated(2))
	read := func(id string) bool {
		holder.pull(id, owner.publish(id, 7, 3), 5)
		until(t, "the verdict", func() bool { return holder.ran[id] || failure(holder, id) != nil }, holder, owner)
		defer holder.over(id)
		return holder.ran[id]
	}
	require.True(t, read("before"))
	p := owner.publish("held", 8, 4)
	require.NoError(t, holder.sched.Hold(start, "held", p))
	require.NoError(t, holder.sched.Unhold(start, "held", true))
	until(t, "the release", func() bool { return owner.freed["held"] == lease.ReasonRead }, holder, owner)

	for _, r := range owner.ranks {
		network.Break(holder.ranks[0].f, r.f)
	}
	require.False(t, read("broken"))
	for i := range 3 {
		start = start.Add(time.Minute) // past every backoff
		if read(fmt.Sprint("after-", i)) {
			return
		}
	}
	t.Fatal("it is never read again")
}
