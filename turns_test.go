package nixlgo_test

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
)

func twoWays(c *nixlgo.Config) {
	c.Lease = lease.DefaultConfig()
	c.Lease.Bidirectional = true
}

// through is what a router's JSON makes of params.
func through(t testing.TB, p *lease.Params) *lease.Params {
	t.Helper()
	text, err := json.Marshal(p)
	require.NoError(t, err)
	var q lease.Params
	require.NoError(t, json.Unmarshal(text, &q))
	return &q
}

// fetched is a turn that n has fetched into blocks.
func fetched(t *testing.T, n *nixlgo.Node, p *lease.Params, blocks ...int) *nixlgo.Held {
	t.Helper()
	h, err := n.Hold(through(t, p))
	require.NoError(t, err)
	require.NoError(t, h.Fetch(deadline(t), blocks))
	return h
}

// llm-d#1307, vllm#32553, peer-tests A4.1, A4.13, A4.15, A4.16: turn 1 goes from the prefiller to the decoder, which keeps the blocks
// for turn 2; the prefiller reads them back, verified, and publishes the longer prompt in turn.
func TestNextTurnIsReadBackAndPublishedAgain(t *testing.T) {
	prefill, decode := open(t, twoWays), open(t, twoWays)
	fill(prefill, 0xA1, 1, 2)
	first, err := prefill.Publish(deadline(t), "turn-1", []int{1, 2}, 32)
	require.NoError(t, err)
	d := fetched(t, decode, first.Params(), 5, 6)
	requireDone(t, first, lease.ReasonRead)

	fill(decode, 0xB2, 7) // what it generated
	kept, err := d.Publish(deadline(t), []int{5, 6, 7}, 40)
	require.NoError(t, err)
	_, err = decode.Publish(deadline(t), "other", []int{6}, 16)
	require.ErrorIs(t, err, nixlgo.ErrBusy)
	back := kept.Params()
	require.True(t, back.DoRemoteDecode)
	require.False(t, back.DoRemotePrefill)
	require.Equal(t, 40, back.RemoteNumTokens)
	require.NotNil(t, back.Lease)
	require.NotNil(t, back.RemoteBlocksExpiry)

	p := fetched(t, prefill, back, 3, 4, 0)
	requireFilled(t, prefill, 0xA1, 3, 4)
	requireFilled(t, prefill, 0xB2, 0)
	requireDone(t, kept, lease.ReasonRead)
	require.EqualValues(t, 1, prefill.Stats().Worker.Verified)
	require.Zero(t, prefill.Stats().Worker.HeartbeatsSent, "nothing renews a decoder's blocks")

	fill(prefill, 0xC3, 1)
	second, err := p.Publish(deadline(t), []int{3, 4, 0, 1}, 56)
	require.NoError(t, err)
	require.True(t, second.Params().DoRemotePrefill, "an ordinary lease again")
	require.Nil(t, second.Params().RemoteBlocksExpiry)
	last := fetched(t, decode, second.Params(), 1, 2, 3, 4)
	requireFilled(t, decode, 0xC3, 4)
	requireDone(t, second, lease.ReasonRead)

	for _, h := range []*nixlgo.Held{d, p} {
		_, err := h.Publish(deadline(t), []int{7}, 16)
		require.ErrorIs(t, err, lease.ErrInvalid, "once")
		require.NoError(t, h.Close())
	}
	require.NoError(t, last.Close())
	_, err = last.Publish(deadline(t), []int{7}, 16)
	require.ErrorIs(t, err, lease.ErrInvalid)
	for _, n := range []*nixlgo.Node{prefill, decode} {
		left, err := n.Drain(deadline(t))
		require.NoError(t, err)
		require.Empty(t, left)
		require.Eventually(t, func() bool {
			s := n.Stats().Scheduler
			return s.Running+s.Pinned+s.Tracked+s.UsedSlots == 0
		}, 20*time.Second, time.Millisecond)
	}
}

// Specification, "Bidirectional KV Transfer"; peer-tests A4.23, A4.25: blocks that will be gone before a READ could be proved are
// declined without one, and so are those that are gone.
func TestTurnThatCannotBeProvedInTimeIsDeclined(t *testing.T) {
	prefill := open(t, twoWays)
	turn := func(change func(*nixlgo.Config)) (*nixlgo.Node, *nixlgo.Publication) {
		decode := open(t, twoWays, change)
		first, err := prefill.Publish(deadline(t), "turn-1", []int{1}, 16)
		require.NoError(t, err)
		d := fetched(t, decode, first.Params(), 5)
		requireDone(t, first, lease.ReasonRead)
		kept, err := d.Publish(deadline(t), []int{5}, 16)
		require.NoError(t, err)
		return decode, kept
	}
	none := func(*nixlgo.Config) {}
	reads := prefill.Stats().Worker.Reads

	t.Run("too little time is left", func(t *testing.T) {
		_, kept := turn(func(c *nixlgo.Config) { c.Lease.DecoderTTL = 2 * time.Second })
		err := prefill.Fetch(deadline(t), kept.Params(), []int{3})
		require.ErrorIs(t, err, lease.ErrExpired)
		requireFilled(t, prefill, 0, 3)
		requireDone(t, kept, lease.ReasonRead) // a declined turn is let go of
	})
	t.Run("the owner's clock says so", func(t *testing.T) {
		_, kept := turn(func(c *nixlgo.Config) { c.Lease.Slots = lease.NoSlot })
		p := kept.Params()
		soon := *p.RemoteBlocksExpiry - 478
		p.RemoteBlocksExpiry, p.RemoteBlocksTTL, p.Lease = &soon, 0, nil // as of a decoder of vLLM's
		require.ErrorIs(t, prefill.Fetch(deadline(t), p, []int{3}), lease.ErrExpired)
	})
	t.Run("the decoder took them back", func(t *testing.T) {
		_, kept := turn(none)
		p := kept.Params()
		require.NoError(t, kept.Revoke())
		requireDone(t, kept, lease.ReasonAborted)
		err := prefill.Fetch(deadline(t), p, []int{3})
		require.ErrorIs(t, err, lease.ErrLapsed)
		requireFilled(t, prefill, 0, 3)
	})
	require.EqualValues(t, reads+1, prefill.Stats().Worker.Reads, "of the one that could not be known before")
	t.Run("nobody fetches it", func(t *testing.T) {
		_, kept := turn(func(c *nixlgo.Config) { c.Lease.DecoderTTL = 50 * time.Millisecond })
		requireDone(t, kept, lease.ReasonExpired)
	})
	t.Run("nobody needs it", func(t *testing.T) {
		_, kept := turn(none)
		require.NoError(t, prefill.Release(deadline(t), kept.Params()))
		requireDone(t, kept, lease.ReasonRead)
	})
}

