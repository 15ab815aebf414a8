package lease

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// at another address of the same engine
func moved(p *Params, host string) *Params {
	return with(p, func(p *Params) { p.RemoteHost = host })
}

// B13, E1: each request is read, renewed and released at the address that its params name, whoever came first.
func TestARequestWithAnotherAddressHasAPeerOfItsOwn(t *testing.T) {
	for name, order := range map[string][2]string{"the wrong one first": {"gone", "here"}, "the right one first": {"here", "gone"}} {
		t.Run(name, func(t *testing.T) {
			s := newReader(t, 1)
			offers := map[string]*Params{"gone": moved(offer("A", 1), "gone"), "here": moved(offer("B", 1), "here")}
			for _, host := range order {
				enqueue(t, s, t0, host, offers[host])
			}
			beats := map[string][]Target{}
			for _, h := range s.BuildPlan(t0).Heartbeat {
				beats[h.Peer.Host] = h.Targets
			}
			require.Equal(t, map[string][]Target{"gone": {{"A", 3, 7777}}, "here": {{"B", 3, 7777}}}, beats)
			schedule(t, s, t0, "here", offers["here"], 5)
			plan := s.BuildPlan(t0)
			require.Equal(t, offers["here"].Peer(), plan.Read[0].Peer)
			s.OnResults(t0, []Result{{Received: []string{"here"}}})
			finish(t, s, t0, "gone", StatusAborted)
			for _, r := range s.BuildPlan(t0).Release {
				require.Equal(t, r.Request, r.Peer.Host)
			}
			enqueue(t, s, t0, "changed", offers["here"])
			requireRefused(t, s.OnBlocksAllocated(t0, "changed", moved(offers["here"], "gone"), [][]int{{6}}), ErrInvalid)
		})
	}
}

// Shapes count as well: tp_size says how many ranks there are to ask.
func TestARequestWithAnotherShapeHasAPeerOfItsOwn(t *testing.T) {
	s := newReader(t, 1)
	enqueue(t, s, t0, "a", offer("A", 1))
	enqueue(t, s, t0, "b", with(offer("B", 1), func(p *Params) { p.TPSize = 2 }))
	require.Len(t, s.BuildPlan(t0).Heartbeat, 2)
}

// E7: one heartbeat a peer and interval, also of requests that come and go.
func TestShortRequestsShareTheHeartbeatsOfTheirPeer(t *testing.T) {
	s := newReader(t, 1)
	beats := 0
	for i := range 1000 { // 10 s
		now := at(float64(i) / 100)
		id := fmt.Sprint("r", i)
		enqueue(t, s, now, id, offer(id, 1))
		beats += len(s.BuildPlan(now).Heartbeat)
		finish(t, s, now, id, StatusAborted)
		s.BuildPlan(now)
	}
	require.Equal(t, 2, beats)
	require.Len(t, s.peers.byPeer, 1, "it knows when the last one was")
	s.BuildPlan(at(20))
	require.Empty(t, s.peers.byPeer, "and is forgotten when that does not matter any more")
	enqueue(t, s, at(20), "next", offer("next", 1))
	require.Len(t, s.BuildPlan(at(20)).Heartbeat, 1, "at once")
}

// G8: the heartbeats to an owner whose leases are shorter than ours follow its duration, which its handshake tells.
func TestHeartbeatsFollowTheDurationOfTheOwnersLeases(t *testing.T) {
	for _, c := range []struct {
		owner    time.Duration
		interval float64
	}{{0, 5}, {2 * time.Second, 2. / 6}, {12 * time.Second, 2}, {30 * time.Second, 5}, {time.Hour, 5}, {1, minInterval.Seconds()}} {
		s := newReader(t, 1)
		enqueue(t, s, t0, "a", offer("A", 1))
		s.BuildPlan(t0)
		s.OnResults(t0, []Result{{Connected: []Connection{{peerOf("P-engine"), c.owner}}}})
		require.Len(t, s.BuildPlan(t0).Heartbeat, 1)
		require.Empty(t, s.BuildPlan(at(c.interval-0.001)).Heartbeat, c.owner)
		require.Len(t, s.BuildPlan(at(c.interval+0.001)).Heartbeat, 1, c.owner)
	}
}

// A peer that is due sooner is not behind one that is due later and was heartbeated before it.
func TestPeersAreDueByTheirOwnIntervals(t *testing.T) {
	s := newReader(t, 1)
	enqueue(t, s, t0, "slow", offer("A", 1))
	s.BuildPlan(t0)
	enqueue(t, s, at(1), "fast", with(offer("B", 1), func(p *Params) { p.RemoteEngineID = "P2" }))
	s.BuildPlan(at(1))
	s.OnResults(at(1), []Result{{Connected: []Connection{{peerOf("P2"), 6 * time.Second}}}})
	s.BuildPlan(at(1))
	hb := s.BuildPlan(at(2)).Heartbeat
	require.Len(t, hb, 1)
	require.Equal(t, "P2", hb[0].Peer.Engine)
}

