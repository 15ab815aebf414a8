package rdma_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/topology/shape"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// tap is a fabric that remembers the read-completes it received and the peers it loaded.
type tap struct {
	rdma.Fabric
	mu     sync.Mutex
	said   []string
	loaded int
}

func (f *tap) Notifications(dst []nixl.Notification) ([]nixl.Notification, error) {
	n := len(dst)
	dst, err := f.Fabric.Notifications(dst)
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range dst[n:] {
		if text := string(m.Payload); !strings.HasPrefix(text, "HB") {
			f.said = append(f.said, text)
		}
	}
	return dst, err
}

func (f *tap) Load(metadata []byte) (string, error) {
	f.mu.Lock()
	f.loaded++
	f.mu.Unlock()
	return f.Fabric.Load(metadata)
}

// pairOf is a shape with its ranks in this process.
type pairOf struct {
	t               *testing.T
	s               *shape.Shape
	side            *rdma.SideChannel
	owners, readers []shape.Ranker
	taps            []*tap // of owners, then readers
}

func openShape(t *testing.T, s *shape.Shape, open shape.Open) *pairOf {
	t.Helper()
	p := &pairOf{t: t, s: s}
	var err error
	p.side, err = rdma.ListenSideChannel("127.0.0.1", 0, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.side.Close()) })
	for i := range s.Owner.TP + s.Reader.TP {
		owner, rank := i < s.Owner.TP, i
		if !owner {
			rank -= s.Owner.TP
		}
		r, err := shape.OpenRank(s, owner, rank, func(size int) (rdma.Fabric, rdma.Memory, func() error, error) {
			f, mem, end, err := open(size)
			x := &tap{Fabric: f}
			p.taps = append(p.taps, x)
			return x, mem, end, err
		})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, r.Close()) })
		if owner {
			p.owners = append(p.owners, r)
			p.side.Serve(r.Worker)
		} else {
			p.readers = append(p.readers, r)
		}
	}
	return p
}

// inMemory opens fabrics on a network; ranks are named by number in the order opened.
func inMemory(net *rdmatest.Network) shape.Open {
	n := 0
	return func(size int) (rdma.Fabric, rdma.Memory, func() error, error) {
		m := net.NewMemory(size)
		n++
		return net.NewFabric(fmt.Sprint("rank-", n-1), m), m, func() error { return nil }, nil
	}
}

// run passes requests over the shape, and checks what every owner rank was told: the owner's id of each request by each reader
// rank that has to do with it, with their number.
func (p *pairOf) run() {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), 2*time.Minute)
	defer cancel()
	out, err := shape.Run(ctx, p.s, p.side.Port(), p.owners, p.readers)
	require.NoError(p.t, err)
	require.NotZero(p.t, out.Bytes)
	n := max(1, p.s.Reader.TP/p.s.Owner.TP)
	for rank, tap := range p.taps[:p.s.Owner.TP] {
		heard := map[string]int{}
		for _, text := range tap.said {
			m, err := lease.ParseReadComplete([]byte(text))
			require.NoError(p.t, err)
			require.Equal(p.t, n, m.Readers, "rank %d: %s", rank, text)
			require.NotZero(p.t, m.Nonce, "rank %d: %s", rank, text)
			heard[string(m.Request)]++
		}
		require.Equal(p.t, map[string]int{"prefill-req:read": n, "prefill-req:given-up": n}, heard, "rank %d", rank)
	}
}

// Every shape that is served, over real NIXL: each byte of each reader rank is compared with what the right owner rank holds of
// the right head and token, and nothing else is written; every owner rank is renewed and released, those that were not read
// included. vllm#45330, vllm#45879, cases.md 26; peer-tests A3.9 with its weakness D2, A3.11, A3.13, A3.14, A3.45 and A3.46 with
// D4, A7.1, A8.1 to A8.4.
func TestEveryShapeIsReadByteExact(t *testing.T) {
	for _, s := range shape.All() {
		t.Run(s.Name, func(t *testing.T) { openShape(t, s, shape.NIXL).run() })
	}
}

