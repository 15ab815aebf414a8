package rdma

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
)

// holders says by simulation which heads each rank holds: heads are dealt out in order, or repeated when there are fewer.
func holders(heads, ranks int) [][]int {
	out := make([][]int, ranks)
	for i := range max(heads, ranks) {
		r, h := i*ranks/max(heads, ranks), i*heads/max(heads, ranks)
		if !slices.Contains(out[r], h) {
			out[r] = append(out[r], h)
		}
	}
	return out
}

// Every head of every reader rank is read once, from a rank that holds it, out of the place where it lies there; every owner
// rank hears from exactly as many reader ranks as they say; and the ranks asked are vLLM's. vllm-wire.md 1.3, 4, 6.3;
// vllm#45330, cases.md 26; peer-tests A8.1.
func TestEveryHeadIsReadOnceAndEveryRankIsTold(t *testing.T) {
	pairs := 0
	for owners := 1; owners <= 16; owners++ {
		for readers := 1; readers <= 16; readers++ {
			for heads := 1; heads <= 32; heads++ {
				if !divides(owners, readers) || !divides(heads, owners) || !divides(heads, readers) {
					continue
				}
				pairs++
				name := fmt.Sprintf("%d heads, %d owner and %d reader ranks", heads, owners, readers)
				there, here := holders(heads, owners), holders(heads, readers)
				told := make([][]int, owners) // the Ns that each owner rank hears
				for d := range readers {
					got := make([]int, len(here[d]))
					for i, s := range shares(heads, d, readers, owners) {
						if readers >= owners {
							require.Equal(t, d*owners/readers, s.rank, name)
						} else {
							require.Equal(t, d*(owners/readers)+i, s.rank, name)
						}
						require.Len(t, here[d], s.localHeads, name)
						require.Len(t, there[s.rank], s.remoteHeads, name)
						require.Equal(t, i == 0, s.first, name)
						for h := range s.heads {
							require.Equal(t, here[d][s.localFirst+h], there[s.rank][s.remoteFirst+h], name)
							got[s.localFirst+h]++
						}
						told[s.rank] = append(told[s.rank], s.readers)
					}
					for _, n := range got {
						require.Equal(t, 1, n, "%s: rank %d reads %v", name, d, got)
					}
				}
				for p, ns := range told {
					require.NotEmpty(t, ns, "%s: nobody tells rank %d", name, p)
					for _, n := range ns {
						require.Equal(t, len(ns), n, "%s: rank %d", name, p)
					}
					require.Len(t, ns, max(1, readers/owners), "%s: vLLM's N", name)
				}
			}
		}
	}
	require.Greater(t, pairs, 500)
}

func TestSharesOfKnownPairs(t *testing.T) {
	type part struct{ rank, n, heads, at int }
	for _, c := range []struct {
		why                       string
		heads, d, readers, owners int
		want                      []part
	}{
		{"vllm-wire.md 6.3: K=2 D=4 P=1", 2, 0, 4, 1, []part{{0, 4, 1, 0}}},
		{"vllm-wire.md 6.3: K=2 D=4 P=1", 2, 1, 4, 1, []part{{0, 4, 1, 0}}},
		{"vllm-wire.md 6.3: K=2 D=4 P=1", 2, 2, 4, 1, []part{{0, 4, 1, 1}}},
		{"vllm-wire.md 6.3: K=2 D=4 P=1", 2, 3, 4, 1, []part{{0, 4, 1, 1}}},
		{"cases.md 26: H=4 TP4 to TP8", 4, 5, 8, 4, []part{{2, 2, 1, 0}}},
		{"cases.md 26: H=8 TP2 to TP8", 8, 6, 8, 2, []part{{1, 4, 1, 2}}},
		{"cases.md 26: H=8 TP8 to TP16", 8, 9, 16, 8, []part{{4, 2, 1, 0}}},
		{"A8.1", 4, 1, 2, 2, []part{{1, 1, 2, 0}}},
		{"A8.1", 4, 2, 4, 2, []part{{1, 2, 1, 0}}},
		{"A8.1", 4, 0, 1, 2, []part{{0, 1, 2, 0}, {1, 1, 2, 0}}},
		{"A3.11: D TP 1, P TP 4", 4, 0, 1, 4, []part{{0, 1, 1, 0}, {1, 1, 1, 0}, {2, 1, 1, 0}, {3, 1, 1, 0}}},
		{"A3.11: D TP 2, P TP 4", 4, 1, 2, 4, []part{{2, 1, 1, 0}, {3, 1, 1, 0}}},
		{"A3.12: a second engine of TP 6", 12, 1, 2, 6, []part{{3, 1, 2, 0}, {4, 1, 2, 0}, {5, 1, 2, 0}}},
		{"A3.45: replicated", 1, 0, 1, 4, []part{{0, 1, 1, 0}, {1, 1, 0, 0}, {2, 1, 0, 0}, {3, 1, 0, 0}}},
		{"vllm-wire.md 6.3: duplicates of grouped-query attention are skipped", 2, 0, 1, 4, []part{{0, 1, 1, 0}, {1, 1, 0, 0}, {2, 1, 1, 0}, {3, 1, 0, 0}}},
	} {
		var got []part
		for _, s := range shares(c.heads, c.d, c.readers, c.owners) {
			got = append(got, part{s.rank, s.readers, s.heads, s.remoteFirst})
		}
		require.Equal(t, c.want, got, c.why)
	}
}

