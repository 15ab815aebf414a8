package rdmatest

import (
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/nixlgo/nixlgo/nixl"
)

// Read is a READ of a Fabric. It implements rdma.Read for its reader, and is the test's handle on it. Its bytes are
// numbered from 0 in the order of its descriptors.
type Read struct {
	n             *Network
	f             *Fabric
	peer          *peer
	local, remote []nixl.Desc
	size          uint64

	state  nixl.State
	err    error
	broken bool // failed, and not over
	closed bool
	landed []span // sorted, apart
	wire   []byte // what Fetch took from the owner
}

type span struct{ from, to uint64 }

// Reader is the name of the fabric that posted the READ.
func (r *Read) Reader() string { return r.f.name }

// Owner is the name of the fabric whose memory is read.
func (r *Read) Owner() string { return r.peer.frame.Name }

// Descs are the READ's descriptors, pair by pair.
func (r *Read) Descs() (local, remote []nixl.Desc) {
	return slices.Clone(r.local), slices.Clone(r.remote)
}

// Bytes is the READ's length in bytes.
func (r *Read) Bytes() uint64 { return r.size }

// between reports whether the READ goes from one of a and b to the other.
func (r *Read) between(a, b *Fabric) bool {
	to := r.peer.to()
	return r.f == a && to == b || r.f == b && to == a
}

// Post implements rdma.Read.
func (r *Read) Post() (nixl.State, error) {
	const op = "post"
	r.n.mu.Lock()
	defer r.n.mu.Unlock()
	name := r.peer.frame.Name
	switch {
	case r.f.dead || r.closed:
		return r.state, &nixl.Error{Op: op, Remote: name, Cause: nixl.ErrClosed, Detail: "the transfer is closed"}
	case r.state == nixl.Active:
		return r.state, &nixl.Error{Op: op, Remote: name, Cause: nixl.ErrActive, Detail: "poll it to its end before posting it again"}
	case r.state == nixl.Failed:
		return r.state, &nixl.Error{Op: op, Remote: name, Cause: nixl.ErrState, Detail: "the transfer failed; close it and make a new one"}
	case r.peer.gone:
		return r.state, stale(op, r.peer)
	}
	err := r.f.fault(OpPost, op)
	if to := r.peer.to(); err == nil && (to == nil || to.dead || r.peer.failed || r.forged()) {
		err = r.f.peerError(op, r.peer)
	}
	if err != nil {
		r.state, r.err = nixl.Failed, err
		return r.state, err
	}
	r.state, r.landed, r.wire = nixl.Active, nil, nil
	r.peer.active++
	r.n.reads = append(r.n.reads, r)
	return r.state, nil
}

// forged reports whether the metadata promised memory that is not there. Over TCP the owner would crash.
func (r *Read) forged() bool {
	return slices.ContainsFunc(r.remote, func(d nixl.Desc) bool { return r.n.at(d) == nil })
}

// Err implements rdma.Read.
func (r *Read) Err() error {
	r.n.mu.Lock()
	defer r.n.mu.Unlock()
	return r.err
}

// State is what a poll of the READ answered last, or would answer while it is held.
func (r *Read) State() nixl.State {
	r.n.mu.Lock()
	defer r.n.mu.Unlock()
	return r.state
}

// Close implements rdma.Read: it answers nixl.ErrActive while bytes can land.
func (r *Read) Close() error {
	r.n.mu.Lock()
	defer r.n.mu.Unlock()
	if !r.f.dead && !r.closed && (r.state == nixl.Active || r.broken) {
		return &nixl.Error{Op: "close transfer", Remote: r.peer.frame.Name, Cause: nixl.ErrActive,
			Detail: "the transfer is " + r.state.String() + ", and the local memory may still be written"}
	}
	r.closed = true
	return nil
}

// Movable reports whether bytes of the READ can land now: it is active or broken, both fabrics run, and the link is not
// cut.
func (r *Read) Movable() bool {
	r.n.mu.Lock()
	defer r.n.mu.Unlock()
	return r.movable()
}

func (r *Read) movable() bool {
	return (r.state == nixl.Active || r.broken) && r.n.open(r.f, r.peer.to())
}

// Land lets the bytes from, from+1 … to-1 land, as the owner's memory holds them now, or held them when Fetch was called.
// Those that landed before are left alone. The READ is done when all have landed. A descriptor of 8 aligned bytes lands
// whole. It reports false, and does nothing, when the READ is not Movable.
func (r *Read) Land(from, to uint64) bool {
	r.n.mu.Lock()
	defer r.n.mu.Unlock()
	return r.land(from, to)
}

// Deliver lets all bytes land that have not.
func (r *Read) Deliver() bool { return r.Land(0, r.size) }

