package lease

import (
	"slices"
	"time"
)

// life is one life of a request that others may read, from its first scheduling
// until every rank reported its end.
type life struct {
	request string
	nonce   int64
	slot    int
	older   *life // an earlier life of the same id that is still pinned
	group   *group

	phase    lifePhase
	admitted bool // the admission has left in a plan
	granted  bool // the grant has left in a plan
	revoked  bool
	lost     bool // a rank ended it before it was exported
	ttl      time.Duration
	fixed    bool
	holds    bool // the engine waits for Outcome.Free
	old      bool // the id names another request by now
	blocks   [][]int
	tokens   int // that the exported blocks hold

	reported rankSet
	missing  int // reports to come, and 1 for a pull into the same blocks
	reason   Reason
}

type lifePhase uint8

const (
	lifeRunning lifePhase = iota // admitted, its request runs
	lifePinned                   // exported
	lifeAborted                  // waits for the ranks to take the nonce back
)

// admit starts a life, unless the request already runs one.
func (s *Scheduler) admit(id string, blocks [][]int) {
	old := s.lives[id]
	if old != nil && old.phase == lifeRunning {
		return
	}
	l := &life{request: id, nonce: s.nonces.next(), slot: s.takeSlot(), older: old, missing: s.cfg.Ranks}
	if injected&faultM3 != 0 && l.slot != NoSlot {
		l.nonce = int64(l.slot + MaxReaders + 1)
	}
	if injected&faultXEARLY != 0 {
		l.blocks = cloneBlocks(blocks)
	}
	s.supersede(id)
	s.lives[id] = l
	s.queue.admit = append(s.queue.admit, l)
	s.stats.Admitted++
	s.stats.Running++
	if l.slot == NoSlot {
		s.stats.NoSlot++
	}
}

// supersede notes that the id names another request from now on.
func (s *Scheduler) supersede(id string) {
	for l := s.lives[id]; l != nil; l = l.older {
		l.old = l.phase != lifeRunning
	}
}

func (s *Scheduler) takeSlot() int {
	if n := len(s.freeSlots); n > 0 {
		slot := s.freeSlots[n-1]
		s.freeSlots = s.freeSlots[:n-1]
		return slot
	}
	if s.unused < s.Slots() {
		s.unused++
		return s.unused - 1
	}
	return NoSlot
}

// finish exports a life or aborts it. Exactly one grant or one abort goes to
// every rank that the admission goes to.
func (s *Scheduler) finish(now time.Time, l *life, st Status, blocks [][]int, tokens int, f *fetch) (p *Params, delayFree bool) {
	s.stats.Running--
	if injected&faultXEARLY != 0 && l.blocks != nil {
		blocks = l.blocks
	}
	l.blocks = cloneBlocks(blocks)
	held := countBlocks(blocks) > 0
	if st.exports() && !l.lost {
		p = s.params(now, l, held, tokens, f)
	}
	if p != nil && held {
		l.phase, l.tokens = lifePinned, tokens
		s.hold(l)
		l.ttl = s.cfg.Duration
		if p.DoRemoteDecode {
			l.ttl, l.fixed = s.cfg.DecoderTTL, true
		}
		s.queue.grant = append(s.queue.grant, l)
		s.stats.Exported++
		s.stats.Pinned++
		if f := s.cfg.Trace.Exported; f != nil {
			f(l.request, l.nonce, l.ttl)
		}
		if l.group != nil && l.group.read {
			s.revoke(l)
		}
		s.freeIfDone(l) // a rank may have reported it before
		return p, true
	}
	l.phase = lifeAborted
	s.stats.Pinned++
	if !l.admitted {
		// No rank ever heard of it.
		s.queue.admit = slices.DeleteFunc(s.queue.admit, func(q *life) bool { return q == l })
		l.reason = ReasonAborted
		s.end(l)
		return p, false
	}
	if held {
		s.hold(l)
	}
	s.queue.abort = append(s.queue.abort, l)
	if injected&faultXABSLOT != 0 {
		s.giveSlot(l)
	}
	s.freeIfDone(l)
	return p, held
}

// hold keeps the engine from its blocks until Outcome.Free.
func (s *Scheduler) hold(l *life) {
	l.holds = true
	s.countPinned(l, 1)
}

// countPinned adds the blocks of a life to those that are pinned, or with -1 takes them away.
func (s *Scheduler) countPinned(l *life, sign int64) {
	s.stats.PinnedBlocks += sign * int64(countBlocks(l.blocks))
	s.stats.PinnedTokens += sign * int64(l.tokens)
	for g, size := range s.cfg.BlockBytes {
		if g < len(l.blocks) {
			s.stats.PinnedBytes += sign * size * int64(len(l.blocks[g]))
		}
	}
}