// A node that is not Bidirectional takes no part in turns, and one that is names what it still has open.
func TestTurnsAreAskedFor(t *testing.T) {
	plain, both := open(t), open(t, twoWays)
	p, err := plain.Publish(deadline(t), "turn-1", []int{1}, 16)
	require.NoError(t, err)
	h := fetched(t, both, p.Params(), 5)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	left, err := both.Drain(ended)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, nixlgo.LeftFetched, left[0].Reason)
	_, err = h.Publish(deadline(t), []int{5}, 16)
	require.ErrorIs(t, err, nixlgo.ErrDraining)
	require.NoError(t, h.Close())
	left, err = both.Drain(deadline(t))
	require.NoError(t, err)
	require.Empty(t, left)

	other := open(t, twoWays)
	q, err := other.Publish(deadline(t), "turn-1", []int{1}, 16)
	require.NoError(t, err)
	h = fetched(t, plain, q.Params(), 5)
	_, err = h.Publish(deadline(t), []int{5}, 16)
	require.ErrorIs(t, err, lease.ErrInvalid)
	require.ErrorContains(t, err, "Bidirectional")
	back := *q.Params()
	back.DoRemotePrefill, back.DoRemoteDecode = false, true
	_, err = plain.Hold(&back)
	require.ErrorIs(t, err, lease.ErrInvalid)

	h = fetched(t, other, republish(t, plain, 2), 5)
	for want, blocks := range map[string][]int{"block id 8": {8}, "twice": {3, 3}, "no blocks": {}} {
		_, err = h.Publish(deadline(t), blocks, 16)
		require.ErrorIs(t, err, lease.ErrInvalid, want)
		require.ErrorContains(t, err, want)
	}
	_, err = other.Publish(deadline(t), "busy", []int{6}, 16)
	require.NoError(t, err)
	_, err = h.Publish(deadline(t), []int{6}, 16)
	require.ErrorIs(t, err, nixlgo.ErrBusy)
	_, err = h.Publish(ended, []int{3}, 16)
	require.ErrorIs(t, err, context.Canceled)
	require.Eventually(t, func() bool { return other.Stats().Scheduler.PinnedBlocks == 1 }, 20*time.Second, time.Millisecond, "the turn is not kept")
}

// Both roles in both processes at once, over the real library: each node is the prefill side of some conversations and the
// decode side of others, and every turn of each is its own.
func TestConversationsGoBothWaysAtOnce(t *testing.T) {
	const conversations, turns = 8, 6
	wide := func(c *nixlgo.Config) { c.Blocks = 2 * conversations }
	a, b := open(t, twoWays, wide), open(t, twoWays, wide)
	var wg sync.WaitGroup
	failed := make(chan error, conversations)
	for i := range conversations {
		from, to := a, b
		if i%2 == 1 {
			from, to = b, a
		}
		wg.Go(func() {
			failed <- func() error {
				block := []int{i} // of both nodes
				fill(from, byte(i+1), i)
				p, err := from.Publish(deadline(t), fmt.Sprint("conversation-", i), block, 16)
				if err != nil {
					return err
				}
				for turn := range turns {
					h, err := to.Hold(through(t, p.Params()))
					if err != nil {
						return err
					}
					if err := h.Fetch(deadline(t), block); err != nil {
						return err
					}
					if got, want := to.Block(1, i)[100], byte(i+1+turn*conversations); got != want {
						return fmt.Errorf("conversation %d, turn %d: %d, want %d", i, turn, got, want)
					}
					<-p.Done()
					if p.Reason() != lease.ReasonRead {
						return fmt.Errorf("conversation %d, turn %d: %v", i, turn, p.Reason())
					}
					fill(to, byte(i+1+(turn+1)*conversations), i)
					if p, err = h.Publish(deadline(t), block, 16); err != nil {
						return err
					}
					from, to = to, from
				}
				return p.Revoke()
			}()
		})
	}
	wg.Wait()
	for range conversations {
		require.NoError(t, <-failed)
	}
	for _, n := range []*nixlgo.Node{a, b} {
		_, err := n.Drain(deadline(t))
		require.NoError(t, err)
		s := n.Stats()
		require.EqualValues(t, conversations*turns/2, s.Worker.Verified)
		require.Zero(t, s.Scheduler.Running+s.Scheduler.Pinned+s.Scheduler.Tracked)
	}
}
