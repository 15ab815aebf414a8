package lease

import "time"

// Key names one life of a request. The same request id may live again while
// its earlier lease is still pinned; the nonce tells the two apart.
type Key struct {
	Request string
	Nonce   int64
}

// SlotRef is where a lease shows itself in the owner's slot array, and the
// value it shows. It travels in kv_transfer_params as remote_lease_slot and
// remote_lease_nonce.
type SlotRef struct {
	Slot  int   // index into the owner's slot array
	Nonce int64 // 1 … MaxNonce
}

// NoSlot is the slot of a lease that shows itself in no slot. It is pinned and
// renewed like any other; verifying readers decline it.
const NoSlot = -1

// Peer is an engine at an address, as kv_transfer_params name it. Engine ids
// need not be unique, and an engine may move: two peers that differ in any field
// are two.
type Peer struct {
	Engine  string // engine id
	Host    string // side-channel host
	Port    int    // side-channel port
	TPSize  int    // ranks, at least 1
	PPSize  int    // at least 1
	DCPSize int    // at least 1
}

// Plan is what every rank has to do in one step. It holds no pointer to shared
// state and no absolute time, and survives JSON, so the ranks may live in other
// processes. A rank carries it out in the order of its fields, with Cancel
// before Read.
type Plan struct {
	Terms     Terms       // what the ranks have to agree with
	Admit     []Admission // write the nonces
	Grant     []Grant     // start the deadlines
	Abort     []Key       // end these lives now
	Read      []Pull      // post the READs
	Heartbeat []Heartbeat // renew at the owners
	Release   []Release   // tell owners that nothing will be read
	Cancel    []string    // local requests given up while a READ may be active
}

// Terms are what a Scheduler and its ranks have to agree on. A rank that does
// not refuses the plan ([ErrPlan]), and reports all that is in it as over.
type Terms struct {
	// Scheduler tells schedulers apart; it is random, and 0 in a plan that was
	// made by hand, which no rank checks.
	Scheduler uint64
	Ranks     int // how many there are
	Slots     int // of each rank
	// MaxNotification is the size cap that ids were checked against, in bytes.
	MaxNotification int
	// Workers are the lives of the ranks that the plan is for, as their results
	// told them, 0 where none has come.
	Workers []uint64 `json:",omitempty"`
	// Clock is the time since SchedulerConfig.Epoch, nil unless blocks are kept
	// for a next turn, with a deadline on that clock.
	Clock *time.Duration `json:",omitempty"`
}

// Empty reports whether there is nothing to do.
func (p Plan) Empty() bool {
	return len(p.Admit)+len(p.Grant)+len(p.Abort)+len(p.Read)+len(p.Heartbeat)+len(p.Release)+len(p.Cancel) == 0
}

// Admission starts a life: the rank writes Nonce into Slot. Slot is NoSlot for
// a request that found no free one; its nonce then only numbers the life.
type Admission struct {
	Request string
	Nonce   int64
	Slot    int
}

// Grant starts the deadline of an admitted life: now + TTL on the rank's clock.
type Grant struct {
	Request string
	Nonce   int64
	TTL     time.Duration
	// Exported: kv_transfer_params with this life have left.
	Exported bool
	// Fixed: heartbeats do not move the deadline (decoder_kv_blocks_ttl).
	Fixed bool `json:",omitempty"`
}

// Pull is one READ job of a reader. Block ids are logical, one list per
// transfer group.
type Pull struct {
	Request       string // local id
	Peer          Peer
	RemoteRequest string
	RemoteBlocks  [][]int
	LocalBlocks   [][]int
	// RemoteTokens is how many tokens of the request RemoteBlocks hold
	// (remote_num_tokens), 0 when not known. Tokens is how many LocalBlocks
	// reach to, at most those; 0 means all of them.
	RemoteTokens int      `json:",omitempty"`
	Tokens       int      `json:",omitempty"`
	Lease        *SlotRef // nil when the params carried none
	Verify       bool     // use the blocks only after the check
	// MustOffer: there is no lease to verify, which only an owner without slots
	// may leave out; one that has slots has offered one, and it got lost.
	MustOffer bool `json:",omitempty"`
	// Expiry is remote_blocks_expiry_time, the deadline of a decoder's blocks in
	// seconds on its clock; nil when a heartbeat renews the lease. See
	// [ClockOffset.Check].
	Expiry *float64 `json:",omitempty"`
}

