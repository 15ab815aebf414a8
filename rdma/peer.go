package rdma

import (
	"container/list"
	"context"
	"fmt"
	"time"

	"github.com/nixlgo/nixlgo/lease"
)

// peer is an engine that this rank reads from. Step owns it; a handshake works on its own goroutine and hands over a
// finished handshake value.
type peer struct {
	info  lease.Peer
	state peerState
	ranks []remoteRank // ranks that this rank renews with, tells that it is done, and mostly reads from; set while connected

	clock lease.ClockOffset // of its side channel, for the deadlines that it names

	err      error     // why the last handshake failed
	failures int       // handshakes failed, or connections lost before anything was read, in a row
	proved   bool      // something was read over this connection
	retryAt  time.Time // no handshake before

	pulls list.List // *pull: those that wait for the handshake, or for others to end, in order of arrival

	// What waits for the handshake besides.
	beats    []lease.Target
	releases []lease.Release

	active  int   // posted transfers that are not terminal yet
	reading int   // pulls of which block READs are not terminal yet
	bytes   int64 // of those pulls
}

type peerState int

const (
	idle peerState = iota
	connecting
	connected
	broken // a transfer or notification failed; forgotten when active is 0
)

// remoteRank is one rank of a connected peer.
type remoteRank struct {
	share
	agent string
	meta  *Metadata

	// Both sides' descriptors of every block of every region that is read, pairwise; nil when none is.
	local, remote         view
	localList, remoteList List
}

// source reports whether blocks are read from r.
func (r *remoteRank) source() bool { return r.remoteList != nil }

// handshake is the outcome of one background handshake.
type handshake struct {
	engine string
	ranks  []remoteRank
	clock  lease.ClockOffset
	took   time.Duration
	err    error
}

const maxBackoff = 60 * time.Second

// backoff is 0, 1, 2, 4 … 60 s after 1, 2, 3, 4 … failures.
func backoff(failures int) time.Duration {
	if failures < 2 {
		return 0
	}
	return min(maxBackoff, time.Second<<min(failures-2, 6))
}

// peer returns the record of an engine, a new one if it is not known. An engine that moved is connected to anew.
func (w *Worker) peer(info lease.Peer) *peer {
	p := w.peers[info.Engine]
	if p == nil {
		p = &peer{info: info}
		w.peers[info.Engine] = p
		w.unwell = true
	}
	if p.info != info && p.state != connecting {
		w.broke(p, fmt.Errorf("its address changed from %s:%d to %s:%d", p.info.Host, p.info.Port, info.Host, info.Port))
		p.info = info
		p.failures, p.retryAt = 0, time.Time{} // were those of the old address
	}
	return p
}

// connect starts a handshake unless one is under way, done, or not due again yet. It reports whether p may become usable;
// if not, p.err says why.
func (w *Worker) connect(p *peer, now time.Time) bool {
	switch {
	case p.state != idle:
		return true
	case now.Before(p.retryAt):
		return false
	}
	ranks, err := w.ranksOf(p.info)
	if err != nil {
		w.connectFailed(p, now, err)
		return false
	}
	p.state = connecting
	info := p.info
	w.background.Go(func() {
		start := time.Now()
		h := handshake{engine: info.Engine}
		h.ranks, h.clock, h.err = w.shake(info, ranks)
		h.took = time.Since(start)
		select {
		case w.handshakes <- h:
		case <-w.ctx.Done():
			h.close()
		}
	})
	return true
}

