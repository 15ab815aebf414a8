package lease

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func recompute(c *SchedulerConfig)  { c.FailurePolicy = Recompute }
func unverified(c *SchedulerConfig) { c.Verification = VerifyNone }

// queue takes a reader's request to its queue, and schedule to its blocks.
func enqueue(t *testing.T, s *Scheduler, now time.Time, id string, p *Params) {
	t.Helper()
	require.NoError(t, s.OnNewRequest(now, id, p))
}

func schedule(t *testing.T, s *Scheduler, now time.Time, id string, p *Params, blocks ...int) {
	t.Helper()
	require.NoError(t, s.OnBlocksAllocated(now, id, p, [][]int{blocks}))
}

// reading takes a request to the ranks.
func reading(t *testing.T, s *Scheduler, id string, p *Params, blocks ...int) Plan {
	t.Helper()
	enqueue(t, s, t0, id, p)
	schedule(t, s, t0, id, p, blocks...)
	plan := s.BuildPlan(t0)
	require.NotEmpty(t, plan.Read)
	return plan
}

func finish(t *testing.T, s *Scheduler, now time.Time, id string, st Status, blocks ...int) bool {
	t.Helper()
	p, delayed, err := s.RequestFinished(now, id, st, [][]int{blocks}, 0)
	require.NoError(t, err)
	require.Nil(t, p)
	return delayed
}

// requireIdle shows that nothing of a reader is left.
func requireIdle(t *testing.T, s *Scheduler) {
	t.Helper()
	require.Empty(t, s.fetches)
	require.Empty(t, s.peers.leases)
	require.Zero(t, s.Stats().Peers)
	require.Zero(t, s.Stats().Tracked)
	require.Equal(t, queue{}, s.queue)
}

// Specification, "Scheduler-side tracking (D)". A1.1, A1.2, A1.3.
func TestHeartbeatsStartWhenARequestIsQueued(t *testing.T) {
	s := newReader(t, 1)
	sized := with(offer("prefill-1", 1), func(p *Params) { p.TPSize, p.DCPSize, p.PPSize, p.RemotePort = 4, 2, 3, 1234 })
	enqueue(t, s, t0, "local-1", sized)
	enqueue(t, s, t0, "local-2", offer("prefill-2", 2))
	enqueue(t, s, t0, "local-4", with(sized, func(p *Params) { p.RemoteRequestID = "prefill-4" }))
	enqueue(t, s, t0, "local-3", with(offer("prefill-3", 2), func(p *Params) { p.RemoteEngineID = "P2"; p.Lease = nil }))
	plan := s.BuildPlan(t0)
	require.Equal(t, []Heartbeat{
		{Peer{"P-engine", "p-host", 1234, 4, 3, 2}, []Target{{"prefill-1", 3, 7777}, {"prefill-4", 3, 7777}}, 0},
		{peerOf("P-engine"), []Target{{"prefill-2", 3, 7777}}, 0},
		{peerOf("P2"), []Target{{"prefill-3", NoSlot, 0}}, 0},
	}, plan.Heartbeat, "the owner's ids, grouped by engine and address")
	require.Empty(t, plan.Read, "long before it is scheduled")
	require.EqualValues(t, 4, s.Stats().Tracked)
	require.EqualValues(t, 3, s.Stats().Peers)
}

// A1.4, A1.5.
func TestRequestsThatDoNotReadAreNotHeartbeated(t *testing.T) {
	s := newReader(t, 1)
	enqueue(t, s, t0, "owner", &Params{DoRemoteDecode: true})
	enqueue(t, s, t0, "plain", nil)
	enqueue(t, s, t0, "none", &Params{})
	require.True(t, s.BuildPlan(t0).Empty())
	requireIdle(t, s)
}

