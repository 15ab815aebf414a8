package rdma

import (
	"bytes"
	"context"
	"time"

	"github.com/nixlgo/nixlgo/lease"
)

// An owner's clock drifts away from ours, so it is asked for again while the connection lives. In sampleEvery two clocks part by
// 0.12 s at most.
const (
	sampleEvery = 10 * time.Minute
	sampleRetry = time.Minute
)

// clockSample is an owner's clock, asked for again.
type clockSample struct {
	peer  *peer
	reply *Reply
	clock stepClock
	err   error
}

// sampleClocks asks for the clocks of the owners that this rank may read turns back from.
func (w *Worker) sampleClocks(now time.Time) {
	if !w.cfg.Lease.Bidirectional || now.Before(w.sampleAt) {
		return
	}
	w.sampleAt = now.Add(sampleRetry)
	for _, p := range w.peers {
		if p.state != connected || !p.clock.Known() || p.sampling || p.clock.Age(now) < sampleEvery {
			continue
		}
		p.sampling = true
		info, rank := p.info, rankID{tp: p.ranks[0].rank}
		clock := stepClock{now, time.Now()}
		w.background.Go(func() {
			ctx, cancel := context.WithTimeout(w.ctx, w.cfg.HandshakeTimeout)
			defer cancel()
			s := clockSample{peer: p, clock: clock}
			var replies []*Reply
			if replies, s.err = w.ask(ctx, info, []rankID{rank}, expected{key: w.cfg.Key}); s.err == nil {
				s.reply = replies[0]
			}
			select {
			case w.samples <- s:
			case <-w.ctx.Done():
			}
		})
	}
}

// takeSamples applies the samples that came since the last step. One of another agent, which took the address meanwhile, says
// nothing about the owner.
func (w *Worker) takeSamples() {
	for {
		select {
		case s := <-w.samples:
			p := s.peer
			p.sampling = false
			if s.err == nil && p.state == connected && bytes.Equal(s.reply.Metadata.Agent, p.ranks[0].meta.Agent) {
				s.err = s.clock.sampled(s.reply, &p.clock)
			}
			if s.err != nil {
				w.log.Debug("ask for a clock again", "peer", p.info.Engine, "error", s.err)
			}
		default:
			return
		}
	}
}

// ask performs the handshake with ranks of an engine over its side channel.
func (w *Worker) ask(ctx context.Context, info lease.Peer, ranks []rankID, want expected) ([]*Reply, error) {
	return ask(ctx, w.cfg.Dial, info.Host, info.Port, ranks, want)
}
