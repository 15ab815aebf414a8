package lease

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// fetch is a request whose blocks are read from another engine.
type fetch struct {
	id       string
	peer     *peer
	lease    *sharing
	target   Target
	readback bool      // turn 2: the owner is a decoder, whose lease is not renewed
	held     bool      // by Hold: renewed, but not read here
	beats    bool      // heartbeats go out for it
	until    time.Time // the owner's blocks are gone by then, zero if unknown
	counted  bool      // among the requests of its lease
	offered  int       // tokens that the owner's blocks hold, 0 if not known
	tokens   int       // of those, how many are read; 0: all

	phase   fetchPhase
	pull    Pull
	ended   rankSet // ranks on which no READ is active any more
	missing int     // ranks that are not
	arrived int     // ranks that hold the blocks, checked
	traced  bool    // FetchStarted was called, FetchEnded was not
	failed  bool    // Outcome.Fail was given
	cause   Cause   // why
	lapsed  bool    // the owner let the blocks go
	status  Status  // that the engine finished the request with
	gone    bool    // the engine has finished the request
	owed    bool    // the engine waits for Outcome.Settled
	stopped bool    // a Cancel was queued
	blocks  [][]int // to name in Settled
	life    *life   // owns the same blocks and waits for the READ
}

type fetchPhase uint8

const (
	fetchWaiting fetchPhase = iota // in the engine's queue
	fetchQueued                    // its pull goes out with the next plan
	fetchReading                   // on the ranks
	fetchEnded                     // nothing is read any more
)

func targetOf(p *Params) Target {
	t := Target{Request: p.RemoteRequestID, Slot: NoSlot}
	if p.Lease != nil {
		t.Slot, t.Nonce = p.Lease.Slot, p.Lease.Nonce
	}
	return t
}

// track starts the heartbeats of a request.
func (s *Scheduler) track(now time.Time, id string, p *Params) *fetch {
	f := &fetch{id: id, target: targetOf(p), readback: p.DoRemoteDecode, beats: p.DoRemotePrefill, counted: true, offered: p.RemoteNumTokens}
	if f.readback && p.RemoteBlocksTTL > 0 {
		f.until = now.Add(p.RemoteBlocksTTL)
	}
	f.peer, f.lease = s.peers.add(p.Peer(), f.target, f.beats)
	s.fetches[id] = f
	return f
}

// silence stops the heartbeats of a request.
func (s *Scheduler) silence(f *fetch) {
	if f.beats {
		f.beats = false
		s.peers.silence(f.peer, f.target)
	}
}

// canPull says why the pull cannot be started, nil when it can or when there is
// nothing to start.
func (s *Scheduler) canPull(op, id string, p *Params, blocks [][]int) error {
	f := s.fetches[id]
	if f != nil {
		switch {
		case f.held:
			return &Error{Op: op, Request: id, Detail: "is held under this id; Unhold it first", Err: ErrBusy}
		case f.gone, f.phase == fetchReading && injected&faultXZOMBIE == 0:
			return &Error{Op: op, Request: id, Detail: "an earlier READ of this request has not ended", Err: ErrBusy}
		case f.phase != fetchWaiting:
			return nil
		case f.target != targetOf(p) || f.peer.Peer != p.Peer():
			return invalid(op, id, "kv_transfer_params changed since the request was queued")
		}
	}
	if n := countBlocks(blocks); n > 0 {
		switch {
		case countBlocks(p.RemoteBlockIDs) == 0:
			return invalid(op, id, "%d blocks to fill and kv_transfer_params with no remote_block_ids", n)
		case len(blocks) != len(p.RemoteBlockIDs):
			return invalid(op, id, "%d transfer groups here and %d in remote_block_ids", len(blocks), len(p.RemoteBlockIDs))
		}
		for g := range blocks {
			if len(blocks[g]) > 0 && len(p.RemoteBlockIDs[g]) == 0 {
				return invalid(op, id, "%d blocks of group %d to fill and none in remote_block_ids", len(blocks[g]), g)
			}
		}
	}
	return nil
}

