package nixl

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"
)

// Op is the direction of a transfer (nixl_capi_xfer_op_t).
type Op int32

const (
	Read  Op = iota // remote memory into local memory
	Write           // local memory into remote memory
)

func (o Op) String() string {
	switch o {
	case Read:
		return "READ"
	case Write:
		return "WRITE"
	}
	return fmt.Sprintf("Op(%d)", int32(o))
}

// TransferOptions are the optional arguments of NewTransfer, Start and CreateTransfer.
type TransferOptions struct {
	// Notification reaches the remote agent when the transfer is done. Notify
	// sends it even if it is empty.
	Notification []byte
	Notify       bool
	// SkipMerge keeps the library from joining descriptors that are contiguous
	// on both sides. Merging is what makes long lists fast.
	SkipMerge bool
	// Backend carries the transfer. Nil leaves the choice to the library.
	Backend *Backend
	// Custom is a parameter that the backend defines: "worker_id=1" picks a
	// worker of UCX, for instance. The library has it from NIXL 1.5.0 on.
	Custom []byte
}

// raw checks the options and turns them into those that cross, nil if there are none.
func (o *TransferOptions) raw(op string, s *agent) (*rawOptions, error) {
	if len(o.Notification) == 0 && !o.Notify && !o.SkipMerge && o.Backend == nil && len(o.Custom) == 0 {
		return nil, nil
	}
	if len(o.Notification) > math.MaxInt32 || len(o.Custom) > math.MaxInt32 {
		return nil, invalid(op, "the notification has %d bytes, the custom parameter %d", len(o.Notification), len(o.Custom))
	}
	r := &rawOptions{message: o.Notification, custom: o.Custom, notify: o.Notify || len(o.Notification) > 0, noMerge: o.SkipMerge}
	if o.Backend != nil {
		if o.Backend.a != s {
			return nil, invalid(op, "the backend belongs to another agent")
		}
		r.backend = o.Backend.h
	}
	return r, nil
}

// State is where a transfer stands.
type State int32

const (
	Idle   State = iota // never posted
	Active              // posted; the library owns the local memory of a READ
	Done                // all bytes are there
	Failed              // ended with an error, see Transfer.Err
)

func (s State) String() string {
	switch s {
	case Idle:
		return "idle"
	case Active:
		return "active"
	case Done:
		return "done"
	case Failed:
		return "failed"
	}
	return fmt.Sprintf("State(%d)", int32(s))
}

// Transfer is a request to move the descriptors of one list to those of
// another. It can be posted any number of times, one at a time.
//
// A posted transfer must be polled to its end: its notification leaves when it
// is found done. The agent polls what nobody else polls, so a forgotten one
// still ends.
type Transfer struct {
	s       *transfer // nil once closed; guarded by the agent's mu
	remote  *list
	bytes   uint64
	count   int32
	last    State // when it was closed
	err     error // when it was closed
	cleanup runtime.Cleanup
}

// transfer's fields are guarded by a.mu. Once its Transfer is closed, it serves another.
type transfer struct {
	a             *agent
	h             handle
	local, remote *list
	ends          map[uint64]uint64 // READs of files: how long each file descriptor's file must be
	err           error
	quarantine    time.Time // when Failed: until then the library may still write; zero: until the agent ends
	prev, next    *transfer // in a.active while Active
	place         int32     // in a.transfers
	state         State
}

// pollItem is one request of a batch; == nixlgo_poll_item.
type pollItem struct {
	req    handle
	status int32
	made   int32 // rawMake: the status of making it
}

// NewTransfer makes a request that moves descriptor ri[k] of the remote list
// from or to descriptor li[k] of the local one, for all k. A nil slice means
// all descriptors in order. Both sides need the same number of indices, at most
// 2^31-1, and each pair the same length; the library joins neighbours that are
// contiguous on both sides.
//
// Implements:
//
//	nixl_capi_make_xfer_req, nixl_capi_create_opt_args, nixl_capi_opt_args_set_notif_msg,
//	nixl_capi_opt_args_set_has_notif, nixl_capi_opt_args_set_skip_desc_merge,
//	nixl_capi_opt_args_add_backend, nixl_capi_opt_args_set_custom_param
func (a *Agent) NewTransfer(op Op, local *List, li []int32, remote *List, ri []int32, o TransferOptions) (*Transfer, error) {
	t, _, err := a.newTransfer("make transfer", op, local, li, remote, ri, &o, false)
	return t, err
}

