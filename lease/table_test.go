package lease

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Specification, "On P: each worker …"; design.md, "The owner's lease".
func TestALifeShowsItsNonceFromAdmissionToItsEnd(t *testing.T) {
	r := newRank(t, 4)
	r.admit("a", 11, 2)
	require.Equal(t, []int64{0, 0, 11, 0}, r.cells)
	_, ok := r.NextDeadline()
	require.False(t, ok, "an admitted life has no deadline")
	require.Zero(t, r.Reap(at(1e6)), "and is never reaped")

	r.grant(at(1), "a", 11, 30)
	require.Equal(t, at(31), r.deadline())
	require.Zero(t, r.Reap(at(30.999)))
	require.Equal(t, int64(11), r.cells[2])
	require.Equal(t, 1, r.Reap(at(31)), "now >= deadline is due")
	require.Equal(t, []int64{0, 0, 0, 0}, r.cells)
	require.Equal(t, []Ended{{"a", 11, ReasonExpired}}, r.ends())
	require.Empty(t, r.ends(), "reported once")
	require.Zero(t, r.Len())
}

// A3.23, vllm#50326, cases.md 5: a grant is a remaining time on the rank's own
// clock, never a moment of another.
func TestAGrantCountsFromTheRanksOwnClock(t *testing.T) {
	r := newRank(t, 1)
	r.admit("a", 11, 0)
	r.grant(at(1000), "a", 11, 30)
	require.Zero(t, r.Reap(at(1029.9)))
	require.Equal(t, 1, r.Reap(at(1030.1)))
	for _, ttl := range []time.Duration{0, -time.Second, MaxTTL + 1} {
		r.admit(fmt.Sprint("x", ttl), 12, NoSlot)
		requireRefused(t, r.Grant(t0, Grant{Request: fmt.Sprint("x", ttl), Nonce: 12, TTL: ttl}), ErrInvalid)
	}
	_, ok := r.NextDeadline()
	require.False(t, ok)
}

// A1.10, A1.11, A1.12, A2.1, D7: what a heartbeat does.
func TestAHeartbeatExtendsButNeverShortens(t *testing.T) {
	r := newRank(t, 4)
	for i, id := range []string{"req-a", "far", "req-b"} {
		r.admit(id, int64(i+11), i)
		r.grant(t0, id, int64(i+11), map[string]float64{"req-a": 30, "far": 99999, "req-b": 30}[id])
	}
	r.notify(at(15), "D", "HB:req-a,req-unknown,far,req-b")
	require.Equal(t, 3, r.Len(), "no entry for an unknown id")
	require.EqualValues(t, 1, r.Stats().UnknownRenewals)
	require.Equal(t, at(35), r.deadline())
	require.Zero(t, r.Reap(at(34.9)))
	require.Equal(t, 2, r.Reap(at(35)))
	require.Equal(t, at(99999), r.deadline(), "a far deadline stays")
	require.ElementsMatch(t, []Ended{{"req-a", 11, ReasonExpired}, {"req-b", 13, ReasonExpired}}, r.ends())

	// max(old, now + extension), also when the new one is earlier.
	r.admit("c", 20, 0)
	r.grant(t0, "c", 20, 30)
	r.notify(at(1), "D", "HB:c")
	require.Equal(t, at(30), r.deadline())
}

// D7; design.md: a deadline that has passed but was not reaped can be renewed,
// an ended lease never comes back.
func TestOnlyWhatWasNotReapedCanBeRenewed(t *testing.T) {
	r := newRank(t, 1)
	r.admit("a", 11, 0)
	r.grant(t0, "a", 11, 30)
	r.notify(at(100), "D", "HB:a")
	require.Zero(t, r.Reap(at(100)), "the heartbeat saved it")
	require.Equal(t, at(120), r.deadline())
	require.Equal(t, 1, r.Reap(at(120)))
	require.Equal(t, []Ended{{"a", 11, ReasonExpired}}, r.ends())

	r.notify(at(121), "D", "HB:a")
	msg, _, err := AppendSlotHeartbeat(nil, []Target{{"a", 0, 11}}, 0)
	require.NoError(t, err)
	r.notify(at(121), "D", string(msg))
	require.NoError(t, r.Abort(at(121), Key{"a", 11}))
	requireRefused(t, r.Grant(at(121), Grant{Request: "a", Nonce: 11, TTL: time.Second}), ErrUnknown)
	require.Zero(t, r.Len())
	require.Zero(t, r.cells[0])
	require.Empty(t, r.ends())
}

