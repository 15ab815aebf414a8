package lease

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"math"
	"slices"
	"time"
)

// TableConfig configures a Table.
type TableConfig struct {
	// Extension is how far from now a heartbeat moves a deadline, above 0 and at
	// most MaxTTL, see [Config.Extension]. It has to be longer than the time
	// between two heartbeats, which is the readers' and cannot be checked here: a
	// shorter one shortens no deadline, but lets leases run out between them.
	Extension time.Duration
	// MaxLife bounds the time from grant to the last moment a heartbeat can
	// renew to. 0 means no bound.
	MaxLife time.Duration
	// Slots is the rank's slot array, nil when it has none.
	Slots *Slots
	// MaxEarly is how many read-completes with a nonce that no lease has are kept
	// for a lease that is still to come, and EarlyTTL for how long. 0 means 4096
	// and one minute. Without a nonce none is kept: it could be late, and would
	// end another life of its id.
	MaxEarly int
	EarlyTTL time.Duration
	// MaxNotification is the size cap that ids are checked against, 0 means
	// DefaultMaxNotification. Longer read-completes are not kept for a lease that
	// is still to come.
	MaxNotification int
	// Trace is called when something happens to a lease.
	Trace TableTrace
}

// TableStats counts what happened to the leases of one rank.
type TableStats struct {
	Live      int64 // lives now, admitted or granted
	FreeSlots int64 // slots that no life is in now
	// OldestAge is how long the lease that was granted first, of those that live,
	// has been granted, at the last time that the table was told. A Reap in every
	// step keeps it true to the step. 0 when no lease is granted.
	OldestAge time.Duration

	Admitted, Granted      int64
	Read, Expired, Aborted int64 // ends by reason
	Heartbeats, Renewals   int64 // messages, leases renewed
	UnknownRenewals        int64 // ids of heartbeats without a lease
	StaleRenewals          int64 // slots of heartbeats that hold another nonce
	ReadCompletes          int64 // messages
	DuplicateReadCompletes int64 // by a sender that was counted before
	StaleReadCompletes     int64 // for a life of the id that is not here any more
	NoncelessReadCompletes int64 // taken for a lease that has a nonce (vLLM up to 0.33)
	RefusedReadCompletes   int64 // without a nonce, before export or for several lives
	UnmatchedReadCompletes int64 // for no lease: late, early, or nobody's; which, shows only later
	EarlyReadCompletes     int64 // those of the unmatched whose lease came
	DroppedReadCompletes   int64 // those of the unmatched that were late, as no lease came for them
	DroppedGrants          int64 // for lives that had ended
	DroppedAborts          int64 // for lives that had ended
	MalformedNotifications int64

	// Of the lives that were granted, in seconds; LeaseSeconds has the bounds.
	Held   [reasonEnd]Histogram // from grant to end, by Reason
	Margin Histogram            // what the deadline of those that were read had left then, at least 0
}

// Table is the owner's side of one rank: which lives there are, until when, and
// what their slots show. A life is admitted (its nonce is in its slot, it has no
// deadline), granted (it has one), and ends once: read, expired or aborted.
// Every admitted life needs one Grant or one Abort.
//
// A Table is not safe for concurrent use: the step that owns it calls it. Only
// the slots are read by others. Time comes in with each call; it may stand still
// or go backwards, which makes leases live longer and breaks nothing. Times more
// than 292 years after the first one count as that, and leases granted then
// expire at the next Reap. An error means that no lease changed.
type Table struct {
	faults       tableFaults
	ext, maxLife int64
	maxSize      int // of a notification about one life
	slots        *Slots
	epoch        time.Time // the first time that was told
	last         int64     // the last one, nanoseconds since
	started      bool

	byID index // to the newest life of an id
	// A life has the index of its slot. Those without one come after the last
	// slot. What a renewal needs is apart from the rest, and small.
	hot  []hotLife
	cold []coldLife
	free []int32 // indices after the last slot that are free
	// spent are the lives that a read-complete ended before their grant, until
	// the grant or abort comes.
	spent map[Key]struct{}

	due     deadlines
	granted int    // lives with a deadline
	grants  grants // in the order they came
	early   early
	ended   []Ended
	stats   TableStats
	trace   TableTrace
}