// params is what a reader needs, built from the block table at finish: blocks
// may have been preempted and replaced since the slot was lent.
func (s *Scheduler) params(now time.Time, l *life, held bool, tokens int, f *fetch) *Params {
	p := &Params{
		RemoteEngineID: s.cfg.Engine, RemoteRequestID: l.request, RemoteHost: s.cfg.Host, RemotePort: s.cfg.Port,
		TPSize: max(s.cfg.TPSize, s.cfg.DCPSize), DCPSize: s.cfg.DCPSize, PPSize: s.cfg.PPSize, TransferMode: "pull",
		RemoteBlockIDs: [][]int{},
	}
	if f != nil && !f.readback {
		// A decoder keeps its blocks for the next turn.
		p.DoRemoteDecode = true
	} else {
		p.DoRemotePrefill = true
	}
	if !held {
		return p
	}
	p.RemoteBlockIDs = cloneBlocks(l.blocks)
	p.RemoteNumTokens = tokens
	if l.slot != NoSlot {
		p.Lease = &SlotRef{Slot: l.slot, Nonce: l.nonce}
	}
	if p.DoRemoteDecode {
		expiry := (now.Sub(s.epoch) + s.cfg.DecoderTTL).Seconds()
		p.RemoteBlocksExpiry, p.RemoteBlocksTTL = &expiry, s.cfg.DecoderTTL
	}
	return p
}

// sent takes a rank's report that a life ended there.
func (s *Scheduler) sent(rank int, e Ended) {
	l := s.lives[e.Request]
	for l != nil && l.nonce != e.Nonce {
		l = l.older
	}
	if l == nil || !l.admitted || e.Reason == 0 || e.Reason >= reasonEnd {
		s.stats.UnknownReports++
		return
	}
	if !l.reported.add(rank) {
		s.stats.RepeatedReports++
		return
	}
	if l.phase == lifeRunning {
		// Nobody can have read it yet. The rank has refused it, or let go of it,
		// all the same, so the report counts; the blocks stay the running
		// request's, and it cannot be exported any more.
		s.stats.EarlyReports++
		l.lost = true
	}
	l.missing--
	// Ranks may differ: one read, another expired. Then it expired.
	if l.reason == 0 || e.Reason == ReasonExpired || e.Reason == ReasonAborted && l.reason == ReasonRead {
		l.reason = e.Reason
	}
	if injected&faultM9B != 0 {
		s.giveSlot(l)
	}
	s.freeIfDone(l)
}

// freeIfDone frees a life when the last rank reported. A reader that read only
// some ranks cannot see what others hold, so nothing less will do.
func (s *Scheduler) freeIfDone(l *life) {
	if l.phase == lifeRunning {
		return
	}
	if l.missing == 0 || injected&faultM5 != 0 && l.missing < s.cfg.Ranks && l.holds {
		s.end(l)
	}
}

// end hands the blocks back, then the slot.
func (s *Scheduler) end(l *life) {
	if l.group != nil && l.group.read && l.reason == ReasonAborted {
		l.reason = ReasonRead // by its sibling
	}
	s.siblingRead(l)
	if l.holds {
		s.outcome.Free = append(s.outcome.Free, Freed{l.request, l.nonce, l.blocks, l.reason})
		l.holds = false
		s.countPinned(l, -1)
	}
	if l.missing > 0 && l.admitted {
		return // only by a fault
	}
	s.stats.Freed[l.reason]++
	s.stats.Pinned--
	if f := s.cfg.Trace.Ended; f != nil {
		f(Ended{l.request, l.nonce, l.reason})
	}
	s.giveSlot(l)
	if newest := s.lives[l.request]; newest == l {
		if l.older == nil {
			delete(s.lives, l.request)
		} else {
			s.lives[l.request] = l.older
		}
	} else {
		for newest.older != l {
			newest = newest.older
		}
		newest.older = l.older
	}
}

func (s *Scheduler) giveSlot(l *life) {
	if l.slot != NoSlot {
		s.freeSlots = append(s.freeSlots, l.slot)
		l.slot = NoSlot
	}
}

// Revoke ends the exported leases of a request before their time: every rank
// takes its nonce back and reports, then Outcome.Free hands the blocks out. It
// is how an engine frees leased blocks of its own will (cache reset, sleep,
// shutdown): blocks freed without it would be reused under a nonce that still
// says they are held. Readers see ErrLapsed. A request that still runs is
// ErrBusy: finish it as aborted. One without leases is ErrUnknown.
func (s *Scheduler) Revoke(now time.Time, id string) error {
	s.start(now)
	l := s.lives[id]
	if l == nil {
		return &Error{Op: "revoke", Request: id, Detail: "has no lease", Err: ErrUnknown}
	}
	if l.phase == lifeRunning && l.older == nil {
		return &Error{Op: "revoke", Request: id, Detail: "still runs, finish it as aborted", Err: ErrBusy}
	}
	for ; l != nil; l = l.older {
		s.revoke(l)
	}
	return nil
}

// RevokeAll revokes every exported lease and returns how many. An engine that
// goes out of service first takes no new request and steps on until Running,
// Pinned and Tracked of Stats are 0; at its deadline it calls RevokeAll and steps
// until Outcome.Free has named all.
func (s *Scheduler) RevokeAll(now time.Time) int {
	s.start(now)
	n := 0
	for _, l := range s.lives {
		for ; l != nil; l = l.older {
			if s.revoke(l) {
				n++
			}
		}
	}
	return n
}

func (s *Scheduler) revoke(l *life) bool {
	if l.phase != lifePinned || l.revoked {
		return false
	}
	l.revoked = true
	if !l.granted {
		s.queue.grant = slices.DeleteFunc(s.queue.grant, func(q *life) bool { return q == l })
	}
	s.queue.abort = append(s.queue.abort, l)
	s.stats.Revoked++
	return true
}