// A1.7 and vllm-wire.md 9.16: every interval, counted per peer, the first at once.
func TestHeartbeatsAreThrottledPerPeer(t *testing.T) {
	s := newReader(t, 1)
	enqueue(t, s, t0, "a", offer("A", 1))
	require.Len(t, s.BuildPlan(t0).Heartbeat, 1)
	require.Empty(t, s.BuildPlan(t0).Heartbeat)
	require.Empty(t, s.BuildPlan(at(4.9)).Heartbeat)
	other := with(offer("B", 1), func(p *Params) { p.RemoteEngineID = "P2" })
	enqueue(t, s, at(4.9), "b", other)
	hb := s.BuildPlan(at(4.9)).Heartbeat
	require.Len(t, hb, 1, "a new engine does not wait for the others")
	require.Equal(t, "P2", hb[0].Peer.Engine)
	hb = s.BuildPlan(at(5)).Heartbeat
	require.Len(t, hb, 1)
	require.Equal(t, "P-engine", hb[0].Peer.Engine)
	require.Empty(t, s.BuildPlan(at(9.8)).Heartbeat)
	require.Len(t, s.BuildPlan(at(9.9)).Heartbeat, 1)
	require.Len(t, s.BuildPlan(at(10)).Heartbeat, 1)
	require.Len(t, s.BuildPlan(at(1000)).Heartbeat, 2)
	require.Len(t, s.BuildPlan(at(-50)).Heartbeat, 2, "a clock that went back silences nobody")
	require.Empty(t, s.BuildPlan(at(-46)).Heartbeat)
	require.Len(t, s.BuildPlan(at(-45)).Heartbeat, 2)
}

// A clock that goes back an hour or forward a day makes every peer due once, and then every interval, those included that had
// nothing to renew when it jumped: a READ in quarantine keeps the peer known.
func TestHeartbeatsGoOnWhenTheClockJumps(t *testing.T) {
	for name, jump := range map[string]float64{"back": -3600, "forward": 86400} {
		t.Run(name, func(t *testing.T) {
			s := newReader(t, 1)
			enqueue(t, s, t0, "beaten", offer("A", 1))
			reading(t, s, "quarantined", with(offer("B", 1), func(p *Params) { p.RemoteEngineID = "P2" }), 5)
			require.Len(t, s.BuildPlan(at(5)).Heartbeat, 2)
			require.True(t, finish(t, s, at(5), "quarantined", StatusAborted, 5))
			require.Len(t, s.BuildPlan(at(10)).Heartbeat, 1)
			now := 10 + jump
			require.Len(t, s.BuildPlan(at(now)).Heartbeat, 1)
			enqueue(t, s, at(now), "late", with(offer("C", 1), func(p *Params) { p.RemoteEngineID = "P2" }))
			require.Len(t, s.BuildPlan(at(now)).Heartbeat, 1, "of the late one")
			require.Empty(t, s.BuildPlan(at(now+4.9)).Heartbeat)
			for i := range 10 {
				require.Len(t, s.BuildPlan(at(now+5*float64(i+1))).Heartbeat, 2)
			}
		})
	}
}

// "The heartbeat is deferred to the next step once the handshake completes."
func TestAHeartbeatFollowsTheConnectionAtOnce(t *testing.T) {
	s := newReader(t, 1)
	enqueue(t, s, t0, "a", offer("A", 1))
	require.Len(t, s.BuildPlan(t0).Heartbeat, 1, "starts the handshake")
	s.OnResults(at(0.1), []Result{{Connected: []Connection{{Peer: peerOf("P-engine")}, {Peer: peerOf("unknown")}}}})
	require.Len(t, s.BuildPlan(at(0.1)).Heartbeat, 1, "not an interval later")
	require.Empty(t, s.BuildPlan(at(0.2)).Heartbeat)
	s.OnResults(at(1), []Result{{HeartbeatFailed: []string{"P-engine"}}})
	require.EqualValues(t, 1, s.Stats().HeartbeatsFailed, "cases.md 14")
}

