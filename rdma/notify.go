package rdma

import (
	"errors"
	"time"

	"github.com/nixlgo/nixlgo/lease"
)

// beat renews the leases of h, now or when the handshake that it starts is done.
func (w *Worker) beat(h lease.Heartbeat, now time.Time, res *lease.Result) {
	p := w.peer(h.Peer)
	if !w.connect(p, now) {
		res.HeartbeatFailed = append(res.HeartbeatFailed, h.Peer.Engine)
		return
	}
	if p.state != connected {
		p.beats = h.Targets // the newest list is the whole list
		return
	}
	w.sendBeats(p, h.Targets, res)
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
			w.stats.NotifyFailed++
			w.broke(p, err)
			res.HeartbeatFailed = append(res.HeartbeatFailed, p.info.Engine)
			return
		}
	}
}

// bySlot splits targets into those without a slot and those with one.
func bySlot(targets []lease.Target) (ids, slots []lease.Target) {
	for _, t := range targets {
		if t.Nonce != 0 && t.Slot != lease.NoSlot {
			slots = append(slots, t)
		} else {
			ids = append(ids, t)
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

// release tells the owner that a request will not be read (any more).
func (w *Worker) release(r lease.Release, now time.Time, res *lease.Result) {
	p := w.peer(r.Peer)
	switch {
	case !w.connect(p, now):
		w.log.Warn("could not release a lease, it will run out", "engine", r.Peer.Engine, "request", r.RemoteRequest, "error", p.err)
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
	var failed error
	for _, r := range p.ranks {
		if err := w.fabric.Notify(r.agent, lease.AppendReadComplete(nil, remoteRequest, r.readers, nonce)); err != nil {
			w.stats.NotifyFailed++
			failed = errors.Join(failed, err)
		}
	}
	if failed != nil {
		w.broke(p, failed)
	}
}
