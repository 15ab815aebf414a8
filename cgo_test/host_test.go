package cgotest

import (
	"fmt"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
)

// sharedArena maps size bytes twice, as an engine and its sidecar do: what is written through one shows through the other.
func sharedArena(t *testing.T, size int) (engines, ranks []byte) {
	t.Helper()
	fd, err := unix.MemfdCreate("kv", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.Ftruncate(fd, int64(size)))
	for _, m := range []*[]byte{&engines, &ranks} {
		*m, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, unix.Munmap(*m)) })
	}
	return engines, ranks
}

// An engine's own arena, which another process may share, is the KV memory of a rank over real NIXL.
func TestWorkersReadVerifiedBlocksOfAnEnginesOwnArena(t *testing.T) {
	const blocks, blockLen = 16, 1 << 15
	open := func(name string) (*rdma.Worker, []byte, lease.Peer) {
		engines, ranks := sharedArena(t, blocks*blockLen)
		base := uint64(uintptr(unsafe.Pointer(&ranks[0])))
		kv, err := nixl.Host(base, uint64(len(ranks)))
		require.NoError(t, err)
		fabric, err := rdma.OpenNIXL(rdma.NIXLConfig{Memory: []nixl.Memory{kv}})
		require.NoError(t, err)
		w, err := rdma.NewWorker(fabric, rdma.WorkerConfig{Engine: name,
			KV: rdma.KV{Regions: []rdma.Region{{Base: base, BlockLen: blockLen, Blocks: blocks}}}})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, w.Close()) }) // before the arena is unmapped
		side, err := rdma.ListenSideChannel("127.0.0.1", 0, nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, side.Close()) })
		side.Serve(w)
		return w, engines, lease.Peer{Engine: name, Host: "127.0.0.1", Port: side.Port(), TPSize: 1, PPSize: 1, DCPSize: 1}
	}
	owner, there, peer := open("owner")
	reader, here, _ := open("reader")
	var admit, read lease.Plan
	want := make([]byte, len(here))
	for i := range blocks / 2 {
		id, nonce, from, to := fmt.Sprint("req-", i), int64(1)<<40+int64(i), 2*i, blocks-1-i
		block := there[from*blockLen:][:blockLen]
		for k := range block {
			block[k] = byte(k>>8) ^ byte(k) ^ byte(7*from+1)
		}
		copy(want[to*blockLen:], block)
		admit.Admit = append(admit.Admit, lease.Admission{Request: id, Nonce: nonce, Slot: i})
		admit.Grant = append(admit.Grant, lease.Grant{Request: id, Nonce: nonce, TTL: time.Hour, Exported: true})
		read.Read = append(read.Read, lease.Pull{Request: id, Peer: peer, RemoteRequest: id, RemoteBlocks: [][]int{{from}}, LocalBlocks: [][]int{{to}},
			Lease: &lease.SlotRef{Slot: i, Nonce: nonce}, Verify: true})
	}
	_, err := owner.Step(time.Now(), admit)
	require.NoError(t, err)
	received := 0
	require.Eventually(t, func() bool {
		res, err := reader.Step(time.Now(), read)
		require.NoError(t, err)
		require.Empty(t, res.Failed)
		read = lease.Plan{}
		received += len(res.Received)
		return received == blocks/2
	}, patience, time.Millisecond)
	require.Equal(t, want, here, "the bytes, as the reader's engine sees them")
	require.EqualValues(t, blocks/2, reader.Stats().Verified)
}