type hotLife struct {
	nonce    int64 // 0 unless heartbeats renew it
	deadline int64 // nanoseconds since epoch
}

type coldLife struct {
	request string
	nonce   int64 // 0: nobody has this index
	since   int64 // when it was granted, nanoseconds since epoch
	readers *readers
	older   int32 // index of an earlier life of the same id, none if negative
	gen     uint32
	granted bool
	export  bool // params have left
	proven  bool // a reader showed the nonce, so they have
}

// grants are the lives that were granted, in that order. One that ended leaves
// its entry behind until tidy comes by.
type grants struct {
	list  []grant
	first int // the first in list that lives
}

type grant struct {
	index int32
	gen   uint32
}

const none = -1

// NewTable makes an empty table.
func NewTable(cfg TableConfig) (*Table, error) {
	switch {
	case cfg.Extension <= 0 || cfg.Extension > MaxTTL:
		return nil, invalid("new table", "", "extension is %v, must be above 0 and at most %v", cfg.Extension, MaxTTL)
	case cfg.MaxLife < 0:
		return nil, invalid("new table", "", "longest life is %v, must not be negative", cfg.MaxLife)
	case cfg.MaxEarly < 0 || cfg.EarlyTTL < 0:
		return nil, invalid("new table", "", "%d early read-completes for %v, must not be negative", cfg.MaxEarly, cfg.EarlyTTL)
	case cfg.MaxNotification != 0 && cfg.MaxNotification < minNotification:
		return nil, invalid("new table", "", "notifications of %d bytes, must be at least %d", cfg.MaxNotification, minNotification)
	case cfg.Slots.Len() > math.MaxInt32/2:
		return nil, invalid("new table", "", "%d slots, must be at most %d", cfg.Slots.Len(), math.MaxInt32/2)
	}
	for i := range cfg.Slots.Len() {
		if v := cfg.Slots.Load(i); v != 0 {
			return nil, invalid("new table", "", "slot %d holds %d, all must be 0 before the first life", i, v)
		}
	}
	if cfg.MaxEarly == 0 {
		cfg.MaxEarly = defaultMaxEarly
	}
	if cfg.EarlyTTL == 0 {
		cfg.EarlyTTL = defaultEarlyTTL
	}
	return &Table{
		ext: int64(cfg.Extension), maxLife: int64(cfg.MaxLife), maxSize: cmp.Or(cfg.MaxNotification, DefaultMaxNotification), slots: cfg.Slots,
		byID:  newIndex(),
		spent: make(map[Key]struct{}),
		early: early{ttl: int64(cfg.EarlyTTL), cap: int64(cfg.MaxEarly), byKey: make(map[Key]*readers), dropped: cfg.Trace.LateReadComplete},
		trace: cfg.Trace,
	}, nil
}

// at is now in nanoseconds since the first time the table was told.
func (t *Table) at(now time.Time) int64 {
	if !t.started {
		t.epoch, t.started = now, true
	}
	t.last = int64(now.Sub(t.epoch))
	return t.last
}

// Admit starts a life: its nonce is in its slot when Admit returns. It refuses
// ids that notifications cannot carry, nonces outside 1 … MaxNonce, a slot that
// is not there or not free, and a life that is already here.
func (t *Table) Admit(now time.Time, a Admission) error {
	at := t.at(now)
	if err := ValidateRequestID(a.Request, t.maxSize); err != nil {
		return err
	}
	key := Key{a.Request, a.Nonce}
	_, spent := t.spent[key]
	switch {
	case a.Nonce < 1 || a.Nonce > MaxNonce:
		return invalid("admit", a.Request, "nonce is %d, must be 1 to %d", a.Nonce, MaxNonce)
	case a.Slot < NoSlot || a.Slot >= t.slots.Len():
		return invalid("admit", a.Request, "slot is %d, the rank has %d", a.Slot, t.slots.Len())
	case spent || t.find(a.Request, a.Nonce) != none:
		return invalid("admit", a.Request, "the life with nonce %d was admitted before", a.Nonce)
	case a.Slot != NoSlot && !t.slots.take(a.Slot, a.Nonce):
		return invalid("admit", a.Request, "slot %d still holds another nonce", a.Slot)
	}
	i := t.index(a.Slot)
	t.link(i, a.Request, a.Nonce)
	c := &t.cold[i]
	t.stats.Admitted++
	t.stats.Live++

	if set := t.early.take(key); set != nil {
		t.stats.EarlyReadCompletes += int64(len(set.names))
		c.readers, c.proven = set, true
		t.endIfRead(at, i)
	}
	return nil
}

