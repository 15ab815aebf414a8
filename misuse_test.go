package nixlgo

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// A client that hangs up before the step that would have admitted its request: no plan has it, so no outcome names it.
func TestAPublishThatNoStepTookLeavesNothingBehind(t *testing.T) {
	var hangUp context.CancelFunc
	n, err := New(Config{Layers: 1, Blocks: 2, BlockBytes: 8, Fabric: rdmatest.NewNetwork().NewFabric("P"), Trace: rdma.Trace{
		Begin: func(context.Context, rdma.Request) func(string, error) { hangUp(); return nil }}})
	require.NoError(t, err)
	defer n.Close()
	for range 2 { // the same id and the same block again
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		hangUp = cancel
		_, err = n.Publish(ctx, "request", []int{1}, 1)
		require.ErrorIs(t, err, context.Canceled)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = n.Publish(gone, "request", []int{1}, 1)
	require.ErrorIs(t, err, context.Canceled)
	left, err := n.Drain(gone)
	require.NoError(t, err)
	require.Empty(t, left)
}

// A fetch that is given up wipes its blocks, and Close unmaps them.
func TestFetchGivenUpBesideCloseLeavesTheMemoryAlone(t *testing.T) {
	net := rdmatest.NewNetwork()
	owner, err := New(Config{Layers: 1, Blocks: 1, BlockBytes: 8, Fabric: net.NewFabric("P")})
	require.NoError(t, err)
	defer owner.Close()
	go owner.Run(t.Context())
	p, err := owner.Publish(t.Context(), "request", []int{0}, 1)
	require.NoError(t, err)
	n, err := New(Config{Layers: 1, Blocks: 1, BlockBytes: 8, Fabric: net.NewFabric("D")})
	require.NoError(t, err)
	h, err := n.Hold(p.Params())
	require.NoError(t, err)
	require.NoError(t, h.pull(t.Context(), []int{0})) // no step has seen it: nothing is active, and the blocks are wiped at once
	require.NoError(t, n.Close())
	err = h.abandon(func(err error) error { return err }, context.Canceled)
	require.ErrorIs(t, err, ErrClosed)
	require.ErrorIs(t, err, context.Canceled)
}

// net/http recovers from what a handler's call panics with.
func TestTraceThatPanicsDoesNotHangTheNode(t *testing.T) {
	n, err := New(Config{Layers: 1, Blocks: 2, BlockBytes: 8, Fabric: rdmatest.NewNetwork().NewFabric("P"), Trace: rdma.Trace{
		Begin: func(context.Context, rdma.Request) func(string, error) { panic("hook") }}})
	require.NoError(t, err)
	require.Panics(t, func() { _, _ = n.Publish(t.Context(), "request", []int{0}, 1) })
	n.Stats()
	require.NoError(t, n.Close())
}

func TestConfigurationsThatCannotBeAreRefusedBeforeAnythingIsMade(t *testing.T) {
	for _, c := range []Config{
		{Layers: 1, Blocks: 1 << 33, BlockBytes: 1}, {Layers: 1 << 33, Blocks: 1, BlockBytes: 1}, {Layers: 1 << 13, Blocks: 1 << 12, BlockBytes: 1},
		{Layers: 1 << 40, Blocks: 1 << 40, BlockBytes: 1 << 40}, {Layers: 1, Blocks: 1, BlockBytes: 1, Idle: -1},
	} {
		c.Fabric = rdmatest.NewNetwork().NewFabric("P")
		_, err := New(c)
		require.ErrorIs(t, err, rdma.ErrConfig)
	}
}

func TestNodeSaysThatNothingRunsIt(t *testing.T) {
	n, err := New(Config{HoldOnly: true, Fabric: rdmatest.NewNetwork().NewFabric("P")})
	require.NoError(t, err)
	defer n.Close()
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err = n.Publish(short, "request", []int{0}, 1)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "Run is not running")
}

func TestFetchSaysWhyTheHandshakeFailed(t *testing.T) {
	net := rdmatest.NewNetwork()
	open := func(name string, change func(*Config)) *Node {
		c := Config{Layers: 1, Blocks: 1, BlockBytes: 8, Fabric: net.NewFabric(name)}
		change(&c)
		n, err := New(c)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, n.Close()) })
		go n.Run(context.Background())
		return n
	}
	owner := open("P", func(*Config) {})
	keyed := open("keyed", func(c *Config) { c.Key = []byte("0123456789abcdef") })
	for want, n := range map[error]*Node{rdma.ErrCompatibility: open("D", func(c *Config) { c.Compatibility = "another" }), rdma.ErrKey: keyed} {
		p, err := owner.Publish(t.Context(), "request", []int{0}, 1)
		require.NoError(t, err)
		err = n.Fetch(t.Context(), p.Params(), []int{0})
		require.ErrorIs(t, err, lease.ErrHandshake)
		require.ErrorIs(t, err, want)
		require.NoError(t, p.Revoke())
		<-p.Done()
	}
}