// pull queues the READs of a request, or ends it when there are none to do.
func (s *Scheduler) pull(now time.Time, id string, p *Params, blocks [][]int) {
	f := s.fetches[id]
	if f == nil {
		f = s.track(now, id, p)
	}
	if f.phase != fetchWaiting {
		return
	}
	f.pull = Pull{
		Request: id, Peer: f.peer.Peer, RemoteRequest: p.RemoteRequestID,
		RemoteBlocks: cloneBlocks(p.RemoteBlockIDs), LocalBlocks: cloneBlocks(blocks), RemoteTokens: p.RemoteNumTokens, Tokens: f.tokens,
		// Owners of today do not verify readbacks; those that offer it are held to it.
		Verify:    s.cfg.Verification.verifies(p.Lease != nil, f.readback),
		MustOffer: s.cfg.Verification == VerifyAll && f.readback && p.Lease == nil,
	}
	if p.Lease != nil {
		l := *p.Lease
		f.pull.Lease = &l
	}
	if p.RemoteBlocksExpiry != nil {
		e := *p.RemoteBlocksExpiry
		f.pull.Expiry = &e
	}
	if countBlocks(blocks) == 0 {
		// A full local hit: nothing to read, and nothing to wait for.
		s.outcome.Run = append(s.outcome.Run, id)
		s.conclude(f)
		return
	}
	s.traceStart(f)
	if f.pull.Verify {
		if err := f.pull.Lease.verifiable("verify", id); err != nil {
			s.fail(f, err, false)
			s.conclude(f)
			return
		}
	}
	if !f.until.IsZero() && !now.Add(ExpiryMargin).Before(f.until) {
		// Whatever the owner's clock says: its time to live is over.
		s.fail(f, &Error{Op: "read back", Request: id, Detail: "the owner's blocks have outlived remote_blocks_ttl", Err: ErrExpired}, false)
		s.conclude(f)
		return
	}
	f.phase = fetchQueued
	s.queue.read = append(s.queue.read, f)
}

func (s *Scheduler) traceStart(f *fetch) {
	f.traced = true
	if start := s.cfg.Trace.FetchStarted; start != nil {
		p := f.pull
		p.RemoteBlocks, p.LocalBlocks = cloneBlocks(p.RemoteBlocks), cloneBlocks(p.LocalBlocks)
		start(p)
	}
}

// traceEnd says that a fetch that was started has ended, unless it was said.
func (s *Scheduler) traceEnd(f *fetch, cause Cause, err error) {
	if end := s.cfg.Trace.FetchEnded; end != nil && f.traced {
		end(f.id, cause, err)
	}
	f.traced = false
}

// traceAbort says so of one that its engine gave up.
func (s *Scheduler) traceAbort(f *fetch) {
	if f.traced {
		s.traceEnd(f, CauseAborted, &Error{Op: "load KV", Request: f.id, Detail: "the engine took the request back", Err: ErrAborted})
	}
}

// ship hands a pull to the ranks.
func (s *Scheduler) ship(f *fetch) Pull {
	f.phase = fetchReading
	f.missing = s.cfg.Ranks
	s.stats.Pulls++
	p := f.pull
	p.RemoteBlocks, p.LocalBlocks = cloneBlocks(p.RemoteBlocks), cloneBlocks(p.LocalBlocks)
	return p
}

// fail reports a failed load once.
func (s *Scheduler) fail(f *fetch, err error, quarantined bool) {
	cause := CauseOf(err)
	f.failed, f.owed, f.cause = true, quarantined, cause
	s.stats.Failed[cause]++
	s.silence(f)
	s.traceEnd(f, cause, err)
	s.outcome.Fail = append(s.outcome.Fail, Failed{
		Request: f.id, Err: err, Cause: cause, InvalidBlocks: cloneBlocks(f.pull.LocalBlocks),
		Recompute: s.cfg.FailurePolicy == Recompute, Quarantined: quarantined,
	})
}

// conclude ends a fetch of which no READ is active. One that failed needs its
// lease until the engine has finished it, which says what becomes of that.
func (s *Scheduler) conclude(f *fetch) {
	s.silence(f)
	f.phase = fetchEnded
	// What is prefilled here instead, or is about to end, nobody will read.
	unread := !f.failed || s.cfg.FailurePolicy == Recompute || f.cause == CauseExpired
	if f.gone || unread || f.lapsed {
		s.let(f, unread || f.status != StatusError)
	}
	if f.owed {
		f.owed = false
		if f.life != nil {
			f.life.missing--
			s.freeIfDone(f.life)
		} else {
			s.outcome.Settled = append(s.outcome.Settled, Settled{f.id, f.blocks})
		}
	}
	if f.gone {
		delete(s.fetches, f.id)
	}
}

// let lets go of the lease of a fetch. The last request that needed it releases
// the owner: if one of them has read it, or this one says that nobody will. What
// lapsed is over, and its owner may have given the id to another request.
func (s *Scheduler) let(f *fetch, release bool) {
	if !f.counted {
		return
	}
	f.counted = false
	l := f.lease
	s.peers.remove(f.peer, l)
	l.lapsed = l.lapsed || f.lapsed
	l.unwanted = l.unwanted || f.held && release
	if !f.failed && f.arrived == s.cfg.Ranks {
		l.readAt = &f.peer.Peer
	}
	switch {
	case l.requests > 0:
	case l.lapsed || !release && !l.unwanted && l.readAt == nil:
		delete(s.peers.leases, l.id)
	default:
		l.release = &Release{Request: f.id, Peer: f.peer.Peer, RemoteRequest: f.target.Request, Nonce: f.target.Nonce, All: f.held}
		if l.readAt != nil {
			l.release.Peer = *l.readAt // that address works
		}
		s.queue.release = append(s.queue.release, l)
	}
}

