package lease

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func bidirectional(c *SchedulerConfig) { c.Bidirectional = true; c.Epoch = t0.Add(-1000 * time.Second) }

// Specification, "Bidirectional KV Transfer"; A4.15 to A4.19, A4.22, A4.29.
func TestADecoderKeepsItsBlocksForTheNextTurn(t *testing.T) {
	d := newEngine(t, 1, bidirectional, func(c *SchedulerConfig) { c.Engine = "D-engine" })
	p := offer("A", 1, 2)
	require.NoError(t, d.OnNewRequest(t0, "d1", p))
	require.NoError(t, d.OnBlocksAllocated(t0, "d1", p, [][]int{{5, 6}}))
	d.step(t0)
	require.Len(t, d.last.Admit, 1, "its own slot")
	require.Len(t, d.last.Read, 1)
	require.Equal(t, []string{"d1"}, d.OnResults(t0, []Result{{Received: []string{"d1"}}}).Run)

	params, delayed, err := d.RequestFinished(at(10), "d1", StatusStopped, [][]int{{5, 6, 7}}, 40)
	require.NoError(t, err)
	require.True(t, delayed)
	require.True(t, params.DoRemoteDecode)
	require.False(t, params.DoRemotePrefill)
	require.Equal(t, [][]int{{5, 6, 7}}, params.RemoteBlockIDs)
	require.Equal(t, 40, params.RemoteNumTokens)
	require.NotNil(t, params.Lease)
	require.InDelta(t, 1000+10+480, *params.RemoteBlocksExpiry, 1e-6)
	require.Equal(t, 480*time.Second, params.RemoteBlocksTTL)

	d.step(at(10))
	require.Equal(t, Grant{"d1", params.Lease.Nonce, 480 * time.Second, true, true}, d.last.Grant[0])
	d.ranks[0].notify(at(480), "P", "HB:d1")
	require.Empty(t, d.step(at(489)).Free)
	require.Len(t, d.step(at(490)).Free, 1, "not renewed by heartbeats")
}

// A4.1, A4.9, A4.13: turn 2 reads from D and offers to D again, under one id.
func TestAReadbackIsVerifiedAndPublishedAgain(t *testing.T) {
	p := newEngine(t, 1, bidirectional)
	expiry := 500.0
	back := &Params{
		DoRemoteDecode: true, RemoteBlockIDs: [][]int{{20, 21}}, RemoteEngineID: "D-engine", RemoteRequestID: "d1", RemoteHost: "d", RemotePort: 5700,
		RemoteNumTokens: 30, RemoteBlocksExpiry: &expiry, RemoteBlocksTTL: 480 * time.Second, Lease: &SlotRef{1, 9999},
	}
	require.NoError(t, p.OnNewRequest(t0, "turn2", back))
	require.NoError(t, p.OnBlocksAllocated(t0, "turn2", back, [][]int{{3, 4}}))
	p.step(t0)
	require.Len(t, p.last.Admit, 1)
	require.Empty(t, p.last.Heartbeat, "heartbeats never apply in this direction")
	require.True(t, p.last.Read[0].Verify)
	require.Equal(t, &expiry, p.last.Read[0].Expiry)
	require.Equal(t, []string{"turn2"}, p.OnResults(t0, []Result{{Received: []string{"turn2"}}}).Run)
	params, delayed, err := p.RequestFinished(t0, "turn2", StatusLengthCapped, [][]int{{3, 4}}, 31)
	require.NoError(t, err)
	require.True(t, delayed)
	require.True(t, params.DoRemotePrefill)
	require.Nil(t, params.RemoteBlocksExpiry)
	p.step(t0)
	require.Equal(t, 30*time.Second, p.last.Grant[0].TTL)
	require.False(t, p.last.Grant[0].Fixed)
	require.Empty(t, p.fetches)

	// A decoder of today offers no lease; the specification reads it unverified.
	plain := with(back, func(p *Params) { p.Lease = nil })
	require.NoError(t, p.OnBlocksAllocated(t0, "turn2b", plain, [][]int{{5, 6}}))
	p.step(t0)
	require.False(t, p.last.Read[0].Verify)

	// Without the option it is a prefill like any other (vllm-wire.md 9.8).
	q := newEngine(t, 1)
	require.NoError(t, q.OnNewRequest(t0, "r", back))
	require.NoError(t, q.OnBlocksAllocated(t0, "r", back, [][]int{{3, 4}}))
	q.step(t0)
	require.Empty(t, q.last.Read)
	require.Len(t, q.last.Admit, 1)
}