// "Tracking stops when either the KV transfer completes or the request
// finishes/aborts". A1.6, A1.8, A1.9.
func TestHeartbeatsStopWithTheLoadOrTheRequest(t *testing.T) {
	s := newReader(t, 1)
	reading(t, s, "a", offer("A", 1), 5)
	enqueue(t, s, t0, "b", offer("B", 1))
	out := s.OnResults(t0, []Result{{Received: []string{"a"}}})
	require.Equal(t, []string{"a"}, out.Run)
	hb := s.BuildPlan(at(5)).Heartbeat
	require.Equal(t, []Target{{"B", 3, 7777}}, hb[0].Targets)
	require.False(t, finish(t, s, at(6), "b", StatusAborted))
	require.Empty(t, s.BuildPlan(at(60)).Heartbeat)
	require.False(t, finish(t, s, at(61), "a", StatusStopped, 5))
	s.BuildPlan(at(62))
	requireIdle(t, s)
}

// vllm-wire.md 9.17, C19: two local requests that share one remote request.
func TestRequestsThatShareALeaseBothCount(t *testing.T) {
	s := newReader(t, 1)
	for _, id := range []string{"a", "b", "c"} {
		enqueue(t, s, t0, id, offer("A", 1))
	}
	require.Len(t, s.BuildPlan(t0).Heartbeat[0].Targets, 1, "one lease, one target")
	require.False(t, finish(t, s, t0, "a", StatusAborted))
	for _, now := range []float64{20, 40, 60} {
		require.Len(t, s.BuildPlan(at(now)).Heartbeat, 1)
	}
	require.Empty(t, s.BuildPlan(at(60)).Release, "others need the lease")
	require.False(t, finish(t, s, at(61), "b", StatusAborted))
	require.False(t, finish(t, s, at(61), "c", StatusAborted))
	plan := s.BuildPlan(at(90))
	require.Empty(t, plan.Heartbeat)
	require.Equal(t, []Release{{Request: "c", Peer: Peer{"P-engine", "p-host", 5600, 1, 1, 1}, RemoteRequest: "A", Nonce: 7777}}, plan.Release)
	requireIdle(t, s)
}

// C18: released only after the last of several choices, read or not.
func TestTheLastOfSeveralReadersReleasesTheLease(t *testing.T) {
	s := newReader(t, 1)
	enqueue(t, s, t0, "a", offer("A", 1))
	enqueue(t, s, t0, "b", offer("A", 1))
	enqueue(t, s, t0, "c", offer("A", 1))
	schedule(t, s, t0, "a", offer("A", 1), 5)
	s.BuildPlan(t0)
	s.OnResults(t0, []Result{{Received: []string{"a"}}})
	require.Empty(t, s.BuildPlan(t0).Release, "b and c still need it")
	schedule(t, s, t0, "b", offer("A", 1))
	require.Equal(t, []string{"b"}, s.OnResults(t0, nil).Run, "a full local hit")
	require.Empty(t, s.BuildPlan(t0).Release)
	schedule(t, s, t0, "c", offer("A", 1), 6)
	require.Empty(t, s.BuildPlan(t0).Release, "c still needs it")
	s.OnResults(t0, []Result{{Received: []string{"c"}}})
	require.Len(t, s.BuildPlan(t0).Release, 1, "the last")

	// Both on the ranks at once: the last to end is followed by a release.
	enqueue(t, s, t0, "d", offer("D", 1))
	enqueue(t, s, t0, "e", offer("D", 1))
	schedule(t, s, t0, "d", offer("D", 1), 7)
	schedule(t, s, t0, "e", offer("D", 1), 8)
	require.Len(t, s.BuildPlan(t0).Read, 2)
	s.OnResults(t0, []Result{{Received: []string{"d"}}})
	require.Empty(t, s.BuildPlan(t0).Release)
	s.OnResults(t0, []Result{{Received: []string{"e"}}})
	require.Len(t, s.BuildPlan(t0).Release, 1)
	for _, id := range []string{"a", "b", "c", "d", "e"} {
		require.False(t, finish(t, s, t0, id, StatusStopped))
	}
	requireIdle(t, s)
}