// The same on the in-memory fabric, where every shape is quick and the race detector sees both ends.
func TestEveryShapeIsReadByteExactInMemory(t *testing.T) {
	for _, s := range shape.All() {
		t.Run(s.Name, func(t *testing.T) { openShape(t, s, inMemory(rdmatest.NewNetwork())).run() })
	}
}

// pull is a READ of the shape's request that no lease protects, as vLLM's owners of today offer it.
func (p *pairOf) pull(tp int) lease.Pull {
	return lease.Pull{Request: "decode-req-AAAA", RemoteRequest: "prefill-req-BBBB", RemoteBlocks: p.s.OwnerBlocks(), LocalBlocks: p.s.ReaderBlocks(),
		Peer: lease.Peer{Engine: "owner of " + p.s.Name, Host: "127.0.0.1", Port: p.side.Port(), TPSize: tp, PPSize: 1, DCPSize: 1}}
}

// told is what the scheduler plans when every rank has read that.
func (p *pairOf) told(tp int) lease.Plan {
	r := p.pull(tp)
	return lease.Plan{Release: []lease.Release{{Request: r.Request, Peer: r.Peer, RemoteRequest: r.RemoteRequest}}}
}

// step steps reader rank 0 until done.
func (p *pairOf) step(plan lease.Plan, done func(lease.Result) bool) {
	p.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; {
		res, err := p.readers[0].Step(plan)
		require.NoError(p.t, err)
		if done(res) {
			return
		}
		require.True(p.t, time.Now().Before(deadline))
		plan = lease.Plan{}
		time.Sleep(100 * time.Microsecond)
	}
}

func (p *pairOf) stepOwners() {
	for _, r := range p.owners {
		_, err := r.Step(lease.Plan{})
		require.NoError(p.t, err)
	}
}

// vllm#36958, cases.md 24; peer-tests A3.45, A3.46 and their weakness D4: one rank of a replicated cache is read, and all of
// them are told by the owner's id, in the bytes that vLLM expects.
func TestEveryRankOfAReplicatedOwnerIsToldByTheOwnersID(t *testing.T) {
	p := openShape(t, shape.Named("tp 4 to 1, replicated"), shape.NIXL)
	p.step(lease.Plan{Read: []lease.Pull{p.pull(4)}}, func(res lease.Result) bool {
		require.Empty(t, res.Failed)
		return slices.Contains(res.Received, "decode-req-AAAA")
	})
	p.step(p.told(4), func(lease.Result) bool { return true })
	st, err := p.readers[0].Stats()
	require.NoError(t, err)
	require.EqualValues(t, 1, st.Reads)
	for rank, tap := range p.taps[:4] {
		require.Eventually(t, func() bool { p.stepOwners(); return len(tap.said) > 0 }, 20*time.Second, time.Millisecond)
		require.Equal(t, []string{"prefill-req-BBBB:1"}, tap.said, "rank %d", rank)
	}
}

// peer-tests A3.8 and its weakness D1: a request is done when its last READ is, and nobody is told before.
func TestRequestWaitsForTheReadFromEveryRank(t *testing.T) {
	net := rdmatest.NewNetwork()
	p := openShape(t, shape.Named("tp 4 to 2"), inMemory(net))
	net.HoldReads(true)
	p.step(lease.Plan{Read: []lease.Pull{p.pull(4)}}, func(lease.Result) bool { return len(net.Reads()) == 2 })
	reads := net.Reads()
	require.Equal(t, []string{"rank-0", "rank-1"}, []string{reads[0].Owner(), reads[1].Owner()})
	require.True(t, reads[1].Deliver())
	for range 10 {
		p.step(lease.Plan{}, func(res lease.Result) bool { require.Empty(t, res.Received); return true })
	}
	require.True(t, reads[0].Deliver())
	p.stepOwners()
	require.Empty(t, p.taps[0].said)
	p.step(lease.Plan{}, func(res lease.Result) bool { return slices.Contains(res.Received, "decode-req-AAAA") })
	p.stepOwners()
	require.Empty(t, p.taps[0].said, "the scheduler says when")
	p.step(p.told(4), func(lease.Result) bool { return true })
	p.stepOwners()
	require.Len(t, p.taps[0].said, 1)
	require.Len(t, p.taps[1].said, 1)
	require.Empty(t, p.taps[2].said, "the other reader rank's")
}