// Start is NewTransfer and Post in one crossing, and answers as Post does. With
// an error nothing was made; a transfer that was made but could not be posted is
// Failed, and its Err tells why.
//
// Implements: as NewTransfer and Post.
func (a *Agent) Start(op Op, local *List, li []int32, remote *List, ri []int32, o TransferOptions) (*Transfer, State, error) {
	return a.newTransfer("start transfer", op, local, li, remote, ri, &o, true)
}

func (a *Agent) newTransfer(what string, op Op, local *List, li []int32, remote *List, ri []int32, o *TransferOptions, post bool) (*Transfer, State, error) {
	if op != Read && op != Write {
		return nil, Idle, invalid(what, "the operation %d does not exist", int32(op))
	}
	if local == nil || remote == nil {
		return nil, Idle, invalid(what, "a list is nil")
	}
	s, l, r := a.s, local.s, remote.s
	if l.a != s || r.a != s {
		return nil, Idle, invalid(what, "a list belongs to another agent")
	}
	if l.remote != "" || r.remote == "" {
		return nil, Idle, invalid(what, "the first list must be local and the second remote")
	}
	options, err := o.raw(what, s)
	if err != nil {
		return nil, Idle, err
	}
	li, ri = l.indices(li), r.indices(ri)
	bytes, err := pair(what, l, li, r, ri)
	if err != nil {
		return nil, Idle, err
	}
	if err := s.lock(what); err != nil {
		return nil, Idle, err
	}
	defer s.mu.Unlock()
	switch {
	case l.closed || r.closed:
		return nil, Idle, &Error{Op: what, Remote: r.remote, Cause: ErrClosed, Detail: "a list is closed"}
	case post && s.closing:
		return nil, Idle, closed(what)
	case r.left():
		return nil, Idle, stale(what, r.remote)
	}
	var ends map[uint64]uint64
	if op == Read && r.mem == File {
		ends = fileEnds(r.files, ri)
		if post {
			if err := checkFileEnds(what, ends); err != nil {
				return nil, Idle, err
			}
		}
	}
	made := rawMake(s.h, op, l, li, r, ri, options, post)
	if made.made < 0 {
		if Status(made.made) == statusIndex {
			return nil, Idle, outside(what, l, li, r, ri)
		}
		return nil, Idle, s.refused(what, r, options, Status(made.made))
	}
	t := s.adopt(made.req, l, r, bytes, len(li))
	t.s.ends = ends
	if post {
		t.s.posted(what, Status(made.status))
	}
	return t, t.s.state, nil
}

// refused explains why a request of sound arguments was not made.
func (s *agent) refused(op string, remote *list, o *rawOptions, st Status) error {
	switch {
	case st != StatusBackend:
		return failed(op, remote.remote, st)
	case o != nil && (o.backend != 0 || len(o.custom) > 0 || o.notify && remote.mem != DRAM && remote.mem != VRAM):
		return &Error{Op: op, Remote: remote.remote, Status: st, Detail: "look at the options: the backend may not serve both memory types, not notify, or not know the custom parameter"}
	}
	return s.peerError(op, remote.remote)
}

// adopt makes a request the agent's. s.mu is held.
func (s *agent) adopt(h handle, local, remote *list, bytes uint64, count int) *Transfer {
	n := len(s.transfers)
	if n == cap(s.transfers) {
		s.transfers = slices.Grow(s.transfers, 1)
	}
	s.transfers = s.transfers[:n+1]
	t := s.transfers[n]
	if t == nil {
		t = new(transfer)
		s.transfers[n] = t
	}
	t.a, t.h, t.local, t.remote, t.place = s, h, local, remote, int32(n)
	local.uses++
	remote.uses++
	out := &Transfer{s: t, remote: remote, bytes: bytes, count: int32(count)}
	if s.log != nil { // to watch an object costs as much as to make it
		out.cleanup = runtime.AddCleanup(out, (*transfer).warnLeak, t)
	}
	return out
}

