package lease

import (
	"cmp"
	"container/heap"
	"slices"
	"time"
)

// peers are the owners that this engine reads from, and what it renews there.
// Each is heartbeated on its own schedule: a new one at once, which starts the
// handshake; again when it is connected; then every interval. What is not due
// costs nothing.
type peers struct {
	interval time.Duration
	byEngine map[string]*peer
	added    int   // peers so far
	tracked  int64 // requests that are heartbeated

	beaten beatQueue // those with something to heartbeat
	told   time.Time // the time of the last call of due
}

type peer struct {
	Peer
	seq     int // of all peers so far
	refs    map[Target]*ref
	targets []Target // those heartbeated
	keys    []*ref   // parallel to targets
	last    time.Time
	urgent  bool
	place   int // in peers.beaten while there are targets
}

// ref counts the local requests that share one lease.
type ref struct {
	live  int // not ended
	beats int // of those, heartbeated
	at    int // in peer.targets while beats > 0
}

// beatQueue is a heap of peers: the urgent ones first, then those whose last
// heartbeat is longest ago.
type beatQueue []*peer

func (q beatQueue) Len() int { return len(q) }

func (q beatQueue) Less(i, j int) bool {
	a, b := q[i], q[j]
	if a.urgent != b.urgent {
		return a.urgent
	}
	return cmp.Or(a.last.Compare(b.last), cmp.Compare(a.seq, b.seq)) < 0
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

func newPeers(interval time.Duration) peers {
	return peers{interval: interval, byEngine: make(map[string]*peer)}
}

// add counts one more request of a lease. The address of an engine is that of
// its first request.
func (ps *peers) add(addr Peer, t Target, beat bool) *peer {
	p := ps.byEngine[addr.Engine]
	if p == nil {
		ps.added++
		p = &peer{Peer: addr, seq: ps.added, refs: make(map[Target]*ref), urgent: true}
		ps.byEngine[addr.Engine] = p
	}
	r := p.refs[t]
	if r == nil {
		r = &ref{}
		p.refs[t] = r
	}
	r.live++
	if beat {
		if r.beats == 0 {
			r.at = len(p.targets)
			p.targets = append(p.targets, t)
			p.keys = append(p.keys, r)
			if r.at == 0 {
				heap.Push(&ps.beaten, p)
			}
		}
		r.beats++
		ps.tracked++
	}
	return p
}

// quiet stops the heartbeats of one request.
func (ps *peers) quiet(p *peer, t Target) {
	r := p.refs[t]
	ps.tracked--
	if r.beats--; r.beats > 0 && injected&faultXBEAT == 0 {
		return
	}
	last := len(p.targets) - 1
	if r.at > last || p.keys[r.at] != r {
		return // only by a fault
	}
	p.targets[r.at], p.keys[r.at] = p.targets[last], p.keys[last]
	p.keys[r.at].at = r.at
	p.targets[last], p.keys[last] = Target{}, nil
	p.targets, p.keys = p.targets[:last], p.keys[:last]
	if last == 0 {
		heap.Remove(&ps.beaten, p.place)
	}
}

// remove counts one request of a lease less, and reports whether it was the last.
func (ps *peers) remove(p *peer, t Target) (last bool) {
	r := p.refs[t]
	if r.live--; r.live > 0 {
		return false
	}
	delete(p.refs, t)
	if len(p.refs) == 0 {
		delete(ps.byEngine, p.Engine)
	}
	return true
}

func (ps *peers) connected(engine string) {
	p := ps.byEngine[engine]
	if p == nil {
		return
	}
	p.urgent = true
	if len(p.targets) > 0 {
		heap.Fix(&ps.beaten, p.place)
	}
}

// due returns the heartbeats to send now.
func (ps *peers) due(now time.Time) (out []Heartbeat) {
	if now.Before(ps.told) {
		// A clock that went back must not silence a peer, nor one that has
		// nothing to renew now.
		for _, p := range ps.byEngine {
			p.urgent = p.urgent || now.Before(p.last)
		}
		heap.Init(&ps.beaten)
	}
	ps.told = now
	for len(ps.beaten) > 0 {
		p := ps.beaten[0]
		if !p.urgent && now.Sub(p.last) < ps.interval {
			break
		}
		p.last, p.urgent = now, false
		heap.Fix(&ps.beaten, 0)
		out = append(out, Heartbeat{p.Peer, slices.Clone(p.targets)})
	}
	return out
}
