package rdma

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDescriptorIndicesAreVLLMs(t *testing.T) {
	// vllm-wire.md 6.1: 3 regions of 10 blocks, blocks 4 and 9.
	m := sample()
	m.BaseAddrs, m.BlockLens, m.BlockStrides = make([]uint64, 3), make([]int, 3), make([]int, 3)
	v := newView(m, whole(m))
	require.Equal(t, []int32{4, 9, 14, 19, 24, 29}, v.indices(nil, m, [][]int{{4, 9}}))
	m.RegionGroups = []int{SharedGroup, SharedGroup, 0}
	require.Equal(t, []int32{4, 9, 14, 19, 24, 29, 2, 12}, v.indices(nil, m, [][]int{{4, 9}, {2}}))
	m.RegionGroups = []int{SharedGroup, SharedGroup, SharedGroup}
	require.Equal(t, []int32{0, 2, 10, 12, 20, 22}, v.indices(nil, m, [][]int{{0}, {2}}), "peer-tests A7.9")

	var g struct {
		Transfers []struct {
			Name          string
			Op            string
			Regions       int
			NumBlocks     int     `json:"num_blocks"`
			RemoteBlocks  [][]int `json:"remote_block_ids"`
			LocalBlocks   [][]int `json:"local_block_ids"`
			Local, Remote []int32
		}
	}
	golden(t, "transfers.json", &g)
	require.NotEmpty(t, g.Transfers)
	for _, x := range g.Transfers {
		t.Run(x.Name, func(t *testing.T) {
			if x.Op != "READ" {
				t.Fatalf("a transfer of another kind: %s", x.Op)
			}
			m := sample()
			m.NumBlocks = x.NumBlocks
			m.BaseAddrs, m.BlockLens, m.BlockStrides = make([]uint64, x.Regions), make([]int, x.Regions), make([]int, x.Regions)
			l, r, err := pair(m, m, x.LocalBlocks, x.RemoteBlocks, extents{})
			require.NoError(t, err)
			v := newView(m, whole(m))
			require.Equal(t, x.Local, v.indices(nil, m, l))
			require.Equal(t, x.Remote, v.indices(nil, m, r))
		})
	}
}

// vllm#52234, vllm#51505, cases.md 22: what a client or a router put into the params cannot reach the transport.
func TestBlockIDsOutOfRangeAreRefused(t *testing.T) {
	m := sample()
	m.NumBlocks = 16
	for name, ids := range map[string][2][][]int{
		"negative remote":          {{{0}}, {{-1}}},
		"remote at the end":        {{{0}}, {{16}}},
		"remote 2^31":              {{{0}}, {{1 << 31}}},
		"remote 2^63-1":            {{{0}}, {{math.MaxInt64}}},
		"negative local":           {{{-1}}, {{0}}},
		"local at the end":         {{{16}}, {{0}}},
		"local twice":              {{{3, 3}}, {{0, 1}}},
		"more local than offered":  {{{1, 2}}, {{0}}},
		"two groups":               {{{1}, {2}}, {{1}, {2}}},
		"groups differ in numbers": {{{1}}, {{1}, {2}}},
		"no group":                 {{}, {}},
	} {
		_, _, err := pair(m, m, ids[0], ids[1], extents{})
		require.Error(t, err, name)
	}
}

func TestExtentDoesNotWrap(t *testing.T) {
	for _, c := range []struct {
		base              uint64
		n, length, stride int
		end               uint64
		ok                bool
	}{
		{0, 1, 8, 8, 8, true},
		{100, 3, 10, 20, 150, true},
		{math.MaxUint64 - 8, 1, 8, 8, math.MaxUint64, true},
		{math.MaxUint64 - 7, 1, 8, 8, 0, false},
		{math.MaxUint64 - 4095, 1, 8192, 8192, 0, false}, // cases.md 22: native create answers 0 and the owner dies
		{0, math.MaxInt64, 1, math.MaxInt64, 0, false},
		{0, 0, 8, 8, 0, false},
		{0, 1, -1, 8, 0, false},
	} {
		end, ok := extent(c.base, c.n, c.length, c.stride)
		require.Equal(t, c.ok, ok, c)
		require.Equal(t, c.end, end, c)
	}
}

// vllm#55434, cases.md 49: NIXL merges only where both sides go up.
func TestPairsAreReadInAscendingOrder(t *testing.T) {
	local, remote := []int{5, 4, 3, 9}, []int{2, 1, 0, 7}
	ascend(local, remote)
	require.Equal(t, []int{3, 4, 5, 9}, local)
	require.Equal(t, []int{0, 1, 2, 7}, remote)
}
