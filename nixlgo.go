// Package nixlgo passes KV-cache blocks between inference processes over NIXL, under renewable leases and with proof, after
// each read, that the lease was held throughout.
//
// A Node owns registered memory for layers × blocks of KV cache. The prefill side fills blocks and calls Publish, which
// pins them under a lease and returns the kv_transfer_params that a router carries to the decode side. The decode side
// calls Hold when the request arrives, which renews the lease while it queues, and Fetch when it has blocks for it: the
// blocks are read, the lease is verified, and the owner is told. A Node is both sides at once.
//
// Node is the short way in for programs without an engine loop of their own. An engine with one uses package lease for
// decisions and package rdma to carry them out; package nixl is the binding of the NIXL C API alone.
package nixlgo

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
)

var (
	// ErrClosed is returned once Close was called.
	ErrClosed = fmt.Errorf("node: %w", nixl.ErrClosed)
	// ErrBusy is returned for blocks that are published, being read, or in quarantine.
	ErrBusy = errors.New("block is in use")
	// ErrDraining is returned for new requests once Drain was called.
	ErrDraining = errors.New("node is draining: it takes no new request")
	// ErrQuarantined marks a Fetch that ended while its READ could still write the blocks. They are refused with ErrBusy
	// until the READ is terminal; Node frees them then.
	ErrQuarantined = errors.New("blocks are in quarantine until their READ ends")
	// ErrRecompute marks a Fetch that failed on a node with Lease.FailurePolicy lease.Recompute: the blocks are to be
	// prefilled here, and the owner has been told that nobody will read them.
	ErrRecompute = errors.New("prefill the blocks here")
)

// errLost is for a request whose lease was refused by the worker, or ended by somebody who cannot have read it.
var errLost = fmt.Errorf("%w: its lease was refused or ended before it was published", lease.ErrAborted)

// Config configures a Node. Zero values take the documented default.
type Config struct {
	Engine string // engine id; empty: a random one. A restarted engine needs a new one
	Host   string // bound and advertised side-channel address; empty: 127.0.0.1. Bind to a private network only
	Port   int    // side-channel TCP port; 0: any free one

	Layers      int // regions; required, but for HoldOnly
	Blocks      int // blocks per layer; required, but for HoldOnly
	BlockBytes  int // bytes of one block of one layer; required, but for HoldOnly
	BlockTokens int // tokens per block; 0: 16

	Layout    string // kv_cache_layout of the bytes in a block; empty: LBHNC
	Attention string // attn_backend_name; empty: CPU_ATTN

	MaxSeqs int // max_num_seqs, requests at a time: there are as many lease slots beyond Blocks; 0: 256

	Lease            lease.Config // zero value: lease.DefaultConfig()
	Compatibility    string       // hash that both sides must share; empty: a hash of the layout
	AnyCompatibility bool         // fetch from owners with another hash, too
	Key              []byte       // shared by nodes that deal with each other only, see rdma.WorkerConfig; nil: no key
	HoldOnly         bool         // hold and release leases of owners of any layout and hash, and fetch nothing

	// Fabric is the transport, which the node closes, also when New fails. Nil: NIXL, with the three fields below. Package
	// rdmatest has one for tests, which needs neither NIXL nor cgo.
	Fabric        rdma.Fabric
	Library       string            // path of libnixl_capi.so; empty: searched, see nixl.Load
	Backend       string            // NIXL plugin; empty: UCX
	BackendParams map[string]string // its parameters

	// Etcd is where the node leaves its handshake metadata and looks for that of others, before it asks their side channels:
	// for engines whose side channels do not reach each other, or of which there are many. New publishes there and fails if it
	// cannot within HandshakeTimeout; Close withdraws, for as long at most. The node does not close it, so that nodes can share it. Package
	// rdma/etcd has one for etcd. Nil: side channels only.
	Etcd rdma.Directory

	HandshakeTimeout time.Duration // 0: a third of a lease, 1 s to 5 s
	ReadTimeout      time.Duration // of a fetch, from its arrival; 0: 60 s
	MaxBytesPerPeer  int64         // read from one owner at a time; 0: 1 GiB, see rdma.WorkerConfig
	MaxReadsPerPeer  int           // fetches from one owner at a time, others wait in order of arrival; 0: 256
	Idle             time.Duration // pause between steps when nothing moves; 0: 2 ms, for 4 % of a core, and notifications noticed within 4 ms

	Trace  rdma.Trace   // package otelrdma makes spans of it
	Logger *slog.Logger // nil: discards; its keys are listed in package rdma. Its handler must not call the node
}

// Node is one engine of one rank with its memory. Its methods are safe for concurrent use; all of them but Close need Run
// to be running to make progress.
type Node struct {
	cfg    Config
	log    *slog.Logger
	kv     rdma.Memory // of the fabric, and as long-lived
	worker *rdma.Worker
	side   *rdma.SideChannel
	wake   chan struct{}
	closed chan struct{} // closed when Close began
	gone   chan struct{} // closed when it was done

	mu       sync.Mutex
	sched    *lease.Scheduler
	running  bool
	draining bool
	stopped  chan struct{} // closed when Run returned
	tag      string        // makes the ids of local requests others than a caller's
	next     uint64        // number of the next local request
	owned    map[string]*Publication
	reads    map[string]*Held
	kept     map[string]*Held // fetched, and open for the next turn (Lease.Bidirectional)
	settling map[string]*Held // given up, with a READ that may be active
	used     []string         // what holds a block, by its id
	stepped  chan struct{}    // closed after the next whole step; nil: nobody waits for it
	longest  time.Duration    // longest time from one step's start to the next
	closeErr error
}

