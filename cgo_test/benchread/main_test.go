package main

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRequestsNameEachBlockOnceAndStayInTheNode(t *testing.T) {
	b := &bench{shape: newShape(4096)}
	for _, shuffled := range []bool{false, true} {
		local, remote := b.request(shuffled)
		for _, side := range [][]int{local, remote} {
			require.Len(t, side, b.Blocks)
			sorted := slices.Clone(side)
			slices.Sort(sorted)
			require.Equal(t, sorted, slices.Compact(slices.Clone(sorted)))
			require.GreaterOrEqual(t, sorted[0], 0)
			require.Less(t, sorted[b.Blocks-1], b.NodeBlocks)
			require.Equal(t, !shuffled, slices.Equal(side, sorted) && sorted[b.Blocks-1] == b.Blocks-1)
		}
		require.Equal(t, shuffled, !slices.Equal(local, remote))
	}
	// Contiguous blocks of one layer end before the next layer begins, or the whole request would be one descriptor.
	require.Less(t, b.Blocks, b.NodeBlocks)
}

func TestEveryBlockHasItsOwnWord(t *testing.T) {
	s, seen := newShape(4096), map[uint64]bool{0: true} // 0: what a reader wipes its blocks with
	for l := range s.Layers {
		for b := range s.NodeBlocks {
			require.False(t, seen[word(l, b)])
			seen[word(l, b)] = true
		}
	}
}