// A3.1, A3.2, A4.8 to A4.12, A4.20.
func TestAScheduledReaderIsPulledOnce(t *testing.T) {
	s := newReader(t, 2)
	p := with(offer("A", 20, 21, 22), func(p *Params) { p.RemotePort = 5678 })
	enqueue(t, s, t0, "a", p)
	schedule(t, s, t0, "a", p, 10, 11, 12)
	schedule(t, s, t0, "a", p, 10, 11, 12)
	plan := s.BuildPlan(t0)
	require.Equal(t, []Pull{{
		Request: "a", Peer: Peer{"P-engine", "p-host", 5678, 1, 1, 1}, RemoteRequest: "A",
		RemoteBlocks: [][]int{{20, 21, 22}}, LocalBlocks: [][]int{{10, 11, 12}}, RemoteTokens: 48, Lease: &SlotRef{3, 7777}, Verify: true,
	}}, plan.Read)
	require.Empty(t, s.BuildPlan(t0).Read)
	requireRefused(t, s.OnBlocksAllocated(t0, "a", p, [][]int{{10}}), ErrBusy)

	require.Empty(t, s.OnResults(t0, []Result{{Rank: 0, Received: []string{"a"}}, {Rank: 0, Received: []string{"a"}}}).Run, "rank 1 still reads")
	require.EqualValues(t, 1, s.Stats().RepeatedReports)
	require.Equal(t, []string{"a"}, s.OnResults(t0, []Result{{Rank: 1, Received: []string{"a"}}}).Run)
	schedule(t, s, t0, "a", p, 10, 11, 12)
	plan = s.BuildPlan(t0)
	require.Empty(t, plan.Read, "A4.20: not again after it arrived")
	require.Equal(t, []Release{{Request: "a", Peer: Peer{"P-engine", "p-host", 5678, 1, 1, 1}, RemoteRequest: "A", Nonce: 7777}}, plan.Release, "the owner is told")
	require.Zero(t, s.Stats().Released, "and counts as read")
	require.Empty(t, s.OnResults(t0, []Result{{Rank: 1, Received: []string{"a"}}}).Run)
	require.False(t, finish(t, s, t0, "a", StatusStopped, 10, 11, 12))
	require.Empty(t, s.BuildPlan(t0).Release, "once")
	requireIdle(t, s)
}

// vllm#19223, #41269, #56640, cases.md 11; A3.3, A3.4, A10.4.
func TestARequestThatReadsNothingReleasesTheOwnerOnce(t *testing.T) {
	release := []Release{{Request: "a", Peer: Peer{"P-engine", "p-host", 5600, 1, 1, 1}, RemoteRequest: "A", Nonce: 7777}}
	t.Run("aborted in the queue", func(t *testing.T) {
		s := newReader(t, 1)
		enqueue(t, s, t0, "a", offer("A", 1))
		require.False(t, finish(t, s, t0, "a", StatusAborted))
		require.Equal(t, release, s.BuildPlan(t0).Release)
		require.Empty(t, s.BuildPlan(t0).Release)
		requireIdle(t, s)
		require.False(t, finish(t, s, t0, "a", StatusAborted))
		require.True(t, s.BuildPlan(t0).Empty())
	})
	t.Run("scheduled and aborted before the plan", func(t *testing.T) {
		s := newReader(t, 1)
		enqueue(t, s, t0, "a", offer("A", 1))
		schedule(t, s, t0, "a", offer("A", 1), 5)
		require.False(t, finish(t, s, t0, "a", StatusAborted, 5))
		plan := s.BuildPlan(t0)
		require.Empty(t, plan.Read)
		require.Equal(t, release, plan.Release)
		requireIdle(t, s)
	})
	t.Run("full local hit", func(t *testing.T) {
		s := newReader(t, 1)
		enqueue(t, s, t0, "a", offer("A", 1))
		schedule(t, s, t0, "a", offer("A", 1))
		plan := s.BuildPlan(t0)
		require.Empty(t, plan.Read)
		require.Empty(t, plan.Heartbeat, "vllm-wire.md 9.19")
		require.Equal(t, release, plan.Release)
		require.Equal(t, []string{"a"}, s.OnResults(t0, nil).Run, "its waiter completes")
		require.Empty(t, s.OnResults(t0, nil).Run)
		require.False(t, finish(t, s, t0, "a", StatusStopped, 5))
		requireIdle(t, s)
	})
	t.Run("never announced", func(t *testing.T) {
		s := newReader(t, 1)
		schedule(t, s, t0, "a", with(offer("A", 1), func(p *Params) { p.Lease = nil }))
		require.Equal(t, []Release{{Request: "a", Peer: Peer{"P-engine", "p-host", 5600, 1, 1, 1}, RemoteRequest: "A", Nonce: 0}}, s.BuildPlan(t0).Release)
	})
}