// New opens a Node: it loads NIXL, allocates and registers the memory, and opens the side channel.
func New(cfg Config) (*Node, error) {
	cfg.Engine = cmp.Or(cfg.Engine, rand.Text())
	cfg.Host = cmp.Or(cfg.Host, "127.0.0.1")
	cfg.Idle = cmp.Or(cfg.Idle, 2*time.Millisecond)
	cfg.MaxSeqs = cmp.Or(cfg.MaxSeqs, 256)
	if cfg.HoldOnly { // an agent has some memory
		cfg.Layers, cfg.Blocks, cfg.BlockBytes = cmp.Or(cfg.Layers, 1), cmp.Or(cfg.Blocks, 1), cmp.Or(cfg.BlockBytes, 4096)
	}
	if cfg.Lease == (lease.Config{}) {
		cfg.Lease = lease.DefaultConfig()
	}
	n := &Node{cfg: cfg, log: cfg.Logger, wake: make(chan struct{}, 1), closed: make(chan struct{}), gone: make(chan struct{}), owned: map[string]*Publication{},
		tag: rand.Text()[:8], reads: map[string]*Held{}, kept: map[string]*Held{}, settling: map[string]*Held{}, stopped: make(chan struct{})}
	close(n.stopped)
	if n.log == nil {
		n.log = slog.New(slog.DiscardHandler)
	}
	n.log = n.log.With("engine", cfg.Engine)
	if err := n.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("node: %w", err), n.Close())
	}
	return n, nil
}

// progressDelay is the longest sleep of NIXL's progress thread. What arrives wakes it, whatever the transport: a shorter one
// costs an idle node 1 or 2 % of a core and makes nothing faster.
const progressDelay = 10 * time.Millisecond

func (n *Node) open() (err error) {
	c := n.cfg
	fabric := c.Fabric
	defer func() {
		if err != nil && fabric != nil && n.worker == nil {
			err = errors.Join(err, fabric.Close())
		}
	}()
	const limit, most = 1 << 46, 1 << 24 // bytes: more than a process can map; blocks of all layers: each costs descriptors
	if c.Layers < 1 || c.Blocks < 1 || c.BlockBytes < 1 || c.Layers > most/c.Blocks || c.Layers > limit/c.Blocks/c.BlockBytes {
		return fmt.Errorf("%w: %d layers × %d blocks × %d bytes of KV cache; at most %d blocks in all layers, and %d bytes", rdma.ErrConfig,
			c.Layers, c.Blocks, c.BlockBytes, most, limit)
	}
	if c.Idle < 0 {
		return fmt.Errorf("%w: Idle is %s", rdma.ErrConfig, c.Idle)
	}
	if n.side, err = rdma.ListenSideChannel(c.Host, c.Port, n.log); err != nil {
		return err
	}
	if fabric == nil {
		if _, err = nixl.Load(c.Library); err != nil {
			return err
		}
		fabric, err = rdma.OpenNIXL(rdma.NIXLConfig{Backend: c.Backend, BackendParams: c.BackendParams, Agent: nixl.Config{Logger: c.Logger, ProgressDelay: progressDelay}})
		if err != nil {
			return err
		}
	}
	if n.kv, err = fabric.Alloc(c.Layers * c.Blocks * c.BlockBytes); err != nil {
		return err
	}
	n.used = make([]string, c.Blocks)
	regions := make([]rdma.Region, c.Layers)
	for i := range regions {
		regions[i] = rdma.Region{Base: n.kv.Addr() + uint64(i*c.Blocks*c.BlockBytes), BlockLen: c.BlockBytes, Blocks: c.Blocks}
	}
	n.worker, err = rdma.NewWorker(fabric, rdma.WorkerConfig{
		Engine: c.Engine, KV: rdma.KV{Regions: regions, BlockTokens: c.BlockTokens, Layout: c.Layout, Attention: c.Attention},
		Lease: c.Lease, MaxSeqs: c.MaxSeqs, Compatibility: c.Compatibility, AnyCompatibility: c.AnyCompatibility, HoldOnly: c.HoldOnly, Key: c.Key,
		Directory: c.Etcd, HandshakeTimeout: c.HandshakeTimeout, ReadTimeout: c.ReadTimeout, MaxBytesPerPeer: c.MaxBytesPerPeer, MaxReadsPerPeer: c.MaxReadsPerPeer,
		Trace: c.Trace, Logger: c.Logger,
	})
	if err != nil {
		return err
	}
	n.side.RequireKey(c.Key)
	n.side.Serve(n.worker)
	if n.worker.Metadata().SlotsCount == 0 {
		c.Lease.Slots = lease.NoSlot // without verification a node may start without them
	}
	n.sched, err = lease.NewScheduler(lease.SchedulerConfig{
		Config: c.Lease, Engine: c.Engine, Host: c.Host, Port: n.side.Port(), TPSize: 1, Ranks: 1, Blocks: c.Blocks, MaxSeqs: c.MaxSeqs,
		BlockBytes: []int64{int64(c.Layers) * int64(c.BlockBytes)},
		Epoch:      rdma.Epoch(),
	})
	if err != nil || c.Etcd == nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), n.directoryTimeout())
	defer cancel()
	return c.Etcd.Publish(ctx, c.Engine, 0, n.worker.Reply())
}

