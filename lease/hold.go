package lease

import "time"

// Hold keeps the lease that p names alive for somebody else, for example while a
// router looks for a decoder. It needs nothing but the params: the lease is
// heartbeated like that of a queued request until Unhold. id is a name of the
// caller's choice, in one space with the request ids: one that is held or in use
// by a fetch is ErrBusy. RequestFinished of id ends the hold as well, and
// releases it. What a decoder offers for the next turn is held, too, by a
// scheduler that is Bidirectional: nothing renews it, but Unhold can release it.
func (s *Scheduler) Hold(now time.Time, id string, p *Params) error {
	const op = "hold"
	s.start(now)
	if _, read := s.role(p); !read {
		return invalid(op, id, "only a lease offered with do_remote_prefill is renewed by heartbeats")
	}
	if err := s.validate(op, id, p, false, true); err != nil {
		return err
	}
	if s.fetches[id] != nil {
		return &Error{Op: op, Request: id, Detail: "the id is in use", Err: ErrBusy}
	}
	s.track(now, id, p).held = true
	return nil
}

// Unhold ends a Hold. With release the owner gets its blocks back: every one of
// its ranks is told that its only reader is done. Without, somebody else has
// taken the lease over. An id that is not held is ErrUnknown.
func (s *Scheduler) Unhold(now time.Time, id string, release bool) error {
	s.start(now)
	f := s.fetches[id]
	if f == nil || !f.held {
		return &Error{Op: "unhold", Request: id, Detail: "is not held", Err: ErrUnknown}
	}
	s.silence(f)
	s.let(f, release)
	delete(s.fetches, id)
	return nil
}

// ReadUpTo says where the prompt of a queued request ends, in tokens, for a
// request of which the owner offers more: a decoder's blocks of a prompt that
// was cut since, or a shorter prompt. Block lists are paired from their ends, so
// without it the blocks to be filled would get the end of what is offered. Call
// it between OnNewRequest and OnBlocksAllocated, whose blocks reach to that
// token; computed + RemoteTokens is never more than that. More than are offered is
// ErrInvalid, a request that is not waiting to be read ErrUnknown.
func (s *Scheduler) ReadUpTo(id string, tokens int) error {
	const op = "read up to"
	f := s.fetches[id]
	switch {
	case f == nil || f.held || f.phase != fetchWaiting:
		return &Error{Op: op, Request: id, Detail: "is not waiting to be read", Err: ErrUnknown}
	case tokens < 1 || tokens > f.offered:
		return invalid(op, id, "%d tokens, and remote_num_tokens is %d", tokens, f.offered)
	}
	f.tokens = tokens
	return nil
}

// RemoteTokens is how many tokens of a prompt, beyond the computed ones that are
// here already, are to be read from the engine that p names; 0 says to prefill.
// A prefill's blocks cover the prompt. A decoder's, read back for the next turn,
// cover what it generated as well, and are read only if that saves
// RecomputeThreshold tokens.
func (s *Scheduler) RemoteTokens(p *Params, prompt, computed int) int {
	if _, read := s.role(p); !read || countBlocks(p.RemoteBlockIDs) == 0 {
		return 0
	}
	if p.DoRemotePrefill {
		return max(prompt-computed, 0)
	}
	n := max(min(p.RemoteNumTokens, prompt)-computed, 0)
	if n < s.cfg.RecomputeThreshold {
		return 0
	}
	return n
}

// Group ties requests of this owner of which a reader takes one: the siblings of
// a prompt with n > 1. When every rank reports one of them as read, the others
// are revoked, and Outcome.Free names them as read as well (vllm#43509). Call it
// after the requests were scheduled; those that are in no group are pinned
// until they are read or expire. An id without a life is ErrUnknown, one that is
// in a group ErrInvalid, and then no group is made.
func (s *Scheduler) Group(now time.Time, ids ...string) error {
	s.start(now)
	lives := make([]*life, 0, len(ids))
	for _, id := range ids {
		l := s.lives[id]
		if l == nil {
			return &Error{Op: "group", Request: id, Detail: "was not scheduled as do_remote_decode", Err: ErrUnknown}
		}
		if l.group != nil {
			return invalid("group", id, "is in a group")
		}
		lives = append(lives, l)
	}
	g := &group{members: lives}
	for _, l := range lives {
		l.group = g
	}
	return nil
}

// group are lives that one reader's read ends.
type group struct {
	members []*life
	read    bool
}

// siblingRead revokes the other lives of a group.
func (s *Scheduler) siblingRead(l *life) {
	if l.group == nil || l.group.read || l.reason != ReasonRead {
		return
	}
	l.group.read = true
	for _, m := range l.group.members {
		if m != l {
			s.revoke(m)
		}
	}
}