// side is one engine's rank for the tests below: regions of 100 blocks.
type side struct {
	kv KV
	m  *Metadata
}

func newSide(heads, tp, rank, tokens, perLogical int, regions ...Region) side {
	c := WorkerConfig{Engine: "e", Rank: rank, TPSize: tp, KV: KV{Attention: "FLASH_ATTN", Heads: heads, BlockTokens: tokens, PhysicalPerLogical: perLogical, Regions: regions}}
	for i := range c.KV.Regions {
		if c.KV.Regions[i].Blocks == 0 {
			c.KV.Regions[i].Blocks = 100
		}
	}
	c, err := c.withDefaults()
	if err != nil {
		panic(err)
	}
	return side{c.KV, c.metadata()}
}

func (s side) with(layout string) side {
	s.kv.Layout, s.m.Layout = layout, layout
	return s
}

func (s side) match(t *testing.T, heads, d, readers, owners int, remote side) (local, there []cut) {
	t.Helper()
	local, there, err := s.kv.match(s.m, remote.m, shares(heads, d, readers, owners)[0])
	require.NoError(t, err)
	return local, there
}

func TestBlocksAreCutByHead(t *testing.T) {
	t.Run("A3.17: half of the owner's block", func(t *testing.T) {
		d := newSide(2, 2, 1, 16, 1, Region{Base: 0x8000, BlockLen: 1024})
		p := newSide(2, 1, 0, 16, 1, Region{Base: 0x1000, BlockLen: 2048})
		local, there := d.match(t, 2, 1, 2, 1, p)
		require.Equal(t, nixl.Desc{Addr: 0x1000 + 1024, Len: 1024}, describe(p.m, there)[0])
		require.Equal(t, nixl.Desc{Addr: 0x1000 + 2048 + 1024, Len: 1024}, describe(p.m, there)[1])
		require.Equal(t, nixl.Desc{Addr: 0x8000, Len: 1024}, describe(d.m, local)[0])
	})
	t.Run("A8.2, A6.3: own blocks split by owner rank", func(t *testing.T) {
		for owners, size := range map[int]int{2: 512, 4: 256} {
			d := newSide(4, 1, 0, 16, 1, Region{Base: 0x8000, BlockLen: 1024, Blocks: 8})
			p := newSide(4, owners, 0, 16, 1, Region{Base: 0x1000, BlockLen: size, Blocks: 8})
			for i, s := range shares(4, 0, 1, owners) {
				local, there, err := d.kv.match(d.m, p.m, s)
				require.NoError(t, err)
				descs := describe(d.m, local)
				require.Len(t, descs, 8)
				require.Equal(t, nixl.Desc{Addr: uint64(0x8000 + 7*1024 + i*size), Len: uint64(size)}, descs[7])
				require.Equal(t, whole(p.m), there, "the owner's block is read whole")
			}
		}
	})
	t.Run("case 26: a quarter at the rank's place", func(t *testing.T) {
		p := newSide(8, 2, 1, 16, 1, Region{Base: 0x1000, BlockLen: 4096})
		for r := 4; r < 8; r++ {
			d := newSide(8, 8, r, 16, 1, Region{Base: 0x8000, BlockLen: 1024})
			_, there := d.match(t, 8, r, 8, 2, p)
			require.Equal(t, cut{first: r % 4 * 1024, rows: 1, pieces: 1, size: 1024}, there[0])
		}
	})
	t.Run("A7.8: regions of unequal capacity", func(t *testing.T) {
		p := newSide(0, 1, 0, 1, 1, Region{Base: 100, BlockLen: 16, Blocks: 2}, Region{Base: 1000, BlockLen: 16, Blocks: 3})
		var at []uint64
		for _, d := range describe(p.m, whole(p.m)) {
			at = append(at, d.Addr)
		}
		require.Equal(t, []uint64{100, 116, 1000, 1016, 1032}, at)
		require.Equal(t, []int32{1, 3}, newView(p.m, whole(p.m)).indices(nil, p.m, [][]int{{1}}))
	})
	t.Run("A7.10: a packed row ends with its buffer", func(t *testing.T) {
		p := newSide(0, 1, 0, 16, 1, Region{Base: 4096, BlockLen: 3 * 512, Blocks: 5, Replicated: true})
		last := describe(p.m, whole(p.m))[4]
		require.EqualValues(t, 4096+5*3*512, last.Addr+last.Len)
	})
	t.Run("A8.4: sub-blocks and head split together", func(t *testing.T) {
		// 2 heads of 8 tokens of 4 bytes here, 4 heads of 4 tokens there.
		d := newSide(4, 2, 1, 8, 1, Region{Base: 0, BlockLen: 64})
		p := newSide(4, 1, 0, 4, 1, Region{Base: 0, BlockLen: 64})
		local, there := d.match(t, 4, 1, 2, 1, p)
		require.Equal(t, cut{rows: 2, pitch: 32, pieces: 2, size: 16}, local[0])
		require.Equal(t, cut{first: 32, rows: 2, pitch: 16, pieces: 1, size: 16}, there[0])
		// Block 5 here holds blocks 7 and 9 there: head by head, the tokens of one side by side.
		l, r, err := pair(d.m, p.m, [][]int{{5}}, [][]int{{7, 9}}, extents{})
		require.NoError(t, err)
		require.Equal(t, []uint64{320, 336, 352, 368}, addrs(d.m, local, l))
		require.Equal(t, []uint64{480, 608, 496, 624}, addrs(p.m, there, r))
	})
}

