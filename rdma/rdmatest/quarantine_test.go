package rdmatest_test

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// fillNode puts v into every byte of blocks.
func fillNode(n *nixlgo.Node, v byte, ids ...int) {
	for _, b := range ids {
		for l := range layers {
			copy(n.Block(l, b), bytes.Repeat([]byte{v}, blockLen))
		}
	}
}

func requireFilledNode(t *testing.T, n *nixlgo.Node, v byte, ids ...int) {
	t.Helper()
	for _, b := range ids {
		for l := range layers {
			require.Equal(t, bytes.Repeat([]byte{v}, blockLen), n.Block(l, b), "layer %d, block %d", l, b)
		}
	}
}

// steps waits until n has stepped, as a publication does.
func steps(t *testing.T, n *nixlgo.Node, id string, block int) {
	t.Helper()
	p, err := n.Publish(t.Context(), id, []int{block}, 16)
	require.NoError(t, err)
	require.NoError(t, p.Revoke())
	<-p.Done()
}

// nixl#2044, vllm#56104, cases.md 3: a READ that nobody wants any more still writes. Until it has ended, its blocks are given to
// nobody, and what it wrote is wiped then.
func TestNodeKeepsBlocksOfAReadThatCanStillWrite(t *testing.T) {
	for name, end := range map[string]func(cancel func(), r *rdmatest.Read){
		"given up": func(cancel func(), _ *rdmatest.Read) { cancel() },
		"failed":   func(_ func(), r *rdmatest.Read) { r.Break(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			net := rdmatest.NewNetwork()
			owner, reader := openNode(t, net, "owner"), openNode(t, net, "reader")
			fillNode(owner, 0xA1, 3, 4)
			fillNode(owner, 0xB2, 5)
			p, err := owner.Publish(t.Context(), "req", []int{3, 4}, 32)
			require.NoError(t, err)
			next, err := owner.Publish(t.Context(), "next", []int{5}, 16)
			require.NoError(t, err)
			h, err := reader.Hold(p.Params())
			require.NoError(t, err)
			net.HoldReads(true)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			fetched := make(chan error, 1)
			go func() { fetched <- h.Fetch(ctx, []int{7, 8}) }()
			require.Eventually(t, func() bool { return len(net.Reads()) == 1 }, 20*time.Second, 100*time.Microsecond)
			zombie := net.Reads()[0]
			zombie.Land(0, blockLen+8)
			end(cancel, zombie)
			require.ErrorIs(t, <-fetched, nixlgo.ErrQuarantined)
			for _, b := range []int{7, 8} {
				_, err = reader.Publish(t.Context(), "mine", []int{b}, 16)
				require.ErrorIs(t, err, nixlgo.ErrBusy, "block %d", b)
				require.ErrorIs(t, reader.Fetch(t.Context(), next.Params(), []int{b}), nixlgo.ErrBusy, "block %d", b)
			}
			steps(t, reader, "any", 0)
			select {
			case <-h.Settled():
				t.Fatal("settled while its READ can write")
			default:
			}
			require.True(t, zombie.Deliver())
			<-h.Settled()
			requireFilledNode(t, reader, 0, 7, 8)
			net.HoldReads(false)
			require.NoError(t, reader.Fetch(t.Context(), next.Params(), []int{7}))
			requireFilledNode(t, reader, 0xB2, 7)
			requireFilledNode(t, reader, 0, 8)
		})
	}
}

// On an error the blocks are zero, whatever they held before, also when no READ was made.
func TestNodeWipesTheBlocksOfAFetchThatFailed(t *testing.T) {
	net := rdmatest.NewNetwork()
	owner, reader := openNode(t, net, "owner"), openNode(t, net, "reader")
	t.Run("before a READ", func(t *testing.T) {
		port, dialled := mute(t)
		fillNode(reader, 0xC3, 7, 8)
		ctx, cancel := context.WithCancel(t.Context())
		fetched := make(chan error, 1)
		go func() {
			fetched <- reader.Fetch(ctx, &lease.Params{DoRemotePrefill: true, RemoteBlockIDs: [][]int{{1}}, RemoteEngineID: "mute", RemoteRequestID: "req",
				RemoteHost: "127.0.0.1", RemotePort: port, TPSize: 1, Lease: &lease.SlotRef{Nonce: 1}}, []int{7})
		}()
		require.Eventually(t, func() bool { return dialled.Load() == 1 && reader.Stats().Worker.Waiting == 1 }, 20*time.Second, 100*time.Microsecond)
		cancel()
		require.ErrorIs(t, <-fetched, context.Canceled)
		requireFilledNode(t, reader, 0, 7)
		requireFilledNode(t, reader, 0xC3, 8)
	})
	t.Run("refused by its lease", func(t *testing.T) {
		fillNode(owner, 0xA1, 3)
		fillNode(reader, 0xC3, 7, 8)
		p, err := owner.Publish(t.Context(), "req", []int{3}, 16)
		require.NoError(t, err)
		require.NoError(t, p.Revoke())
		<-p.Done()
		require.ErrorIs(t, reader.Fetch(t.Context(), p.Params(), []int{7}), lease.ErrLapsed)
		requireFilledNode(t, reader, 0, 7)
		requireFilledNode(t, reader, 0xC3, 8)
	})
}

