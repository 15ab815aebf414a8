package rdma

import (
	"cmp"
	"container/list"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
)

// pull is a request whose blocks this rank reads. lease.Pulls knows how far it is.
type pull struct {
	lease.Pull
	peer     *peer
	deadline time.Time
	place    *list.Element // in the peer's queue, until its READs are posted
	plan     []blockRead   // those READs, once it is the first in the queue
	bytes    int64         // of those READs
	reading  int           // of those READs, posted and not terminal yet
	started  bool          // its READs are posted, lease.Pulls has it
	ended    bool          // reported as failed or given up; kept while a READ of it is active
	orphan   bool          // of a scheduler that is gone
	err      error         // the first failure of its READs
	traced   func(error)   // Trace's, of the READs or of the check under way
}

// end tells the trace that the READs, or the check, of x have ended.
func (x *pull) end(err error) {
	if x.traced != nil {
		x.traced(err)
		x.traced = nil
	}
}

// blockRead is what a pull reads from one rank of the owner.
type blockRead struct {
	*remoteRank
	li, ri []int32
	rest   [][]int // to be zeroed
}

// transfer is a posted READ: of a request's blocks, or of the slots of a batch of requests.
type transfer struct {
	Read
	peer  *peer
	lists []List // made for this READ alone
	pull  *pull  // nil for a slot READ
	descs int
	since time.Time // when it was posted
	rank  int
	check lease.CheckBatch
	cells []cell
	err   error // why it failed
}

func (w *Worker) read(in lease.Pull, now time.Time, res *lease.Result) {
	if w.reads[in.Request] != nil {
		// The blocks of the old READ may still be written: a new one would be verified before the old one lands.
		w.refuse(in.Request, lease.CauseInvalid, errors.New("an earlier READ of this request is still active"), res)
		res.Failed[len(res.Failed)-1].Quarantined = true
		return
	}
	if w.cfg.HoldOnly {
		w.refuse(in.Request, lease.CauseInvalid, errors.New("this worker only holds leases"), res)
		return
	}
	if in.Verify && in.Lease == nil {
		w.refuse(in.Request, lease.CauseUnverifiable, errors.New("kv_transfer_params carry no lease: a router dropped it, or the owner "+
			"had no free slot or grants none"), res)
		return
	}
	x := &pull{Pull: in, peer: w.peer(in.Peer), deadline: now.Add(w.cfg.ReadTimeout)}
	if !w.connect(x.peer, now, true) && !x.peer.lost {
		w.refuse(in.Request, lease.CauseHandshake, x.peer.err, res)
		return
	}
	w.reads[in.Request] = x
	w.moved = now
	if w.overdue.IsZero() || x.deadline.Before(w.overdue) {
		w.overdue = x.deadline
	}
	x.place = x.peer.pulls.PushBack(x)
	w.pump(x.peer, now, res)
}

// pump posts the pulls that wait for p as far as the caps allow, in order of arrival: a long one is not overtaken for ever.
func (w *Worker) pump(p *peer, now time.Time, res *lease.Result) {
	for p.state == connected && p.pulls.Len() > 0 {
		x := p.pulls.Front().Value.(*pull)
		if x.plan == nil {
			if cause, err := w.prepare(x); err != nil {
				w.forget(x)
				w.refuse(x.Request, cause, err, res)
				continue
			}
		}
		if p.reading > 0 && (p.reading >= w.cfg.MaxReadsPerPeer || x.bytes > w.cfg.MaxBytesPerPeer-p.bytes) {
			return
		}
		w.post(x, now, res)
	}
}

// refill posts what there is room for since pulls ended.
func (w *Worker) refill(now time.Time, res *lease.Result) {
	for i := 0; i < len(w.room); i++ { // pump may end more of them
		w.pump(w.room[i], now, res)
	}
	clear(w.room)
	w.room = w.room[:0]
}

// leaves takes note that a pull of p was read or forgotten: the next one may have room.
func (w *Worker) leaves(p *peer) {
	if p.pulls.Len() > 0 {
		w.room = append(w.room, p)
	}
}

