package rdmatest_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

var errTold = errors.New("told so")

// vllm#21570, aws-do-eks#84, vllm-omni#6264, cases.md 1, 9: the lease lapses amid the block READ, at every word and at
// random bytes; the request is never received, whatever mix of two requests its blocks hold.
func TestBlockReadTornByALapseIsNeverReceived(t *testing.T) {
	d := newDuo(t)
	d.net.HoldReads(true)
	d.net.HoldNotifications(true)
	rng := rand.New(rand.NewPCG(1, 2))
	const size = 2 * layers * blockLen // bytes of the READ
	mixed := 0
	for i := range 1000 {
		cut := rng.Uint64N(size + 1)
		if i <= size/8 {
			cut = 8 * uint64(i)
		}
		id := fmt.Sprint("req-", i)
		tag := 10 * uint64(i+1)
		p := d.owner.publish(id, tag, 3, 4)
		d.reader.pull(id, p, 5, 6)
		d.reader.step()
		block := d.held(0, false)
		if rng.IntN(2) == 0 {
			block.Land(0, cut)
		} else {
			block.Land(size-cut, size)
		}
		d.lapse(id, tag+1, 3, 4)
		block.Deliver()
		d.reader.step()
		d.held(0, true).Deliver()
		d.reader.step()
		require.False(t, d.reader.ran[id], "cut at %d", cut)
		require.ErrorIs(t, failure(d.reader, id), lease.ErrLapsed, "cut at %d", cut)
		require.False(t, d.reader.failed[id].Quarantined)
		ours, theirs := d.reader.wrong(tag, 5, 6), d.reader.wrong(tag+1, 5, 6)
		if cut == 0 {
			require.Zero(t, theirs)
		} else if cut == size {
			require.Zero(t, ours)
		}
		if ours > 0 && theirs > 0 {
			mixed++
		}
		// The reader's release of the lapsed lease must not end the next one.
		for _, m := range d.net.Messages() {
			m.Deliver()
		}
		d.owner.step()
		require.Empty(t, d.owner.freed[id+"'"])
		require.NoError(t, d.owner.sched.Revoke(*d.now, id+"'"))
		d.owner.step()
		d.owner.step()
		require.Equal(t, lease.ReasonAborted, d.owner.freed[id+"'"])
		d.reader.over(id)
		d.reader.step()
		for _, m := range d.net.Messages() {
			m.Deliver()
		}
	}
	require.Greater(t, mixed, 800, "the blocks really were a mix")
	clean(t, d.owner, d.reader)
	require.EqualValues(t, 1000, d.reader.ranks[0].w.Stats().Lapsed)
}

// vllm#52234, cases.md 1 (c): all blocks are in, then the lease lapses, then the slot is read.
func TestLapseBetweenBlockAndSlotRead(t *testing.T) {
	d := newDuo(t)
	d.net.HoldReads(true)
	d.net.HoldNotifications(true)
	for name, c := range map[string]struct {
		before func() // the lapse
		want   error
	}{
		"slot READ leaves the owner after the lapse": {func() { d.lapse("req", 8, 3) }, lease.ErrLapsed},
		"slot READ left the owner before the lapse": {func() {
			d.held(0, true).Fetch()
			d.lapse("req", 8, 3)
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			d.reader.pull("local", d.owner.publish("req", 7, 3), 5)
			d.reader.step()
			require.True(t, d.held(0, false).Deliver())
			d.reader.step()
			require.Zero(t, d.reader.wrong(7, 5), "the READ itself is in")
			c.before()
			require.True(t, d.held(0, true).Deliver())
			d.reader.step()
			require.ErrorIs(t, failure(d.reader, "local"), c.want)
			require.Equal(t, c.want == nil, d.reader.ran["local"])
			if c.want == nil { // a nonce that was there after the blocks were in proves them
				require.Zero(t, d.reader.wrong(7, 5))
			}
			require.NoError(t, d.owner.sched.Revoke(*d.now, "req'"))
			d.owner.step()
			d.owner.step()
			d.reader.over("local")
			d.reader.step()
		})
	}
}

// nixl#2044, vllm#56104, protocol-check.md XZOMBIE, cases.md 3: a READ that was given up can land after a later pull of the
// same request was verified, so there is no later pull before it ended.
func TestAbandonedReadHoldsOffTheNextPullOfItsRequest(t *testing.T) {
	for name, giveUp := range map[string]func(*duo) bool{
		"aborted": func(d *duo) bool { return d.reader.over("local") },
		"timed out": func(d *duo) bool {
			d.pass(61)
			d.reader.step()
			require.ErrorIs(d.t, failure(d.reader, "local"), lease.ErrTimeout)
			require.True(d.t, d.reader.failed["local"].Quarantined)
			require.Equal(d.t, [][]int{{5, 6}}, d.reader.failed["local"].InvalidBlocks)
			return d.reader.over("local")
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDuo(t)
			d.net.HoldReads(true)
			p := d.owner.publish("req", 7, 3, 4)
			d.reader.pull("local", p, 5, 6)
			d.reader.step()
			zombie := d.held(0, false)
			zombie.Land(0, 70)
			require.True(t, giveUp(d), "the blocks are not the engine's")

			// The owner publishes it again (a retried prefill), and the router brings it to the same reader.
			next := d.owner.publish("again", 8, 8, 9)
			for range 3 {
				require.ErrorIs(t, d.reader.sched.OnNewRequest(*d.now, "local", next), lease.ErrBusy)
				d.reader.step()
			}
			require.False(t, d.reader.settled["local"])
			require.Len(t, d.net.Reads(), 1)
			// Neither does a worker take it from a scheduler that asks all the same.
			res, err := d.reader.ranks[0].w.Step(*d.now, lease.Plan{Read: []lease.Pull{{Request: "local", Peer: next.Peer(), RemoteRequest: "again",
				RemoteBlocks: next.RemoteBlockIDs, LocalBlocks: [][]int{{5, 6}}, Lease: next.Lease, Verify: true}}})
			require.NoError(t, err)
			require.Len(t, res.Failed, 1)
			require.Equal(t, lease.CauseInvalid, res.Failed[0].Cause)
			require.Len(t, d.net.Reads(), 1, "nothing was posted")

			d.owner.step()
			require.Empty(t, d.owner.freed["req"], "released only when no READ of it is active")
			zombie.Deliver()
			d.reader.step()
			require.True(t, d.reader.settled["local"])
			d.reader.pull("local", next, 5, 6)
			d.reader.step()
			d.held(0, false).Deliver()
			d.reader.step()
			d.held(0, true).Deliver()
			d.reader.step()
			require.True(t, d.reader.ran["local"])
			require.Zero(t, d.reader.wrong(8, 5, 6))
			require.False(t, zombie.Deliver())
			require.Zero(t, d.reader.wrong(8, 5, 6))
			d.owner.step()
			require.Equal(t, lease.ReasonRead, d.owner.freed["again"])
			require.Contains(t, d.owner.freed, "req")
			d.reader.over("local")
			d.reader.step()
			clean(t, d.owner, d.reader)
		})
	}
}