// "Each single heartbeat message … renews all requests pinned"; HB2 renews only
// what the nonce was given for.
func TestASlotHeartbeatRenewsOnlyItsNonce(t *testing.T) {
	r := newRank(t, 3)
	for i, id := range []string{"a", "b"} {
		r.admit(id, int64(i+11), i)
		r.grant(t0, id, int64(i+11), 30)
	}
	r.admit("prefilling", 13, 2)
	msg, _, err := AppendSlotHeartbeat(nil, []Target{{"a", 0, 11}, {"b", 1, 99}, {"prefilling", 2, 13}}, 0)
	require.NoError(t, err)
	r.notify(at(25), "D", string(msg))
	require.EqualValues(t, 1, r.Stats().Renewals)
	require.EqualValues(t, 2, r.Stats().StaleRenewals)
	require.Equal(t, 1, r.Reap(at(30)))
	require.Equal(t, []Ended{{"b", 12, ReasonExpired}}, r.ends())
	require.Equal(t, at(45), r.deadline())
}

// "D completes the KV transfer --- P … frees the blocks immediately."
func TestAReadCompleteEndsTheLeaseAtOnce(t *testing.T) {
	r := newRank(t, 1)
	r.admit("a", 11, 0)
	r.grant(t0, "a", 11, 30)
	r.notify(at(1), "D", "a:1:11")
	require.Zero(t, r.cells[0], "the slot is 0 before the end is reported")
	require.Equal(t, []Ended{{"a", 11, ReasonRead}}, r.ends())
	_, ok := r.NextDeadline()
	require.False(t, ok)
}

// vLLM 0.33.0, cases.md 25; A2.9; "an N of distinct senders, the largest N wins".
func TestReadersAreCountedBySenderNotByMessage(t *testing.T) {
	r := newRank(t, 1)
	r.admit("a", 11, 0)
	r.grant(t0, "a", 11, 30)
	r.notify(at(1), "rank0", "a:2:11")
	r.notify(at(1), "rank0", "a:2:11")
	require.Empty(t, r.ends(), "rank 0 twice is one reader")
	require.EqualValues(t, 1, r.Stats().DuplicateReadCompletes)
	r.notify(at(1), "rank1", "a:2:11")
	require.Equal(t, []Ended{{"a", 11, ReasonRead}}, r.ends())

	r.admit("b", 12, 0)
	r.grant(t0, "b", 12, 30)
	r.notify(at(1), "rank0", "b:3:12")
	r.notify(at(1), "rank1", "b:2:12")
	require.Empty(t, r.ends(), "the largest N seen wins")
	r.notify(at(1), "rank2", "b:2:12")
	require.Len(t, r.ends(), 1)
}

// vllm#43509, cases.md 6 (a): a completion that comes before its lease.
func TestAnEarlyReadCompleteCounts(t *testing.T) {
	t.Run("before the admission", func(t *testing.T) {
		r := newRank(t, 1)
		r.notify(t0, "D", "R:1:11")
		r.admit("R", 11, 0)
		require.Equal(t, []Ended{{"R", 11, ReasonRead}}, r.ends())
		require.Zero(t, r.cells[0])
		require.NoError(t, r.Grant(at(1), Grant{Request: "R", Nonce: 11, TTL: time.Second}))
		require.Zero(t, r.Len(), "the grant that follows is dropped")
		require.EqualValues(t, 1, r.Stats().DroppedGrants)
		require.EqualValues(t, 1, r.Stats().EarlyReadCompletes)
	})
	t.Run("before the grant", func(t *testing.T) {
		r := newRank(t, 1)
		r.admit("R", 11, 0)
		r.notify(t0, "D", "R:1:11")
		require.Equal(t, []Ended{{"R", 11, ReasonRead}}, r.ends())
		r.grant(at(1), "R", 11, 30)
		require.Zero(t, r.Len())
		require.Zero(t, r.cells[0], "the grant does not revive it (XGRANT)")
		requireRefused(t, r.Grant(at(1), Grant{Request: "R", Nonce: 11, TTL: time.Second}), ErrUnknown)
	})
	t.Run("before the grant, aborted", func(t *testing.T) {
		r := newRank(t, 1)
		r.admit("R", 11, 0)
		r.notify(t0, "D", "R:1:11")
		require.NoError(t, r.Abort(t0, Key{"R", 11}))
		require.Len(t, r.ends(), 1, "ended once")
		require.Empty(t, r.spent)
	})
	t.Run("of two readers", func(t *testing.T) {
		r := newRank(t, 1)
		r.notify(t0, "D0", "R:2:11")
		r.admit("R", 11, 0)
		require.Empty(t, r.ends())
		r.grant(t0, "R", 11, 30)
		r.notify(t0, "D0", "R:2:11")
		require.Empty(t, r.ends(), "the early sender is still one sender")
		r.notify(t0, "D1", "R:2:11")
		require.Len(t, r.ends(), 1)
	})
}

