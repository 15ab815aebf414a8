package rdma

import (
	"fmt"
	"sync/atomic"
)

// cellPool hands out the local int64 cells that slot READs land in. A cell belongs to one attempt until that READ is
// terminal, so a late byte of an abandoned READ cannot be taken for another's answer.
type cellPool struct {
	fabric Fabric
	free   []cell
}

type cell struct {
	slab  Memory
	index int
}

const cellsPerSlab = 4096

func (c cell) addr() uint64  { return c.slab.Addr() + 8*uint64(c.index) }
func (c cell) value() *int64 { return &int64s(c.slab)[c.index] }

// get returns n cells, cleared.
func (p *cellPool) get(n int) ([]cell, error) {
	for len(p.free) < n {
		b, err := p.fabric.Alloc(8 * cellsPerSlab)
		if err != nil {
			return nil, fmt.Errorf("cells for a lease check: %w", err)
		}
		for i := range cellsPerSlab {
			p.free = append(p.free, cell{b, i})
		}
	}
	out := append([]cell(nil), p.free[len(p.free)-n:]...)
	p.free = p.free[:len(p.free)-n]
	for _, c := range out {
		atomic.StoreInt64(c.value(), 0)
	}
	return out, nil
}

// take reads the cells of a terminal READ and returns them to the pool.
func (p *cellPool) take(cells []cell) []int64 {
	values := make([]int64, len(cells))
	for i, c := range cells {
		values[i] = atomic.LoadInt64(c.value())
	}
	p.free = append(p.free, cells...)
	return values
}
