// Package shape holds pairs of engines of unequal shape, whose KV caches are filled with cells that say where they belong, so
// that every byte a reader rank got can be checked. The ranks may be in this process or each in one of its own.
package shape

import "fmt"

// CellBytes is the size of what one layer holds of one token of one head.
const CellBytes = 16

// Shape is an owner and a reader of one model, and the request that is passed between them.
type Shape struct {
	Name          string
	Heads         int    // KV heads of the model
	Layout        string // LBHNC, LBNHC, or BLHNC: one row of all layers per block
	Layers        []Layer
	Owner, Reader Side
	Tokens        int   // of the request
	Cached        int   // blocks at its start that the reader has already
	Windows       []int // per group, tokens that the group keeps; 0: all. Nil: one group that keeps all
}

// Layer is one layer's cache.
type Layer struct {
	Replicated bool // every rank holds all of it, as one head
	Group      int  // rdma.Region.Group
}

// Side is one engine.
type Side struct {
	TP            int // ranks
	BlockTokens   int // per kernel block
	PerLogical    int // kernel blocks per block id
	Blocks        int // block ids
	VerifyNothing bool
}

// Logical is the number of tokens per block id.
func (s Side) Logical() int { return s.BlockTokens * s.PerLogical }

// holds lists the heads of a rank: they are dealt out in order, or one to several ranks when there are fewer than ranks.
func (s Side) holds(heads, rank int) (out []int) {
	deals := max(heads, s.TP)
	for i := range deals {
		if h := i * heads / deals; i*s.TP/deals == rank && (len(out) == 0 || out[len(out)-1] != h) {
			out = append(out, h)
		}
	}
	return out
}

// asks lists the owner ranks that a reader rank has to do with.
func (s *Shape) asks(reader int) (ranks []int) {
	if s.Owner.TP <= s.Reader.TP {
		return []int{reader / (s.Reader.TP / s.Owner.TP)}
	}
	for p := range s.Owner.TP {
		if p/(s.Owner.TP/s.Reader.TP) == reader {
			ranks = append(ranks, p)
		}
	}
	return ranks
}

// source is the owner rank that a reader rank reads a head of a layer from: the first it asks that has it.
func (s *Shape) source(reader, layer, head int) int {
	for _, p := range s.asks(reader) {
		if s.Layers[layer].Replicated {
			return p
		}
		for _, h := range s.Owner.holds(s.Heads, p) {
			if h == head {
				return p
			}
		}
	}
	panic(fmt.Sprintf("%s: nobody has head %d for reader rank %d", s.Name, head, reader))
}

// Sources counts the owner ranks that a reader rank reads from.
func (s *Shape) Sources(reader int) int {
	from := map[int]bool{}
	for l, layer := range s.Layers {
		heads := s.Reader.holds(s.Heads, reader)
		if layer.Replicated {
			heads = []int{0}
		}
		for _, h := range heads {
			from[s.source(reader, l, h)] = true
		}
	}
	return len(from)
}

// groups is the number of block id lists of a request.
func (s *Shape) groups() int { return max(1, len(s.Windows)) }

// list is where the blocks of a group lie on one side: ids from block first of the request on.
type list struct {
	first int
	ids   []int
}

func (s *Shape) list(side Side, group, first int, extra int) list {
	n := ceil(s.Tokens, side.Logical())
	if len(s.Windows) > 0 && s.Windows[group] > 0 {
		first = max(first, n-ceil(s.Windows[group], side.Logical())-extra)
	}
	l := list{first: first}
	// Runs of three neighbours, the runs from the end of the pool to its start, each group in a part of its own.
	part := side.Blocks / s.groups()
	for i := range n - first {
		l.ids = append(l.ids, group*part+(part/3-1-i/3)*3+i%3)
	}
	return l
}

// owned and wanted are the lists of the two sides.
func (s *Shape) owned(group int) list  { return s.list(s.Owner, group, 0, 1) }
func (s *Shape) wanted(group int) list { return s.list(s.Reader, group, s.Cached, 0) }

// OwnerBlocks and ReaderBlocks are the block ids that the engines allocate.
func (s *Shape) OwnerBlocks() (out [][]int) {
	for g := range s.groups() {
		out = append(out, s.owned(g).ids)
	}
	return out
}

// ReaderBlocks are the blocks to read into.
func (s *Shape) ReaderBlocks() (out [][]int) {
	for g := range s.groups() {
		out = append(out, s.wanted(g).ids)
	}
	return out
}

// memory is where things lie in a rank's memory.
type memory struct {
	*Shape
	side   Side
	heads  []int // held
	bases  []int // of layers, bytes
	sizes  []int // bytes of a kernel block, per layer
	stride []int
	bytes  int
}

func (s *Shape) memory(owner bool, rank int) *memory {
	m := &memory{Shape: s, side: s.Reader}
	if owner {
		m.side = s.Owner
	}
	m.heads = m.side.holds(s.Heads, rank)
	blocks := m.side.Blocks * m.side.PerLogical
	row := 0
	for _, l := range s.Layers {
		heads := len(m.heads)
		if l.Replicated {
			heads = 1
		}
		size := heads * m.side.BlockTokens * CellBytes
		m.sizes = append(m.sizes, size)
		row += size
	}
	at := 0
	for _, size := range m.sizes {
		m.bases = append(m.bases, at)
		if s.Layout == "BLHNC" {
			m.stride = append(m.stride, row)
			at += size
		} else {
			m.stride = append(m.stride, size)
			at += size * blocks
		}
	}
	m.bytes = row * blocks
	return m
}

// layerHeads are the heads that a layer has on this rank.
func (m *memory) layerHeads(layer int) []int {
	if m.Layers[layer].Replicated {
		return []int{0}
	}
	return m.heads
}

// at is the offset of a cell: the i-th head of this rank, a token within a kernel block.
func (m *memory) at(layer, block, i, token int) int {
	heads, tokens := len(m.layerHeads(layer)), m.side.BlockTokens
	cell := i*tokens + token
	if m.Layout == "LBNHC" {
		cell = token*heads + i
	}
	return m.bases[layer] + block*m.stride[layer] + cell*CellBytes
}

// cell is the content of a cell in an owner rank's memory.
func cell(salt, rank, layer, head, block, token int) (c [CellBytes]byte) {
	x := uint64(salt)
	for i, v := range []int{rank, layer, head, block, token} {
		c[i] = byte(v)
		x = (x ^ uint64(v)) * 0x9e3779b97f4a7c15
		x ^= x >> 29
	}
	for i := range 8 {
		c[8+i] = byte(x >> (8 * i))
	}
	c[5], c[6], c[7] = byte(token>>8), byte(block>>8), byte(salt)
	return c
}

func inGroup(l Layer, group int) bool { return l.Group == group || l.Group < 0 }

func ceil(a, b int) int { return (a + b - 1) / b }