func TestWhichPullsAreVerified(t *testing.T) {
	for _, c := range []struct {
		v                                  Verification
		leased, bare, leasedBack, bareBack bool
	}{{VerifyAll, true, true, true, false}, {VerifyOffered, true, false, true, false}, {VerifyNone, false, false, false, false}} {
		require.Equal(t, c.leased, c.v.verifies(true, false), c.v)
		require.Equal(t, c.bare, c.v.verifies(false, false), c.v)
		require.Equal(t, c.leasedBack, c.v.verifies(true, true), c.v)
		require.Equal(t, c.bareBack, c.v.verifies(false, true), c.v)
	}
}

// Owners with slots and without them have one reader, which neither fails the ones nor trusts the others.
func TestOfferedLeasesAreVerifiedAndTheOthersRead(t *testing.T) {
	s := newReader(t, 1, func(c *SchedulerConfig) { c.Verification = VerifyOffered })
	plan := reading(t, s, "a", offer("A", 1), 5)
	require.True(t, plan.Read[0].Verify)
	plan = reading(t, s, "b", with(offer("B", 1), func(p *Params) { p.Lease = nil }), 6)
	require.False(t, plan.Read[0].Verify)
}

// What a rank of this process saw is matched by errors.Is beside the cause; from another process comes the cause alone.
func TestFailureMatchesItsCauseAndWhatTheRankSaw(t *testing.T) {
	seen := errors.New("another compatibility hash")
	for _, err := range []error{seen, nil} {
		s := newReader(t, 1)
		reading(t, s, "a", offer("A", 1), 5)
		out := s.OnResults(t0, []Result{{Failed: []Failure{{Request: "a", Cause: CauseHandshake, Message: "their hash", Err: err}}}})
		require.Len(t, out.Fail, 1)
		require.ErrorIs(t, out.Fail[0].Err, ErrHandshake)
		require.Equal(t, err != nil, errors.Is(out.Fail[0].Err, seen))
		require.ErrorContains(t, out.Fail[0].Err, "their hash")
		require.NotContains(t, out.Fail[0].Err.Error(), seen.Error(), "the message has it, once")
	}
}

