package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

// benchNode is a Node of either side that runs, for blocks of one size.
type benchNode struct {
	*nixlgo.Node
	shape transferShape
	stop  context.CancelFunc
	ran   chan struct{}

	mu       sync.Mutex
	checking time.Time     // begin of the last check
	verify   time.Duration // how long it took
	left     time.Duration // of the last lease that ended

	published *nixlgo.Publication
}

// openBenchNode starts a Node at host, whose memory holds one request of shape s.
func openBenchNode(ctx context.Context, host, backend string, s transferShape, leaseTime, wait time.Duration) (*benchNode, error) {
	b := &benchNode{shape: s, ran: make(chan struct{})}
	cfg := lease.DefaultConfig()
	cfg.Duration = leaseTime
	var err error
	b.Node, err = nixlgo.New(nixlgo.Config{
		Host: host, Layers: s.Layers, Blocks: s.Batch / s.Layers, BlockBytes: s.BlockBytes, Lease: cfg, Backend: backend,
		HandshakeTimeout: wait, ReadTimeout: wait,
		Trace: rdma.Trace{
			Verify: func(lease.Pull) func(error) {
				b.mu.Lock()
				defer b.mu.Unlock()
				b.checking = time.Now()
				return func(error) {
					b.mu.Lock()
					defer b.mu.Unlock()
					b.verify = time.Since(b.checking)
				}
			},
			Lease: lease.TableTrace{Ended: func(_ lease.Ended, _, left time.Duration) {
				b.mu.Lock()
				defer b.mu.Unlock()
				b.left = left
			}},
		},
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	if err != nil {
		return nil, err
	}
	ctx, b.stop = context.WithCancel(ctx)
	go func() {
		defer close(b.ran)
		b.Run(ctx)
	}()
	return b, nil
}

func (b *benchNode) close() error {
	if b == nil {
		return nil
	}
	b.stop()
	<-b.ran
	return b.Close()
}

// fill writes b into all blocks.
func (b *benchNode) fill(v byte) {
	for l := range b.shape.Layers {
		for k := range b.shape.Batch / b.shape.Layers {
			block := b.Block(l, k)
			for i := range block {
				block[i] = v
			}
		}
	}
}

// leasedStats are of requests that were published, fetched and verified.
type leasedStats struct {
	bytes         int // of all requests
	fetch, verify samples
	margin        time.Duration // least that a lease had left when the owner heard that it was read
}

func (s *leasedStats) gbSec() float64 { return float64(s.bytes) / s.fetch.sum() / 1e3 }

// verifyShare is what part of the fetches the check of the lease took.
func (s *leasedStats) verifyShare() float64 { return s.verify.sum() / s.fetch.sum() }

// leasedBench reads through Node on both sides.
type leasedBench struct {
	link  *link
	node  *benchNode // the reader
	check bool
	order *rand.Rand
	count int // requests so far
}

// run fetches so many requests of batch blocks in each layer, one after the other. The reader's blocks are in an order of
// their own, as in a cache that has been used for a while, so that none of them is joined with its neighbour.
func (b *leasedBench) run(ctx context.Context, batch, requests int) (leasedStats, error) {
	st := leasedStats{margin: -1}
	for range requests {
		b.count++
		id := fmt.Sprint("bench-", b.count)
		a, err := b.link.call(benchCall{Op: opPublish, ID: id, Batch: batch}, "publish request "+id)
		if err != nil {
			return st, err
		}
		local := b.order.Perm(batch)
		if b.check {
			b.node.fill(initiatorByte)
		}
		start := time.Now()
		err = b.node.Fetch(ctx, a.Params, local)
		took := time.Since(start)
		if err != nil {
			return st, err
		}
		if b.check {
			if err := b.compare(id, local); err != nil {
				return st, err
			}
		}
		b.node.mu.Lock()
		verify := b.node.verify
		b.node.mu.Unlock()
		if a, err = b.link.call(benchCall{Op: opFreed, ID: id}, "notice that request "+id+" was read"); err != nil {
			return st, err
		}
		st.fetch.add(took)
		st.verify.add(verify)
		st.bytes += batch * b.node.shape.Layers * b.node.shape.BlockBytes
		if st.margin < 0 || a.Left < st.margin {
			st.margin = a.Left
		}
	}
	return st, nil
}

func (b *leasedBench) compare(id string, blocks []int) error {
	for l := range b.node.shape.Layers {
		for _, k := range blocks {
			for i, v := range b.node.Block(l, k) {
				if v != targetByte {
					return fmt.Errorf("consistency check of request %s: layer %d, block %d, byte %d is %#x, not the owner's %#x", id, l, k, i, v, byte(targetByte))
				}
			}
		}
	}
	return nil
}

// publish is the target's side of a request.
func (b *benchNode) publish(ctx context.Context, c benchCall) (a benchAnswer, err error) {
	if b == nil || c.Batch < 1 || c.Batch > b.shape.Batch/b.shape.Layers {
		return a, fmt.Errorf("%d blocks, or no node", c.Batch)
	}
	blocks := make([]int, c.Batch)
	for i := range blocks {
		blocks[i] = i
	}
	if b.published, err = b.Publish(ctx, c.ID, blocks, 0); err == nil {
		a.Params = b.published.Params()
	}
	return a, err
}

// freed waits until the request of the last publish has been read.
func (b *benchNode) freed(ctx context.Context) (a benchAnswer, err error) {
	if b == nil || b.published == nil {
		return a, errors.New("nothing was published")
	}
	select {
	case <-b.published.Done():
	case <-ctx.Done():
		return a, context.Cause(ctx)
	}
	if r := b.published.Reason(); r != lease.ReasonRead {
		return a, fmt.Errorf("the request was freed because it %s", r)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return benchAnswer{Left: b.left}, nil
}