// "P ignores notifications for an earlier request with the same id", also where no nonce tells: before its grant nobody can have
// read a life, so a message that comes then, or before the life, is of an earlier one.
func TestALateReadCompleteDoesNotEndTheNextLifeOfItsId(t *testing.T) {
	for name, slots := range map[string]int{"with a slot": 1, "without one": 0} {
		t.Run(name, func(t *testing.T) {
			var late []Key
			r := newRank(t, slots, func(c *TableConfig) { c.Trace.LateReadComplete = func(k Key, _ int) { late = append(late, k) } })
			slot := slots - 1
			r.admit("R", 11, slot)
			r.grant(t0, "R", 11, 30)
			r.Reap(at(31))
			require.Equal(t, []Ended{{"R", 11, ReasonExpired}}, r.ends())
			r.notify(at(32), "D", "R:1") // between the lives
			require.Equal(t, []Key{{"R", 0}}, late)
			r.admit("R", 12, slot)
			r.notify(at(33), "D", "R:1") // while the next one is prefilled
			r.grant(at(34), "R", 12, 30)
			require.Empty(t, r.ends(), "nobody has read it")
			require.EqualValues(t, 1, r.Stats().DroppedReadCompletes)
			require.EqualValues(t, 1, r.Stats().RefusedReadCompletes)
			r.notify(at(35), "D", "R:1") // its own: from here on the wire cannot tell
			require.Equal(t, []Ended{{"R", 12, ReasonRead}}, r.ends())
		})
	}
}

// cases.md 6: 100k bogus ids do not fill the memory; those of a minute ago are gone.
func TestUnmatchedReadCompletesAreBounded(t *testing.T) {
	r := newRank(t, 2, func(c *TableConfig) { c.MaxEarly = 100; c.EarlyTTL = 10 * time.Second })
	for i := range 100_000 {
		r.notify(t0, "D", fmt.Sprintf("bogus-%d:1:%d", i, i+5000))
	}
	require.Len(t, r.early.byKey, 100)
	require.LessOrEqual(t, len(r.early.queue), 200)
	require.EqualValues(t, 100_000, r.Stats().UnmatchedReadCompletes)
	require.EqualValues(t, 99_900, r.Stats().DroppedReadCompletes)
	for i := range 1000 { // many senders for one id count as well
		r.notify(t0, fmt.Sprint("D", i), "one:4000:7000")
	}
	require.LessOrEqual(t, r.early.size, int64(100))

	r.notify(at(1), "D", "R:1:11")
	r.Reap(at(11))
	require.Empty(t, r.early.byKey)
	r.admit("R", 11, 0)
	require.Equal(t, 1, r.Len(), "too early does not count")

	for i := range 1000 { // matched again and again, nothing stays behind
		r.notify(at(20), "D", "keep:1:9999")
		r.notify(at(20), "D", fmt.Sprintf("S:1:%d", i+5000))
		require.NoError(t, r.Admit(at(20), Admission{"S", int64(i + 5000), 1}))
		require.NoError(t, r.Abort(at(20), Key{"S", int64(i + 5000)}))
	}
	require.LessOrEqual(t, len(r.early.queue), 200)
	require.Len(t, r.early.byKey, 1)
}