// refuse reports a pull of which nothing was posted as failed.
func (w *Worker) refuse(request string, cause lease.Cause, err error, res *lease.Result) {
	w.countFailure(cause)
	res.Failed = append(res.Failed, lease.Failure{Request: request, Cause: cause, Message: message(cause, err), Err: err})
}

// prepare works out the block READs of x, one per rank of the owner that has blocks for this rank.
func (w *Worker) prepare(x *pull) (lease.Cause, error) {
	p := x.peer
	plan, bytes := make([]blockRead, 0, len(p.ranks)), int64(0)
	for i := range p.ranks {
		r := &p.ranks[i]
		if !r.source() {
			continue
		}
		if err := x.verifiable(r.meta); err != nil {
			return lease.CauseUnverifiable, err
		}
		local, remote, err := pair(&w.meta, r.meta, x.LocalBlocks, x.RemoteBlocks, extents{x.RemoteTokens, x.Tokens})
		if err != nil {
			return lease.CauseInvalid, err
		}
		for g := range local {
			ascend(local[g], remote[g])
		}
		d := blockRead{remoteRank: r, li: r.local.indices(nil, &w.meta, local), ri: r.remote.indices(nil, &w.meta, remote)}
		if w.cfg.Zero != nil && w.meta.logical() != r.meta.logical() {
			if d.rest, err = rest(&w.meta, r.meta, x.LocalBlocks, local); err != nil {
				return lease.CauseInvalid, err
			}
		}
		plan = append(plan, d)
		bytes += r.local.bytes(&w.meta, local)
	}
	x.plan, x.bytes = plan, bytes
	return 0, nil
}

// bytes is the length of pieces, given per group as for indices.
func (v view) bytes(m *Metadata, pieces [][]int) (n int64) {
	for g, ps := range pieces {
		for r, c := range v.cuts {
			if m.inGroup(r, g) {
				n += int64(len(ps)) * int64(c.rows) * int64(c.size)
			}
		}
	}
	return n
}

// post starts the block READs of x, which was prepared.
func (w *Worker) post(x *pull, now time.Time, res *lease.Result) {
	p, plan := x.peer, x.plan
	p.pulls.Remove(x.place)
	x.place, x.plan = nil, nil
	var ranks []int
	for _, r := range plan {
		ranks = append(ranks, r.rank)
	}
	err := p.clock.Check(now, x.Pull)
	if err == nil {
		err = w.pulls.Start(x.Pull, ranks)
	}
	if err != nil {
		delete(w.reads, x.Request)
		w.refuse(x.Request, lease.CauseOf(err), err, res)
		return
	}
	if f := w.cfg.Trace.Read; f != nil {
		x.traced = f(x.Pull, x.bytes)
	}
	x.started, x.reading = true, len(plan)
	p.reading++
	p.bytes += x.bytes
	for _, r := range plan {
		if r.rest != nil {
			r.local.each(&w.meta, r.rest, w.cfg.Zero)
		}
		if len(r.li) == 0 { // nothing to read: verified and released all the same
			w.blocksRead(x, r.rank, nil)
			continue
		}
		t, err := w.fabric.NewRead(r.localList, r.li, r.remoteList, r.ri, false)
		if err != nil {
			w.unmade(p, false, err)
			w.blocksRead(x, r.rank, err)
			continue
		}
		w.start(&transfer{Read: t, peer: p, pull: x, rank: r.rank, descs: len(r.li)})
	}
}

// ascend orders pairs of pieces by the remote one, and the indices made of them with them. NIXL merges descriptors only where
// both sides go up, and an allocator that takes freed blocks often hands out ids that go down.
func ascend(local, remote []int) {
	if slices.IsSorted(remote) {
		return
	}
	pairs := make([][2]int, len(remote))
	for k := range pairs {
		pairs[k] = [2]int{remote[k], local[k]}
	}
	slices.SortFunc(pairs, func(a, b [2]int) int { return cmp.Compare(a[0], b[0]) })
	for k, p := range pairs {
		remote[k], local[k] = p[0], p[1]
	}
}

