package rdma_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// The fabric over NIXL keeps the same contract as the in-memory one.
func TestNIXLFabric(t *testing.T) {
	open := func(t *testing.T) rdmatest.End {
		kv, err := nixl.AllocBuffer(4 << 20)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, kv.Close()) })
		f, err := rdma.OpenNIXL(rdma.NIXLConfig{Memory: []nixl.Memory{kv}})
		require.NoError(t, err)
		return rdmatest.End{Fabric: f, Memory: kv}
	}
	rdmatest.TestFabric(t, func(t *testing.T) (a, b rdmatest.End) { return open(t), open(t) }, rdmatest.Options{})
}
