package rdma

import (
	"context"
	"time"

	"github.com/nixlgo/nixlgo/lease"
)

// Trace holds hooks for spans, logs and tests (package otelrdma makes spans of them). Nil hooks cost nothing. Step calls all
// but Begin, on its own goroutine, and so are what they return called: a hook that blocks holds up the step, heartbeats
// included. None may call the Worker, nor the Node that it is of.
//
// A hook that returns a function may return nil. The function is called once, in a step, when what the hook was called for
// has ended, or by Close.
type Trace struct {
	// BeforeCheck is called before the slot READ of one owner rank is posted, with the number of slots in it. The block
	// READs of their requests are done.
	BeforeCheck func(engine string, rank, slots int)
	// Handshake is called when a handshake with an engine begins. took is how long it lasted, whatever the step took to
	// notice; err is nil on success.
	Handshake func(p lease.Peer) (ended func(took time.Duration, err error))
	// Read is called when the block READs of a pull are posted, with their bytes. They have ended when the last one has;
	// err is then the first failure. A pull that is reported as failed while a READ of it is active has ended, too, and so has
	// one that is given up (lease.ErrAborted). The hook must not change p.
	Read func(p lease.Pull, bytes int64) (ended func(err error))
	// Verify is called when all blocks of a pull are in, and its lease is checked now. err is nil when the owner held it
	// throughout. The hook must not change p.
	Verify func(p lease.Pull) (ended func(err error))
	// Lease is called for the leases of this rank.
	Lease lease.TableTrace
	// Begin is for the engine to call, not for Step: it ties a request to the context of whoever waits for it, so that what
	// the other hooks are told of the request can be put under it. nixlgo.Node calls it, from any goroutine. The engine calls
	// what it returns when that part of the request's life ended: result says how in a word, err is nil when nothing was lost.
	Begin func(ctx context.Context, r Request) (ended func(result string, err error))
}

// Request is a part of a request's life, as the engine sees it.
type Request struct {
	// ID is the engine's own: that of lease.Pull.Request, lease.Ended.Request and lease.Grant.Request.
	ID     string
	Stage  Stage
	Peer   string // engine id of the owner for a hold or a fetch; "" for what this engine publishes
	Blocks int    // per layer; 0 for a hold
}

// Stage is a part of a request's life.
type Stage uint8

const (
	// Holding: this engine renews the lease, and reads nothing yet.
	Holding Stage = iota
	// Fetching: from the moment that local blocks are given to it to its verdict.
	Fetching
	// Publishing: the blocks of this engine are pinned for a reader, from before the params leave to the end of the lease.
	Publishing
)
