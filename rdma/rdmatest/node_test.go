package rdmatest_test

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

func openNode(t *testing.T, net *rdmatest.Network, name string) *nixlgo.Node {
	t.Helper()
	n, err := nixlgo.New(nixlgo.Config{Engine: name, Layers: layers, Blocks: blocks, BlockBytes: blockLen, Fabric: net.NewFabric(name)})
	require.NoError(t, err)
	ran := make(chan error, 1)
	go func() { ran <- n.Run(context.Background()) }()
	t.Cleanup(func() {
		require.NoError(t, n.Close())
		require.NoError(t, <-ran)
	})
	return n
}

// A program that uses Node is tested without NIXL: everything above the fabric is real.
func TestNodeRunsOnAnInMemoryFabric(t *testing.T) {
	net := rdmatest.NewNetwork()
	owner, reader := openNode(t, net, "owner"), openNode(t, net, "reader")
	copy(owner.Block(1, 3), bytes.Repeat([]byte{0xA1}, blockLen))
	p, err := owner.Publish(t.Context(), "req", []int{3}, 16)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(t, reader.Fetch(ctx, p.Params(), []int{5}))
	require.Equal(t, bytes.Repeat([]byte{0xA1}, blockLen), reader.Block(1, 5))
	<-p.Done()
	require.Equal(t, lease.ReasonRead, p.Reason())
	require.EqualValues(t, 1, reader.Stats().Worker.Verified)
}

// nixl#2044, cases.md 3: blocks in quarantine are not drained before their READ has ended.
func TestDrainWaitsForTheQuarantine(t *testing.T) {
	net := rdmatest.NewNetwork()
	owner, reader := openNode(t, net, "owner"), openNode(t, net, "reader")
	p, err := owner.Publish(t.Context(), "req", []int{3}, 16)
	require.NoError(t, err)
	net.HoldReads(true)
	ctx, cancel := context.WithCancelCause(t.Context())
	given := errors.New("given up")
	fetched := make(chan error, 1)
	go func() { fetched <- reader.Fetch(ctx, p.Params(), []int{5}) }()
	require.Eventually(t, func() bool { return len(net.Reads()) == 1 }, 20*time.Second, 100*time.Microsecond)
	cancel(given)
	err = <-fetched
	require.ErrorIs(t, err, given)
	require.ErrorIs(t, err, nixlgo.ErrQuarantined)
	short, done := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer done()
	left, err := reader.Drain(short)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, []nixlgo.Left{{Request: "req", Engine: "owner", Blocks: []int{5}, Reason: nixlgo.LeftQuarantined}}, left)
	require.True(t, net.Reads()[0].Deliver())
	left, err = reader.Drain(t.Context())
	require.NoError(t, err)
	require.Empty(t, left)
	require.Equal(t, make([]byte, blockLen), reader.Block(0, 5), "nothing unverified stays")
}

// Nobody waits for blocks that went with their node.
func TestCloseSettlesWhatIsInQuarantine(t *testing.T) {
	net := rdmatest.NewNetwork()
	owner, reader := openNode(t, net, "owner"), openNode(t, net, "reader")
	p, err := owner.Publish(t.Context(), "req", []int{3}, 16)
	require.NoError(t, err)
	net.HoldReads(true)
	h, err := reader.Hold(p.Params())
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	fetched := make(chan error, 1)
	go func() { fetched <- h.Fetch(ctx, []int{5}) }()
	require.Eventually(t, func() bool { return len(net.Reads()) == 1 }, 20*time.Second, 100*time.Microsecond)
	cancel()
	require.ErrorIs(t, <-fetched, nixlgo.ErrQuarantined)
	require.NoError(t, reader.Close())
	<-h.Settled()
}

// A node closes the fabric that it was given, also when it cannot be opened.
func TestNodeClosesItsFabric(t *testing.T) {
	net := rdmatest.NewNetwork()
	told := errors.New("told so")
	for _, op := range []rdmatest.Op{rdmatest.OpAlloc, rdmatest.OpMetadata} {
		f := net.NewFabric("node")
		f.Fail(op, 1, told)
		_, err := nixlgo.New(nixlgo.Config{Layers: 1, Blocks: 1, BlockBytes: 64, Fabric: f})
		require.ErrorIs(t, err, told)
		_, err = f.Metadata()
		require.ErrorContains(t, err, "closed")
	}
	f := net.NewFabric("node")
	_, err := nixlgo.New(nixlgo.Config{Blocks: 1, BlockBytes: 64, Fabric: f})
	require.ErrorContains(t, err, "0 layers")
	_, err = f.Metadata()
	require.ErrorContains(t, err, "closed")
}

// The ids that a node gives its own fetches are no request's: every id can be published, whatever is being fetched.
func TestNoRequestIDMeetsTheNodesOwn(t *testing.T) {
	net := rdmatest.NewNetwork()
	owner, reader := openNode(t, net, "owner"), openNode(t, net, "reader")
	p, err := owner.Publish(t.Context(), "req", []int{3}, 16)
	require.NoError(t, err)
	net.HoldReads(true)
	fetched := make(chan error, 1)
	go func() { fetched <- reader.Fetch(t.Context(), p.Params(), []int{5}) }()
	require.Eventually(t, func() bool { return len(net.Reads()) == 1 }, 20*time.Second, 100*time.Microsecond)
	for i, id := range []string{"r0", "r1", "hold of r1", "r2"} {
		own, err := reader.Publish(t.Context(), id, []int{i}, 16)
		require.NoError(t, err, id)
		require.NoError(t, own.Revoke())
		<-own.Done()
	}
	net.HoldReads(false)
	require.True(t, net.Reads()[0].Deliver())
	require.NoError(t, <-fetched)
}

// A publication that cannot be leaves nothing behind: its blocks and its id are free, and a drain waits for nothing.
func TestPublicationThatCannotBeLeavesNothing(t *testing.T) {
	n := openNode(t, rdmatest.NewNetwork(), "owner")
	for name, publish := range map[string]func() (*nixlgo.Publication, error){
		"no blocks":           func() (*nixlgo.Publication, error) { return n.Publish(t.Context(), "req", nil, 0) },
		"less than no tokens": func() (*nixlgo.Publication, error) { return n.Publish(t.Context(), "req", []int{3}, -1) },
	} {
		_, err := publish()
		require.ErrorIs(t, err, lease.ErrInvalid, name)
	}
	p, err := n.Publish(t.Context(), "req", []int{3}, 16)
	require.NoError(t, err)
	require.NoError(t, p.Revoke())
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	left, err := n.Drain(ctx)
	require.NoError(t, err, "%v", left)
}