// left reports whether the peer was replaced or dropped since. a.mu is held.
func (l *list) left() bool {
	if l.peer != nil && l.peer.fetched {
		l.a.peer(l.remote)
	}
	return l.peer != nil && l.peer.gone
}

func stale(op, remote string) error {
	return &Error{Op: op, Remote: remote, Cause: ErrStale, Detail: "the peer's metadata was replaced or dropped; load it and prepare the list again"}
}

// indices stands all descriptors in for nil.
func (l *list) indices(i []int32) []int32 {
	if i != nil {
		return i
	}
	all := make([]int32, l.n)
	for k := range all {
		all[k] = int32(k)
	}
	return all
}

// pair checks what pairs of descriptors the indices name, and returns the number
// of their bytes. If the descriptors are all of one length, which those of most
// lists are, only the bounds remain to be checked, and rawMake does that.
func pair(op string, l *list, li []int32, r *list, ri []int32) (uint64, error) {
	if len(li) != len(ri) {
		return 0, invalid(op, "%d local indices for %d remote ones", len(li), len(ri))
	}
	if len(li) == 0 {
		return 0, invalid(op, "no indices")
	}
	if len(li) > math.MaxInt32 {
		return 0, invalid(op, "%d indices are more than %d", len(li), math.MaxInt32)
	}
	if l.lengths == nil && r.lengths == nil && l.each == r.each && r.files == nil {
		return l.each * uint64(len(li)), nil
	}
	var bytes uint64
	for k, i := range li {
		j := ri[k]
		if uint(i) >= uint(l.n) || uint(j) >= uint(r.n) {
			return 0, outside(op, l, li, r, ri)
		}
		n := l.length(i)
		if m := r.length(j); m != n {
			return 0, invalid(op, "pair %d joins local descriptor %d of %d bytes with remote descriptor %d of %d bytes", k, i, n, j, m)
		}
		bytes += n
	}
	return bytes, nil
}

// outside tells which index names no descriptor.
func outside(op string, l *list, li []int32, r *list, ri []int32) error {
	k := 0
	for k < len(li)-1 && uint(li[k]) < uint(l.n) && uint(ri[k]) < uint(r.n) {
		k++
	}
	return invalid(op, "pair %d names descriptors %d of %d local and %d of %d remote ones", k, li[k], l.n, ri[k], r.n)
}

// Bytes returns how many bytes the transfer moves, Count how many descriptors.
func (t *Transfer) Bytes() uint64 { return t.bytes }

// Count returns the number of descriptors that the transfer moves.
func (t *Transfer) Count() int { return int(t.count) }

// Post starts the transfer, for the first time or again. It answers Active, or
// Done if all bytes are there already. A transfer that is active is ErrActive;
// one whose peer's metadata was replaced is ErrStale.
//
// Implements:
//
//	nixl_capi_post_xfer_req
func (t *Transfer) Post() (State, error) {
	const op = "post"
	if err := t.lock(op); err != nil {
		return t.last, err
	}
	defer t.remote.a.mu.Unlock()
	return t.s.post(op)
}

// lock takes the agent for a call on an open transfer.
func (t *Transfer) lock(op string) error {
	a := t.remote.a
	if err := a.lock(op); err != nil {
		return err
	}
	if t.s == nil {
		a.mu.Unlock()
		return &Error{Op: op, Remote: t.remote.remote, Cause: ErrClosed, Detail: "the transfer is closed"}
	}
	return nil
}

func (t *transfer) post(op string) (State, error) {
	switch {
	case t.a.closing:
		return t.state, closed(op)
	case t.state == Active:
		return Active, &Error{Op: op, Remote: t.remote.remote, Cause: ErrActive, Detail: "poll it to its end before posting it again"}
	case t.state == Done && t.remote.mem == Block:
		return Done, &Error{Op: op, Remote: t.remote.remote, Cause: ErrState, Detail: "a transfer of a block device is posted once; make a new one"}
	case t.state == Failed:
		return Failed, &Error{Op: op, Remote: t.remote.remote, Cause: ErrState, Detail: "the transfer failed; close it and make a new one"}
	case t.remote.left():
		return t.state, stale(op, t.remote.remote)
	}
	if err := checkFileEnds(op, t.ends); err != nil {
		return t.state, err
	}
	t.a.items = append(t.a.items[:0], pollItem{req: t.h})
	t.posted(op, rawPost(t.a.h, &t.a.items[0]))
	return t.state, t.err
}

