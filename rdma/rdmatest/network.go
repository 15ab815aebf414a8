package rdmatest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"unsafe"

	"github.com/nixlgo/nixlgo/nixl"
)

// Network connects fabrics.
type Network struct {
	mu       sync.Mutex
	next     uint64    // address of the next memory
	memories []*Memory // by address
	fabrics  []*Fabric // by life

	reads      []*Read    // those that can still write, oldest first
	wire       []*Message // notifications under way, oldest first
	holdReads  bool
	holdNotifs bool
	cut        map[link]bool
	sides      map[string]*sideListener // by address
	holes      map[string]bool          // addresses whose packets get lost
	mute       map[string]bool          // addresses that take connections and say nothing
	muted      []net.Conn               // those
}

// link names two fabrics by life, the smaller first.
type link [2]int

func linkOf(a, b *Fabric) link { return link{min(a.life, b.life), max(a.life, b.life)} }

// NewNetwork makes a network without fabrics.
func NewNetwork() *Network {
	return &Network{next: 1 << 40, cut: map[link]bool{}, sides: map[string]*sideListener{}, holes: map[string]bool{}, mute: map[string]bool{}}
}

// Memory is memory that fabrics of the network can register. It implements rdma.Memory.
type Memory struct {
	addr uint64
	data []byte
}

const guard = 1 << 16 // unregistered bytes between two memories

// NewMemory makes zeroed memory of size bytes, which must be positive. NewFabric registers it.
func (n *Network) NewMemory(size int) *Memory {
	if size <= 0 {
		panic(fmt.Sprintf("rdmatest: NewMemory of %d bytes", size))
	}
	words := make([]int64, (size+7)/8) // for the alignment
	m := &Memory{data: unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), size)}
	n.mu.Lock()
	defer n.mu.Unlock()
	m.addr = n.next
	n.next += (uint64(size)+guard-1)/guard*guard + guard
	n.memories = append(n.memories, m)
	return m
}

// Addr is the address that descriptors name the first byte by. It is no pointer.
func (m *Memory) Addr() uint64 { return m.addr }

// Bytes is the memory itself.
func (m *Memory) Bytes() []byte { return m.data }

// Desc is the descriptor of length bytes at offset. It is not checked: the fabric does that.
func (m *Memory) Desc(offset, length int) nixl.Desc {
	return nixl.Desc{Addr: m.addr + uint64(offset), Len: uint64(length)}
}

// at is the memory that d names, nil when there is none.
func (n *Network) at(d nixl.Desc) []byte {
	i, exact := slices.BinarySearchFunc(n.memories, d.Addr, func(m *Memory, addr uint64) int {
		if m.addr < addr {
			return -1
		} else if m.addr > addr {
			return 1
		}
		return 0
	})
	if !exact {
		i--
	}
	if i < 0 {
		return nil
	}
	m := n.memories[i]
	from, size := d.Addr-m.addr, uint64(len(m.data))
	if from > size || d.Len > size-from {
		return nil
	}
	return m.data[from : from+d.Len]
}

// HoldReads makes READs wait for the test, or stops making them wait. Held READs stay active; Reads lists them.
func (n *Network) HoldReads(hold bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.holdReads = hold
}

// HoldNotifications makes notifications wait for the test, or stops making them wait: those that waited arrive then, in
// the order sent. Messages lists them.
func (n *Network) HoldNotifications(hold bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.holdNotifs = hold
	n.flush()
}

// Reads are the READs that can still write, in the order posted: the active ones and those that Read.Break failed.
func (n *Network) Reads() []*Read {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.reads)
}

// Messages are the notifications under way, in the order sent.
func (n *Network) Messages() []*Message {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.wire)
}

// Cut loses what goes between a and b in silence: READs stay active, notifications answer nil and wait. Mend ends it.
func (n *Network) Cut(a, b *Fabric) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut[linkOf(a, b)] = true
}

// Mend ends a Cut: READs land and notifications arrive again, those that waited first.
func (n *Network) Mend(a, b *Fabric) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.cut, linkOf(a, b))
	n.flush()
}

// Break ends the connection between a and b with an error, as a transport does that has given up: active READs fail,
// notifications under way are lost, and each side has to forget the other and load its metadata again.
func (n *Network) Break(a, b *Fabric) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.cut, linkOf(a, b))
	for _, ends := range [][2]*Fabric{{a, b}, {b, a}} {
		if p := ends[0].peers[ends[1].name]; p != nil && p.to() == ends[1] {
			p.failed = true
		}
	}
	n.failReads(func(r *Read) bool { return r.between(a, b) })
	n.wire = slices.DeleteFunc(n.wire, func(m *Message) bool {
		if m.from == a && m.to == b || m.from == b && m.to == a {
			m.gone = true
		}
		return m.gone
	})
}

func (n *Network) failReads(which func(*Read) bool) {
	for _, r := range slices.Clone(n.reads) {
		if which(r) {
			r.end(r.f.peerError("read", r.peer))
		}
	}
}