func (r *Read) land(from, to uint64) bool {
	if !r.movable() {
		return false
	}
	r.each(from, to, func(k int, s span, at uint64) {
		src := r.wire
		if src != nil {
			src = src[at+s.from : at+s.to]
		} else {
			src = r.n.at(part(r.remote[k], s))
		}
		move(r.n.at(part(r.local[k], s)), src)
		r.landed = merge(r.landed, span{at + s.from, at + s.to})
	})
	if len(r.landed) == 1 && r.landed[0] == (span{0, r.size}) {
		r.end(nil)
	}
	return true
}

// Fetch takes the bytes that have not landed from the owner's memory now. They are on their way then, and land as they are,
// whatever the owner writes later.
func (r *Read) Fetch() bool {
	r.n.mu.Lock()
	defer r.n.mu.Unlock()
	if !r.movable() || r.wire != nil {
		return false
	}
	wire := make([]byte, r.size)
	r.each(0, r.size, func(k int, s span, at uint64) {
		move(wire[at+s.from:at+s.to], r.n.at(part(r.remote[k], s)))
	})
	r.wire = wire
	return true
}

// each calls f for the parts of the READ in from … to that have not landed: the descriptor, the part of it, and where the
// descriptor begins in the READ.
func (r *Read) each(from, to uint64, f func(k int, s span, at uint64)) {
	to = min(to, r.size)
	var gaps []span
	for _, l := range append(slices.Clone(r.landed), span{r.size, r.size}) {
		if s := (span{from, min(to, l.from)}); s.from < s.to {
			gaps = append(gaps, s)
		}
		from = max(from, l.to)
	}
	k, at := 0, uint64(0)
	for _, g := range gaps {
		for g.from < g.to {
			for at+r.local[k].Len <= g.from {
				at += r.local[k].Len
				k++
			}
			s := span{g.from - at, min(g.to-at, r.local[k].Len)}
			if whole(r.local[k]) && whole(r.remote[k]) {
				s = span{0, 8}
			}
			f(k, s, at)
			g.from = at + s.to
		}
	}
}

// whole reports whether d is one aligned word, which is never torn.
func whole(d nixl.Desc) bool { return d.Len == 8 && d.Addr%8 == 0 }

func part(d nixl.Desc, s span) nixl.Desc {
	return nixl.Desc{Addr: d.Addr + s.from, Len: s.to - s.from}
}

// move copies bytes; one aligned word at once, so that a lease slot and its check need no lock.
func move(dst, src []byte) {
	d, s := unsafe.Pointer(unsafe.SliceData(dst)), unsafe.Pointer(unsafe.SliceData(src))
	if len(dst) == 8 && len(src) == 8 && uintptr(d)%8 == 0 && uintptr(s)%8 == 0 {
		atomic.StoreInt64((*int64)(d), atomic.LoadInt64((*int64)(s)))
		return
	}
	copy(dst, src)
}

func merge(spans []span, s span) []span {
	out := make([]span, 0, len(spans)+1)
	for _, o := range spans {
		if o.to < s.from || o.from > s.to {
			out = append(out, o)
		} else {
			s = span{min(s.from, o.from), max(s.to, o.to)}
		}
	}
	i, _ := slices.BinarySearchFunc(out, s.from, func(o span, from uint64) int {
		if o.from < from {
			return -1
		}
		return 1
	})
	return slices.Insert(out, i, s)
}

// Fail ends the READ with err, or with nixl.ErrPeer when err is nil, in which case the peer has to be forgotten and loaded
// again. Bytes that have not landed never will.
func (r *Read) Fail(err error) {
	r.n.mu.Lock()
	defer r.n.mu.Unlock()
	if r.broken {
		r.end(r.err)
	} else if r.state == nixl.Active {
		r.end(r.orPeer(err))
	}
}

// Break makes the READ answer that it failed, with err as Fail does, although its bytes can still land: NIXL answers so when
// a peer's metadata is dropped amid a READ. Close is refused until Deliver or Fail.
func (r *Read) Break(err error) {
	r.n.mu.Lock()
	defer r.n.mu.Unlock()
	if r.state == nixl.Active {
		r.state, r.err, r.broken = nixl.Failed, r.orPeer(err), true
		r.peer.active--
	}
}

func (r *Read) orPeer(err error) error {
	if err == nil {
		err = r.f.peerError("read", r.peer)
	}
	return err
}

// end makes the READ terminal.
func (r *Read) end(err error) {
	if r.state == nixl.Active {
		r.peer.active--
		r.state, r.err = nixl.Done, err
		if err != nil {
			r.state = nixl.Failed
		}
	}
	r.broken, r.wire = false, nil
	r.n.reads = slices.DeleteFunc(r.n.reads, func(o *Read) bool { return o == r })
}