// vllm#51637, cases.md 8: events of an old life of an id.
func TestEventsOfAnOldLifeDoNotTouchTheNewOne(t *testing.T) {
	r := newRank(t, 2)
	r.admit("R", 11, 0)
	r.grant(t0, "R", 11, 30)
	r.notify(at(1), "D", "R:1:11")
	require.Len(t, r.ends(), 1)

	r.admit("R", 12, 1)
	r.grant(at(1), "R", 12, 30)
	r.notify(at(2), "D", "R:1:11")
	msg, _, err := AppendSlotHeartbeat(nil, []Target{{"R", 0, 11}, {"R", 1, 11}}, 0)
	require.NoError(t, err)
	r.notify(at(20), "D", string(msg))
	require.Equal(t, 1, r.Len(), "still held")
	require.Equal(t, at(31), r.deadline(), "expiry unchanged")
	require.EqualValues(t, 1, r.Stats().StaleReadCompletes)
	require.EqualValues(t, 2, r.Stats().StaleRenewals)
}

// cases.md 21: without the nonce a forged done leaves the lease held.
func TestAForgedReadCompleteIsIgnored(t *testing.T) {
	r := newRank(t, 1)
	r.admit("R", 1<<52, 0)
	r.grant(t0, "R", 1<<52, 30)
	r.notify(t0, "victim-decode-0", "R:1:4503599627370495")
	require.Equal(t, 1, r.Len())
	require.EqualValues(t, 1, r.Stats().StaleReadCompletes)
}

// protocol-check.md holes 6 and 13; M6.
func TestAReadCompleteWithoutNonceIsTakenOnlyAfterExport(t *testing.T) {
	r := newRank(t, 2)
	r.admit("R", 11, 0)
	r.notify(t0, "vllm", "R:1")
	require.EqualValues(t, 1, r.Stats().RefusedReadCompletes)
	r.grant(t0, "R", 11, 30)
	require.Empty(t, r.ends(), "it was of an earlier life")
	r.notify(t0, "vllm", "R:1")
	require.Equal(t, []Ended{{"R", 11, ReasonRead}}, r.ends())
	require.EqualValues(t, 1, r.Stats().NoncelessReadCompletes)

	// Two exported lives of one id: neither is freed under its reader on a guess.
	r.admit("R", 12, 0)
	r.grant(t0, "R", 12, 30)
	r.admit("R", 13, 1)
	r.notify(t0, "vllm", "R:1")
	require.Equal(t, []Ended{{"R", 12, ReasonRead}}, r.ends(), "13 is not exported, so 12 was meant")
	r.admit("R", 14, 0)
	r.grant(t0, "R", 13, 30)
	r.grant(t0, "R", 14, 30)
	r.notify(t0, "vllm", "R:1")
	require.Empty(t, r.ends())
	require.EqualValues(t, 2, r.Stats().RefusedReadCompletes)
	r.notify(t0, "D", "R:1:13")
	require.Equal(t, []Ended{{"R", 13, ReasonRead}}, r.ends())

	// A grant that is not an export does not open it either.
	q := newRank(t, 1)
	q.admit("Q", 11, 0)
	require.NoError(t, q.Grant(t0, Grant{Request: "Q", Nonce: 11, TTL: time.Second}))
	q.notify(t0, "vllm", "Q:1")
	require.Empty(t, q.ends())
}

// protocol-check.md hole 13: records are kept per (id, nonce).
func TestAnIDMayLiveAgainWhileItsOldLeaseIsPinned(t *testing.T) {
	r := newRank(t, 3)
	for i := range 3 {
		r.admit("R", int64(i+11), i)
		r.grant(at(float64(i)), "R", int64(i+11), 30)
	}
	r.admit("other", 20, NoSlot)
	require.Equal(t, 4, r.Len())
	r.notify(at(29), "D", "HB:R")
	require.Equal(t, at(49), r.deadline(), "a heartbeat by id renews every life of it")
	require.EqualValues(t, 3, r.Stats().Renewals)
	r.notify(at(30), "D", "R:1:12")
	r.notify(at(30), "D", "R:1:13")
	require.Equal(t, []Ended{{"R", 12, ReasonRead}, {"R", 13, ReasonRead}}, r.ends())
	require.Equal(t, []int64{11, 0, 0}, r.cells)
	r.notify(at(40), "D", "HB:R")
	require.Equal(t, at(60), r.deadline())
	require.Equal(t, 1, r.Reap(at(60)))
	require.Equal(t, 1, r.Len())
	require.Equal(t, 1, r.byID.used)
}

