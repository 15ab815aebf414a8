package rdma_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/topology/shape"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// llm-d#1138, neighbours.md (2) 1: a worker without a KV cache of the owner's shape renews and releases on every rank, each of
// which it tells that it is the only reader, and reads nothing.
func TestAWorkerThatOnlyHoldsRenewsAndReleasesOnEveryRankOfAnyShape(t *testing.T) {
	for _, s := range []*shape.Shape{shape.Named("tp 4 to 1, replicated"), shape.Named("tp 4 to 2"), shape.Named("tp 1 to 1")} {
		t.Run(s.Name, func(t *testing.T) {
			net := rdmatest.NewNetwork()
			p := openShape(t, s, inMemory(net))
			m := net.NewMemory(64)
			w, err := rdma.NewWorker(net.NewFabric("holder", m), rdma.WorkerConfig{Engine: "holder", HoldOnly: true, Compatibility: "no model's",
				KV: rdma.KV{Regions: []rdma.Region{{Base: m.Addr(), BlockLen: 64, Blocks: 1}}}})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, w.Close()) })
			peer := p.pull(s.Owner.TP).Peer
			for _, r := range p.owners {
				_, err := r.Step(lease.Plan{Admit: []lease.Admission{{Request: "req", Nonce: 1 << 40}},
					Grant: []lease.Grant{{Request: "req", Nonce: 1 << 40, TTL: time.Hour, Exported: true}}})
				require.NoError(t, err)
			}
			everywhere := func(plan lease.Plan, done func(lease.TableStats) bool) {
				for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(100 * time.Microsecond) {
					res, err := w.Step(time.Now(), plan)
					require.NoError(t, err)
					require.Empty(t, res.HeartbeatFailed)
					plan = lease.Plan{}
					ranks := 0
					for _, r := range p.owners {
						_, err := r.Step(lease.Plan{})
						require.NoError(t, err)
						st, err := r.Stats()
						require.NoError(t, err)
						if done(st.Leases) {
							ranks++
						}
					}
					if ranks == s.Owner.TP {
						return
					}
					require.True(t, time.Now().Before(deadline), "%d of %d ranks", ranks, s.Owner.TP)
				}
			}
			everywhere(lease.Plan{Heartbeat: []lease.Heartbeat{{Peer: peer, Targets: []lease.Target{{Request: "req", Slot: 0, Nonce: 1 << 40}}}}},
				func(st lease.TableStats) bool { return st.Renewals == 1 && st.Live == 1 })
			res, err := w.Step(time.Now(), lease.Plan{Read: []lease.Pull{p.pull(s.Owner.TP)}})
			require.NoError(t, err)
			require.Len(t, res.Failed, 1)
			require.Equal(t, lease.CauseInvalid, res.Failed[0].Cause)
			everywhere(lease.Plan{Release: []lease.Release{{Request: "r1", Peer: peer, RemoteRequest: "req", Nonce: 1 << 40, All: true}}},
				func(st lease.TableStats) bool { return st.Read == 1 && st.Live == 0 })
			for rank, tap := range p.taps[:s.Owner.TP] {
				require.Len(t, tap.said, 1, "rank %d", rank)
				require.True(t, strings.HasPrefix(tap.said[0], "req:1:"), tap.said[0])
			}
			require.Zero(t, w.Stats().Reads)
		})
	}
}