func addrs(m *Metadata, cuts []cut, pieces [][]int) (out []uint64) {
	descs := describe(m, cuts)
	for _, i := range newView(m, cuts).indices(nil, m, pieces) {
		out = append(out, descs[i].Addr)
	}
	return out
}

// The owner's block length follows from KV heads per rank, never from the TP sizes. vllm#45330, cases.md 26; peer-tests A3.16,
// A3.18 to A3.21, A7.7.
func TestBlockLengthsAreCheckedPerHead(t *testing.T) {
	split, replicated := Region{BlockLen: 65536}, Region{BlockLen: 8192, Replicated: true}
	times := func(r Region, n int) Region { r.BlockLen *= n; return r }
	for _, c := range []struct {
		why                    string
		heads, readers, owners int
		here, there            []Region
		ok                     bool
	}{
		{"A3.16: twice the heads, twice the bytes", 2, 2, 1, []Region{split}, []Region{times(split, 2)}, true},
		{"A3.18: only what is split scales", 2, 2, 1, []Region{split, replicated}, []Region{times(split, 2), replicated}, true},
		{"A3.19: what is replicated does not", 2, 2, 1, []Region{split, replicated}, []Region{times(split, 2), times(replicated, 2)}, false},
		{"A3.20: one head per rank on both sides", 8, 16, 8, []Region{split}, []Region{split}, true},
		{"A3.21: 8 and 16 heads per rank", 32, 4, 2, []Region{split}, []Region{times(split, 2)}, true},
		{"A3.21: 8 and 16 heads per rank, equal bytes", 32, 4, 2, []Region{split}, []Region{split}, false},
		{"A7.7: half the bytes per token", 1, 1, 4, []Region{replicated}, []Region{{BlockLen: 4096, Replicated: true}}, false},
		{"case 26: H=4 TP4 to TP8", 4, 8, 4, []Region{split}, []Region{split}, true},
		{"case 26: H=8 TP2 to TP8", 8, 8, 2, []Region{split}, []Region{times(split, 4)}, true},
		{"case 26: H=8 TP8 to TP16", 8, 16, 8, []Region{split}, []Region{split}, true},
		{"equal TP", 8, 4, 4, []Region{split}, []Region{split}, true},
		{"equal TP, other bytes", 8, 4, 4, []Region{split}, []Region{times(split, 2)}, false},
	} {
		d, p := newSide(c.heads, c.readers, 0, 16, 1, c.here...), newSide(c.heads, c.owners, 0, 16, 1, c.there...)
		for _, s := range shares(c.heads, 0, c.readers, c.owners) {
			_, _, err := d.kv.match(d.m, p.m, s)
			if c.ok {
				require.NoError(t, err, c.why)
				continue
			}
			require.ErrorIs(t, err, errShape, c.why)
			last := len(c.here) - 1
			require.ErrorContains(t, err, fmt.Sprintf("block_lens[%d] is %d bytes", last, p.m.BlockLens[last]), c.why)
			require.ErrorContains(t, err, fmt.Sprintf("there and %d bytes", d.m.BlockLens[last]), c.why)
		}
	}
}

// peer-tests A3.15 and its weakness D3: which of the two differences is the one refused is pinned here.
func TestLayoutMattersWhereBlocksAreCut(t *testing.T) {
	here := func(layout string) side { return newSide(4, 2, 0, 16, 1, Region{BlockLen: 1024}).with(layout) }
	same := func(layout string) side { return newSide(4, 2, 0, 16, 1, Region{BlockLen: 1024}).with(layout) }
	wider := func(layout string) side { return newSide(4, 1, 0, 16, 1, Region{BlockLen: 2048}).with(layout) }
	for _, c := range []struct {
		here, there side
		owners      int
		want        string
	}{
		{here("LBHNC"), same("LBHNC"), 2, ""},
		{here("LBNHC"), same("LBNHC"), 2, ""},
		{here("LHBNC"), same("LHBNC"), 2, ""},
		{here("LBHNC"), same("LBNHC"), 2, "kv_cache_layout is LBNHC there and LBHNC here"},
		{here("LBHNC"), wider("LBHNC"), 1, ""},
		{here("BLHNC"), wider("BLHNC"), 1, ""},
		{here("BHLNC"), wider("BHLNC"), 1, ""},
		{here("LBHNC"), wider("LBNHC"), 1, "kv_cache_layout is LBNHC there and LBHNC here"},
		{here("LBNHC"), wider("LBNHC"), 1, "heads per rank is 4 there and 2 here, and blocks of layout LBNHC cannot be cut by head"},
		{here("BLNHC"), wider("BLNHC"), 1, "cannot be cut by head"},
		{here("LHBNC"), wider("LHBNC"), 1, "cannot be cut by head"},
	} {
		_, _, err := c.here.kv.match(c.here.m, c.there.m, shares(4, 0, 2, c.owners)[0])
		if c.want == "" {
			require.NoError(t, err)
		} else {
			require.ErrorIs(t, err, errShape)
			require.ErrorContains(t, err, c.want)
		}
	}
	// One head per rank on both sides is not cut, nor is a replicated cache, whose layout has no heads.
	d, p := newSide(1, 2, 0, 16, 1, Region{BlockLen: 64}).with("LBNHC"), newSide(1, 1, 0, 16, 1, Region{BlockLen: 64}).with("LBNHC")
	d.match(t, 1, 0, 2, 1, p)
	d, p = newSide(0, 2, 0, 16, 1, Region{BlockLen: 64, Replicated: true}).with("LBHNC"), newSide(0, 1, 0, 16, 1, Region{BlockLen: 64, Replicated: true}).with("LBNHC")
	d.match(t, 1, 0, 2, 1, p)
}

