package lease

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// world is one owner and two reader engines with their memory, their ranks and
// the network between them, driven in any order: ranks lag behind their
// scheduler, block READs see every block at a moment of its own, slot READs see
// their slots at any later moment, notifications are lost, repeated and
// reordered, engines restart, ids are used again. It keeps its own naive books,
// and a violation of one of the properties of protocol-check.md is a panic with
// a violation.
type world struct {
	chooser
	wrong   string // a fault of what surrounds this package: M10, XEXP1 or XFORCE
	now     time.Time
	geo     geometry
	owner   *ownerSim
	readers []*readerSim
	wire    []message
	lives   []*modelLife
	byKey   map[Key]*modelLife
	content int64
	epochs  int
	steps   int              // events that did something
	seen    map[string]int   // what happened, so that no run is vacuous
	loose   map[rankKey]bool // lives that a read-complete without a nonce came for while they were granted: it may be an earlier life's
}

type rankKey struct {
	rank int
	Key
}

// chooser makes the decisions: rapid's in the model test, a seeded one for
// mutants.
type chooser interface {
	choose(n int, what string) int
}

type seeded struct{ *rand.Rand }

func (s seeded) choose(n int, _ string) int { return s.IntN(n) }

// geometry says which owner ranks a reader rank reads; readersOf an owner rank
// is the N of its read-completes.
type geometry struct {
	name    string
	ranks   int
	reads   [][]int // by reader rank
	readers int
}

var geometries = []geometry{
	{"one reader rank reads two owner ranks", 2, [][]int{{0, 1}}, 1},
	{"two reader ranks read one owner rank each", 2, [][]int{{0}, {1}}, 1},
	{"two reader ranks read the same owner rank", 1, [][]int{{0}, {0}}, 2},
}

type violation struct{ property, detail string }

func (v violation) String() string { return v.property + ": " + v.detail }

func violate(property, format string, args ...any) {
	panic(violation{property, fmt.Sprintf(format, args...)})
}

func (w *world) must(err error, property, what string) {
	if err != nil {
		violate(property, "%s: %v", what, err)
	}
}

// modelLife is what the world knows of a life.
type modelLife struct {
	key      Key
	slot     int
	content  int64
	epoch    int
	blocks   []int // at finish
	exported bool
	revoked  bool
	refused  map[int]bool // by these owner ranks, at its admission
	told     bool         // the scheduler knows that
	freed    bool
	ended    map[int]Reason    // by owner rank
	said     []map[string]bool // senders of read-completes, by owner rank
	params   *Params
	reader   *readerSim
}

type message struct {
	rank, epoch int
	sender      string
	payload     []byte
}

const (
	simBlocks = 4
	simSlots  = 2
	simLocal  = 3
)

// ownerSim is the owning engine.
type ownerSim struct {
	w       *world
	sched   *Scheduler
	ranks   []*ownerRank
	free    []int
	held    map[Key][]int
	running map[string]*ownerRequest
	writes  []write
	drained bool
}

type ownerRequest struct {
	id       string
	life     *modelLife
	blocks   []int // nil while preempted
	turn     int   // how often it was scheduled
	prefills int   // ranks that have written the bytes of this turn
}

type write struct {
	request *ownerRequest
	turn    int
	block   int
	content int64
	last    bool
}

type ownerRank struct {
	*Table
	cells   []int64
	memory  []int64
	todo    []ownerWork
	results []Result
	traced  traced
}

// traced is what the hooks were told.
type traced struct {
	granted, ended         int64
	renewed, missed, stale int64
	late                   int64
	open                   map[string]bool // fetches
}

func (c *traced) table() TableTrace {
	return TableTrace{
		Granted:           func(Grant) { c.granted++ },
		Heartbeat:         func(_ string, renewed, missed int) { c.renewed += int64(renewed); c.missed += int64(missed) },
		Ended:             func(Ended, time.Duration, time.Duration) { c.ended++ },
		StaleReadComplete: func(string, Key) { c.stale++ },
		LateReadComplete:  func(_ Key, senders int) { c.late += int64(senders) },
	}
}

// agrees compares what the hooks were told with what was counted.
func (c *traced) agrees(st TableStats) bool {
	return c.granted == st.Granted && c.ended == st.Read+st.Expired+st.Aborted && c.renewed == st.Renewals &&
		c.missed == st.UnknownRenewals+st.StaleRenewals && c.stale == st.StaleReadCompletes && c.late == st.DroppedReadCompletes
}

// fetches has each fetch start, and then end once.
func (c *traced) fetches() SchedulerTrace {
	c.open = map[string]bool{}
	return SchedulerTrace{
		FetchStarted: func(p Pull) {
			if c.open[p.Request] {
				violate("P4", "fetch %q starts twice", p.Request)
			}
			c.open[p.Request] = true
		},
		FetchEnded: func(id string, cause Cause, err error) {
			if !c.open[id] || (cause == 0) != (err == nil) || CauseOf(err) != cause {
				violate("P4", "fetch %q ends by %v, %v; open: %v", id, cause, err, c.open)
			}
			delete(c.open, id)
		},
	}
}

