package nixl

import (
	"math"
	"runtime"
	"slices"
)

// List is a prepared descriptor list, of local or of remote memory. Transfers
// pick descriptors of two lists by index, which is the cheapest way to start
// one: no descriptor crosses into C again. One List serves any number of
// transfers.
type List struct {
	s       *list
	cleanup runtime.Cleanup
}

type list struct {
	a      *agent
	h      handle
	mem    MemType
	remote string // "" for a local list
	peer   *peer  // nil for a local list and for the agent's own memory
	n      int
	// Lengths, to pair descriptors without asking the library: one for all if
	// they are equal (most lists), else one each.
	each    uint64
	lengths []uint64
	files   []Desc          // the descriptors, of a list of files
	regs    []*registration // held while the list or a transfer made from it lives
	uses    int             // transfers made from it
	closed  bool
}

func (l *list) length(i int32) uint64 {
	if l.lengths == nil {
		return l.each
	}
	return l.lengths[i]
}

// Len returns the number of descriptors.
func (l *List) Len() int { return l.s.n }

// PrepareLocal prepares descriptors of this agent's memory. Each must lie
// inside one live registration.
//
// Implements:
//
//	nixl_capi_create_xfer_dlist, nixl_capi_xfer_dlist_resize,
//	nixl_capi_xfer_dlist_clear, nixl_capi_xfer_dlist_add_desc,
//	nixl_capi_prep_xfer_dlist, nixl_capi_destroy_xfer_dlist
func (a *Agent) PrepareLocal(mem MemType, descs []Desc) (*List, error) {
	return a.prepare("prepare local list", "", mem, descs)
}

// PrepareRemote prepares descriptors of a peer's memory. Each must lie inside
// one range that the peer's metadata offers. The agent's own name stands for
// its own registrations.
//
// An address outside of what the peer registered makes the peer's process
// crash, so this check is what keeps a bad block number from doing so.
//
// Implements: as PrepareLocal.
func (a *Agent) PrepareRemote(remote string, mem MemType, descs []Desc) (*List, error) {
	const op = "prepare remote list"
	if err := checkName(op, remote); err != nil {
		return nil, err
	}
	return a.prepare(op, remote, mem, descs)
}

func (a *Agent) prepare(op, remote string, mem MemType, descs []Desc) (*List, error) {
	l, err := newList(a.s, op, remote, mem, descs)
	if err != nil {
		return nil, err
	}
	s := a.s
	if err := s.lock(op); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	if err := l.locate(op, descs); err != nil {
		return nil, err
	}
	var st Status
	l.h, st = rawPrepare(s.h, cname(remote), mem, descs)
	if st < 0 {
		return nil, &Error{Op: op, Remote: remote, Status: st, Detail: "no common backend serves " + mem.String()}
	}
	l.hold()
	s.lists[l] = struct{}{}
	out := &List{s: l}
	if s.log != nil {
		out.cleanup = runtime.AddCleanup(out, (*list).warnLeak, l)
	}
	return out, nil
}

// newList checks what needs no lock.
func newList(s *agent, op, remote string, mem MemType, descs []Desc) (*list, error) {
	each, err := checkDescs(op, mem, descs)
	if err != nil {
		return nil, err
	}
	l := &list{a: s, mem: mem, remote: remote, n: len(descs), each: each}
	if each == 0 {
		l.lengths = make([]uint64, len(descs))
		for i, d := range descs {
			l.lengths[i] = d.Len
		}
	}
	if mem == File {
		l.files = slices.Clone(descs)
	}
	return l, nil
}

// locate finds the memory that the descriptors lie in. a.mu is held.
func (l *list) locate(op string, descs []Desc) error {
	if l.remote == "" || l.remote == l.a.name {
		return l.findRegistrations(op, descs)
	}
	l.peer = l.a.peer(l.remote)
	if l.peer == nil {
		return &Error{Op: op, Remote: l.remote, Cause: ErrNotFound, Detail: "load the peer's metadata first"}
	}
	return l.a.offers(op, l.peer, l.mem, descs)
}

// checkDescs refuses what no list can hold, and returns the length of each
// descriptor, 0 if they differ.
func checkDescs(op string, mem MemType, descs []Desc) (each uint64, err error) {
	if !mem.valid() {
		return 0, invalid(op, "the memory type %d does not exist", int32(mem))
	}
	if len(descs) == 0 {
		return 0, invalid(op, "the list is empty")
	}
	if len(descs) > math.MaxInt32 {
		return 0, invalid(op, "%d descriptors are more than %d", len(descs), math.MaxInt32)
	}
	each = descs[0].Len
	for i := range descs {
		d := &descs[i]
		if d.Len == 0 || d.Addr+d.Len < d.Addr {
			return 0, invalid(op, "descriptor %d, %v, has no length or wraps around the address space", i, *d)
		}
		if d.Len != each {
			each = 0
		}
	}
	return each, nil
}

// findRegistrations finds the registrations that the descriptors lie in.
func (l *list) findRegistrations(op string, descs []Desc) error {
	seen := map[*registration]bool{}
	for i := 0; i < len(descs); {
		r := l.a.regs.containing(l.mem, descs[i])
		if r == nil {
			return invalid(op, "descriptor %d, %s%v, is not inside a live registration of agent %s", i, l.mem, descs[i], l.a.name)
		}
		if !seen[r] {
			seen[r] = true
			l.regs = append(l.regs, r)
		}
		i += inside(descs[i:], r.Desc)
	}
	return nil
}

// Close releases the list. Transfers made from it go on. A second Close does
// nothing.
//
// Implements:
//
//	nixl_capi_release_xfer_dlist_handle
func (l *List) Close() error {
	l.cleanup.Stop()
	s := l.s.a
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || l.s.closed {
		return nil
	}
	l.s.closed = true
	delete(s.lists, l.s)
	st := rawListRelease(s.h, l.s.h) // freed whatever it answers
	l.s.unhold()
	return failed("release list", l.s.remote, st)
}

// hold keeps the registrations from being closed.
func (l *list) hold() {
	for _, r := range l.regs {
		r.uses++
	}
}

// unhold lets go of the registrations once neither the list nor a transfer needs them.
func (l *list) unhold() {
	if l.closed && l.uses == 0 {
		for _, r := range l.regs {
			r.uses--
		}
		l.regs = nil
	}
}

func (l *list) warnLeak() {
	l.a.mu.Lock()
	closed := l.closed || l.a.closed
	l.a.mu.Unlock()
	if !closed {
		l.a.log.Warn("nixl: a prepared list was dropped without Close", "agent", l.a.name, "remote", l.remote, "descriptors", l.n)
	}
}