// A request that is read into and owned at once gives its blocks back once.
func TestAnAbortOfAReadbackFreesItsBlocksOnce(t *testing.T) {
	for _, readsFirst := range []bool{true, false} {
		p := newEngine(t, 1, bidirectional)
		back := with(offer("d1", 1), func(p *Params) { p.DoRemotePrefill, p.DoRemoteDecode, p.RemoteEngineID = false, true, "D-engine" })
		require.NoError(t, p.OnBlocksAllocated(t0, "r", back, [][]int{{3}}))
		p.step(t0)
		_, delayed, err := p.RequestFinished(t0, "r", StatusStopped, [][]int{{3}}, 0)
		require.NoError(t, err)
		require.True(t, delayed)
		var free []Freed
		var settled []Settled
		collect := func(o Outcome) { free, settled = append(free, o.Free...), append(settled, o.Settled...) }
		if readsFirst {
			collect(p.OnResults(t0, []Result{{Settled: []string{"r"}}}))
			collect(p.step(t0))
		} else {
			collect(p.step(t0))
			require.Empty(t, free, "a READ may still write")
			collect(p.OnResults(t0, []Result{{Settled: []string{"r"}}}))
		}
		require.Len(t, free, 1)
		require.Empty(t, settled)
		require.Empty(t, p.lives)
		require.Empty(t, p.fetches)
	}
}

// A4.23 to A4.28; D6 "expiry present but clock offset unknown".
func TestAReadbackIsDeclinedNearItsDeadline(t *testing.T) {
	now := t0
	sample := func(ahead float64) *ClockOffset {
		c := &ClockOffset{}
		require.NoError(t, c.Add(now, now, 1000+ahead))
		return c
	}
	in := func(seconds float64) *float64 { s := 1000 + seconds; return &s }
	pull := func(expiry *float64) Pull {
		return Pull{Request: "r", LocalBlocks: [][]int{{1}}, Expiry: expiry}
	}
	for _, tt := range []struct {
		name  string
		clock *ClockOffset
		pull  Pull
		want  error
	}{
		{"expired", sample(0), pull(in(-10)), ErrExpired},
		{"the offset makes it expired", sample(100), pull(in(50)), ErrExpired},
		{"near expiry, within the margin", sample(0), pull(in(2)), ErrExpired},
		{"valid, far deadline", sample(0), pull(in(1000)), nil},
		{"missing expiry", sample(0), pull(nil), nil},
		{"nothing to fill", sample(0), Pull{Request: "r", Expiry: in(-10)}, nil},
		{"unknown offset", &ClockOffset{}, pull(in(1000)), ErrUnverifiable},
		{"unknown offset, verified", &ClockOffset{}, Pull{Request: "r", LocalBlocks: [][]int{{1}}, Expiry: in(1), Verify: true}, nil},
		{"far beyond any time", sample(0), pull(in(1e300)), nil},
		{"far before any time", sample(0), pull(in(-1e300)), ErrExpired},
	} {
		err := tt.clock.Check(now, tt.pull)
		if tt.want == nil {
			require.NoError(t, err, tt.name)
		} else {
			requireRefused(t, err, tt.want)
		}
	}
}

