package rdmatest_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// simulation is a small fleet in virtual time, to which everything happens that the audit found wanting: requests that name a dead
// address, outages of a side channel, read-completes without a nonce that come late, admissions that a rank refuses, requests that
// share a lease, turns that are read back, and days in which nobody asks. A seed is a schedule.
type simulation struct {
	t       testing.TB
	rng     *rand.Rand
	now     time.Time
	network *rdmatest.Network
	owner   *simOwner
	readers []*simReader
	offers  []*offer
	tag     uint64
	away    bool // the owner's side channel
	events  simEvents
	seen    map[string]int
}

// simEvents says what may happen besides requests that are published, read and given up.
type simEvents struct{ addresses, days, late, outages, refusals, shared bool }

var everything = simEvents{true, true, true, true, true, true}

const simInterval = 5 * time.Second // of leases of 30 s

type simOwner struct {
	*virtual
	free    []int
	pinned  map[string]*offer // by request id
	squat   []lease.Key       // lives that only the rank knows
	squats  int64
	refused int
}

type offer struct {
	id        string
	tag       uint64
	block     int
	p         *lease.Params // as it was offered
	turn      bool
	disturbed bool // by an outage, a day, or a report that it was not meant to get
	reader    *simReader
}

type simReader struct {
	*virtual
	n        int
	requests map[string]*simRequest
	told     map[lease.Peer]time.Time // of the last heartbeat
	fresh    map[lease.Peer]bool      // connected since
}

type simRequest struct {
	*offer
	p         *lease.Params
	block     int // -1: queued
	since     time.Time
	elsewhere bool
}

func newSimulation(t testing.TB, seed uint64, events simEvents) *simulation {
	x := &simulation{t: t, rng: rand.New(rand.NewPCG(seed, 9)), now: time.Now(), network: rdmatest.NewNetwork(), events: events, seen: map[string]int{}}
	both := func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) {
		s.Bidirectional, s.Epoch, s.Seed, s.EngineTTL = true, rdma.Epoch(), seed+1, 0
	}
	x.owner = &simOwner{virtual: newVirtual(t, x.network, &x.now, "owner", both, func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.Slots = 5 }), pinned: map[string]*offer{}}
	for b := range blocks {
		x.owner.free = append(x.owner.free, b)
	}
	for i := range 2 {
		x.readers = append(x.readers, &simReader{virtual: newVirtual(t, x.network, &x.now, fmt.Sprint("reader-", i), both),
			requests: map[string]*simRequest{}, told: map[lease.Peer]time.Time{}, fresh: map[lease.Peer]bool{}})
	}
	return x
}

func (x *simulation) chance(n int) bool { return x.rng.IntN(n) == 0 }

// read runs one step of a reader and checks its plan: one heartbeat a peer and interval, and no release of what a request needs.
func (x *simulation) read(d *simReader) lease.Outcome {
	plan := d.sched.BuildPlan(x.now)
	for _, h := range plan.Heartbeat {
		last, known := d.told[h.Peer]
		if known && x.now.Sub(last) < simInterval && !d.fresh[h.Peer] {
			require.Fail(x.t, "E7", "%s heartbeats %s again after %s", d.name, h.Peer.Host, x.now.Sub(last))
		}
		d.told[h.Peer], d.fresh[h.Peer] = x.now, false
	}
	for _, r := range plan.Release {
		for id, q := range d.requests {
			require.False(x.t, r.Request != id && q.offer.p.Lease != nil && r.Nonce == q.offer.p.Lease.Nonce, "E6: %q is released while %q needs it", r.RemoteRequest, id)
		}
	}
	res, err := d.ranks[0].w.Step(x.now, plan)
	require.NoError(x.t, err)
	for _, c := range res.Connected {
		d.fresh[c.Peer] = true
	}
	return d.sched.OnResults(x.now, []lease.Result{res})
}

func (x *simulation) stepOwner() { x.carryOut(x.owner.sched.BuildPlan(x.now)) }

// carryOut is a step of the owner. It returns false if a part of the plan was refused.
func (x *simulation) carryOut(plan lease.Plan) bool {
	o := x.owner
	res, err := o.ranks[0].w.Step(x.now, plan)
	if err != nil {
		require.ErrorIs(x.t, err, lease.ErrInvalid)
	}
	for _, f := range o.sched.OnResults(x.now, []lease.Result{res}).Free {
		p := o.pinned[f.Request]
		require.NotNil(x.t, p, "%q is freed twice", f.Request)
		if f.Reason == lease.ReasonExpired && !p.disturbed && p.reader != nil {
			for id, q := range p.reader.requests {
				require.False(x.t, q.offer == p && !q.elsewhere && x.now.Sub(q.since) > simInterval && !p.turn, "E1, E4: the lease of %q expires while %q waits for it", f.Request, id)
			}
		}
		x.seen["ended "+f.Reason.String()]++
		delete(o.pinned, f.Request)
		o.free = append(o.free, p.block)
		x.tag++
		o.fill(x.tag, p.block) // it is used again at once
	}
	return err == nil
}