// cases.md 24: ids with colons, also those that look like a reader count.
func TestIDsWithColonsAreMatchedExactly(t *testing.T) {
	r := newRank(t, 4)
	r.admit("a", 5, 0)
	r.grant(t0, "a", 5, 30)
	r.admit("a:1", 6000, 1)
	r.grant(t0, "a:1", 6000, 30)
	r.admit("a:1:5", 7000, 2)
	r.grant(t0, "a:1:5", 7000, 30)

	r.notify(t0, "D", "a:1:5:1:7000")
	require.Equal(t, []Ended{{"a:1:5", 7000, ReasonRead}}, r.ends())
	r.notify(t0, "D", "a:1:1")
	require.Equal(t, []Ended{{"a:1", 6000, ReasonRead}}, r.ends(), "vLLM's message for the id a:1")
	r.notify(t0, "D", "a:1:5")
	require.Equal(t, []Ended{{"a", 5, ReasonRead}}, r.ends())
}

// vLLM 0.33.0, cases.md 25; vllm-wire.md 9.2; A2.6.
func TestMalformedNotificationsAreCountedAndDoNothing(t *testing.T) {
	r := newRank(t, 1)
	r.admit("x", 11, 0)
	r.grant(t0, "x", 11, 30)
	bad := []string{"\xff", "", "HB:", "HB:,", "HB:x,", "HB:,x", "HB:x,,y", "HB2:", "HB2:12345678901", "x:-1", "x:9999999999", "x", "x:", "PUSH_REG:\x81\xa1a"}
	for i, payload := range bad {
		requireRefused(t, r.Notify(at(20), "D", []byte(payload)), ErrMalformed)
		require.EqualValues(t, i+1, r.Stats().MalformedNotifications)
	}
	require.Equal(t, at(30), r.deadline())
	require.Equal(t, 1, r.Len())
	r.notify(at(20), "D", "HB:x")
	require.Equal(t, at(40), r.deadline(), "the next valid one is handled")
	r.notify(at(20), "D", "x:1:11")
	require.Len(t, r.ends(), 1)
}

// A2.2, D6 "completion after expiry"; cases.md 1 `late_notif`.
func TestALateReadCompleteIsCountedOnly(t *testing.T) {
	r := newRank(t, 1)
	r.notify(t0, "D", "never-heard-of-you:1")
	r.admit("a", 11, 0)
	r.grant(t0, "a", 11, 30)
	r.Reap(at(30))
	require.Len(t, r.ends(), 1)
	r.notify(at(31), "D", "a:1:11")
	require.EqualValues(t, 2, r.Stats().UnmatchedReadCompletes)
	require.Empty(t, r.ends())
	require.Zero(t, r.Len())
}

func TestBadAdmissionsChangeNothing(t *testing.T) {
	r := newRank(t, 2)
	r.admit("a", 11, 0)
	before := r.Stats()
	for _, a := range []Admission{
		{"", 12, 1}, {"a,b", 12, 1}, {"HB:b", 12, 1}, {"b", 0, 1}, {"b", -1, 1}, {"b", MaxNonce + 1, 1},
		{"b", 12, 2}, {"b", 12, -2}, {"b", 12, 0}, {"a", 11, 1}, {strings.Repeat("x", DefaultMaxNotification), 12, 1},
	} {
		requireRefused(t, r.Admit(t0, a), ErrInvalid)
	}
	requireRefused(t, r.Grant(t0, Grant{Request: "b", Nonce: 11, TTL: time.Second}), ErrUnknown)
	requireRefused(t, r.Grant(t0, Grant{Request: "a", Nonce: 12, TTL: time.Second}), ErrUnknown)
	requireRefused(t, r.Abort(t0, Key{"", 12}), ErrInvalid)
	requireRefused(t, r.Abort(t0, Key{"a", 0}), ErrInvalid)
	require.Equal(t, before, r.Stats())
	require.Equal(t, []int64{11, 0}, r.cells)
	r.grant(t0, "a", 11, 30)
	requireRefused(t, r.Grant(at(9), Grant{Request: "a", Nonce: 11, TTL: time.Second}), ErrInvalid)
	require.Equal(t, at(30), r.deadline(), "a second grant does not move the deadline")
}

