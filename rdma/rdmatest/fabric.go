package rdmatest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
)

// Fabric is one endpoint of a Network. It implements rdma.Fabric.
type Fabric struct {
	n       *Network
	name    string
	life    int // index in Network.fabrics: another one for each fabric, also of the same name
	regs    []*Memory
	peers   map[string]*peer
	inbox   []nixl.Notification
	faults  []fault
	dead    bool // closed or killed
	stopped bool
}

var _ rdma.Fabric = (*Fabric)(nil)

// peer is a fabric whose metadata is loaded. A reload makes a new one.
type peer struct {
	n      *Network
	frame  frame
	blob   []byte
	active int
	failed bool // the transport gave the peer up
	gone   bool // forgotten or replaced
}

// to is the fabric behind the metadata, nil when the metadata was forged.
func (p *peer) to() *Fabric {
	if p.frame.Life < 0 || p.frame.Life >= len(p.n.fabrics) {
		return nil
	}
	return p.n.fabrics[p.frame.Life]
}

// frame is what metadata says.
type frame struct {
	Format string      `json:"format"`
	Name   string      `json:"name"`
	Life   int         `json:"life"`
	Ranges []nixl.Desc `json:"ranges"`
}

const format = "rdmatest/1"

// NewFabric makes a fabric with memory registered. The name is that of its agent, and must not be one of a fabric that
// lives; a dead one's can be given to its successor.
func (n *Network) NewFabric(name string, memory ...*Memory) *Fabric {
	n.mu.Lock()
	defer n.mu.Unlock()
	if name == "" || slices.ContainsFunc(n.fabrics, func(f *Fabric) bool { return f.name == name && !f.dead }) {
		panic(fmt.Sprintf("rdmatest: NewFabric: the name %q is empty or in use: peers would merge the two", name))
	}
	f := &Fabric{n: n, name: name, life: len(n.fabrics), regs: slices.Clone(memory), peers: map[string]*peer{}}
	n.fabrics = append(n.fabrics, f)
	return f
}

// Name is the name of the fabric's agent.
func (f *Fabric) Name() string { return f.name }

// Kill ends the fabric as SIGKILL ends a process: READs from it fail, with what has landed left in place, and peers get
// errors that match nixl.ErrPeer. To peers it is the same as Close. Its own methods answer nixl.ErrClosed afterwards.
func (f *Fabric) Kill() { f.Close() }

// Stop stops the fabric as SIGSTOP stops a process: READs from it and by it stay active, and notifications wait, with no
// error to anybody. The owner of a stopped fabric must not call it.
func (f *Fabric) Stop() {
	f.n.mu.Lock()
	defer f.n.mu.Unlock()
	f.stopped = true
}

// Continue ends a Stop: READs land and notifications arrive again, those that waited first.
func (f *Fabric) Continue() {
	f.n.mu.Lock()
	defer f.n.mu.Unlock()
	f.stopped = false
	f.n.flush()
}

// Op is a call of a fabric that Fail can make fail.
type Op int

// The calls that can be made to fail.
const (
	OpAlloc Op = iota
	OpMetadata
	OpLoad
	OpForget
	OpLocalList
	OpRemoteList
	OpNewRead
	OpPost
	OpPoll
	OpNotify
	OpNotifications
)

type fault struct {
	op  Op
	n   int
	err error
}

// Fail makes one later call of the fabric fail: the n-th of this kind from now on, 1 for the next. The call changes nothing
// else, but a READ whose Post fails has failed. A nil err stands for an error as a lost peer gives it, which matches
// nixl.ErrPeer.
func (f *Fabric) Fail(op Op, n int, err error) {
	f.n.mu.Lock()
	defer f.n.mu.Unlock()
	f.faults = append(f.faults, fault{op, n, err})
}

// enter locks the network for a call, unless the call has to fail.
func (f *Fabric) enter(op Op, what string) error {
	f.n.mu.Lock()
	err := f.fault(op, what)
	if f.dead {
		err = &nixl.Error{Op: what, Cause: nixl.ErrClosed}
	}
	if err != nil {
		f.n.mu.Unlock()
	}
	return err
}