// "P estimates the clock offset to D from the handshake round-trip". A4.30;
// vllm-wire.md 5.3 and 9.21.
func TestTheClockOffsetKeepsTheSampleWithTheSmallestError(t *testing.T) {
	var c ClockOffset
	require.False(t, c.Known())
	require.NoError(t, c.Add(t0, at(2), 501)) // the middle is at 1 s
	require.Equal(t, at(1), c.Local(at(2), 501))
	require.Equal(t, at(11), c.Local(at(2), 511))
	require.InDelta(t, float64(time.Second), float64(c.Error(at(2))), 1e6)

	require.NoError(t, c.Add(at(3), at(3.2), 503.2)) // shorter round trip
	require.Equal(t, at(3.1), c.Local(at(5), 503.2))
	require.NoError(t, c.Add(at(4), at(5), 9999)) // longer: not believed
	require.Equal(t, at(3.1), c.Local(at(5), 503.2))

	// After days even a fresh long one is better than an old short one.
	day := at(86400)
	require.Greater(t, c.Error(day), 17*time.Second)
	require.NoError(t, c.Add(day, day.Add(time.Second), 80000))
	require.Equal(t, day.Add(time.Second/2), c.Local(day, 80000))
	require.Equal(t, time.Second/2, c.Error(t0), "a clock that went back adds no drift")

	for _, bad := range []struct {
		sent, received time.Time
		remote         float64
	}{{at(2), at(1), 5}, {at(1), at(2), math.NaN()}, {at(1), at(2), math.Inf(1)}} {
		before := c
		requireRefused(t, c.Add(bad.sent, bad.received, bad.remote), ErrInvalid)
		require.Equal(t, before, c)
	}
}

// Whatever the clocks say, blocks do not outlive their time to live.
func TestAReadbackIsDeclinedAfterItsTimeToLive(t *testing.T) {
	p := newEngine(t, 1, bidirectional)
	back := with(offer("d1", 1), func(p *Params) {
		p.DoRemotePrefill, p.DoRemoteDecode, p.RemoteEngineID, p.RemoteBlocksTTL = false, true, "D-engine", 60*time.Second
	})
	require.NoError(t, p.OnNewRequest(t0, "late", back))
	require.NoError(t, p.OnNewRequest(t0, "hit", back))
	require.NoError(t, p.OnNewRequest(t0, "ok", back))
	require.NoError(t, p.OnBlocksAllocated(at(54.9), "ok", back, [][]int{{3}}))
	require.NoError(t, p.OnBlocksAllocated(at(55), "late", back, [][]int{{4}}))
	require.NoError(t, p.OnBlocksAllocated(at(55), "hit", back, [][]int{{}}))
	out := p.OnResults(at(55), nil)
	require.Len(t, out.Fail, 1)
	require.ErrorIs(t, out.Fail[0].Err, ErrExpired)
	require.Equal(t, "late", out.Fail[0].Request)
	require.Equal(t, []string{"hit"}, out.Run, "A4.28")
	require.EqualValues(t, 1, p.Stats().Failed[CauseExpired])
	require.Len(t, p.BuildPlan(at(55)).Read, 1)
}

// A4.2, A4.5, A4.6, A4.7, A4.21.
func TestHowManyTokensAreRead(t *testing.T) {
	both := newEngine(t, 1, bidirectional, func(c *SchedulerConfig) { c.RecomputeThreshold = 0 })
	careful := newEngine(t, 1, bidirectional, func(c *SchedulerConfig) { c.RecomputeThreshold = 256 })
	off := newEngine(t, 1)
	back := func(tokens int) *Params {
		return with(offer("d1", 1, 2, 3), func(p *Params) { p.DoRemotePrefill, p.DoRemoteDecode, p.RemoteNumTokens = false, true, tokens })
	}
	for _, tt := range []struct {
		name             string
		e                *engine
		p                *Params
		prompt, computed int
		want             int
	}{
		{"no params", both, nil, 40, 0, 0},
		{"no blocks named", both, with(back(80), func(p *Params) { p.RemoteBlockIDs = nil }), 40, 0, 0},
		{"capped at the prompt", both, back(80), 40, 0, 40},
		{"partial last block", both, back(40), 56, 0, 40},
		{"less than the prompt", both, back(32), 72, 0, 32},
		{"local hit", both, back(40), 56, 32, 8},
		{"hit beyond", both, back(40), 56, 48, 0},
		{"below the threshold", careful, back(48), 72, 0, 0},
		{"at the threshold", careful, back(256), 300, 0, 256},
		{"turn 1 has no threshold", careful, offer("A", 1), 20, 0, 20},
		{"turn 1 with a hit", both, offer("A", 1, 2), 40, 16, 24},
		{"option off", off, back(80), 40, 0, 0},
	} {
		require.Equal(t, tt.want, tt.e.RemoteTokens(tt.p, tt.prompt, tt.computed), tt.name)
	}
}

