package rdmatest_test

import (
	"bytes"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// cases.md 20: an engine whose metadata bears the name of another's agent takes its place in the transport. The other one is
// connected to anew, and no request of either is lost.
func TestEngineThatTakesTheNameOfAnothersAgentDoesNotSilenceIt(t *testing.T) {
	d := newDuo(t)
	other := newEngine(t, d.net, d.now, "twin1")
	of := func(e *engine) []byte { return []byte(e.ranks[0].f.Name()) }
	require.Len(t, of(other), len(of(d.owner)))
	other.side.ServeReply(0, bytes.ReplaceAll(other.ranks[0].w.Reply(), of(other), of(d.owner)))
	for i, e := range []*engine{other, d.owner, other, d.owner} {
		id := string(rune('a' + i))
		d.reader.pull(id, e.publish(id, uint64(10+i), 3), 5)
		until(t, "the verdict", func() bool { return d.reader.ran[id] || failure(d.reader, id) != nil }, d.reader)
		require.NoError(t, failure(d.reader, id), id)
		require.Zero(t, d.reader.wrong(uint64(10+i), 5))
		d.reader.over(id)
		d.reader.step()
		e.step()
	}
	clean(t, d.owner, other, d.reader)
}

// A peer that the transport has dropped by itself is connected to anew, also when only READs find out: no heartbeat is due.
func TestPeerThatTheTransportDroppedIsConnectedToAnew(t *testing.T) {
	for name, check := range map[string]bool{"before the block READ": false, "before the slot READ": true} {
		t.Run(name, func(t *testing.T) {
			d := newDuo(t)
			d.reader.arrive("beaten", d.owner.publish("beaten", 6, 2))
			d.reader.step()
			d.reader.pull("dropped", d.owner.publish("dropped", 7, 3), 5)
			d.net.HoldReads(true)
			if check {
				d.reader.step()
				d.held(0, false).Deliver()
			}
			require.NoError(t, d.reader.ranks[0].f.Forget(d.owner.ranks[0].f.Name()))
			d.reader.step()
			require.Error(t, failure(d.reader, "dropped"))
			d.reader.over("dropped")
			d.net.HoldReads(false)
			d.reader.pull("next", d.owner.publish("next", 8, 4), 5)
			until(t, "the verdict", func() bool { return d.reader.ran["next"] || failure(d.reader, "next") != nil }, d.reader)
			require.NoError(t, failure(d.reader, "next"))
			require.Zero(t, d.reader.wrong(8, 5))
		})
	}
}

// slow is a fabric that takes its time to load the metadata that names an agent.
type slow struct {
	*rdmatest.Fabric
	agent         string
	loads, loaded chan struct{}
}

func (s slow) Load(metadata []byte) (string, error) {
	if bytes.Contains(metadata, []byte(s.agent)) {
		s.loads <- struct{}{}
		<-s.loaded
	}
	return s.Fabric.Load(metadata)
}

// An engine is connected to twice at once, to read from it and to tell it things. That the first cannot be, which shows at its
// second rank, takes nothing from the second, which has loaded the same agents.
func TestHandshakeThatFailsForgetsNoAgentOfAnotherUnderWay(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	network := rdmatest.NewNetwork()
	owner := newEngine(t, network, &now, "owner", shaped(2, 2))
	owner.side.ServeReply(1, bytes.ReplaceAll(owner.ranks[1].w.Reply(), []byte("CPU_ATTN"), []byte("GPU_ATTN")))
	read, held := owner.publish("read", 7, 3), owner.publish("held", 8, 4)

	mem := network.NewMemory(blocks * layers * 2 * blockLen)
	f := slow{network.NewFabric("reader", mem), owner.ranks[1].f.Name(), make(chan struct{}), make(chan struct{})}
	cfg := rdma.WorkerConfig{Engine: "reader", HandshakeTimeout: time.Minute, KV: rdma.KV{Heads: 2}}
	for l := range layers {
		cfg.KV.Regions = append(cfg.KV.Regions, rdma.Region{Base: mem.Addr() + uint64(l*blocks*2*blockLen), BlockLen: 2 * blockLen, Blocks: blocks})
	}
	w, err := rdma.NewWorker(f, cfg)
	require.NoError(t, err)
	defer w.Close()
	load := sync.OnceFunc(func() { close(f.loaded) })
	defer load() // Close waits for it
	var failed, released int
	step := func(p lease.Plan) {
		res, err := w.Step(now, p)
		require.NoError(t, err)
		failed, released = failed+len(res.Failed), released+len(res.Released)
	}
	step(lease.Plan{
		Read: []lease.Pull{{Request: "local", Peer: read.Peer(), RemoteRequest: "read", RemoteBlocks: read.RemoteBlockIDs, LocalBlocks: [][]int{{5}},
			Lease: read.Lease, Verify: true}},
		Release: []lease.Release{{Request: "held", Peer: held.Peer(), RemoteRequest: "held", Nonce: held.Lease.Nonce, All: true}},
	})
	<-f.loads // the first rank is loaded
	next := func(count *int) func() bool {
		return func() bool {
			step(lease.Plan{})
			return *count > 0
		}
	}
	until(t, "the failure", next(&failed))
	require.Zero(t, released)
	load()
	until(t, "the release", next(&released))
	owner.step()
	require.Equal(t, lease.ReasonRead, owner.freed["held"], "every rank was told")
}