// shake asks the owner for its ranks, checks every answer, and loads what NIXL needs to read from them.
func (w *Worker) shake(info lease.Peer, shares []share) (ranks []remoteRank, clock lease.ClockOffset, err error) {
	ctx, cancel := context.WithTimeout(w.ctx, w.cfg.HandshakeTimeout)
	defer cancel()
	want := w.cfg.Compatibility
	if w.cfg.AnyCompatibility || w.cfg.HoldOnly {
		want = ""
	}
	ids := make([]rankID, len(shares))
	for i, s := range shares {
		ids[i].tp = s.rank
	}
	replies, err := ask(ctx, info.Host, info.Port, ids, want)
	if err != nil {
		return nil, clock, err
	}
	defer func() {
		if err != nil {
			(&handshake{ranks: ranks}).close()
			ranks = nil
		}
	}()
	for i, reply := range replies {
		if err := clock.Add(reply.sent, reply.received, reply.Clock); err != nil {
			return ranks, clock, err
		}
		r, err := w.load(info, shares[i], reply.Metadata)
		if err != nil {
			return ranks, clock, fmt.Errorf("rank %d: %w", shares[i].rank, err)
		}
		ranks = append(ranks, r)
		for _, o := range ranks[:i] {
			if o.agent == r.agent {
				return ranks, clock, fmt.Errorf("ranks %d and %d of engine %q answer with one NIXL agent, %s: its side channel serves the wrong metadata",
					o.rank, r.rank, info.Engine, r.agent)
			}
		}
	}
	return ranks, clock, nil
}

func (w *Worker) load(info lease.Peer, s share, m *Metadata) (remoteRank, error) {
	if m.Engine != info.Engine {
		return remoteRank{}, fmt.Errorf("the side channel at %s:%d serves engine %q, not %q: the owner was restarted, or the address is another's",
			info.Host, info.Port, m.Engine, info.Engine)
	}
	if w.cfg.HoldOnly {
		name, err := w.fabric.Load(m.Agent)
		if err != nil {
			return remoteRank{}, fmt.Errorf("load the NIXL metadata of engine %q: %w", m.Engine, err)
		}
		return remoteRank{share: s, agent: name, meta: m}, nil
	}
	local, remote, err := w.cfg.KV.match(&w.meta, m, s)
	if err != nil {
		return remoteRank{}, err
	}
	memType, err := m.memType(w.cfg.KV.MemType)
	if err != nil {
		return remoteRank{}, fmt.Errorf("%w with engine %q: %w", errShape, m.Engine, err)
	}
	name, err := w.fabric.Load(m.Agent)
	if err != nil {
		return remoteRank{}, fmt.Errorf("load the NIXL metadata of engine %q: %w", m.Engine, err)
	}
	r := remoteRank{share: s, agent: name, meta: m, local: newView(&w.meta, local), remote: newView(m, remote)}
	if count(m, remote) == 0 {
		return r, nil
	}
	if r.localList, err = w.localList(local); err != nil {
		return remoteRank{}, fmt.Errorf("KV regions, cut for engine %q: %w", m.Engine, err)
	}
	if r.remoteList, err = w.fabric.RemoteList(name, memType, describe(m, remote)); err != nil {
		return remoteRank{}, fmt.Errorf("the blocks that engine %q advertises: %w", m.Engine, err)
	}
	return r, nil
}

// localList is the list of all own blocks, cut in a way. Peers of one shape share it, and it lives as long as the worker:
// there are few shapes that tp_size and block_size of a peer lead to. It is safe for concurrent use.
func (w *Worker) localList(cuts []cut) (List, error) {
	key := fmt.Sprint(cuts)
	w.listsMu.Lock()
	defer w.listsMu.Unlock()
	l := w.lists[key]
	if l == nil {
		var err error
		if l, err = w.fabric.LocalList(w.cfg.KV.MemType, describe(&w.meta, cuts)); err != nil {
			return nil, err
		}
		w.lists[key] = l
	}
	return l, nil
}

func (r *remoteRank) close() {
	if r.remoteList != nil {
		r.remoteList.Close()
	}
}

func (h *handshake) close() {
	for _, r := range h.ranks {
		r.close()
	}
}

