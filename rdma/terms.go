package rdma

import (
	"fmt"
	"slices"
	"time"

	"github.com/nixlgo/nixlgo/lease"
)

// maxClockGap is how far a scheduler's clock may be from the side channel's: a plan takes its time to a rank in another process.
const maxClockGap = time.Minute

// accept checks that this rank can carry out the plans of a scheduler, and takes it for its own. What an earlier one left behind
// ends first: its leases at once, its READs when the transport is done with them, which may take many steps. Errors match
// lease.ErrPlan.
func (w *Worker) accept(now time.Time, t lease.Terms) error {
	refuse := func(format string, a ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{lease.ErrPlan}, a...)...)
	}
	if rank := w.cfg.Rank; rank < len(t.Workers) && t.Workers[rank] != 0 && t.Workers[rank] != w.id {
		return refuse("it is for an earlier life of this rank; the next one will not be")
	}
	if t.Scheduler == 0 || t.Scheduler == w.serves {
		return nil
	}
	switch {
	case slices.Contains(w.past, t.Scheduler):
		return refuse("the scheduler was replaced by another")
	case w.cfg.Rank >= t.Ranks:
		return refuse("this is rank %d, and the scheduler has %d ranks", w.cfg.Rank, t.Ranks)
	case t.Slots > w.meta.SlotsCount:
		return refuse("the scheduler lends %d lease slots, and this rank has %d: give both the same lease.Config, Blocks and MaxSeqs", t.Slots, w.meta.SlotsCount)
	case t.MaxNotification > w.cfg.Lease.MaxNotification:
		return refuse("the scheduler takes ids for notifications of %d bytes, and this rank for %d", t.MaxNotification, w.cfg.Lease.MaxNotification)
	case t.Clock != nil && (now.Sub(Epoch())-*t.Clock).Abs() > maxClockGap:
		return refuse("the scheduler's clock shows %s, and the side channel's %s: set SchedulerConfig.Epoch to rdma.Epoch()", *t.Clock, now.Sub(Epoch()))
	}
	if w.serves != 0 {
		w.abandon(now)
		w.past, w.serves = append(w.past, w.serves), 0
	}
	if n := len(w.reads); n > 0 {
		return refuse("READs of an earlier scheduler are active, for %d requests, and may write its blocks", n)
	}
	w.serves = t.Scheduler
	return nil
}

// abandon ends what an earlier scheduler has left: nobody waits for its results.
func (w *Worker) abandon(now time.Time) {
	if n := w.table.AbortAll(now); n > 0 {
		w.log.Warn("ended the leases of an earlier scheduler", "leases", n)
	}
	w.table.Ended(nil)
	for id, x := range w.reads {
		x.orphan = true
		if !x.ended {
			w.giveUp(id, &lease.Result{})
		}
	}
	for p := range w.everyone {
		p.beats = nil
	}
}

// refusePlan reports all that is in a plan as over.
func (w *Worker) refusePlan(plan lease.Plan, res *lease.Result) {
	ended := func(request string, nonce int64) {
		res.Sent = append(res.Sent, lease.Ended{Request: request, Nonce: nonce, Reason: lease.ReasonAborted})
	}
	for _, a := range plan.Admit {
		ended(a.Request, a.Nonce)
	}
	for _, g := range plan.Grant {
		ended(g.Request, g.Nonce)
	}
	for _, k := range plan.Abort {
		ended(k.Request, k.Nonce)
	}
	for _, p := range plan.Read {
		w.refuse(p.Request, lease.CauseInvalid, lease.ErrPlan, res)
	}
	res.Settled = append(res.Settled, plan.Cancel...)
	for _, h := range plan.Heartbeat {
		res.HeartbeatFailed = append(res.HeartbeatFailed, h.Peer.Engine)
	}
	for _, r := range plan.Release {
		res.Released = append(res.Released, r.Request)
	}
}