// directoryTimeout bounds a call of the directory.
func (n *Node) directoryTimeout() time.Duration { return cmp.Or(n.cfg.HandshakeTimeout, 5*time.Second) }

// Engine is the engine id.
func (n *Node) Engine() string { return n.cfg.Engine }

// Port is the side channel's TCP port.
func (n *Node) Port() int { return n.side.Port() }

// Block is the memory of one block of one layer, BlockBytes long, or nil when there is no such block. The caller may write
// it while it is neither published nor being fetched into; after Close it must not be touched.
func (n *Node) Block(layer, block int) []byte {
	if layer < 0 || layer >= n.cfg.Layers || block < 0 || block >= n.cfg.Blocks {
		return nil
	}
	all, size := n.kv.Bytes(), n.cfg.BlockBytes
	if all == nil {
		return nil
	}
	at := (layer*n.cfg.Blocks + block) * size
	return all[at : at+size : at+size]
}

// Publication is a request whose blocks this node holds for a reader.
type Publication struct {
	node   *Node
	id     string
	blocks []int
	params lease.Params
	done   chan struct{}
	reason lease.Reason // set before done is closed
	stage
}

// Params are a copy of the kv_transfer_params for the reader; they marshal to the JSON that vLLM's routers pass on.
func (p *Publication) Params() *lease.Params { return p.params.Clone() }

// Done is closed when the lease has ended and the blocks are the caller's again.
func (p *Publication) Done() <-chan struct{} { return p.done }

// Reason says how the lease ended; valid after Done.
func (p *Publication) Reason() lease.Reason {
	select {
	case <-p.done:
		return p.reason
	default:
		return 0
	}
}

// end hands the blocks back.
func (p *Publication) end(reason lease.Reason, err error) {
	if reason == lease.ReasonExpired {
		err = lease.ErrExpired
	}
	p.leave(reason.String(), err)
	p.reason = reason
	close(p.done)
}

// Revoke ends the lease now: a reader that has not finished is refused. The blocks are the caller's again after Done.
func (p *Publication) Revoke() error {
	n := p.node
	n.mu.Lock()
	defer n.mu.Unlock()
	defer n.poke()
	if n.isClosed() {
		return ErrClosed
	}
	return n.sched.Revoke(time.Now(), p.id)
}

// Publish pins blocks, which hold tokens tokens of the prompt of request id (0: that is not said), under a lease, and returns once the lease can
// be verified. The blocks must not be written until Publication.Done; on an error they are the caller's. Errors: ErrBusy for a block in use, lease.ErrInvalid
// for ids that the wire cannot carry, no blocks and blocks that do not exist, ErrDraining after Drain, ErrClosed, the context's.
func (n *Node) Publish(ctx context.Context, id string, blocks []int, tokens int) (*Publication, error) {
	fail := func(err error) (*Publication, error) { return nil, fmt.Errorf("publish request %q: %w", id, err) }
	p, err := n.admit(ctx, id, blocks, tokens)
	if err != nil {
		return fail(err)
	}
	// The nonce must stand in the slot before the params leave.
	if err := p.finish(n.wholeStep(ctx), tokens); err != nil {
		p.wait()
		return fail(err)
	}
	return p, nil
}