// takeHandshakes applies the handshakes that ended since the last step.
func (w *Worker) takeHandshakes(now time.Time, res *lease.Result) {
	for {
		select {
		case h := <-w.handshakes:
			p := w.peers[h.engine]
			if w.cfg.Trace.Connected != nil {
				w.cfg.Trace.Connected(h.engine, h.took, h.err)
			}
			if h.err != nil {
				p.state = idle
				w.unwell = true
				w.connectFailed(p, now, h.err)
				w.failWaiting(p, res)
				continue
			}
			p.state, p.ranks, p.clock, p.proved, p.err = connected, h.ranks, h.clock, false, nil
			w.log.Info("connected", "engine", h.engine, "agent", h.ranks[0].agent, "took", h.took)
			res.Connected = append(res.Connected, h.engine)
			w.flush(p, now, res)
		default:
			return
		}
	}
}

func (w *Worker) connectFailed(p *peer, now time.Time, err error) {
	p.failures++
	p.err = err
	p.retryAt = now.Add(backoff(p.failures))
	w.stats.HandshakesFailed++
	w.log.Warn("handshake failed", "engine", p.info.Engine, "host", p.info.Host, "port", p.info.Port, "failures", p.failures, "error", err)
}

// failWaiting ends what waited for a handshake that will not come: pulls fail with p.err, and releases are given up, for
// the lease ends by itself.
func (w *Worker) failWaiting(p *peer, res *lease.Result) {
	for e := p.pulls.Front(); e != nil; e = p.pulls.Front() {
		x := e.Value.(*pull)
		w.forget(x)
		w.refuse(x.Request, lease.CauseHandshake, p.err, res)
	}
	for _, r := range p.releases {
		res.Released = append(res.Released, r.Request)
	}
	if len(p.beats) > 0 {
		res.HeartbeatFailed = append(res.HeartbeatFailed, p.info.Engine)
	}
	p.beats, p.releases = nil, nil
}

// flush sends what waited for the handshake with p: heartbeats first, for they keep the leases that the reads need.
func (w *Worker) flush(p *peer, now time.Time, res *lease.Result) {
	beats, releases := p.beats, p.releases
	p.beats, p.releases = nil, nil
	if len(beats) > 0 {
		w.sendBeats(p, beats, res)
	}
	for _, r := range releases {
		w.sendRelease(p, r, res)
	}
	w.pump(p, now, res)
}

// broke marks p for a new handshake after a failed transfer or notification. The agent's state for it is dropped only
// when no transfer is active any more: NIXL would report them as failed while their bytes still land.
func (w *Worker) broke(p *peer, err error) {
	if p.state == connected {
		p.state = broken
		w.unwell = true
		p.err = err
		if !p.proved { // else an owner that answers handshakes but no READ would be asked in every step
			p.failures++
			p.retryAt = w.now.Add(backoff(p.failures))
		}
		w.log.Warn("lost a peer", "engine", p.info.Engine, "error", err)
	}
}

// heal forgets the connection to broken peers and reconnects those that something waits for.
func (w *Worker) heal(now time.Time, res *lease.Result) {
	if !w.unwell {
		return
	}
	w.unwell = false
	for engine, p := range w.peers {
		if p.state == broken && p.active == 0 {
			for _, r := range p.ranks {
				r.close()
				if err := w.fabric.Forget(r.agent); err != nil {
					w.log.Warn("forget a lost peer", "engine", engine, "agent", r.agent, "error", err)
				}
			}
			p.ranks, p.state = nil, idle
			if e := p.pulls.Front(); e != nil {
				e.Value.(*pull).plan = nil // it names the ranks
			}
		}
		waiting := p.pulls.Len()+len(p.releases)+len(p.beats) > 0
		switch {
		case p.state == idle && waiting:
			if !w.connect(p, now) {
				w.failWaiting(p, res)
			}
		case p.state == idle && now.After(p.retryAt.Add(maxBackoff)):
			delete(w.peers, engine)
			continue
		}
		w.unwell = w.unwell || p.state == idle || p.state == broken
	}
}
