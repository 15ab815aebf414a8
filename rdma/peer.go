package rdma

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
)

// peer is an engine that this rank reads from, or tells something. Step owns it; a handshake works on its own goroutine and
// hands over a finished handshake value.
type peer struct {
	home  map[string]*peer // where Worker knows it: peers or tellers
	info  lease.Peer
	tell  bool // connected to every rank of any shape, for notifications alone
	state peerState
	ranks []remoteRank // ranks that this rank renews with, tells that it is done, and mostly reads from; set while connected
	used  time.Time    // when something was last asked of it

	listed  *listing // what it was connected with, if that came from the directory
	unwatch func()   // ends the watch over that

	clock lease.ClockOffset // of its side channel, for the deadlines that it names

	err      error                               // why the last handshake failed
	shaken   func(took time.Duration, err error) // Trace's, of the handshake under way
	since    time.Time                           // when that began, if shaken is set
	failures int                                 // handshakes failed, or connections lost before anything was read, in a row
	proved   bool                                // something was read over this connection
	retryAt  time.Time                           // no handshake before

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
	broken // a transfer, a notification or the handshake failed; what is loaded is forgotten when active is 0
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
	peer   *peer
	ranks  []remoteRank
	listed *listing
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

// peer returns the record of an engine as one to read from.
func (w *Worker) peer(info lease.Peer) *peer { return w.record(w.peers, info, w.cfg.HoldOnly) }

// teller returns the record of an engine as one to be told things only, which needs no KV cache like ours there. Of a worker
// that only holds, all are.
func (w *Worker) teller(info lease.Peer) *peer {
	if w.cfg.HoldOnly {
		return w.peer(info)
	}
	return w.record(w.tellers, info, true)
}

// record returns the record of an engine, a new one if it is not known. An engine that moved is connected to anew.
func (w *Worker) record(home map[string]*peer, info lease.Peer, tell bool) *peer {
	p := home[info.Engine]
	if p == nil {
		p = &peer{home: home, info: info, tell: tell}
		home[info.Engine] = p
		w.unwell = true
	}
	p.used = w.now
	if p.info != info && p.state != connecting {
		w.broke(p, fmt.Errorf("its address changed from %s:%d to %s:%d", p.info.Host, p.info.Port, info.Host, info.Port))
		p.info = info
		p.failures, p.retryAt = 0, time.Time{} // were those of the old address
	}
	return p
}

// everyone calls yield for every record.
func (w *Worker) everyone(yield func(*peer) bool) {
	for _, home := range []map[string]*peer{w.peers, w.tellers} {
		for _, p := range home {
			if !yield(p) {
				return
			}
		}
	}
}

// other is the other record of p's engine, nil if there is none.
func (w *Worker) other(p *peer) *peer {
	if !p.tell {
		return w.tellers[p.info.Engine]
	}
	if o := w.peers[p.info.Engine]; o != p {
		return o
	}
	return nil
}

// unfit reports whether the engine answered, and cannot be read from for what it is.
func (p *peer) unfit() bool {
	return p.state != connected && (errors.Is(p.err, errShape) || errors.Is(p.err, ErrCompatibility))
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
	ranks, err := w.ranksOf(p.info, p.tell)
	if err != nil {
		w.connectFailed(p, now, err)
		return false
	}
	p.state = connecting
	if f := w.cfg.Trace.Handshake; f != nil {
		p.shaken, p.since = f(p.info), time.Now()
	}
	info := p.info
	w.background.Go(func() {
		start := time.Now()
		h := handshake{peer: p}
		h.err = w.shake(&h, info, ranks)
		h.took = time.Since(start)
		select {
		case w.handshakes <- h:
		case <-w.ctx.Done():
			h.close()
		}
	})
	return true
}

// shake asks for the ranks of an owner, in the directory first, checks every answer, and loads what NIXL needs to read from
// them. What it has loaded is in h, also if it fails.
func (w *Worker) shake(h *handshake, info lease.Peer, shares []share) error {
	ctx, cancel := context.WithTimeout(w.ctx, w.cfg.HandshakeTimeout)
	defer cancel()
	replies, err := w.replies(ctx, h, info, shares)
	if err != nil {
		return err
	}
	for i, reply := range replies {
		if h.listed == nil { // a directory tells no time
			if err := h.clock.Add(reply.sent, reply.received, reply.Clock); err != nil {
				return err
			}
		}
		r, err := w.load(info, shares[i], reply.Metadata, h.peer.tell)
		if r.agent != "" {
			h.ranks = append(h.ranks, r)
		}
		if err != nil {
			return fmt.Errorf("the owner's rank %d: %w", shares[i].rank, err)
		}
		for _, o := range h.ranks[:i] {
			if o.agent == r.agent {
				return fmt.Errorf("ranks %d and %d of engine %q answer with one NIXL agent, %s: its side channel serves the wrong metadata",
					o.rank, r.rank, info.Engine, r.agent)
			}
		}
	}
	return nil
}

// replies asks for the metadata of the ranks in shares. The side channel is asked where the directory has no entry or does not
// answer; an entry that is there is the answer, good or bad.
func (w *Worker) replies(ctx context.Context, h *handshake, info lease.Peer, shares []share) ([]*Reply, error) {
	want := expected{w.cfg.Compatibility, w.cfg.Key}
	if w.cfg.AnyCompatibility || h.peer.tell {
		want.hash = ""
	}
	ids, ranks := make([]rankID, len(shares)), make([]int, len(shares))
	for i, s := range shares {
		ids[i].tp, ranks[i] = s.rank, s.rank
	}
	var missing error
	if w.cfg.Directory != nil {
		if h.listed, missing = w.lookup(ctx, info.Engine, ranks); missing == nil {
			return h.listed.parse(info.Engine, want)
		}
	}
	replies, err := ask(ctx, info.Host, info.Port, ids, want)
	if err != nil && missing != nil {
		err = fmt.Errorf("%w; %w", err, missing)
	}
	return replies, err
}

// load loads an owner rank's metadata. If it fails after the agent was loaded, the rank has its name.
func (w *Worker) load(info lease.Peer, s share, m *Metadata, tell bool) (r remoteRank, err error) {
	if m.Engine != info.Engine {
		return r, fmt.Errorf("%w: the side channel at %s:%d, or the directory, serves engine %q, not %q: the owner was restarted, or the address is another's",
			errEngine, info.Host, info.Port, m.Engine, info.Engine)
	}
	r = remoteRank{share: s, meta: m}
	var local, remote []cut
	var memType nixl.MemType
	if !tell {
		if local, remote, err = w.cfg.KV.match(&w.meta, m, s); err != nil {
			return r, err
		}
		if memType, err = m.memType(w.cfg.KV.MemType); err != nil {
			return r, fmt.Errorf("%w with engine %q: %w", errShape, m.Engine, err)
		}
		r.local, r.remote = newView(&w.meta, local), newView(m, remote)
	}
	if r.agent, err = w.fabric.Load(m.Agent); err != nil {
		return r, fmt.Errorf("load the NIXL metadata of engine %q: %w", m.Engine, err)
	}
	if tell || count(m, remote) == 0 {
		return r, nil
	}
	if r.localList, err = w.localList(local); err != nil {
		return r, fmt.Errorf("KV regions, cut for engine %q: %w", m.Engine, err)
	}
	if r.remoteList, err = w.fabric.RemoteList(r.agent, memType, describe(m, remote)); err != nil {
		return r, fmt.Errorf("the blocks that engine %q advertises: %w", m.Engine, err)
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
			p := h.peer
			w.moved = now
			p.endHandshake(h.took, h.err)
			if h.err != nil {
				p.state, w.unwell = idle, true
				if len(h.ranks) > 0 { // loaded, and let go of by heal: another handshake may count on the same agents
					p.state, p.ranks = broken, h.ranks
				}
				w.connectFailed(p, now, h.err)
				w.failWaiting(p, now, res)
				continue
			}
			w.stats.HandshakeTime.Observe(h.took.Seconds(), postSeconds[1:])
			p.state, p.ranks, p.clock, p.proved, p.err = connected, h.ranks, h.clock, false, nil
			w.displace(p)
			if p.listed = h.listed; p.listed != nil {
				w.watch(p)
			}
			w.log.Info("connected", "peer", p.info.Engine, "agent", h.ranks[0].agent, "took", h.took)
			res.Connected = append(res.Connected, p.info.Engine)
			w.flush(p, now, res)
		default:
			return
		}
	}
}

