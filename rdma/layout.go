package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/nixlgo/nixlgo/nixl"
)

// Region is the part of a rank's KV cache that one layer (or several that share it) uses: Blocks blocks of BlockLen bytes,
// BlockStride bytes apart, block 0 at Base. The order of regions is the order of layers by natural name.
type Region struct {
	Name        string // first layer's name; empty: not stated
	Base        uint64 // address of block 0
	BlockLen    int    // bytes transferred per block, of all heads of this rank
	BlockStride int    // bytes from one block's start to the next; 0: BlockLen
	Blocks      int    // kernel blocks
	Group       int    // KV-cache group, the index into the block id lists of a request; SharedGroup: all of them
	Replicated  bool   // every rank holds all of it, such as the latent cache of MLA
}

// SharedGroup is the group of a region that the blocks of every group lie in.
const SharedGroup = -1

// KV describes a rank's KV cache, which lies in memory that its fabric has registered.
type KV struct {
	Regions            []Region
	Heads              int    // KV heads of the whole model; 0: not stated, then peers need the same TPSize and BlockTokens
	Replicated         bool   // every region is
	Layout             string // kv_cache_layout; empty: LBHNC
	Attention          string // attn_backend_name; empty: CPU_ATTN
	BlockTokens        int    // tokens per kernel block; 0: 16
	PhysicalPerLogical int    // kernel blocks per block id of kv_transfer_params; 0: 1
	Device             uint64 // NIXL device id of the memory
	MemType            nixl.MemType
}

// errShape marks a difference between two engines that rules out a transfer.
var errShape = errors.New("incompatible KV cache")

// extent is the address behind the last of n items of length bytes, stride bytes apart; false when it overflows.
func extent(base uint64, n, length, stride int) (end uint64, ok bool) {
	if n < 1 || length < 0 || stride < 0 {
		return 0, false
	}
	if n > 1 && uint64(stride) > math.MaxUint64/uint64(n-1) {
		return 0, false
	}
	end = uint64(n-1) * uint64(stride)
	for _, add := range []uint64{base, uint64(length)} {
		if end > math.MaxUint64-add {
			return 0, false
		}
		end += add
	}
	return end, true
}

// cut says how each block of a region is cut into descriptors: rows of pieces, each row first + i·pitch bytes into the
// block, its pieces of size bytes one behind the other. A row is a head, or all heads; a piece is some tokens of it, or all.
// No rows: the region is not transferred.
type cut struct{ first, rows, pitch, pieces, size int }

// view says which descriptors a list holds: those of every block of every region, region by region, block by block, row by
// row. With whole blocks that is the flat index of vllm-wire.md 6.1, and neighbours in memory are neighbours in the list,
// which NIXL merges.
type view struct {
	cuts  []cut // per region
	first []int // per region, index of its first descriptor
}

const (
	maxTokens      = math.MaxInt32 // per block id; more is a malformed reply, and products of it would overflow
	maxDescriptors = 1 << 26       // per prepared list, which takes some 100 bytes for each
)

// whole is the cut of blocks that are transferred in one piece.
func whole(m *Metadata) []cut {
	cuts := make([]cut, len(m.BlockLens))
	for r, length := range m.BlockLens {
		cuts[r] = cut{rows: 1, pieces: 1, size: length}
	}
	return cuts
}

// count is the number of descriptors of a view, maxDescriptors + 1 when it is larger.
func count(m *Metadata, cuts []cut) (n int) {
	for r, c := range cuts {
		each := c.rows * c.pieces
		if each > 0 && m.regionBlocks(r) > (maxDescriptors-n)/each {
			return maxDescriptors + 1
		}
		n += each * m.regionBlocks(r)
	}
	return n
}

func newView(m *Metadata, cuts []cut) view {
	v := view{cuts: cuts, first: make([]int, len(cuts))}
	n := 0
	for r, c := range cuts {
		v.first[r] = n
		n += m.regionBlocks(r) * c.rows * c.pieces
	}
	return v
}

// describe lists the descriptors of a view of m.
func describe(m *Metadata, cuts []cut) []nixl.Desc {
	out := make([]nixl.Desc, 0, count(m, cuts))
	for r, c := range cuts {
		for b := range m.regionBlocks(r) {
			block := m.BaseAddrs[r] + uint64(b)*uint64(m.BlockStrides[r]) + uint64(c.first)
			for row := range c.rows {
				for p := range c.pieces {
					out = append(out, nixl.Desc{Addr: block + uint64(row*c.pitch+p*c.size), Len: uint64(c.size), Dev: m.Device})
				}
			}
		}
	}
	return out
}