// publish is a prefill, whose id may be that of an earlier one. A rank that somebody else has put a life into may refuse it.
func (x *simulation) publish() {
	o := x.owner
	if len(o.free) == 0 {
		return
	}
	id := fmt.Sprint("req-", x.rng.IntN(12))
	if o.pinned[id] != nil {
		return
	}
	x.tag++
	p := &offer{id: id, tag: x.tag, block: o.free[0], turn: x.chance(5)}
	o.free = o.free[1:]
	o.pinned[id] = p
	require.NoError(x.t, o.sched.OnBlocksAllocated(x.now, id, &lease.Params{DoRemoteDecode: true}, [][]int{{p.block}}))
	x.stepOwner()
	x.late(id)
	o.fill(p.tag, p.block)
	params, delayed, err := o.sched.RequestFinished(x.now, id, lease.StatusLengthCapped, [][]int{{p.block}}, 16)
	require.NoError(x.t, err)
	require.True(x.t, delayed)
	x.stepOwner()
	if params == nil {
		o.refused++
		x.seen["refused"]++
		return
	}
	if p.turn { // as a decoder offers it
		expiry := x.now.Sub(rdma.Epoch()).Seconds() + 480
		params.DoRemotePrefill, params.DoRemoteDecode, params.RemoteBlocksExpiry, params.RemoteBlocksTTL = false, true, &expiry, 480*time.Second
	}
	p.p = params
	x.offers = append(x.offers, p)
	require.Same(x.t, p, o.pinned[id], "E3: %q is freed, and nobody can have read it", id)
}

// late is a read-complete without a nonce for an earlier request of this id.
func (x *simulation) late(id string) {
	if !x.events.late || !x.chance(4) {
		return
	}
	x.seen["late"]++
	d := x.readers[0]
	if d.ranks[0].w.Stats().Peers > 0 {
		_ = d.ranks[0].f.Notify(x.owner.ranks[0].f.Name(), lease.AppendReadComplete(nil, id, 1, 0))
		x.stepOwner()
	}
}

// squat puts a life that the scheduler knows nothing of into a slot, so that an admission there is refused, or takes it out again.
func (x *simulation) squat() {
	o := x.owner
	if len(o.squat) > 0 {
		x.carryOut(lease.Plan{Abort: o.squat})
		o.squat = nil
		return
	}
	for slot := range 5 {
		o.squats++
		k := lease.Key{Request: fmt.Sprint("squatter-", o.squats), Nonce: 5000 + o.squats}
		if x.carryOut(lease.Plan{Admit: []lease.Admission{{Request: k.Request, Nonce: k.Nonce, Slot: slot}}}) {
			o.squat = append(o.squat, k)
		}
	}
}

func (x *simulation) accept() {
	if len(x.offers) > 0 {
		x.take(x.rng.IntN(len(x.offers)))
	}
}

// take brings an offer to a reader.
func (x *simulation) take(i int) {
	p := x.offers[i]
	d := p.reader
	if d == nil {
		d = x.readers[x.rng.IntN(2)]
		p.reader = d
	}
	if !x.events.shared || x.chance(3) {
		x.offers = slices.Delete(x.offers, i, i+1)
	}
	if x.owner.pinned[p.id] != p {
		return // it has ended
	}
	d.n++
	q := &simRequest{offer: p, p: p.p, block: -1, since: x.now}
	if x.events.addresses && x.chance(6) {
		q.p = p.p.Clone()
		q.p.RemoteHost, q.elsewhere = "nowhere", true
		x.seen["elsewhere"]++
	}
	id := fmt.Sprint("local-", d.n)
	d.requests[id] = q
	require.NoError(x.t, d.sched.OnNewRequest(x.now, id, q.p))
}

