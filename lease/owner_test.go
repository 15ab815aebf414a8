package lease

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var decode = &Params{DoRemoteDecode: true}

// Specification: "When a do_remote_decode request is first scheduled, the
// scheduler assigns it a slot and a unique nonce, and the workers write the nonce
// into the slot in that same step." A3.6, A4.22, A5.11, A5.13.
func TestAnOwnerLendsASlotInTheStepThatSchedulesAndExportsAtFinish(t *testing.T) {
	e := newEngine(t, 2, func(c *SchedulerConfig) { c.TPSize = 2 })
	require.NoError(t, e.OnNewRequest(t0, "r", decode))
	require.Empty(t, e.step(t0))
	require.True(t, e.last.Empty(), "nothing before it is scheduled")

	require.NoError(t, e.OnBlocksAllocated(t0, "r", decode, [][]int{{5}}))
	e.step(t0)
	require.Len(t, e.last.Admit, 1)
	a := e.last.Admit[0]
	for _, r := range e.ranks {
		require.Equal(t, a.Nonce, r.cells[a.Slot])
	}
	require.NoError(t, e.OnBlocksAllocated(at(1), "r", decode, [][]int{{5, 6, 7}}), "a later chunk")
	e.step(at(1))
	require.True(t, e.last.Empty(), "one life, one slot")

	p, delayed, err := e.RequestFinished(at(2), "r", StatusLengthCapped, [][]int{{5, 6, 7}}, 40)
	require.NoError(t, err)
	require.True(t, delayed)
	require.Equal(t, &Params{
		DoRemotePrefill: true, RemoteBlockIDs: [][]int{{5, 6, 7}}, RemoteEngineID: "P-engine", RemoteRequestID: "r",
		RemoteHost: "p-host", RemotePort: 5600, TPSize: 2, DCPSize: 1, PPSize: 1, RemoteNumTokens: 40, TransferMode: "pull",
		Lease: &SlotRef{a.Slot, a.Nonce},
	}, p)
	e.step(at(2))
	require.Equal(t, []Grant{{Request: "r", Nonce: a.Nonce, TTL: 30 * time.Second, Exported: true}}, e.last.Grant)
	require.Equal(t, at(32), e.ranks[0].deadline())
	for range 3 {
		require.Empty(t, e.step(at(3)).Free, "A4.3: held over later steps")
	}
}

// Blocks are freed when the last rank reported (M5), and the slot comes back
// only then (M9B). A3.13, A3.14, A4.13, A8.11.
func TestBlocksAndSlotComeBackWhenTheLastRankReported(t *testing.T) {
	e := newEngine(t, 3, func(c *SchedulerConfig) { c.Slots = 1 })
	p := e.publish(t0, "r", 5, 6)
	require.Zero(t, e.Stats().FreeSlots)
	for i, r := range e.ranks {
		out := e.step(at(1))
		require.Empty(t, out.Free)
		require.Zero(t, e.Stats().FreeSlots, "rank %d still holds it", i)
		r.notify(at(1), "D", string(AppendReadComplete(nil, "r", 1, p.Lease.Nonce)))
	}
	out := e.step(at(1))
	require.Equal(t, []Freed{{"r", p.Lease.Nonce, [][]int{{5, 6}}, ReasonRead}}, out.Free)
	require.EqualValues(t, 1, e.Stats().FreeSlots)
	require.Empty(t, e.lives)
	require.Empty(t, e.step(at(1)).Free, "freed once")

	q := e.publish(at(2), "r", 7)
	require.Equal(t, p.Lease.Slot, q.Lease.Slot)
	require.NotEqual(t, p.Lease.Nonce, q.Lease.Nonce, "the slot has a new nonce (M3)")
}

// "No heartbeat arrives --- the lease expires and P reclaims the blocks." A3.27.
func TestAnUnreadLeaseExpires(t *testing.T) {
	e := newEngine(t, 1, func(c *SchedulerConfig) { c.Duration = 6 * time.Second })
	e.publish(t0, "r", 5)
	require.Empty(t, e.step(at(5.9)).Free)
	out := e.step(at(6))
	require.Len(t, out.Free, 1)
	require.Equal(t, ReasonExpired, out.Free[0].Reason)
}

