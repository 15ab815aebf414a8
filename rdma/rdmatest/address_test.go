package rdmatest_test

import (
	"fmt"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// B13, E1: requests that name an engine at a dead address, one that refuses, one that swallows and one where another engine
// answers, fail or wait for themselves. All others are read, renewed and released meanwhile, in whatever order they came.
func TestAWrongAddressFailsItsOwnRequestAlone(t *testing.T) {
	for _, first := range []bool{true, false} {
		for _, host := range []string{"refuses", "swallows", "stranger"} {
			t.Run(fmt.Sprintf("%s, known first: %v", host, first), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					now := time.Now()
					network := rdmatest.NewNetwork()
					owner, reader := newVirtual(t, network, &now, "owner"), newVirtual(t, network, &now, "reader")
					newVirtual(t, network, &now, "stranger")
					network.Swallow("swallows:1", true)
					elsewhere := func(id string, block int) *lease.Params {
						p := owner.publish(id, 7, block)
						p.RemoteHost = host
						return p
					}
					if first {
						reader.arrive("queued", elsewhere("queued", 3))
						pass(&now, 10*time.Second, time.Second, reader, owner)
					}
					held := owner.publish("held", 8, 4)
					reader.arrive("held", held)
					pass(&now, 2*time.Second, time.Second, reader, owner)
					if !first {
						reader.arrive("queued", elsewhere("queued", 3))
					}
					reader.pull("lost", elsewhere("lost", 2), 2)
					for i := range 20 {
						id := fmt.Sprint("req-", i)
						reader.pull(id, owner.publish(id, uint64(10+i), 5), 6)
						pass(&now, time.Second, time.Second/10, reader, owner)
						require.True(t, reader.ran[id], "%s: %v", id, failure(reader.engine, id))
						require.Zero(t, reader.wrong(uint64(10+i), 6))
						require.Equal(t, lease.ReasonRead, owner.freed[id], "the owner is told")
						reader.over(id)
					}
					require.ErrorIs(t, failure(reader.engine, "lost"), lease.ErrHandshake)
					pass(&now, 20*time.Second, time.Second, reader, owner)
					require.NotContains(t, owner.freed, "held", "renewed all the time")
					require.Contains(t, owner.freed, "queued", "renewed where it does not live")
				})
			})
		}
	}
}

// "A changed address counts during a handshake too": the old one hangs, and the new one is asked at once.
func TestAChangedAddressCountsDuringAHandshake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		network := rdmatest.NewNetwork()
		owner, reader := newVirtual(t, network, &now, "owner"), newVirtual(t, network, &now, "reader")
		network.Swallow("old:1", true)
		old := owner.publish("old", 7, 3)
		old.RemoteHost = "old"
		reader.pull("old", old, 1)
		pass(&now, time.Second, time.Second/10, reader)
		require.Equal(t, 1, reader.ranks[0].w.Stats().PeersConnecting)
		reader.pull("new", owner.publish("new", 8, 4), 2)
		pass(&now, time.Second, time.Second/10, reader)
		require.True(t, reader.ran["new"])
		require.Zero(t, reader.wrong(8, 2))
	})
}

// One owner by two names is one agent: neither connection takes it from the other, and when it is lost both come back.
func TestTwoNamesOfAnOwnerShareItsAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		network := rdmatest.NewNetwork()
		owner, reader := newVirtual(t, network, &now, "owner"), newVirtual(t, network, &now, "reader")
		l, err := network.Listen("alias:1")
		require.NoError(t, err)
		alias := rdma.NewSideChannel(l, nil)
		defer func() { require.NoError(t, alias.Close()) }()
		alias.Serve(owner.ranks[0].w)
		read := func(id string, tag uint64, host string) {
			p := owner.publish(id, tag, 3)
			p.RemoteHost = host
			reader.pull(id, p, 1)
			pass(&now, 8*time.Second, time.Second/10, reader, owner)
			require.True(t, reader.ran[id], "%s: %v", id, failure(reader.engine, id))
			require.Zero(t, reader.wrong(tag, 1))
			require.Equal(t, lease.ReasonRead, owner.freed[id])
			reader.over(id)
		}
		read("a", 7, "owner")
		read("b", 8, "alias")
		require.Equal(t, 2, reader.ranks[0].w.Stats().Peers)
		read("c", 9, "owner")
		require.Equal(t, 2, reader.ranks[0].w.Stats().Peers, "they live side by side")
		require.NoError(t, reader.ranks[0].f.Forget(owner.ranks[0].f.Name())) // the transport has lost it
		p := owner.publish("lost", 10, 3)
		reader.pull("lost", p, 1)
		pass(&now, 8*time.Second, time.Second/10, reader, owner)
		reader.over("lost")
		read("d", 11, "alias")
		read("e", 12, "owner")
	})
}

// Two engines that share a configured id, as public guides have it, are two.
func TestTwoEnginesOfOneIDAreBothRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		network := rdmatest.NewNetwork()
		shared := func(w *rdma.WorkerConfig, s *lease.SchedulerConfig) { w.Engine, s.Engine = "0", "0" }
		one, two := newVirtual(t, network, &now, "one", shared), newVirtual(t, network, &now, "two", shared)
		reader := newVirtual(t, network, &now, "reader")
		for i := range 4 {
			for k, owner := range []*virtual{one, two} {
				tag := uint64(10 + 2*i + k)
				reader.pull(owner.name, owner.publish("same id", tag, 3), 1+k) // at both at once
			}
			pass(&now, time.Second, time.Second/10, reader, one, two)
			for k, owner := range []*virtual{one, two} {
				require.True(t, reader.ran[owner.name], "%v", failure(reader.engine, owner.name))
				require.Zero(t, reader.wrong(uint64(10+2*i+k), 1+k))
				require.Equal(t, lease.ReasonRead, owner.freed["same id"])
				reader.over(owner.name)
			}
		}
	})
}

// A Dial of the network fails like one of package net.
func TestDialsOfTheNetworkFailLikeReal(t *testing.T) {
	network := rdmatest.NewNetwork()
	_, err := network.Dial(t.Context(), "tcp", "nobody:1")
	var op *net.OpError
	require.ErrorAs(t, err, &op)
	require.Equal(t, rdma.HandshakeUnreachable, rdma.HandshakeCauseOf(err))
	l, err := network.Listen("x:1")
	require.NoError(t, err)
	_, err = network.Listen("x:1")
	require.ErrorContains(t, err, "in use")
	require.NoError(t, l.Close())
	_, err = l.Accept()
	require.ErrorIs(t, err, net.ErrClosed)
}
