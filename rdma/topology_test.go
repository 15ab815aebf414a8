package rdma_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/topology/shape"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// runShape passes requests over a shape with all ranks in this process.
func runShape(t *testing.T, s *shape.Shape, open func(name string) shape.Open) shape.Outcome {
	t.Helper()
	side, err := rdma.ListenSideChannel("127.0.0.1", 0, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, side.Close()) }()
	ranks := func(owner bool, n int) (out []shape.Ranker) {
		for i := range n {
			r, err := shape.OpenRank(s, owner, i, open(fmt.Sprintf("%v-%d", owner, i)))
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, r.Close()) })
			out = append(out, r)
			if owner {
				side.Serve(r.Worker)
			}
		}
		return out
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	out, err := shape.Run(ctx, s, side.Port(), ranks(true, s.Owner.TP), ranks(false, s.Reader.TP))
	require.NoError(t, err)
	require.NotZero(t, out.Bytes)
	return out
}

// Every shape that is served, over real NIXL: each byte of each reader rank is compared with what the right owner rank holds of
// the right head and token, and nothing else is written; every owner rank is renewed and released, those that were not read
// included. vllm#45330, vllm#45879, cases.md 26; peer-tests A3.9 with its weakness D2, A3.11, A3.13, A3.14, A6.*, A7.*, A8.1 to
// A8.4.
func TestEveryShapeIsReadByteExact(t *testing.T) {
	for _, s := range shape.All() {
		t.Run(s.Name, func(t *testing.T) {
			runShape(t, s, func(string) shape.Open { return shape.NIXL })
		})
	}
}

// The same on the in-memory fabric, where every shape is quick and the race detector sees both ends.
func TestEveryShapeIsReadByteExactInMemory(t *testing.T) {
	for _, s := range shape.All() {
		t.Run(s.Name, func(t *testing.T) {
			net := rdmatest.NewNetwork()
			runShape(t, s, func(name string) shape.Open {
				return func(size int) (rdma.Fabric, rdma.Memory, func() error, error) {
					m := net.NewMemory(size)
					return net.NewFabric(name, m), m, func() error { return nil }, nil
				}
			})
		})
	}
}