// index is where a life with this slot goes.
func (t *Table) index(slot int) int32 {
	i := int32(slot)
	if slot == NoSlot {
		if n := len(t.free); n > 0 {
			i = t.free[n-1]
			t.free = t.free[:n-1]
			return i
		}
		i = int32(max(len(t.hot), t.slots.Len()))
	}
	for int(i) >= len(t.hot) {
		t.hot = append(t.hot, hotLife{})
		t.cold = append(t.cold, coldLife{})
	}
	return i
}

// newest is the newest life of an id, or none.
func (t *Table) newest(id []byte) int32 {
	hash := t.byID.hashBytes(id)
	for at := t.byID.home(hash); ; at++ {
		life, position := t.byID.candidate(hash, at&(len(t.byID.entries)-1))
		if life == none || t.cold[life].request == string(id) {
			return life
		}
		at = position
	}
}

// position is where the newest life of an id is in the index; false if none is.
func (t *Table) position(id string) (int, bool) {
	hash := t.byID.hash(id)
	for at := t.byID.home(hash); ; at++ {
		life, position := t.byID.candidate(hash, at&(len(t.byID.entries)-1))
		if life == none || t.cold[life].request == id {
			return position, life != none
		}
		at = position
	}
}

func (t *Table) hashOf(life int32) uint64 { return t.byID.hash(t.cold[life].request) }

// link makes index i the newest life of its id.
func (t *Table) link(i int32, request string, nonce int64) {
	c := &t.cold[i]
	*c = coldLife{request: request, nonce: nonce, older: none, gen: c.gen + 1}
	if at, ok := t.position(request); ok {
		c.older = t.byID.entries[at].ref - 1
		t.byID.entries[at].ref = i + 1
		return
	}
	t.byID.put(t.byID.hash(request), i, t.hashOf)
}

// unlink takes a life out of the lives of its id.
func (t *Table) unlink(i int32) {
	c := &t.cold[i]
	at, _ := t.position(c.request)
	switch newest := t.byID.entries[at].ref - 1; {
	case newest != i:
		for t.cold[newest].older != i {
			newest = t.cold[newest].older
		}
		t.cold[newest].older = c.older
	case c.older != none:
		t.byID.entries[at].ref = c.older + 1
	default:
		t.byID.remove(at, t.hashOf)
	}
}

// find is the life of an id with this nonce, or none.
func (t *Table) find(request string, nonce int64) int32 {
	at, ok := t.position(request)
	if !ok {
		return none
	}
	return t.findFrom(t.byID.entries[at].ref-1, nonce)
}

func (t *Table) findFrom(i int32, nonce int64) int32 {
	for i != none && t.cold[i].nonce != nonce {
		i = t.cold[i].older
	}
	return i
}