// blocksRead hands the end of a block READ to lease.Pulls. Others may take its place from the next refill on.
func (w *Worker) blocksRead(x *pull, rank int, err error) {
	if err != nil {
		err = readError(err)
		x.err = cmp.Or(x.err, err)
	}
	if x.reading--; x.reading == 0 {
		x.peer.reading--
		x.peer.bytes -= x.bytes
		w.leaves(x.peer)
		x.end(x.err)
		if f := w.cfg.Trace.Verify; f != nil && x.Verify && x.err == nil && !x.ended {
			x.traced = f(x.Pull)
		}
	}
	if err := w.pulls.BlocksRead(x.Request, rank, err); err != nil {
		w.log.Error("end of a block READ", "peer", x.Peer.Engine, "peer_rank", rank, "request", x.Request, "error", err)
	}
}

// unmade takes note of a READ from p that could not be made. A peer that the fabric does not know any more has to be connected to
// anew; what is wrong with one request says nothing about others.
func (w *Worker) unmade(p *peer, check bool, err error) {
	w.stats.countFailed(check, err)
	if lost(err) {
		w.broke(p, err)
	}
}

// readError gives a failed READ its cause: the peer's or the transport's for what NIXL reports on a good request.
func readError(err error) error {
	if lost(err) {
		return fmt.Errorf("%w: %w", lease.ErrPeerLost, err)
	}
	return fmt.Errorf("%w: %w", lease.ErrTransfer, err)
}

// verifiable reports whether the owner rank has the slot that x names.
func (x *pull) verifiable(m *Metadata) error {
	switch {
	case x.MustOffer && m.SlotsCount > 0:
		return fmt.Errorf("engine %q offers lease slots, and kv_transfer_params carry no lease: a router dropped it, or the owner had no free slot", m.Engine)
	case !x.Verify:
		return nil
	case m.SlotsCount == 0:
		return fmt.Errorf("engine %q offers no lease slots", m.Engine)
	case x.Lease.Slot < 0 || x.Lease.Slot >= m.SlotsCount:
		return fmt.Errorf("remote_lease_slot %d is not in 0…%d of engine %q", x.Lease.Slot, m.SlotsCount-1, m.Engine)
	}
	return nil
}

// start posts t. It is polled to its end by poll, where one that is done at once is found too.
func (w *Worker) start(t *transfer) {
	w.moved = w.now
	t.peer.active++
	if t.pull != nil {
		w.stats.Reads++
	} else {
		w.stats.Checks++
	}
	t.since = time.Now()
	_, err := t.Post()
	if err != nil {
		w.failed(t, err)
		return
	}
	if t.pull != nil {
		w.stats.PostTime.Observe(time.Since(t.since).Seconds(), postSeconds[:])
	}
	w.active = append(w.active, t)
}

func (t *transfer) close() error {
	if err := t.Read.Close(); err != nil {
		return err
	}
	var err error
	for _, l := range t.lists {
		err = errors.Join(err, l.Close())
	}
	return err
}

// poll asks for the state of every active transfer and handles those that ended.
func (w *Worker) poll() {
	w.settling = slices.DeleteFunc(w.settling, w.settled)
	if len(w.active) == 0 {
		return
	}
	w.polled = w.polled[:0]
	for _, t := range w.active {
		w.polled = append(w.polled, t.Read)
	}
	w.states = slices.Grow(w.states[:0], len(w.active))[:len(w.active)]
	if err := w.fabric.Poll(w.polled, w.states); err != nil {
		w.quiet.Warn("poll transfers", "", "error", err)
		return
	}
	clear(w.polled)
	still := w.active[:0]
	var ended []*transfer
	for i, t := range w.active {
		if w.states[i] == nixl.Active {
			still = append(still, t)
		} else {
			ended = append(ended, t)
		}
	}
	clear(w.active[len(still):])
	w.active = still
	for _, t := range ended {
		w.ended(t)
	}
	if len(ended) > 0 {
		w.moved = w.now
	}
}