// E6: any number of requests of one lease, which come, read and end in any order; the owner is told once, when the last one
// needs it no more, and never while one does.
func TestASharedLeaseEndsOnceWithItsLastRequest(t *testing.T) {
	for seed := range uint64(2000) {
		rng := rand.New(rand.NewPCG(seed, 3))
		s := newReader(t, 1, recompute)
		aliases := []*Params{offer("A", 1), moved(offer("A", 1), "alias")} // one lease, by its nonce
		waiting, running := map[string]*Params{}, map[string]bool{}
		released, tried := 0, 0
		step := func() {
			plan := s.BuildPlan(t0)
			released += len(plan.Release)
			if len(plan.Release) > 0 {
				require.Empty(t, waiting, "seed %d: released while a request waits", seed)
				require.Empty(t, running, "seed %d: released while a request is read", seed)
			}
			for _, p := range plan.Read {
				running[p.Request] = true
			}
		}
		for range 40 {
			switch rng.IntN(5) {
			case 0:
				if released == 0 && tried < 8 { // later ones would find it gone
					tried++
					id := fmt.Sprint("r", tried)
					waiting[id] = aliases[rng.IntN(2)]
					enqueue(t, s, t0, id, waiting[id])
				}
			case 1:
				for id, p := range waiting {
					schedule(t, s, t0, id, p, 5)
					step()
					delete(waiting, id)
					break
				}
			case 2:
				for id := range running {
					s.OnResults(t0, []Result{{Received: []string{id}}})
					delete(running, id)
					finish(t, s, t0, id, StatusStopped)
					break
				}
			case 3:
				for id := range waiting {
					finish(t, s, t0, id, StatusAborted)
					delete(waiting, id)
					break
				}
			case 4:
				step()
			}
		}
		for id := range waiting {
			finish(t, s, t0, id, StatusAborted)
		}
		clear(waiting)
		for id := range running {
			s.OnResults(t0, []Result{{Failed: []Failure{{Request: id, Cause: CauseTransfer}}}})
			finish(t, s, t0, id, StatusError)
		}
		clear(running)
		step()
		require.Equal(t, min(tried, 1), min(released, 1), "seed %d", seed)
		requireIdle(t, s)
	}
}

// The exact schedule of E6, and the one in which the second request comes between the verdict and the next plan.
func TestARequestThatComesWhileAnotherReadsItsLeaseIsReadToo(t *testing.T) {
	for name, after := range map[string]bool{"while it is read": false, "after its verdict": true} {
		t.Run(name, func(t *testing.T) {
			s := newReader(t, 1)
			reading(t, s, "a", offer("A", 1), 5)
			if !after {
				enqueue(t, s, t0, "b", offer("A", 1))
			}
			require.Equal(t, []string{"a"}, s.OnResults(t0, []Result{{Received: []string{"a"}}}).Run)
			if after {
				enqueue(t, s, t0, "b", offer("A", 1))
			}
			require.Empty(t, s.BuildPlan(at(5)).Release, "b needs it")
			schedule(t, s, at(5), "b", offer("A", 1), 6)
			require.Len(t, s.BuildPlan(at(5)).Read, 1)
			s.OnResults(at(5), []Result{{Received: []string{"b"}}})
			require.Len(t, s.BuildPlan(at(5)).Release, 1)
		})
	}
}

// Without a nonce a lease is known by its address as well: engines that share an id may share request ids.
func TestWithoutANonceLeasesOfTwoAddressesAreTwo(t *testing.T) {
	s := newReader(t, 1)
	bare := with(offer("A", 1), func(p *Params) { p.Lease = nil })
	for _, host := range []string{"one", "two"} {
		enqueue(t, s, t0, host, moved(bare, host))
		finish(t, s, t0, host, StatusAborted)
	}
	require.Len(t, s.BuildPlan(t0).Release, 2)
}

// The owner is told where its lease was read: the address of another request may be dead.
func TestASharedLeaseIsReleasedWhereItWasRead(t *testing.T) {
	s := newReader(t, 1)
	enqueue(t, s, t0, "dead", moved(offer("A", 1), "dead"))
	reading(t, s, "a", offer("A", 1), 5)
	s.OnResults(t0, []Result{{Received: []string{"a"}}})
	require.Empty(t, s.BuildPlan(t0).Release)
	finish(t, s, t0, "dead", StatusAborted)
	require.Equal(t, peerOf("P-engine"), s.BuildPlan(t0).Release[0].Peer)
}

