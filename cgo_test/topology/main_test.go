package main

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/child"
	"github.com/nixlgo/nixlgo/cgo_test/topology/shape"
	"github.com/nixlgo/nixlgo/rdma"
)

func TestMain(m *testing.M) {
	if isRank, err := runRank(); isRank {
		child.Exit("topology", err)
	}
	syscall.Exit(m.Run())
}

// Ranks as processes, as engines run them: plans and results cross as JSON, and one side channel answers for all ranks of the
// owner. make test-topology runs every shape. cases.md 26; peer-tests A8.5, A8.6, A8.8.
func TestRanksAsProcesses(t *testing.T) {
	for _, name := range []string{"tp 1 to 2", "tp 4 to 2, split and replicated layers", "tp 2 to 1, blocks 4 to 16"} {
		t.Run(name, func(t *testing.T) {
			s := shape.Named(name)
			require.NotNil(t, s)
			out, err := run(context.Background(), s, 2*time.Minute)
			require.NoError(t, err)
			require.NotZero(t, out.Bytes)
		})
	}
}

// A check that cannot fail is worth nothing: an owner whose ranks are swapped is seen by the bytes.
func TestSwappedRanksAreSeen(t *testing.T) {
	s := shape.Named("tp 2 to 1")
	side, err := rdma.ListenSideChannel("127.0.0.1", 0, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, side.Close()) }()
	var ranks []shape.Ranker
	for i := range 3 {
		r, err := shape.OpenRank(s, i < 2, i%2, shape.NIXL)
		require.NoError(t, err)
		defer func() { require.NoError(t, r.Close()) }()
		ranks = append(ranks, r)
		if i < 2 {
			side.ServeReply(1-i, r.Worker.Reply())
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err = shape.Run(ctx, s, side.Port(), ranks[:2], ranks[2:])
	require.ErrorContains(t, err, "bytes are wrong")
}