// vllm#23587, cases.md 43; peer-tests A7.11, A8.7: the error names the field and both values, before the peer is loaded.
func TestShapesThatDifferAreRefusedByField(t *testing.T) {
	big := func(m *Metadata) { m.BlockSize = 32; m.BlockLens = []int{128, 128}; m.BlockStrides = []int{128, 128} }
	for want, change := range map[string]func(own, remote *Metadata, kv *KV){
		"kv_cache_layout is LBNHC there and LBHNC here":      func(_, m *Metadata, _ *KV) { m.Layout = "LBNHC" },
		"attn_backend_name is CPU_ATTN there and FLASH_ATTN": func(_, m *Metadata, _ *KV) { m.Attention = "CPU_ATTN" },
		"cannot be cut between tokens": func(own, m *Metadata, kv *KV) {
			big(m)
			kv.Heads, own.Attention, m.Attention = 2, "CPU_ATTN", "CPU_ATTN"
		},
		"number of regions is 1 there and 2 here":              func(_, m *Metadata, _ *KV) { m.BaseAddrs = m.BaseAddrs[:1] },
		"block_lens[1] is 32 bytes for 1 heads of 16 tokens t": func(_, m *Metadata, _ *KV) { m.BlockLens = []int{64, 32} },
		"dcp_size is 2 there and 1 here":                       func(_, m *Metadata, _ *KV) { m.DCPSize = 2 },
		"pcp_size is 3 there and 1 here":                       func(_, m *Metadata, _ *KV) { m.PCPSize = 3 },
		"ssm_sizes is [1 2] there and [0 0] here":              func(_, m *Metadata, _ *KV) { m.SSMSizes = [2]int{1, 2} },
		"region_group_ids is [0 1] there and [0 0] here":       func(_, m *Metadata, _ *KV) { m.RegionGroups = []int{0, 1} },
		"region_names[1] is c there and b here":                func(_, m *Metadata, _ *KV) { m.RegionNames = []string{"a", "c"} },
		"block_size is 32 there and 16 here; reading":          func(_, m *Metadata, _ *KV) { big(m) },
		"block_size is 32 there and 16 here, and blocks of layout BHLNC": func(own, m *Metadata, kv *KV) {
			big(m)
			kv.Heads, own.Layout, m.Layout = 2, "BHLNC", "BHLNC"
		},
		"4611686018427387904 × 16 there": func(_, m *Metadata, _ *KV) { m.PhysicalPerLogical = 1 << 62 },
		"number of descriptors is":       func(_, m *Metadata, _ *KV) { m.NumBlocks = 1 << 40 },
	} {
		d := newSide(0, 1, 0, 16, 1, Region{Name: "a", BlockLen: 64, Blocks: 10}, Region{Name: "b", BlockLen: 64, Blocks: 10})
		m := sample()
		change(d.m, m, &d.kv)
		_, _, err := d.kv.match(d.m, m, shares(1, 0, 1, 1)[0])
		require.ErrorIs(t, err, errShape, want)
		require.ErrorContains(t, err, want)
	}
	d := newSide(0, 1, 0, 16, 1, Region{BlockLen: 64}, Region{BlockLen: 64})
	d.match(t, 1, 0, 1, 1, side{m: sample()})
	// vllm#45330, cases.md 26: block counts are independent.
	p := newSide(0, 1, 0, 16, 1, Region{BlockLen: 64, Blocks: 113})
	newSide(0, 1, 0, 16, 1, Region{BlockLen: 64, Blocks: 211}).match(t, 1, 0, 1, 1, p)
}

// cases.md 26; peer-tests A8.7, A8.10: parallel sizes that cannot be served are refused before the handshake.
func TestParallelSizesThatCannotBeServedAreRefused(t *testing.T) {
	worker := func(tp int, kv KV) *Worker { return &Worker{cfg: WorkerConfig{Engine: "here", TPSize: tp, KV: kv}} }
	sharded := func(heads int) KV { return KV{Heads: heads, Regions: []Region{{BlockLen: 64}}} }
	peer := func(tp, pp, dcp int) lease.Peer {
		return lease.Peer{Engine: "there", TPSize: tp, PPSize: pp, DCPSize: dcp}
	}
	for want, c := range map[string]struct {
		w *Worker
		p lease.Peer
	}{
		"pp_size is 2 there and 1 here":                                      {worker(1, sharded(8)), peer(1, 2, 1)},
		"dcp_size is 4 there and 1 here":                                     {worker(1, sharded(8)), peer(4, 1, 4)},
		"tp_size is 3 there and 2 here, and neither is a multiple":           {worker(2, sharded(12)), peer(3, 1, 1)},
		"tp_size is 2 there and 1 here; reading from another needs KV.Heads": {worker(1, sharded(0)), peer(2, 1, 1)},
		"tp_size is 4 there and 2 here, and 6 KV heads cannot be spread":     {worker(2, sharded(6)), peer(4, 1, 1)},
		"tp_size is 0 there and 1 here":                                      {worker(1, sharded(8)), peer(0, 1, 1)},
		"tp_size is -2 there and 1 here":                                     {worker(1, sharded(8)), peer(-2, 1, 1)},
	} {
		_, err := c.w.ranksOf(c.p, false)
		require.ErrorIs(t, err, errShape, want)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, `"there"`)
	}
	_, err := worker(1, sharded(8)).ranksOf(lease.Peer{Engine: "here", TPSize: 1}, false)
	require.ErrorContains(t, err, "this engine itself")
	for _, w := range []*Worker{worker(2, sharded(0)), worker(2, sharded(4)), worker(4, KV{Regions: []Region{{Replicated: true}}})} {
		s, err := w.ranksOf(peer(2, 1, 1), false)
		require.NoError(t, err)
		require.Len(t, s, 1)
	}
}

