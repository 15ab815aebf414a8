package rdma

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// heapFabric has memory that no peer can reach.
type heapFabric struct{ Fabric }

type heapMemory []byte

func (m heapMemory) Addr() uint64  { return 4096 }
func (m heapMemory) Bytes() []byte { return m }

func (heapFabric) Alloc(size int) (Memory, error) { return heapMemory(make([]byte, size)), nil }

// A cell does not keep the nonce of an earlier check: a slot READ that claims to have ended without a byte would pass with it.
func TestCellsAreClearedBeforeTheyAreUsedAgain(t *testing.T) {
	p := cellPool{fabric: heapFabric{}}
	cells, err := p.get(2)
	require.NoError(t, err)
	for _, c := range cells {
		*c.value() = 7777
	}
	require.Equal(t, []int64{7777, 7777}, p.take(cells))
	again, err := p.get(2)
	require.NoError(t, err)
	require.Subset(t, cells, again, "the same cells")
	require.Equal(t, []int64{0, 0}, p.take(again))
}
