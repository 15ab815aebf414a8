package rdma

import (
	"errors"
	"slices"
	"time"

	"github.com/nixlgo/nixlgo/lease"
)

// beat renews the leases of h, now or when the handshake that it starts is done.
func (w *Worker) beat(h lease.Heartbeat, now time.Time, res *lease.Result) {
	p := w.told(h.Peer, now)
	w.tellBeats(p, h.Targets, now, res)
	if d := p.duration(); p.state == connected && d != h.Duration {
		res.Connected = append(res.Connected, lease.Connection{Peer: p.info, Duration: d})
	}
}

// told returns the record of an engine through which it is told something: the one to read from, or where this rank cannot read
// from it, one for notifications alone.
func (w *Worker) told(info lease.Peer, now time.Time) *peer {
	p := w.peer(info)
	if !p.tell && !w.connect(p, now, false) && p.unfit() {
		p = w.teller(info)
	}
	return p
}

func (w *Worker) tellBeats(p *peer, targets []lease.Target, now time.Time, res *lease.Result) {
	if !w.connect(p, now, false) {
		res.HeartbeatFailed = append(res.HeartbeatFailed, p.info.Engine)
	}
	switch p.state {
	case idle, connecting, broken:
		p.beats, p.beatsAt = targets, now // the newest list is the whole list
		w.unwell = true
	case connected:
		w.sendBeats(p, targets, res)
	}
}

// sendBeats sends heartbeats to every rank of p, by slot where the owner takes that and the lease has one.
func (w *Worker) sendBeats(p *peer, targets []lease.Target, res *lease.Result) {
	for _, r := range p.ranks {
		ids, slots := targets, []lease.Target(nil)
		if r.meta.SlotHeartbeats {
			ids, slots = bySlot(targets)
		}
		err := errors.Join(w.sendAll(r, ids, lease.AppendHeartbeat), w.sendAll(r, slots, lease.AppendSlotHeartbeat))
		if err != nil {
			w.stats.countUnsent(err)
			w.broke(p, err)
			p.beats, p.beatsAt = targets, w.now // they go over the next connection
			res.HeartbeatFailed = append(res.HeartbeatFailed, p.info.Engine)
			return
		}
	}
}

// bySlot splits targets into those without a slot and those with one.
func bySlot(targets []lease.Target) (ids, slots []lease.Target) {
	without := func(t lease.Target) bool { return t.Nonce == 0 || t.Slot == lease.NoSlot }
	if !slices.ContainsFunc(targets, without) {
		return nil, targets // mostly
	}
	for _, t := range targets {
		if without(t) {
			ids = append(ids, t)
		} else {
			slots = append(slots, t)
		}
	}
	return ids, slots
}

type appendBeat func(dst []byte, targets []lease.Target, max int) (msg []byte, rest []lease.Target, err error)

// sendAll sends targets to one rank in as many messages as the size cap asks for.
func (w *Worker) sendAll(r remoteRank, targets []lease.Target, encode appendBeat) (err error) {
	for len(targets) > 0 {
		if w.beatBuf, targets, err = encode(w.beatBuf[:0], targets, w.cfg.Lease.MaxNotification); err != nil {
			return err
		}
		if err := w.fabric.Notify(r.agent, w.beatBuf); err != nil {
			return err
		}
		w.stats.HeartbeatsSent++
	}
	return nil
}

// release tells the owner that no request of this engine needs a lease any more. A lease that was held is let go of on every rank of the
// owner, by one rank of this engine.
func (w *Worker) release(r lease.Release, now time.Time, res *lease.Result) {
	if r.All && w.cfg.Rank > 0 && !w.cfg.HoldOnly {
		res.Released = append(res.Released, r.Request)
		return
	}
	p := w.peers[r.Peer]
	switch {
	case !r.All:
		p = w.told(r.Peer, now)
	case p == nil || !p.whole():
		p = w.teller(r.Peer)
	}
	w.tellRelease(p, r, now, res)
}

// whole reports whether every rank of the engine is connected, and told that this rank is its only reader.
func (p *peer) whole() bool {
	return p.state == connected && len(p.ranks) == p.info.TPSize && !slices.ContainsFunc(p.ranks, func(r remoteRank) bool { return r.readers != 1 })
}

func (w *Worker) tellRelease(p *peer, r lease.Release, now time.Time, res *lease.Result) {
	switch {
	case !w.connect(p, now, true):
		w.quiet.Warn("could not release a lease, it will run out", r.Peer.Engine, "remote_request", r.RemoteRequest, "error", p.err)
		res.Released = append(res.Released, r.Request)
	case p.state != connected:
		p.releases = append(p.releases, r)
	default:
		w.sendRelease(p, r, res)
	}
}

func (w *Worker) sendRelease(p *peer, r lease.Release, res *lease.Result) {
	w.complete(p, r.RemoteRequest, r.Nonce)
	res.Released = append(res.Released, r.Request)
}

// complete tells every rank of p that this rank needs a request no more, those that nothing was read from included. A failure
// does not undo what was read: the owner's lease ends by itself.
func (w *Worker) complete(p *peer, remoteRequest string, nonce int64) {
	p.used = w.now
	var failed error
	for _, r := range p.ranks {
		if err := w.fabric.Notify(r.agent, lease.AppendReadComplete(nil, remoteRequest, r.readers, nonce)); err != nil {
			w.stats.countUnsent(err)
			failed = errors.Join(failed, err)
		}
	}
	if failed != nil {
		w.broke(p, failed)
	}
}
