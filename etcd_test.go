//go:build etcd

package nixlgo_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/cgo_test/etcdserver"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma/etcd"
)

// openListed opens a node that is found through an etcd, with a session of its own.
func openListed(t *testing.T, s *etcdserver.Server, engine string) *nixlgo.Node {
	t.Helper()
	c := etcd.Config{TTL: 2 * time.Second}
	c.Client.Endpoints = []string{s.URL}
	d, err := etcd.Open(c)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return open(t, func(c *nixlgo.Config) { c.Engine, c.Etcd = engine, d })
}

// unreachable are the params of an owner whose side channel nobody reaches.
func unreachable(p *lease.Params) *lease.Params {
	p.RemotePort = 1
	return p
}

// Issue: etcd as an alternative to the side channel, through the real library.
func TestNodesFindEachOtherThroughEtcd(t *testing.T) {
	s := etcdserver.Start(t)
	owner, reader := openListed(t, s, "owner"), openListed(t, s, "reader")
	fetch := func(owner *nixlgo.Node, id string, v byte) {
		t.Helper()
		fill(owner, v, 1, 2)
		p, err := owner.Publish(deadline(t), id, []int{1, 2}, 32)
		require.NoError(t, err)
		require.NoError(t, reader.Fetch(deadline(t), unreachable(p.Params()), []int{5, 6}))
		requireFilled(t, reader, v, 5, 6)
		requireDone(t, p, lease.ReasonRead)
	}
	fetch(owner, "req-1", 0xA1)
	require.Zero(t, owner.Stats().SideChannel.Answered)

	// A connection lives on without etcd, and with it when it is back.
	s.Kill()
	fetch(owner, "req-2", 0xA2)
	s.Restart()
	fetch(owner, "req-3", 0xA3)

	// The owner is started anew under its id, without a word of goodbye to etcd: its old entry is still there, and is put over.
	next := openListed(t, s, "owner")
	require.Eventually(t, func() bool { return reader.Stats().Worker.Peers == 0 }, 60*time.Second, time.Millisecond)
	lost := reader.Stats().Worker.ReadsLost
	fetch(next, "req-4", 0xA4)
	require.Equal(t, lost, reader.Stats().Worker.ReadsLost, "no READ was spent on finding out")

	// One that was closed is gone from etcd.
	closed := openListed(t, s, "closed")
	p, err := closed.Publish(deadline(t), "req-5", []int{3}, 16)
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	err = reader.Fetch(deadline(t), unreachable(p.Params()), []int{5})
	require.ErrorIs(t, err, lease.ErrHandshake)
	require.ErrorContains(t, err, "not in the directory")
}

// A node that cannot publish does not start.
func TestNodeNeedsItsEtcdToStart(t *testing.T) {
	s := etcdserver.Start(t)
	s.Kill()
	c := etcd.Config{}
	c.Client.Endpoints = []string{s.URL}
	d, err := etcd.Open(c)
	require.NoError(t, err)
	defer d.Close()
	_, err = nixlgo.New(nixlgo.Config{Layers: 1, Blocks: 1, BlockBytes: 64, Etcd: d, HandshakeTimeout: 200 * time.Millisecond})
	require.ErrorContains(t, err, s.URL)
}
