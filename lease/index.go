package lease

import "hash/maphash"

// index finds the newest life of an id. It is a hash table with linear probing
// that holds 8 bytes for an entry and not the ids, which are in the lives. A
// map[string]int32 would do; but the lookups of a heartbeat miss the cache at
// every step, and only with a table of our own can a batch of them miss it
// together (see Table.renewIDs).
type index struct {
	seed    maphash.Seed
	entries []entry // a power of two, at most 3/4 used
	used    int
}

type entry struct {
	tag uint32 // of the hash
	ref int32  // life + 1, 0 when free
}

const smallestIndex = 16

func newIndex() index {
	return index{seed: maphash.MakeSeed(), entries: make([]entry, smallestIndex)}
}

func tagOf(hash uint64) uint32 { return uint32(hash >> 32) }

func (x *index) hash(id string) uint64      { return maphash.String(x.seed, id) }
func (x *index) hashBytes(id []byte) uint64 { return maphash.Bytes(x.seed, id) }

func (x *index) home(hash uint64) int { return int(hash) & (len(x.entries) - 1) }

// candidate is the next life from position at on that has the hash's tag, and
// where it is; none and a free position if there is no more.
func (x *index) candidate(hash uint64, at int) (life int32, position int) {
	mask := len(x.entries) - 1
	for tag := tagOf(hash); ; at = (at + 1) & mask {
		e := x.entries[at]
		if e.ref == 0 {
			return none, at
		}
		if e.tag == tag {
			return e.ref - 1, at
		}
	}
}

// put stores a new entry. hashOf gives the hash of a life, for a table that grows.
func (x *index) put(hash uint64, life int32, hashOf func(int32) uint64) {
	if 4*(x.used+1) > 3*len(x.entries) {
		x.resize(2*len(x.entries), hashOf)
	}
	x.insert(hash, life)
	x.used++
}

func (x *index) insert(hash uint64, life int32) {
	at, mask := x.home(hash), len(x.entries)-1
	for x.entries[at].ref != 0 {
		at = (at + 1) & mask
	}
	x.entries[at] = entry{tagOf(hash), life + 1}
}

// remove frees a position and moves what would not be found any more.
func (x *index) remove(at int, hashOf func(int32) uint64) {
	mask := len(x.entries) - 1
	for next := (at + 1) & mask; x.entries[next].ref != 0; next = (next + 1) & mask {
		home := x.home(hashOf(x.entries[next].ref - 1))
		if (next-home)&mask >= (next-at)&mask {
			x.entries[at] = x.entries[next]
			at = next
		}
	}
	x.entries[at] = entry{}
	if x.used--; len(x.entries) > smallestIndex && 8*x.used < len(x.entries) {
		x.resize(len(x.entries)/2, hashOf)
	}
}

func (x *index) resize(size int, hashOf func(int32) uint64) {
	old := x.entries
	x.entries = make([]entry, size)
	for _, e := range old {
		if e.ref != 0 {
			x.insert(hashOf(e.ref-1), e.ref-1)
		}
	}
}
