package rdma_test

import (
	"bytes"
	"math/bits"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
)

// counting is a fabric over NIXL that knows of how many descriptors each READ was in the end.
type counting struct {
	rdma.Fabric
	t     *testing.T
	descs []uint64
}

func (f *counting) Poll(reads []rdma.Read, states []nixl.State) error {
	err := f.Fabric.Poll(reads, states)
	for i, r := range reads {
		if states[i] == nixl.Done {
			m, err := r.(*nixl.Transfer).Telemetry()
			require.NoError(f.t, err)
			f.descs = append(f.descs, m.Descriptors)
		}
	}
	return err
}

// vllm#55434, vllm#50913, cases.md 49: of 1,024 blocks in 32 regions, one descriptor per region is left where they lie side by side
// on both sides, and all 32,768 where they do not, as NIXL's telemetry counts them. Every byte lands where it belongs.
func TestNeighbouringBlocksBecomeOneDescriptor(t *testing.T) {
	const regions, blocks, size = 32, 1024, 64
	const pitch = (blocks + 1) * size // from one region to the next, which is no neighbour
	open := func(name string) (*counting, *rdma.Worker, *nixl.Buffer) {
		kv, err := nixl.AllocBuffer(regions * pitch)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, kv.Close()) })
		inner, err := rdma.OpenNIXL(rdma.NIXLConfig{Memory: []nixl.Memory{kv}, Agent: nixl.Config{Telemetry: true}})
		require.NoError(t, err)
		f := &counting{Fabric: inner, t: t}
		cfg := rdma.WorkerConfig{Engine: name}
		for r := range regions {
			cfg.KV.Regions = append(cfg.KV.Regions, rdma.Region{Base: kv.Addr() + uint64(r*pitch), BlockLen: size, Blocks: blocks})
		}
		w, err := rdma.NewWorker(f, cfg)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, w.Close()) })
		return f, w, kv
	}
	_, owner, there := open("owner")
	side, err := rdma.ListenSideChannel("127.0.0.1", 0, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, side.Close()) })
	side.Serve(owner)
	f, reader, here := open("reader")
	rng := rand.NewChaCha8([32]byte{1})
	rng.Read(there.Bytes())

	inOrder, scattered := make([]int, blocks), make([]int, blocks)
	for i := range blocks {
		inOrder[i] = i
		scattered[i] = int(bits.Reverse16(uint16(i)) >> 6) // of which no two neighbours follow each other
	}
	descending := make([]int, blocks)
	for i := range descending {
		descending[i] = blocks - 1 - i
	}
	shuffled := rand.New(rng).Perm(blocks)
	for _, c := range []struct {
		name          string
		local, remote []int
		want          uint64
	}{
		{"contiguous", inOrder, inOrder, regions},
		{"contiguous on one side only", scattered, inOrder, regions * blocks},
		{"on the other", inOrder, scattered, regions * blocks},
		{"scattered alike", scattered, scattered, regions},
		{"shuffled alike", shuffled, shuffled, regions},
		{"both going down", descending, descending, regions},
		{"in runs of two", inOrder[:8], []int{0, 1, 10, 11, 20, 21, 30, 31}, regions * 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			clear(here.Bytes())
			f.descs = nil
			plan := lease.Plan{Read: []lease.Pull{{Request: c.name, Peer: lease.Peer{Engine: "owner", Host: "127.0.0.1", Port: side.Port(), TPSize: 1, PPSize: 1, DCPSize: 1},
				RemoteRequest: "req", RemoteBlocks: [][]int{c.remote}, LocalBlocks: [][]int{c.local}}}}
			end := time.Now().Add(20 * time.Second)
			for received := false; !received; {
				res, err := reader.Step(time.Now(), plan)
				require.NoError(t, err)
				require.Empty(t, res.Failed)
				received, plan = len(res.Received) > 0, lease.Plan{}
				require.True(t, time.Now().Before(end))
			}
			require.Equal(t, []uint64{c.want}, f.descs)
			block := func(b *nixl.Buffer, region, id int) []byte {
				at := region*pitch + id*size
				return b.Bytes()[at : at+size]
			}
			for r := range regions {
				for k := range c.local {
					if !bytes.Equal(block(here, r, c.local[k]), block(there, r, c.remote[k])) {
						t.Fatalf("region %d: block %d is not the owner's %d", r, c.local[k], c.remote[k])
					}
				}
			}
		})
	}
}