// Grant starts the deadline of an admitted life: now + TTL. A life that a
// read-complete ended meanwhile stays ended, and the grant is dropped. A life
// that was never admitted, or not since its last grant, is ErrUnknown or
// ErrInvalid, and so is a TTL that is not above 0 and at most MaxTTL.
func (t *Table) Grant(now time.Time, g Grant) error {
	at := t.at(now)
	if g.TTL <= 0 || g.TTL > MaxTTL {
		return invalid("grant", g.Request, "ttl is %v, must be above 0 and at most %v", g.TTL, MaxTTL)
	}
	i := t.find(g.Request, g.Nonce)
	if i == none {
		key := Key{g.Request, g.Nonce}
		if _, ok := t.spent[key]; !ok {
			return &Error{Op: "grant", Request: g.Request, Detail: "no such life was admitted", Err: ErrUnknown}
		}
		delete(t.spent, key)
		t.stats.DroppedGrants++
		if injected&faultXGRANT != 0 {
			t.faults.revive(t, at, g)
		}
		return nil
	}
	c := &t.cold[i]
	if c.granted {
		return invalid("grant", g.Request, "the life with nonce %d was granted before", g.Nonce)
	}
	c.granted, c.export, c.since = true, g.Exported, at
	deadline := min(later(at, int64(g.TTL)), t.limit(c))
	h := &t.hot[i]
	h.deadline = deadline
	if !g.Fixed {
		h.nonce = c.nonce
	}
	t.due.push(due{deadline, i, c.gen})
	t.grants.list = append(t.grants.list, grant{i, c.gen})
	t.granted++
	t.stats.Granted++
	if f := t.trace.Granted; f != nil {
		f(g)
	}
	t.endIfRead(at, i)
	return nil
}

// limit is the moment that no renewal goes beyond.
func (t *Table) limit(c *coldLife) int64 {
	if t.maxLife == 0 {
		return math.MaxInt64
	}
	return later(c.since, t.maxLife)
}

// later adds without overflow.
func later(at, d int64) int64 {
	if at > math.MaxInt64-d {
		return math.MaxInt64
	}
	return at + d
}

// Abort ends a life, admitted or granted. One that has ended already, or never
// was, is left alone and counted: an owner may revoke while readers finish. A
// key that cannot be is ErrInvalid.
func (t *Table) Abort(now time.Time, k Key) error {
	at := t.at(now)
	if k.Request == "" || k.Nonce < 1 || k.Nonce > MaxNonce {
		return invalid("abort", k.Request, "nonce is %d, must be 1 to %d", k.Nonce, MaxNonce)
	}
	i := t.find(k.Request, k.Nonce)
	if i == none {
		delete(t.spent, k)
		t.stats.DroppedAborts++
		return nil
	}
	t.end(at, i, ReasonAborted)
	return nil
}

// Has reports whether the life is here, admitted or granted.
func (t *Table) Has(k Key) bool { return t.find(k.Request, k.Nonce) != none }

// AbortAll ends every life, as Abort does, and returns how many there were: for
// a rank whose scheduler is gone, and with it what it knew of them.
func (t *Table) AbortAll(now time.Time) (n int) {
	at := t.at(now)
	for i := range t.cold {
		if t.cold[i].nonce != 0 {
			t.end(at, int32(i), ReasonAborted)
			n++
		}
	}
	clear(t.spent)
	return n
}

// Notify takes one notification: a heartbeat by id ("HB:"), a heartbeat by slot
// ("HB2:") or a read-complete. What cannot be read is ErrMalformed, and nothing
// of it is done. Names that match no lease are counted, and are no error. sender
// is the name of the agent it came from; readers are counted by it.
func (t *Table) Notify(now time.Time, sender string, payload []byte) error {
	at := t.at(now)
	s := &t.stats
	beats, renewed, missed := s.Heartbeats, s.Renewals, s.UnknownRenewals+s.StaleRenewals
	var err error
	switch {
	case bytes.HasPrefix(payload, []byte(heartbeatPrefix)):
		err = t.renewIDs(at, payload[len(heartbeatPrefix):])
	case bytes.HasPrefix(payload, []byte(slotHeartbeatPrefix)):
		err = t.renewSlots(at, payload[len(slotHeartbeatPrefix):])
	default:
		err = t.readComplete(at, sender, payload)
	}
	if err != nil {
		s.MalformedNotifications++
	}
	if f := t.trace.Heartbeat; f != nil && s.Heartbeats > beats {
		f(sender, int(s.Renewals-renewed), int(s.UnknownRenewals+s.StaleRenewals-missed))
	}
	return err
}

