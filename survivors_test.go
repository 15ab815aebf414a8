package nixlgo

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// stages records how the stages of requests ended, and those that did not.
type stages struct {
	open  int
	ended []error
}

func (s *stages) trace() rdma.Trace {
	return rdma.Trace{Begin: func(context.Context, rdma.Request) func(string, error) {
		s.open++
		return func(_ string, err error) {
			s.open--
			s.ended = append(s.ended, err)
		}
	}}
}

func small(t *testing.T, net *rdmatest.Network, name string, change ...func(*Config)) *Node {
	t.Helper()
	c := Config{Layers: 2, Blocks: 4, BlockBytes: 8, Fabric: net.NewFabric(name)}
	for _, f := range change {
		f(&c)
	}
	n, err := New(c)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, n.Close()) })
	return n
}

// run steps n until the test, or stop, ends it.
func run(t *testing.T, n *Node) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan error, 1)
	go func() { ran <- n.Run(ctx) }()
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			cancel()
			require.NoError(t, <-ran)
		}
	}
	t.Cleanup(stop)
	return stop
}

// What a caller appends to a block does not go into the next one.
func TestABlockEndsWhereTheNextBegins(t *testing.T) {
	n := small(t, rdmatest.NewNetwork(), "P")
	for l := range 2 {
		for b := range 4 {
			require.Len(t, n.Block(l, b), 8)
			require.Equal(t, 8, cap(n.Block(l, b)))
			_ = append(n.Block(l, b), 0xff)
		}
	}
	for l := range 2 {
		for b := range 4 {
			require.Equal(t, make([]byte, 8), n.Block(l, b))
		}
	}
}

func TestTokensBeyondTheBlocksAreRefused(t *testing.T) {
	n := small(t, rdmatest.NewNetwork(), "P", func(c *Config) { c.BlockTokens = 10 })
	run(t, n)
	_, err := n.Publish(t.Context(), "request", []int{0, 1}, 21)
	require.ErrorIs(t, err, lease.ErrInvalid)
	p, err := n.Publish(t.Context(), "request", []int{0, 1}, 20)
	require.NoError(t, err)
	require.Equal(t, 20, p.Params().RemoteNumTokens)
}

// What is over is forgotten: the scheduler keeps no fetch of a node's, whatever became of it.
func TestFetchesThatAreOverAreForgotten(t *testing.T) {
	net := rdmatest.NewNetwork()
	for name, end := range map[string]func(cancel func(), r *rdmatest.Read){
		"read":     func(func(), *rdmatest.Read) {},
		"given up": func(cancel func(), _ *rdmatest.Read) { cancel() },
		"failed":   func(_ func(), r *rdmatest.Read) { r.Break(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			owner, reader := small(t, net, "P "+name), small(t, net, "D "+name)
			run(t, owner)
			stop := run(t, reader)
			p, err := owner.Publish(t.Context(), name, []int{1}, 1)
			require.NoError(t, err)
			h, err := reader.Hold(p.Params())
			require.NoError(t, err)
			net.HoldReads(true)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			fetched := make(chan error, 1)
			go func() { fetched <- h.Fetch(ctx, []int{2}) }()
			require.Eventually(t, func() bool { return len(net.Reads()) == 1 }, 20*time.Second, 100*time.Microsecond)
			r := net.Reads()[0]
			end(cancel, r)
			if name != "read" {
				require.ErrorIs(t, <-fetched, ErrQuarantined)
			}
			net.HoldReads(false)
			r.Deliver()
			if name == "read" {
				require.NoError(t, <-fetched)
			} else {
				<-h.Settled()
			}
			stop()
			require.NoError(t, reader.sched.OnNewRequest(time.Now(), h.id, p.Params()), "the id is free")
		})
	}
}

// A turn that cannot be leaves its blocks to the caller, and the fetch open for another try.
func TestATurnThatCannotBeKeepsNoBlock(t *testing.T) {
	net := rdmatest.NewNetwork()
	owner := small(t, net, "P")
	reader := small(t, net, "D", func(c *Config) {
		c.Lease = lease.DefaultConfig()
		c.Lease.Bidirectional = true
	})
	run(t, owner)
	run(t, reader)
	p, err := owner.Publish(t.Context(), "request", []int{1}, 1)
	require.NoError(t, err)
	h, err := reader.Hold(p.Params())
	require.NoError(t, err)
	require.NoError(t, h.Fetch(t.Context(), []int{2}))
	for _, tokens := range []int{-1, 16, 33} {
		_, err = h.Publish(t.Context(), []int{2, 3}, tokens)
		require.ErrorIs(t, err, lease.ErrInvalid, "%d tokens in two blocks of 16", tokens)
	}
	turn, err := h.Publish(t.Context(), []int{2, 3}, 20)
	require.NoError(t, err)
	require.NoError(t, turn.Revoke())
	<-turn.Done()
}

// Every stage that a trace saw begin it sees end: the lease that ran out as expired, and what Close ends as closed.
func TestATraceSeesEveryStageEnd(t *testing.T) {
	net := rdmatest.NewNetwork()
	var s stages
	owner := small(t, net, "P", func(c *Config) {
		c.Trace = s.trace()
		c.Lease = lease.DefaultConfig()
		c.Lease.Duration = 50 * time.Millisecond
	})
	stop := run(t, owner)
	p, err := owner.Publish(t.Context(), "request", []int{1}, 1)
	require.NoError(t, err)
	<-p.Done()
	stop()
	require.Equal(t, lease.ReasonExpired, p.Reason())
	require.Zero(t, s.open)
	require.Equal(t, []error{lease.ErrExpired}, s.ended)

	var last stages
	node := small(t, net, "D", func(c *Config) { c.Trace = last.trace() })
	run(t, node)
	offered := p.Params()
	_, err = node.Hold(offered)
	require.NoError(t, err)
	_, err = node.Publish(t.Context(), "own", []int{1}, 1)
	require.NoError(t, err)
	require.Equal(t, 2, last.open)
	require.NoError(t, node.Close())
	require.Zero(t, last.open)
	require.Len(t, last.ended, 2)
	for _, err := range last.ended {
		require.True(t, errors.Is(err, ErrClosed), "%v", err)
	}
}

// The blocks of a fetch that was given up before any step saw it are zero as well, and free at once.
func TestAFetchThatNoStepTookWipesItsBlocks(t *testing.T) {
	net := rdmatest.NewNetwork()
	owner := small(t, net, "P")
	stop := run(t, owner)
	p, err := owner.Publish(t.Context(), "request", []int{1}, 1)
	require.NoError(t, err)
	stop()
	ctx, cancel := context.WithCancel(t.Context())
	reader := small(t, net, "D", func(c *Config) {
		c.Trace.Begin = func(_ context.Context, r rdma.Request) func(string, error) {
			if r.Stage == rdma.Fetching && r.Blocks > 0 {
				cancel()
			}
			return nil
		}
	})
	for l := range 2 {
		for b := range 4 {
			copy(reader.Block(l, b), "whatever")
		}
	}
	h, err := reader.Hold(p.Params())
	require.NoError(t, err)
	err = h.Fetch(ctx, []int{2})
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, ErrQuarantined)
	for l := range 2 {
		require.Equal(t, make([]byte, 8), reader.Block(l, 2))
		require.Equal(t, "whatever", string(reader.Block(l, 3)))
	}
	require.NoError(t, reader.claim("another", []int{2}))
}
