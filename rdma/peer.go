package rdma

import (
	"bytes"
	"container/list"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
)

// peer is an engine at an address, that this rank reads from, or tells something. Step owns it; a handshake works on its own
// goroutine and hands over a finished handshake value.
type peer struct {
	home  map[lease.Peer]*peer // where Worker knows it: peers or tellers
	info  lease.Peer
	tell  bool // connected to every rank of any shape, for notifications alone
	state peerState
	ranks []remoteRank // ranks that this rank renews with, tells that it is done, and mostly reads from; set while connected
	used  time.Time    // when something was last asked of it

	listed  *listing // what it was connected with, if that came from the directory
	unwatch func()   // ends the watch over that

	clock    lease.ClockOffset // of its side channel, for the deadlines that it names
	sampling bool              // that is being asked for again
	interval time.Duration     // between two heartbeats

	err      error                               // why the last handshake failed
	shaken   func(took time.Duration, err error) // Trace's, of the handshake under way
	since    time.Time                           // when that began, if shaken is set
	failures int                                 // handshakes failed, or connections lost before anything was read, in a row
	proved   bool                                // something was read over this connection
	lost     bool                                // a transfer or a notification failed, and no handshake has ended since
	failedAt time.Time                           // when the last of those did
	retryAt  time.Time                           // no handshake before, but for a new request

	pulls list.List // *pull: those that wait for the handshake, or for others to end, in order of arrival

	// What waits for the handshake besides. The heartbeats wait through failed ones as well.
	beats    []lease.Target
	beatsAt  time.Time // when they were planned
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
	peer    *peer
	ranks   []remoteRank
	loading bool // it is among those of Worker.loading
	listed  *listing
	clock   lease.ClockOffset
	took    time.Duration
	ended   time.Time // on the clock of the steps
	err     error
}

const maxBackoff = 60 * time.Second

// backoff is 0, 1, 2, 4 … 60 s after 1, 2, 3, 4 … failures, and never longer than a heartbeat interval: a lease may be at stake.
func (p *peer) backoff() time.Duration {
	if p.failures < 2 {
		return 0
	}
	return min(maxBackoff, p.interval, time.Second<<min(p.failures-2, 6))
}

// freshFor is how long the error of a failed handshake answers for new requests. An older one is tried again for them.
func (p *peer) freshFor() time.Duration { return min(time.Second, p.interval) }

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

// record returns the record of an engine at an address, a new one if it is not known.
func (w *Worker) record(home map[lease.Peer]*peer, info lease.Peer, tell bool) *peer {
	p := home[info]
	if p == nil {
		p = &peer{home: home, info: info, tell: tell, interval: w.cfg.Lease.Interval()}
		home[info] = p
		w.unwell = true
	}
	p.used = w.now
	return p
}

// everyone calls yield for every record.
func (w *Worker) everyone(yield func(*peer) bool) {
	for _, home := range []map[lease.Peer]*peer{w.peers, w.tellers} {
		for _, p := range home {
			if !yield(p) {
				return
			}
		}
	}
}

// unfit reports whether the engine answered, and cannot be read from for what it is.
func (p *peer) unfit() bool {
	return p.state != connected && (errors.Is(p.err, errShape) || errors.Is(p.err, ErrCompatibility))
}