// renewIDs renews "id,id,…". A heartbeat by id has no nonce, so it renews every
// life of the id.
//
// It goes through a batch in passes, each of which only touches what the next
// one needs: of a million leases hardly anything is in the cache, and the misses
// of one pass do not wait for each other.
func (t *Table) renewIDs(at int64, ids []byte) error {
	if len(ids) == 0 || ids[0] == ',' || ids[len(ids)-1] == ',' || bytes.Contains(ids, []byte(",,")) {
		return malformed(ids, "want ids between the commas of a heartbeat")
	}
	t.stats.Heartbeats++
	deadline := later(at, t.ext)
	const batch = 32
	var (
		id      [batch][]byte
		hash    [batch]uint64
		first   [batch]entry
		life    [batch]int32
		request [batch]string
	)
	for len(ids) > 0 {
		n := 0
		for ; n < batch && len(ids) > 0; n++ {
			if comma := bytes.IndexByte(ids, ','); comma >= 0 {
				id[n], ids = ids[:comma], ids[comma+1:]
			} else {
				id[n], ids = ids, nil
			}
			hash[n] = t.byID.hashBytes(id[n])
		}
		for k := range n {
			first[k] = t.byID.entries[t.byID.home(hash[k])]
		}
		for k := range n {
			if life[k] = first[k].ref - 1; first[k].tag != tagOf(hash[k]) {
				life[k], _ = t.byID.candidate(hash[k], t.byID.home(hash[k]))
			}
		}
		for k := range n {
			if request[k] = ""; life[k] != none {
				request[k] = t.cold[life[k]].request
			}
		}
		for k := range n {
			if request[k] != string(id[k]) {
				life[k] = t.newest(id[k]) // two ids with one tag, or none
			}
		}
		for k := range n {
			if life[k] != none {
				t.renewAll(life[k], deadline)
				continue
			}
			t.stats.UnknownRenewals++
			if injected&faultM8 != 0 {
				t.faults.resurrect(t, at, string(id[k]))
			}
		}
	}
	return nil
}

// renewAll renews a life and the older ones of its id.
func (t *Table) renewAll(i int32, deadline int64) {
	for ; i != none; i = t.cold[i].older {
		t.renew(i, deadline)
	}
}

// renewSlots renews (slot uint32, nonce uint64)…, little endian. Only a life
// that still has the nonce is renewed.
func (t *Table) renewSlots(at int64, targets []byte) error {
	if len(targets) == 0 || len(targets)%slotTargetSize != 0 {
		return malformed(targets, "want 12 bytes for each slot of a heartbeat")
	}
	t.stats.Heartbeats++
	deadline := later(at, t.ext)
	slots := t.hot[:min(len(t.hot), t.slots.Len())]
	renewed := int64(0)
	if t.maxLife > 0 || injected != 0 {
		for rest := targets; len(rest) > 0; rest = rest[slotTargetSize:] {
			slot, nonce := slotTarget(rest)
			if slot < uint64(len(slots)) && slots[slot].nonce == nonce && nonce != 0 {
				t.renew(int32(slot), deadline)
				renewed++
			}
		}
		t.stats.Renewals -= renewed
	} else {
		// The same without a cap on life.
		rest := targets
		for ; len(rest) >= 8*slotTargetSize; rest = rest[8*slotTargetSize:] {
			renewed += renewEight(slots, (*[8 * slotTargetSize]byte)(rest), deadline)
		}
		renewed += renewEach(slots, rest, deadline)
	}
	t.stats.Renewals += renewed
	t.stats.StaleRenewals += int64(len(targets)/slotTargetSize) - renewed
	return nil
}

