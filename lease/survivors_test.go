package lease

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A life may be capped at one lease exactly: then no heartbeat renews it.
func TestALifeMayBeCappedAtOneLease(t *testing.T) {
	c := DefaultConfig()
	c.MaxLife = c.Duration
	require.NoError(t, c.Validate())
	c.MaxLife--
	requireRefused(t, c.Validate(), ErrInvalid)
}

// Only "offered" is a word: a quoted true is a mistake of whoever wrote the configuration.
func TestVerificationIsNoWordButOffered(t *testing.T) {
	for _, v := range []string{`"true"`, `"false"`} {
		_, err := ParseConfig([]byte(`{"kv_lease_verification": ` + v + `}`))
		requireRefused(t, err, ErrInvalid)
	}
	c, err := ParseConfig([]byte(`{"kv_lease_verification": "offered"}`))
	require.NoError(t, err)
	require.Equal(t, VerifyOffered, c.Verification)
}

// Whatever a refresh drops and moves, the earliest entry comes first afterwards.
func TestARefreshedHeapIsInOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for size := range 90 {
		for drop := range 3 {
			var h deadlines
			for i := range size {
				h.push(due{at: rng.Int64N(50), index: int32(i)})
			}
			want := 0
			h.refresh(func(d *due) bool {
				if drop > 0 && rng.IntN(3) < drop {
					return false
				}
				d.at = rng.Int64N(50)
				want++
				return true
			})
			require.Len(t, h, want)
			for last := int64(0); len(h) > 0; h.pop() {
				require.LessOrEqual(t, last, h[0].at, "%d entries", size)
				last = h[0].at
			}
		}
	}
}

// What is kept again under a key that was taken meanwhile has its own time, and its own place.
func TestWhatIsKeptAgainOutlivesItsFirstEntry(t *testing.T) {
	key, other := Key{"a", 5000}, Key{"b", 5001}
	again := func() *early {
		e := &early{ttl: 60, cap: 2, byKey: map[Key]*readers{}}
		require.Zero(t, e.add(0, key, "D", 1))
		require.NotNil(t, e.take(key))
		require.Zero(t, e.add(30, key, "D", 1))
		return e
	}
	e := again()
	require.Zero(t, e.expire(89))
	require.NotNil(t, e.take(key))
	e = again()
	require.EqualValues(t, 1, e.expire(90))
	require.Nil(t, e.take(key))
	e = again()
	require.Zero(t, e.add(31, other, "D", 1), "there is room for two")
	require.EqualValues(t, 2, e.size)
	require.EqualValues(t, 1, e.add(32, Key{"c", 5002}, "D", 1))
	require.Nil(t, e.take(key), "the oldest made room")
	require.NotNil(t, e.take(other))
}

// An owner that had a million leases once does not keep an index for them.
func TestTheIndexShrinksWithItsLives(t *testing.T) {
	r := newRank(t, 0)
	for i := range 1000 {
		r.admit(fmt.Sprint(i), int64(i+1), NoSlot)
	}
	require.Len(t, r.byID.entries, 2048)
	for i := range 1000 {
		require.NoError(t, r.Abort(t0, Key{fmt.Sprint(i), int64(i + 1)}))
		require.LessOrEqual(t, len(r.byID.entries), max(smallestIndex, 8*2*r.byID.used), "%d lives", r.byID.used)
	}
	require.Len(t, r.byID.entries, smallestIndex)
}

// An id that is stored behind others of its tag is found by its bytes, wherever it is.
func TestAnIDBehindOthersOfItsTagIsRenewedAlone(t *testing.T) {
	const n = 500
	r := newRank(t, 0)
	for i := range n {
		r.admit(fmt.Sprint(i), int64(i+1), NoSlot)
		r.grant(t0, fmt.Sprint(i), int64(i+1), 30)
	}
	behind := 0
	for i := range n {
		id := fmt.Sprint(i)
		hash := r.byID.hash(id)
		for k := range r.byID.entries { // forge: every entry has this tag
			r.byID.entries[k].tag = tagOf(hash)
		}
		if r.cold[r.byID.entries[r.byID.home(hash)].ref-1].request != id {
			behind++
		}
		before := make([]int64, n)
		for k := range r.hot {
			before[k] = r.hot[k].deadline
		}
		r.notify(at(20+float64(i)), "D", "HB:"+id)
		for k := range r.hot {
			if moved := r.hot[k].deadline != before[k]; moved != (r.cold[k].request == id) {
				require.Failf(t, "renewed", "%s by a heartbeat of %s", r.cold[k].request, id)
			}
		}
	}
	require.NotZero(t, behind)
}

// A message has as many targets as fit, and not one byte more than its cap.
func TestAHeartbeatFillsItsCap(t *testing.T) {
	for size := 1; size <= 40; size++ {
		var targets []Target
		for i := range 60 {
			targets = append(targets, Target{strings.Repeat("x", size), i, int64(i + 1)})
		}
		for limit := minNotification; limit < 200; limit++ {
			for name, c := range map[string]struct {
				encode func([]byte, []Target, int) ([]byte, []Target, error)
				next   int // bytes of one more target
			}{"HB": {AppendHeartbeat, size + 1}, "HB2": {AppendSlotHeartbeat, slotTargetSize}} {
				msg, rest, err := c.encode(nil, targets, limit)
				require.NoError(t, err)
				if len(msg) > limit || len(rest) > 0 && len(msg)+c.next <= limit {
					require.Failf(t, "size", "%s of ids of %d bytes: %d bytes with %d targets left, cap %d", name, size, len(msg), len(rest), limit)
				}
			}
		}
	}
}