// connect starts a handshake unless one is under way, done, or not due again yet. It reports whether p may become usable;
// if not, p.err says why. What failed for others a second ago is tried again for a new request.
func (w *Worker) connect(p *peer, now time.Time, fresh bool) bool {
	switch {
	case p.state != idle:
		return true
	case now.Before(p.retryAt) && !(fresh && now.Sub(p.failedAt) >= p.freshFor()):
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
	info, start := p.info, time.Now()
	w.background.Go(func() {
		h := handshake{peer: p}
		clock := stepClock{now, start}
		h.err = w.shake(&h, info, ranks, clock)
		h.took, h.ended = time.Since(start), clock.at(time.Now())
		select {
		case w.handshakes <- h:
		case <-w.ctx.Done():
			h.close()
		}
	})
	return true
}

// stepClock is the clock of the engine's steps, for what happens beside them: one moment on it and on this process's.
type stepClock struct{ step, process time.Time }

// at is a moment of this process's clock on that of the steps.
func (c stepClock) at(t time.Time) time.Time { return c.step.Add(t.Sub(c.process)) }

// sampled takes the clock of an owner from its reply.
func (c stepClock) sampled(r *Reply, o *lease.ClockOffset) error {
	return o.Add(c.at(r.sent), c.at(r.received), r.Clock)
}

// shake asks for the ranks of an owner, in the directory first, checks every answer, and loads what NIXL needs to read from
// them. What it has loaded is in h, also if it fails.
func (w *Worker) shake(h *handshake, info lease.Peer, shares []share, clock stepClock) error {
	ctx, cancel := context.WithTimeout(w.ctx, w.cfg.HandshakeTimeout)
	defer cancel()
	replies, err := w.replies(ctx, h, info, shares)
	if err != nil {
		return err
	}
	w.startLoading(h)
	for i, reply := range replies {
		if h.listed == nil { // a directory tells no time
			if err := clock.sampled(reply, &h.clock); err != nil {
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
	replies, err := w.ask(ctx, info, ids, want)
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
			w.moved, p.lost = now, false
			w.endLoading(&h)
			p.endHandshake(h.took, h.err)
			if h.err != nil {
				p.state, w.unwell = idle, true
				if len(h.ranks) > 0 { // loaded, and let go of by heal: another handshake may count on the same agents
					p.state, p.ranks = broken, h.ranks
				}
				if now.Before(h.ended) {
					h.ended = now
				}
				w.connectFailed(p, h.ended, h.err)
				w.failWaiting(p, now, res)
				if len(p.beats) > 0 {
					res.HeartbeatFailed = append(res.HeartbeatFailed, p.info.Engine)
				}
				continue
			}
			w.stats.HandshakeTime.Observe(h.took.Seconds(), postSeconds[1:])
			p.state, p.ranks, p.clock, p.proved, p.err = connected, h.ranks, h.clock, false, nil
			w.displace(p)
			if p.listed = h.listed; p.listed != nil {
				w.watch(p)
			}
			w.log.Info("connected", "peer", p.info.Engine, "agent", h.ranks[0].agent, "took", h.took)
			res.Connected = append(res.Connected, lease.Connection{Peer: p.info, Duration: p.duration()})
			if p.state == connected {
				w.flush(p, now, res)
			}
			p.interval = w.intervalOf(p) // what waited was planned by the old one
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

func (w *Worker) connectFailed(p *peer, at time.Time, err error) {
	p.failures++
	p.err, p.failedAt = err, at
	p.retryAt = at.Add(p.backoff())
	cause := HandshakeCauseOf(err)
	w.stats.HandshakesFailed[cause]++
	w.quiet.Warn("handshake failed", p.info.Engine, "cause", cause, "host", p.info.Host, "port", p.info.Port, "failures", p.failures, "error", err)
}

// failWaiting ends what waited for a handshake that will not come: pulls fail with p.err, and releases are given up, for
// the lease ends by itself. Heartbeats wait on. What is to be told to an owner that cannot be read from is told all the same.
func (w *Worker) failWaiting(p *peer, now time.Time, res *lease.Result) {
	for e := p.pulls.Front(); e != nil; e = p.pulls.Front() {
		x := e.Value.(*pull)
		w.forget(x)
		w.refuse(x.Request, lease.CauseHandshake, p.err, res)
	}
	releases := p.releases
	p.releases = nil
	if !p.tell && p.unfit() {
		if beats := p.takeBeats(now); len(beats) > 0 {
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
}

// takeBeats returns the heartbeats that wait, which do no more. A list that no plan has renewed in two intervals is of requests
// that have ended.
func (p *peer) takeBeats(now time.Time) []lease.Target {
	beats := p.beats
	p.beats = nil
	if now.Sub(p.beatsAt) > 2*p.interval {
		return nil
	}
	return beats
}

// flush sends what waited for the handshake with p: heartbeats first, for they keep the leases that the reads need.
func (w *Worker) flush(p *peer, now time.Time, res *lease.Result) {
	releases := p.releases
	p.releases = nil
	if beats := p.takeBeats(now); len(beats) > 0 {
		w.sendBeats(p, beats, res)
	}
	if p.state != connected { // the rest waits for the next connection
		p.releases = releases
		return
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
		p.state, p.lost, p.err = broken, true, err
		w.unwell = true
		if !p.proved { // else an owner that answers handshakes but no READ would be asked in every step
			p.failures++
			p.failedAt, p.retryAt = w.now, w.now.Add(p.backoff())
		}
		w.quiet.Warn("lost a peer", p.info.Engine, "error", err)
		// NIXL connects an agent anew only after it was forgotten, which it is when no connection uses it.
		for o := range w.everyone {
			if o != p && p.joins(o) {
				w.broke(o, err)
			}
		}
	}
}

// displace settles whose the agents are that p was just connected with. Others that answered with the same are that engine too,
// by another address or to be told things only; if they are broken, so is p. Those that answered with other metadata under the
// name have lost it: what was loaded for p is in their place.
func (w *Worker) displace(p *peer) {
	for o := range w.everyone {
		switch {
		case o == p || !p.joins(o):
		case o.info.Engine != p.info.Engine || !p.same(o):
			w.broke(o, fmt.Errorf("engine %q at %s:%d answers with a NIXL agent of the same name", p.info.Engine, p.info.Host, p.info.Port))
		case o.lost:
			w.broke(p, o.err)
		}
	}
}

// same reports whether the agents that p and o have in common are the same by their metadata.
func (p *peer) same(o *peer) bool {
	for _, r := range p.ranks {
		for _, q := range o.ranks {
			if r.agent == q.agent && !bytes.Equal(r.meta.Agent, q.meta.Agent) {
				return false
			}
		}
	}
	return true
}

// duration is how long leases of a connected p last, by what its ranks say; 0: not known.
func (p *peer) duration() (d time.Duration) {
	for _, r := range p.ranks {
		if own := r.meta.LeaseDuration; own > 0 && (d == 0 || own < d) {
			d = own
		}
	}
	return d
}

// intervalOf is the time between two heartbeats to a connected p, as the scheduler keeps it.
func (w *Worker) intervalOf(p *peer) time.Duration {
	if p.state != connected {
		return p.interval
	}
	return lease.HeartbeatInterval(w.cfg.Lease.Duration, p.duration())
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
		if p.state == broken && w.sever(p) {
			p.state = idle
			if e := p.pulls.Front(); e != nil {
				e.Value.(*pull).plan = nil // it names the ranks
			}
		}
	}
	for p := range w.everyone { // only now: the two connections of an engine share its agents
		if p.state == idle && len(p.beats) > 0 && now.Sub(p.beatsAt) > 2*p.interval {
			p.beats = nil
		}
		waiting := p.pulls.Len()+len(p.releases) > 0 || len(p.beats) > 0 && now.Sub(p.failedAt) >= p.freshFor()
		switch {
		case p.state == idle && waiting:
			// What waited for a connection that was lost has not seen a handshake fail, and waits a moment for one.
			if !w.connect(p, now, p.lost) && !p.lost {
				w.failWaiting(p, now, res)
			}
		case p.state == idle && now.After(p.retryAt.Add(maxBackoff)) && now.After(p.used.Add(maxBackoff)):
			delete(p.home, p.info)
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
		if due := p.used.Add(ttl); now.Before(due) {
			if due.Before(w.evictAt) {
				w.evictAt = due
			}
			continue
		}
		if p.pulls.Len() > 0 || !w.sever(p) {
			p.used = now
			continue
		}
		delete(p.home, p.info)
		w.stats.PeersEvicted++
		w.log.Info("forgot an idle engine", "peer", p.info.Engine, "idle", now.Sub(p.used))
	}
}

// startLoading says that a handshake is about to load agents of its engine.
func (w *Worker) startLoading(h *handshake) {
	w.loadMu.Lock()
	defer w.loadMu.Unlock()
	h.loading = true
	w.loading[h.peer.info.Engine]++
}

// endLoading says that what a handshake has loaded is in the hands of the step.
func (w *Worker) endLoading(h *handshake) {
	if !h.loading {
		return
	}
	w.loadMu.Lock()
	defer w.loadMu.Unlock()
	engine := h.peer.info.Engine
	if w.loading[engine]--; w.loading[engine] == 0 {
		delete(w.loading, engine)
	}
}

// sever ends the connection of p if it can be ended now: no transfer is active, no handshake is loading agents of the engine, and
// a broken connection with the same agents can be ended as well.
func (w *Worker) sever(p *peer) bool {
	if p.active > 0 {
		return false
	}
	for o := range w.everyone {
		if o != p && o.state == broken && o.active > 0 && p.joins(o) {
			return false
		}
	}
	w.loadMu.Lock()
	defer w.loadMu.Unlock()
	if w.loading[p.info.Engine] > 0 {
		return false
	}
	w.disconnect(p)
	return true
}

// disconnect lets go of what was loaded for p, but for agents that another connection uses.
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