// renewEight renews eight targets and returns how many it found. Of a million
// leases each one misses the cache; a processor waits for as many misses at once
// as it sees loads ahead, so the loads come first, and few instructions each.
func renewEight(slots []hotLife, b *[8 * slotTargetSize]byte, deadline int64) int64 {
	s0, _ := slotTarget(b[0*slotTargetSize:])
	s1, _ := slotTarget(b[1*slotTargetSize:])
	s2, _ := slotTarget(b[2*slotTargetSize:])
	s3, _ := slotTarget(b[3*slotTargetSize:])
	s4, _ := slotTarget(b[4*slotTargetSize:])
	s5, _ := slotTarget(b[5*slotTargetSize:])
	s6, _ := slotTarget(b[6*slotTargetSize:])
	s7, _ := slotTarget(b[7*slotTargetSize:])
	if max(s0, s1, s2, s3, s4, s5, s6, s7) >= uint64(len(slots)) {
		return renewEach(slots, b[:], deadline)
	}
	h0, h1, h2, h3, h4, h5, h6, h7 := &slots[s0], &slots[s1], &slots[s2], &slots[s3], &slots[s4], &slots[s5], &slots[s6], &slots[s7]
	n0, n1, n2, n3, n4, n5, n6, n7 := h0.nonce, h1.nonce, h2.nonce, h3.nonce, h4.nonce, h5.nonce, h6.nonce, h7.nonce
	return h0.renew(n0, b[0*slotTargetSize:], deadline) + h1.renew(n1, b[1*slotTargetSize:], deadline) +
		h2.renew(n2, b[2*slotTargetSize:], deadline) + h3.renew(n3, b[3*slotTargetSize:], deadline) +
		h4.renew(n4, b[4*slotTargetSize:], deadline) + h5.renew(n5, b[5*slotTargetSize:], deadline) +
		h6.renew(n6, b[6*slotTargetSize:], deadline) + h7.renew(n7, b[7*slotTargetSize:], deadline)
}

// renewEach renews any number of targets, in slots that may not be there.
func renewEach(slots []hotLife, targets []byte, deadline int64) (renewed int64) {
	for ; len(targets) > 0; targets = targets[slotTargetSize:] {
		if slot, _ := slotTarget(targets); slot < uint64(len(slots)) {
			h := &slots[slot]
			renewed += h.renew(h.nonce, targets, deadline)
		}
	}
	return renewed
}

// renew moves the deadline, never backwards, if the nonce that h holds is the
// target's, and returns how many it moved.
func (h *hotLife) renew(held int64, target []byte, deadline int64) int64 {
	if _, nonce := slotTarget(target); nonce != held || held == 0 {
		return 0
	}
	h.deadline = max(h.deadline, deadline)
	return 1
}

func slotTarget(b []byte) (slot uint64, nonce int64) {
	_ = b[slotTargetSize-1]
	return uint64(binary.LittleEndian.Uint32(b)), int64(binary.LittleEndian.Uint64(b[4:]))
}

// renew moves a deadline, never backwards. The heap learns of it when the old
// deadline surfaces. A deadline that has passed but was not reaped still counts:
// the blocks are still here.
func (t *Table) renew(i int32, deadline int64) {
	h := &t.hot[i]
	if h.nonce == 0 {
		return // not granted yet, or of a fixed deadline
	}
	if t.maxLife > 0 {
		deadline = min(deadline, t.limit(&t.cold[i]))
	}
	if deadline > h.deadline || injected&faultXSHORT != 0 {
		h.deadline = deadline
	}
	t.stats.Renewals++
}

// readComplete counts a reader of the life that the message names.
func (t *Table) readComplete(at int64, sender string, payload []byte) error {
	exact, hasNonce := parseWithNonce(payload)
	var other bool // a life with another nonce
	if hasNonce {
		if newest := t.newest(exact.Request); newest != none {
			if i := t.findFrom(newest, exact.Nonce); i != none {
				t.stats.ReadCompletes++
				t.cold[i].proven = true
				t.count(at, i, sender, exact.Readers)
				return nil
			}
			other = true
		}
	}
	plain, hasPlain := parseWithoutNonce(payload)
	if !hasNonce && !hasPlain {
		return malformed(payload, "want <request>:<readers> or <request>:<readers>:<nonce>")
	}
	t.stats.ReadCompletes++
	if hasPlain {
		if newest := t.newest(plain.Request); newest != none {
			t.countNonceless(at, newest, sender, plain.Readers)
			return nil
		}
	}
	if other {
		t.stats.StaleReadCompletes++
		if f := t.trace.StaleReadComplete; f != nil {
			f(sender, Key{string(exact.Request), exact.Nonce})
		}
		return nil
	}
	t.stats.UnmatchedReadCompletes++
	switch key := (Key{string(exact.Request), exact.Nonce}); {
	case hasNonce && len(payload) <= t.maxSize:
		if _, ok := t.spent[key]; !ok {
			t.stats.DroppedReadCompletes += t.early.add(at, key, sender, exact.Readers)
		}
	case hasNonce: // no life with an id of this length will come
		t.drop(key)
	default: // late: nobody has read what is not here yet
		t.drop(Key{string(plain.Request), 0})
	}
	return nil
}