// A Fetch that the scheduler refuses has done nothing: the lease is renewed on, the owner is not told anything, and the hold can
// still be released.
func TestNodeHoldsOnWhenItsFetchIsRefused(t *testing.T) {
	net := rdmatest.NewNetwork()
	owner, reader := openNode(t, net, "owner"), openNode(t, net, "reader")
	for name, change := range map[string]func(*lease.Params){
		"no blocks are offered": func(p *lease.Params) { p.RemoteBlockIDs = nil },
		"an empty list of them": func(p *lease.Params) { p.RemoteBlockIDs = [][]int{{}} },
		"two groups of blocks":  func(p *lease.Params) { p.RemoteBlockIDs = append(p.RemoteBlockIDs, []int{4}) },
	} {
		t.Run(name, func(t *testing.T) {
			p, err := owner.Publish(t.Context(), "req", []int{3}, 16)
			require.NoError(t, err)
			other, err := owner.Publish(t.Context(), "other", []int{4}, 16)
			require.NoError(t, err)
			require.NoError(t, reader.Fetch(t.Context(), other.Params(), []int{4}), "so that the two are connected")
			<-other.Done()
			params := p.Params()
			change(params)
			h, err := reader.Hold(params)
			require.NoError(t, err)
			for range 2 {
				require.ErrorIs(t, h.Fetch(t.Context(), []int{5}), lease.ErrInvalid)
				require.EqualValues(t, 1, reader.Stats().Scheduler.Tracked, "renewed")
			}
			steps(t, reader, "any", 5) // with what it might have told the owner; and the block is free
			steps(t, owner, "any", 5)
			select {
			case <-p.Done():
				t.Fatal("the owner was told that nobody reads")
			default:
			}
			require.NoError(t, h.Release(t.Context()))
			<-p.Done()
			require.Equal(t, lease.ReasonRead, p.Reason())
			require.Zero(t, reader.Stats().Scheduler.Tracked)
		})
	}
}

// A turn is good for a reader when Publish returns, so there is none without a step that writes its nonce.
func TestNextTurnIsPublishedByTheStepThatWritesItsNonce(t *testing.T) {
	net := rdmatest.NewNetwork()
	both := lease.DefaultConfig()
	both.Bidirectional = true
	open := func(name string) *nixlgo.Node {
		n, err := nixlgo.New(nixlgo.Config{Engine: name, Layers: layers, Blocks: blocks, BlockBytes: blockLen, Fabric: net.NewFabric(name), Lease: both})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, n.Close()) })
		return n
	}
	run := func(n *nixlgo.Node) (stop func()) {
		ctx, cancel := context.WithCancel(context.Background())
		ran := make(chan error, 1)
		go func() { ran <- n.Run(ctx) }()
		return func() {
			cancel()
			require.NoError(t, <-ran)
		}
	}
	prefill, decode := open("prefill"), open("decode")
	defer run(prefill)()
	stop := run(decode)
	turn := func(id string) *nixlgo.Held {
		p, err := prefill.Publish(t.Context(), id, []int{3}, 16)
		require.NoError(t, err)
		h, err := decode.Hold(p.Params())
		require.NoError(t, err)
		require.NoError(t, h.Fetch(t.Context(), []int{5}))
		<-p.Done()
		return h
	}
	first, second := turn("a"), turn("b")
	stop()
	ended, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err := first.Publish(ended, []int{5}, 16)
	require.ErrorIs(t, err, context.DeadlineExceeded, "no step has written its nonce")

	published := make(chan *nixlgo.Publication)
	go func() {
		p, err := second.Publish(t.Context(), []int{6}, 16)
		if err != nil {
			t.Error(err)
		}
		published <- p
	}()
	defer run(decode)()
	kept := <-published
	require.NotNil(t, kept)
	require.NotNil(t, kept.Params().Lease)
	require.NoError(t, prefill.Fetch(t.Context(), kept.Params(), []int{7}))
	<-kept.Done()
	require.Equal(t, lease.ReasonRead, kept.Reason())
}

// A peer that has read the slots can end the life of a request that is fetched and not yet published: its turn is refused.
func TestATurnWhoseLeaseWasEndedIsRefused(t *testing.T) {
	net := rdmatest.NewNetwork()
	open := func(name string) (*nixlgo.Node, *rdmatest.Fabric) {
		f := net.NewFabric(name)
		c := nixlgo.Config{Engine: name, Layers: layers, Blocks: blocks, BlockBytes: blockLen, Fabric: f, Lease: lease.DefaultConfig()}
		c.Lease.Bidirectional = true
		n, err := nixlgo.New(c)
		require.NoError(t, err)
		go n.Run(context.Background())
		t.Cleanup(func() { require.NoError(t, n.Close()) })
		return n, f
	}
	owner, _ := open("owner")
	reader, rf := open("reader")
	p, err := owner.Publish(t.Context(), "req", []int{3}, 16)
	require.NoError(t, err)
	h, err := reader.Hold(p.Params())
	require.NoError(t, err)
	require.NoError(t, h.Fetch(t.Context(), []int{5}))
	l := reader.Leases()[0]
	evil := net.NewFabric("evil")
	meta, err := rf.Metadata()
	require.NoError(t, err)
	agent, err := evil.Load(meta)
	require.NoError(t, err)
	require.NoError(t, evil.Notify(agent, lease.AppendReadComplete(nil, l.Request, 1, l.Nonce)))
	require.Eventually(t, func() bool { return len(reader.Leases()) == 0 }, time.Minute, time.Millisecond)
	require.Eventually(t, func() bool { return reader.Stats().Scheduler.EarlyReports == 1 }, time.Minute, time.Millisecond)
	_, err = h.Publish(t.Context(), []int{5}, 16)
	require.ErrorIs(t, err, lease.ErrAborted)
	q, err := reader.Publish(t.Context(), "again", []int{5}, 16)
	require.NoError(t, err, "the blocks are the caller's")
	require.NoError(t, q.Revoke())
	<-q.Done()
}