// admit begins a publication.
func (n *Node) admit(ctx context.Context, id string, blocks []int, tokens int) (*Publication, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.isClosed() {
		return nil, ErrClosed
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if n.draining {
		return nil, ErrDraining
	}
	if n.owned[id] != nil {
		return nil, fmt.Errorf("%w: the id is published already", lease.ErrInvalid)
	}
	if err := n.claimFull("request "+strconv.Quote(id), blocks, tokens); err != nil {
		return nil, err
	}
	p := &Publication{node: n, id: id, blocks: slices.Clone(blocks), done: make(chan struct{})}
	if err := n.sched.OnBlocksAllocated(time.Now(), id, &lease.Params{DoRemoteDecode: true}, [][]int{p.blocks}); err != nil {
		n.unclaim(blocks)
		return nil, err
	}
	n.owned[id] = p
	p.enter(ctx, n.cfg.Trace, rdma.Request{ID: id, Stage: rdma.Publishing, Blocks: len(blocks)})
	return p, nil
}

// finish makes the params of a publication that a step has admitted. With an err it gives the request up.
func (p *Publication) finish(err error, tokens int) error {
	n := p.node
	n.mu.Lock()
	defer n.mu.Unlock()
	defer n.poke()
	status := lease.StatusLengthCapped
	if err != nil {
		status = lease.StatusAborted
	}
	params, admitted, ferr := n.sched.RequestFinished(time.Now(), p.id, status, [][]int{p.blocks}, tokens)
	if ferr == nil && params == nil {
		ferr = errLost
	}
	if err = cmp.Or(err, ferr); err == nil {
		p.params = *params
	} else if !admitted && n.owned[p.id] == p { // no plan has the request, so no outcome will name it
		delete(n.owned, p.id)
		n.unclaim(p.blocks)
		p.end(lease.ReasonAborted, err)
	}
	return err
}

// wait returns when the blocks are the caller's again, or no step will give them back.
func (p *Publication) wait() {
	n := p.node
	n.mu.Lock()
	stopped := n.stopped
	n.mu.Unlock()
	n.poke()
	select {
	case <-p.done:
	case <-stopped:
	case <-n.closed:
	}
}

// Held is a lease that this node renews: for a request that it will fetch, or for somebody else who will. It ends with one of
// Fetch, Release and Close. On a node with Lease.Bidirectional, a Held that was fetched is open until Publish or Close.
type Held struct {
	node    *Node
	id      string // of the hold, of its fetch, and of what is published of that
	params  lease.Params
	since   time.Time // when the params came
	blocks  []int
	result  chan error    // one value: the verdict of Fetch
	settled chan struct{} // closed when no READ can write blocks any more
	over    bool          // settled is closed
	stage
}

// stage is the part of its life that a request is in, for Config.Trace. The node's lock guards it.
type stage struct {
	ended func(result string, err error)
}

func (s *stage) enter(ctx context.Context, t rdma.Trace, r rdma.Request) {
	if t.Begin != nil {
		s.ended = t.Begin(ctx, r)
	}
}

func (s *stage) leave(result string, err error) {
	if s.ended != nil {
		s.ended(result, err)
		s.ended = nil
	}
}

// settle says that no READ can write the blocks any more. The node's lock is held.
func (h *Held) settle() {
	if !h.over {
		h.over = true
		close(h.settled)
	}
}

// holdID is what the scheduler knows the hold of a request as; its fetch has the id itself.
func (h *Held) holdID() string { return "hold of " + h.id }

// Hold starts to renew the lease of params: the first heartbeat leaves as soon as the owner is connected, then one every
// sixth of the lease's duration, the owner's or Lease.Duration if that is shorter. Owners other than this library's do not say
// theirs: give Lease.Duration theirs. Errors: lease.ErrInvalid for params that cannot be used, ErrDraining after Drain, ErrClosed.
//
// With Lease.Bidirectional, params of Held.Publish are taken as well: nothing renews those, and the time in which their blocks
// have to be fetched runs from the Hold at the latest.
func (n *Node) Hold(params *lease.Params) (*Held, error) {
	return n.HoldContext(context.Background(), params)
}

// HoldContext is Hold under ctx as Config.Trace sees it: a span of the hold is a child of the span in ctx. The end of ctx
// ends no hold.
func (n *Node) HoldContext(ctx context.Context, params *lease.Params) (*Held, error) {
	return n.hold(ctx, params, rdma.Holding, false)
}

func (n *Node) hold(ctx context.Context, params *lease.Params, stage rdma.Stage, draining bool) (*Held, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.draining && !draining && !n.isClosed() {
		return nil, fmt.Errorf("hold: %w", ErrDraining)
	}
	if n.isClosed() {
		return nil, ErrClosed
	}
	if params == nil {
		return nil, fmt.Errorf("hold: %w: no kv_transfer_params", lease.ErrInvalid)
	}
	n.next++
	h := &Held{node: n, id: fmt.Sprintf("r%d-%s", n.next, n.tag), params: *params, since: time.Now(), result: make(chan error, 1), settled: make(chan struct{})}
	if err := n.sched.Hold(h.since, h.holdID(), &h.params); err != nil {
		return nil, fmt.Errorf("hold request %q: %w", params.RemoteRequestID, unnamed(err))
	}
	n.reads[h.id] = h
	h.enter(ctx, n.cfg.Trace, rdma.Request{ID: h.id, Stage: stage, Peer: params.RemoteEngineID})
	n.poke()
	return h, nil
}

// unnamed is an error without the scheduler's id of the request, which no caller knows.
func unnamed(err error) error {
	if e, ok := err.(*lease.Error); ok {
		named := *e
		named.Request = ""
		return &named
	}
	return err
}

// Fetch reads the request's blocks into the local blocks, verifies the lease, and tells the owner. It returns nil only if
// the owner held the lease for the whole READ. On error the blocks are zeroed; if the error matches ErrQuarantined they are
// refused with ErrBusy until the READ, which could not be stopped, is over.
//
// The request is over when Fetch returns, but for ErrBusy, a local block in use, and lease.ErrInvalid, blocks that cannot be: then
// nothing was done, and the lease is held on. lease.ErrLapsed: it had ended. lease.ErrUnverifiable, lease.ErrHandshake,
// lease.ErrMismatch for blocks that do not fit the owner's, lease.ErrTransfer, lease.ErrPeerLost, lease.ErrTimeout: the owner keeps
// the blocks until the lease runs out, so another reader may try; with Lease.FailurePolicy lease.Recompute the error matches
// ErrRecompute as well, and the owner is told that nobody will read. lease.ErrExpired, for a decoder's blocks that will be gone too
// soon to be proved in time, and the context's error with lease.ErrAborted, for a caller that gave up: the owner is told.
func (h *Held) Fetch(ctx context.Context, blocks []int) error {
	n := h.node
	fail := func(err error) error {
		return fmt.Errorf("fetch request %q from engine %q: %w", h.params.RemoteRequestID, h.params.RemoteEngineID, err)
	}
	if err := h.pull(ctx, blocks); err != nil {
		return fail(unnamed(err))
	}
	n.poke()
	select {
	case err := <-h.result:
		if err != nil {
			return fail(err)
		}
		return nil
	case <-n.closed:
		return fail(ErrClosed)
	case <-ctx.Done():
	}
	return h.abandon(fail, n.cause(ctx))
}

// pull makes the hold a fetch.
func (h *Held) pull(ctx context.Context, blocks []int) error {
	n := h.node
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.isClosed() {
		return ErrClosed
	}
	if n.reads[h.id] != h || h.blocks != nil {
		return fmt.Errorf("%w: the request was fetched, released or closed before", lease.ErrInvalid)
	}
	if n.cfg.HoldOnly {
		return fmt.Errorf("%w: this node only holds leases", lease.ErrInvalid)
	}
	if offered := h.params.RemoteBlockIDs; len(offered) != 1 && len(blocks) > 0 {
		return fmt.Errorf("%w: %d lists of block ids are offered, and this node has one cache group", lease.ErrInvalid, len(offered))
	}
	if err := n.claim("a fetch", blocks); err != nil {
		return err
	}
	now := time.Now()
	if ctx.Err() != nil { // the caller gave up before it began
		n.wipe(blocks)
		n.unclaim(blocks)
		delete(n.reads, h.id)
		h.settle()
		h.leave(lease.CauseAborted.String(), context.Cause(ctx))
		defer n.poke()
		return errors.Join(fmt.Errorf("%w: %w", lease.ErrAborted, context.Cause(ctx)), n.sched.Unhold(now, h.holdID(), true))
	}
	err := n.sched.OnNewRequest(h.since, h.id, &h.params)
	if err == nil {
		// The hold ends first: a fetch that is refused at once lets go of the owner only where it is the last to need it.
		err = n.sched.Unhold(now, h.holdID(), false)
	}
	if err == nil {
		if err = n.sched.OnBlocksAllocated(now, h.id, &h.params, [][]int{blocks}); err != nil {
			err = cmp.Or(n.sched.Hold(now, h.holdID(), &h.params), err)
			n.finished(h, lease.StatusError)
		}
	}
	if err != nil {
		n.unclaim(blocks)
		return err
	}
	h.blocks = append([]int{}, blocks...)
	h.leave("fetch", nil)
	h.enter(ctx, n.cfg.Trace, rdma.Request{ID: h.id, Stage: rdma.Fetching, Peer: h.params.RemoteEngineID, Blocks: len(blocks)})
	return nil
}

// Publish ends the turn of a request that was fetched: it pins blocks, which hold tokens tokens of the conversation, for
// whoever continues it, and returns once that can be verified. The params are those of a decoder (do_remote_decode): a router
// brings them with the next turn to the prefill side, which fetches the blocks as any others. They are kept for
// Lease.DecoderTTL, and no heartbeat renews them. What was fetched with such params is published as by Node.Publish, under a
// lease that readers renew. Only a node with Lease.Bidirectional publishes turns.
//
// Errors: lease.ErrInvalid if the request was not fetched, or published or closed since, and as those of Node.Publish.
func (h *Held) Publish(ctx context.Context, blocks []int, tokens int) (*Publication, error) {
	fail := func(err error) (*Publication, error) {
		return nil, fmt.Errorf("publish request %q for its next turn: %w", h.params.RemoteRequestID, err)
	}
	p, err := h.turn(ctx, blocks, tokens)
	if err != nil {
		return fail(err)
	}
	if err := h.node.wholeStep(ctx); err != nil {
		err = errors.Join(err, p.Revoke())
		p.wait()
		return fail(err)
	}
	return p, nil
}

// turn begins a publication of what was fetched.
func (h *Held) turn(ctx context.Context, blocks []int, tokens int) (*Publication, error) {
	n := h.node
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.isClosed():
		return nil, ErrClosed
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case n.kept[h.id] != h:
		return nil, fmt.Errorf("%w: it was not fetched by a node with Lease.Bidirectional, or published or closed since", lease.ErrInvalid)
	case n.draining:
		return nil, ErrDraining
	}
	if err := n.claimFull("a turn of request "+strconv.Quote(h.params.RemoteRequestID), blocks, tokens); err != nil {
		return nil, err
	}
	params, _, err := n.sched.RequestFinished(time.Now(), h.id, lease.StatusStopped, [][]int{blocks}, tokens)
	if err == nil && params == nil {
		delete(n.kept, h.id)
		err = errLost
	}
	if err != nil {
		n.unclaim(blocks)
		return nil, err
	}
	delete(n.kept, h.id)
	p := &Publication{node: n, id: h.id, blocks: slices.Clone(blocks), params: *params, done: make(chan struct{})}
	n.owned[h.id] = p
	p.enter(ctx, n.cfg.Trace, rdma.Request{ID: h.id, Stage: rdma.Publishing, Blocks: len(blocks)})
	return p, nil
}