// drop counts a read-complete that no lease was or will be here for.
func (t *Table) drop(k Key) {
	t.stats.DroppedReadCompletes++
	if f := t.trace.LateReadComplete; f != nil {
		f(k, 1)
	}
}

// countNonceless counts a reader that did not say which life it read. While only
// one is exported it must be that one; of several any guess could free blocks
// under a reader, so the leases run out instead. Before export nobody can have
// read: a message that comes then is of an earlier life of the id.
func (t *Table) countNonceless(at int64, newest int32, sender string, n int) {
	exported := int32(none)
	for i := newest; i != none; i = t.cold[i].older {
		if t.exported(&t.cold[i]) || injected&faultM6 != 0 {
			if exported != none {
				t.stats.RefusedReadCompletes++
				return
			}
			exported = i
		}
	}
	if exported == none {
		t.stats.RefusedReadCompletes++
		return
	}
	if t.hasSlot(exported) {
		t.stats.NoncelessReadCompletes++
	}
	if injected&faultM6 != 0 {
		t.cold[exported].proven = true
	}
	t.count(at, exported, sender, n)
}

func (t *Table) hasSlot(i int32) bool { return int(i) < t.slots.Len() }

func (t *Table) count(at int64, i int32, sender string, n int) {
	c := &t.cold[i]
	if c.readers == nil {
		if n == 1 && t.exported(c) && injected == 0 {
			t.endRead(at, i) // its only reader
			return
		}
		c.readers = &readers{}
		if injected&faultXSEEN != 0 {
			c.readers = t.faults.seen(t, c.request)
		}
	}
	if !c.readers.add(sender, n) {
		t.stats.DuplicateReadCompletes++
	}
	t.endIfRead(at, i)
}

// endIfRead ends a life that all its readers are done with. A life that is not
// known to be exported waits for its grant.
func (t *Table) endIfRead(at int64, i int32) {
	c := &t.cold[i]
	if c.readers != nil && c.readers.done() && t.exported(c) {
		t.endRead(at, i)
	}
}

func (t *Table) exported(c *coldLife) bool { return c.granted && c.export || c.proven }

func (t *Table) endRead(at int64, i int32) {
	c := &t.cold[i]
	if !c.granted {
		t.spent[Key{c.request, c.nonce}] = struct{}{}
	}
	t.end(at, i, ReasonRead)
}

// end ends a life: first its slot shows 0, only then is it reported.
func (t *Table) end(at int64, i int32, reason Reason) {
	c := &t.cold[i]
	if t.hasSlot(i) {
		t.faults.zero(t, i, c.nonce)
	} else {
		t.free = append(t.free, i)
	}
	t.unlink(i)
	e := Ended{c.request, c.nonce, reason}
	t.ended = append(t.ended, e)
	switch reason {
	case ReasonRead:
		t.stats.Read++
	case ReasonExpired:
		t.stats.Expired++
	case ReasonAborted:
		t.stats.Aborted++
	}
	t.stats.Live--
	var age, left int64
	if c.granted {
		t.granted--
		age, left = at-c.since, t.hot[i].deadline-at
		t.measure(reason, time.Duration(age), time.Duration(left))
	}
	if injected != 0 {
		t.faults.remember(t, at, i)
	}
	t.hot[i] = hotLife{}
	*c = coldLife{gen: c.gen + 1}
	t.tidy()
	if f := t.trace.Ended; f != nil {
		f(e, time.Duration(age), time.Duration(left))
	}
}