// nixl#2244, cases.md 3, capi-facts.md: a negative status is no proof that writing stopped. The blocks are in quarantine
// until the READ can be closed.
func TestReadThatFailedAndStillLandsIsQuarantined(t *testing.T) {
	d := newDuo(t)
	d.net.HoldReads(true)
	d.reader.pull("local", d.owner.publish("req", 7, 3, 4), 5, 6)
	d.reader.step()
	zombie := d.held(0, false)
	zombie.Break(nil)
	d.reader.step()
	require.ErrorIs(t, failure(d.reader, "local"), lease.ErrPeerLost)
	require.ErrorIs(t, zombie.Close(), nixl.ErrActive)
	require.True(t, d.reader.failed["local"].Quarantined, "the READ can still write")
	require.ErrorIs(t, d.reader.sched.OnNewRequest(*d.now, "local", d.owner.publish("next", 8, 8, 9)), lease.ErrBusy)
	require.False(t, d.reader.settled["local"])
	zombie.Deliver()
	until(t, "the settlement", func() bool { return d.reader.settled["local"] }, d.reader)
}

// The same for a slot READ: its cell is not used again before it can be closed, or a late nonce
// would be taken for the answer to another check.
func TestCellOfASlotReadThatFailedAndStillLandsIsNotReused(t *testing.T) {
	d := newDuo(t)
	other := newEngine(t, d.net, d.now, "other")
	d.reader.pull("other", other.publish("other", 6, 0), 0)
	until(t, "the other owner", func() bool { return d.reader.ran["other"] }, d.reader)
	d.net.HoldReads(true)
	d.reader.pull("one", d.owner.publish("one", 7, 3), 5)
	d.reader.pull("two", other.publish("two", 8, 4), 6)
	d.reader.step()
	d.held(0, false).Deliver()
	d.reader.step()
	zombie := d.held(1, true)
	zombie.Break(errTold)
	d.reader.step()
	require.ErrorIs(t, failure(d.reader, "one"), lease.ErrUnverifiable)
	d.held(0, false).Deliver()
	d.reader.step()
	late, _ := zombie.Descs()
	cell, _ := d.held(1, true).Descs()
	require.NotEqual(t, late, cell)
	d.held(1, true).Deliver()
	d.reader.step()
	require.True(t, d.reader.ran["two"])
	zombie.Deliver()
}

// cases.md 6, 11: the read-complete is lost; the owner frees at the deadline, and nothing is left.
func TestLostReadCompleteEndsAtTheDeadline(t *testing.T) {
	d := newDuo(t)
	p := d.owner.publish("req", 7, 3)
	d.net.HoldNotifications(true)
	d.reader.pull("local", p, 5)
	until(t, "the read", func() bool { return d.reader.ran["local"] }, d.reader)
	lost := 0
	for _, m := range d.net.Messages() {
		if !bytes.HasPrefix(m.Payload(), []byte("HB")) {
			lost++
		}
		m.Drop()
	}
	require.Equal(t, 1, lost)
	d.net.HoldNotifications(false)
	d.pass(29.9)
	d.owner.step()
	require.Empty(t, d.owner.freed["req"])
	d.pass(0.1)
	d.owner.step()
	require.Equal(t, lease.ReasonExpired, d.owner.freed["req"])
	d.reader.over("local")
	d.reader.step()
	clean(t, d.owner, d.reader)
}