// H=6 on TP4: one rank cannot hold one and a half heads (cases.md 26).
func TestHeadsThatCannotBeSpreadAreRefused(t *testing.T) {
	c := WorkerConfig{Engine: "e", TPSize: 4, KV: KV{Heads: 6, Regions: []Region{{BlockLen: 64, Blocks: 1}}}}
	_, err := c.withDefaults()
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "KV.Heads 6 cannot be spread evenly over TPSize 4 ranks")
	c.KV.Heads, c.KV.Regions[0].BlockLen = 8, 63
	_, err = c.withDefaults()
	require.ErrorContains(t, err, "region 0 has blocks of 63 bytes for 2 heads")
	c.KV.Regions[0].BlockLen, c.KV.Regions[0].Group = 64, 1
	_, err = c.withDefaults()
	require.ErrorContains(t, err, "region 0 has Group 1")
	c.KV.Regions[0].Group, c.KV.PhysicalPerLogical = 0, 1<<40
	_, err = c.withDefaults()
	require.ErrorContains(t, err, "1099511627776 blocks of 16 tokens")
}

// A DRAM owner tells so, for a reader whose cache is in VRAM, and the other way round (vllm-wire.md 2, region_mem_types).
func TestTheOwnersMemoryTypeIsItsOwn(t *testing.T) {
	for declared, want := range map[string]nixl.MemType{"": nixl.VRAM, "DRAM": nixl.DRAM, "VRAM": nixl.VRAM} {
		m := sample()
		if declared != "" {
			m.RegionMemTypes = []string{declared, declared}
		}
		got, err := m.memType(nixl.VRAM)
		require.NoError(t, err)
		require.Equal(t, want, got, declared)
	}
	m := sample()
	m.RegionMemTypes = []string{"DRAM", "VRAM"}
	_, err := m.memType(nixl.DRAM)
	require.ErrorContains(t, err, "mixes")
	for _, mem := range []nixl.MemType{nixl.DRAM, nixl.VRAM} {
		c := WorkerConfig{Engine: "e", KV: KV{MemType: mem, Device: 3, Regions: []Region{{BlockLen: 64, Blocks: 1}}}}
		c, err := c.withDefaults()
		require.NoError(t, err)
		require.Equal(t, []string{mem.String()}, c.metadata().RegionMemTypes)
		require.EqualValues(t, 3, describe(c.metadata(), whole(c.metadata()))[0].Dev)
	}
}

// tokensOf says which token of the request each piece of g tokens starts with, by looking it up in the list of block ids that
// starts with block first of the request.
func tokensOf(m *Metadata, ids []int, first, g int, pieces []int) (out []int) {
	for _, p := range pieces {
		token := p * g // in the pool
		id := token / (m.BlockSize * m.PhysicalPerLogical)
		i := slices.Index(ids, id)
		if i < 0 {
			panic(fmt.Sprintf("piece %d lies in block %d, not one of %v", p, id, ids))
		}
		out = append(out, (first+i)*m.BlockSize*m.PhysicalPerLogical+token%(m.BlockSize*m.PhysicalPerLogical))
	}
	return out
}

// blocks are n block ids, not in order, spread over the pool.
func blocks(n, from int) []int {
	ids := make([]int, n)
	for i := range ids {
		ids[i] = from + (i*7+3)%n
		if n%7 == 0 {
			ids[i] = from + n - 1 - i
		}
	}
	return ids
}