// indices appends the indices of pieces, given per group as kernel block × pieces per block + piece, in vLLM's order: for
// region, for block when all regions are in one group or all are shared, else for group, for region, for block. Where a block
// has rows, the pieces of one row of all blocks come before those of the next, since neighbours that can be merged are in one
// row. m is the reader's metadata on both sides, whose order pairs the two.
func (v view) indices(dst []int32, m *Metadata, pieces [][]int) []int32 {
	n := 0
	for g, ps := range pieces {
		for r, c := range v.cuts {
			if m.inGroup(r, g) {
				n += c.rows * len(ps)
			}
		}
	}
	dst = slices.Grow(dst, n)
	add := func(r int, pieces []int) {
		c := v.cuts[r]
		if c.rows == 1 { // the pieces of blocks follow one another
			for _, p := range pieces {
				dst = append(dst, int32(v.first[r]+p))
			}
			return
		}
		for row := range c.rows {
			for _, p := range pieces {
				block, p := p/c.pieces, p%c.pieces
				dst = append(dst, int32(v.first[r]+(block*c.rows+row)*c.pieces+p))
			}
		}
	}
	if !slices.ContainsFunc(m.RegionGroups, func(g int) bool { return g != m.RegionGroups[0] }) {
		for r := range v.cuts {
			for _, p := range pieces {
				add(r, p)
			}
		}
		return dst
	}
	for g, p := range pieces {
		for r := range v.cuts {
			if m.inGroup(r, g) {
				add(r, p)
			}
		}
	}
	return dst
}

// extents says how far the blocks of a pull reach, in tokens from the start of the request; 0: not known.
type extents struct {
	offered int // tokens that the owner's blocks hold (remote_num_tokens)
	wanted  int // tokens that the reader's blocks reach to, at most those; 0: all of them
}

// pair turns the block ids of a pull into pieces of kernel blocks of both sides, per group, so that paired pieces hold the
// same tokens of the request. The reader may ask for less than the owner offers: its prefix hits are at the front.
//
// Block lists say nothing about where they start, only that they end with the request. With blocks of as many tokens on both
// sides that is the same place, so they are aligned at their ends. Blocks of other sizes end in different places, which only
// the number of tokens tells for sure; without it, an owner's only list is taken to start with the request, and what is
// still ambiguous is refused.
func pair(own, remote *Metadata, local, offered [][]int, at extents) (l, r [][]int, err error) {
	if err := own.checkGroups(local, offered); err != nil {
		return nil, nil, err
	}
	lt, rt := own.logical(), remote.logical()
	longest := 0
	for _, ids := range offered {
		longest = max(longest, len(ids))
	}
	localEnd, remoteEnd, end := longest, longest, longest*rt // in blocks from the start of the request, and in tokens
	switch {
	case at.offered < 0 || at.wanted < 0 || at.wanted > at.offered || at.offered > math.MaxInt32:
		return nil, nil, fmt.Errorf("blocks for %d tokens, and remote_num_tokens is %d", at.wanted, at.offered)
	case at.offered > 0:
		wanted := cmp.Or(at.wanted, at.offered)
		localEnd, remoteEnd, end = ceil(wanted, lt), ceil(at.offered, rt), ceil(wanted, rt)*rt
		if longest > remoteEnd {
			return nil, nil, fmt.Errorf("%d remote blocks of %d tokens, and remote_num_tokens is %d", longest, rt, at.offered)
		}
	case lt != rt:
		localEnd = ceil(end, lt)
		// Fewer tokens than the owner's last block could hold end in an earlier block here, unless as many blocks are wanted.
		if len(offered) > 1 || longest > 0 && max(ceil(end-rt+1, lt), len(local[0])) < localEnd {
			return nil, nil, fmt.Errorf("%w: blocks of %d tokens there and of %d here, and remote_num_tokens, which would tell how they lie, is not known",
				errShape, rt, lt)
		}
	}
	g := gcd(own.BlockSize, remote.BlockSize)
	l, r = make([][]int, len(local)), make([][]int, len(local))
	for i := range local {
		first, from := (remoteEnd-len(offered[i]))*rt, (localEnd-len(local[i]))*lt // first token offered, and wanted
		n := min(localEnd*lt, end) - from
		switch {
		case len(local[i]) == 0:
			n = 0 // a full prefix hit
		case from < first || from < 0:
			return nil, nil, fmt.Errorf("group %d: %d local blocks of %d tokens for the %d blocks of %d tokens that the owner offers",
				i, len(local[i]), lt, len(offered[i]), rt)
		}
		if l[i], err = pieces("local", own, own, i, local[i], 0, n, g); err != nil {
			return nil, nil, err
		}
		if r[i], err = pieces("remote", own, remote, i, offered[i], max(0, from-first), n, g); err != nil {
			return nil, nil, err
		}
	}
	return l, r, own.checkTwice(local)
}