// vllm 0.33.0 source, vllm-ascend#14407, cases.md 8, 24, 25: read-completes that come twice, late, and in another order.
func TestReadCompletesTwiceLateAndOutOfOrder(t *testing.T) {
	d := newDuo(t)
	d.net.HoldNotifications(true)
	for i := range 4 {
		id := fmt.Sprint("req-", i)
		d.reader.pull(id, d.owner.publish(id, uint64(7+i), i), i)
	}
	until(t, "the reads", func() bool { return len(d.reader.ran) == 4 }, d.reader)
	var done []*rdmatest.Message
	for _, m := range d.net.Messages() {
		if bytes.HasPrefix(m.Payload(), []byte("req-")) {
			done = append(done, m)
		}
	}
	require.Len(t, done, 4)
	replays := []*rdmatest.Message{done[3].Duplicate(), done[3].Duplicate(), done[0].Duplicate()}
	done[3].Deliver()
	replays[0].Deliver()
	d.owner.step()
	require.Equal(t, lease.ReasonRead, d.owner.freed["req-3"])
	require.Len(t, d.owner.freed, 2, "first and req-3")
	done[0].Deliver()
	done[2].Deliver()
	done[1].Deliver()
	d.owner.step()
	require.Len(t, d.owner.freed, 5)
	// The same id lives again; what is replayed is of its earlier life.
	d.owner.publish("req-3", 70, 3)
	d.owner.publish("req-0", 71, 0)
	replays[1].Deliver()
	replays[2].Deliver()
	d.owner.step()
	require.NotContains(t, d.owner.freed, "req-3")
	require.NotContains(t, d.owner.freed, "req-0")
	s := d.owner.ranks[0].w.Stats().Leases
	require.EqualValues(t, 2, s.StaleReadCompletes)
	require.EqualValues(t, 5, s.Read, "first, and four of five")
	d.pass(31)
	d.owner.step()
	require.Equal(t, lease.ReasonExpired, d.owner.freed["req-3"])
}

// nixl#1142 and the specification: heartbeats that come after the lease ran out. One that is there before the owner reaps
// still saves the lease (peer-tests.md A1.10, D7); one that comes later revives nothing.
func TestHeartbeatsDelayedBeyondTheLease(t *testing.T) {
	for _, late := range []bool{false, true} {
		t.Run(fmt.Sprint("after the reaping: ", late), func(t *testing.T) {
			d := newDuo(t)
			p := d.owner.publish("req", 7, 3)
			d.net.HoldNotifications(true)
			d.reader.arrive("local", p)
			for range 6 {
				d.pass(5)
				d.reader.step()
			}
			d.pass(2)
			if late {
				d.owner.step()
				require.Equal(t, lease.ReasonExpired, d.owner.freed["req"])
				d.owner.publish("next", 8, 3)
			}
			require.NotEmpty(t, d.net.Messages())
			d.net.HoldNotifications(false)
			d.owner.step()
			require.NoError(t, d.reader.sched.OnBlocksAllocated(*d.now, "local", p, [][]int{{5}}))
			until(t, "the verdict", func() bool { return d.reader.ran["local"] || failure(d.reader, "local") != nil }, d.reader)
			if late {
				require.ErrorIs(t, failure(d.reader, "local"), lease.ErrLapsed)
				d.owner.step()
				require.NotContains(t, d.owner.freed, "next")
				require.NotZero(t, d.owner.ranks[0].w.Stats().Leases.StaleRenewals)
			} else {
				require.True(t, d.reader.ran["local"])
				require.Zero(t, d.reader.wrong(7, 5))
			}
		})
	}
}

// The same with heartbeats by id, which carry no nonce (vLLM's): a late one revives no lease of its id.
func TestLateHeartbeatByIDRevivesNothing(t *testing.T) {
	d := newDuo(t)
	p := d.owner.publish("req", 7, 3)
	p.Lease = nil
	d.net.HoldNotifications(true)
	d.reader.arrive("local", p)
	d.reader.step()
	require.Equal(t, "HB:req", string(d.net.Messages()[0].Payload()))
	d.pass(31)
	d.owner.step()
	require.Equal(t, lease.ReasonExpired, d.owner.freed["req"])
	d.net.HoldNotifications(false)
	d.owner.step()
	s := d.owner.ranks[0].w.Stats().Leases
	require.Zero(t, s.Live)
	require.EqualValues(t, 1, s.UnknownRenewals)
	d.pass(31)
	d.owner.step()
	clean(t, d.owner)
}

// protocol-check.md M6, cases.md 8: a read-complete without a nonce, from a reader that verifies nothing, comes when its id
// lives again. It ends neither the prefill that runs now nor, once there are two lives, either of them by a guess.
func TestLateReadCompleteWithoutANonce(t *testing.T) {
	d := newDuo(t, func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.Verification = lease.VerifyNone })
	p := d.owner.publish("req", 7, 3)
	p.Lease = nil
	d.net.HoldNotifications(true)
	d.reader.pull("local", p, 5)
	until(t, "the read", func() bool { return d.reader.ran["local"] }, d.reader)
	messages := d.net.Messages()
	done := messages[len(messages)-1]
	require.Equal(t, "req:1", string(done.Payload()))
	d.pass(31)
	d.owner.step()
	require.Equal(t, lease.ReasonExpired, d.owner.freed["req"])
	delete(d.owner.freed, "req")
	require.NoError(t, d.owner.sched.OnBlocksAllocated(*d.now, "req", &lease.Params{DoRemoteDecode: true}, [][]int{{4}}))
	d.owner.step() // admitted, in prefill
	done.Deliver()
	d.owner.step()
	require.Empty(t, d.owner.freed["req"])
	s := d.owner.ranks[0].w.Stats().Leases
	require.EqualValues(t, 1, s.RefusedReadCompletes)
	require.EqualValues(t, 1, s.Live)
}