func (f *Fabric) fault(op Op, what string) (err error) {
	f.faults = slices.DeleteFunc(f.faults, func(x fault) bool { return x.n <= 0 })
	for i := range f.faults {
		x := &f.faults[i]
		if x.op != op {
			continue
		}
		if x.n--; x.n == 0 && err == nil {
			if err = x.err; err == nil {
				err = &nixl.Error{Op: what, Status: nixl.StatusBackend, Cause: nixl.ErrPeer, Detail: "rdmatest: asked for with Fail"}
			}
		}
	}
	return err
}

func (f *Fabric) invalid(op, format string, args ...any) error {
	return &nixl.Error{Op: op, Cause: nixl.ErrInvalid, Detail: fmt.Sprintf(format, args...)}
}

func (f *Fabric) peerError(op string, p *peer) error {
	p.failed = true
	return &nixl.Error{Op: op, Remote: p.frame.Name, Status: nixl.StatusBackend, Cause: nixl.ErrPeer,
		Detail: "the peer may be gone; if it is back, forget it and load its metadata again"}
}

// Alloc implements rdma.Fabric.
func (f *Fabric) Alloc(size int) (rdma.Memory, error) {
	const op = "allocate"
	if err := f.enter(OpAlloc, op); err != nil {
		return nil, err
	}
	f.n.mu.Unlock()
	if size <= 0 {
		return nil, f.invalid(op, "the size %d is not positive", size)
	}
	m := f.n.NewMemory(size)
	f.n.mu.Lock()
	defer f.n.mu.Unlock()
	f.regs = append(f.regs, m)
	return m, nil
}

// Metadata implements rdma.Fabric.
func (f *Fabric) Metadata() ([]byte, error) {
	if err := f.enter(OpMetadata, "get local metadata"); err != nil {
		return nil, err
	}
	defer f.n.mu.Unlock()
	m := frame{Format: format, Name: f.name, Life: f.life, Ranges: []nixl.Desc{}}
	for _, r := range f.regs {
		m.Ranges = append(m.Ranges, r.Desc(0, len(r.data)))
	}
	return json.Marshal(m)
}

// Load implements rdma.Fabric. Unchanged metadata, and metadata that only offers more memory than before, leave lists
// and READs as they are; any other makes them nixl.ErrStale.
func (f *Fabric) Load(metadata []byte) (string, error) {
	const op = "load remote metadata"
	var m frame
	d := json.NewDecoder(bytes.NewReader(metadata))
	d.DisallowUnknownFields()
	if err := d.Decode(&m); err != nil || m.Format != format || m.Name == "" || d.More() {
		return "", f.invalid(op, "%d bytes that are not metadata of a Fabric of this package", len(metadata))
	}
	if err := f.enter(OpLoad, op); err != nil {
		return "", err
	}
	defer f.n.mu.Unlock()
	if m.Name == f.name {
		return "", f.invalid(op, "the peer has this agent's own name; names must be unique")
	}
	p := &peer{n: f.n, frame: m, blob: slices.Clone(metadata)}
	if old := f.peers[m.Name]; old != nil {
		switch {
		case bytes.Equal(old.blob, metadata):
			return m.Name, nil
		case old.frame.Life == m.Life && includes(m.Ranges, old.frame.Ranges):
			old.frame, old.blob = m, p.blob
			return m.Name, nil
		case old.active > 0:
			return "", &nixl.Error{Op: op, Remote: m.Name, Cause: nixl.ErrActive, Detail: fmt.Sprintf("%d transfers to the peer are in flight", old.active)}
		}
		old.gone = true
	}
	f.peers[m.Name] = p
	return m.Name, nil
}

func includes(all, some []nixl.Desc) bool {
	return !slices.ContainsFunc(some, func(d nixl.Desc) bool { return !slices.Contains(all, d) })
}

