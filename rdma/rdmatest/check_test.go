package rdmatest_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// onDevice is a fabric whose KV memory counts as VRAM. It knows how slots, which are of 8 bytes, were read.
type onDevice struct {
	rdma.Fabric
	slots    map[rdma.List]bool
	types    []nixl.MemType
	separate []bool
}

func (f *onDevice) LocalList(_ nixl.MemType, descs []nixl.Desc) (rdma.List, error) {
	return f.Fabric.LocalList(nixl.DRAM, descs)
}

func (f *onDevice) RemoteList(agent string, mem nixl.MemType, descs []nixl.Desc) (rdma.List, error) {
	l, err := f.Fabric.RemoteList(agent, nixl.DRAM, descs)
	if descs[0].Len == 8 {
		f.slots[l] = true
		f.types = append(f.types, mem)
	}
	return l, err
}

func (f *onDevice) NewRead(local rdma.List, li []int32, remote rdma.List, ri []int32, separate bool) (rdma.Read, error) {
	if f.slots[remote] {
		f.separate = append(f.separate, separate)
	}
	return f.Fabric.NewRead(local, li, remote, ri, separate)
}

// Specification, "Lease Verification on the Reader": the slots are in DRAM wherever the KV cache is, and a READ of neighbouring
// slots is not joined into a longer one, which could tear a nonce (cases.md 10). One that ends within CheckPoll is the verdict of
// the step in which the blocks came.
func TestSlotsAreReadFromDRAMOneByOneInTheStepOfTheBlocks(t *testing.T) {
	network := rdmatest.NewNetwork()
	open := func(name string) (*onDevice, *rdma.Worker) {
		kv := network.NewMemory(4 * blockLen)
		f := &onDevice{Fabric: network.NewFabric(name, kv), slots: map[rdma.List]bool{}}
		w, err := rdma.NewWorker(f, rdma.WorkerConfig{Engine: name, CheckPoll: time.Minute,
			KV: rdma.KV{MemType: nixl.VRAM, Regions: []rdma.Region{{Base: kv.Addr(), BlockLen: blockLen, Blocks: 4}}}})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, w.Close()) })
		return f, w
	}
	_, owner := open("owner")
	f, reader := open("reader")
	side, err := rdma.ListenSideChannel("", 0, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, side.Close()) })
	side.Serve(owner)

	var own, read lease.Plan
	for i, id := range []string{"a", "b"} {
		nonce := int64(5000 + i)
		own.Admit = append(own.Admit, lease.Admission{Request: id, Nonce: nonce, Slot: i})
		own.Grant = append(own.Grant, lease.Grant{Request: id, Nonce: nonce, TTL: time.Hour, Exported: true})
		read.Read = append(read.Read, lease.Pull{Request: id, RemoteRequest: id, RemoteBlocks: [][]int{{i}}, LocalBlocks: [][]int{{i}},
			Peer:   lease.Peer{Engine: "owner", Host: "127.0.0.1", Port: side.Port(), TPSize: 1, PPSize: 1, DCPSize: 1},
			Verify: true, Lease: &lease.SlotRef{Slot: i, Nonce: nonce}})
	}
	_, err = owner.Step(time.Now(), own)
	require.NoError(t, err)
	var res lease.Result
	for deadline := time.Now().Add(time.Minute); reader.Stats().Reads == 0; {
		require.True(t, time.Now().Before(deadline))
		res, err = reader.Step(time.Now(), read)
		require.NoError(t, err)
		require.Empty(t, res.Failed)
		read = lease.Plan{}
		time.Sleep(20 * time.Microsecond)
	}
	require.ElementsMatch(t, []string{"a", "b"}, res.Received, "in the step that posted and ended the READs")
	require.Equal(t, []nixl.MemType{nixl.DRAM}, f.types)
	require.Equal(t, []bool{true}, f.separate, "one READ of both slots, each by itself")
}