// Settled is closed when the request has ended, however it did, and no READ can write the blocks of its Fetch any more: they are
// the caller's again, or gone with the Node.
func (h *Held) Settled() <-chan struct{} { return h.settled }

// abandon gives a fetch up whose context ended. The owner is told as soon as no READ is active.
func (h *Held) abandon(fail func(error) error, cause error) error {
	n := h.node
	cause = fmt.Errorf("%w: %w", lease.ErrAborted, cause)
	switch done, err := h.giveUp(cause); {
	case err != nil:
		return fail(err)
	case done: // the verdict came first
		if err := <-h.result; err != nil {
			return fail(err)
		}
		return nil
	}
	for range 2 { // mostly there is no READ yet, and the next step says so
		n.mu.Lock()
		stepped, stopped := n.nextStep(), n.stopped
		n.mu.Unlock()
		n.poke()
		select {
		case <-h.settled:
			return fail(cause)
		case <-stepped:
		case <-stopped:
		case <-n.closed:
			return fail(errors.Join(cause, ErrClosed))
		}
	}
	select {
	case <-h.settled:
		return fail(cause)
	default:
		return fail(errors.Join(cause, ErrQuarantined))
	}
}

// giveUp makes a fetch whose context ended one that settles, unless it has its verdict, which is done, or no READ yet: err.
func (h *Held) giveUp(cause error) (done bool, err error) {
	n := h.node
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.reads[h.id] != h {
		return true, nil
	}
	if n.isClosed() { // Close unmaps the blocks: nothing is left to wipe
		return false, errors.Join(cause, ErrClosed)
	}
	delete(n.reads, h.id)
	h.leave(lease.CauseAborted.String(), cause)
	_, delayed, err := n.sched.RequestFinished(time.Now(), h.id, lease.StatusAborted, nil, 0)
	if err != nil || !delayed {
		n.wipe(h.blocks)
		n.unclaim(h.blocks)
		h.settle()
		return false, errors.Join(cause, err)
	}
	n.settling[h.id] = h
	return false, nil
}

