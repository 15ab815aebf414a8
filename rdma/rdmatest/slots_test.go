package rdmatest_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// Specification, "Lease Verification on the Reader": an instance that cannot register its lease slots fails to start, rather than
// failing every pull. One that is to have none starts.
func TestWorkerWithoutTheSlotsItIsToHaveDoesNotStart(t *testing.T) {
	network := rdmatest.NewNetwork()
	start := func(name string, slots int) error {
		kv := network.NewMemory(4 * blockLen)
		f := network.NewFabric(name, kv)
		f.Fail(rdmatest.OpAlloc, 1, errTold)
		cfg := rdma.WorkerConfig{Engine: name, Lease: lease.DefaultConfig(), MaxSeqs: 3,
			KV: rdma.KV{Regions: []rdma.Region{{Base: kv.Addr(), BlockLen: blockLen, Blocks: 4}}}}
		cfg.Lease.Slots = slots
		w, err := rdma.NewWorker(f, cfg)
		if err == nil {
			require.NoError(t, w.Close())
		}
		return err
	}
	err := start("owner", 0)
	require.ErrorIs(t, err, errTold)
	require.ErrorContains(t, err, "register 7 lease slots in DRAM", "KV blocks + max_num_seqs")
	require.NoError(t, start("without", lease.NoSlot))
}