// open reports whether anything passes between a and b.
func (n *Network) open(a, b *Fabric) bool { return !a.stopped && !b.stopped && !n.cut[linkOf(a, b)] }

// flush delivers what waits for nobody any more.
func (n *Network) flush() {
	if n.holdNotifs {
		return
	}
	for _, m := range slices.Clone(n.wire) {
		m.deliver()
	}
}

// Message is a notification under way.
type Message struct {
	n        *Network
	from, to *Fabric
	payload  []byte
	gone     bool // delivered, dropped or lost
}

// From is the name of the fabric that sent it.
func (m *Message) From() string { return m.from.name }

// To is the name of the fabric that it is for.
func (m *Message) To() string { return m.to.name }

// Payload is a copy of its bytes.
func (m *Message) Payload() []byte { return slices.Clone(m.payload) }

// Deliver lets the message arrive, before others that were sent earlier if the test so chooses. It reports false when the
// message is gone already or cannot pass: a stopped fabric, a cut link. A message to a dead fabric is gone.
func (m *Message) Deliver() bool {
	m.n.mu.Lock()
	defer m.n.mu.Unlock()
	return m.deliver()
}

func (m *Message) deliver() bool {
	if m.gone || !m.to.dead && !m.n.open(m.from, m.to) {
		return false
	}
	m.remove()
	if m.to.dead {
		return false
	}
	m.to.inbox = append(m.to.inbox, nixl.Notification{From: m.from.name, Payload: m.payload})
	return true
}

func (m *Message) remove() {
	m.gone = true
	m.n.wire = slices.DeleteFunc(m.n.wire, func(o *Message) bool { return o == m })
}

// Drop loses the message.
func (m *Message) Drop() {
	m.n.mu.Lock()
	defer m.n.mu.Unlock()
	m.remove()
}

// Duplicate sends the message once more, behind all that is under way, and returns the copy. NIXL does not do so; what is
// behind a notification, a retry or a replay, may.
func (m *Message) Duplicate() *Message {
	m.n.mu.Lock()
	defer m.n.mu.Unlock()
	c := &Message{n: m.n, from: m.from, to: m.to, payload: slices.Clone(m.payload)}
	m.n.wire = append(m.n.wire, c)
	return c
}

// Shuffle lets what is under way on a network through, one event at a time, in an order drawn from its seed. The
// probabilities are between 0 and 1 and may be changed at any time.
type Shuffle struct {
	Drop      float64 // a notification is lost
	Duplicate float64 // a notification arrives, and a copy of it later
	Reorder   float64 // a notification overtakes others from the same fabric to the same fabric
	Part      float64 // only a part of a READ lands, from anywhere in it
	Fetch     float64 // the bytes of a READ leave the owner now, and land later
	Fail      float64 // a READ fails

	n   *Network
	rng *rand.Rand
}

// Shuffle holds READs and notifications, and returns what lets them through.
func (n *Network) Shuffle(seed uint64) *Shuffle {
	n.HoldReads(true)
	n.HoldNotifications(true)
	return &Shuffle{n: n, rng: rand.New(rand.NewPCG(seed, ^seed))}
}

// Step lets one event happen. It reports false when nothing is under way that can move.
func (s *Shuffle) Step() bool {
	reads, messages := s.n.Reads(), s.n.Messages()
	reads = slices.DeleteFunc(reads, func(r *Read) bool { return !r.Movable() })
	messages = slices.DeleteFunc(messages, func(m *Message) bool { return !m.movable() })
	total := len(reads) + len(messages)
	if total == 0 {
		return false
	}
	if i := s.rng.IntN(total); i < len(reads) {
		s.land(reads[i])
	} else {
		s.deliver(messages, i-len(reads))
	}
	return true
}

func (s *Shuffle) chance(p float64) bool { return s.rng.Float64() < p }

func (s *Shuffle) land(r *Read) {
	switch {
	case s.chance(s.Fail):
		r.Fail(nil)
	case s.chance(s.Fetch):
		r.Fetch()
	case s.chance(s.Part):
		from := s.rng.Uint64N(r.Bytes())
		r.Land(from, from+1+s.rng.Uint64N(r.Bytes()-from))
	default:
		r.Deliver()
	}
}

func (s *Shuffle) deliver(messages []*Message, i int) {
	m := messages[i]
	if !s.chance(s.Reorder) {
		for _, o := range messages[:i] {
			if o.from == m.from && o.to == m.to {
				m = o
				break
			}
		}
	}
	switch {
	case s.chance(s.Drop):
		m.Drop()
	case s.chance(s.Duplicate):
		m.Duplicate()
		m.Deliver()
	default:
		m.Deliver()
	}
}

func (m *Message) movable() bool {
	m.n.mu.Lock()
	defer m.n.mu.Unlock()
	return m.to.dead || m.n.open(m.from, m.to)
}