// llm-d-router#2273: a third party keeps a lease while it looks for a reader.
func TestALeaseIsHeldByAThirdParty(t *testing.T) {
	owner := newEngine(t, 2, func(c *SchedulerConfig) { c.TPSize = 2 })
	p := viaJSON(t, *owner.publish(t0, "r", 5))
	router := newReader(t, 1)
	requireRefused(t, router.Hold(t0, "h", nil), ErrInvalid)
	requireRefused(t, router.Hold(t0, "h", &Params{DoRemoteDecode: true}), ErrInvalid)
	requireRefused(t, router.Hold(t0, "h", &Params{DoRemotePrefill: true}), ErrInvalid)
	requireRefused(t, router.Unhold(t0, "h", true), ErrUnknown)
	require.NoError(t, router.Hold(t0, "h", &p))
	requireRefused(t, router.Hold(t0, "h", &p), ErrBusy)
	requireRefused(t, router.OnNewRequest(t0, "h", &p), ErrBusy)
	requireRefused(t, router.OnBlocksAllocated(t0, "h", &p, [][]int{{1}}), ErrBusy)

	for now := 0.0; now <= 100; now += 5 {
		for _, h := range router.BuildPlan(at(now)).Heartbeat {
			msg, _, err := AppendSlotHeartbeat(nil, h.Targets, 0)
			require.NoError(t, err)
			for _, r := range owner.ranks {
				r.notify(at(now), "router", string(msg))
			}
		}
		require.Empty(t, owner.step(at(now)).Free)
	}
	require.NoError(t, router.Unhold(at(100), "h", true))
	plan := router.BuildPlan(at(100))
	require.Empty(t, plan.Heartbeat)
	require.Equal(t, []Release{{Request: "h", Peer: p.Peer(), RemoteRequest: "r", Nonce: p.Lease.Nonce, All: true}}, plan.Release)
	for _, r := range owner.ranks { // the rank of a router tells all p.TPSize of them
		r.notify(at(100), "router", string(AppendReadComplete(nil, "r", 1, plan.Release[0].Nonce)))
	}
	require.Equal(t, ReasonRead, owner.step(at(100)).Free[0].Reason)
	requireIdle(t, router)

	require.NoError(t, router.Hold(t0, "h", &p))
	require.NoError(t, router.Unhold(t0, "h", false))
	require.True(t, router.BuildPlan(t0).Empty(), "a reader has taken it over")
	requireIdle(t, router)
}