// "the lease fields are missing … fails the KV load", before any READ.
func TestMissingLeaseFieldsFailTheLoadBeforeAnyRead(t *testing.T) {
	for _, policy := range []FailurePolicy{FailRequest, Recompute} {
		s := newReader(t, 2, func(c *SchedulerConfig) { c.FailurePolicy = policy })
		p := with(offer("A", 1, 2), func(p *Params) { p.Lease = nil })
		enqueue(t, s, t0, "a", p)
		schedule(t, s, t0, "a", p, 5, 6)
		plan := s.BuildPlan(t0)
		require.Empty(t, plan.Read)
		require.Equal(t, policy == Recompute, len(plan.Release) == 1, "who prefills it needs the lease no more")
		out := s.OnResults(t0, nil)
		require.Len(t, out.Fail, 1)
		f := out.Fail[0]
		require.ErrorIs(t, f.Err, ErrUnverifiable)
		require.Equal(t, CauseUnverifiable, f.Cause)
		require.Equal(t, [][]int{{5, 6}}, f.InvalidBlocks)
		require.Equal(t, policy == Recompute, f.Recompute)
		require.False(t, f.Quarantined)
		require.EqualValues(t, 1, s.Stats().Failed[CauseUnverifiable])
		schedule(t, s, t0, "a", p, 5, 6)
		require.True(t, s.BuildPlan(t0).Empty(), "scheduled again to recompute, it is not pulled")
		require.False(t, finish(t, s, t0, "a", StatusStopped, 5, 6))
		require.Equal(t, policy == FailRequest, len(s.BuildPlan(t0).Release) == 1, "once in all")
		requireIdle(t, s)
	}
	s := newReader(t, 1, unverified)
	plan := reading(t, s, "a", with(offer("A", 1), func(p *Params) { p.Lease = nil }), 5)
	require.False(t, plan.Read[0].Verify)
}

// A3.37 to A3.39, A8.11, A9.7, A9.9, A9.12: a failure on one rank fails the
// request once, with all its blocks.
func TestAFailedLoadIsReportedOnceWithItsCause(t *testing.T) {
	for c := CauseLapsed; c < causeEnd; c++ {
		s := newReader(t, 2, recompute)
		reading(t, s, "a", offer("A", 1, 2), 5, 6)
		out := s.OnResults(t0, []Result{
			{Rank: 0, Received: []string{"a"}},
			{Rank: 1, Failed: []Failure{{Request: "a", Cause: c, Message: "says why"}}},
		})
		require.Empty(t, out.Run)
		require.Len(t, out.Fail, 1)
		require.ErrorIs(t, out.Fail[0].Err, c.Err())
		require.ErrorContains(t, out.Fail[0].Err, "rank 1: says why")
		require.Equal(t, c, out.Fail[0].Cause)
		require.True(t, out.Fail[0].Recompute)
		require.False(t, out.Fail[0].Quarantined)
		require.Empty(t, out.Settled)
		plan := s.BuildPlan(at(60))
		require.Empty(t, plan.Heartbeat)
		require.Empty(t, plan.Cancel)
		if c == CauseLapsed {
			require.Empty(t, plan.Release, "the lease is over")
		} else {
			require.Len(t, plan.Release, 1, "given up for good: it is prefilled here")
		}
		require.False(t, finish(t, s, t0, "a", StatusError, 5, 6))
		requireIdle(t, s)
	}
}

// A9.10, A9.15, cases.md 3, 12: the client hears at once, the blocks stay until no READ can
// write them; the owner is released only then.
func TestAFailureWhileOtherRanksReadQuarantinesTheBlocks(t *testing.T) {
	s := newReader(t, 3, recompute)
	reading(t, s, "a", offer("A", 1), 5)
	out := s.OnResults(t0, []Result{{Rank: 1, Failed: []Failure{{Request: "a", Cause: CauseTimeout, Quarantined: true}}}})
	require.Len(t, out.Fail, 1)
	require.True(t, out.Fail[0].Quarantined)
	plan := s.BuildPlan(t0)
	require.Equal(t, []string{"a"}, plan.Cancel)
	require.Empty(t, plan.Release)
	requireRefused(t, s.OnBlocksAllocated(t0, "a", offer("A", 1), [][]int{{5}}), ErrBusy)

	out = s.OnResults(t0, []Result{{Rank: 0, Failed: []Failure{{Request: "a", Cause: CauseTransfer}}}, {Rank: 2, Settled: []string{"a"}}})
	require.Empty(t, out.Fail)
	require.Empty(t, out.Settled)
	require.Empty(t, s.BuildPlan(t0).Release)
	out = s.OnResults(t0, []Result{{Rank: 1, Settled: []string{"a"}}})
	require.Equal(t, []Settled{{"a", [][]int{{5}}}}, out.Settled)
	plan = s.BuildPlan(t0)
	require.Len(t, plan.Release, 1)
	require.Empty(t, plan.Cancel)
	require.False(t, finish(t, s, t0, "a", StatusError, 5))
	requireIdle(t, s)
}