// posted records a post and what it answered.
func (t *transfer) posted(op string, st Status) {
	if st != StatusInProgress {
		t.ended(op, st)
		if st == StatusNotFound {
			t.quarantine = time.Now() // refused before anything left
		}
		return
	}
	t.state = Active
	t.a.active.push(t)
	if t.remote.peer != nil {
		t.remote.peer.active++
	}
	t.a.sweep.watch(t.a)
}

// settle records what the library answered about an active transfer.
func (t *transfer) settle(op string, st Status) {
	if st == StatusInProgress {
		return
	}
	t.a.active.remove(t)
	if t.remote.peer != nil {
		t.remote.peer.active--
	}
	t.ended(op, st)
}

// ended records how a post ended.
func (t *transfer) ended(op string, st Status) {
	if st == StatusSuccess {
		t.state = Done
		return
	}
	t.state = Failed
	p := t.remote.peer
	if st == StatusBackend && t.a.folds && p != nil && rawCheck(t.a.h, p.cname, DRAM, nil) == StatusNotFound {
		st = StatusNotFound // whether by a dead connection or a working one, nobody can tell
	}
	switch {
	case st == StatusBackend:
		if p != nil {
			p.failed = true
		}
		t.err = t.a.peerError(op, t.remote.remote)
	case p == nil:
		t.err = failed(op, "", st)
	default:
		t.err = &Error{Op: op, Remote: t.remote.remote, Status: st, Cause: ErrPeer, Detail: "the peer's metadata was dropped meanwhile"}
	}
	if st == StatusBackend || p != nil && p.failed {
		t.quarantine = time.Now().Add(t.a.settleTime)
	}
}

// settled reports whether the library can no longer touch the local memory.
func (t *transfer) settled() bool {
	switch t.state {
	case Active:
		return false
	case Failed:
		return !t.quarantine.IsZero() && !time.Now().Before(t.quarantine)
	}
	return true
}

// Settled reports whether the library can no longer touch the local memory, so
// that the memory can be used for something else. An idle or done transfer is
// settled; an active one is not.
//
// A failed one needs care: a negative status does not prove that the bytes
// stopped coming. After a transport error the library ends all requests to the
// peer, which takes no more than SettleTime. A transfer that failed because the
// peer's metadata was dropped, while its connection worked, is settled only by
// the agent's Close. A closed transfer or agent counts as settled.
func (t *Transfer) Settled() bool {
	a := t.remote.a
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.closed || t.s == nil || t.s.settled()
}

// Poll asks where the transfer stands. For Failed it returns the error too.
//
// Implements:
//
//	nixl_capi_get_xfer_status
func (t *Transfer) Poll() (State, error) {
	if err := t.lock("poll"); err != nil {
		return t.last, err
	}
	s := t.remote.a
	defer s.mu.Unlock()
	if t.s.state == Active {
		s.items = append(s.items[:0], pollItem{req: t.s.h})
		rawPoll(s.h, s.items)
		t.s.settle("poll", Status(s.items[0].status))
	}
	return t.s.state, t.s.err
}

// Err returns why the transfer failed, nil if it did not.
func (t *Transfer) Err() error {
	a := t.remote.a
	a.mu.Lock()
	defer a.mu.Unlock()
	if t.s == nil {
		return t.err
	}
	return t.s.err
}