func TestBadTablesAreRefused(t *testing.T) {
	for _, c := range []TableConfig{
		{}, {Extension: -1}, {Extension: MaxTTL + 1}, {Extension: 1, MaxLife: -1}, {Extension: 1, MaxEarly: -1}, {Extension: 1, EarlyTTL: -1},
		{Extension: 1, MaxNotification: 5}, {Extension: 1, Slots: NewSlots([]int64{0, 5})},
	} {
		_, err := NewTable(c)
		requireRefused(t, err, ErrInvalid)
	}
}

// vllm#24268, #25067, cases.md 7, as a state machine: expiry, completion and
// abort of the same lease in every order end it once.
func TestALeaseEndsOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	const n = 10_000
	r := newRank(t, n)
	count := map[Key]int{}
	for i := range n {
		id := fmt.Sprint("r", i)
		r.admit(id, int64(i+1), i)
		r.grant(t0, id, int64(i+1), 30)
		events := []func(){
			func() { r.Reap(at(30)) },
			func() { r.notify(at(30), "D", fmt.Sprintf("%s:1:%d", id, i+1)) },
			func() { require.NoError(t, r.Abort(at(30), Key{id, int64(i + 1)})) },
			func() { r.notify(at(30), "D", fmt.Sprintf("%s:1:%d", id, i+1)) },
		}
		rng.Shuffle(len(events), func(a, b int) { events[a], events[b] = events[b], events[a] })
		for _, e := range events {
			e()
		}
		for _, e := range r.ends() {
			count[Key{e.Request, e.Nonce}]++
		}
	}
	require.Len(t, count, n)
	for k, c := range count {
		require.Equal(t, 1, c, k)
	}
	st := r.Stats()
	require.EqualValues(t, n, st.Read+st.Expired+st.Aborted)
	require.Zero(t, st.Live)
}

// Readers READ the slots while the step writes them (cases.md 10, -race): they
// see a nonce that was lent or 0, never anything else.
func TestSlotsMayBeReadAtAnyMoment(t *testing.T) {
	r := newRank(t, 1)
	slots := NewSlots(r.cells)
	stop, done := make(chan struct{}), make(chan int64)
	go func() {
		bad := int64(0)
		for {
			select {
			case <-stop:
				done <- bad
				return
			default:
				if v := slots.Load(0); v != 0 && v != 1<<40|7 && v != 1<<33|9 {
					bad = v
				}
			}
		}
	}()
	for i := range 20_000 {
		nonce := []int64{1<<40 | 7, 1<<33 | 9}[i%2]
		r.admit("a", nonce, 0)
		require.NoError(t, r.Abort(t0, Key{"a", nonce}))
	}
	close(stop)
	require.Zero(t, <-done)
}

// Any time.Time will do, the zero one too.
func TestAnyTimeIsATime(t *testing.T) {
	r := newRank(t, 2)
	require.NoError(t, r.Admit(time.Time{}, Admission{"a", 11, 0}))
	r.grant(time.Time{}, "a", 11, 30)
	r.notify(time.Time{}.Add(20*time.Second), "D", "HB:a")
	require.Zero(t, r.Reap(time.Time{}.Add(39*time.Second)))
	require.Equal(t, 1, r.Reap(time.Time{}.Add(40*time.Second)))
	r.admit("b", 12, 0)
	r.grant(t0.AddDate(1e6, 0, 0), "b", 12, 30)
	require.Equal(t, 1, r.Reap(t0.AddDate(2e6, 0, 0)))
}