// vllm#49238, nixl#1986, smg#2382, cases.md 14, 15, vLLM kv_digest_xnode (peer-tests.md A10.17): the owner is killed at
// each stage of a pull. The request fails with the peer as its cause or was received whole; the successor is read.
func TestOwnerKilledAtEachStage(t *testing.T) {
	lost := []error{lease.ErrPeerLost, lease.ErrUnverifiable, lease.ErrHandshake, lease.ErrTransfer}
	stages := []struct {
		name string
		run  func(d *duo)
		ran  bool
	}{
		{"connected, nothing posted", func(d *duo) {}, false},
		{"READ posted", func(d *duo) { d.reader.step() }, false},
		{"half of the READ landed", func(d *duo) {
			d.reader.step()
			d.held(0, false).Land(0, blockLen+7)
		}, false},
		{"blocks in, not seen", func(d *duo) {
			d.reader.step()
			d.held(0, false).Deliver()
		}, false},
		{"slot READ posted", func(d *duo) {
			d.reader.step()
			d.held(0, false).Deliver()
			d.reader.step()
			d.held(0, true)
		}, false},
		{"slot READ landed, not seen", func(d *duo) {
			d.reader.step()
			d.held(0, false).Deliver()
			d.reader.step()
			d.held(0, true).Deliver()
		}, true},
		{"received", func(d *duo) {
			d.reader.step()
			d.held(0, false).Deliver()
			d.reader.step()
			d.held(0, true).Deliver()
			d.reader.step()
		}, true},
	}
	for _, s := range stages {
		t.Run(s.name, func(t *testing.T) {
			d := newDuo(t)
			d.net.HoldReads(true)
			d.reader.pull("local", d.owner.publish("req", 7, 3, 4), 5, 6)
			s.run(d)
			d.owner.ranks[0].f.Kill()
			require.NoError(t, d.owner.side.Close())
			d.owner.fill(99, 3, 4) // nothing of a dead process is read
			verdict := func() bool { return d.reader.ran["local"] || failure(d.reader, "local") != nil }
			until(t, "the verdict", verdict, d.reader)
			require.Equal(t, s.ran, d.reader.ran["local"])
			if s.ran {
				require.Zero(t, d.reader.wrong(7, 5, 6))
			} else {
				err := failure(d.reader, "local")
				matches := 0
				for _, want := range lost {
					if errors.Is(err, want) {
						matches++
					}
				}
				require.Equal(t, 1, matches, "%v", err)
			}
			if d.reader.failed["local"].Quarantined {
				until(t, "the settlement", func() bool { return d.reader.settled["local"] }, d.reader)
			}
			d.reader.over("local")

			// It comes back: a new process under the same engine id, at another port.
			d.net.HoldReads(false)
			d.owner = newEngine(t, d.net, d.now, "owner")
			p := d.owner.publish("next", 8, 3, 4)
			for try := range 10 {
				id := fmt.Sprint("next-", try)
				d.reader.pull(id, p, 5, 6)
				until(t, "a verdict", func() bool { return d.reader.ran[id] || failure(d.reader, id) != nil }, d.reader)
				if d.reader.ran[id] {
					break
				}
				d.reader.over(id)
				d.pass(1) // the back-off
				p = d.owner.publish(fmt.Sprint("next again ", try), 8, 3, 4)
			}
			require.NotEmpty(t, d.reader.ran)
			require.Zero(t, d.reader.wrong(8, 5, 6))
		})
	}
}

// The other side: a reader that is killed at each stage costs the owner a lease's length and nothing more (specification,
// "Decode Instance Crash").
func TestReaderKilledAtEachStageFreesTheOwnerAtTheDeadline(t *testing.T) {
	for stage := range 5 {
		t.Run(fmt.Sprint(stage), func(t *testing.T) {
			d := newDuo(t)
			d.net.HoldReads(true)
			p := d.owner.publish("req", 7, 3, 4)
			d.reader.arrive("local", p)
			d.reader.step() // a heartbeat
			for s := range stage {
				switch s {
				case 0:
					require.NoError(t, d.reader.sched.OnBlocksAllocated(*d.now, "local", p, [][]int{{5, 6}}))
					d.reader.step()
				case 1:
					d.held(0, false).Land(0, 70)
				case 2:
					d.held(0, false).Deliver()
					d.reader.step()
				case 3:
					d.net.HoldNotifications(true)
					d.held(0, true).Deliver()
					d.reader.step()
				}
			}
			d.owner.step()
			d.reader.ranks[0].f.Kill()
			require.Empty(t, d.net.Reads())
			for _, m := range d.net.Messages() {
				m.Drop()
			}
			d.pass(29)
			d.owner.step()
			require.Empty(t, d.owner.freed["req"])
			d.pass(1)
			d.owner.step()
			require.Equal(t, lease.ReasonExpired, d.owner.freed["req"])
			clean(t, d.owner)
		})
	}
}

// nixl#2047, vllm#49238, cases.md 4: a stalled owner is a timeout of ours; its READ settles when it goes on.
func TestStalledOwnerTimesOutIsQuarantinedAndSettles(t *testing.T) {
	d := newDuo(t)
	p := d.owner.publish("req", 7, 3, 4)
	d.owner.ranks[0].f.Stop()
	d.reader.pull("local", p, 5, 6)
	for range 59 {
		d.reader.step()
		d.pass(1)
		require.Empty(t, d.reader.failed)
	}
	d.pass(1)
	d.reader.step()
	require.ErrorIs(t, failure(d.reader, "local"), lease.ErrTimeout)
	require.True(t, d.reader.failed["local"].Quarantined)
	d.reader.over("local")
	for range 50 {
		d.reader.step()
		d.pass(10)
	}
	require.False(t, d.reader.settled["local"])
	require.Equal(t, 1, d.reader.ranks[0].w.Stats().Pulls)
	d.owner.ranks[0].f.Continue()
	d.reader.step()
	require.True(t, d.reader.settled["local"])
	d.reader.step() // releases the owner
	d.owner.step()
	require.Contains(t, d.owner.freed, "req")
	d.reader.pull("again", d.owner.publish("next", 8, 3, 4), 5, 6)
	until(t, "the read", func() bool { return d.reader.ran["again"] }, d.reader)
	require.Zero(t, d.reader.wrong(8, 5, 6))
	d.reader.over("again")
	d.reader.step()
	d.owner.step()
	clean(t, d.owner, d.reader)
}