type ownerWork struct {
	plan   Plan
	writes []write
}

func newWorld(c chooser, wrong string) *world {
	w := &world{chooser: c, wrong: wrong, now: t0, byKey: map[Key]*modelLife{}, seen: map[string]int{}, loose: map[rankKey]bool{}}
	w.geo = geometries[c.choose(len(geometries), "geometry")]
	w.startOwner()
	for i := range 2 {
		w.readers = append(w.readers, &readerSim{w: w, name: fmt.Sprint("D", i), legacy: i == 1 && c.choose(4, "legacy") == 0})
		w.readers[i].start()
	}
	return w
}

func (w *world) startOwner() {
	w.epochs++
	s, err := NewScheduler(SchedulerConfig{
		Config: Config{Duration: 30 * time.Second, DecoderTTL: time.Minute, Slots: simSlots},
		Engine: "P", Host: "p", Port: 1, Ranks: w.geo.ranks, TPSize: w.geo.ranks, Blocks: simBlocks, Seed: uint64(w.epochs)*1000 + uint64(w.choose(100, "seed")) + 1,
	})
	w.must(err, "setup", "owner")
	o := &ownerSim{w: w, sched: s, held: map[Key][]int{}, running: map[string]*ownerRequest{}}
	for b := range simBlocks {
		o.free = append(o.free, b)
	}
	for range w.geo.ranks {
		r := &ownerRank{cells: make([]int64, simSlots), memory: make([]int64, simBlocks)}
		r.Table, err = NewTable(TableConfig{Extension: 20 * time.Second, Slots: NewSlots(r.cells), MaxEarly: 3, EarlyTTL: 20 * time.Second, Trace: r.traced.table()})
		w.must(err, "setup", "table")
		o.ranks = append(o.ranks, r)
	}
	w.owner = o
}

// take hands out a block, which nobody may still hold (P2, P6).
func (o *ownerSim) take() int {
	i := o.w.choose(len(o.free), "block")
	b := o.free[i]
	o.free = slices.Delete(o.free, i, i+1)
	for _, l := range o.w.lives {
		if l.epoch != o.w.epochs || !slices.Contains(l.blocks, b) {
			continue
		}
		for i, r := range o.ranks {
			if l.exported && r.find(l.key.Request, l.key.Nonce) != none {
				violate("P2", "block %d of %v is handed out while rank %d holds the lease", b, l.key, i)
			}
			if l.slot != NoSlot && r.cells[l.slot] == l.key.Nonce {
				violate("P6", "block %d of %v is handed out while its nonce shows on rank %d", b, l.key, i)
			}
		}
	}
	return b
}

func (o *ownerSim) schedule(q *ownerRequest) {
	n := 1 + o.w.choose(2, "blocks")
	if len(o.free) < n {
		return
	}
	q.blocks, q.prefills, q.turn = nil, 0, q.turn+1
	for range n {
		q.blocks = append(q.blocks, o.take())
	}
	o.w.must(o.sched.OnBlocksAllocated(o.w.now, q.id, decode, [][]int{q.blocks}), "P4", "allocate")
	if q.life == nil {
		l := o.sched.lives[q.id]
		o.w.content++
		q.life = &modelLife{key: Key{q.id, l.nonce}, slot: l.slot, content: o.w.content, epoch: o.w.epochs, ended: map[int]Reason{}, refused: map[int]bool{}}
		for range o.ranks {
			q.life.said = append(q.life.said, map[string]bool{})
		}
		o.w.checkSlot(q.life)
		o.w.lives = append(o.w.lives, q.life)
		o.w.byKey[q.life.key] = q.life
	}
	for i, b := range q.blocks {
		o.writes = append(o.writes, write{q, q.turn, b, q.life.content, i == n-1})
	}
}

// checkSlot is P3: a slot is lent to one life at a time.
func (w *world) checkSlot(l *modelLife) {
	for _, old := range w.lives {
		if l.slot != NoSlot && old.slot == l.slot && old.epoch == w.epochs && len(old.ended) < w.geo.ranks {
			violate("P3", "slot %d of %v is lent to %v, and not every rank has ended the first", l.slot, old.key, l.key)
		}
	}
}

func (o *ownerSim) newRequest() {
	id := fmt.Sprint("r", o.w.choose(3, "id"))
	if o.running[id] != nil || o.drained {
		return
	}
	q := &ownerRequest{id: id}
	o.w.must(o.sched.OnNewRequest(o.w.now, id, decode), "P4", "new request")
	if o.schedule(q); q.life != nil {
		o.w.steps++
		o.running[id] = q
	}
}

