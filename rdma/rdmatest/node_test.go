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
