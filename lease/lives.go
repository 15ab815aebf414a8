package lease

import "time"

// Life is one life of a Table, at the last time that the Table was told.
type Life struct {
	Request string
	Nonce   int64
	Slot    int  // NoSlot: it has none
	Granted bool // false: admitted, and without a deadline yet
	Fixed   bool // no heartbeat moves the deadline
	Readers int  // senders that have read it, of more that are to
	// Age is the time since its grant, Left the time until its deadline, negative
	// once that has passed. Both are 0 before the grant.
	Age, Left time.Duration
}

// Lives appends the lives among the next limit places of the table, from place
// from on, and returns where to go on, 0 at the end. A Table of a million leases
// is looked at piece by piece, without holding up its step: a life that begins
// or ends in between is in a piece or not, and none is in two. A limit below 1 counts as 1.
func (t *Table) Lives(dst []Life, from, limit int) (lives []Life, next int) {
	from = min(max(from, 0), len(t.cold))
	end := from + min(max(limit, 1), len(t.cold)-from)
	for i := from; i < end; i++ {
		c := &t.cold[i]
		if c.nonce == 0 {
			continue
		}
		l := Life{Request: c.request, Nonce: c.nonce, Slot: NoSlot, Granted: c.granted}
		if t.hasSlot(int32(i)) {
			l.Slot = i
		}
		if c.readers != nil {
			l.Readers = len(c.readers.names)
		}
		if c.granted {
			h := &t.hot[i]
			l.Fixed = h.nonce == 0
			l.Age, l.Left = time.Duration(t.last-c.since), time.Duration(h.deadline-t.last)
		}
		dst = append(dst, l)
	}
	if end == len(t.cold) {
		end = 0
	}
	return dst, end
}