// Specification, "Lease Verification on the Reader": a slot READ that fails fails the load.
func TestFailedSlotReadIsUnverifiable(t *testing.T) {
	d := newDuo(t)
	d.net.HoldReads(true)
	d.reader.pull("local", d.owner.publish("req", 7, 3), 5)
	d.reader.step()
	d.held(0, false).Deliver()
	d.reader.step()
	d.held(0, true).Fail(errTold)
	d.reader.step()
	require.ErrorIs(t, failure(d.reader, "local"), lease.ErrUnverifiable)
	require.ErrorContains(t, failure(d.reader, "local"), "told so")
	require.False(t, d.reader.failed["local"].Quarantined)
	require.Empty(t, d.reader.ran)
}

// protocol-check.md 9, 15: ranks lag, and the lease lapses on one of two. Each reader rank sees one slot only: the rank
// that lapsed fails the request, and no block is freed before both owner ranks reported.
func TestLapseOnOneRankOfTwo(t *testing.T) {
	d := newDuo(t, func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.TPSize = 2 })
	d.net.HoldNotifications(true)
	p := d.owner.publish("req", 7, 3, 4)
	d.reader.pull("local", p, 5, 6)
	d.pass(31)
	d.owner.run(1) // rank 0 is in a long forward pass
	require.Empty(t, d.owner.freed["req"])
	until(t, "the verdict", func() bool { return d.reader.ran["local"] || failure(d.reader, "local") != nil }, d.reader)
	require.ErrorIs(t, failure(d.reader, "local"), lease.ErrLapsed)
	require.Zero(t, d.reader.wrong(7, 5, 6), "and yet nobody had the blocks, for rank 0 held them")
	require.Empty(t, d.owner.freed["req"])
	d.owner.run(0)
	require.Equal(t, lease.ReasonExpired, d.owner.freed["req"])
	d.net.HoldNotifications(false)
	d.reader.over("local")
	d.reader.step()
	d.owner.step()
	clean(t, d.owner, d.reader)
}

// A slot READ that never ends is a timeout too. Its cell stays its own, and the request may be pulled again: its blocks
// are in, and no READ can write them.
func TestSlotReadThatNeverEnds(t *testing.T) {
	d := newDuo(t)
	d.net.HoldReads(true)
	p := d.owner.publish("req", 7, 3)
	d.reader.pull("local", p, 5)
	d.reader.step()
	d.held(0, false).Deliver()
	d.reader.step()
	stuck := d.held(0, true)
	for range 6 { // heartbeats go on
		d.pass(10)
		d.reader.step()
		d.owner.step()
	}
	require.ErrorIs(t, failure(d.reader, "local"), lease.ErrTimeout)
	require.False(t, d.reader.failed["local"].Quarantined)
	d.reader.over("local")
	d.reader.step()
	d.owner.step()
	require.Equal(t, lease.ReasonRead, d.owner.freed["req"], "released")
	d.reader.pull("local", d.owner.publish("next", 8, 3), 5)
	d.reader.step()
	d.held(1, false).Deliver()
	d.reader.step()
	stuckCell, _ := stuck.Descs()
	cell, _ := d.held(1, true).Descs()
	require.NotEqual(t, stuckCell, cell)
	stuck.Deliver()
	d.reader.step()
	require.Empty(t, d.reader.ran)
	require.Empty(t, d.reader.failed)
	d.held(0, true).Deliver()
	d.reader.step()
	require.True(t, d.reader.ran["local"])
	require.Zero(t, d.reader.wrong(8, 5))
}

// A pull that is verified in the step that would have timed it out is received, and nothing is logged as an error.
func TestPullThatEndsAtItsDeadlineIsReceived(t *testing.T) {
	var log bytes.Buffer
	d := newDuo(t, func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) {
		w.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelError}))
	})
	d.net.HoldReads(true)
	d.reader.pull("local", d.owner.publish("req", 7, 3), 5)
	d.reader.step()
	for range 59 {
		d.pass(1)
		d.reader.step()
		d.owner.step()
	}
	d.held(0, false).Deliver()
	d.reader.step()
	d.held(0, true).Deliver()
	d.pass(1)
	d.reader.step()
	require.True(t, d.reader.ran["local"])
	require.Empty(t, log.String())
}

// vllm-backport#33, nixl#795, cases.md 14: a heartbeat that fails is reported, and the peer is reached again.
func TestBrokenConnectionIsReportedAndHeals(t *testing.T) {
	d := newDuo(t)
	d.reader.arrive("local", d.owner.publish("req", 7, 3))
	d.reader.step()
	d.net.Break(d.reader.ranks[0].f, d.owner.ranks[0].f)
	failed := d.reader.sched.Stats().HeartbeatsFailed
	d.pass(5)
	d.reader.step()
	require.Equal(t, failed+1, d.reader.sched.Stats().HeartbeatsFailed)
	d.owner.step()
	renewals := d.owner.ranks[0].w.Stats().Leases.Renewals
	d.pass(5)
	until(t, "a renewal", func() bool { return d.owner.ranks[0].w.Stats().Leases.Renewals > renewals }, d.reader, d.owner)
	require.EqualValues(t, 2, d.owner.side.Stats().Answered)
}

