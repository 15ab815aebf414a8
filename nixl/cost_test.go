package nixl

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// UCX estimates, and more bytes take longer. POSIX cannot tell.
func TestEstimateGrowsWithTheTransfer(t *testing.T) {
	l := newLink(t, 64<<20, 1<<20)
	cost := func(x *Transfer) Cost {
		c, err := x.EstimateCost()
		require.NoError(t, err)
		require.NoError(t, x.Close())
		return c
	}
	small, large := cost(l.read(t, TransferOptions{}, 0)), cost(l.read(t, TransferOptions{}))
	t.Log(small, large)
	require.Positive(t, small.Duration)
	require.Greater(t, large.Duration, small.Duration)

	a, b, r, _ := newPOSIX(t, 4096)
	d, err := r.Desc(0, 4096)
	require.NoError(t, err)
	x, err := a.CreateTransfer(Write, DRAM, blocks(b, 4096), a.Name(), File, []Desc{d}, TransferOptions{})
	require.NoError(t, err)
	_, err = x.EstimateCost()
	require.ErrorIs(t, err, ErrBackend)
	require.ErrorContains(t, err, "not every backend can tell")
}
