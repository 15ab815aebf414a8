package lease

import (
	"cmp"
	"container/heap"
	"slices"
	"time"
)

// peers are the owners that this engine reads from, and what it renews there.
// An owner is an engine at an address: two requests that name one engine at two
// addresses have two peers, so that a wrong address harms nobody else's lease.
// Each is heartbeated on its own schedule: a new one at once, which starts the
// handshake; again when it is connected; then every interval. What is not due
// costs nothing.
type peers struct {
	duration time.Duration // of this engine's own leases
	interval time.Duration // for owners that do not say how long theirs last
	byPeer   map[Peer]*peer
	leases   map[leaseID]*sharing
	added    int   // peers so far
	used     int   // peers that have requests
	tracked  int64 // requests that are heartbeated

	beaten  beatQueue // those with something to heartbeat
	told    time.Time // the time of the last call of due
	sweepAt time.Time // no peer is forgotten before
}

type peer struct {
	Peer
	seq      int           // of all peers so far
	duration time.Duration // of the owner's leases, 0 if not known
	interval time.Duration // between two heartbeats
	requests int           // that name it and have not ended
	beats    map[Target]*beat
	targets  []Target // those heartbeated
	keys     []*beat  // parallel to targets
	last     time.Time
	urgent   bool
	place    int // in peers.beaten while there are targets
}

// beat counts the local requests for which a lease is heartbeated.
type beat struct {
	requests int
	at       int // in peer.targets
}

// leaseID names one lease for all local requests that need it. A nonce is
// unique, so with one the address does not matter: an engine may be reached at
// several.
type leaseID struct {
	Peer
	Target
}

func idOf(p Peer, t Target) leaseID {
	if t.Nonce != 0 {
		p = Peer{Engine: p.Engine}
	}
	return leaseID{p, t}
}

// sharing are the local requests that need one lease. The owner is told once,
// when the last of them has ended and no other has come before the next plan.
type sharing struct {
	id       leaseID
	requests int
	readAt   *Peer    // where one of them read it, nil if none did
	lapsed   bool     // it is over at the owner, who is told nothing
	unwanted bool     // a third party has said that nobody will read it
	release  *Release // while it is in the queue
}

// beatQueue is a heap of peers: the urgent ones first, then those that are due
// first.
type beatQueue []*peer

func (q beatQueue) Len() int { return len(q) }

func (q beatQueue) Less(i, j int) bool {
	a, b := q[i], q[j]
	if a.urgent != b.urgent {
		return a.urgent
	}
	return cmp.Or(a.last.Add(a.interval).Compare(b.last.Add(b.interval)), cmp.Compare(a.seq, b.seq)) < 0
}

func (q beatQueue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].place, q[j].place = i, j
}

func (q *beatQueue) Push(p any) {
	p.(*peer).place = len(*q)
	*q = append(*q, p.(*peer))
}

func (q *beatQueue) Pop() any {
	last := len(*q) - 1
	p := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	return p
}

func newPeers(duration time.Duration) peers {
	return peers{duration: duration, interval: HeartbeatInterval(duration, 0), byPeer: make(map[Peer]*peer), leases: make(map[leaseID]*sharing)}
}

// add counts one more request of a lease.
func (ps *peers) add(addr Peer, t Target, heartbeat bool) (*peer, *sharing) {
	p := ps.byPeer[addr]
	if p == nil {
		ps.added++
		p = &peer{Peer: addr, seq: ps.added, interval: ps.interval, beats: make(map[Target]*beat), urgent: true}
		ps.byPeer[addr] = p
	}
	if p.requests++; p.requests == 1 {
		ps.used++
	}
	id := idOf(addr, t)
	s := ps.leases[id]
	if s == nil {
		s = &sharing{id: id}
		ps.leases[id] = s
	}
	s.requests++
	if !heartbeat {
		return p, s
	}
	ps.tracked++
	b := p.beats[t]
	if b == nil {
		b = &beat{at: len(p.targets)}
		p.beats[t] = b
		p.targets = append(p.targets, t)
		p.keys = append(p.keys, b)
		if b.at == 0 {
			heap.Push(&ps.beaten, p)
		}
	}
	b.requests++
	return p, s
}

// silence stops the heartbeats of one request.
func (ps *peers) silence(p *peer, t Target) {
	b := p.beats[t]
	ps.tracked--
	if b == nil {
		return // only by a fault
	}
	if b.requests--; b.requests > 0 && injected&faultXBEAT == 0 {
		return
	}
	last := len(p.targets) - 1
	delete(p.beats, t)
	p.targets[b.at], p.keys[b.at] = p.targets[last], p.keys[last]
	p.keys[b.at].at = b.at
	p.targets[last], p.keys[last] = Target{}, nil
	p.targets, p.keys = p.targets[:last], p.keys[:last]
	if last == 0 {
		heap.Remove(&ps.beaten, p.place)
	}
}

// remove counts one request of a lease less.
func (ps *peers) remove(p *peer, s *sharing) {
	if p.requests--; p.requests == 0 {
		ps.used-- // the record stays for an interval: it knows when the last heartbeat was
	}
	s.requests--
}

// connected takes note that a rank can reach an owner. The heartbeats follow
// the duration of its leases where they are shorter than this engine's.
func (ps *peers) connected(c Connection) {
	p := ps.byPeer[c.Peer]
	if p == nil {
		return
	}
	p.urgent = true
	p.duration = c.Duration
	p.interval = HeartbeatInterval(ps.duration, c.Duration)
	if len(p.targets) > 0 {
		heap.Fix(&ps.beaten, p.place)
	}
}

// minInterval bounds what an owner can ask of its readers.
const minInterval = 50 * time.Millisecond

// HeartbeatInterval is the time between two heartbeats of a reader whose own
// lease duration is one, to an owner whose leases last for another, 0 if it does
// not say: the shorter interval of both.
func HeartbeatInterval(own, owners time.Duration) time.Duration {
	interval := Config{Duration: own}.Interval()
	if owners > 0 {
		interval = min(interval, max(Config{Duration: owners}.Interval(), minInterval))
	}
	return interval
}

// due returns the heartbeats to send now.
func (ps *peers) due(now time.Time) (out []Heartbeat) {
	if now.Before(ps.told) {
		// A clock that went back must not silence a peer, nor one that has
		// nothing to renew now.
		for _, p := range ps.byPeer {
			p.urgent = p.urgent || now.Before(p.last)
		}
		heap.Init(&ps.beaten)
		ps.sweepAt = now
	}
	ps.told = now
	for len(ps.beaten) > 0 {
		p := ps.beaten[0]
		if !p.urgent && now.Sub(p.last) < p.interval {
			break
		}
		p.last, p.urgent = now, false
		heap.Fix(&ps.beaten, 0)
		out = append(out, Heartbeat{p.Peer, slices.Clone(p.targets), p.duration})
	}
	ps.sweep(now)
	return out
}

// sweep forgets the peers that no request names, once they would be heartbeated
// again anyway.
func (ps *peers) sweep(now time.Time) {
	if now.Before(ps.sweepAt) || len(ps.byPeer) == ps.used {
		return
	}
	ps.sweepAt = now.Add(ps.interval)
	for addr, p := range ps.byPeer {
		if p.requests == 0 && now.Sub(p.last) >= p.interval {
			delete(ps.byPeer, addr)
		}
	}
}
