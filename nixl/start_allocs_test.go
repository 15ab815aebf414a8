//go:build !race && !asan

package nixl

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The sanitizers allocate on their own.
func TestATransferCostsOneAllocation(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	one := []int32{1}
	require.LessOrEqual(t, testing.AllocsPerRun(100, func() {
		x, state, _ := l.reader.Start(Read, l.local, one, l.remote, one, TransferOptions{})
		for state == Active {
			state, _ = x.Poll()
		}
		x.Close()
	}), 1.0)
}