// An id is as long as the longest message about it allows.
func TestTheLongestIDLeavesRoomForTheLongestReadComplete(t *testing.T) {
	for _, limit := range []int{minNotification, 256, DefaultMaxNotification} {
		longest := strings.Repeat("x", limit-len(AppendReadComplete(nil, "", MaxReaders, MaxNonce)))
		require.NoError(t, ValidateRequestID(longest, limit))
		requireRefused(t, ValidateRequestID(longest+"x", limit), ErrInvalid)
	}
}

// Of several lives of one id each ends alone, in any order, and a heartbeat by id renews all that are left.
func TestLivesOfOneIDEndOneByOne(t *testing.T) {
	for _, order := range [][]int64{{11, 12, 13}, {11, 13, 12}, {12, 11, 13}, {12, 13, 11}, {13, 11, 12}, {13, 12, 11}} {
		r := newRank(t, 3)
		for i := range 3 {
			r.admit("a", int64(11+i), i)
			r.grant(t0, "a", int64(11+i), 30)
		}
		for i, nonce := range order {
			renewals := r.Stats().Renewals
			r.notify(at(float64(1+i)), "D", "HB:a")
			require.EqualValues(t, 3-i, r.Stats().Renewals-renewals, "%v", order)
			require.NoError(t, r.Abort(t0, Key{"a", nonce}))
			require.Equal(t, []Ended{{"a", nonce, ReasonAborted}}, r.ends(), "%v", order)
			require.Equal(t, 2-i, r.Len())
		}
		r.notify(at(9), "D", "HB:a")
		require.EqualValues(t, 1, r.Stats().UnknownRenewals)
	}
}

// A life that was read before its grant is remembered until its grant or its abort comes, and no longer.
func TestALifeReadBeforeItsGrantIsRememberedForIt(t *testing.T) {
	for name, drop := range map[string]func(*rank) error{
		"grant": func(r *rank) error {
			return r.Grant(t0, Grant{Request: "a", Nonce: 5000, TTL: time.Second, Exported: true})
		},
		"abort": func(r *rank) error { return r.Abort(t0, Key{"a", 5000}) },
	} {
		r := newRank(t, 1)
		r.admit("a", 5000, 0)
		r.notify(t0, "D", "a:1:5000")
		require.Equal(t, []Ended{{"a", 5000, ReasonRead}}, r.ends(), name)
		require.Len(t, r.spent, 1, name)
		require.NoError(t, drop(r), name)
		require.Empty(t, r.spent, name)
		requireRefused(t, r.Grant(t0, Grant{Request: "a", Nonce: 5000, TTL: time.Second}), ErrUnknown)
	}
}

// Lives without a slot take none, while they are here and afterwards.
func TestLivesWithoutASlotLeaveTheSlotsFree(t *testing.T) {
	r := newRank(t, 3)
	r.admit("slot", 11, 1)
	require.EqualValues(t, 2, r.Stats().FreeSlots)
	for round := range 3 {
		for i := range 5 {
			r.admit(fmt.Sprint(i), int64(100+i), NoSlot)
			require.EqualValues(t, 2, r.Stats().FreeSlots, "round %d", round)
		}
		for i := range 5 {
			require.NoError(t, r.Abort(t0, Key{fmt.Sprint(i), int64(100 + i)}))
			require.EqualValues(t, 2, r.Stats().FreeSlots, "round %d", round)
		}
	}
	require.Equal(t, []int64{0, 11, 0}, r.cells)
}

// The numbers that are allowed are allowed to their ends.
func TestTheLargestNonceAndTheLongestTimeAreServed(t *testing.T) {
	r := newRank(t, 1)
	r.admit("a", MaxNonce, 0)
	require.NoError(t, r.Grant(t0, Grant{Request: "a", Nonce: MaxNonce, TTL: MaxTTL, Exported: true}))
	require.Equal(t, t0.Add(MaxTTL), r.deadline())
	r.notify(t0, "D", string(AppendReadComplete(nil, "a", 1, MaxNonce)))
	require.Equal(t, []Ended{{"a", MaxNonce, ReasonRead}}, r.ends())
}

// A read-complete that is early by less than a minute counts, unless a Table is configured for another time.
func TestAnEarlyReadCompleteIsKeptForAMinute(t *testing.T) {
	for _, late := range []bool{false, true} {
		r := newRank(t, 1)
		r.notify(t0, "D", "a:1:5000")
		now := at(59.9)
		if late {
			now = at(60)
		}
		r.Reap(now)
		require.NoError(t, r.Admit(now, Admission{"a", 5000, 0}))
		require.Equal(t, late, r.Len() == 1)
	}
}
