package lease

import (
	"slices"
	"time"
)

const (
	defaultMaxEarly = 4096
	defaultEarlyTTL = time.Minute
)

// readers are those that reported that they are done with a lease.
type readers struct {
	want  int // the largest N seen
	names []string
}

// add counts a report and says whether the sender is new.
func (r *readers) add(sender string, want int) bool {
	r.want = max(r.want, want)
	if injected&faultXCNT == 0 && slices.Contains(r.names, sender) {
		return false
	}
	r.names = append(r.names, sender)
	return true
}

func (r *readers) done() bool { return len(r.names) >= r.want }

// early keeps read-completes that matched no lease, in case their lease is
// still to come (vllm#43509, cases.md 6). Most never match: they are late, or
// nobody's. So it is bounded in number and time, and the oldest make room.
type early struct {
	ttl, cap int64
	size     int64 // reports kept
	byKey    map[Key]*readers
	// dropped is told what was given up, if it is not nil.
	dropped func(k Key, senders int)
	queue   []earlyEntry // in order of arrival; those that were taken stay until they are oldest
}

type earlyEntry struct {
	key Key
	at  int64 // nanoseconds since the table's epoch
	set *readers
}

// add keeps a report and returns how many older ones it dropped.
func (e *early) add(now int64, k Key, sender string, want int) (dropped int64) {
	dropped = e.expire(now)
	set := e.byKey[k]
	if set == nil {
		set = &readers{}
		e.byKey[k] = set
		e.queue = append(e.queue, earlyEntry{k, now, set})
	}
	if set.add(sender, want) {
		e.size++
	}
	for e.size > e.cap {
		dropped += e.pop()
	}
	if int64(len(e.queue)) > 2*e.cap {
		e.queue = slices.DeleteFunc(e.queue, func(q earlyEntry) bool { return e.byKey[q.key] != q.set })
	}
	return dropped
}

// take removes and returns what was kept under k, nil if there is nothing.
func (e *early) take(k Key) *readers {
	set := e.byKey[k]
	if set != nil {
		e.size -= int64(len(set.names))
		delete(e.byKey, k)
	}
	return set
}

// expire drops what is older than the ttl.
func (e *early) expire(now int64) (dropped int64) {
	for len(e.queue) > 0 && now-e.queue[0].at >= e.ttl {
		dropped += e.pop()
	}
	return dropped
}

// pop removes the oldest entry and returns how many reports went with it.
func (e *early) pop() int64 {
	first := e.queue[0]
	e.queue[0] = earlyEntry{}
	if e.queue = e.queue[1:]; len(e.queue) == 0 {
		e.queue = nil
	}
	if e.byKey[first.key] != first.set {
		return 0 // taken meanwhile
	}
	e.take(first.key)
	if e.dropped != nil {
		e.dropped(first.key, len(first.set.names))
	}
	return int64(len(first.set.names))
}