// PollAll polls transfers in one crossing for each run of transfers of one
// agent, and writes where they stand into states, which has the same length.
// Err tells why one failed. Transfers that are not active cost nothing.
//
// Implements: as Poll.
func PollAll(ts []*Transfer, states []State) error {
	const op = "poll all"
	if len(ts) != len(states) {
		return invalid(op, "%d transfers, but room for %d states", len(ts), len(states))
	}
	if slices.Contains(ts, nil) {
		return invalid(op, "a transfer is nil")
	}
	for first := 0; first < len(ts); {
		s, last := ts[first].remote.a, first+1
		for last < len(ts) && ts[last].remote.a == s {
			last++
		}
		if err := s.lock(op); err != nil {
			return err
		}
		s.items = s.items[:0]
		for _, t := range ts[first:last] {
			if t.s != nil && t.s.state == Active {
				s.items = append(s.items, pollItem{req: t.s.h})
			}
		}
		if len(s.items) > 0 {
			rawPoll(s.h, s.items)
		}
		k := 0
		for i, t := range ts[first:last] {
			if t.s == nil {
				states[first+i] = t.last
				continue
			}
			if k < len(s.items) && s.items[k].req == t.s.h {
				if t.s.state == Active {
					t.s.settle("poll", Status(s.items[k].status))
				}
				k++
			}
			states[first+i] = t.s.state
		}
		s.mu.Unlock()
		first = last
	}
	return nil
}

// Wait polls until the transfer ends or the context does. It returns nil when
// all bytes are there. When the context ends first, the transfer stays active
// and the library still owns its memory.
func (t *Transfer) Wait(ctx context.Context) error {
	const op = "wait"
	start := time.Now()
	var timer *time.Timer
	for spins := 0; ; spins++ {
		state, err := t.Poll()
		switch {
		case err != nil:
			return err
		case state == Done:
			return nil
		case state == Idle:
			return &Error{Op: op, Remote: t.remote.remote, Cause: ErrState, Detail: "the transfer was not posted"}
		}
		if err := ctx.Err(); err != nil {
			return &Error{Op: op, Remote: t.remote.remote, Cause: err, Detail: "the transfer is still active, and its memory the library's"}
		}
		if spins < 16 {
			runtime.Gosched()
			continue
		}
		// An eighth of the time waited so far: latency stays within it, and
		// ten thousand waiters on a stalled peer cost little.
		delay := min(max(time.Since(start)/8, 20*time.Microsecond), 10*time.Millisecond)
		if timer == nil {
			timer = time.NewTimer(delay)
			defer timer.Stop()
		} else {
			timer.Reset(delay)
		}
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
	}
}

// Close ends the transfer. While it is not settled Close changes nothing and
// answers ErrActive: the library has no abort, so the bytes of a READ keep
// landing and the memory stays the library's (see Settled). A second Close does
// nothing.
//
// Implements:
//
//	nixl_capi_release_xfer_req, nixl_capi_destroy_xfer_req
func (t *Transfer) Close() error {
	const op = "close transfer"
	s := t.remote.a
	s.mu.Lock()
	defer s.mu.Unlock()
	x := t.s
	if s.closed || x == nil {
		return nil
	}
	if !x.settled() {
		return &Error{Op: op, Remote: t.remote.remote, Cause: ErrActive, Detail: "the transfer is " + x.state.String() + ", and the library may still touch the local memory"}
	}
	t.cleanup.Stop()
	t.s, t.last, t.err = nil, x.state, x.err
	st := rawRelease(s.h, x.h)
	x.local.uses--
	x.local.unhold()
	x.remote.uses--
	x.remote.unhold()
	s.discard(x)
	return failed(op, t.remote.remote, st)
}

const keepTransfers = 1024 // for the next ones, behind the end of agent.transfers

// discard makes t ready for another request. s.mu is held.
func (s *agent) discard(t *transfer) {
	end := len(s.transfers) - 1
	last := s.transfers[end]
	last.place, s.transfers[t.place] = t.place, last
	*t = transfer{}
	if s.transfers[end] = t; end >= keepTransfers {
		s.transfers[end] = nil
	}
	s.transfers = s.transfers[:end]
}

func (t *transfer) warnLeak() {
	t.a.mu.Lock()
	closed, state := t.a.closed, t.state
	t.a.mu.Unlock()
	if !closed {
		t.a.log.Warn("nixl: a transfer was dropped without Close", "agent", t.a.name, "remote", t.remote.remote, "state", state.String())
	}
}