// Forget implements rdma.Fabric.
func (f *Fabric) Forget(agent string) error {
	const op = "forget peer"
	if err := f.enter(OpForget, op); err != nil {
		return err
	}
	defer f.n.mu.Unlock()
	p := f.peers[agent]
	switch {
	case p == nil:
		return nil
	case p.active > 0:
		return &nixl.Error{Op: op, Remote: agent, Cause: nixl.ErrActive, Detail: fmt.Sprintf("%d transfers to the peer are in flight", p.active)}
	}
	p.gone = true
	delete(f.peers, agent)
	return nil
}

// list is a prepared descriptor list.
type list struct {
	f      *Fabric
	descs  []nixl.Desc
	peer   *peer // nil for local memory
	remote bool
	closed bool
}

func (l *list) Close() error {
	l.f.n.mu.Lock()
	defer l.f.n.mu.Unlock()
	l.closed = true
	return nil
}

// LocalList implements rdma.Fabric.
func (f *Fabric) LocalList(mem nixl.MemType, descs []nixl.Desc) (rdma.List, error) {
	const op = "prepare local list"
	if err := f.enter(OpLocalList, op); err != nil {
		return nil, err
	}
	defer f.n.mu.Unlock()
	if err := f.inside(op, mem, descs, f.ranges()); err != nil {
		return nil, err
	}
	return &list{f: f, descs: slices.Clone(descs)}, nil
}

// RemoteList implements rdma.Fabric. The fabric's own name stands for its own memory.
func (f *Fabric) RemoteList(agent string, mem nixl.MemType, descs []nixl.Desc) (rdma.List, error) {
	const op = "prepare remote list"
	if err := f.enter(OpRemoteList, op); err != nil {
		return nil, err
	}
	defer f.n.mu.Unlock()
	p := f.peers[agent]
	if agent == f.name {
		p = &peer{n: f.n, frame: frame{Name: f.name, Life: f.life, Ranges: f.ranges()}}
	}
	if p == nil {
		return nil, &nixl.Error{Op: op, Remote: agent, Cause: nixl.ErrNotFound, Detail: "load the peer's metadata first"}
	}
	if err := f.inside(op, mem, descs, p.frame.Ranges); err != nil {
		return nil, err
	}
	return &list{f: f, descs: slices.Clone(descs), peer: p, remote: true}, nil
}

func (f *Fabric) ranges() (out []nixl.Desc) {
	for _, r := range f.regs {
		out = append(out, r.Desc(0, len(r.data)))
	}
	return out
}

// inside refuses descriptors that do not lie inside one of the ranges each.
func (f *Fabric) inside(op string, mem nixl.MemType, descs, ranges []nixl.Desc) error {
	if mem != nixl.DRAM {
		return f.invalid(op, "memory of type %s is not registered", mem)
	}
	if len(descs) == 0 {
		return f.invalid(op, "the list is empty")
	}
	for i, d := range descs {
		if d.Len == 0 || d.Addr > math.MaxUint64-d.Len {
			return f.invalid(op, "descriptor %d, %v, has no length or wraps around the address space", i, d)
		}
		if !slices.ContainsFunc(ranges, func(r nixl.Desc) bool {
			return r.Dev == d.Dev && d.Addr >= r.Addr && d.Len <= r.Len && d.Addr-r.Addr <= r.Len-d.Len
		}) {
			return f.invalid(op, "descriptor %d, %v, is outside of registered memory", i, d)
		}
	}
	return nil
}