// protocol-check.md hole 9: read on one rank, expired on another.
func TestMixedEndsAreExpired(t *testing.T) {
	for _, order := range [][2]Reason{{ReasonRead, ReasonExpired}, {ReasonExpired, ReasonRead}, {ReasonAborted, ReasonExpired}, {ReasonExpired, ReasonAborted}} {
		e := newEngine(t, 2)
		p := e.publish(t0, "r", 5)
		for i, reason := range order {
			out := e.OnResults(t0, []Result{{Rank: i, Sent: []Ended{{"r", p.Lease.Nonce, reason}}}})
			require.Len(t, out.Free, i)
			if i == 1 {
				require.Equal(t, ReasonExpired, out.Free[0].Reason)
			}
		}
	}
}

// Reports that repeat, come for nothing, or from no rank. A2.3; cases.md 7.
func TestReportsThatMatchNothingAreCounted(t *testing.T) {
	e := newEngine(t, 2)
	p := e.publish(t0, "r", 5)
	sent := []Ended{{"r", p.Lease.Nonce, ReasonRead}}
	require.Empty(t, e.OnResults(t0, []Result{{Rank: 0, Sent: sent}, {Rank: 0, Sent: sent}}))
	require.EqualValues(t, 1, e.Stats().RepeatedReports)
	require.Empty(t, e.OnResults(t0, []Result{
		{Rank: 2, Sent: sent}, {Rank: -1, Sent: sent}, {Rank: 1, Sent: []Ended{{"r", 1, ReasonRead}, {"nobody", 1, ReasonRead}, {"r", p.Lease.Nonce, 77}}},
		{Rank: 1, Received: []string{"x"}, Settled: []string{"x"}, Failed: []Failure{{Request: "x"}}, Released: []string{"x"}, Connected: []Connection{{Peer: Peer{Engine: "x"}}}},
	}))
	require.EqualValues(t, 8, e.Stats().UnknownReports)
	require.Len(t, e.OnResults(t0, []Result{{Rank: 1, Sent: sent}}).Free, 1)
}

// A5.14, A4.3: an engine that finishes a request again must not free its leased
// blocks (XFORCE).
func TestAbortAfterFinishDoesNotFree(t *testing.T) {
	e := newEngine(t, 1)
	p := e.publish(t0, "r", 5)
	params, delayed, err := e.RequestFinished(at(1), "r", StatusAborted, [][]int{{5}}, 0)
	require.NoError(t, err)
	require.Nil(t, params)
	require.True(t, delayed)
	require.True(t, e.BuildPlan(at(1)).Empty())
	e.ranks[0].notify(at(2), "D", string(AppendReadComplete(nil, "r", 1, p.Lease.Nonce)))
	require.Len(t, e.step(at(2)).Free, 1)

	// But the id may name another request by then, whose blocks are its own.
	e.publish(at(3), "r", 5)
	require.NoError(t, e.OnNewRequest(at(3), "r", nil))
	_, delayed, err = e.RequestFinished(at(3), "r", StatusStopped, [][]int{{6}}, 0)
	require.NoError(t, err)
	require.False(t, delayed)
}

// protocol-check.md hole 2; A3.35, A4.4: an abort before export returns slot and
// blocks when every rank has taken the nonce back, and grants nothing.
func TestAbortBeforeExport(t *testing.T) {
	e := newEngine(t, 2, func(c *SchedulerConfig) { c.Slots = 1 })
	require.NoError(t, e.OnBlocksAllocated(t0, "r", decode, [][]int{{5}}))
	e.step(t0)
	p, delayed, err := e.RequestFinished(t0, "r", StatusAborted, [][]int{{5, 6}}, 0)
	require.NoError(t, err)
	require.Nil(t, p)
	require.True(t, delayed, "the nonce is still in the slots")
	require.Zero(t, e.Stats().FreeSlots, "not at once (XABSLOT)")
	out := e.step(t0)
	require.Len(t, e.last.Abort, 1)
	require.Empty(t, e.last.Grant)
	require.Len(t, out.Free, 1)
	require.Equal(t, ReasonAborted, out.Free[0].Reason)
	require.Equal(t, [][]int{{5, 6}}, out.Free[0].Blocks)
	require.EqualValues(t, 1, e.Stats().FreeSlots)
	for _, r := range e.ranks {
		require.Zero(t, r.cells[0])
		require.Zero(t, r.Len())
	}
}