// releases are the queued ones, but for leases that a request needs again.
func (s *Scheduler) releases() (out []Release) {
	for _, l := range s.queue.release {
		if l.requests > 0 || s.peers.leases[l.id] != l {
			continue
		}
		delete(s.peers.leases, l.id)
		out = append(out, *l.release)
		if l.readAt == nil {
			s.stats.Released++
		}
	}
	return out
}

// endFetch takes note that the engine has finished the request, and reports
// whether it has to keep the blocks.
func (s *Scheduler) endFetch(f *fetch, st Status, blocks [][]int, l *life) (delayFree bool) {
	if f.gone {
		return true // finished before, and still read into
	}
	f.gone, f.status = true, st
	s.traceAbort(f)
	// What was found out but not handed out yet concerns nobody any more.
	s.outcome.Run = slices.DeleteFunc(s.outcome.Run, func(id string) bool { return id == f.id })
	s.outcome.Fail = slices.DeleteFunc(s.outcome.Fail, func(r Failed) bool { return r.Request == f.id })
	switch f.phase {
	case fetchEnded:
		s.let(f, st != StatusError)
		delete(s.fetches, f.id)
		return false
	case fetchReading:
		f.owed = true
		f.blocks = cloneBlocks(blocks)
		if countBlocks(blocks) == 0 {
			f.blocks = cloneBlocks(f.pull.LocalBlocks)
		}
		if l != nil && l.phase == lifeAborted && l.holds {
			f.life = l // one Free for both
			l.missing++
		}
		s.silence(f)
		s.stop(f)
		if injected&faultXRELEASE != 0 {
			s.let(f, true)
		}
		return true
	case fetchQueued:
		s.queue.read = slices.DeleteFunc(s.queue.read, func(q *fetch) bool { return q == f })
	}
	s.conclude(f)
	return false
}

// stop tells the ranks to give a pull up.
func (s *Scheduler) stop(f *fetch) {
	if !f.stopped && f.missing > 0 {
		f.stopped = true
		s.queue.cancel = append(s.queue.cancel, f)
	}
}

// reading finds the fetch that a rank reports on, nil when it is not one the
// ranks read.
func (s *Scheduler) reading(id string) *fetch {
	f := s.fetches[id]
	if f == nil || f.phase != fetchReading {
		s.stats.UnknownReports++
		return nil
	}
	return f
}

func (s *Scheduler) received(rank int, id string) {
	f := s.reading(id)
	if f == nil {
		return
	}
	if !f.ended.add(rank) {
		s.stats.RepeatedReports++
		return
	}
	f.arrived++
	s.rankEnded(f)
}

func (s *Scheduler) failed(rank int, r Failure) {
	f := s.reading(r.Request)
	if f == nil {
		return
	}
	if !r.Quarantined && !f.ended.add(rank) {
		s.stats.RepeatedReports++
		return
	}
	f.lapsed = f.lapsed || r.Cause == CauseLapsed
	if !f.failed && !f.gone {
		more := f.missing
		if !r.Quarantined {
			more--
		}
		cause := r.Cause
		if cause == 0 || cause >= causeEnd {
			cause = CauseTransfer
		}
		err := cause.Err()
		if r.Err != nil && !errors.Is(r.Err, ErrInvalid) { // that says that nothing was done
			err = caused{err, r.Err}
		}
		s.fail(f, &Error{Op: "load KV", Request: f.id, Detail: fmt.Sprintf("rank %d: %s", rank, r.Message), Err: err}, more > 0)
		f.blocks = cloneBlocks(f.pull.LocalBlocks)
	}
	if !r.Quarantined {
		s.rankEnded(f)
	}
	if f.phase == fetchReading {
		s.stop(f)
	}
}

func (s *Scheduler) settled(rank int, id string) {
	f := s.reading(id)
	if f == nil {
		return
	}
	if !f.ended.add(rank) {
		s.stats.RepeatedReports++
		return
	}
	if !f.failed && !f.gone {
		s.fail(f, &Error{Op: "load KV", Request: id, Detail: fmt.Sprintf("rank %d gave it up", rank), Err: ErrAborted}, f.missing > 1)
		f.blocks = cloneBlocks(f.pull.LocalBlocks)
	}
	s.rankEnded(f)
	if f.phase == fetchReading {
		s.stop(f)
	}
}

// rankEnded counts a rank that reads nothing any more.
func (s *Scheduler) rankEnded(f *fetch) {
	f.missing--
	if f.missing > 0 {
		return
	}
	if f.arrived == s.cfg.Ranks && !f.gone {
		s.stats.Received++
		s.traceEnd(f, 0, nil)
		s.outcome.Run = append(s.outcome.Run, f.id)
	}
	s.conclude(f)
}
