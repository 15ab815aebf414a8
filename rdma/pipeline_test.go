package rdma_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/topology/shape"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// slotReads are the slot READs under way, as slots read per owner; every one reads single words.
func slotReads(t *testing.T, net *rdmatest.Network) map[string][]int {
	t.Helper()
	out := map[string][]int{}
	for _, r := range net.Reads() {
		local, remote := r.Descs()
		if remote[0].Len != 8 {
			continue
		}
		for k := range remote {
			require.EqualValues(t, 8, local[k].Len)
			require.EqualValues(t, 8, remote[k].Len)
		}
		out[r.Owner()] = append(out[r.Owner()], len(remote))
	}
	return out
}

func deliverAll(t *testing.T, net *rdmatest.Network, which func(*rdmatest.Read) bool) {
	t.Helper()
	for _, r := range net.Reads() {
		if which(r) {
			require.True(t, r.Deliver())
		}
	}
}

// Specification, "Lease Verification on the Reader": the checks of one step share one READ per remote rank. Counted on the
// network: one per rank, however many requests, and those that come while it is under way share the next one.
func TestChecksShareOneReadPerRemoteRankAndStep(t *testing.T) {
	const ranks, requests = 4, 20
	net := rdmatest.NewNetwork()
	p := openShape(t, shape.Named("tp 4 to 1"), inMemory(net))
	var admit lease.Plan
	var pulls []lease.Pull
	for i := range requests {
		id, nonce := fmt.Sprint("req-", i), int64(1)<<40+int64(i)
		admit.Admit = append(admit.Admit, lease.Admission{Request: id, Nonce: nonce, Slot: i})
		admit.Grant = append(admit.Grant, lease.Grant{Request: id, Nonce: nonce, TTL: time.Hour, Exported: true})
		pull := p.pull(ranks)
		pull.Request, pull.RemoteRequest, pull.Verify, pull.Lease = "local-"+id, id, true, &lease.SlotRef{Slot: i, Nonce: nonce}
		pulls = append(pulls, pull)
	}
	for _, r := range p.owners {
		_, err := r.Step(admit)
		require.NoError(t, err)
	}
	net.HoldReads(true)
	p.step(lease.Plan{Read: pulls}, func(lease.Result) bool { return len(net.Reads()) == ranks*requests })

	isBlock := func(r *rdmatest.Read) bool { _, remote := r.Descs(); return remote[0].Len != 8 }
	first := 0
	deliverAll(t, net, func(r *rdmatest.Read) bool { // of the first 12 requests; READs are listed in the order posted
		first++
		return first <= ranks*12
	})
	once := func(lease.Result) bool { return true }
	p.step(lease.Plan{}, once)
	owners := []string{"rank-0", "rank-1", "rank-2", "rank-3"}
	want := map[string][]int{}
	for _, o := range owners {
		want[o] = []int{12}
	}
	require.Equal(t, want, slotReads(t, net))

	deliverAll(t, net, isBlock)
	p.step(lease.Plan{}, once)
	for _, o := range owners {
		want[o] = []int{12, 8}
	}
	require.Equal(t, want, slotReads(t, net), "a check that is under way is not joined")
	p.step(lease.Plan{}, once)
	require.Equal(t, want, slotReads(t, net), "nor repeated")

	deliverAll(t, net, func(*rdmatest.Read) bool { return true })
	var received []string
	p.step(lease.Plan{}, func(res lease.Result) bool {
		require.Empty(t, res.Failed)
		received = append(received, res.Received...)
		return len(received) == requests
	})
	st, err := p.readers[0].Stats()
	require.NoError(t, err)
	require.EqualValues(t, 2*ranks, st.Checks)
	require.EqualValues(t, ranks*requests, st.Reads)
}

// inFlight is a fabric that knows how many block READs of it were under way at most, and the order in which they began.
type inFlight struct {
	rdma.Fabric
	now, most int
	began     []int32 // the first local index of each
}

type countedRead struct {
	rdma.Read
	f     *inFlight
	first int32
	over  bool
}

func (f *inFlight) NewRead(local rdma.List, li []int32, remote rdma.List, ri []int32, separate bool) (rdma.Read, error) {
	r, err := f.Fabric.NewRead(local, li, remote, ri, separate)
	if err != nil || separate {
		return r, err
	}
	return &countedRead{Read: r, f: f, first: li[0]}, nil
}