// measure takes a granted life that ended into the histograms.
func (t *Table) measure(reason Reason, age, left time.Duration) {
	t.stats.Held[reason].Observe(age.Seconds(), leaseSeconds[:])
	if reason == ReasonRead {
		t.stats.Margin.Observe(max(left, 0).Seconds(), leaseSeconds[:])
	}
}

// tidy drops what ended leases left behind: of the heap and of the grants when
// it is the majority, and from the front of the grants always, so that the first
// one lives.
func (t *Table) tidy() {
	if len(t.due) > 2*t.granted+64 {
		t.refresh()
	}
	g := &t.grants
	for g.first < len(g.list) && !t.current(g.list[g.first].index, g.list[g.first].gen) {
		g.first++
	}
	if len(g.list) > 2*t.granted+64 || g.first == len(g.list) {
		live := slices.DeleteFunc(g.list, func(g grant) bool { return !t.current(g.index, g.gen) })
		if *g = (grants{list: live}); cap(live) > 4*len(live)+256 {
			g.list = slices.Clone(live)
		}
	}
}

// current reports whether the life of this generation is here and granted.
func (t *Table) current(index int32, gen uint32) bool {
	c := &t.cold[index]
	return c.gen == gen && c.granted
}

// refresh drops the heap's entries of ended leases and brings all others up to
// date.
func (t *Table) refresh() {
	t.due.refresh(func(d *due) bool {
		d.at = t.hot[d.index].deadline
		return t.current(d.index, d.gen)
	})
}

// settle brings the first entry of the heap up to date and reports whether there
// is one.
func (t *Table) settle() bool {
	moved := 0
	for len(t.due) > 0 {
		d := t.due[0]
		switch {
		case !t.current(d.index, d.gen):
			t.due.pop()
		case t.hot[d.index].deadline != d.at && injected&faultXREAP == 0:
			if moved++; moved > 64+len(t.due)/64 {
				t.refresh() // cheaper than to move so many one by one
				continue
			}
			t.due[0].at = t.hot[d.index].deadline
			t.due.down(0)
		default:
			return true
		}
	}
	return false
}

// Reap ends every lease whose deadline is not after now, and returns how many
// that were. When nothing is due it looks at one entry. Call it last in a step:
// a heartbeat that waited out a long forward pass still saves its lease.
func (t *Table) Reap(now time.Time) int {
	at := t.at(now)
	if injected != 0 {
		t.faults.lateFaults(t)
	}
	t.stats.DroppedReadCompletes += t.early.expire(at)
	n := 0
	for len(t.due) > 0 && t.due[0].at <= at && t.settle() && t.due[0].at <= at {
		i := t.due[0].index
		t.due.pop()
		t.end(at, i, ReasonExpired)
		n++
	}
	return n
}

// NextDeadline is when the first lease is due, false when none has a deadline.
func (t *Table) NextDeadline() (time.Time, bool) {
	if !t.settle() {
		return time.Time{}, false
	}
	return t.epoch.Add(time.Duration(t.due[0].at)), true
}

// Ended appends the lives that ended since the last call. Their slots are 0, so
// it is safe to report them.
func (t *Table) Ended(dst []Ended) []Ended {
	dst = append(dst, t.ended...)
	clear(t.ended) // lets go of the ids
	t.ended = t.ended[:0]
	if cap(t.ended) > 1024 {
		t.ended = nil
	}
	return dst
}

// Len is the number of lives, admitted or granted.
func (t *Table) Len() int { return int(t.stats.Live) }

// Stats is a snapshot of the counters. It looks at no lease but the oldest.
func (t *Table) Stats() TableStats {
	s := t.stats
	slotless := max(len(t.hot)-t.slots.Len(), 0) - len(t.free)
	s.FreeSlots = int64(t.slots.Len()+slotless) - s.Live
	if g := t.grants; len(g.list) > 0 {
		s.OldestAge = max(time.Duration(t.last-t.cold[g.list[g.first].index].since), 0)
	}
	return s
}
