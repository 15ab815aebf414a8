package rdmatest_test

import (
	"context"
	"encoding/binary"
	"math"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/ports"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
	"github.com/nixlgo/nixlgo/rdma/zmtp"
)

// A slot number comes with the params, from any router. The one behind the owner's last slot is refused, before anything is read.
func TestSlotBehindTheLastOneIsRefusedBeforeAnyRead(t *testing.T) {
	d := newDuo(t)
	d.net.HoldReads(true)
	for _, c := range []struct {
		slot int
		want error
	}{{d.owner.sched.Slots(), lease.ErrUnverifiable}, {math.MaxInt32, lease.ErrUnverifiable}, {d.owner.sched.Slots() - 1, lease.ErrLapsed}} {
		reads := d.reader.ranks[0].w.Stats().Reads
		p := d.owner.publish("req", 7, 3)
		p.Lease.Slot = c.slot
		d.reader.pull("local", p, 5)
		d.reader.step()
		if c.want == lease.ErrLapsed { // the last slot is one: it is read, and holds no nonce
			d.held(0, false).Deliver()
			d.reader.step()
			d.held(0, true).Deliver()
			d.reader.step()
			reads++
		}
		require.ErrorIs(t, failure(d.reader, "local"), c.want, "slot %d", c.slot)
		require.Empty(t, d.net.Reads(), "slot %d", c.slot)
		require.Equal(t, reads, d.reader.ranks[0].w.Stats().Reads, "slot %d", c.slot)
		d.reader.over("local")
		require.NoError(t, d.owner.sched.Revoke(*d.now, "req"))
		for range 2 {
			d.reader.step()
			d.owner.step()
		}
	}
}

// An owner that cannot be reached is told nothing, and whoever waits for that learns it: from the handshake that fails, and
// from those that are not tried while it backs off.
func TestReleaseIsReportedAlsoWhenItsOwnerCannotBeReached(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	nobody, err := ports.Free()
	require.NoError(t, err)
	for name, all := range map[string]bool{"of a request": false, "of a hold": true} {
		t.Run(name, func(t *testing.T) {
			reader := newEngine(t, rdmatest.NewNetwork(), &start, "reader")
			w := reader.ranks[0].w
			for i := range 4 {
				plan := reader.sched.BuildPlan(start)
				plan.Release = []lease.Release{{Request: "local", Peer: lease.Peer{Engine: "gone", Host: "127.0.0.1", Port: nobody, TPSize: 1, PPSize: 1, DCPSize: 1},
					RemoteRequest: "req", Nonce: 5000, All: all}}
				var released []string
				for idle := 0; len(released) == 0; time.Sleep(20 * time.Microsecond) {
					res, err := w.Step(start, plan)
					require.NoError(t, err)
					released, plan = res.Released, lease.Plan{}
					if w.Stats().PeersConnecting > 0 || len(released) > 0 {
						continue // the next release comes at the same moment, and meets the backoff
					}
					start = start.Add(time.Second)
					idle++
					require.Less(t, idle, 200, "release %d: no handshake in more seconds than any backoff has", i)
				}
				require.Equal(t, []string{"local"}, released, "once")
				for range 3 {
					res, err := w.Step(start, lease.Plan{})
					require.NoError(t, err)
					require.Empty(t, res.Released)
				}
			}
			require.NotZero(t, w.Stats().HandshakesFailed[rdma.HandshakeUnreachable])
		})
	}
}

// clocked is a side channel that tells another time than this machine's.
func clocked(t *testing.T, w *rdma.Worker) (port int, clock *atomic.Int64) {
	t.Helper()
	clock = &atomic.Int64{}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	server := &zmtp.Server{Handler: func(context.Context, [][]byte) ([][]byte, error) {
		seconds := math.Float64bits(float64(clock.Load()))
		return [][]byte{w.Reply(), binary.BigEndian.AppendUint64([]byte{0xcb}, seconds)}, nil
	}}
	go func() { ended <- server.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	return l.Addr().(*net.TCPAddr).Port, clock
}

// An owner's machine may have been suspended, or be another one behind the same address: its clock is the one that the newest
// handshake told.
func TestDeadlinesAreOnTheClockOfTheNewestHandshake(t *testing.T) {
	const before, after = 1_000_000, 5_000_000
	start := time.Now() // of the handshake's round trip
	network := rdmatest.NewNetwork()
	owner, reader := newEngine(t, network, &start, "owner"), newEngine(t, network, &start, "reader")
	port, clock := clocked(t, owner.ranks[0].w)
	type turn struct {
		id     string
		expiry float64
		want   error
	}
	read := func(turns ...turn) {
		t.Helper()
		expiry := map[string]*float64{}
		for i, x := range turns {
			p := owner.publish(x.id, 7, 3+i)
			p.RemotePort = port
			reader.pull(x.id, p, 5+i)
			expiry[x.id] = &x.expiry
		}
		plan := reader.sched.BuildPlan(start)
		for i := range plan.Read {
			plan.Read[i].Expiry = expiry[plan.Read[i].Request]
		}
		reader.ranks[0].plans = append(reader.ranks[0].plans, plan)
		reader.run(0)
		for _, x := range turns {
			until(t, "the verdict", func() bool { return reader.ran[x.id] || failure(reader, x.id) != nil }, reader)
			require.ErrorIs(t, failure(reader, x.id), x.want, x.id)
		}
		for _, x := range turns {
			reader.over(x.id)
		}
		reader.step()
		owner.step()
	}
	clock.Store(before)
	read(turn{"a", before + 1000, nil}, turn{"b", before - 1, lease.ErrExpired}, turn{"c", after - 1, nil})
	clock.Store(after)
	network.Break(reader.ranks[0].f, owner.ranks[0].f)
	// The first finds that the link broke, and the others wait for another handshake.
	read(turn{"d", after + 1000, lease.ErrPeerLost}, turn{"e", after + 1000, nil}, turn{"f", after - 1, lease.ErrExpired}, turn{"g", before + 1000, lease.ErrExpired})
	read(turn{"h", after + 1000, nil}, turn{"i", after - 1, lease.ErrExpired})
}