// Whatever the block sizes, paired pieces hold the same token, every token that both sides have is read once, and nothing is
// written outside of the request's own blocks. vllm-wire.md 6.4, 6.5, 9 items 11 and 12; peer-tests A6.11, A7.1 to A7.6.
func TestPairedPiecesHoldTheSameTokens(t *testing.T) {
	type size struct{ tokens, perLogical int }
	read, refused := 0, 0
	for _, c := range []struct{ here, there size }{
		{size{16, 1}, size{16, 1}}, {size{12, 1}, size{8, 1}}, {size{36, 1}, size{8, 1}}, {size{24, 1}, size{4, 1}}, {size{16, 1}, size{24, 1}},
		{size{4, 3}, size{4, 2}}, {size{4, 9}, size{4, 2}}, {size{8, 3}, size{4, 2}}, {size{4, 2}, size{8, 3}}, {size{16, 1}, size{4, 1}},
		{size{16, 2}, size{16, 1}}, {size{16, 1}, size{16, 2}}, {size{8, 2}, size{16, 1}}, {size{4, 1}, size{16, 1}}, {size{64, 90}, size{64, 12}},
	} {
		lt, rt := c.here.tokens*c.here.perLogical, c.there.tokens*c.there.perLogical
		d := newSide(1, 1, 0, c.here.tokens, c.here.perLogical, Region{BlockLen: 8 * c.here.tokens, Blocks: 4000 * c.here.perLogical})
		p := newSide(1, 1, 0, c.there.tokens, c.there.perLogical, Region{BlockLen: 8 * c.there.tokens, Blocks: 4000 * c.there.perLogical})
		g := gcd(c.here.tokens, c.there.tokens)
		lengths := []int{1, 2, lt - 1, lt, lt + 1, rt - 1, rt, rt + 1, 2*lt + 1, 2*rt - 1, 3*lt - 1, 6529}
		for n := 2; n < 80; n++ {
			lengths = append(lengths, n)
		}
		for _, offered := range lengths {
			for _, wanted := range []int{offered, offered - 1, offered / 2} {
				for cached := range 3 { // blocks here that need no reading
					if wanted < 1 || (wanted-1)/lt < cached {
						continue
					}
					ids, local := blocks((offered+rt-1)/rt, 20), blocks((wanted+lt-1)/lt, 40)[cached:]
					for _, known := range []bool{true, false} {
						at := extents{offered, wanted}
						if !known {
							if at = (extents{}); wanted != offered {
								continue // nothing could tell
							}
						}
						l, r, err := pair(d.m, p.m, [][]int{local}, [][]int{ids}, at)
						name := fmt.Sprintf("%v here, %v there, %d tokens of %d, %d blocks cached, known %v", c.here, c.there, wanted, offered, cached, known)
						if err != nil {
							require.False(t, known, "%s: %v", name, err)
							require.NotZero(t, lt%rt, "%s: the owner's blocks end in one block here: %v", name, err)
							require.ErrorIs(t, err, errShape, name)
							refused++
							continue
						}
						read++
						here, there := tokensOf(d.m, local, cached, g, l[0]), tokensOf(p.m, ids, 0, g, r[0])
						require.Equal(t, there, here, name)
						end := min((wanted+rt-1)/rt*rt, (wanted+lt-1)/lt*lt) // whole blocks, on the side that ends first
						if !known {
							end = min(len(ids)*rt, (wanted+lt-1)/lt*lt)
						}
						want := []int{}
						for token := cached * lt; token < end; token += g {
							want = append(want, token)
						}
						require.Equal(t, want, here, name)
						left, err := rest(d.m, p.m, [][]int{local}, l)
						require.NoError(t, err)
						want = append(want, tokensOf(d.m, local, cached, g, left[0])...)
						require.Len(t, want, len(local)*lt/g, name)
						require.True(t, slices.IsSorted(want), "%s: what is read and what is left is all there is", name)
					}
				}
			}
		}
	}
	require.Greater(t, read, 5000)
	require.NotZero(t, refused)
}

func TestPairsOfKnownPulls(t *testing.T) {
	one := func(tokens, perLogical int) side {
		return newSide(1, 1, 0, tokens, perLogical, Region{BlockLen: 8 * tokens, Blocks: 340})
	}
	for _, c := range []struct {
		why            string
		here, there    side
		local, offered []int
		at             extents
		l, r           []int
	}{
		{"prefix hits align from the end", one(16, 1), one(16, 1), []int{7}, []int{1, 2, 3, 4}, extents{}, []int{7}, []int{4}},
		{"A6.8", one(16, 1), one(16, 1), []int{6, 7, 8, 9}, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, extents{}, []int{6, 7, 8, 9}, []int{6, 7, 8, 9}},
		{"9 item 11: the owner went on past the reader's prompt", one(16, 1), one(16, 1), []int{5, 6}, []int{1, 2, 3}, extents{33, 32}, []int{5, 6}, []int{1, 2}},
		{"9 item 11: the same lists as a prefix hit", one(16, 1), one(16, 1), []int{5, 6}, []int{1, 2, 3}, extents{48, 48}, []int{5, 6}, []int{2, 3}},
		{"9 item 12: bs 16/4, 40 tokens, 1 block cached", one(16, 1), one(4, 1), []int{1, 2}, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, extents{},
			[]int{4, 5, 6, 7, 8, 9}, []int{4, 5, 6, 7, 8, 9}},
		{"9 item 13: nothing wanted", one(16, 1), one(16, 1), nil, []int{1, 2, 3}, extents{}, []int{}, []int{}},
		{"A6.16: ratio 4, clipped to 10", one(16, 1), one(4, 1), []int{1, 2, 3}, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, extents{},
			[]int{4, 5, 6, 7, 8, 9, 10, 11, 12, 13}, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}},
		{"A6.16: a full hit stays empty", one(16, 1), one(4, 1), nil, []int{0, 1, 2, 3}, extents{}, []int{}, []int{}},
		{"A6.5: 10 here, 6 there", one(8, 10), one(8, 6), []int{0}, []int{0, 1}, extents{80, 80}, seq(0, 10), seq(0, 10)},
		{"A6.5: 6 here, 10 there", one(8, 6), one(8, 10), []int{0}, []int{0}, extents{48, 48}, seq(0, 6), seq(0, 6)},
		{"A6.6: 34 kernel blocks there", one(8, 34), one(8, 34), []int{1, 0}, []int{5, 6}, extents{}, append(seq(34, 68), seq(0, 34)...), seq(170, 238)},
		{"each side's own ratio", one(8, 2), one(16, 1), []int{3}, []int{4}, extents{}, []int{6, 7}, []int{8, 9}},
		{"A6.11: unequal ratios and a suffix", one(8, 3), one(8, 1), []int{9}, []int{0, 1, 2, 3}, extents{}, []int{27}, []int{3}},
		{"owner's blocks twice as large, all wanted", one(4, 1), one(8, 1), []int{0, 1, 2, 3}, []int{5, 6}, extents{}, seq(0, 4), []int{10, 11, 12, 13}},
	} {
		l, r, err := pair(c.here.m, c.there.m, [][]int{c.local}, [][]int{c.offered}, c.at)
		require.NoError(t, err, c.why)
		require.Equal(t, [][]int{c.l}, l, c.why)
		require.Equal(t, [][]int{c.r}, r, c.why)
	}
	for want, c := range map[string]struct {
		here, there    side
		local, offered []int
		at             extents
	}{
		"group 0: 2 local blocks of 16 tokens for the 1 blocks of 16 tokens": {one(16, 1), one(16, 1), []int{1, 2}, []int{0}, extents{}},
		"group 0: 4 local blocks of 16 tokens for the 1 blocks":              {one(16, 1), one(16, 1), []int{1, 2, 3, 4}, []int{0}, extents{40, 40}},
		"remote_num_tokens, which would tell":                                {one(12, 1), one(8, 1), []int{1}, []int{0, 1}, extents{}},
		"3 remote blocks of 16 tokens, and remote_num_tokens is 32":          {one(16, 1), one(16, 1), []int{1}, []int{0, 1, 2}, extents{32, 32}},
		"blocks for 33 tokens, and remote_num_tokens is 32":                  {one(16, 1), one(16, 1), []int{1}, []int{0, 1}, extents{32, 33}},
		"0…9": {one(8, 34), one(8, 34), []int{10}, []int{0}, extents{}},
	} {
		_, _, err := pair(c.here.m, c.there.m, [][]int{c.local}, [][]int{c.offered}, c.at)
		require.ErrorContains(t, err, want)
	}
}