// endHandshake tells the trace that the handshake under way has ended.
func (p *peer) endHandshake(took time.Duration, err error) {
	if p.shaken != nil {
		p.shaken(took, err)
		p.shaken = nil
	}
}

func (w *Worker) connectFailed(p *peer, now time.Time, err error) {
	p.failures++
	p.err = err
	p.retryAt = now.Add(backoff(p.failures))
	cause := HandshakeCauseOf(err)
	w.stats.HandshakesFailed[cause]++
	w.quiet.Warn("handshake failed", p.info.Engine, "cause", cause, "host", p.info.Host, "port", p.info.Port, "failures", p.failures, "error", err)
}

// failWaiting ends what waited for a handshake that will not come: pulls fail with p.err, and releases are given up, for
// the lease ends by itself. What is to be told to an owner that cannot be read from is told all the same.
func (w *Worker) failWaiting(p *peer, now time.Time, res *lease.Result) {
	for e := p.pulls.Front(); e != nil; e = p.pulls.Front() {
		x := e.Value.(*pull)
		w.forget(x)
		w.refuse(x.Request, lease.CauseHandshake, p.err, res)
	}
	beats, releases := p.beats, p.releases
	p.beats, p.releases = nil, nil
	if !p.tell && p.unfit() {
		if len(beats) > 0 {
			w.tellBeats(w.teller(p.info), beats, now, res)
		}
		for _, r := range releases {
			w.tellRelease(w.teller(p.info), r, now, res)
		}
		return
	}
	for _, r := range releases {
		res.Released = append(res.Released, r.Request)
	}
	if len(beats) > 0 {
		res.HeartbeatFailed = append(res.HeartbeatFailed, p.info.Engine)
	}
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
		w.quiet.Warn("lost a peer", p.info.Engine, "error", err)
		// NIXL connects an agent anew only after it was forgotten, which it is when no connection uses it.
		if o := w.other(p); o != nil && p.joins(o) {
			w.broke(o, err)
		}
	}
}

