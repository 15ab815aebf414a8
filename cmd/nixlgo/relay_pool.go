package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
)

// blockPool hands out block ids, first come, first served. Safe for concurrent use.
type blockPool struct {
	turn  chan struct{} // holds one element while someone waits for blocks
	total int

	mu    sync.Mutex
	free  []int
	given chan struct{} // closed and replaced when blocks come back
}

func newBlockPool(n int) *blockPool {
	p := &blockPool{turn: make(chan struct{}, 1), total: n, given: make(chan struct{})}
	for i := range n {
		p.free = append(p.free, n-1-i)
	}
	return p
}

// take waits for n blocks. A request for more than there are fails at once.
func (p *blockPool) take(ctx context.Context, n int) ([]int, error) {
	if n > p.total {
		return nil, fmt.Errorf("%w: %d of %d", errTooLarge, n, p.total)
	}
	select {
	case p.turn <- struct{}{}:
		defer func() { <-p.turn }()
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for %s: %w", many(n, "block"), context.Cause(ctx))
	}
	for {
		p.mu.Lock()
		if at := len(p.free) - n; at >= 0 {
			blocks := slices.Clone(p.free[at:])
			p.free = p.free[:at]
			p.mu.Unlock()
			return blocks, nil
		}
		given := p.given
		p.mu.Unlock()
		select {
		case <-given:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for %s: %w", many(n, "block"), context.Cause(ctx))
		}
	}
}

func (p *blockPool) give(blocks []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, blocks...)
	close(p.given)
	p.given = make(chan struct{})
}

// whole waits until every block is back.
func (p *blockPool) whole(ctx context.Context) error {
	blocks, err := p.take(ctx, p.total)
	if err == nil {
		p.give(blocks)
	}
	return err
}

func (p *blockPool) count() (free, total int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.free), p.total
}