// pick chooses a running request, nil if there is none that fits.
func (o *ownerSim) pick(fits func(*ownerRequest) bool) *ownerRequest {
	var ids []string
	for id, q := range o.running {
		if fits(q) {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	slices.Sort(ids)
	return o.running[ids[o.w.choose(len(ids), "running")]]
}

func (o *ownerSim) preempt() {
	q := o.pick(func(q *ownerRequest) bool { return q.blocks != nil })
	if q == nil {
		return
	}
	o.w.must(o.sched.Preempted(o.w.now, q.id), "P4", "preempt")
	o.free = append(o.free, q.blocks...)
	o.w.steps++
	q.blocks = nil
	o.writes = slices.DeleteFunc(o.writes, func(x write) bool { return x.request == q })
	o.w.seen["preempted"]++
}

func (o *ownerSim) reschedule() {
	if q := o.pick(func(q *ownerRequest) bool { return q.blocks == nil }); q != nil {
		o.schedule(q)
	}
}

func (o *ownerSim) step() {
	work := ownerWork{o.sched.BuildPlan(o.w.now), o.writes}
	if !work.plan.Empty() {
		o.w.steps++
	}
	o.writes = nil
	for _, r := range o.ranks {
		r.todo = append(r.todo, work)
	}
}

// run is one step of a rank: the plan, the forward pass, then reap and report.
func (o *ownerSim) run(i int) {
	r, w := o.ranks[i], o.w
	var refused []Ended
	if len(r.todo) > 0 {
		w.steps++
		work := r.todo[0]
		r.todo = r.todo[1:]
		for _, a := range work.plan.Admit {
			if w.choose(60, "refuse") == 0 {
				// As rdma.Worker does with an admission that its table refuses.
				refused = append(refused, Ended{a.Request, a.Nonce, ReasonAborted})
				w.byKey[Key{a.Request, a.Nonce}].refused[i] = true
				w.seen["refused"]++
				continue
			}
			w.must(r.Admit(w.now, a), "P3", "admit")
		}
		for _, g := range work.plan.Grant {
			if r.find(g.Request, g.Nonce) == none && w.byKey[Key{g.Request, g.Nonce}].refused[i] {
				refused = append(refused, Ended{g.Request, g.Nonce, ReasonAborted})
				continue
			}
			w.must(r.Grant(w.now, g), "P4", "grant")
		}
		for _, k := range work.plan.Abort {
			w.must(r.Abort(w.now, k), "P4", "abort")
		}
		for _, x := range work.writes {
			r.memory[x.block] = x.content
			if x.last && x.request.turn == x.turn {
				x.request.prefills++
			}
		}
	}
	r.Reap(w.now)
	ended := r.Ended(nil)
	for _, e := range ended {
		l := w.byKey[Key{e.Request, e.Nonce}]
		if l == nil {
			violate("P4", "rank %d ends %v, which never was", i, e)
		}
		if _, twice := l.ended[i]; twice {
			violate("P4", "rank %d ends %v twice", i, e)
		}
		l.ended[i] = e.Reason
		w.seen["ended "+e.Reason.String()]++
		if e.Reason == ReasonRead {
			if !l.exported {
				violate("P7", "rank %d reports %v as read before it is exported", i, l.key)
			}
			if len(l.said[i]) < w.geo.readers && !w.loose[rankKey{i, l.key}] {
				violate("P5", "rank %d ends %v as read by %d of %d readers", i, l.key, len(l.said[i]), w.geo.readers)
			}
		}
		if e.Reason == ReasonAborted && l.exported && !l.revoked {
			violate("P5", "rank %d aborts %v, which nobody revoked", i, l.key)
		}
	}
	for _, e := range refused {
		w.byKey[Key{e.Request, e.Nonce}].ended[i] = ReasonAborted
	}
	ended = append(ended, refused...)
	r.results = append(r.results, Result{Rank: i, Sent: ended})
}

func (o *ownerSim) report(i int) {
	r := o.ranks[i]
	if len(r.results) == 0 {
		return
	}
	o.w.steps++
	results := r.results
	r.results = nil
	for _, res := range results {
		for _, e := range res.Sent {
			if l := o.w.byKey[Key{e.Request, e.Nonce}]; len(l.refused) > 0 && !l.exported && e.Reason == ReasonAborted {
				l.told = true
			}
		}
	}
	for _, f := range o.sched.OnResults(o.w.now, results).Free {
		k := Key{f.Request, f.Nonce}
		blocks, ok := o.held[k]
		if !ok {
			violate("P4", "%v is freed, and nobody waited for it or it was freed before", k)
		}
		if !slices.Equal(blocks, slices.Concat(f.Blocks...)) && injected&faultXEARLY == 0 {
			violate("P4", "%v frees blocks %v, it holds %v", k, f.Blocks, blocks)
		}
		delete(o.held, k)
		o.free = append(o.free, blocks...)
		o.w.byKey[k].freed = true
	}
}

func (o *ownerSim) finish(st Status) {
	q := o.pick(func(q *ownerRequest) bool {
		// Params leave when every rank has written its bytes.
		return st == StatusAborted || q.blocks != nil && (q.prefills == len(o.ranks) || o.w.wrong == "XEXP1")
	})
	if q == nil {
		return
	}
	o.w.steps++
	p, delayed, err := o.sched.RequestFinished(o.w.now, q.id, st, [][]int{q.blocks}, 7)
	o.w.must(err, "P4", "finish")
	delete(o.running, q.id)
	o.writes = slices.DeleteFunc(o.writes, func(x write) bool { return x.request == q })
	q.life.blocks = q.blocks
	if delayed {
		o.held[q.life.key] = q.blocks
	} else {
		o.free = append(o.free, q.blocks...)
	}
	switch {
	case st == StatusAborted && p != nil || st != StatusAborted && (p == nil) != q.life.told:
		violate("P4", "finish of %q, refused: %v, gives params %v", q.id, q.life.told, p)
	case p != nil:
		q.life.exported, q.life.params = true, p
		o.w.seen["exported"]++
	}
	if !o.sched.lives[q.id].isOf(q.life.key) && !delayed && q.life.ended != nil {
		for i := range o.ranks { // no rank heard of it
			q.life.ended[i] = ReasonAborted
		}
	}
}

// isOf reports whether a life with this key is still known.
func (l *life) isOf(k Key) bool {
	for ; l != nil; l = l.older {
		if l.nonce == k.Nonce {
			return true
		}
	}
	return false
}

func (o *ownerSim) revoke() {
	id := fmt.Sprint("r", o.w.choose(3, "id"))
	if o.sched.Revoke(o.w.now, id) != nil {
		return
	}
	for _, l := range o.w.lives {
		if l.key.Request == id && l.exported && l.epoch == o.w.epochs {
			l.revoked = true
		}
	}
	o.w.steps++
	o.w.seen["revoked"]++
}

// force is an engine that frees leased blocks without revoking them.
func (o *ownerSim) force() {
	for k, blocks := range o.held {
		if o.w.wrong == "XFORCE" && len(o.held) == 1 {
			o.free = append(o.free, blocks...)
			o.held[k] = nil
		}
	}
}

// deliver hands a message to its rank, and may keep it to come again.
func (w *world) deliver() {
	if len(w.wire) == 0 {
		return
	}
	w.steps++
	i := w.choose(len(w.wire), "message")
	m := w.wire[i]
	switch w.choose(8, "fate") {
	case 0: // lost
		w.wire = slices.Delete(w.wire, i, i+1)
		return
	case 1, 2: // comes again
	default:
		w.wire = slices.Delete(w.wire, i, i+1)
	}
	if rc, err := ParseReadComplete(m.payload); err == nil && rc.Nonce <= MaxReaders {
		plain, _ := parseWithoutNonce(m.payload)
		for i := w.owner.ranks[m.rank].newest(plain.Request); i != none; i = w.owner.ranks[m.rank].cold[i].older {
			if c := w.owner.ranks[m.rank].cold[i]; c.granted {
				w.loose[rankKey{m.rank, Key{c.request, c.nonce}}] = true
			}
		}
	}
	// A message to a rank that restarted arrives at its successor.
	w.must(w.owner.ranks[m.rank].Notify(w.now, m.sender, m.payload), "P4", "notify")
}

func (w *world) restartOwner() {
	if w.choose(25, "restart?") != 0 {
		return
	}
	memory := w.owner.ranks
	w.startOwner()
	for i, r := range w.owner.ranks {
		copy(r.memory, memory[i].memory) // whatever was there
	}
	w.steps++
	w.seen["owner restarts"]++
}

// readerSim is a reading engine.
type readerSim struct {
	w        *world
	name     string
	legacy   bool // as vLLM today: verifies nothing and shows no nonce
	life     int  // restarts
	traced   *traced
	told     map[Peer]time.Time // of the last heartbeat
	sched    *Scheduler
	ranks    []*readerRank
	free     []int
	requests map[string]*readerRequest
}

type readerRank struct {
	at      int
	agent   string
	pulls   *Pulls
	memory  map[[2]int]int64 // by local block and owner rank
	todo    []Plan
	reads   []*blockRead
	checks  []*slotRead
	results []Result
}

type readerRequest struct {
	id     string
	life   *modelLife
	params *Params // as the router brought them: at the owner's address, or where nobody is
	blocks []int
	ended  bool // Run or Fail was given
	doomed bool // it cannot be verified, so nothing is read
}

type blockRead struct {
	pull    Pull
	rank    int
	sampled int
	zombie  bool
}

type slotRead struct {
	batch CheckBatch
	cells []int64
}

func (d *readerSim) start() {
	d.life++
	d.traced = &traced{}
	verification := VerifyAll
	if d.legacy {
		verification = VerifyNone
	}
	s, err := NewScheduler(SchedulerConfig{
		Config: Config{Duration: 30 * time.Second, DecoderTTL: time.Minute, Verification: verification, Slots: 1},
		Engine: d.name, Host: "d", Port: 1, Ranks: len(d.w.geo.reads), Blocks: simLocal, Seed: 5, Trace: d.traced.fetches(),
	})
	d.w.must(err, "setup", "reader")
	d.sched, d.requests, d.ranks, d.free, d.told = s, map[string]*readerRequest{}, nil, nil, map[Peer]time.Time{}
	for b := range simLocal {
		d.free = append(d.free, b)
	}
	for i := range d.w.geo.reads {
		d.ranks = append(d.ranks, &readerRank{at: i, agent: fmt.Sprintf("%s.%d#%d", d.name, i, d.life), pulls: NewPulls(), memory: map[[2]int]int64{}})
	}
}

// accept takes an offer to a new local request. A life belongs to one reader,
// which may ask for it more than once.
func (d *readerSim) accept() {
	var offers []*modelLife
	for _, l := range d.w.lives {
		if l.params != nil && (l.reader == nil || l.reader == d) {
			offers = append(offers, l)
		}
	}
	id := fmt.Sprint("q", d.w.choose(2, "local id"))
	if len(offers) == 0 || d.requests[id] != nil {
		return
	}
	// Mostly the last ones: old offers are dead.
	l := offers[max(0, len(offers)-1-d.w.choose(3, "offer"))]
	q := &readerRequest{id: id, params: l.params}
	if d.w.choose(12, "elsewhere") == 0 {
		q.params = l.params.Clone()
		q.params.RemoteHost = "elsewhere"
		d.w.seen["elsewhere"]++
	}
	if d.sched.OnNewRequest(d.w.now, id, q.params) != nil {
		return // an earlier request of the id is being settled
	}
	d.w.steps++
	l.reader = d
	q.life = l
	d.requests[id] = q
}

func (d *readerSim) pick(fits func(*readerRequest) bool) *readerRequest {
	var ids []string
	for id, q := range d.requests {
		if fits(q) {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	slices.Sort(ids)
	return d.requests[ids[d.w.choose(len(ids), "request")]]
}

func (d *readerSim) allocate() {
	q := d.pick(func(q *readerRequest) bool { return q.blocks == nil && !q.ended })
	if q == nil {
		return
	}
	n := countBlocks(q.life.params.RemoteBlockIDs)
	if len(d.free) < n {
		return
	}
	if d.w.choose(8, "full hit") == 0 {
		n = 0
	}
	blocks := slices.Clone(d.free[:n])
	if err := d.sched.OnBlocksAllocated(d.w.now, q.id, q.params, [][]int{blocks}); err != nil {
		violate("P4", "pull: %v", err)
	}
	d.w.steps++
	d.free = d.free[n:]
	q.doomed = !d.legacy && q.life.params.Lease == nil
	if q.blocks = blocks; n == 0 {
		q.ended = true
		d.w.seen["full hits"]++
	}
}

// pullAgain is what an engine must not do while a READ is active (XZOMBIE).
func (d *readerSim) pullAgain() {
	q := d.pick(func(q *readerRequest) bool {
		f := d.sched.fetches[q.id]
		return f != nil && f.phase == fetchReading
	})
	if q == nil {
		return
	}
	if d.sched.OnBlocksAllocated(d.w.now, q.id, q.params, [][]int{q.blocks}) == nil {
		violate("P1", "%s pulls %q again over its own active READ", d.name, q.id)
	}
}

func (d *readerSim) step() {
	p := d.sched.BuildPlan(d.w.now)
	if !p.Empty() {
		d.w.steps++
	}
	d.checkHeartbeat(p)
	for _, rel := range p.Release {
		for _, q := range d.requests {
			if key := (Key{rel.RemoteRequest, rel.Nonce}); q.life.key == key && !q.ended && !q.doomed && rel.Nonce != 0 {
				violate("P5", "%s releases %v, which %q needs", d.name, key, q.id)
			}
		}
		for _, r := range d.ranks {
			for _, b := range r.reads {
				if b.pull.Request == rel.Request && !b.zombie {
					violate("P5", "%s releases %q while its READ of rank %d is active", d.name, rel.Request, b.rank)
				}
			}
		}
	}
	for _, r := range d.ranks {
		r.todo = append(r.todo, p)
	}
}

// checkHeartbeat compares a due heartbeat with the naive list of what has to be
// kept alive.
func (d *readerSim) checkHeartbeat(p Plan) {
	for _, h := range p.Heartbeat {
		if last, known := d.told[h.Peer]; known && !d.w.now.Before(last) && d.w.now.Sub(last) < 5*time.Second {
			violate("P5", "%s heartbeats %s again after %v", d.name, h.Peer.Host, d.w.now.Sub(last))
		}
		d.told[h.Peer] = d.w.now
		var want, got []string
		for _, q := range d.requests {
			if !q.ended && !q.doomed && q.params.Peer() == h.Peer {
				want = append(want, fmt.Sprint(targetOf(q.params)))
			}
		}
		for _, t := range h.Targets {
			got = append(got, fmt.Sprint(t))
		}
		slices.Sort(want)
		slices.Sort(got)
		if want = slices.Compact(want); !slices.Equal(want, got) {
			violate("P5", "%s heartbeats %v at %s, it waits for %v", d.name, got, h.Peer.Host, want)
		}
	}
}

// say sends a read-complete from a rank to an owner rank.
func (d *readerSim) say(r *readerRank, to int, request string, nonce int64) {
	shown := nonce
	if d.legacy {
		shown = 0
	}
	if l := d.w.byKey[Key{request, nonce}]; l != nil {
		l.said[to][r.agent] = true
	}
	n := d.w.geo.readers
	if d.w.wrong == "M10" {
		n = 1
	}
	d.w.wire = append(d.w.wire, message{to, d.w.epochs, r.agent, AppendReadComplete(nil, request, n, shown)})
}

// run is one step of a rank.
func (d *readerSim) run(i int) {
	r, w := d.ranks[i], d.w
	res := Result{Rank: i}
	if len(r.todo) > 0 {
		w.steps++
		p := r.todo[0]
		r.todo = r.todo[1:]
		for _, id := range p.Cancel {
			_ = r.pulls.Cancel(id) // unknown: it was reported before
		}
		for _, pl := range p.Read {
			pl = viaPlan(pl)
			if q := d.requests[pl.Request]; q != nil && pl.Peer != q.params.Peer() {
				violate("P5", "%s reads %q at %v, its params name %v", d.name, pl.Request, pl.Peer, q.params.Peer())
			}
			if pl.Peer.Host == "elsewhere" {
				res.Failed = append(res.Failed, Failure{Request: pl.Request, Cause: CauseHandshake, Message: "nobody is there"})
				continue
			}
			if err := r.pulls.Start(pl, w.geo.reads[i]); err != nil {
				res.Failed = append(res.Failed, Failure{Request: pl.Request, Cause: CauseOf(err), Message: err.Error()})
				continue
			}
			for _, from := range w.geo.reads[i] {
				r.reads = append(r.reads, &blockRead{pull: pl, rank: from})
			}
		}
		for _, h := range p.Heartbeat {
			if h.Peer.Host == "elsewhere" {
				continue
			}
			msg, _, err := AppendHeartbeat(nil, h.Targets, 0)
			w.must(err, "P4", "heartbeat")
			var bySlot []Target
			for _, t := range h.Targets {
				if t.Slot != NoSlot {
					bySlot = append(bySlot, t)
				}
			}
			if len(bySlot) == len(h.Targets) && w.choose(2, "HB2") == 0 {
				msg, _, err = AppendSlotHeartbeat(nil, bySlot, 0)
				w.must(err, "P4", "heartbeat")
			}
			for _, to := range w.geo.reads[i] {
				w.wire = append(w.wire, message{to, w.epochs, r.agent, msg})
			}
		}
		for _, rel := range p.Release {
			if rel.Peer.Host == "elsewhere" {
				continue
			}
			for _, to := range w.geo.reads[i] {
				d.say(r, to, rel.RemoteRequest, rel.Nonce)
			}
		}
	}
	for _, b := range r.pulls.NextChecks() {
		r.checks = append(r.checks, &slotRead{batch: b})
	}
	for _, f := range r.pulls.Finished(nil) {
		switch {
		case f.Settled:
			res.Settled = append(res.Settled, f.Pull.Request)
		case f.Cause != 0:
			res.Failed = append(res.Failed, Failure{Request: f.Pull.Request, Cause: f.Cause, Message: f.Err.Error(), Quarantined: f.Quarantined})
		default:
			res.Received = append(res.Received, f.Pull.Request)
		}
	}
	r.results = append(r.results, res)
}

// viaPlan copies a pull as a trip to another process does.
func viaPlan(p Pull) Pull {
	p.RemoteBlocks, p.LocalBlocks = cloneBlocks(p.RemoteBlocks), cloneBlocks(p.LocalBlocks)
	return p
}

// read moves one block READ on: a block arrives, or the READ ends.
func (d *readerSim) read(i int) {
	r, w := d.ranks[i], d.w
	if len(r.reads) == 0 {
		return
	}
	w.steps++
	k := w.choose(len(r.reads), "read")
	b := r.reads[k]
	remote, local := b.pull.RemoteBlocks[0], b.pull.LocalBlocks[0]
	if b.sampled < len(local) {
		r.memory[[2]int{local[b.sampled], b.rank}] = w.owner.ranks[b.rank].memory[remote[b.sampled]]
		b.sampled++
		return
	}
	r.reads = slices.Delete(r.reads, k, k+1)
	var err error
	if w.choose(20, "read fails") == 0 {
		err = ErrTransfer
	}
	_ = r.pulls.BlocksRead(b.pull.Request, b.rank, err)
}

// check moves one slot READ on: its slots are seen, or it ends.
func (d *readerSim) check(i int) {
	r, w := d.ranks[i], d.w
	if len(r.checks) == 0 {
		return
	}
	w.steps++
	k := w.choose(len(r.checks), "check")
	c := r.checks[k]
	if c.cells == nil {
		for _, slot := range c.batch.Slots {
			c.cells = append(c.cells, w.owner.ranks[c.batch.Rank].cells[slot])
		}
		return
	}
	r.checks = slices.Delete(r.checks, k, k+1)
	var err error
	if w.choose(30, "check fails") == 0 {
		err = ErrTransfer
	}
	w.must(r.pulls.Checked(c.batch, c.cells, err), "P4", "checked")
}

// giveUp is a rank's timeout of a pull whose READ is active.
func (d *readerSim) giveUp(i int) {
	r := d.ranks[i]
	if len(r.reads) > 0 && d.w.choose(6, "timeout") == 0 {
		_ = r.pulls.Fail(r.reads[0].pull.Request, ErrTimeout)
	}
}

func (d *readerSim) report(i int) {
	r, w := d.ranks[i], d.w
	results := r.results
	r.results = nil
	if len(results) > 0 {
		w.steps++
	}
	out := d.sched.OnResults(w.now, results)
	for _, id := range out.Run {
		q := d.requests[id]
		if q == nil || q.ended && len(q.blocks) > 0 {
			violate("P4", "%s runs %q, which does not wait", d.name, id)
		}
		q.ended = true
		if len(q.blocks) > 0 {
			w.seen["received"]++
			d.checkBytes(q)
		}
	}
	for _, f := range out.Fail {
		q := d.requests[f.Request]
		if q == nil || q.ended {
			violate("P4", "%s fails %q, which does not wait", d.name, f.Request)
		}
		q.ended = true
		w.seen["failed "+f.Cause.String()]++
		if f.Cause == CauseLapsed && len(q.life.ended) == 0 && q.life.epoch == w.epochs && !w.touchedEarly(q.life) {
			violate("P5", "%s finds %v lapsed, and no rank ended it", d.name, q.life.key)
		}
	}
	for _, st := range out.Settled {
		d.free = append(d.free, slices.Concat(st.Blocks...)...)
		if len(d.free) > simLocal {
			violate("P4", "%s has blocks twice: %v", d.name, d.free)
		}
		for _, rk := range d.ranks {
			for _, b := range rk.reads {
				if b.pull.Request == st.Request {
					violate("P1", "%s settles %q while rank %d still reads", d.name, st.Request, rk.at)
				}
			}
		}
		if q := d.requests[st.Request]; q != nil {
			q.blocks = nil // given back; it is not pulled again
		}
	}
}

// touchedEarly: the owner rank has ended it and not reported yet.
func (w *world) touchedEarly(l *modelLife) bool {
	for _, r := range w.owner.ranks {
		if r.find(l.key.Request, l.key.Nonce) == none {
			return true
		}
	}
	return false
}

// checkBytes is P1: what was received is what the life wrote, every byte.
func (d *readerSim) checkBytes(q *readerRequest) {
	if d.legacy {
		return
	}
	for _, r := range d.ranks {
		for _, from := range d.w.geo.reads[r.at] {
			for _, b := range q.blocks {
				if got := r.memory[[2]int{b, from}]; got != q.life.content {
					violate("P1", "%s received %q: block %d from rank %d holds content %d, want %d of %v", d.name, q.id, b, from, got, q.life.content, q.life.key)
				}
			}
		}
	}
}

// finish ends a request: after it ran or failed, or as an abort at any time.
func (d *readerSim) finish(abort bool) {
	q := d.pick(func(q *readerRequest) bool { return abort || q.ended })
	if q == nil {
		return
	}
	st := StatusStopped
	if abort {
		st = StatusAborted
	}
	_, delayed, err := d.sched.RequestFinished(d.w.now, q.id, st, [][]int{q.blocks}, 0)
	d.w.must(err, "P4", "reader finish")
	d.w.steps++
	delete(d.requests, q.id)
	if !delayed {
		d.free = append(d.free, q.blocks...)
	}
}

func (d *readerSim) restart() {
	if d.w.choose(25, "restart?") == 0 {
		d.start()
		d.w.seen["reader restarts"]++
	}
}

// act does one thing.
func (w *world) act() {
	o := w.owner
	d := w.readers[w.choose(len(w.readers), "reader")]
	i := w.choose(w.geo.ranks, "rank")
	j := w.choose(len(w.geo.reads), "reader rank")
	actions := []struct {
		weight int
		do     func()
	}{
		{8, o.newRequest}, {9, o.step}, {20, func() { o.run(i) }}, {12, func() { o.report(i) }},
		{12, func() { o.finish(StatusStopped) }}, {1, func() { o.finish(StatusAborted) }}, {1, o.preempt}, {3, o.reschedule}, {1, o.revoke}, {1, o.force},
		{14, w.deliver}, {1, w.restartOwner},
		{10, d.accept}, {10, d.allocate}, {1, d.pullAgain}, {10, d.step}, {25, func() { d.run(j) }}, {40, func() { d.read(j) }},
		{20, func() { d.check(j) }}, {1, func() { d.giveUp(j) }}, {15, func() { d.report(j) }}, {2, func() { d.finish(true) }}, {10, func() { d.finish(false) }}, {1, d.restart},
		{3, func() { w.now = w.now.Add(time.Duration(w.choose(9, "seconds")) * time.Second) }},
		{1, func() {
			w.now = w.now.Add(-2 * time.Second)
			for _, d := range w.readers {
				clear(d.told) // and each peer may be told once more
			}
		}},
	}
	total := 0
	for _, a := range actions {
		total += a.weight
	}
	n := w.choose(total, "action")
	for _, a := range actions {
		if n -= a.weight; n < 0 {
			a.do()
			return
		}
	}
}

// settle lets everything come to its end and checks that nothing is left (P4).
func (w *world) settle() {
	o := w.owner
	o.drained = true
	for len(o.running) > 0 {
		o.finish(StatusAborted)
	}
	o.step()
	for _, d := range w.readers {
		for len(d.requests) > 0 {
			d.finish(true)
		}
	}
	for round := 0; round < 60; round++ {
		for _, d := range w.readers {
			d.step()
			for i, r := range d.ranks {
				for len(r.todo) > 0 || len(r.reads) > 0 || len(r.checks) > 0 {
					d.run(i)
					d.read(i)
					d.check(i)
				}
				d.run(i)
				d.report(i)
			}
		}
	}
	for range 10 {
		w.now = w.now.Add(100 * time.Second)
		o.step()
		for i, r := range o.ranks {
			for len(r.todo) > 0 {
				o.run(i)
			}
			o.run(i)
			o.report(i)
		}
	}
	for _, d := range w.readers {
		d.step() // which forgets the peers
	}
	for i, r := range o.ranks {
		if r.Len() != 0 || r.byID.used != 0 || len(r.spent) != 0 || slices.ContainsFunc(r.cells, func(c int64) bool { return c != 0 }) {
			violate("P4", "rank %d is left with %d lives, spent %v, slots %v", i, r.Len(), r.spent, r.cells)
		}
	}
	for i, r := range o.ranks {
		if st := r.Stats(); injected == 0 && !r.traced.agrees(st) {
			violate("P4", "rank %d was told %+v and counts %+v", i, r.traced, st)
		}
	}
	st := o.sched.Stats()
	if st.PinnedBlocks != 0 || st.PinnedTokens != 0 {
		violate("P4", "the owner is left with pinned blocks, %+v", st)
	}
	if len(o.free) != simBlocks || st.FreeSlots != simSlots || len(o.sched.lives) != 0 || st.Running != 0 || st.Pinned != 0 {
		violate("P4", "the owner is left with free blocks %v, %+v", o.free, st)
	}
	for _, d := range w.readers {
		if len(d.traced.open) != 0 {
			violate("P4", "%s is left with fetches that started and did not end: %v", d.name, d.traced.open)
		}
		if len(d.free) != simLocal || len(d.sched.fetches) != 0 || len(d.sched.peers.byPeer)+len(d.sched.peers.leases) != 0 {
			violate("P4", "%s is left with free blocks %v, %d fetches, %d peers", d.name, d.free, len(d.sched.fetches), len(d.sched.peers.byPeer))
		}
		for _, r := range d.ranks {
			if r.pulls.Len() != 0 || len(r.pulls.posted) != 0 {
				violate("P4", "%s is left with pulls", d.name)
			}
		}
	}
}

// play runs a world of so many actions, and returns the violation if there was one.
func play(c chooser, actions int, wrong string) (w *world, v *violation) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case violation:
			v = &r
		default:
			panic(r)
		}
	}()
	w = newWorld(c, wrong)
	for range actions {
		w.act()
	}
	w.settle()
	return w, nil
}
