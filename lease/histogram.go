package lease

// MaxBuckets is how many bounds a Histogram has room for.
const MaxBuckets = 16

// Histogram counts values by size. It is a value: a copy is a snapshot. Its
// bounds are those of its field, and come from a function beside it.
type Histogram struct {
	Count int64
	Sum   float64
	// Buckets counts the values up to the bound of the same index and above the
	// one before. Those above the last bound are in Count alone.
	Buckets [MaxBuckets]int64
}

// Observe counts v. The bounds ascend, are at most MaxBuckets, and must be the
// same for every call.
func (h *Histogram) Observe(v float64, bounds []float64) {
	h.Count++
	h.Sum += v
	for i, b := range bounds {
		if v <= b {
			h.Buckets[i]++
			return
		}
	}
}

// leaseSeconds has the durations of the defaults among its bounds: 5 s between
// heartbeats, 20 s that one extends by, 30 s and 480 s of life.
var leaseSeconds = [MaxBuckets]float64{.1, .25, .5, 1, 2.5, 5, 7.5, 10, 15, 20, 30, 60, 120, 240, 480, 960}

// LeaseSeconds returns the bounds of TableStats.Held and TableStats.Margin, in
// seconds.
func LeaseSeconds() []float64 { return append([]float64(nil), leaseSeconds[:]...) }