func TestTimeMayGoBackwards(t *testing.T) {
	r := newRank(t, 2)
	r.admit("a", 11, 0)
	r.grant(at(100), "a", 11, 30)
	require.Zero(t, r.Reap(at(-1000)))
	r.notify(at(-1000), "D", "HB:a")
	require.Equal(t, at(130), r.deadline())
	r.admit("b", 12, 1)
	r.grant(at(50), "b", 12, 30)
	require.Equal(t, at(80), r.deadline())
	require.Equal(t, 2, r.Reap(at(130)))
}

// An optional cap on a lease's total life (vllm-wire.md 9.18).
func TestACapOnLifeStopsRenewal(t *testing.T) {
	r := newRank(t, 2, func(c *TableConfig) { c.MaxLife = 40 * time.Second })
	r.admit("a", 11, 0)
	r.admit("long", 12, 1)
	r.grant(t0, "a", 11, 30)
	r.grant(t0, "long", 12, 1000)
	require.Equal(t, at(30), r.deadline())
	msg, _, err := AppendSlotHeartbeat(nil, []Target{{"a", 0, 11}}, 0)
	require.NoError(t, err)
	for s := range 40 {
		r.notify(at(float64(s)), "D", "HB:a")
		r.notify(at(float64(s)), "D", string(msg))
	}
	require.Equal(t, at(40), r.deadline())
	require.Equal(t, 2, r.Reap(at(40)), "a grant is capped as well")
}

// "decoder_kv_blocks_ttl … not renewed via heartbeats."
func TestAFixedLeaseIsNotRenewed(t *testing.T) {
	r := newRank(t, 1)
	r.admit("a", 11, 0)
	require.NoError(t, r.Grant(t0, Grant{Request: "a", Nonce: 11, TTL: 480 * time.Second, Exported: true, Fixed: true}))
	msg, _, err := AppendSlotHeartbeat(nil, []Target{{"a", 0, 11}}, 0)
	require.NoError(t, err)
	r.notify(at(479), "D", "HB:a")
	r.notify(at(479), "D", string(msg))
	require.Zero(t, r.Stats().Renewals)
	require.Equal(t, at(480), r.deadline())
	r.notify(at(479), "D", "a:1:11")
	require.Len(t, r.ends(), 1)
}

// The end of an old life must not wipe the nonce of another (XABSLOT, CASZ).
func TestASlotIsClearedOnlyOfItsOwnNonce(t *testing.T) {
	cells := make([]int64, 1)
	s := NewSlots(cells)
	require.True(t, s.take(0, 11))
	require.False(t, s.take(0, 12))
	s.clear(0, 12)
	require.Equal(t, int64(11), s.Load(0))
	s.clear(0, 11)
	require.Zero(t, s.Load(0))
	require.Zero(t, s.Load(-1))
	require.Zero(t, s.Load(9))
	require.Zero(t, (*Slots)(nil).Len())
}

// vLLM 58222/50789: a queue of deadlines in order of arrival reaps the wrong ones.
func TestReapTakesWhatIsDueWhateverTheOrderOfGrants(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	const n = 2000
	r := newRank(t, n)
	deadline := make([]float64, n)
	for i := range n {
		id := fmt.Sprint(i)
		r.admit(id, int64(i+1), i)
		deadline[i] = 1 + float64(rng.IntN(1000))
		r.grant(t0, id, int64(i+1), deadline[i])
	}
	for now := 0.0; now < 1100; now += 7 {
		for range 40 { // renew some that live
			i := rng.IntN(n)
			if deadline[i] > now {
				r.notify(at(now), "D", fmt.Sprint("HB:", i))
				deadline[i] = max(deadline[i], now+20)
			}
		}
		r.Reap(at(now))
		for _, e := range r.ends() {
			i := int(e.Nonce - 1)
			require.LessOrEqual(t, deadline[i], now)
			require.Positive(t, deadline[i], "ended once")
			deadline[i] = -1
		}
		for i, d := range deadline {
			require.False(t, d > 0 && d <= now, "lease %d was due at %v, it is %v", i, d, now)
		}
	}
	require.Zero(t, r.Len())
}