// vllm#43509, cases.md 6 (b): one of n siblings is read, the others do not leak.
func TestOneReadReleasesAGroup(t *testing.T) {
	e := newEngine(t, 2)
	ids := []string{"g0", "g1", "g2", "g3"}
	requireRefused(t, e.Group(t0, ids...), ErrUnknown)
	var params []*Params
	for i, id := range ids[:3] {
		params = append(params, e.publish(t0, id, i))
	}
	require.NoError(t, e.OnBlocksAllocated(t0, "g3", decode, [][]int{{9}}))
	e.step(t0)
	e.publish(t0, "alone", 10)
	require.NoError(t, e.Group(t0, ids...))
	requireRefused(t, e.Group(t0, "alone", "g0"), ErrInvalid)

	done := func(now time.Time, rank int) {
		e.ranks[rank].notify(now, "D", string(AppendReadComplete(nil, "g1", 1, params[1].Lease.Nonce)))
	}
	done(at(1), 0)
	require.Empty(t, e.step(at(1)).Free, "not before the last rank")
	done(at(1), 1)
	free := append(e.step(at(1)).Free, e.step(at(1)).Free...)
	require.Len(t, free, 3)
	for _, f := range free {
		require.Equal(t, ReasonRead, f.Reason, f.Request)
	}
	_, delayed, err := e.RequestFinished(at(2), "g3", StatusStopped, [][]int{{9}}, 1)
	require.NoError(t, err)
	require.True(t, delayed)
	require.Len(t, e.step(at(2)).Free, 1, "the one that finished late as well")
	require.EqualValues(t, 0, e.Stats().Freed[ReasonExpired])
	require.EqualValues(t, 4, e.Stats().Freed[ReasonRead])
	require.Equal(t, "alone", e.step(at(31)).Free[0].Request)
}

// An expiry of one sibling says nothing about the others.
func TestAnExpiryDoesNotReleaseAGroup(t *testing.T) {
	e := newEngine(t, 1)
	e.publish(t0, "g0", 1)
	e.publish(at(20), "g1", 2)
	require.NoError(t, e.Group(t0, "g0", "g1"))
	require.Len(t, e.step(at(30)).Free, 1)
	require.Empty(t, e.step(at(49)).Free)
	require.Len(t, e.step(at(50)).Free, 1)
}

// vllm-wire.md 9.11, A4.5: the prompt of the next turn is shorter than what the decoder offers.
func TestAShorterPromptIsReadUpToItsEnd(t *testing.T) {
	p := newEngine(t, 1, bidirectional)
	back := with(offer("d1", 1, 2, 3, 4, 5), func(p *Params) {
		p.DoRemotePrefill, p.DoRemoteDecode, p.RemoteEngineID, p.RemoteNumTokens = false, true, "D-engine", 80
	})
	requireRefused(t, p.ReadUpTo("r", 40), ErrUnknown)
	require.NoError(t, p.OnNewRequest(t0, "r", back))
	for _, tokens := range []int{-1, 0, 81, math.MaxInt} {
		requireRefused(t, p.ReadUpTo("r", tokens), ErrInvalid)
	}
	require.NoError(t, p.ReadUpTo("r", 80))
	require.NoError(t, p.ReadUpTo("r", 40))
	require.NoError(t, p.OnBlocksAllocated(t0, "r", back, [][]int{{7, 8, 9}}))
	requireRefused(t, p.ReadUpTo("r", 30), ErrUnknown)
	require.NoError(t, p.Preempted(t0, "r"))
	require.NoError(t, p.ReadUpTo("r", 48))
	require.NoError(t, p.OnBlocksAllocated(t0, "r", back, [][]int{{7, 8, 9}}))
	pull := p.BuildPlan(t0).Read[0]
	require.Equal(t, 80, pull.RemoteTokens)
	require.Equal(t, 48, pull.Tokens)

	require.NoError(t, p.OnNewRequest(t0, "whole", with(back, func(p *Params) { p.RemoteRequestID = "d2" })))
	require.NoError(t, p.Hold(t0, "held", with(offer("A", 1), func(p *Params) { p.RemoteEngineID = "another" })))
	requireRefused(t, p.ReadUpTo("held", 1), ErrUnknown)
}

// E2: a deadline is placed from now, however old the sample is, and none is further than the longest lease.
func TestADeadlineIsClampedFromNow(t *testing.T) {
	var c ClockOffset
	require.NoError(t, c.Add(t0, t0, 100))
	for _, days := range []float64{0, 1, 29, 31, 365} {
		now := at(days * 86400)
		require.WithinDuration(t, now.Add(480*time.Second), c.Local(now, 100+days*86400+480), time.Millisecond, "after %v days", days)
		require.Equal(t, now.Add(MaxTTL), c.Local(now, 1e18))
		require.Equal(t, now.Add(-MaxTTL), c.Local(now, math.NaN()))
	}
}