// Release ends the hold and tells the owner that nobody will read the request: it frees the blocks at once. That is safe
// only while no reader has the params. It returns after the next step; the message leaves as soon as the owner is
// connected, and if it cannot be reached the lease runs out. A hold that ended before is lease.ErrInvalid.
func (h *Held) Release(ctx context.Context) error {
	if err := h.unhold(true); err != nil {
		return err
	}
	if err := h.node.wholeStep(ctx); err != nil {
		return fmt.Errorf("release request %q: %w", h.params.RemoteRequestID, err)
	}
	return nil
}

// Close ends the hold without telling the owner: somebody else renews the lease, or it runs out. A second Close, or one
// after Fetch or Release, does nothing, but for the end of a Held that is open for Publish.
func (h *Held) Close() error {
	n := h.node
	n.mu.Lock()
	if n.kept[h.id] == h {
		delete(n.kept, h.id)
		n.finished(h, lease.StatusStopped)
		n.poke()
	}
	n.mu.Unlock()
	if err := h.unhold(false); !errors.Is(err, lease.ErrInvalid) {
		return err
	}
	return nil
}

func (h *Held) unhold(release bool) error {
	n := h.node
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.isClosed() {
		return ErrClosed
	}
	if n.reads[h.id] != h || h.blocks != nil {
		return fmt.Errorf("release request %q: %w: it was fetched, released or closed before", h.params.RemoteRequestID, lease.ErrInvalid)
	}
	delete(n.reads, h.id)
	h.settle()
	if release {
		h.leave("release", nil)
	} else {
		h.leave("close", nil)
	}
	n.poke()
	return n.sched.Unhold(time.Now(), h.holdID(), release)
}

// finished lets the scheduler forget a fetch that has ended. With lease.StatusError its lease is left to run out.
func (n *Node) finished(h *Held, st lease.Status) {
	if _, _, err := n.sched.RequestFinished(time.Now(), h.id, st, nil, 0); err != nil {
		n.log.Error("finish a fetch", "request", h.id, "remote_request", h.params.RemoteRequestID, "error", err)
	}
}

// Fetch is Hold and Held.Fetch in one: for a request that does not queue.
func (n *Node) Fetch(ctx context.Context, params *lease.Params, blocks []int) error {
	h, err := n.hold(ctx, params, rdma.Fetching, false)
	if err != nil {
		return err
	}
	defer h.Close()
	return h.Fetch(ctx, blocks)
}

// Release is Hold and Held.Release in one. A draining node releases, too.
func (n *Node) Release(ctx context.Context, params *lease.Params) error {
	h, err := n.hold(ctx, params, rdma.Holding, true)
	if err != nil {
		return err
	}
	return h.Release(ctx)
}

// Run steps the node until ctx ends or Close is called, and returns nil then. One Run at a time. Its context is not the one
// that a signal to stop ends: Publication.Done, Drain and the end of a fetch that was given up need Run.
func (n *Node) Run(ctx context.Context) error {
	n.mu.Lock()
	if n.running {
		n.mu.Unlock()
		return errors.New("node: Run is running already")
	}
	if n.isClosed() { // before this goroutine came to run: a step would only log that the worker is closed
		n.mu.Unlock()
		return nil
	}
	n.running = true
	n.stopped = make(chan struct{})
	n.mu.Unlock()
	defer func() {
		n.mu.Lock()
		n.running = false
		close(n.stopped)
		n.mu.Unlock()
	}()
	timer := time.NewTimer(n.cfg.Idle)
	defer timer.Stop()
	last := time.Now()
	for {
		now := time.Now()
		n.mu.Lock()
		n.longest = max(n.longest, now.Sub(last))
		n.mu.Unlock()
		last = now
		if err := n.step(now); err != nil {
			if errors.Is(err, ErrClosed) {
				return nil
			}
			n.log.Error("step", "error", err)
		}
		busy, moved := n.worker.Busy()
		pause := n.cfg.Idle
		if busy {
			pause = min(pause, busyPause(now.Sub(moved)))
		}
		if busy && pause < time.Millisecond {
			// A timer of Go's runtime takes a millisecond at least when nothing else runs.
			syscall.Nanosleep(&syscall.Timespec{Nsec: int64(pause)}, nil)
			select {
			case <-ctx.Done():
				return nil
			case <-n.closed:
				return nil
			default:
				continue
			}
		}
		timer.Reset(pause)
		select {
		case <-ctx.Done():
			return nil
		case <-n.closed:
			return nil
		case <-n.wake:
		case <-timer.C:
		}
	}
}