// displace breaks the connections of other engines to agents of the names that p's have: what was loaded for p is in their place.
func (w *Worker) displace(p *peer) {
	for o := range w.everyone {
		if o.info.Engine != p.info.Engine && p.joins(o) {
			w.broke(o, fmt.Errorf("engine %q answers with a NIXL agent of the same name", p.info.Engine))
		}
	}
}

// joins reports whether an agent of p is one of o, too.
func (p *peer) joins(o *peer) bool {
	return slices.ContainsFunc(p.ranks, func(r remoteRank) bool { return o.uses(r.agent) })
}

// uses reports whether p is connected by way of an agent.
func (p *peer) uses(agent string) bool {
	return slices.ContainsFunc(p.ranks, func(r remoteRank) bool { return r.agent == agent })
}

// heal forgets the connection to broken peers and reconnects those that something waits for.
func (w *Worker) heal(now time.Time, res *lease.Result) {
	if !w.unwell {
		return
	}
	w.unwell = false
	for p := range w.everyone {
		if p.state == broken && w.severable(p) {
			w.disconnect(p)
			p.state = idle
			if e := p.pulls.Front(); e != nil {
				e.Value.(*pull).plan = nil // it names the ranks
			}
		}
	}
	for p := range w.everyone { // only now: the two connections of an engine share its agents
		waiting := p.pulls.Len()+len(p.releases)+len(p.beats) > 0
		switch {
		case p.state == idle && waiting:
			if !w.connect(p, now) {
				w.failWaiting(p, now, res)
			}
		case p.state == idle && now.After(p.retryAt.Add(maxBackoff)):
			delete(p.home, p.info.Engine)
			continue
		}
		w.unwell = w.unwell || p.state == idle || p.state == broken
	}
}

// evict forgets the engines that were not used for Lease.EngineTTL: nothing is read from them, nothing waits, and nobody
// heartbeats there. The next use connects anew.
func (w *Worker) evict(now time.Time) {
	if w.cfg.Lease.EngineTTL == 0 || now.Before(w.evictAt) {
		return
	}
	ttl := max(w.cfg.Lease.EngineTTL, 2*w.cfg.Lease.Interval())
	w.evictAt = now.Add(ttl)
	for p := range w.everyone {
		if p.state != connected {
			continue
		}
		if !w.severable(p) || p.pulls.Len() > 0 {
			p.used = now
		}
		if due := p.used.Add(ttl); now.Before(due) {
			if due.Before(w.evictAt) {
				w.evictAt = due
			}
			continue
		}
		w.disconnect(p)
		delete(p.home, p.info.Engine)
		w.stats.PeersEvicted++
		w.log.Info("forgot an idle engine", "peer", p.info.Engine, "idle", now.Sub(p.used))
	}
}

// severable reports whether the connection can be ended now: no transfer is active, no handshake is loading the same agents, and
// a broken connection with the same agents can be ended as well.
func (w *Worker) severable(p *peer) bool {
	o := w.other(p)
	return p.active == 0 && (o == nil || o.state != connecting && (o.state != broken || o.active == 0))
}

// disconnect ends the connection of a severable peer and lets go of what was loaded for it, but for agents that another connection
// uses.
func (w *Worker) disconnect(p *peer) {
	ranks := p.ranks
	p.ranks, p.listed = nil, nil
	if p.unwatch != nil {
		p.unwatch()
		p.unwatch = nil
	}
	for _, r := range ranks {
		r.close()
		used := false
		for o := range w.everyone {
			used = used || o.uses(r.agent)
		}
		if used {
			continue
		}
		if err := w.fabric.Forget(r.agent); err != nil {
			w.log.Warn("forget a peer", "peer", r.meta.Engine, "agent", r.agent, "error", err)
		}
	}
}