// smg#2503, cases.md 15: fifty restarts of the owner under its id, fifty correct READs.
func TestFiftyRestartsOfTheOwner(t *testing.T) {
	d := newDuo(t)
	for i := range 50 {
		require.NoError(t, d.owner.ranks[0].w.Close())
		require.NoError(t, d.owner.side.Close())
		d.owner = newEngine(t, d.net, d.now, "owner")
		p := d.owner.publish("req", uint64(i+10), 3, 4)
		d.reader.pull("local", p, 5, 6)
		ended := func() bool { return d.reader.ran["local"] || failure(d.reader, "local") != nil }
		until(t, "the read", ended, d.reader)
		if failure(d.reader, "local") != nil { // back on the same port, so the old connection was trusted until it failed
			d.reader.over("local")
			d.reader.step() // the given-up lease is released
			d.reader.pull("local", d.owner.publish("again", uint64(i+10), 7, 8), 5, 6)
			until(t, "the read", ended, d.reader)
		}
		require.NoError(t, failure(d.reader, "local"))
		require.Zero(t, d.reader.wrong(uint64(i+10), 5, 6))
		d.reader.over("local")
		d.reader.step()
	}
}

// vllm#43509, cases.md 6, peer-tests.md C18, C19: two requests of one engine share a lease. It is kept alive for the one
// that still queues, and the owner is released once, by the last.
func TestTwoRequestsOfOneLease(t *testing.T) {
	d := newDuo(t)
	p := d.owner.publish("req", 7, 3)
	d.reader.arrive("a", p)
	d.reader.arrive("b", p)
	require.NoError(t, d.reader.sched.OnBlocksAllocated(*d.now, "a", p, [][]int{{5}}))
	until(t, "the first", func() bool { return d.reader.ran["a"] }, d.reader)
	d.reader.over("a")
	for range 12 {
		d.pass(5)
		d.reader.step()
		d.owner.step()
		require.Empty(t, d.owner.freed["req"])
	}
	require.NoError(t, d.reader.sched.OnBlocksAllocated(*d.now, "b", p, [][]int{{6}}))
	until(t, "the second", func() bool { return d.reader.ran["b"] }, d.reader)
	require.Zero(t, d.reader.wrong(7, 5)+d.reader.wrong(7, 6))
	d.reader.over("b")
	d.reader.step()
	d.owner.step()
	require.Equal(t, lease.ReasonRead, d.owner.freed["req"])
	clean(t, d.owner, d.reader)
}

// vllm#19223, cases.md 11: a request is aborted before its engine is connected; the owner is told once it is.
func TestReleaseWaitsForTheHandshake(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network := rdmatest.NewNetwork()
	owner, reader := newEngine(t, network, &start, "owner"), newEngine(t, network, &start, "reader")
	reader.arrive("local", owner.publish("req", 7, 3))
	reader.over("local")
	until(t, "the release", func() bool { return owner.freed["req"] == lease.ReasonRead }, reader, owner)
	require.Zero(t, reader.ranks[0].w.Stats().Reads)
	clean(t, owner, reader)
}

// vllm#48633, cases.md 46: the side channel of one owner hangs for a minute of the engines' clock. Heartbeats to the others keep
// their cadence of 5 s, and what arrives is handled and what runs out is reaped on time, by steps alone: the engines call nothing
// in that minute.
func TestHangingHandshakeHoldsUpNoOther(t *testing.T) {
	d := newDuo(t)
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer mute.Close()
	p := d.owner.publish("req", 7, 3)
	hung := *p
	hung.RemoteEngineID, hung.RemotePort = "mute", mute.Addr().(*net.TCPAddr).Port
	d.reader.pull("hung", &hung, 9)
	d.reader.arrive("local", p)
	d.owner.publish("unread", 8, 4)
	d.reader.step()
	d.owner.step()
	renewals := d.owner.ranks[0].w.Stats().Leases.Renewals
	for tick := range 600 { // of 100 ms
		require.EqualValues(t, tick/50, d.owner.ranks[0].w.Stats().Leases.Renewals-renewals, "after %d00 ms", tick)
		require.Equal(t, tick >= 300, d.owner.freed["unread"] == lease.ReasonExpired, "after %d00 ms", tick)
		d.pass(0.1)
		d.reader.step()
		d.owner.step()
	}
	require.Equal(t, 1, d.reader.ranks[0].w.Stats().PeersConnecting)
	require.NoError(t, d.reader.sched.OnBlocksAllocated(*d.now, "local", p, [][]int{{5}}))
	d.reader.step()
	d.reader.step()
	require.True(t, d.reader.ran["local"])
	require.Len(t, d.reader.failed, 1)
	require.ErrorIs(t, failure(d.reader, "hung"), lease.ErrTimeout)
}

// vllm 0.33.0 and nixl-sys, cases.md 29: each READ is reported to its owner exactly once.
func TestThousandReadsAreThousandReadCompletes(t *testing.T) {
	d := newDuo(t)
	before := d.owner.ranks[0].w.Stats().Leases
	for i := range 1000 {
		id := fmt.Sprint("req-", i)
		d.reader.pull(id, d.owner.publish(id, uint64(i+10), i%8), i%8)
		if i%4 == 3 {
			until(t, "the reads", func() bool { return len(d.reader.ran) == 4 }, d.reader)
			for j := i - 3; j <= i; j++ {
				require.Zero(t, d.reader.wrong(uint64(j+10), j%8))
				d.reader.over(fmt.Sprint("req-", j))
			}
		}
	}
	d.owner.step()
	s := d.owner.ranks[0].w.Stats().Leases
	require.EqualValues(t, 1000, s.ReadCompletes-before.ReadCompletes)
	require.EqualValues(t, 1000, s.Read-before.Read)
	require.Zero(t, s.DuplicateReadCompletes+s.UnmatchedReadCompletes+s.StaleReadCompletes)
	d.reader.step()
	clean(t, d.owner, d.reader)
}

