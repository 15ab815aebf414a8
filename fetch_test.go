package nixlgo

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// two nodes on one network, both running.
func two(t *testing.T, change ...func(*Config)) (owner, reader *Node) {
	t.Helper()
	net := rdmatest.NewNetwork()
	owner, reader = small(t, net, "P", change...), small(t, net, "D", change...)
	run(t, owner)
	run(t, reader)
	return owner, reader
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// A3: after lease.ErrInvalid and ErrBusy nothing was done, and the hold goes on; after any other error the request is over.
func TestAnErrorOfFetchSaysWhetherTheRequestIsOver(t *testing.T) {
	owner, reader := two(t)
	publish := func(id string, blocks ...int) *lease.Params {
		p, err := owner.Publish(t.Context(), id, blocks, 0)
		require.NoError(t, err)
		return p.Params()
	}
	_, err := reader.Publish(t.Context(), "busy", []int{3}, 0)
	require.NoError(t, err)

	offered := publish("groups", 0)
	offered.RemoteBlockIDs = [][]int{{0}, {0}}
	for name, c := range map[string]struct {
		params *lease.Params
		blocks []int
		want   error
	}{
		"no such block":    {publish("a", 1), []int{0, 99}, lease.ErrInvalid},
		"a block twice":    {publish("b", 2), []int{0, 0}, lease.ErrInvalid},
		"a block in use":   {publish("c", 3), []int{3}, ErrBusy},
		"two cache groups": {offered, []int{0}, lease.ErrInvalid},
	} {
		h, err := reader.Hold(c.params)
		require.NoError(t, err)
		err = h.Fetch(t.Context(), c.blocks)
		require.ErrorIs(t, err, c.want, name)
		require.NotErrorIs(t, err, lease.ErrMismatch, name)
		require.False(t, isClosed(h.Settled()), name)
		if len(c.params.RemoteBlockIDs) == 1 {
			require.NoError(t, h.Fetch(t.Context(), []int{1}), "%s: the retry works", name)
		} else {
			require.NoError(t, h.Close())
		}
		require.True(t, isClosed(h.Settled()), name)
	}

	require.Eventually(t, func() bool { return owner.Stats().Scheduler.Pinned == 1 }, 20*time.Second, time.Millisecond, "but for the groups")
	h, err := reader.Hold(publish("long list", 1))
	require.NoError(t, err)
	err = h.Fetch(t.Context(), []int{0, 1})
	require.ErrorIs(t, err, lease.ErrMismatch, "two blocks to fill, and one is offered: only the owner's shape tells")
	require.NotErrorIs(t, err, lease.ErrInvalid)
	require.True(t, isClosed(h.Settled()))
	require.ErrorIs(t, h.Fetch(t.Context(), []int{0}), lease.ErrInvalid, "it is over")
	require.Eventually(t, func() bool { return reader.Stats().Scheduler.Tracked == 0 }, 20*time.Second, time.Millisecond)
	require.Zero(t, reader.Stats().Scheduler.Released, "the lease is left to a reader that fits")
}

// A4: what no Fetch could read is refused where it is published.
func TestPublishRefusesTokensThatDoNotFillTheBlocks(t *testing.T) {
	owner, reader := two(t)
	for tokens, fits := range map[int]bool{0: true, 1: false, 16: false, 17: true, 32: true, 33: false, -1: false} {
		p, err := owner.Publish(t.Context(), "req", []int{1, 2}, tokens)
		if !fits {
			require.ErrorIs(t, err, lease.ErrInvalid, tokens)
			continue
		}
		require.NoError(t, err, tokens)
		require.NoError(t, reader.Fetch(t.Context(), p.Params(), []int{0, 1}), tokens)
		<-p.Done()
	}
}

// A7: Settled is closed at every end; a fetch that its caller gave up is aborted; no text names an id that the caller does not know.
func TestEveryEndOfAHoldSettlesIt(t *testing.T) {
	for name, end := range map[string]func(*testing.T, *Held) error{
		"fetched":   func(t *testing.T, h *Held) error { return h.Fetch(t.Context(), []int{1}) },
		"released":  func(t *testing.T, h *Held) error { return h.Release(t.Context()) },
		"closed":    func(_ *testing.T, h *Held) error { return h.Close() },
		"node gone": func(_ *testing.T, h *Held) error { return h.node.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			owner, reader := two(t)
			p, err := owner.Publish(t.Context(), "req", []int{1}, 0)
			require.NoError(t, err)
			h, err := reader.Hold(p.Params())
			require.NoError(t, err)
			require.False(t, isClosed(h.Settled()))
			require.NoError(t, end(t, h))
			require.True(t, isClosed(h.Settled()))
		})
	}
}

func TestErrorsNameTheCallersIDs(t *testing.T) {
	owner, reader := two(t)
	p, err := owner.Publish(t.Context(), "request-1", []int{1}, 0)
	require.NoError(t, err)
	require.NoError(t, p.Revoke())
	<-p.Done()
	err = reader.Fetch(t.Context(), p.Params(), []int{1})
	require.ErrorIs(t, err, lease.ErrLapsed)
	require.ErrorContains(t, err, `"request-1"`)
	require.NotContains(t, err.Error(), reader.tag)
}