func TestAbortBeforeAnyRankHeardOfIt(t *testing.T) {
	e := newEngine(t, 1, func(c *SchedulerConfig) { c.Slots = 1 })
	require.NoError(t, e.OnBlocksAllocated(t0, "r", decode, [][]int{{5}}))
	p, delayed, err := e.RequestFinished(t0, "r", StatusError, [][]int{{5}}, 0)
	require.NoError(t, err)
	require.Nil(t, p)
	require.False(t, delayed)
	require.Empty(t, e.step(t0))
	require.True(t, e.last.Empty())
	require.EqualValues(t, 1, e.Stats().FreeSlots)
	require.Empty(t, e.lives)
}

// A2.4: no blocks, no lease, but an answer.
func TestFinishWithoutBlocksLeasesNothing(t *testing.T) {
	e := newEngine(t, 1)
	require.NoError(t, e.OnBlocksAllocated(t0, "r", decode, [][]int{{5}}))
	e.step(t0)
	p, delayed, err := e.RequestFinished(t0, "r", StatusStopped, [][]int{{}}, 7)
	require.NoError(t, err)
	require.False(t, delayed)
	require.True(t, p.DoRemotePrefill)
	require.Empty(t, p.RemoteBlockIDs)
	require.Zero(t, p.RemoteNumTokens)
	require.Nil(t, p.Lease)
	require.Empty(t, e.step(t0).Free)
	require.Len(t, e.last.Abort, 1, "the rank's life needs its abort")
	require.Zero(t, e.ranks[0].Len())
	require.Empty(t, e.lives)
}

// A2.5; requests that nobody reads.
func TestRequestsThatAreNotOursAreLeftAlone(t *testing.T) {
	e := newEngine(t, 1)
	require.NoError(t, e.OnNewRequest(t0, "plain", nil))
	require.NoError(t, e.OnBlocksAllocated(t0, "plain", nil, [][]int{{1}}))
	require.NoError(t, e.Preempted(t0, "plain"))
	p, delayed, err := e.RequestFinished(t0, "plain", StatusStopped, [][]int{{1}}, 3)
	require.NoError(t, err)
	require.Nil(t, p)
	require.False(t, delayed)

	require.NoError(t, e.OnBlocksAllocated(t0, "r", decode, [][]int{{1}}))
	p, delayed, err = e.RequestFinished(t0, "r", StatusRunning, [][]int{{1}}, 3)
	require.NoError(t, err)
	require.Nil(t, p)
	require.False(t, delayed)
	require.EqualValues(t, 1, e.Stats().Running)
}

// protocol-check.md XEARLY: slot and nonce survive preemption, the block table
// does not.
func TestParamsNameTheBlocksOfTheFinish(t *testing.T) {
	e := newEngine(t, 1)
	require.NoError(t, e.OnBlocksAllocated(t0, "r", decode, [][]int{{5, 6}}))
	e.step(t0)
	nonce := e.last.Admit[0].Nonce
	require.NoError(t, e.Preempted(t0, "r"))
	require.NoError(t, e.OnBlocksAllocated(t0, "r", decode, [][]int{{8, 9}}))
	e.step(t0)
	require.True(t, e.last.Empty())
	blocks := [][]int{{8, 9}}
	p, _, err := e.RequestFinished(t0, "r", StatusStopped, blocks, 20)
	require.NoError(t, err)
	require.Equal(t, [][]int{{8, 9}}, p.RemoteBlockIDs)
	require.Equal(t, nonce, p.Lease.Nonce)
	blocks[0][0] = 63 // the caller's table is the caller's
	require.Equal(t, [][]int{{8, 9}}, p.RemoteBlockIDs)
	require.Equal(t, [][]int{{8, 9}}, e.lives["r"].blocks)
}

// "A request that finds no free slot gets no lease, so verifying decoders decline
// its KV"; it is pinned all the same.
func TestARequestWithoutASlotIsPinnedWithoutLeaseFields(t *testing.T) {
	e := newEngine(t, 1, func(c *SchedulerConfig) { c.Slots = 1 })
	first := e.publish(t0, "a", 1)
	require.NotNil(t, first.Lease)
	p := e.publish(t0, "b", 2)
	require.Nil(t, p.Lease)
	require.Equal(t, [][]int{{2}}, p.RemoteBlockIDs)
	require.EqualValues(t, 1, e.Stats().NoSlot)
	require.Equal(t, 2, e.ranks[0].Len())
	require.Len(t, e.step(at(30)).Free, 2)
	require.NotNil(t, e.publish(at(31), "c", 3).Lease)

	none := newEngine(t, 1, func(c *SchedulerConfig) { c.Slots = NoSlot })
	require.Zero(t, none.Slots())
	require.Nil(t, none.publish(t0, "a", 1).Lease)
}

