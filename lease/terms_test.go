package lease

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// E5: a rank that refuses an admission says that the life has ended; the request cannot be exported, and nothing stays.
func TestALifeThatARankRefusedIsNotExported(t *testing.T) {
	e := newEngine(t, 2)
	require.NoError(t, e.OnBlocksAllocated(t0, "r", decode, [][]int{{1}}))
	nonce := e.BuildPlan(t0).Admit[0].Nonce
	e.OnResults(t0, []Result{{Rank: 1, Sent: []Ended{{"r", nonce, ReasonAborted}}}})
	p, delayed, err := e.RequestFinished(t0, "r", StatusLengthCapped, [][]int{{1}}, 16)
	require.NoError(t, err)
	require.Nil(t, p, "its lease protects nothing on rank 1")
	require.True(t, delayed, "rank 0 may still show the nonce")
	plan := e.BuildPlan(t0)
	require.Empty(t, plan.Grant)
	require.Equal(t, []Key{{"r", nonce}}, plan.Abort)
	out := e.OnResults(t0, []Result{{Rank: 0, Sent: []Ended{{"r", nonce, ReasonAborted}}}, {Rank: 1, Sent: []Ended{{"r", nonce, ReasonAborted}}}})
	require.Equal(t, []Freed{{"r", nonce, [][]int{{1}}, ReasonAborted}}, out.Free)
	require.Zero(t, e.Stats().UsedSlots)
}

// Results of a scheduler that is gone, or of plans of another engine, say nothing about requests of the same names here.
func TestResultsForAnotherSchedulerAreIgnored(t *testing.T) {
	s, other := newReader(t, 1), newReader(t, 1)
	plan := reading(t, s, "a", offer("A", 1), 5)
	theirs := other.Terms(t0).Scheduler
	require.NotEqual(t, plan.Terms.Scheduler, theirs)
	require.Empty(t, s.OnResults(t0, []Result{{Scheduler: theirs, Received: []string{"a"}}}))
	require.EqualValues(t, 1, s.Stats().UnknownReports)
	require.Equal(t, []string{"a"}, s.OnResults(t0, []Result{{Scheduler: plan.Terms.Scheduler, Received: []string{"a"}}}).Run)
}

// A rank that was started anew holds nothing and reads nothing of what its predecessor was told: nobody waits for it.
func TestARankThatWasStartedAnewHasEndedWhatItWasTold(t *testing.T) {
	e := newEngine(t, 2)
	report := func(rank int, worker uint64) Outcome { return e.OnResults(t0, []Result{{Rank: rank, Worker: worker}}) }
	require.Empty(t, report(0, 1))
	require.Empty(t, report(1, 2))
	p := e.publish(t0, "pinned", 1)
	require.NoError(t, e.OnBlocksAllocated(t0, "running", decode, [][]int{{2}}))
	require.NoError(t, e.OnBlocksAllocated(t0, "load", with(offer("A", 1), func(p *Params) { p.RemoteEngineID = "other" }), [][]int{{3}}))
	e.BuildPlan(t0)
	require.Empty(t, report(0, 1), "the same life again")
	out := report(0, 7)
	require.Empty(t, out.Free, "rank 1 holds them")
	require.Len(t, out.Fail, 1)
	require.ErrorIs(t, out.Fail[0].Err, ErrTransfer)
	out = report(1, 8)
	require.Equal(t, []Freed{{"pinned", p.Lease.Nonce, [][]int{{1}}, ReasonAborted}}, out.Free)
	none, delayed, err := e.RequestFinished(t0, "running", StatusLengthCapped, [][]int{{2}}, 16)
	require.NoError(t, err)
	require.Nil(t, none)
	require.True(t, delayed)
	e.BuildPlan(t0)
	require.Len(t, report(0, 7).Free, 1, "no rank shows its nonce")
	require.Zero(t, e.Stats().Pinned+e.Stats().UsedSlots)
}

func TestTermsSayWhatRanksHaveToAgreeWith(t *testing.T) {
	s := newReader(t, 3)
	require.Equal(t, Terms{Scheduler: s.id, Ranks: 3, Slots: s.Slots(), MaxNotification: DefaultMaxNotification, Workers: make([]uint64, 3)}, s.Terms(t0))
	require.Equal(t, s.Terms(t0), s.BuildPlan(t0).Terms)
	both := newReader(t, 1, func(c *SchedulerConfig) { c.Bidirectional, c.Epoch = true, at(-100) })
	require.Equal(t, at(0).Sub(at(-100)), *both.Terms(t0).Clock)
}

// What a rank does when its scheduler is gone.
func TestAbortAllEndsEveryLife(t *testing.T) {
	r := newRank(t, 2)
	r.admit("a", 5001, 0)
	r.admit("b", 5002, NoSlot)
	r.grant(t0, "b", 5002, 30)
	r.admit("c", 5003, 1)
	r.notify(t0, "D", "c:1:5003") // spent: its grant is still to come
	r.ends()
	require.Equal(t, 2, r.AbortAll(t0))
	require.ElementsMatch(t, []Ended{{"a", 5001, ReasonAborted}, {"b", 5002, ReasonAborted}}, r.ends())
	require.Zero(t, r.Len())
	require.Empty(t, r.spent)
	require.Zero(t, r.cells[0])
	require.Zero(t, r.AbortAll(t0))
}

// A late result of a rank that was replaced does not bring it back.
func TestALateResultOfAReplacedRankIsIgnored(t *testing.T) {
	e := newEngine(t, 1)
	e.OnResults(t0, []Result{{Worker: 1}})
	e.OnResults(t0, []Result{{Worker: 2}})
	p := e.publish(t0, "pinned", 1)
	out := e.OnResults(t0, []Result{{Worker: 1}})
	require.Empty(t, out.Free, "slot holds %v", e.ranks[0].cells[p.Lease.Slot] == p.Lease.Nonce)
}