// G2: a Fetch whose context has ended is over, before the call or in it: the owner is told, the blocks are zero.
func TestAFetchThatItsCallerGaveUpIsOver(t *testing.T) {
	t.Run("before the call", func(t *testing.T) {
		owner, reader := two(t)
		p, err := owner.Publish(t.Context(), "req", []int{1}, 0)
		require.NoError(t, err)
		h, err := reader.Hold(p.Params())
		require.NoError(t, err)
		copy(reader.Block(0, 2), "left over")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		err = h.Fetch(ctx, []int{2})
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, lease.ErrAborted)
		require.Equal(t, lease.CauseAborted, lease.CauseOf(err))
		require.Equal(t, make([]byte, 8), reader.Block(0, 2))
		require.True(t, isClosed(h.Settled()))
		<-p.Done()
		require.Equal(t, lease.ReasonRead, p.Reason(), "the owner was told")
		require.Zero(t, reader.Stats().Scheduler.Tracked)
	})
	t.Run("in the call", func(t *testing.T) {
		net := rdmatest.NewNetwork()
		owner, reader := small(t, net, "P"), small(t, net, "D")
		run(t, owner)
		run(t, reader)
		p, err := owner.Publish(t.Context(), "req", []int{1}, 0)
		require.NoError(t, err)
		net.HoldReads(true)
		ctx, cancel := context.WithCancel(t.Context())
		h, err := reader.Hold(p.Params())
		require.NoError(t, err)
		done := make(chan error)
		go func() { done <- h.Fetch(ctx, []int{2}) }()
		require.Eventually(t, func() bool { return len(net.Reads()) == 1 }, 20*time.Second, time.Millisecond)
		cancel()
		err = <-done
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, ErrQuarantined)
		require.Equal(t, lease.CauseAborted, lease.CauseOf(err))
		require.False(t, isClosed(h.Settled()))
		net.HoldReads(false)
		<-h.Settled()
		<-p.Done()
		require.Equal(t, lease.ReasonRead, p.Reason())
		require.Equal(t, make([]byte, 8), reader.Block(0, 2))
	})
}

// E8: kv_load_failure_policy. The owner is told at once by a reader that prefills the blocks itself, and keeps them for another
// reader otherwise.
func TestTheFailurePolicyDecidesWhoPrefills(t *testing.T) {
	for _, policy := range []lease.FailurePolicy{lease.FailRequest, lease.Recompute} {
		t.Run(policy.String(), func(t *testing.T) {
			net := rdmatest.NewNetwork()
			owner := small(t, net, "P")
			run(t, owner)
			reader := small(t, net, "D", func(c *Config) {
				c.Lease = lease.DefaultConfig()
				c.Lease.FailurePolicy = policy
				c.Compatibility = "another"
			})
			run(t, reader)
			p, err := owner.Publish(t.Context(), "req", []int{1}, 0)
			require.NoError(t, err)
			err = reader.Fetch(t.Context(), p.Params(), []int{1})
			require.ErrorIs(t, err, rdma.ErrCompatibility)
			require.Equal(t, policy == lease.Recompute, errors.Is(err, ErrRecompute))
			if policy == lease.Recompute {
				<-p.Done()
				require.Equal(t, lease.ReasonRead, p.Reason())
				return
			}
			fits := small(t, net, "D2")
			run(t, fits)
			require.NoError(t, fits.Fetch(t.Context(), p.Params(), []int{1}), "it was left to another reader")
		})
	}
}

// E8: there are kv_lease_slots = KV blocks + max_num_seqs slots.
func TestANodeHasSlotsForItsBlocksAndSequences(t *testing.T) {
	net := rdmatest.NewNetwork()
	require.EqualValues(t, 4+256, small(t, net, "default").Stats().Scheduler.FreeSlots)
	require.EqualValues(t, 4+7, small(t, net, "seven", func(c *Config) { c.MaxSeqs = 7 }).Stats().Scheduler.FreeSlots)
}

// E8: "With kv_lease_verification enabled, an instance that cannot register its lease slots in DRAM fails to start", and with false
// it starts without.
func TestANodeStartsWithoutSlotsOnlyWithoutVerification(t *testing.T) {
	for _, v := range []lease.Verification{lease.VerifyAll, lease.VerifyOffered, lease.VerifyNone} {
		t.Run(v.String(), func(t *testing.T) {
			net := rdmatest.NewNetwork()
			f := net.NewFabric("P")
			c := Config{Layers: 2, Blocks: 4, BlockBytes: 8, Fabric: noSlots{f}, Lease: lease.DefaultConfig()}
			c.Lease.Verification = v
			n, err := New(c)
			if v != lease.VerifyNone {
				require.ErrorContains(t, err, "lease slots")
				return
			}
			require.NoError(t, err)
			defer n.Close()
			run(t, n)
			p, err := n.Publish(t.Context(), "req", []int{1}, 0)
			require.NoError(t, err)
			require.Nil(t, p.Params().Lease)
			d := small(t, net, "D", func(c *Config) {
				c.Lease = lease.DefaultConfig()
				c.Lease.Verification = lease.VerifyNone
			})
			run(t, d)
			require.NoError(t, d.Fetch(t.Context(), p.Params(), []int{1}))
		})
	}
}

// noSlots is a fabric that has room for the blocks and for nothing after them.
type noSlots struct{ *rdmatest.Fabric }

func (f noSlots) Alloc(size int) (rdma.Memory, error) {
	if size != 2*4*8 {
		return nil, &nixl.Error{Op: "register", Cause: nixl.ErrInvalid, Detail: "no DRAM"}
	}
	return f.Fabric.Alloc(size)
}

// Close tells the owners what was read: a program that fetches and ends does not leave the lease to run out.
func TestCloseTellsTheOwnersWhatWasRead(t *testing.T) {
	for range 20 {
		owner, reader := two(t)
		p, err := owner.Publish(t.Context(), "req", []int{1}, 0)
		require.NoError(t, err)
		require.NoError(t, reader.Fetch(t.Context(), p.Params(), []int{1}))
		require.NoError(t, reader.Close())
		select {
		case <-p.Done():
		case <-time.After(20 * time.Second): // the lease lasts for 30
			require.Fail(t, "the owner was not told")
		}
		require.Equal(t, lease.ReasonRead, p.Reason())
	}
}