func TestThereAreAsManySlotsAsBlocksAndSequences(t *testing.T) {
	e := newEngine(t, 1, func(c *SchedulerConfig) { c.Blocks, c.MaxSeqs = 10, 3 })
	require.Equal(t, 13, e.Slots())
	require.EqualValues(t, 13, e.Stats().FreeSlots)
	require.Equal(t, 13, e.Config().Slots, "for the ranks")
	none := newEngine(t, 1, func(c *SchedulerConfig) { c.Config.Slots = NoSlot })
	require.Equal(t, NoSlot, none.Config().Slots)
}

// cases.md 24; vllm-wire.md 9.18.
func TestIDsTheWireCannotCarryAreRefusedAtAdmission(t *testing.T) {
	e := newEngine(t, 1)
	for _, id := range []string{"a,b", "HB:x", "", "\xff"} {
		requireRefused(t, e.OnNewRequest(t0, id, decode), ErrInvalid)
		requireRefused(t, e.OnBlocksAllocated(t0, id, decode, [][]int{{1}}), ErrInvalid)
	}
	require.Empty(t, e.lives)
	require.NoError(t, e.OnNewRequest(t0, "a,b", nil), "a plain request may be called anything")
}

// cases.md 22: block ids out of range, negative, twice.
func TestBadBlockIDsOfOurOwnAreRefused(t *testing.T) {
	e := newEngine(t, 1, func(c *SchedulerConfig) { c.Blocks = 16 })
	for _, ids := range [][]int{{-1}, {16}, {1 << 31}, {1<<63 - 1}, {3, 3}} {
		requireRefused(t, e.OnBlocksAllocated(t0, "r", decode, [][]int{ids}), ErrInvalid)
		require.Empty(t, e.lives)
	}
	require.NoError(t, e.OnBlocksAllocated(t0, "r", decode, [][]int{{15}, {15}}), "groups may share blocks")
	e.step(t0)
	for _, ids := range [][]int{{-1}, {16}, {3, 3}} {
		_, _, err := e.RequestFinished(t0, "r", StatusStopped, [][]int{ids}, 1)
		requireRefused(t, err, ErrInvalid)
	}
	_, _, err := e.RequestFinished(t0, "r", StatusStopped, [][]int{{1}}, -1)
	requireRefused(t, err, ErrInvalid)
	_, _, err = e.RequestFinished(t0, "r", 99, [][]int{{1}}, 1)
	requireRefused(t, err, ErrInvalid)
	require.EqualValues(t, 1, e.Stats().Running)
	require.True(t, e.BuildPlan(t0).Empty())
}

// protocol-check.md P7: a report for a request that is not exported frees nothing.
func TestAReportBeforeExportFreesNothing(t *testing.T) {
	e := newEngine(t, 1)
	require.NoError(t, e.OnBlocksAllocated(t0, "r", decode, [][]int{{5}}))
	e.step(t0)
	nonce := e.last.Admit[0].Nonce
	require.Empty(t, e.OnResults(t0, []Result{{Rank: 0, Sent: []Ended{{"r", nonce, ReasonRead}}}}).Free)
	require.EqualValues(t, 1, e.Stats().EarlyReports)
	_, delayed, err := e.RequestFinished(t0, "r", StatusStopped, [][]int{{5}}, 1)
	require.NoError(t, err)
	require.True(t, delayed)
	require.Len(t, e.OnResults(t0, nil).Free, 1, "the rank has reported; it is not waited for again")
}

// protocol-check.md hole 4 (XFORCE, REV): revoke is zero, report, then free.
func TestRevokeEndsEveryExportedLifeOfARequest(t *testing.T) {
	e := newEngine(t, 2)
	p := e.publish(t0, "r", 5)
	q := e.publish(t0, "r", 6)
	require.NotEqual(t, p.Lease, q.Lease)
	require.NoError(t, e.Revoke(at(1), "r"))
	require.NoError(t, e.Revoke(at(1), "r"), "again changes nothing")
	out := e.step(at(1))
	require.Len(t, e.last.Abort, 2)
	require.Len(t, out.Free, 2)
	for _, f := range out.Free {
		require.Equal(t, ReasonAborted, f.Reason)
	}
	require.Zero(t, e.ranks[0].cells[p.Lease.Slot])
	requireRefused(t, e.Revoke(at(1), "r"), ErrUnknown)

	require.NoError(t, e.OnBlocksAllocated(at(1), "s", decode, [][]int{{5}}))
	requireRefused(t, e.Revoke(at(1), "s"), ErrBusy)
	e.step(at(1))

	// A rank that has ended by itself does not report twice.
	p = e.publish(at(1), "u", 7)
	e.ranks[0].notify(at(1), "D", string(AppendReadComplete(nil, "u", 1, p.Lease.Nonce)))
	require.Empty(t, e.step(at(1)).Free)
	require.NoError(t, e.Revoke(at(1), "u"))
	require.Len(t, e.step(at(1)).Free, 1)
	require.Zero(t, e.Stats().RepeatedReports)
}