// peer-tests D6, A9.12: one of several owner ranks fails. The request does, its blocks are not the caller's before the other
// READ has ended, and no rank is told that it was read.
func TestFailureOfOneOfSeveralRanksFailsTheRequest(t *testing.T) {
	net := rdmatest.NewNetwork()
	p := openShape(t, shape.Named("tp 2 to 1"), inMemory(net))
	net.HoldReads(true)
	p.step(lease.Plan{Read: []lease.Pull{p.pull(2)}}, func(lease.Result) bool { return len(net.Reads()) == 2 })
	reads := net.Reads()
	reads[1].Fail(nil)
	for range 10 {
		p.step(lease.Plan{}, func(res lease.Result) bool { require.Empty(t, res.Received); return true })
	}
	require.True(t, reads[0].Deliver())
	p.step(lease.Plan{}, func(res lease.Result) bool {
		require.Empty(t, res.Received)
		return len(res.Failed) == 1 && !res.Failed[0].Quarantined
	})
	p.stepOwners()
	require.Empty(t, p.taps[0].said)
	require.Empty(t, p.taps[1].said)
}

// vllm#23587, cases.md 43, 26; peer-tests A3.15, A3.19, A3.21, A7.11, A8.7: a shape that cannot be served fails the request at
// the handshake, and the peer's agent is not even loaded.
func TestShapesThatCannotBeServedAreRefusedBeforeAnythingIsLoaded(t *testing.T) {
	base := func() *shape.Shape {
		return &shape.Shape{Name: "refused", Heads: 4, Layout: "LBHNC", Layers: make([]shape.Layer, 2), Tokens: 16,
			Owner: shape.Side{TP: 2, BlockTokens: 8, PerLogical: 1, Blocks: 12}, Reader: shape.Side{TP: 1, BlockTokens: 8, PerLogical: 1, Blocks: 12}}
	}
	for want, c := range map[string]struct {
		change func(owner, reader *shape.Shape)
		peer   func(*lease.Peer)
	}{
		"kv_cache_layout is LBNHC there and LBHNC here":           {change: func(o, _ *shape.Shape) { o.Layout = "LBNHC" }},
		"heads per rank is 2 there and 4 here, and blocks of":     {change: func(o, r *shape.Shape) { o.Layout, r.Layout = "LBNHC", "LBNHC" }},
		"number of regions is 3 there and 2 here":                 {change: func(o, _ *shape.Shape) { o.Layers = make([]shape.Layer, 3) }},
		"block_size is 6 there and 8 here, and blocks of layout":  {change: func(o, r *shape.Shape) { o.Layout, r.Layout, o.Owner.BlockTokens = "BLHNC", "BLHNC", 6 }},
		"region_group_ids is [0 1] there and [0 0] here":          {change: func(o, _ *shape.Shape) { o.Layers = []shape.Layer{{}, {Group: 1}}; o.Windows = []int{0, 0} }},
		"block_lens[0] is 128 bytes for 2 heads of 8 tokens ther": {change: func(o, _ *shape.Shape) { o.Layers = []shape.Layer{{Replicated: true}, {}} }},
		"tp_size is 3 there and 1 here, and 4 KV heads":           {peer: func(p *lease.Peer) { p.TPSize = 3 }},
		"pp_size is 2 there and 1 here":                           {peer: func(p *lease.Peer) { p.PPSize = 2 }},
		"dcp_size is 2 there and 1 here":                          {peer: func(p *lease.Peer) { p.DCPSize = 2 }},
	} {
		t.Run(want, func(t *testing.T) {
			owner, reader := base(), base()
			if c.change != nil {
				c.change(owner, reader)
			}
			net := rdmatest.NewNetwork()
			p := openShape(t, owner, inMemory(net))
			x := &tap{}
			r, err := shape.OpenRank(reader, false, 0, func(size int) (rdma.Fabric, rdma.Memory, func() error, error) {
				m := net.NewMemory(size)
				x.Fabric = net.NewFabric("reader", m)
				return x, m, func() error { return nil }, nil
			})
			require.NoError(t, err)
			defer func() { require.NoError(t, r.Close()) }()
			p.readers = []shape.Ranker{r}
			pull := p.pull(2)
			if c.peer != nil {
				c.peer(&pull.Peer)
			}
			p.step(lease.Plan{Read: []lease.Pull{pull}}, func(res lease.Result) bool {
				if len(res.Failed) == 0 {
					return false
				}
				require.Equal(t, lease.CauseHandshake, res.Failed[0].Cause)
				require.Contains(t, res.Failed[0].Message, want)
				return true
			})
			require.Zero(t, x.loaded)
		})
	}
}