// ended takes a terminal transfer apart.
func (w *Worker) ended(t *transfer) {
	if err := t.Err(); err != nil {
		w.failed(t, err)
		return
	}
	bytes, took := t.Bytes(), time.Since(t.since).Seconds()
	t.peer.active--
	t.peer.proved, t.peer.failures = true, 0
	if err := t.close(); err != nil {
		w.log.Warn("release a READ", "peer", t.peer.info.Engine, "error", err)
	}
	if t.pull == nil {
		w.stats.CheckTime.Observe(took, checkSeconds[:])
		w.checked(t.check, w.cells.take(t.cells), nil)
		return
	}
	w.stats.BytesRead += int64(bytes)
	w.stats.ReadTime.Observe(took, postSeconds[1:])
	w.stats.ReadSize.Observe(float64(bytes), sizeBytes[:])
	w.stats.ReadDescriptors.Observe(float64(t.descs), descriptorCounts[:])
	w.blocksRead(t.pull, t.rank, nil)
}

// failed reports a transfer that failed. Its bytes may still land; it settles when the fabric lets it go.
func (w *Worker) failed(t *transfer, err error) {
	w.stats.countFailed(t.pull == nil, err)
	w.broke(t.peer, err)
	t.err = err
	if t.pull == nil {
		w.checked(t.check, nil, err)
	}
	if w.settled(t) {
		return
	}
	if t.pull != nil {
		if err := w.pulls.Fail(t.pull.Request, readError(err)); err != nil {
			w.log.Error("fail a pull", "request", t.pull.Request, "error", err)
		}
	}
	w.settling = append(w.settling, t)
}

// settled releases a failed transfer that cannot write any more, and its blocks or cells with it.
func (w *Worker) settled(t *transfer) bool {
	if err := t.close(); errors.Is(err, nixl.ErrActive) {
		return false
	} else if err != nil {
		w.log.Warn("release a failed READ", "peer", t.peer.info.Engine, "error", err)
	}
	t.peer.active--
	if t.pull == nil {
		w.cells.take(t.cells)
	} else {
		w.blocksRead(t.pull, t.rank, t.err)
	}
	return true
}

// checked hands the end of a slot READ to lease.Pulls.
func (w *Worker) checked(b lease.CheckBatch, cells []int64, err error) {
	if err := w.pulls.Checked(b, cells, err); err != nil {
		w.log.Error("end of a slot READ", "peer", b.Peer.Engine, "peer_rank", b.Rank, "error", err)
	}
}

// verify posts one slot READ per owner rank for all requests whose blocks are in, and gives the READs a moment to end.
func (w *Worker) verify() {
	batches := w.pulls.NextChecks()
	for _, b := range batches {
		if w.cfg.Trace.BeforeCheck != nil {
			w.cfg.Trace.BeforeCheck(b.Peer.Engine, b.Rank, len(b.Slots))
		}
		if err := w.check(b); err != nil {
			w.checked(b, nil, err)
		}
	}
	if len(batches) == 0 {
		return
	}
	for until := time.Now().Add(w.cfg.CheckPoll); ; {
		w.poll()
		if !slices.ContainsFunc(w.active, func(t *transfer) bool { return t.pull == nil }) || time.Now().After(until) {
			return
		}
	}
}

// check posts the slot READ of one batch. Each slot is a descriptor of its own, 8 bytes: a longer READ can tear a nonce.
func (w *Worker) check(b lease.CheckBatch) error {
	p := w.peers[b.Peer]
	if p == nil || p.state != connected {
		err := errors.New("the owner was lost before the lease could be checked")
		if p != nil && p.err != nil {
			err = fmt.Errorf("%w: %w", err, p.err)
		}
		return err
	}
	i := slices.IndexFunc(p.ranks, func(r remoteRank) bool { return r.rank == b.Rank })
	if i < 0 {
		return fmt.Errorf("no connection to rank %d", b.Rank)
	}
	r := p.ranks[i]
	cells, err := w.cells.get(len(b.Slots))
	if err != nil {
		return err
	}
	local, remote := make([]nixl.Desc, len(cells)), make([]nixl.Desc, len(cells))
	for i, c := range cells {
		local[i] = nixl.Desc{Addr: c.addr(), Len: 8}
		remote[i] = nixl.Desc{Addr: r.meta.SlotsBase + 8*uint64(b.Slots[i]), Len: 8}
	}
	t := &transfer{peer: p, rank: r.rank, check: b, cells: cells}
	if err = t.prepare(w.fabric, r.agent, local, remote); err != nil {
		w.unmade(p, true, err)
		w.cells.take(cells)
		return err
	}
	w.start(t)
	return nil
}