// peer-tests A6.17: 2 blocks here are 8 sub-blocks, of which the owner has 6; the last 2 are zeroed in every region and head.
func TestWhatTheOwnerDoesNotHaveIsZeroed(t *testing.T) {
	d := newSide(2, 1, 0, 16, 1, Region{Base: 1 << 16, BlockLen: 2 * 16 * 4}, Region{Base: 1 << 20, BlockLen: 16, Replicated: true})
	p := newSide(2, 1, 0, 4, 1, Region{BlockLen: 2 * 4 * 4}, Region{BlockLen: 4, Replicated: true})
	local, _ := d.match(t, 2, 0, 1, 1, p)
	l, _, err := pair(d.m, p.m, [][]int{{7, 3}}, [][]int{seq(0, 6)}, extents{})
	require.NoError(t, err)
	left, err := rest(d.m, p.m, [][]int{{7, 3}}, l)
	require.NoError(t, err)
	type span struct {
		addr uint64
		n    int
	}
	var got []span
	newView(d.m, local).each(d.m, left, func(addr uint64, n int) { got = append(got, span{addr, n}) })
	block := uint64(1<<16 + 3*128)
	require.Equal(t, []span{{block + 8*4, 16}, {block + 64 + 8*4, 16}, {block + 12*4, 16}, {block + 64 + 12*4, 16}, {1<<20 + 3*16 + 8, 4}, {1<<20 + 3*16 + 12, 4}}, got)
}

func seq(from, to int) (out []int) {
	for i := from; i < to; i++ {
		out = append(out, i)
	}
	return out
}