// Drain takes the node out of service: from now on, and for good, Publish, Hold and Fetch refuse new requests with
// ErrDraining. What there is goes on: readers renew and fetch what is published, and a Held is fetched, released or closed.
// Drain waits for all of it to end, which it does at the latest when nobody renews the leases any more, and returns nil then.
// If ctx ends first, it returns what is left and an error that wraps the context's; call it again to wait on, or Close,
// which revokes the leases and ends the rest. It may be called more than once, and concurrently.
func (n *Node) Drain(ctx context.Context) ([]Left, error) {
	n.mu.Lock()
	n.draining = true
	n.mu.Unlock()
	for {
		n.mu.Lock()
		if n.isClosed() {
			n.mu.Unlock()
			return nil, fmt.Errorf("drain: %w", ErrClosed)
		}
		none, stepped := len(n.owned)+len(n.reads)+len(n.kept)+len(n.settling) == 0, n.nextStep()
		n.mu.Unlock()
		if none {
			return nil, nil
		}
		select {
		case <-stepped:
		case <-n.closed:
		case <-ctx.Done():
			left := n.left()
			if len(left) == 0 {
				continue // they ended just now
			}
			return left, fmt.Errorf("drain: requests left: %d: %w", len(left), n.cause(ctx))
		}
	}
}

// Left is a request that was not over when Drain gave up.
type Left struct {
	Request string // the owner's request id
	Engine  string // the owner: this node, or the engine that the lease is held at
	Blocks  []int  // the local blocks that it keeps; none for a hold
	Reason  LeftReason
}

// LeftReason says what a request that is left waits for.
type LeftReason string

// What a request can wait for.
const (
	LeftPublished   LeftReason = "published, and neither read to the end nor expired"
	LeftHeld        LeftReason = "held, and neither fetched nor released nor closed"
	LeftFetching    LeftReason = "being fetched"
	LeftFetched     LeftReason = "fetched, and neither published for its next turn nor closed"
	LeftQuarantined LeftReason = "fetch given up, but its READ is active and may write the blocks"
)

// left lists what is not over, by request.
func (n *Node) left() (out []Left) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for id, p := range n.owned {
		out = append(out, Left{Request: id, Engine: n.cfg.Engine, Blocks: slices.Clone(p.blocks), Reason: LeftPublished})
	}
	add := func(reads map[string]*Held, reason func(*Held) LeftReason) {
		for _, h := range reads {
			out = append(out, Left{h.params.RemoteRequestID, h.params.RemoteEngineID, slices.Clone(h.blocks), reason(h)})
		}
	}
	add(n.reads, func(h *Held) LeftReason {
		if h.blocks == nil {
			return LeftHeld
		}
		return LeftFetching
	})
	add(n.kept, func(*Held) LeftReason { return LeftFetched })
	add(n.settling, func(*Held) LeftReason { return LeftQuarantined })
	slices.SortFunc(out, func(a, b Left) int { return cmp.Or(cmp.Compare(a.Request, b.Request), cmp.Compare(a.Engine, b.Engine)) })
	return out
}

// busyPause is the pause between steps while a READ or a handshake is under way and none has begun or ended for a time: long
// enough to leave the core to the READ, short beside what it took so far. A peer that is stopped leaves one active for ever.
func busyPause(waited time.Duration) time.Duration { return max(50*time.Microsecond, waited/64) }

// step runs one step and hands out what it decided.
func (n *Node) step(now time.Time) error {
	n.mu.Lock()
	plan := n.sched.BuildPlan(now)
	done := n.stepped
	n.stepped = nil
	n.mu.Unlock()
	res, err := n.worker.Step(now, plan)
	n.mu.Lock()
	defer n.mu.Unlock()
	if done != nil {
		defer close(done)
	}
	out := n.sched.OnResults(now, []lease.Result{res})
	defer func() {
		if n.sched.Pending() {
			n.poke() // owners are told in the next step
		}
	}()
	for _, f := range out.Free {
		if p := n.owned[f.Request]; p != nil {
			delete(n.owned, f.Request)
			n.unclaim(p.blocks)
			p.end(f.Reason, nil)
		}
	}
	for _, id := range out.Run {
		n.verdict(id, nil, false)
	}
	for _, f := range out.Fail {
		err := unnamed(f.Err)
		if f.Recompute {
			err = fmt.Errorf("%w; %w", err, ErrRecompute)
		}
		n.verdict(f.Request, err, f.Quarantined)
	}
	for _, s := range out.Settled {
		if h := n.settling[s.Request]; h != nil {
			delete(n.settling, s.Request)
			n.wipe(h.blocks)
			n.unclaim(h.blocks)
			n.finished(h, lease.StatusError)
			h.settle()
		}
	}
	return err
}

// verdict ends a fetch. Bytes that were not proved to be the request's do not stay behind.
func (n *Node) verdict(id string, err error, quarantined bool) {
	h := n.reads[id]
	if h == nil {
		return
	}
	delete(n.reads, id)
	h.leave(lease.CauseOf(err).String(), err)
	if quarantined {
		n.settling[id] = h
		h.result <- errors.Join(err, ErrQuarantined)
		return
	}
	switch {
	case err != nil:
		n.finished(h, lease.StatusError)
		n.wipe(h.blocks)
	case n.cfg.Lease.Bidirectional:
		n.kept[id] = h
	default:
		n.finished(h, lease.StatusStopped)
	}
	n.unclaim(h.blocks)
	h.settle()
	h.result <- err
}

func (n *Node) wipe(blocks []int) {
	for _, b := range blocks {
		for l := range n.cfg.Layers {
			clear(n.Block(l, b))
		}
	}
}