// uccl#1015, nixl#1142, cases.md 13: heartbeats are split at the configured size, and renew every lease.
func TestHeartbeatsAreSplitAtTheCap(t *testing.T) {
	const n, cap = 1000, 256
	for _, slots := range []bool{true, false} {
		t.Run(fmt.Sprint("by slot: ", slots), func(t *testing.T) {
			d := newDuo(t, func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) {
				s.Blocks, s.MaxNotification = n+1, cap
			})
			for i := range n {
				id := fmt.Sprintf("%064d", i)
				p := d.owner.publish(id, uint64(i+10), i+1)
				if !slots {
					p.Lease = nil
				}
				d.reader.arrive(id, p)
			}
			d.pass(25)
			d.net.HoldNotifications(true)
			d.reader.step()
			require.NotEmpty(t, d.net.Messages())
			for _, m := range d.net.Messages() {
				require.LessOrEqual(t, len(m.Payload()), cap)
				require.Equal(t, slots, strings.HasPrefix(string(m.Payload()), "HB2:"))
			}
			d.net.HoldNotifications(false)
			d.owner.step()
			d.pass(19)
			d.owner.step()
			require.EqualValues(t, n, d.owner.ranks[0].w.Stats().Leases.Live, "all renewed")
		})
	}
}

// vllm#50326, cases.md 5: no clock of one engine means anything to another.
func TestClocksOfTheEnginesAreUnrelated(t *testing.T) {
	d := newDuo(t)
	ahead := d.now.Add(1000 * time.Second)
	d.owner.now = &ahead
	d.reader.pull("local", d.owner.publish("req", 7, 3), 5)
	until(t, "the read", func() bool { return d.reader.ran["local"] }, d.reader)
	require.Zero(t, d.reader.wrong(7, 5))
	p := d.owner.publish("other", 8, 3)
	ahead = ahead.Add(29900 * time.Millisecond)
	d.owner.step()
	require.NotContains(t, d.owner.freed, "other")
	d.pass(5) // of the reader: its last heartbeat there is an interval ago
	d.reader.arrive("late", p)
	d.reader.step()
	d.owner.step() // renewed
	ahead = ahead.Add(19900 * time.Millisecond)
	d.owner.step()
	require.NotContains(t, d.owner.freed, "other")
	ahead = ahead.Add(100 * time.Millisecond)
	d.owner.step()
	require.Equal(t, lease.ReasonExpired, d.owner.freed["other"])
}

// vllm#41863, cases.md 44: a hundred first requests to one engine share one handshake.
func TestFirstRequestsShareOneHandshake(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network := rdmatest.NewNetwork()
	more := func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.Blocks = 101 }
	owner, reader := newEngine(t, network, &start, "owner", more), newEngine(t, network, &start, "reader", more)
	for i := range 100 {
		id := fmt.Sprint("req-", i)
		reader.pull(id, owner.publish(id, uint64(i), i), i)
	}
	until(t, "the reads", func() bool { return len(reader.ran) == 100 }, reader)
	require.EqualValues(t, 1, owner.side.Stats().Answered)
	for i := range 100 {
		require.Zero(t, reader.wrong(uint64(i), i))
	}
	require.EqualValues(t, 1, reader.ranks[0].w.Stats().Checks, "one slot READ for all whose blocks were in")
}

// mute is a side channel that takes connections and says nothing, and counts them.
func mute(t *testing.T) (port int, dialled *atomic.Int64) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	dialled = &atomic.Int64{}
	var ended sync.WaitGroup
	ended.Go(func() {
		var conns []net.Conn
		for {
			c, err := l.Accept()
			if err != nil {
				break
			}
			dialled.Add(1)
			conns = append(conns, c)
		}
		for _, c := range conns {
			c.Close()
		}
	})
	t.Cleanup(func() {
		l.Close()
		ended.Wait()
	})
	return l.Addr().(*net.TCPAddr).Port, dialled
}

// vllm#41863, vllm#55677, cases.md 44: a hundred first requests to an owner that is dead are one dial, and a hundred failures,
// each told once. The next request dials again, at first at once and then once a second at most.
func TestFirstRequestsToADeadOwnerAreOneDial(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network := rdmatest.NewNetwork()
	port, dialled := mute(t)
	reader := newEngine(t, network, &start, "reader", func(w *rdma.WorkerConfig, s *lease.SchedulerConfig) {
		w.HandshakeTimeout, s.Blocks = 100*time.Millisecond, 200
	})
	told := map[string]int{}
	reader.outcome = func(o lease.Outcome) {
		for _, f := range o.Fail {
			told[f.Request]++
			require.ErrorIs(t, f.Err, lease.ErrHandshake)
			require.ErrorContains(t, f.Err, fmt.Sprint(port))
			require.False(t, f.Quarantined)
		}
	}
	ask := func(id string, block int) {
		reader.pull(id, &lease.Params{DoRemotePrefill: true, RemoteBlockIDs: [][]int{{block}}, RemoteEngineID: "dead", RemoteRequestID: id,
			RemoteHost: "127.0.0.1", RemotePort: port, TPSize: 1, Lease: &lease.SlotRef{Slot: block, Nonce: 1}}, block)
		reader.step()
	}
	for i := range 100 {
		ask(fmt.Sprint("req-", i), i)
	}
	until(t, "the failures", func() bool { return len(told) == 100 }, reader)
	require.EqualValues(t, 1, dialled.Load())
	for i, c := range []struct {
		pass  float64
		dials int64
	}{{0, 2}, {0, 2}, {0.9, 2}, {0.2, 3}, {1.9, 4}, {0.9, 4}, {0.2, 5}} {
		start = start.Add(time.Duration(c.pass * float64(time.Second)))
		id := fmt.Sprint("next-", i)
		ask(id, 150)
		until(t, "the failure", func() bool { return told[id] == 1 }, reader)
		require.Equal(t, c.dials, dialled.Load(), "request %d", i)
	}
	for id, n := range told {
		require.Equal(t, 1, n, id)
		reader.over(id)
	}
	reader.step()
	clean(t, reader)
}