func (r *countedRead) Post() (nixl.State, error) {
	r.f.now++
	r.f.most = max(r.f.most, r.f.now)
	r.f.began = append(r.f.began, r.first)
	return r.Read.Post()
}

func (f *inFlight) Poll(reads []rdma.Read, states []nixl.State) error {
	plain := make([]rdma.Read, len(reads))
	for i, r := range reads {
		if c, ok := r.(*countedRead); ok {
			r = c.Read
		}
		plain[i] = r
	}
	err := f.Fabric.Poll(plain, states)
	for i, r := range reads {
		if c, ok := r.(*countedRead); ok && err == nil && states[i] != nixl.Active && !c.over {
			c.over = true
			f.now--
		}
	}
	return err
}

// The same over real NIXL: 32 pulls arrive at once, and four are read at a time, in order, byte-exact and verified.
func TestReadsOverNIXLAreCappedAndInOrder(t *testing.T) {
	const requests, cap, blockLen = 32, 4, 1 << 16
	open := func(name string, wrap func(rdma.Fabric) rdma.Fabric) (*rdma.Worker, []byte, lease.Peer) {
		kv, err := nixl.AllocBuffer(requests * blockLen)
		require.NoError(t, err)
		f, err := rdma.OpenNIXL(rdma.NIXLConfig{Memory: []nixl.Memory{kv}})
		require.NoError(t, err)
		w, err := rdma.NewWorker(wrap(f), rdma.WorkerConfig{Engine: name, MaxReadsPerPeer: cap, ReadTimeout: time.Hour,
			KV: rdma.KV{Regions: []rdma.Region{{Base: kv.Addr(), BlockLen: blockLen, Blocks: requests}}}})
		require.NoError(t, err)
		side, err := rdma.ListenSideChannel("127.0.0.1", 0, nil)
		require.NoError(t, err)
		side.Serve(w)
		t.Cleanup(func() {
			require.NoError(t, side.Close())
			require.NoError(t, w.Close())
			require.NoError(t, kv.Close())
		})
		return w, kv.Bytes(), lease.Peer{Engine: name, Host: "127.0.0.1", Port: side.Port(), TPSize: 1, PPSize: 1, DCPSize: 1}
	}
	owner, there, peer := open("owner", func(f rdma.Fabric) rdma.Fabric { return f })
	var counted inFlight
	reader, here, _ := open("reader", func(f rdma.Fabric) rdma.Fabric { counted.Fabric = f; return &counted })
	var admit, read lease.Plan
	var order []int32
	for i := range requests {
		id, nonce, block := fmt.Sprint("req-", i), int64(1)<<40+int64(i), i*5%requests // not in the order of the blocks
		for k := range blockLen {
			there[block*blockLen+k] = byte(k>>8) ^ byte(k) ^ byte(7*block+1)
		}
		admit.Admit = append(admit.Admit, lease.Admission{Request: id, Nonce: nonce, Slot: i})
		admit.Grant = append(admit.Grant, lease.Grant{Request: id, Nonce: nonce, TTL: time.Hour, Exported: true})
		read.Read = append(read.Read, lease.Pull{Request: id, Peer: peer, RemoteRequest: id, RemoteBlocks: [][]int{{block}}, LocalBlocks: [][]int{{block}},
			Lease: &lease.SlotRef{Slot: i, Nonce: nonce}, Verify: true})
		order = append(order, int32(block))
	}
	_, err := owner.Step(time.Now(), admit)
	require.NoError(t, err)
	var received []string
	for deadline := time.Now().Add(time.Minute); len(received) < requests; time.Sleep(50 * time.Microsecond) {
		require.True(t, time.Now().Before(deadline))
		res, err := reader.Step(time.Now(), read)
		require.NoError(t, err)
		require.Empty(t, res.Failed)
		received = append(received, res.Received...)
		read = lease.Plan{}
	}
	require.Equal(t, order, counted.began)
	require.Equal(t, cap, counted.most)
	require.Zero(t, counted.now)
	require.True(t, slices.Equal(there, here), "the bytes")
	require.EqualValues(t, requests, reader.Stats().Verified)
}
