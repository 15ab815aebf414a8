package lease

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAHistogramCountsUpToEachBound(t *testing.T) {
	var h Histogram
	bounds := []float64{1, 2, 4}
	for _, v := range []float64{0, 1, 1.5, 4, 4.5, 100} {
		h.Observe(v, bounds)
	}
	require.EqualValues(t, 6, h.Count)
	require.EqualValues(t, 111, h.Sum)
	require.Equal(t, [MaxBuckets]int64{2, 1, 1}, h.Buckets)
	require.Zero(t, testing.AllocsPerRun(100, func() { h.Observe(3, bounds) }))
}

// dynamo#14502, aws-do-eks#84: a lease is set right when margins are known, not when leases are seen to expire.
func TestWhatWasLeftWhenReadIsCounted(t *testing.T) {
	r := newRank(t, 4)
	for i, id := range []string{"a", "b", "c", "d"} {
		r.admit(id, int64(11+i), i)
		r.grant(t0, id, int64(11+i), 30)
	}
	r.notify(at(15), "D", "HB:a")   // until 35
	r.notify(at(28), "D", "a:1:11") // 7 s left
	r.notify(at(29), "D", "b:1:12") // 1 s left
	require.NoError(t, r.Abort(at(29), Key{"c", 13}))
	require.Equal(t, 1, r.Reap(at(33)))

	s := r.Stats()
	require.EqualValues(t, 2, s.Margin.Count)
	require.EqualValues(t, 8, s.Margin.Sum)
	for i, bound := range LeaseSeconds() {
		want := 0
		if bound == 1 || bound == 7.5 {
			want = 1
		}
		require.EqualValues(t, want, s.Margin.Buckets[i], "up to %v s", bound)
	}
	for reason, held := range map[Reason]float64{ReasonRead: 28 + 29, ReasonAborted: 29, ReasonExpired: 33} {
		require.Equal(t, held, s.Held[reason].Sum, reason)
	}
	require.EqualValues(t, 2, s.Held[ReasonRead].Count)
	require.Zero(t, s.Held[0])
}

// A read-complete that comes after the deadline, and before the step that reaps, still finds its lease: nothing was left.
func TestAMarginIsNeverNegative(t *testing.T) {
	r := newRank(t, 1)
	r.admit("a", 11, 0)
	r.grant(t0, "a", 11, 30)
	r.notify(t0.Add(40*time.Second), "D", "a:1:11")
	require.EqualValues(t, 1, r.Stats().Margin.Count)
	require.Zero(t, r.Stats().Margin.Sum)
}

// A life that nobody granted had no deadline to be within.
func TestALifeThatWasNeverGrantedIsNotMeasured(t *testing.T) {
	r := newRank(t, 1)
	r.admit("a", 11, 0)
	require.NoError(t, r.Abort(t0, Key{"a", 11}))
	require.Zero(t, r.Stats().Held)
	require.Zero(t, r.Stats().Margin)
}