// A side channel that answers with one rank's metadata for another's would have heads read from the wrong place.
func TestTwoRanksOfOneAgentAreRefused(t *testing.T) {
	p := openShape(t, shape.Named("tp 2 to 1"), inMemory(rdmatest.NewNetwork()))
	p.side.ServeReply(1, p.owners[0].(*shape.Rank).Worker.Reply())
	p.step(lease.Plan{Read: []lease.Pull{p.pull(2)}}, func(res lease.Result) bool {
		if len(res.Failed) == 0 {
			return false
		}
		require.Contains(t, res.Failed[0].Message, `ranks 0 and 1 of engine "owner of tp 2 to 1" answer with one NIXL agent, rank-0`)
		return true
	})
}

// An owner that says its memory is VRAM is taken at its word: its list is prepared as VRAM, which DRAM does not answer to.
func TestMemoryTypeOfTheOwnerIsTheOneRead(t *testing.T) {
	s := shape.Named("tp 1 to 1")
	p := openShape(t, s, shape.NIXL)
	reply := strings.ReplaceAll(string(p.owners[0].(*shape.Rank).Worker.Reply()), "\xa4DRAM", "\xa4VRAM")
	p.side.ServeReply(0, []byte(reply))
	p.step(lease.Plan{Read: []lease.Pull{p.pull(1)}}, func(res lease.Result) bool {
		if len(res.Failed) == 0 {
			return false
		}
		require.Contains(t, res.Failed[0].Message, "VRAM")
		require.Contains(t, res.Failed[0].Message, "is outside of what the peer offers: DRAM")
		return true
	})
}

// peer-tests A3.12: a second engine of another size on the same reader has its own ranks and lists, and the first keeps its own.
func TestEnginesOfSeveralSizesAreReadSideBySide(t *testing.T) {
	open := inMemory(rdmatest.NewNetwork())
	two, four := openShape(t, shape.Named("tp 2 to 1"), open), openShape(t, shape.Named("tp 4 to 1"), open)
	reads := int64(0)
	for i, c := range []struct {
		p  *pairOf
		tp int
	}{{two, 2}, {four, 4}, {two, 2}} {
		for rank, r := range c.p.owners {
			require.NoError(t, r.Fill(i+1), rank)
		}
		pull := c.p.pull(c.tp)
		two.step(lease.Plan{Read: []lease.Pull{pull}}, func(res lease.Result) bool {
			require.Empty(t, res.Failed)
			return slices.Contains(res.Received, pull.Request)
		})
		reads += int64(c.tp)
		st, err := two.readers[0].Stats()
		require.NoError(t, err)
		require.Equal(t, reads, st.Reads)
		require.Equal(t, min(i+1, 2), st.Peers)
		if c.p == two {
			_, err := two.readers[0].Check(i + 1)
			require.NoError(t, err)
		} else {
			_, err := two.readers[0].Check(i + 1)
			require.ErrorContains(t, err, "bytes are wrong", "read from ranks that the other shape does not have")
		}
	}
}