// NewRead implements rdma.Fabric. What separate asks for makes no difference here: each descriptor lands by itself.
func (f *Fabric) NewRead(local rdma.List, li []int32, remote rdma.List, ri []int32, separate bool) (rdma.Read, error) {
	const op = "make transfer"
	l, ok := local.(*list)
	r, ok2 := remote.(*list)
	if !ok || !ok2 || l.f != f || r.f != f || l.remote || !r.remote {
		return nil, f.invalid(op, "want a local and a remote list of this fabric")
	}
	if err := f.enter(OpNewRead, op); err != nil {
		return nil, err
	}
	defer f.n.mu.Unlock()
	li, ri = l.indices(li), r.indices(ri)
	if len(li) != len(ri) || len(li) == 0 {
		return nil, f.invalid(op, "%d local indices for %d remote ones", len(li), len(ri))
	}
	t := &Read{n: f.n, f: f, peer: r.peer, local: make([]nixl.Desc, len(li)), remote: make([]nixl.Desc, len(li))}
	for k, i := range li {
		j := ri[k]
		if uint(i) >= uint(len(l.descs)) || uint(j) >= uint(len(r.descs)) {
			return nil, f.invalid(op, "pair %d names descriptors %d of %d local and %d of %d remote ones", k, i, len(l.descs), j, len(r.descs))
		}
		t.local[k], t.remote[k] = l.descs[i], r.descs[j]
		if t.local[k].Len != t.remote[k].Len {
			return nil, f.invalid(op, "pair %d joins %d local bytes with %d remote ones", k, t.local[k].Len, t.remote[k].Len)
		}
		t.size += t.local[k].Len
	}
	switch {
	case l.closed || r.closed:
		return nil, &nixl.Error{Op: op, Remote: r.peer.frame.Name, Cause: nixl.ErrClosed, Detail: "a list is closed"}
	case r.peer.gone:
		return nil, stale(op, r.peer)
	}
	return t, nil
}

func (l *list) indices(i []int32) []int32 {
	if i != nil {
		return i
	}
	all := make([]int32, len(l.descs))
	for k := range all {
		all[k] = int32(k)
	}
	return all
}

func stale(op string, p *peer) error {
	return &nixl.Error{Op: op, Remote: p.frame.Name, Cause: nixl.ErrStale, Detail: "the peer's metadata was replaced or dropped; load it and prepare the list again"}
}

// Poll implements rdma.Fabric. READs that nothing holds land here.
func (f *Fabric) Poll(reads []rdma.Read, states []nixl.State) error {
	const op = "poll"
	if len(reads) != len(states) {
		return f.invalid(op, "%d transfers, but room for %d states", len(reads), len(states))
	}
	for _, r := range reads {
		if t, ok := r.(*Read); !ok || t.f != f {
			return f.invalid(op, "a READ of another fabric")
		}
	}
	if err := f.enter(OpPoll, op); err != nil {
		return err
	}
	defer f.n.mu.Unlock()
	for i, r := range reads {
		t := r.(*Read)
		if t.state == nixl.Active && !f.n.holdReads {
			t.land(0, t.size)
		}
		states[i] = t.state
	}
	return nil
}

// Notify implements rdma.Fabric.
func (f *Fabric) Notify(agent string, msg []byte) error {
	const op = "notify"
	if err := f.enter(OpNotify, op); err != nil {
		return err
	}
	defer f.n.mu.Unlock()
	to := f
	if agent != f.name {
		p := f.peers[agent]
		if p == nil {
			return &nixl.Error{Op: op, Remote: agent, Cause: nixl.ErrNotFound, Detail: "load the peer's metadata first"}
		}
		if to = p.to(); to == nil || to.dead || p.failed {
			return f.peerError(op, p)
		}
	}
	f.n.wire = append(f.n.wire, &Message{n: f.n, from: f, to: to, payload: slices.Clone(msg)})
	f.n.flush()
	return nil
}

// Notifications implements rdma.Fabric.
func (f *Fabric) Notifications(dst []nixl.Notification) ([]nixl.Notification, error) {
	if err := f.enter(OpNotifications, "get notifications"); err != nil {
		return dst, err
	}
	defer f.n.mu.Unlock()
	dst = append(dst, f.inbox...)
	f.inbox = nil
	return dst, nil
}

// Close implements rdma.Fabric.
func (f *Fabric) Close() error {
	n := f.n
	n.mu.Lock()
	defer n.mu.Unlock()
	if f.dead {
		return nil
	}
	f.dead = true
	n.failReads(func(r *Read) bool { return r.f == f || r.peer.to() == f })
	f.inbox, f.faults = nil, nil
	n.flush()
	return nil
}