// vllm#41863, cases.md 44: a hundred thousand requests that fail, or have nothing to read, to a thousand engines that are not there:
// nothing is left of them once nobody has asked for a while.
func TestNothingIsLeftOfAHundredThousandFailures(t *testing.T) {
	const engines, each = 1000, 50
	start := time.Unix(1_000_000, 0)
	reader := newEngine(t, rdmatest.NewNetwork(), &start, "reader", func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.Blocks = 2 * each })
	failures := 0
	reader.outcome = func(o lease.Outcome) { failures += len(o.Fail) }
	for e := range engines {
		p := lease.Params{DoRemotePrefill: true, RemoteEngineID: fmt.Sprint("engine-", e), RemoteHost: "127.0.0.1", RemotePort: 1, TPSize: 1,
			Lease: &lease.SlotRef{Nonce: 1}}
		var ids []string
		for i := range 2 * each {
			id := fmt.Sprint("req-", e, "-", i)
			ids = append(ids, id)
			q := p
			q.RemoteRequestID, q.RemoteBlockIDs = id, [][]int{{i}}
			if i%2 == 0 {
				reader.pull(id, &q, i)
			} else {
				reader.pull(id, &q)
			}
		}
		until(t, "the failures", func() bool { return failures == (e+1)*each }, reader)
		for _, id := range ids {
			reader.over(id)
		}
		start = start.Add(10 * time.Second)
	}
	w := reader.ranks[0].w
	reader.step()
	until(t, "the last handshake", func() bool { return w.Stats().PeersConnecting == 0 }, reader)
	require.LessOrEqual(t, failed(reader), int64(2*engines), "a handshake for the requests, and one for their releases")
	require.LessOrEqual(t, w.Stats().PeersIdle, engines/20, "those of the last minute, and of handshakes that were late")
	start = start.Add(2 * time.Minute)
	reader.step()
	s := w.Stats()
	require.Zero(t, s.Peers+s.PeersIdle+s.PeersConnecting+s.PeersBroken+s.Pulls+s.Waiting)
	clean(t, reader)
}

// A call that fails in the fabric fails one request, or is repeated in the next step; nothing is lost and nothing sticks.
func TestAnyCallOfTheFabricMayFail(t *testing.T) {
	for op, name := range map[rdmatest.Op]string{rdmatest.OpAlloc: "Alloc", rdmatest.OpLocalList: "LocalList", rdmatest.OpRemoteList: "RemoteList",
		rdmatest.OpNewRead: "NewRead", rdmatest.OpPost: "Post", rdmatest.OpNotify: "Notify", rdmatest.OpPoll: "Poll", rdmatest.OpForget: "Forget", rdmatest.OpLoad: "Load"} {
		for n := 1; n <= 3; n++ {
			t.Run(fmt.Sprint(name, n), func(t *testing.T) {
				d := newDuo(t)
				f := d.reader.ranks[0].f
				f.Fail(op, n, errTold)
				for i := range 6 {
					id := fmt.Sprint("req-", i)
					d.reader.pull(id, d.owner.publish(id, uint64(i+10), i, 8), i, 8)
					until(t, "a verdict", func() bool { return d.reader.ran[id] || failure(d.reader, id) != nil }, d.reader)
					if d.reader.ran[id] {
						require.Zero(t, d.reader.wrong(uint64(i+10), i, 8))
					} else {
						require.Regexp(t, "told so|owner was lost", failure(d.reader, id).Error())
					}
					if i > 4 {
						require.True(t, d.reader.ran[id], "it was one call: %v", failure(d.reader, id))
					}
					d.reader.over(id)
					d.reader.step()
					d.pass(1)
				}
				d.owner.step()
				d.pass(31)
				d.reader.step()
				d.owner.step()
				d.reader.step()
				clean(t, d.owner, d.reader)
			})
		}
	}
}

// An owner with lease slots that does not offer heartbeats by slot, which are an addition of ours, is renewed by the ids of the
// specification.
func TestOwnerThatOffersNoSlotHeartbeatsIsRenewedByID(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network := rdmatest.NewNetwork()
	owner, reader := newEngine(t, network, &start, "owner"), newEngine(t, network, &start, "reader")
	reply := owner.ranks[0].w.Reply()
	without := bytes.Replace(reply, []byte("lease_slot_heartbeats\xc3"), []byte("lease_slot_heartbeats\xc2"), 1) // true, false
	require.NotEqual(t, reply, without)
	owner.side.ServeReply(0, without)
	p := owner.publish("req", 7, 3)
	require.NotNil(t, p.Lease)
	network.HoldNotifications(true)
	reader.arrive("local", p)
	until(t, "the heartbeat", func() bool { return len(network.Messages()) > 0 }, reader)
	require.Equal(t, "HB:req", string(network.Messages()[0].Payload()))
	network.HoldNotifications(false)
	owner.step()
	require.Positive(t, owner.ranks[0].w.Stats().Leases.Renewals)
}