// vllm-wire.md 6.8, A5.14 on the reader: an abort while reading.
func TestAnAbortWhileReadingKeepsTheBlocksUntilSettled(t *testing.T) {
	s := newReader(t, 2)
	reading(t, s, "a", offer("A", 1), 5)
	require.True(t, finish(t, s, t0, "a", StatusAborted, 5, 6))
	require.True(t, finish(t, s, t0, "a", StatusAborted, 5, 6), "again: still not the engine's")
	plan := s.BuildPlan(at(60))
	require.Equal(t, []string{"a"}, plan.Cancel)
	require.Empty(t, plan.Heartbeat)
	require.Empty(t, plan.Release, "not while a READ of ours is active")
	requireRefused(t, s.OnNewRequest(t0, "a", offer("A", 1)), ErrBusy)
	requireRefused(t, s.Preempted(t0, "a"), ErrBusy)

	require.Empty(t, s.OnResults(t0, []Result{{Rank: 0, Settled: []string{"a"}}}))
	out := s.OnResults(t0, []Result{{Rank: 1, Failed: []Failure{{Request: "a", Cause: CausePeerLost}}}})
	require.Equal(t, Outcome{Settled: []Settled{{"a", [][]int{{5, 6}}}}}, out, "no Run and no Fail for what the engine gave up")
	require.Len(t, s.BuildPlan(t0).Release, 1)
	requireIdle(t, s)
	require.Empty(t, s.OnResults(t0, []Result{{Rank: 0, Received: []string{"a"}}}), "cases.md 12: late notes do not bring it back")
	requireIdle(t, s)
	enqueue(t, s, t0, "a", offer("A", 1))
}

// The READs were faster than the cancel: the owner is told once.
func TestAnAbortedRequestThatArrivedIsNotReleasedTwice(t *testing.T) {
	s := newReader(t, 2)
	reading(t, s, "a", offer("A", 1), 5)
	require.True(t, finish(t, s, t0, "a", StatusAborted, 5))
	out := s.OnResults(t0, []Result{{Rank: 0, Received: []string{"a"}}, {Rank: 1, Received: []string{"a"}}})
	require.Empty(t, out.Run)
	require.Len(t, out.Settled, 1)
	require.Len(t, s.BuildPlan(t0).Release, 1)
	require.Empty(t, s.BuildPlan(t0).Release)
	requireIdle(t, s)
}

// A rank that settles what nobody cancelled must not leave the request waiting.
func TestARankThatGivesUpByItselfFailsTheLoad(t *testing.T) {
	s := newReader(t, 2)
	reading(t, s, "a", offer("A", 1), 5)
	out := s.OnResults(t0, []Result{{Rank: 0, Settled: []string{"a"}}})
	require.Len(t, out.Fail, 1)
	require.ErrorIs(t, out.Fail[0].Err, ErrAborted)
	require.True(t, out.Fail[0].Quarantined)
	out = s.OnResults(t0, []Result{{Rank: 1, Received: []string{"a"}}})
	require.Empty(t, out.Run)
	require.Len(t, out.Settled, 1)
}

func TestAPreemptedReaderIsPulledWithItsNewBlocks(t *testing.T) {
	s := newReader(t, 1)
	p := offer("A", 1)
	enqueue(t, s, t0, "a", p)
	schedule(t, s, t0, "a", p, 5)
	require.NoError(t, s.Preempted(t0, "a"))
	require.Empty(t, s.BuildPlan(t0).Read)
	schedule(t, s, t0, "a", p, 9)
	require.Equal(t, [][]int{{9}}, s.BuildPlan(t0).Read[0].LocalBlocks)
}

