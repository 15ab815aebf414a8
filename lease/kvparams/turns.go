package kvparams

import (
	"container/list"
	"crypto/sha256"
	"encoding/binary"
	"sync"
	"time"
)

// Turns keeps what D offers at the end of a turn until the next turn of the
// same conversation, for P to read instead of computing the history again
// ([Prefill]). An entry is given out once, for the read releases the blocks.
//
// P copies the blocks by position and never compares tokens, so a wrong match
// is a wrong answer with status 200. A match is therefore by token ids: a
// router has them with the Generate API. Chat messages that extend the earlier
// ones do not prove it: templates drop reasoning from earlier turns, and a
// reply can tokenize to other ids than were generated. There is no helper for
// them here.
//
// Safe for concurrent use.
type Turns struct {
	ttl   time.Duration
	limit int

	mu      sync.Mutex
	byScope map[string]*list.Element
	oldest  list.List // of *turn, in the order kept
}

type turn struct {
	scope   string
	digest  [sha256.Size]byte // of the first h.params.RemoteNumTokens tokens
	h       Handoff
	expires time.Time
}

// NewTurns keeps at most limit entries, each for ttl, or for what was left of
// D's own deadline if the params say so (remote_blocks_ttl) and that is less.
// ttl must be below D's decoder_kv_blocks_ttl (480 s); vLLM's example uses 60 s.
func NewTurns(ttl time.Duration, limit int) (*Turns, error) {
	if ttl <= 0 || limit <= 0 {
		return nil, fail(ErrInvalid, "new turns", "", "ttl %v and limit %d must be positive", ttl, limit)
	}
	return &Turns{ttl: ttl, limit: limit, byScope: map[string]*list.Element{}}, nil
}

// Keep records D's offer after a turn. tokens are the prompt and all generated
// token ids. scope is what two requests must share for their blocks to be
// interchangeable, besides the tokens: tenant, conversation, model, adapter,
// cache_salt, multimodal content. A scope has one entry, the latest.
//
// An offer that is not D's own (do_remote_decode is not true), or says it holds
// no tokens or more than tokens has, is an error that matches [ErrUnusable];
// what was kept before stays.
func (t *Turns) Keep(now time.Time, scope string, tokens []int, h Handoff) error {
	const op = "keep turn"
	if h.IsZero() {
		return fail(ErrNoHandoff, op, "", "nothing to keep")
	}
	if !h.params.DoRemoteDecode {
		return fail(ErrUnusable, op, keyDoDecode, "not true, so these are not the params of a reader's answer")
	}
	n := h.params.RemoteNumTokens
	if n < 1 || n > len(tokens) {
		return fail(ErrUnusable, op, "remote_num_tokens", "%d, want 1 to the %d tokens of the turn", n, len(tokens))
	}
	ttl := t.ttl
	if left := h.params.RemoteBlocksTTL; left > 0 {
		ttl = min(ttl, left)
	}
	e := &turn{scope: scope, digest: digest(tokens[:n]), h: h, expires: now.Add(ttl)}

	t.mu.Lock()
	defer t.mu.Unlock()
	t.drop(t.byScope[scope])
	for t.oldest.Len() >= t.limit {
		t.drop(t.oldest.Front())
	}
	t.byScope[scope] = t.oldest.PushBack(e)
	return nil
}

// Take gives out the offer of an earlier turn whose tokens the prompt starts
// with, and forgets it; else the zero Handoff: unknown scope, expired, or
// rewritten history.
func (t *Turns) Take(now time.Time, scope string, prompt []int) Handoff {
	t.mu.Lock()
	defer t.mu.Unlock()
	element := t.byScope[scope]
	if element == nil {
		return Handoff{}
	}
	e := element.Value.(*turn)
	if !now.Before(e.expires) {
		t.drop(element)
		return Handoff{}
	}
	n := e.h.params.RemoteNumTokens
	if n > len(prompt) || digest(prompt[:n]) != e.digest {
		return Handoff{}
	}
	t.drop(element)
	return e.h
}

// Len is the number of entries kept, expired ones that were not looked up
// since included.
func (t *Turns) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.oldest.Len()
}

func (t *Turns) drop(element *list.Element) {
	if element != nil {
		delete(t.byScope, t.oldest.Remove(element).(*turn).scope)
	}
}

func digest(tokens []int) (sum [sha256.Size]byte) {
	h := sha256.New()
	buf := make([]byte, 0, 4096)
	for _, token := range tokens {
		if buf = binary.LittleEndian.AppendUint64(buf, uint64(token)); len(buf) == cap(buf) {
			h.Write(buf)
			buf = buf[:0]
		}
	}
	h.Write(buf)
	h.Sum(sum[:0])
	return sum
}