// "Every admitted request gets exactly one grant or one abort on every rank."
func TestRevokeBeforeTheGrantLeftSendsOnlyTheAbort(t *testing.T) {
	e := newEngine(t, 1)
	require.NoError(t, e.OnBlocksAllocated(t0, "r", decode, [][]int{{5}}))
	e.step(t0)
	_, _, err := e.RequestFinished(t0, "r", StatusStopped, [][]int{{5}}, 1)
	require.NoError(t, err)
	require.Equal(t, 1, e.RevokeAll(t0))
	require.Zero(t, e.RevokeAll(t0))
	require.Len(t, e.step(t0).Free, 1)
	require.Empty(t, e.last.Grant)
	require.Len(t, e.last.Abort, 1)
}

// protocol-check.md hole 12: nonces are never 0, never repeat, and neighbours
// tell nothing of each other.
func TestNoncesAreUnpredictableAndNeverRepeat(t *testing.T) {
	seen := map[int64]bool{}
	n := newNonces(0)
	step := int64(0)
	for range 200_000 {
		v := n.next()
		require.False(t, seen[v])
		require.True(t, v > MaxReaders && v <= MaxNonce)
		seen[v] = true
		step = v
	}
	other := newNonces(0)
	require.NotEqual(t, step, other.next())
	require.Equal(t, newNonces(5), newNonces(5))
	require.NotEqual(t, newNonces(5), newNonces(6))

	// An odd step over a power of two meets every value before any repeats.
	small := map[uint64]bool{}
	for i, at := 0, uint64(3); i < 256; i++ {
		at = (at + 77) & 255
		require.False(t, small[at])
		small[at] = true
	}
	require.Equal(t, uint64(1), newNonces(0).step&1)
}

func TestBadSchedulersAreRefused(t *testing.T) {
	good := SchedulerConfig{Config: DefaultConfig(), Engine: "e", Blocks: 1}
	_, err := NewScheduler(good)
	require.NoError(t, err)
	for _, change := range []func(*SchedulerConfig){
		func(c *SchedulerConfig) { c.Engine = "" },
		func(c *SchedulerConfig) { c.Duration = 0 },
		func(c *SchedulerConfig) { c.Port = 70000 },
		func(c *SchedulerConfig) { c.TPSize = 5000 },
		func(c *SchedulerConfig) { c.Ranks = 1 << 20 },
		func(c *SchedulerConfig) { c.Blocks = -1 },
	} {
		c := good
		change(&c)
		_, err := NewScheduler(c)
		requireRefused(t, err, ErrInvalid)
	}
}

// Plans and results cross processes: no pointers, no absolute times.
func TestPlansAndResultsSurviveJSON(t *testing.T) {
	clock := time.Hour
	p := Plan{
		Terms: Terms{1<<63 + 1, 2, 3, 4, []uint64{1<<63 + 2, 0}, &clock},
		Admit: []Admission{{"a", 1, 2}}, Grant: []Grant{{"a", 1, time.Second, true, true}}, Abort: []Key{{"b", 3}},
		Read: []Pull{pullOf("a", 1, 2)}, Heartbeat: []Heartbeat{{Peer{"e", "h", 1, 1, 1, 1}, []Target{{"x", 1, 2}}, time.Second}},
		Release: []Release{{Request: "a", Peer: Peer{Engine: "e"}, RemoteRequest: "x", Nonce: 5}}, Cancel: []string{"c"},
	}
	require.Equal(t, p, viaJSON(t, p))
	r := Result{Rank: 3, Scheduler: 1<<63 + 1, Sent: []Ended{{"a", 1, ReasonExpired}}, Received: []string{"x"}, Failed: []Failure{{Request: "y", Cause: CauseLapsed, Message: "m", Quarantined: true}},
		Settled: []string{"z"}, Released: []string{"u"}, Connected: []Connection{{Peer{"e", "h", 1, 1, 1, 1}, time.Second}}, HeartbeatFailed: []string{"f"}}
	require.Equal(t, r, viaJSON(t, r))
}