func (t *transfer) prepare(f Fabric, agent string, local, remote []nixl.Desc) (err error) {
	defer func() {
		if err != nil {
			for _, l := range t.lists {
				l.Close()
			}
		}
	}()
	l, err := f.LocalList(nixl.DRAM, local)
	if err != nil {
		return err
	}
	t.lists = append(t.lists, l)
	r, err := f.RemoteList(agent, nixl.DRAM, remote)
	if err != nil {
		return err
	}
	t.lists = append(t.lists, r)
	t.Read, err = f.NewRead(l, nil, r, nil, true)
	return err
}

// finish reports the pulls that reached their verdict.
func (w *Worker) finish(res *lease.Result) {
	w.finished = w.pulls.Finished(w.finished[:0])
	for _, f := range w.finished {
		id := f.Pull.Request
		x := w.reads[id]
		if x == nil {
			continue
		}
		x.ended = true
		x.end(f.Err)
		if !f.Quarantined {
			delete(w.reads, id)
		}
		switch {
		case x.orphan: // nobody waits for it
			continue
		case f.Settled:
			res.Settled = append(res.Settled, id)
			continue
		case f.Cause != 0:
			w.countFailure(f.Cause)
			res.Failed = append(res.Failed, lease.Failure{Request: id, Cause: f.Cause, Message: message(f.Cause, f.Err), Err: f.Err, Quarantined: f.Quarantined})
			continue
		case x.Verify:
			w.stats.Verified++
		default:
			w.stats.Unverified++
		}
		res.Received = append(res.Received, id)
	}
	clear(w.finished)
}

// message is what err says beyond its cause, which the Failure names already.
func message(cause lease.Cause, err error) string {
	if e, ok := errors.AsType[*lease.Error](err); ok && e.Err == cause.Err() {
		return e.Detail
	}
	return strings.TrimPrefix(err.Error(), cause.Err().Error()+": ")
}

func (w *Worker) countFailure(cause lease.Cause) {
	switch cause {
	case lease.CauseLapsed:
		w.stats.Lapsed++
	case lease.CauseUnverifiable:
		w.stats.Unverifiable++
	}
}

// giveUp ends a pull that nobody waits for any more.
func (w *Worker) giveUp(request string, res *lease.Result) {
	x := w.reads[request]
	switch {
	case x == nil: // it ended in an earlier step; the scheduler has, or gets, that result
		res.Settled = append(res.Settled, request)
	case !x.started:
		w.forget(x)
		res.Settled = append(res.Settled, request)
	default:
		x.ended = true
		x.end(lease.ErrAborted)
		if err := w.pulls.Cancel(request); err != nil {
			w.log.Error("cancel a pull", "request", request, "error", err)
		}
	}
}

// forget drops a pull that waits in its peer's queue.
func (w *Worker) forget(x *pull) {
	delete(w.reads, x.Request)
	x.peer.pulls.Remove(x.place)
	w.leaves(x.peer)
}

// expire fails the pulls whose time is over. Their READs go on: NIXL cannot stop them.
func (w *Worker) expire(now time.Time, res *lease.Result) {
	if now.Before(w.overdue) {
		return
	}
	w.overdue = time.Time{}
	for id, x := range w.reads {
		if x.ended {
			continue
		}
		if now.Before(x.deadline) {
			if w.overdue.IsZero() || x.deadline.Before(w.overdue) {
				w.overdue = x.deadline
			}
			continue
		}
		err := fmt.Errorf("%w: engine %q did not deliver within %s", lease.ErrTimeout, x.Peer.Engine, w.cfg.ReadTimeout)
		if !x.started {
			w.forget(x)
			w.refuse(id, lease.CauseTimeout, err, res)
		} else if err := w.pulls.Fail(id, err); err != nil && !errors.Is(err, lease.ErrUnknown) { // unknown: it ended in this step
			w.log.Error("fail a pull", "request", id, "error", err)
		}
	}
}
