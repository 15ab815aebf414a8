package shape

import (
	"bytes"
	"fmt"
	"time"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
)

// Open makes the fabric of a rank with memory of a size registered, and says how to end the memory once the fabric is closed.
type Open func(size int) (f rdma.Fabric, mem rdma.Memory, end func() error, err error)

// NIXL opens a fabric of real NIXL over DRAM.
func NIXL(size int) (rdma.Fabric, rdma.Memory, func() error, error) {
	b, err := nixl.AllocBuffer(size)
	if err != nil {
		return nil, nil, nil, err
	}
	f, err := rdma.OpenNIXL(rdma.NIXLConfig{Memory: []nixl.Memory{b}})
	return f, b, b.Close, err
}

const (
	never  = 0xee // what no request wrote, on an owner
	before = 0xdd // what a reader's memory holds before the READ
)

// Rank is one rank of an engine in this process.
type Rank struct {
	Worker *rdma.Worker
	m      *memory
	owner  bool
	rank   int
	mem    []byte
	end    func() error
}

// OpenRank makes a rank of the shape's owner or reader.
func OpenRank(s *Shape, owner bool, rank int, open Open) (*Rank, error) {
	r := &Rank{m: s.memory(owner, rank), owner: owner, rank: rank}
	f, mem, end, err := open(r.m.bytes)
	if err != nil {
		return nil, err
	}
	r.end = end
	r.mem = mem.Bytes()[:r.m.bytes]
	fill := byte(before)
	if owner {
		fill = never
	}
	copy(r.mem, bytes.Repeat([]byte{fill}, len(r.mem)))
	lc := lease.DefaultConfig()
	if r.m.side.VerifyNothing {
		lc.Verification = lease.VerifyNone
	}
	kv := rdma.KV{Attention: "FLASH_ATTN", Heads: s.Heads, Layout: s.Layout, BlockTokens: r.m.side.BlockTokens, PhysicalPerLogical: r.m.side.PerLogical}
	for l, layer := range s.Layers {
		kv.Regions = append(kv.Regions, rdma.Region{Name: fmt.Sprintf("layers.%d", l), Base: mem.Addr() + uint64(r.m.bases[l]), BlockLen: r.m.sizes[l],
			BlockStride: r.m.stride[l], Blocks: r.m.side.Blocks * r.m.side.PerLogical, Group: layer.Group, Replicated: layer.Replicated})
	}
	zero := func(addr uint64, n int) { clear(r.mem[addr-mem.Addr():][:n]) }
	r.Worker, err = rdma.NewWorker(f, rdma.WorkerConfig{Zero: zero, Engine: s.engine(owner), Rank: rank, TPSize: r.m.side.TP, KV: kv, Lease: lc, MaxSeqs: 8,
		HandshakeTimeout: 30 * time.Second})
	return r, err
}

func (s *Shape) engine(owner bool) string {
	if owner {
		return "owner of " + s.Name
	}
	return "reader of " + s.Name
}

// Close ends the rank.
func (r *Rank) Close() error {
	if err := r.Worker.Close(); err != nil {
		return err
	}
	return r.end()
}

// Step carries out a plan now.
func (r *Rank) Step(p lease.Plan) (lease.Result, error) { return r.Worker.Step(time.Now(), p) }

// Stats are the worker's.
func (r *Rank) Stats() (rdma.WorkerStats, error) { return r.Worker.Stats(), nil }

// Fill writes the request into an owner rank's blocks, up to their last token.
func (r *Rank) Fill(salt int) error {
	m := r.m
	for l, layer := range m.Layers {
		for g := range m.groups() {
			if !inGroup(layer, g) {
				continue
			}
			list := m.owned(g)
			for i, id := range list.ids {
				for t := range m.side.Logical() {
					block, token := id*m.side.PerLogical+t/m.side.BlockTokens, (list.first+i)*m.side.Logical()+t
					for h, head := range m.layerHeads(l) {
						c := cell(salt, r.rank, l, head, block, token)
						copy(r.mem[m.at(l, block, h, t%m.side.BlockTokens):], c[:])
					}
				}
			}
		}
	}
	return nil
}

// Check compares every byte of a reader rank's memory with what the request should have put there, and counts those that it
// put. It forgets the request: the memory is as before the READ again.
func (r *Rank) Check(salt int) (read int, err error) {
	m := r.m
	want := bytes.Repeat([]byte{before}, len(r.mem))
	for l, layer := range m.Layers {
		for g := range m.groups() {
			if !inGroup(layer, g) {
				continue
			}
			here, there := m.wanted(g), m.owned(g)
			end := (there.first + len(there.ids)) * m.Owner.Logical()
			for i, id := range here.ids {
				for t := range m.side.Logical() {
					token := (here.first+i)*m.side.Logical() + t
					block := id*m.side.PerLogical + t/m.side.BlockTokens
					for h, head := range m.layerHeads(l) {
						var c [CellBytes]byte // zero where the owner has no such token
						if token < end {
							theirs := there.ids[token/m.Owner.Logical()-there.first]*m.Owner.PerLogical + token%m.Owner.Logical()/m.Owner.BlockTokens
							c = cell(salt, m.source(r.rank, l, head), l, head, theirs, token)
							read += CellBytes
						}
						copy(want[m.at(l, block, h, t%m.side.BlockTokens):], c[:])
					}
				}
			}
		}
	}
	if !bytes.Equal(want, r.mem) {
		err = r.difference(want)
	}
	copy(r.mem, bytes.Repeat([]byte{before}, len(r.mem)))
	return read, err
}

func (r *Rank) difference(want []byte) error {
	wrong, first := 0, -1
	for i := range want {
		if want[i] != r.mem[i] {
			if wrong++; first < 0 {
				first = i / CellBytes * CellBytes
			}
		}
	}
	return fmt.Errorf("reader rank %d: %d of %d bytes are wrong, first the cell at %d: %x, want %x (rank, layer, head, block, token, …)",
		r.rank, wrong, len(want), first, r.mem[first:first+CellBytes], want[first:first+CellBytes])
}