// vllm-wire.md 6.1; peer-tests A6.2, A6.4, A6.12, A7.9.
func TestGroupsAreReadFromTheirOwnRegions(t *testing.T) {
	groups := func(perLogical int, of ...int) side {
		var regions []Region
		for _, g := range of {
			regions = append(regions, Region{BlockLen: 64, Group: g, Blocks: 40})
		}
		return newSide(0, 1, 0, 16, perLogical, regions...)
	}
	t.Run("A6.4: both lists expanded", func(t *testing.T) {
		s := groups(2, SharedGroup)
		l, r, err := pair(s.m, s.m, [][]int{{0, 1, 2}, {3, 4}}, [][]int{{0, 1, 2}, {3, 4}}, extents{})
		require.NoError(t, err)
		require.Equal(t, [][]int{seq(0, 6), seq(6, 10)}, l)
		require.Equal(t, l, r)
	})
	t.Run("A7.9: shared regions are published, and merge the lists", func(t *testing.T) {
		s := groups(1, SharedGroup)
		m, err := parseMetadata(appendMetadata(nil, s.m))
		require.NoError(t, err)
		require.Equal(t, []int{-1}, m.RegionGroups)
		l, _, err := pair(s.m, m, [][]int{{0}, {2}}, [][]int{{0}, {2}}, extents{})
		require.NoError(t, err)
		require.Equal(t, []int32{0, 2}, newView(s.m, whole(s.m)).indices(nil, s.m, l))
	})
	t.Run("A6.2: prefix hits and windows align in each group", func(t *testing.T) {
		s := groups(1, 0, 1)
		// Group 1 keeps the last two of five blocks; the reader has the first two of group 0, and one of group 1.
		l, r, err := pair(s.m, s.m, [][]int{{2, 3, 4}, {9}}, [][]int{{10, 11, 12, 13, 14}, {23, 24}}, extents{})
		require.NoError(t, err)
		require.Equal(t, [][]int{{2, 3, 4}, {9}}, l)
		require.Equal(t, [][]int{{12, 13, 14}, {24}}, r)
		v := newView(s.m, whole(s.m))
		require.Equal(t, []int32{2, 3, 4, 49}, v.indices(nil, s.m, l))
		require.Equal(t, []int32{12, 13, 14, 64}, v.indices(nil, s.m, r))
	})
	t.Run("9 item 13: a group with a full hit reads nothing", func(t *testing.T) {
		s := groups(1, 0, 1)
		l, r, err := pair(s.m, s.m, [][]int{{2}, {}}, [][]int{{10, 11}, {23, 24}}, extents{})
		require.NoError(t, err)
		require.Equal(t, [][]int{{2}, {}}, l)
		require.Equal(t, [][]int{{11}, {}}, r)
	})
	t.Run("an owner that states no groups", func(t *testing.T) {
		s := groups(1, 0, 1)
		silent := *s.m
		silent.RegionGroups = nil
		_, r, err := pair(s.m, &silent, [][]int{{0}, {0}}, [][]int{{39}, {39}}, extents{})
		require.NoError(t, err)
		require.Equal(t, [][]int{{39}, {39}}, r)
		for _, id := range []int{40, math.MaxInt64} {
			_, _, err = pair(s.m, &silent, [][]int{{0}, {0}}, [][]int{{39}, {id}}, extents{})
			require.ErrorContains(t, err, "is not in 0…39", "another region's, or none of the owner's")
		}
	})
	t.Run("windows with larger blocks here", func(t *testing.T) {
		here, there := groups(2, 0, 1), groups(1, 0, 1)
		// 7 blocks of 16 tokens there, group 1 keeps the last 4; 4 blocks of 32 here, the last 2 of them in group 1.
		l, r, err := pair(here.m, there.m, [][]int{{0, 1, 2, 3}, {5}}, [][]int{seq(10, 17), {23, 24, 25, 26}}, extents{112, 112})
		require.NoError(t, err)
		require.Equal(t, [][]int{seq(0, 7), {10}}, l)
		require.Equal(t, [][]int{seq(10, 17), {26}}, r)
		_, _, err = pair(here.m, there.m, [][]int{{0, 1, 2, 3}, {4, 5}}, [][]int{seq(10, 17), {25, 26}}, extents{112, 112})
		require.ErrorContains(t, err, "group 1: 2 local blocks of 32 tokens for the 2 blocks of 16 tokens")
		_, _, err = pair(here.m, there.m, [][]int{{0}, {1}}, [][]int{{0, 1}, {2, 3}}, extents{})
		require.ErrorContains(t, err, "remote_num_tokens", "where windows start cannot be told")
	})
	for want, c := range map[string]struct {
		s              side
		local, offered [][]int
	}{
		"1 local and 2 remote lists":                        {groups(1, 0), [][]int{{1}}, [][]int{{1}, {2}}},
		"0 local and 0 remote lists":                        {groups(1, 0), nil, nil},
		"2 lists of block ids, and no region is in group 1": {groups(1, 0), [][]int{{1}, {2}}, [][]int{{1}, {2}}},
		"1 lists of block ids, and region 1 is in group 1":  {groups(1, 0, 1), [][]int{{1}}, [][]int{{1}}},
		"local block 3 twice":                               {groups(1, SharedGroup), [][]int{{3}, {3}}, [][]int{{1}, {2}}},
	} {
		_, _, err := pair(c.s.m, c.s.m, c.local, c.offered, extents{})
		require.ErrorContains(t, err, want)
	}
	s := groups(1, 0, 1)
	_, _, err := pair(s.m, s.m, [][]int{{3}, {3}}, [][]int{{1}, {2}}, extents{})
	require.NoError(t, err, "block 3 of one region is not block 3 of another")
}

// vllm#55434, cases.md 49: what is contiguous on both sides stays adjacent, so that NIXL merges it.
func TestContiguousBlocksStayAdjacent(t *testing.T) {
	runs := func(here, there side, l, r [][]int) (n int) {
		local, remote, err := here.kv.match(here.m, there.m, shares(1, 0, 1, 1)[0])
		require.NoError(t, err)
		a, b := addrs(here.m, local, l), addrs(there.m, remote, r)
		for i := range a {
			if size := uint64(local[0].size); i == 0 || a[i] != a[i-1]+size || b[i] != b[i-1]+size {
				n++
			}
		}
		return n
	}
	regions := make([]Region, 32)
	for i := range regions {
		regions[i] = Region{Base: uint64(i+1) << 32, BlockLen: 4096, Blocks: 1024}
	}
	d := newSide(1, 1, 0, 16, 1, regions...)
	l, r, err := pair(d.m, d.m, [][]int{seq(0, 1024)}, [][]int{seq(0, 1024)}, extents{})
	require.NoError(t, err)
	require.Equal(t, 32, runs(d, d, l, r))
	for i := range regions {
		regions[i].BlockLen, regions[i].Blocks = 1024, 4096
	}
	p := newSide(1, 1, 0, 4, 1, regions...)
	l, r, err = pair(d.m, p.m, [][]int{seq(0, 1024)}, [][]int{seq(0, 4096)}, extents{})
	require.NoError(t, err)
	require.Equal(t, 32, runs(d, p, l, r), "cut into sub-blocks, of one head")
}