// rest is what pair left out of the local blocks: the pieces beyond the owner's last block.
func rest(own, remote *Metadata, local, read [][]int) ([][]int, error) {
	g := gcd(own.BlockSize, remote.BlockSize)
	out := make([][]int, len(local))
	for i, ids := range local {
		all, err := pieces("local", own, own, i, ids, 0, len(ids)*own.logical(), g)
		if err != nil {
			return nil, err
		}
		out[i] = all[len(read[i]):]
	}
	return out, nil
}

// pieces lists the pieces of g tokens that hold n tokens from token start of a list of block ids, and checks that every
// region of the group has all of the blocks. The groups are own's, for an owner may not state them.
func pieces(side string, own, m *Metadata, group int, ids []int, start, n, g int) ([]int, error) {
	blocks := math.MaxInt
	for r := range m.BaseAddrs {
		if own.inGroup(r, group) {
			blocks = min(blocks, m.regionBlocks(r)/m.PhysicalPerLogical)
		}
	}
	out := make([]int, 0, n/g)
	each := m.logical() / g
	for i, id := range ids {
		if id < 0 || id >= blocks {
			return nil, fmt.Errorf("%s block id %d is not in 0…%d", side, id, blocks-1)
		}
		at := i * each
		for k := max(at, start/g); k < min(at+each, (start+n)/g); k++ {
			out = append(out, id*each+k-at)
		}
	}
	return out, nil
}

// checkGroups checks that every list of block ids has regions, and every region a list.
func (m *Metadata) checkGroups(local, offered [][]int) error {
	if len(local) != len(offered) || len(local) == 0 {
		return fmt.Errorf("%w: %d local and %d remote lists of block ids", errShape, len(local), len(offered))
	}
	for r := range m.BaseAddrs {
		if g := m.group(r); g >= len(local) {
			return fmt.Errorf("%w: %d lists of block ids, and region %d is in group %d", errShape, len(local), r, g)
		}
	}
	for g := range local {
		found := false
		for r := range m.BaseAddrs {
			found = found || m.inGroup(r, g)
		}
		if !found {
			return fmt.Errorf("%w: %d lists of block ids, and no region is in group %d", errShape, len(local), g)
		}
	}
	return nil
}

// checkTwice refuses a local block that would be written twice.
func (m *Metadata) checkTwice(local [][]int) error {
	if slices.Contains(m.RegionGroups, SharedGroup) {
		local = [][]int{slices.Concat(local...)}
	}
	for _, ids := range local {
		ids = slices.Clone(ids)
		slices.Sort(ids)
		for i := 1; i < len(ids); i++ {
			if ids[i] == ids[i-1] {
				return fmt.Errorf("local block %d twice in one request", ids[i])
			}
		}
	}
	return nil
}

// logical is the number of tokens per block id.
func (m *Metadata) logical() int { return m.BlockSize * m.PhysicalPerLogical }

// group is the KV-cache group of a region, or SharedGroup.
func (m *Metadata) group(r int) int {
	if len(m.RegionGroups) == 0 {
		return 0
	}
	return m.RegionGroups[r]
}

// each calls f for the memory of every row of pieces, given per group as for indices.
func (v view) each(m *Metadata, pieces [][]int, f func(addr uint64, n int)) {
	for g, ps := range pieces {
		for r, c := range v.cuts {
			if !m.inGroup(r, g) {
				continue
			}
			for _, p := range ps {
				block := m.BaseAddrs[r] + uint64(p/c.pieces)*uint64(m.BlockStrides[r]) + uint64(c.first)
				for row := range c.rows {
					f(block+uint64(row*c.pitch+p%c.pieces*c.size), c.size)
				}
			}
		}
	}
}

func (m *Metadata) inGroup(r, group int) bool {
	g := m.group(r)
	return g == group || g == SharedGroup
}

func ceil(a, b int) int { return (a + b - 1) / b }