// claim marks blocks as used by who, all or none.
func (n *Node) claim(who string, blocks []int) error {
	for i, b := range blocks {
		var err error
		switch {
		case b < 0 || b >= n.cfg.Blocks:
			err = fmt.Errorf("%w: block id %d is not in 0…%d", lease.ErrInvalid, b, n.cfg.Blocks-1)
		case n.used[b] != "" && slices.Contains(blocks[:i], b):
			err = fmt.Errorf("%w: block %d twice", lease.ErrInvalid, b)
		case n.used[b] != "":
			err = fmt.Errorf("%w: block %d is held by %s", ErrBusy, b, n.used[b])
		default:
			n.used[b] = who
			continue
		}
		n.unclaim(blocks[:i])
		return err
	}
	return nil
}

// claimFull is claim for blocks that tokens tokens fill, the last of them at least in part; 0: that is not said.
func (n *Node) claimFull(who string, blocks []int, tokens int) error {
	if err := n.claim(who, blocks); err != nil {
		return err
	}
	if len(blocks) == 0 {
		return fmt.Errorf("%w: no blocks", lease.ErrInvalid)
	}
	size := n.worker.Metadata().BlockSize
	if tokens < 0 || tokens > 0 && len(blocks) != (tokens+size-1)/size {
		n.unclaim(blocks)
		return fmt.Errorf("%w: %d tokens in %d blocks of %d", lease.ErrInvalid, tokens, len(blocks), size)
	}
	return nil
}

func (n *Node) unclaim(blocks []int) {
	for _, b := range blocks {
		n.used[b] = ""
	}
}

// nextStep is closed after a step that has not begun. n.mu is held.
func (n *Node) nextStep() <-chan struct{} {
	if n.stepped == nil {
		n.stepped = make(chan struct{})
	}
	return n.stepped
}

// wholeStep waits for a step that began after the call.
func (n *Node) wholeStep(ctx context.Context) error {
	n.mu.Lock()
	done := n.nextStep()
	n.mu.Unlock()
	n.poke()
	select {
	case <-done:
		return nil
	case <-n.closed:
		return ErrClosed
	case <-ctx.Done():
		return n.cause(ctx)
	}
}

// cause is that of the end of ctx, and says so where nothing could have come before it.
func (n *Node) cause(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.running {
		return fmt.Errorf("%w; Run is not running, and nothing ends without it", context.Cause(ctx))
	}
	return context.Cause(ctx)
}

func (n *Node) isClosed() bool {
	select {
	case <-n.closed:
		return true
	default:
		return false
	}
}

// pending reports whether the next step has something to do at once.
func (n *Node) pending() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.worker != nil && n.sched != nil && n.sched.Pending()
}

func (n *Node) poke() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// Stats is a snapshot of a node.
type Stats struct {
	Worker      rdma.WorkerStats
	Scheduler   lease.SchedulerStats
	SideChannel rdma.SideChannelStats
	LongestStep time.Duration // longest time from one step's start to the next, since Run
}

// Stats returns a snapshot.
func (n *Node) Stats() Stats {
	n.mu.Lock()
	defer n.mu.Unlock()
	return Stats{Worker: n.worker.Stats(), Scheduler: n.sched.Stats(), SideChannel: n.side.Stats(), LongestStep: n.longest}
}

// Lease is a lease that the node has given and that has not ended.
type Lease struct {
	lease.Life
	Blocks int // that the request pins
}

// Leases lists the node's leases, in no order. It looks at them a few thousand at a time, so that many of them do not hold
// up a step; one that begins or ends meanwhile is there or not.
func (n *Node) Leases() []Lease {
	const piece = 4096
	var all []Lease
	var lives []lease.Life
	for from := 0; ; {
		lives, from = n.worker.Lives(lives[:0], from, piece)
		n.mu.Lock()
		for _, l := range lives {
			x := Lease{Life: l}
			if p := n.owned[l.Request]; p != nil {
				x.Blocks = len(p.blocks)
			}
			all = append(all, x)
		}
		n.mu.Unlock()
		if from == 0 {
			return all
		}
	}
}

// Close stops Run, ends the agent and unmaps the memory. Leases that are still held end with it: a reader that READs later
// fails, and their publications are done, as aborted. Drain, before it, lets them come to their end. It is idempotent, and every
// call returns once the memory is gone.
func (n *Node) Close() error {
	n.mu.Lock()
	if n.isClosed() {
		n.mu.Unlock()
		<-n.gone
		return n.closeErr
	}
	close(n.closed)
	running, stopped := n.running, n.stopped
	n.mu.Unlock()
	if running {
		<-stopped
	}
	var err error
	if n.pending() { // owners are told what was read
		if stepErr := n.step(time.Now()); stepErr != nil {
			n.log.Error("step", "error", stepErr)
		}
	}
	if n.cfg.Etcd != nil { // first, so that nobody finds what is closed
		ctx, cancel := context.WithTimeout(context.Background(), n.directoryTimeout())
		err = n.cfg.Etcd.Withdraw(ctx, n.cfg.Engine, 0)
		cancel()
	}
	if n.side != nil {
		err = errors.Join(err, n.side.Close())
	}
	if n.worker != nil {
		err = errors.Join(err, n.worker.Close())
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for id, p := range n.owned {
		delete(n.owned, id)
		p.end(lease.ReasonAborted, ErrClosed)
	}
	for _, h := range n.reads {
		h.leave(lease.CauseAborted.String(), ErrClosed)
		h.settle()
	}
	for id, h := range n.settling {
		delete(n.settling, id)
		h.settle()
	}
	n.closeErr = err
	close(n.gone)
	return err
}
