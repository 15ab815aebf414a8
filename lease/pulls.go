package lease

import (
	"fmt"
	"slices"
)

// Pulls is the reader's side of one rank: which block READs are active, which
// requests are due for their check, and what became of them. Whoever owns it
// posts the READs. Not safe for concurrent use.
//
// A pull passes through these states on a rank:
//
//	reading ── every block READ ended ──▶ due ── NextChecks ──▶ checking ──▶ finished
//
// Without verification it is finished when its blocks are in. The slots are read
// only after all block READs of the pull ended, so a nonce that is still there
// proves that the owner held the blocks for the whole time.
type Pulls struct {
	byID     map[string]*pull
	due      []*pull
	posted   map[uint64]*check
	token    uint64
	finished []Finished
}

type pull struct {
	Pull
	ranks   []int
	reading map[int]bool // ranks whose block READ is active
	checks  int          // slot READs that are active
	phase   pullPhase
	lapsed  error
	err     error // the first other failure
	told    bool  // a quarantined failure was reported
	dropped bool  // given up by Cancel
}

type pullPhase uint8

const (
	pullReading pullPhase = iota
	pullDue
	pullChecking
	pullDone
)

type check struct {
	batch CheckBatch
	pulls []*pull
}

// CheckBatch is one slot READ: the slots to read from one rank of one peer, in
// this order, each into a cell of its own that was cleared before.
type CheckBatch struct {
	Peer  Peer
	Rank  int
	Slots []int

	token uint64
}

// Finished is a pull that came to an end on this rank.
type Finished struct {
	Pull  Pull
	Ranks []int
	// Cause is why it failed, 0 when the blocks are in and, if asked for,
	// verified; Err matches its sentinel.
	Cause Cause
	Err   error
	// Quarantined: the failure is final, but block READs are active and may
	// write. A Finished with Settled follows.
	Quarantined bool
	// Settled: no READ of the pull is active any more, after a Cancel or a
	// quarantined failure. There is nothing else to report.
	Settled bool
}

// NewPulls makes an empty Pulls.
func NewPulls() *Pulls {
	return &Pulls{byID: make(map[string]*pull), posted: make(map[uint64]*check)}
}

// Start begins a pull from the given ranks of its peer, with one block READ per
// rank outstanding from now. A pull that has to be verified and carries no lease
// is ErrUnverifiable; post nothing for it. A request whose earlier READs are
// still active is ErrBusy: an abandoned READ could land after the check of the
// new one.
func (p *Pulls) Start(pl Pull, ranks []int) error {
	const op = "start pull"
	if old := p.byID[pl.Request]; old != nil && injected&faultXZOMBIE == 0 {
		return &Error{Op: op, Request: pl.Request, Detail: "its earlier READ has not ended", Err: ErrBusy}
	}
	if pl.Request == "" {
		return invalid(op, "", "has no request id")
	}
	if len(ranks) == 0 {
		return invalid(op, pl.Request, "reads no rank")
	}
	q := &pull{Pull: pl, ranks: slices.Clone(ranks), reading: make(map[int]bool, len(ranks))}
	for _, r := range ranks {
		if r < 0 || q.reading[r] {
			return invalid(op, pl.Request, "ranks %v, want each once and none negative", ranks)
		}
		q.reading[r] = true
	}
	if pl.Verify {
		if err := pl.Lease.verifiable(op, pl.Request); err != nil {
			return err
		}
	}
	p.byID[pl.Request] = q
	return nil
}

// verifiable says why a check is impossible, nil when it is possible.
func (l *SlotRef) verifiable(op, request string) error {
	switch {
	case l == nil:
		return &Error{Op: op, Request: request, Err: ErrUnverifiable,
			Detail: "kv_transfer_params carry no remote_lease_slot and remote_lease_nonce: the owner had no free slot or does not offer them, or a router dropped them"}
	case l.Slot < 0 || l.Nonce < 1 || l.Nonce > MaxNonce:
		return &Error{Op: op, Request: request, Err: ErrUnverifiable,
			Detail: fmt.Sprintf("slot %d with nonce %d cannot be", l.Slot, l.Nonce)}
	}
	return nil
}

// BlocksRead says that the block READ from a rank reached its end: the library
// will not write for it again. err is nil when every byte is in. A READ that is
// not active, or was said to have ended before, is ErrUnknown.
func (p *Pulls) BlocksRead(request string, rank int, err error) error {
	q := p.byID[request]
	if q == nil || !q.reading[rank] {
		return &Error{Op: "blocks read", Request: request, Detail: fmt.Sprintf("no READ from rank %d is active", rank), Err: ErrUnknown}
	}
	delete(q.reading, rank)
	q.fail(err)
	if len(q.reading) > 0 {
		return nil
	}
	switch {
	case q.dropped || q.told:
		p.finish(q, Finished{Settled: true})
	case q.err != nil:
		p.finish(q, Finished{Cause: CauseOf(q.err), Err: q.err})
	case !q.Verify:
		p.finish(q, Finished{})
	case q.phase == pullReading:
		q.phase = pullDue
		p.due = append(p.due, q)
	}
	return nil
}

func (q *pull) fail(err error) {
	if q.err == nil {
		q.err = err
	}
}

func (p *Pulls) finish(q *pull, f Finished) {
	f.Pull, f.Ranks = q.Pull, q.ranks
	q.phase = pullDone
	if p.byID[q.Request] == q {
		delete(p.byID, q.Request)
	}
	p.finished = append(p.finished, f)
}