// vllm-wire.md 9.3, 9.4, 9.5, 9.7; cases.md 22: what clients send.
func TestParamsThatCannotBeReadAreRefusedAtTheDoor(t *testing.T) {
	for name, change := range map[string]func(*Params){
		"engine":        func(p *Params) { p.RemoteEngineID = "" },
		"own engine":    func(p *Params) { p.RemoteEngineID = "D-engine" },
		"host":          func(p *Params) { p.RemoteHost = "" },
		"port":          func(p *Params) { p.RemotePort = 0 },
		"request id":    func(p *Params) { p.RemoteRequestID = "" },
		"comma":         func(p *Params) { p.RemoteRequestID = "a,b" },
		"both":          func(p *Params) { p.DoRemoteDecode = true },
		"sizes":         func(p *Params) { p.TPSize = 1 << 20 },
		"negative size": func(p *Params) { p.PPSize = -1 },
		"negative id":   func(p *Params) { p.RemoteBlockIDs = [][]int{{-1}} },
		"id twice":      func(p *Params) { p.RemoteBlockIDs = [][]int{{4, 4}} },
	} {
		s := newReader(t, 1)
		requireRefused(t, s.OnNewRequest(t0, "a", with(offer("A", 1), change)), ErrInvalid)
		requireRefused(t, s.OnBlocksAllocated(t0, "a", with(offer("A", 1), change), [][]int{{5}}), ErrInvalid)
		requireIdle(t, s)
		require.True(t, s.BuildPlan(t0).Empty(), name)
	}
	s := newReader(t, 1)
	enqueue(t, s, t0, "a", offer("A", 1))
	enqueue(t, s, t0, "a", offer("A", 1)) // told twice
	requireRefused(t, s.OnNewRequest(t0, "a", offer("B", 1)), ErrBusy)
	for _, bad := range []struct {
		p      *Params
		blocks [][]int
	}{
		{offer("A"), [][]int{{5}}},
		{with(offer("A"), func(p *Params) { p.RemoteBlockIDs = nil }), [][]int{{5}}},
		{offer("A", 1), [][]int{{5}, {6}}},
		{with(offer("A", 1), func(p *Params) { p.RemoteBlockIDs = [][]int{{1}, {}} }), [][]int{{5}, {6}}},
		{offer("A", 1), [][]int{{64}}},
		{offer("A", 1), [][]int{{-1}}},
		{offer("A", 1), [][]int{{5, 5}}},
		{offer("B", 1), [][]int{{5}}},
	} {
		requireRefused(t, s.OnBlocksAllocated(t0, "a", bad.p, bad.blocks), ErrInvalid)
	}
	require.EqualValues(t, 1, s.Stats().Tracked, "and is heartbeated until it finishes")
	require.Len(t, s.BuildPlan(t0).Heartbeat, 1)
	schedule(t, s, t0, "a", offer("A", 1), 5)
	require.Len(t, s.BuildPlan(t0).Read, 1, "nothing was lost")
}

// A3.10; design.md, sizes: a plan of many requests and peers.
func TestManyRequestsToManyPeers(t *testing.T) {
	s := newReader(t, 1, func(c *SchedulerConfig) { c.Blocks = 0; c.Slots = 1 })
	const peers, each = 50, 40
	for i := range peers * each {
		p := with(offer(fmt.Sprint("R", i), i), func(p *Params) { p.RemoteEngineID = fmt.Sprint("P", i%peers); p.Lease.Nonce = int64(i + 1) })
		enqueue(t, s, t0, fmt.Sprint(i), p)
	}
	hb := s.BuildPlan(t0).Heartbeat
	require.Len(t, hb, peers)
	seen := map[string]bool{}
	for _, h := range hb {
		require.Len(t, h.Targets, each)
		for _, tg := range h.Targets {
			require.False(t, seen[tg.Request])
			seen[tg.Request] = true
		}
	}
	for i := range peers * each {
		require.False(t, finish(t, s, t0, fmt.Sprint(i), StatusAborted))
	}
	require.Len(t, s.BuildPlan(t0).Release, peers*each)
	requireIdle(t, s)
}
