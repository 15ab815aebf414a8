package lease

import "sync/atomic"

// Slots is the slot array of one rank: cells in registered memory that readers
// READ at any moment. A cell holds the nonce of the life it belongs to, and 0
// otherwise. It does not move and is not handed to another Slots while its
// agent lives: a reader that keeps an old address would see an old nonce for
// ever (protocol-check.md, XREREG).
type Slots struct{ cells []int64 }

// NewSlots uses cells, which must all be 0, as the slot array.
func NewSlots(cells []int64) *Slots { return &Slots{cells: cells} }

// Len is the number of slots, 0 for a nil Slots.
func (s *Slots) Len() int {
	if s == nil {
		return 0
	}
	return len(s.cells)
}

// Load is the value of a slot, 0 for a slot that is not there.
func (s *Slots) Load(slot int) int64 {
	if slot < 0 || slot >= s.Len() {
		return 0
	}
	return atomic.LoadInt64(&s.cells[slot])
}

func (s *Slots) take(slot int, nonce int64) bool {
	return atomic.CompareAndSwapInt64(&s.cells[slot], 0, nonce)
}

// clear zeroes the slot only while it shows nonce: the end of an old life must
// not wipe the nonce of a new one, whatever else went wrong.
func (s *Slots) clear(slot int, nonce int64) {
	atomic.CompareAndSwapInt64(&s.cells[slot], nonce, 0)
}