// Ended leases leave the heap long before their deadline.
func TestTheHeapForgetsEndedLeases(t *testing.T) {
	r := newRank(t, 1)
	for i := range 10_000 {
		r.admit("a", int64(i+1), 0)
		require.NoError(t, r.Grant(t0, Grant{Request: "a", Nonce: int64(i + 1), TTL: time.Hour, Exported: true}))
		r.notify(t0, "D", fmt.Sprintf("a:1:%d", i+1))
	}
	require.LessOrEqual(t, len(r.due), 64)
	require.Len(t, r.ends(), 10_000)
	require.Zero(t, r.byID.used)
}

func TestRenewalDoesNotAllocateNorTouchTheHeap(t *testing.T) {
	r := newRank(t, 1000)
	var targets []Target
	for i := range 1000 {
		targets = append(targets, Target{fmt.Sprintf("cmpl-%032d", i), i, int64(i + 1)})
		r.admit(targets[i].Request, targets[i].Nonce, i)
		r.grant(t0, targets[i].Request, targets[i].Nonce, 30)
	}
	byID, _, err := AppendHeartbeat(nil, targets, 1<<20)
	require.NoError(t, err)
	bySlot, _, err := AppendSlotHeartbeat(nil, targets, 1<<20)
	require.NoError(t, err)
	heap := append(deadlines(nil), r.due...)
	now := t0
	require.Zero(t, testing.AllocsPerRun(10, func() {
		now = now.Add(time.Second)
		if r.Notify(now, "D", byID) != nil || r.Notify(now, "D", bySlot) != nil {
			panic("refused")
		}
	}))
	require.Equal(t, heap, r.due)
}

// A request without a slot is pinned like any other (protocol-check.md hole 14).
func TestALifeWithoutASlotIsPinnedAndRenewed(t *testing.T) {
	r := newRank(t, 1)
	r.admit("a", 11, 0)
	r.admit("b", 12, NoSlot)
	r.admit("c", 13, NoSlot)
	for i, id := range []string{"a", "b", "c"} {
		r.grant(t0, id, int64(i+11), 30)
	}
	r.notify(at(20), "D", "HB:b")
	require.Equal(t, 2, r.Reap(at(30)))
	require.Equal(t, at(40), r.deadline())
	r.notify(at(31), "D", "b:1")
	require.Len(t, r.ends(), 3)
	r.admit("d", 14, NoSlot)
	require.Len(t, r.hot, 3, "indices are used again")
}

// A peer can send as much as its transport takes. Of what names no lease that could be, nothing is kept.
func TestAReadCompleteOfNoLeaseThatCouldBeIsNotKept(t *testing.T) {
	r := newRank(t, 1, func(c *TableConfig) { c.MaxNotification = minNotification })
	longest := strings.Repeat("x", minNotification-readCompleteTail)
	for _, payload := range []string{longest + "x:4096:" + strconv.Itoa(MaxNonce), strings.Repeat("x", 1<<20) + ":1:5", strings.Repeat("x", 1<<20) + ":1"} {
		r.notify(t0, "D", payload)
	}
	require.Empty(t, r.early.byKey)
	require.EqualValues(t, 3, r.Stats().UnmatchedReadCompletes)
	require.EqualValues(t, 3, r.Stats().DroppedReadCompletes)
	r.notify(t0, "D", longest+":1:"+strconv.Itoa(MaxNonce))
	r.admit(longest, MaxNonce, 0)
	require.Equal(t, []Ended{{longest, MaxNonce, ReasonRead}}, r.ends(), "the longest that can be is kept for its lease")
}

// Specification, "Worker-side sending and receiving": max(old expiry, now + extension), for slots as well as for ids.
func TestASlotHeartbeatNeverShortens(t *testing.T) {
	for _, n := range []int{1, 8, 9} { // one by one, eight at once, both
		r := newRank(t, n)
		var targets []Target
		for i := range n {
			id := fmt.Sprint("r", i)
			r.admit(id, int64(i+11), i)
			r.grant(t0, id, int64(i+11), 30)
			targets = append(targets, Target{id, i, int64(i + 11)})
		}
		msg, _, err := AppendSlotHeartbeat(nil, targets, 0)
		require.NoError(t, err)
		r.notify(at(1), "D", string(msg))
		require.EqualValues(t, n, r.Stats().Renewals)
		for i := range n {
			require.EqualValues(t, 30*time.Second, r.hot[i].deadline, "%d of %d", i, n)
		}
	}
}