// Heartbeat renews leases at one owner.
type Heartbeat struct {
	Peer    Peer
	Targets []Target
	// Duration is how long the owner's leases last, as far as the scheduler knows;
	// a rank that knows better reports the Connection again.
	Duration time.Duration `json:",omitempty"`
}

// Target is one lease to renew. Slot is NoSlot and Nonce 0 when the params
// carried no lease.
type Target struct {
	Request string // the owner's request id
	Slot    int
	Nonce   int64
}

// Release is a read-complete: no request of this engine needs the lease any
// more, for it was read, or nothing is, or will be, read.
type Release struct {
	Request       string // local id, of the last request that needed it
	Peer          Peer
	RemoteRequest string
	Nonce         int64 // 0 when the params carried no lease
	// All: tell every rank of the owner, with one reader, and not only those that
	// this rank would read. Set for a lease that was held for somebody else.
	All bool `json:",omitempty"`
}

// Result is what one rank reports after a step.
type Result struct {
	Rank      int
	Scheduler uint64 `json:",omitempty"` // whose plan it answers, 0 if none
	// Worker tells the lives of a rank apart, 0 if it does not say: what a rank
	// was told before it was started anew is lost.
	Worker   uint64    `json:",omitempty"`
	Sent     []Ended   // lives that ended here; their slots are already 0
	Received []string  // local requests whose blocks are in and checked
	Failed   []Failure // local requests whose pull failed
	// Settled: local requests of which no READ is active on this rank any
	// more, after a Cancel or a failure that was quarantined.
	Settled  []string
	Released []string // local requests whose Release went out, for whoever waits for it
	// Connected: owners this rank connected to since its last result.
	Connected []Connection
	// HeartbeatFailed: engine ids a heartbeat could not be sent to.
	HeartbeatFailed []string
}

// Connection is an owner that a rank has connected to.
type Connection struct {
	Peer Peer
	// Duration is how long the owner's leases last that nobody renews, 0 if it
	// does not say.
	Duration time.Duration `json:",omitempty"`
}

// Ended is a life that ended on one rank.
type Ended struct {
	Request string
	Nonce   int64
	Reason  Reason
}

// Failure is a pull that failed on one rank.
type Failure struct {
	Request string
	Cause   Cause
	Message string
	// Err is what the rank saw, for errors.Is; it does not survive JSON.
	Err error `json:"-"`
	// Quarantined: a READ of the request may still write. A Settled follows.
	Quarantined bool
}

// Outcome is what the engine has to do after OnResults. Every pull that
// OnBlocksAllocated accepted ends in exactly one of Run and Fail, unless
// RequestFinished gave it up first. Settled follows a Fail that is Quarantined
// and a RequestFinished that delayed the free.
type Outcome struct {
	Free []Freed  // the owner's blocks may be reused
	Run  []string // the reader's blocks are in
	Fail []Failed // the KV load failed
	// Settled: no READ writes the reader's blocks any more. They are the engine's
	// to free if RequestFinished delayed it, and to use again otherwise.
	Settled []Settled
}

// Freed is a life whose blocks every rank has let go.
type Freed struct {
	Request string
	Nonce   int64
	Blocks  [][]int
	Reason  Reason
}

// Failed is a KV load that failed.
type Failed struct {
	Request string
	// Err matches the sentinel of its cause.
	Err           error
	Cause         Cause
	InvalidBlocks [][]int // local block ids whose content must not be used
	Recompute     bool    // kv_load_failure_policy is recompute
	// Quarantined: InvalidBlocks may still be written; do not reuse them
	// before Settled names the request.
	Quarantined bool
}

// Settled is a request whose local blocks no READ can write any more.
type Settled struct {
	Request string
	Blocks  [][]int
}
