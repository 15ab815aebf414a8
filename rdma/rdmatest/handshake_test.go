package rdmatest_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// peer-tests A8.6: an engine of which one rank is silent is not connected, the error names the rank, and what the others said is
// not kept.
func TestSilentRankFailsTheHandshakeByItsNumber(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network := rdmatest.NewNetwork()
	owner := newEngine(t, network, &start, "owner", replicated(2))
	side, err := rdma.ListenSideChannel("", 0, nil)
	require.NoError(t, err)
	defer side.Close()
	side.Serve(owner.ranks[0].w)
	reader := newEngine(t, network, &start, "reader", replicated(1), func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) {
		w.HandshakeTimeout = 200 * time.Millisecond
	})
	pull := func(id string) error {
		p := owner.publish(id, 7, 3)
		p.RemotePort = side.Port()
		reader.pull(id, p, 5)
		until(t, "the verdict", func() bool { return reader.ran[id] || failure(reader, id) != nil }, reader)
		err := failure(reader, id)
		reader.over(id)
		return err
	}
	err = pull("req-1")
	require.ErrorIs(t, err, lease.ErrHandshake)
	require.ErrorContains(t, err, "tp rank 1")
	reader.step() // which wants to tell the owner, and connects again
	until(t, "the end of that", func() bool { return reader.ranks[0].w.Stats().PeersConnecting == 0 }, reader)
	for _, r := range owner.ranks {
		require.ErrorIs(t, reader.ranks[0].f.Notify(r.f.Name(), []byte("x")), nixl.ErrNotFound)
	}
	side.Serve(owner.ranks[1].w)
	start = start.Add(time.Minute)
	for err = pull("req-2"); errors.Is(err, lease.ErrHandshake); err = pull("req-2") { // a busy machine may need more than the 200 ms
		start = start.Add(time.Minute)
	}
	require.NoError(t, err)
}

// What a handshake has loaded is let go of when it fails after all: here by the last rank's blocks.
func TestFailedHandshakeLeavesNothingLoaded(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network := rdmatest.NewNetwork()
	owner, reader := newEngine(t, network, &start, "owner", replicated(2)), newEngine(t, network, &start, "reader", replicated(1))
	f := reader.ranks[0].f
	f.Fail(rdmatest.OpRemoteList, 1, errTold)
	require.ErrorContains(t, read(owner, reader, "req-1", 7), "told so")
	for _, r := range owner.ranks {
		require.ErrorIs(t, f.Notify(r.f.Name(), []byte("x")), nixl.ErrNotFound)
	}
	start = start.Add(time.Minute)
	require.NoError(t, read(owner, reader, "req-2", 8))
}

// peer-tests A3.32: a worker that is closed does not wait for the handshakes under way.
func TestClosingEndsTheHandshakesUnderWay(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	port, dialled := mute(t)
	reader := newEngine(t, rdmatest.NewNetwork(), &start, "reader", func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) {
		w.HandshakeTimeout = time.Hour
	})
	reader.pull("req", &lease.Params{DoRemotePrefill: true, RemoteBlockIDs: [][]int{{1}}, RemoteEngineID: "mute", RemoteRequestID: "req",
		RemoteHost: "127.0.0.1", RemotePort: port, TPSize: 1, Lease: &lease.SlotRef{Nonce: 1}}, 1)
	until(t, "the handshake", func() bool { return dialled.Load() == 1 }, reader)
	require.NoError(t, reader.ranks[0].w.Close())
	_, err := reader.ranks[0].w.Step(start, lease.Plan{})
	require.ErrorIs(t, err, rdma.ErrClosed)
}

// peer-tests A3.7: the port of a side channel that was closed is free.
func TestPortOfAClosedSideChannelIsFree(t *testing.T) {
	side, err := rdma.ListenSideChannel("", 0, nil)
	require.NoError(t, err)
	require.NoError(t, side.Close())
	again, err := rdma.ListenSideChannel("", side.Port(), nil)
	require.NoError(t, err)
	require.NoError(t, again.Close())
}

// peer-tests A3.40: the owner of a request that has nothing to read is told as a courtesy. If that fails, the request has not.
func TestRequestWithNothingToReadOutlivesItsNotification(t *testing.T) {
	d := newDuo(t)
	p := d.owner.publish("req", 7, 3)
	d.reader.ranks[0].f.Fail(rdmatest.OpNotify, 1, nil)
	d.reader.pull("local", p)
	d.reader.step()
	d.reader.step()
	require.True(t, d.reader.ran["local"])
	require.Empty(t, d.reader.failed)
	require.NotZero(t, d.reader.ranks[0].w.Stats().NotifyLost)
	d.reader.over("local")
	require.NoError(t, read(d.owner, d.reader, "next", 8), "and its engine is connected anew")
}
