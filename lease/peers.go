package lease

import (
	"slices"
	"time"
)

// peers are the owners that this engine reads from, and what it renews there.
// Each is heartbeated on its own schedule: a new one at once, which starts the
// handshake; again when it is connected; then every interval.
type peers struct {
	interval time.Duration
	byEngine map[string]*peer
	order    []*peer
	tracked  int64 // requests that are heartbeated

	// Nothing is due from scanned until next, unless urgent.
	scanned, next time.Time
	urgent        bool
}

type peer struct {
	Peer
	at      int // in peers.order
	refs    map[Target]*ref
	targets []Target // those heartbeated
	keys    []*ref   // parallel to targets
	last    time.Time
	urgent  bool
}

// ref counts the local requests that share one lease.
type ref struct {
	live  int // not ended
	beats int // of those, heartbeated
	at    int // in peer.targets while beats > 0
}

func newPeers(interval time.Duration) peers {
	return peers{interval: interval, byEngine: make(map[string]*peer)}
}

// add counts one more request of a lease. The address of an engine is that of
// its first request.
func (ps *peers) add(addr Peer, t Target, beat bool) *peer {
	p := ps.byEngine[addr.Engine]
	if p == nil {
		p = &peer{Peer: addr, at: len(ps.order), refs: make(map[Target]*ref), urgent: true}
		ps.byEngine[addr.Engine] = p
		ps.order = append(ps.order, p)
		ps.urgent = true
	}
	r := p.refs[t]
	if r == nil {
		r = &ref{}
		p.refs[t] = r
	}
	r.live++
	if beat {
		if r.beats == 0 {
			if len(p.targets) == 0 {
				ps.urgent = true // the peer was left out of the last scan
			}
			r.at = len(p.targets)
			p.targets = append(p.targets, t)
			p.keys = append(p.keys, r)
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
		end := len(ps.order) - 1
		ps.order[p.at] = ps.order[end]
		ps.order[p.at].at = p.at
		ps.order[end] = nil
		ps.order = ps.order[:end]
	}
	return true
}

func (ps *peers) connected(engine string) {
	if p := ps.byEngine[engine]; p != nil {
		p.urgent, ps.urgent = true, true
	}
}

// due returns the heartbeats to send now.
func (ps *peers) due(now time.Time) (out []Heartbeat) {
	if !ps.urgent && !now.Before(ps.scanned) && now.Before(ps.next) {
		return nil
	}
	ps.scanned, ps.next, ps.urgent = now, now.Add(ps.interval), false
	for _, p := range ps.order {
		// A clock that went back must not silence a peer.
		due := p.urgent || now.Sub(p.last) >= ps.interval || now.Before(p.last)
		if due && len(p.targets) > 0 {
			p.last, p.urgent = now, false
			out = append(out, Heartbeat{p.Peer, slices.Clone(p.targets)})
		}
		if next := p.last.Add(ps.interval); next.Before(ps.next) && len(p.targets) > 0 {
			ps.next = next
		}
	}
	return out
}
