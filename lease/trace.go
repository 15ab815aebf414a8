package lease

import "time"

// TableTrace are functions that a Table calls when something happens to a
// lease, for spans, logs and histograms. Each may be nil, and then costs nothing.
// They are called from within the Table's own methods, so they must be short and
// must not call the Table.
type TableTrace struct {
	// Granted: a life has got its deadline.
	Granted func(g Grant)
	// Heartbeat: a message from sender renewed so many lives, and missed so many
	// targets that have no lease here any more. One call for a message, for a
	// renewal takes less time than a call.
	Heartbeat func(sender string, renewed, missed int)
	// Ended: a life ended; its slot is 0. age is the time since its grant, and
	// left what its deadline had left, negative when it had passed. Both are 0
	// for a life that was never granted.
	Ended func(e Ended, age, left time.Duration)
	// StaleReadComplete: sender has read the life k, which is not here any more
	// while another life of its request is. A stale nonce of 0 is not seen here:
	// see TableStats.RefusedReadCompletes.
	StaleReadComplete func(sender string, k Key)
	// LateReadComplete: so many senders said that they have read k, for which no
	// lease was here, and none came for EarlyTTL. Without a nonce, which is 0
	// then, none is waited for.
	LateReadComplete func(k Key, senders int)
}

// SchedulerTrace are functions that a Scheduler calls, under the rules of
// TableTrace.
type SchedulerTrace struct {
	// Exported: the params of a life have left, its grant goes out with the next
	// plan.
	Exported func(request string, nonce int64, ttl time.Duration)
	// Ended: every rank has let a life go. It is called for lives that were never
	// exported, too.
	Ended func(e Ended)
	// FetchStarted: OnBlocksAllocated has accepted a pull with blocks to fill.
	FetchStarted func(p Pull)
	// FetchEnded comes once for each FetchStarted. cause is 0 and err nil when
	// every rank has the blocks, CauseAborted when the request was finished or
	// preempted before.
	FetchEnded func(request string, cause Cause, err error)
}
