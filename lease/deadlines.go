package lease

import "slices"

// deadlines is a min-heap of the moments at which leases were due when they
// were last looked at. A renewal does not touch it: the entry stays where it
// is, too early, and is moved when it surfaces. A lease that ended leaves its
// entry behind; Table drops such entries when they surface or outnumber the
// others.
type deadlines []due

// due is one entry, valid while the lease at index has this generation.
type due struct {
	at    int64 // nanoseconds since the table's epoch
	index int32
	gen   uint32
}

const heapWidth = 4 // children per node: half the levels of a binary heap

func (h *deadlines) push(d due) {
	*h = append(*h, d)
	s := *h
	i := len(s) - 1
	for i > 0 {
		parent := (i - 1) / heapWidth
		if s[parent].at <= d.at {
			break
		}
		s[i] = s[parent]
		i = parent
	}
	s[i] = d
}

func (h *deadlines) pop() {
	s := *h
	last := len(s) - 1
	s[0] = s[last]
	*h = s[:last]
	if last > 0 {
		h.down(0)
	}
}

// down restores the order after entry i got a later time.
func (h deadlines) down(i int) {
	d := h[i]
	for {
		first := i*heapWidth + 1
		if first >= len(h) {
			break
		}
		least := first
		for c := first + 1; c < min(first+heapWidth, len(h)); c++ {
			if h[c].at < h[least].at {
				least = c
			}
		}
		if h[least].at >= d.at {
			break
		}
		h[i] = h[least]
		i = least
	}
	h[i] = d
}

// refresh lets update correct every entry, drops those it refuses, and restores
// the order.
func (h *deadlines) refresh(update func(*due) bool) {
	kept := (*h)[:0]
	for i := range *h {
		// In place: a copy would be moved to the heap for each entry.
		if d := &(*h)[i]; update(d) {
			kept = append(kept, *d)
		}
	}
	if *h = kept; cap(kept) > 4*len(kept)+256 {
		*h = slices.Clone(kept)
	}
	for i := (len(*h) - 2) / heapWidth; i >= 0 && len(*h) > 1; i-- {
		h.down(i)
	}
}