// E11, G6: which ends of a request tell its owner.
func TestWhoHearsThatARequestIsOver(t *testing.T) {
	for _, c := range []struct {
		name    string
		policy  FailurePolicy
		cause   Cause // 0: read
		status  Status
		release bool
	}{
		{"read", FailRequest, 0, StatusStopped, true},
		{"read, though its request failed later", FailRequest, 0, StatusError, true},
		{"a handshake that was refused leaves it to another reader", FailRequest, CauseHandshake, StatusError, false},
		{"blocks that do not fit", FailRequest, CauseInvalid, StatusError, false},
		{"a transfer that failed", FailRequest, CauseTransfer, StatusError, false},
		{"no proof", FailRequest, CauseUnverifiable, StatusError, false},
		{"given up by its client", FailRequest, CauseTransfer, StatusAborted, true},
		{"went on without the blocks", FailRequest, CauseTransfer, StatusLengthCapped, true},
		{"prefilled here", Recompute, CauseHandshake, StatusError, true},
		{"about to expire", FailRequest, CauseExpired, StatusError, true},
		{"lapsed", FailRequest, CauseLapsed, StatusAborted, false},
		{"lapsed and prefilled here", Recompute, CauseLapsed, StatusStopped, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newReader(t, 1, func(sc *SchedulerConfig) { sc.FailurePolicy = c.policy })
			reading(t, s, "a", offer("A", 1), 5)
			res := Result{Received: []string{"a"}}
			if c.cause != 0 {
				res = Result{Failed: []Failure{{Request: "a", Cause: c.cause}}}
			}
			s.OnResults(t0, []Result{res})
			n := len(s.BuildPlan(t0).Release)
			finish(t, s, t0, "a", c.status)
			n += len(s.BuildPlan(t0).Release)
			require.Equal(t, c.release, n == 1)
			require.LessOrEqual(t, n, 1)
			requireIdle(t, s)
		})
	}
}

// A lapse that one rank finds counts for all, though another failed first, and for requests that share the lease.
func TestALapseOnAnyRankSilencesTheRelease(t *testing.T) {
	s := newReader(t, 2)
	reading(t, s, "a", offer("A", 1), 5)
	enqueue(t, s, t0, "b", offer("A", 1))
	s.OnResults(t0, []Result{{Rank: 0, Failed: []Failure{{Request: "a", Cause: CauseTransfer}}}, {Rank: 1, Failed: []Failure{{Request: "a", Cause: CauseLapsed}}}})
	finish(t, s, t0, "a", StatusAborted)
	finish(t, s, t0, "b", StatusAborted)
	require.Empty(t, s.BuildPlan(t0).Release)
	requireIdle(t, s)

	reading(t, s, "c", offer("C", 1), 5)
	finish(t, s, t0, "c", StatusAborted, 5)
	s.OnResults(t0, []Result{{Rank: 0, Settled: []string{"c"}}, {Rank: 1, Failed: []Failure{{Request: "c", Cause: CauseLapsed}}}})
	require.Empty(t, s.BuildPlan(t0).Release, "also of a request that was given up")
}

// G8: a peer that was forgotten by the scheduler, and not by the ranks, is heartbeated by its duration again: a rank that knows
// better says so.
func TestADurationThatTheSchedulerForgotIsToldAgain(t *testing.T) {
	s := newReader(t, 1)
	enqueue(t, s, t0, "a", offer("A", 1))
	require.Zero(t, s.BuildPlan(t0).Heartbeat[0].Duration)
	s.OnResults(t0, []Result{{Connected: []Connection{{peerOf("P-engine"), 2 * time.Second}}}})
	require.Equal(t, 2*time.Second, s.BuildPlan(t0).Heartbeat[0].Duration)
	finish(t, s, at(1), "a", StatusAborted)
	for i := range 10 {
		s.BuildPlan(at(float64(2 + i)))
	}
	require.Empty(t, s.peers.byPeer)
	enqueue(t, s, at(20), "b", offer("B", 1))
	require.Zero(t, s.BuildPlan(at(20)).Heartbeat[0].Duration, "which the rank sees")
	s.OnResults(at(20), []Result{{Connected: []Connection{{peerOf("P-engine"), 2 * time.Second}}}})
	require.Len(t, s.BuildPlan(at(20)).Heartbeat, 1)
	require.Len(t, s.BuildPlan(at(20.4)).Heartbeat, 1)
}

// Half a read is none: the lease is left to another reader.
func TestAReadThatWasGivenUpHalfwayIsNone(t *testing.T) {
	s := newReader(t, 2)
	reading(t, s, "a", offer("A", 1), 5)
	enqueue(t, s, t0, "b", offer("A", 1))
	finish(t, s, t0, "a", StatusAborted)
	s.OnResults(t0, []Result{{Rank: 0, Received: []string{"a"}}, {Rank: 1, Settled: []string{"a"}}})
	schedule(t, s, t0, "b", offer("A", 1), 6)
	s.BuildPlan(t0)
	s.OnResults(t0, []Result{{Rank: 0, Failed: []Failure{{Request: "b", Cause: CauseTransfer}}}, {Rank: 1, Failed: []Failure{{Request: "b", Cause: CauseTransfer}}}})
	finish(t, s, t0, "b", StatusError)
	require.Empty(t, s.BuildPlan(t0).Release, "nobody has read it: another reader may")
}

// What a third party releases stays released, whoever holds it before the next plan.
func TestAReleaseByAThirdPartyIsNotForgotten(t *testing.T) {
	s := newReader(t, 1)
	require.NoError(t, s.Hold(t0, "h1", offer("A", 1)))
	require.NoError(t, s.Unhold(t0, "h1", true)) // Node.Release
	require.NoError(t, s.Hold(t0, "h2", offer("A", 1)))
	require.NoError(t, s.Unhold(t0, "h2", false)) // Held.Close
	require.Len(t, s.BuildPlan(t0).Release, 1)
}