// pick is a request of d that fits, "" if there is none.
func (x *simulation) pick(d *simReader, fits func(*simRequest) bool) string {
	var ids []string
	for id, q := range d.requests {
		if fits(q) {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return ""
	}
	slices.Sort(ids)
	return ids[x.rng.IntN(len(ids))]
}

func (x *simulation) schedule() {
	d := x.readers[x.rng.IntN(2)]
	if id := x.pick(d, func(q *simRequest) bool { return q.block < 0 }); id != "" {
		q := d.requests[id]
		q.block = d.n % blocks
		for _, o := range d.requests {
			if o != q && o.block == q.block {
				q.block = -1
				return
			}
		}
		require.NoError(x.t, d.sched.OnBlocksAllocated(x.now, id, q.p, [][]int{{q.block}}))
	}
}

func (x *simulation) giveUp() {
	d := x.readers[x.rng.IntN(2)]
	if id := x.pick(d, func(q *simRequest) bool { return q.block < 0 }); id != "" {
		x.over(d, id, lease.StatusAborted)
		x.seen["given up"]++
	}
}

func (x *simulation) over(d *simReader, id string, st lease.Status) {
	delete(d.requests, id)
	_, _, err := d.sched.RequestFinished(x.now, id, st, nil, 0)
	require.NoError(x.t, err)
}

func (x *simulation) stepReader(d *simReader) {
	out := x.read(d)
	for _, id := range out.Run {
		q := d.requests[id]
		require.Zero(x.t, d.wrong(q.tag, q.block), "%q has bytes of another request", id)
		x.seen["received"]++
		if q.turn {
			x.seen["turns"]++
		}
		x.over(d, id, lease.StatusAborted)
	}
	for _, f := range out.Fail {
		q := d.requests[f.Request]
		x.seen["failed "+f.Cause.String()]++
		// Who names the right address and was disturbed by nothing is read.
		// A connection that was lost in an outage is found lost by its next READ.
		fair := f.Cause == lease.CausePeerLost || q.disturbed || q.elsewhere || q.p.Lease == nil || x.away || x.owner.pinned[q.id] != q.offer
		require.True(x.t, fair, "E1, E2, E4: %q, of %q, a turn: %v, fails: %v", f.Request, q.id, q.turn, f.Err)
		x.over(d, f.Request, lease.StatusError)
	}
}

// disturb marks all that is under way: what happens to it now may be its end.
func (x *simulation) disturb() {
	for _, p := range x.owner.pinned {
		p.disturbed = true
	}
}

func (x *simulation) tick(d time.Duration) {
	time.Sleep(d)
	x.now = time.Now()
	x.stepOwner()
	for _, r := range x.readers {
		x.stepReader(r)
	}
	synctest.Wait()
}

func (x *simulation) act() {
	switch n := x.rng.IntN(100); {
	case n < 20:
		x.publish()
	case n < 45:
		x.accept()
	case n < 70:
		x.schedule()
	case n < 76:
		x.giveUp()
	case n < 79 && x.events.late:
		x.late(fmt.Sprint("req-", x.rng.IntN(12)))
		x.disturb() // it may have been of a life that was granted
	case n < 82 && x.events.refusals:
		x.squat()
	case n < 84 && x.events.outages && !x.away:
		x.away = true
		x.network.Swallow(x.owner.address, x.chance(2))
		x.owner.down(x.t)
		for _, d := range x.readers { // the connection is lost as well
			_ = d.ranks[0].f.Forget(x.owner.ranks[0].f.Name())
		}
		x.disturb()
		x.seen["outages"]++
		if x.chance(3) {
			for range 100 + x.rng.IntN(200) {
				x.tick(time.Second)
			}
		}
	case n < 86 && x.away:
		x.owner.up(x.t)
		x.network.Swallow(x.owner.address, false)
		x.away = false
		x.disturb()
		// What is new from here on is kept, and read after two seconds.
		for wait := range 2 {
			n := len(x.offers)
			if x.publish(); len(x.offers) > n {
				x.take(n)
			}
			for range []int{2, 45}[wait] {
				x.tick(time.Second)
			}
			x.schedule()
		}
	case n == 86 && x.events.days && x.chance(3):
		x.disturb()
		x.tick(time.Duration(1+x.rng.IntN(40)) * 24 * time.Hour)
		for range 20 {
			x.tick(100 * time.Millisecond)
		}
		x.disturb()
		x.seen["days"]++
	}
	x.tick(time.Duration(20+x.rng.IntN(200)) * time.Millisecond)
}

// rest lets everything end, and requires that nothing is left.
func (x *simulation) rest() {
	if x.away {
		x.owner.up(x.t)
		x.network.Swallow(x.owner.address, false)
		x.away = false
	}
	x.disturb()
	if len(x.owner.squat) > 0 {
		x.squat()
	}
	for range 100 {
		for _, d := range x.readers {
			for id, q := range d.requests {
				if q.block < 0 {
					x.over(d, id, lease.StatusAborted)
				}
			}
		}
		x.tick(10 * time.Second)
	}
	require.Len(x.t, x.owner.free, blocks, "E5: blocks that nobody gives back")
	clean(x.t, x.owner.engine)
	for _, d := range x.readers {
		require.Empty(x.t, d.requests)
	}
}

func simulate(t testing.TB, seed uint64, acts int, events simEvents) map[string]int {
	x := newSimulation(t, seed, events)
	defer func() {
		for _, e := range []*virtual{x.owner.virtual, x.readers[0].virtual, x.readers[1].virtual} {
			e.down(t)
			for _, r := range e.ranks {
				require.NoError(t, r.w.Close())
			}
		}
	}()
	for range acts {
		x.act()
	}
	x.rest()
	return x.seen
}

// B13, E1 to E7 in schedules of all kinds: no byte of another request, no healthy request refused, no lease lost while its reader
// waits, nothing held for ever, and one heartbeat an interval. Each defect is found by it when its fix is taken out; make mutants
// shows that.
func TestSimulationOfAFleet(t *testing.T) {
	seeds := 200
	if testing.Short() {
		seeds = 10
	}
	seen := map[string]int{}
	for seed := range uint64(seeds) {
		ok := t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				for what, n := range simulate(t, seed, 400, everything) {
					seen[what] += n
				}
			})
		})
		if !ok {
			return
		}
	}
	t.Log(seen)
	for _, what := range []string{"received", "turns", "given up", "elsewhere", "late", "refused", "outages", "days", "failed handshake", "ended read", "ended expired", "ended aborted"} {
		require.Greater(t, seen[what], seeds/8, what)
	}
}