// cases.md 7 and 8 at the scheduler: many lives, ranks that lag freely and
// reports in any order; each is freed once and nothing is left behind.
func TestEveryLifeIsFreedOnceHoweverRanksLag(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	e := newEngine(t, 4, func(c *SchedulerConfig) { c.Slots = 5 })
	freed := map[int64]int{}
	want := 0
	var late [4][]Ended
	flush := func(rank int) {
		for _, f := range e.OnResults(t0, []Result{{Rank: rank, Sent: late[rank]}}).Free {
			freed[f.Nonce]++
		}
		late[rank] = nil
	}
	for i := range 3000 {
		id := fmt.Sprint("r", i%7)
		if l := e.lives[id]; l == nil || l.phase != lifeRunning {
			require.NoError(t, e.OnBlocksAllocated(t0, id, decode, [][]int{{i % 64}}))
		}
		if rng.IntN(4) > 0 {
			st := []Status{StatusStopped, StatusLengthCapped, StatusAborted}[rng.IntN(3)]
			_, delayed, err := e.RequestFinished(t0, id, st, [][]int{{i % 64}}, 1)
			require.NoError(t, err)
			if delayed {
				want++
			}
		}
		if rng.IntN(5) == 0 {
			e.RevokeAll(t0)
		}
		p := e.BuildPlan(t0)
		for rank, r := range e.ranks {
			r.carryOut(t0, p)
			if rng.IntN(3) == 0 {
				r.Reap(at(1e6))
			}
			late[rank] = append(late[rank], r.ends()...)
			if rng.IntN(2) == 0 {
				flush(rank)
			}
		}
	}
	for i := range 7 {
		id := fmt.Sprint("r", i)
		if l := e.lives[id]; l != nil && l.phase == lifeRunning {
			_, delayed, err := e.RequestFinished(t0, id, StatusAborted, [][]int{{i}}, 0)
			require.NoError(t, err)
			if delayed {
				want++
			}
		}
	}
	p := e.BuildPlan(t0)
	for rank, r := range e.ranks {
		r.carryOut(t0, p)
		r.Reap(at(1e6))
		late[rank] = append(late[rank], r.ends()...)
		flush(rank)
		require.Zero(t, r.Len())
		require.Empty(t, r.spent)
		require.Equal(t, make([]int64, 5), r.cells)
	}
	require.Len(t, freed, want)
	for n, c := range freed {
		require.Equal(t, 1, c, n)
	}
	require.Empty(t, e.lives)
	require.EqualValues(t, 5, e.Stats().FreeSlots)
	require.Zero(t, e.Stats().Pinned)
	require.Zero(t, e.Stats().Running)
	require.Zero(t, e.Stats().RepeatedReports)
	require.Zero(t, e.Stats().UnknownReports)
}

// dynamo#10136, vllm#58004: what a stuck reader keeps shows in bytes, and in slots that are lent.
func TestPinnedBytesAndUsedSlotsAreCountedUntilTheBlocksAreFree(t *testing.T) {
	e := newEngine(t, 1, func(c *SchedulerConfig) { c.BlockBytes = []int64{100, 7, 1000} })
	total := e.Stats().FreeSlots
	require.Zero(t, e.Stats().UsedSlots)
	blocks := [][]int{{1, 2, 3}, {4, 5}}
	require.NoError(t, e.OnBlocksAllocated(t0, "r", decode, blocks))
	require.EqualValues(t, 1, e.Stats().UsedSlots)
	require.Equal(t, total-1, e.Stats().FreeSlots)
	require.Zero(t, e.Stats().PinnedBytes, "a running request keeps its blocks for itself")
	e.step(t0)
	p, _, err := e.RequestFinished(t0, "r", StatusLengthCapped, blocks, 40)
	require.NoError(t, err)
	require.EqualValues(t, 3*100+2*7, e.Stats().PinnedBytes)
	require.EqualValues(t, 5, e.Stats().PinnedBlocks)
	e.step(t0)
	e.ranks[0].notify(at(1), "D", string(AppendReadComplete(nil, "r", 1, p.Lease.Nonce)))
	require.Len(t, e.step(at(1)).Free, 1)
	require.Zero(t, e.Stats().PinnedBytes+e.Stats().PinnedTokens+e.Stats().UsedSlots)
}