// NextChecks returns the slot READs to post now, one for each rank of each
// engine, for every pull whose block READs have all ended. A pull that comes
// later goes into later ones: a slot READ that is under way may have passed its
// slot before its blocks were in.
func (p *Pulls) NextChecks() []CheckBatch {
	if injected&faultM2 != 0 {
		for _, q := range p.byID {
			if q.phase == pullReading && q.Verify && !q.dropped && !q.told {
				q.phase = pullDue
				p.due = append(p.due, q)
			}
		}
	}
	type place struct {
		peer Peer
		rank int
	}
	var order []*check
	byPlace := make(map[place]*check)
	if injected&faultXJOIN != 0 {
		for _, c := range p.posted {
			byPlace[place{c.batch.Peer, c.batch.Rank}] = c
		}
	}
	for _, q := range p.due {
		if q.phase != pullDue {
			continue // given up meanwhile
		}
		q.phase = pullChecking
		ranks := q.ranks
		if injected&faultM4 != 0 {
			ranks = ranks[:1]
		}
		for _, r := range ranks {
			at := place{q.Peer, r}
			c := byPlace[at]
			if c == nil {
				p.token++
				c = &check{batch: CheckBatch{Peer: at.peer, Rank: r, token: p.token}}
				byPlace[at] = c
				p.posted[p.token] = c
				order = append(order, c)
			}
			c.batch.Slots = append(c.batch.Slots, q.Lease.Slot)
			c.pulls = append(c.pulls, q)
			q.checks++
		}
	}
	clear(p.due)
	p.due = p.due[:0]
	batches := make([]CheckBatch, len(order))
	for i, c := range order {
		batches[i] = c.batch
		batches[i].Slots = slices.Clone(c.batch.Slots)
	}
	return batches
}

// Checked says that a slot READ ended. cells are the values read, in the order
// of the batch's Slots; with err they are not looked at. A pull is received only
// if every rank's cell equals its nonce exactly. A batch that is not posted is
// ErrUnknown, another number of cells than of slots ErrInvalid.
func (p *Pulls) Checked(b CheckBatch, cells []int64, err error) error {
	c := p.posted[b.token]
	if c == nil {
		return &Error{Op: "check", Detail: fmt.Sprintf("no slot READ from rank %d of engine %q is active", b.Rank, b.Peer.Engine), Err: ErrUnknown}
	}
	if err == nil && len(cells) != len(c.pulls) && injected&faultXJOIN == 0 {
		return invalid("check", "", "%d cells for %d slots", len(cells), len(c.pulls))
	}
	delete(p.posted, b.token)
	for i, q := range c.pulls {
		if q.phase != pullChecking {
			continue // given up meanwhile
		}
		q.checks--
		cell := int64(0)
		if err == nil {
			cell = cells[min(i, len(cells)-1)]
		}
		switch {
		case err != nil:
			q.fail(&Error{Op: "check", Request: q.Request, Err: fmt.Errorf("%w: %w", ErrUnverifiable, err),
				Detail: fmt.Sprintf("reading slot %d of rank %d of engine %q failed", q.Lease.Slot, c.batch.Rank, c.batch.Peer.Engine)})
		case cell != q.Lease.Nonce && (injected&faultXNZ == 0 || cell == 0):
			q.lapsed = &Error{Op: "check", Request: q.Request, Err: ErrLapsed,
				Detail: fmt.Sprintf("slot %d of rank %d of engine %q does not hold the nonce any more; its blocks must not be used", q.Lease.Slot, c.batch.Rank, c.batch.Peer.Engine)}
		}
		if q.checks > 0 || len(q.reading) > 0 && injected&faultM2 == 0 {
			continue
		}
		switch {
		case q.lapsed != nil:
			p.finish(q, Finished{Cause: CauseLapsed, Err: q.lapsed})
		case q.err != nil:
			p.finish(q, Finished{Cause: CauseOf(q.err), Err: q.err})
		default:
			p.finish(q, Finished{})
		}
	}
	return nil
}

// Cancel gives a pull up. A Finished with Settled comes when none of its block
// READs is active; until then its buffers are not the caller's. Again changes
// nothing. A request that is not being pulled is ErrUnknown.
func (p *Pulls) Cancel(request string) error {
	q := p.byID[request]
	if q == nil {
		return &Error{Op: "cancel pull", Request: request, Detail: "is not being pulled", Err: ErrUnknown}
	}
	q.dropped = true
	if len(q.reading) == 0 {
		p.finish(q, Finished{Settled: true})
	}
	return nil
}

// Fail gives a pull up with a failure, for example a timeout, although its READs
// may be active. It is reported at once, Quarantined if a block READ is active;
// a Finished with Settled follows then. Again changes nothing. A request that is
// not being pulled is ErrUnknown, and no err ErrInvalid.
func (p *Pulls) Fail(request string, err error) error {
	q := p.byID[request]
	switch {
	case q == nil:
		return &Error{Op: "fail pull", Request: request, Detail: "is not being pulled", Err: ErrUnknown}
	case err == nil:
		return invalid("fail pull", request, "needs the error that it failed with")
	case q.dropped || q.told:
		return nil // only its end is waited for
	case len(q.reading) == 0:
		p.finish(q, Finished{Cause: CauseOf(err), Err: err})
		return nil
	}
	q.told = true
	p.finished = append(p.finished, Finished{Pull: q.Pull, Ranks: q.ranks, Cause: CauseOf(err), Err: err, Quarantined: true})
	return nil
}

// Finished appends the pulls that ended since the last call.
func (p *Pulls) Finished(dst []Finished) []Finished {
	dst = append(dst, p.finished...)
	clear(p.finished)
	p.finished = p.finished[:0]
	return dst
}

// Len is the number of pulls whose READs have not all ended.
func (p *Pulls) Len() int { return len(p.byID) }
