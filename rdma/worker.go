package rdma

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"
	"unsafe"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
)

// ErrClosed is returned by the methods of a closed Worker.
var ErrClosed = fmt.Errorf("worker: %w", nixl.ErrClosed)

// Worker is one rank of an engine: it owns the rank's fabric, holds the leases on the blocks of this rank that others
// read, and reads the blocks of others. All work happens in Step; the only goroutines are those of handshakes and clock samples
// under way, and of watches over the Directory, one per engine that was found there.
// Methods are safe for concurrent use.
type Worker struct {
	cfg   WorkerConfig
	log   *slog.Logger
	quiet *quiet
	meta  Metadata

	fabric Fabric
	cells  cellPool
	notifs []nixl.Notification

	listsMu sync.Mutex
	lists   map[string]List // own blocks, by the way they are cut

	loadMu  sync.Mutex
	loading map[string]int // handshakes that load agents, by engine

	ctx        context.Context
	cancel     context.CancelFunc
	background sync.WaitGroup
	closing    sync.Once
	closeErr   error
	handshakes chan handshake
	outdated   chan *listing
	samples    chan clockSample

	mu       sync.Mutex // held by Step and Close
	closed   bool
	now      time.Time // of the step under way
	moved    time.Time // of the last step in which a READ or a handshake began or ended
	table    *lease.Table
	pulls    *lease.Pulls
	peers    map[lease.Peer]*peer // to read from
	tellers  map[lease.Peer]*peer // to be told things only
	id       uint64               // of this life of the rank
	serves   uint64               // the scheduler whose plans are carried out, 0 before the first
	past     []uint64             // those that were served before
	evictAt  time.Time            // no engine has to be forgotten before
	sampleAt time.Time            // no clock has to be asked for before
	unwell   bool                 // there may be peers that are idle or broken
	reads    map[string]*pull     // by local request
	overdue  time.Time            // no pull is overdue before
	room     []*peer              // those whose first waiting pull may have room since another one left
	active   []*transfer
	settling []*transfer      // failed, and the fabric may still write for them
	polled   []Read           // scratch of poll
	states   []nixl.State     // scratch of poll
	finished []lease.Finished // scratch of finish
	beatBuf  []byte           // scratch of sendAll
	stats    WorkerStats
}

// NewWorker makes a rank over fabric, which it closes when it is closed or cannot be made. It registers the lease slots, and
// fails when that fails (specification, "Lease Verification on the Reader"), unless Lease.Verification is lease.VerifyNone;
// Lease.Slots = lease.NoSlot makes an owner without any.
func NewWorker(fabric Fabric, cfg WorkerConfig) (*Worker, error) {
	if fabric == nil {
		return nil, fmt.Errorf("worker of engine %q: %w: no fabric", cfg.Engine, ErrConfig)
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, errors.Join(err, fabric.Close())
	}
	w := &Worker{cfg: cfg, log: cfg.Logger.With("engine", cfg.Engine, "rank", cfg.Rank), meta: *cfg.metadata(), fabric: fabric,
		cells: cellPool{fabric: fabric}, pulls: lease.NewPulls(), lists: map[string]List{}, peers: map[lease.Peer]*peer{}, tellers: map[lease.Peer]*peer{},
		reads: map[string]*pull{}, handshakes: make(chan handshake), outdated: make(chan *listing), samples: make(chan clockSample), loading: map[string]int{}, id: max(rand.Uint64(), 1)}
	w.quiet = newQuiet(w.log)
	w.ctx, w.cancel = context.WithCancel(context.Background())
	if err := w.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("worker of engine %q, rank %d: %w", cfg.Engine, cfg.Rank, err), w.Close())
	}
	return w, nil
}

func (w *Worker) open() (err error) {
	var cells []int64
	if n := w.cfg.Lease.Slots; n != lease.NoSlot {
		slots, err := w.fabric.Alloc(n * 8)
		switch {
		case err == nil:
			w.meta.SlotsBase, w.meta.SlotsCount, w.meta.SlotHeartbeats = slots.Addr(), n, true
			cells = int64s(slots)
		case w.cfg.Lease.Verification == lease.VerifyNone:
			w.log.Warn("no lease slots: readers that verify decline what this rank owns", "slots", n, "error", err)
		default:
			return fmt.Errorf("register %d lease slots in DRAM, without which no reader can verify: %w", n, err)
		}
	}
	w.meta.LeaseDuration = w.cfg.Lease.Duration
	w.table, err = lease.NewTable(lease.TableConfig{
		Extension: w.cfg.Lease.Extension(), MaxLife: w.cfg.Lease.MaxLife, Slots: lease.NewSlots(cells),
		MaxNotification: w.cfg.Lease.MaxNotification, Trace: w.cfg.Trace.Lease})
	if err != nil {
		return err
	}
	if _, err = w.localList(whole(&w.meta)); err != nil {
		return fmt.Errorf("KV regions: %w", err)
	}
	w.meta.Agent, err = w.fabric.Metadata()
	return err
}

// int64s is registered memory as int64 cells.
func int64s(m Memory) []int64 {
	p := m.Bytes()
	return unsafe.Slice((*int64)(unsafe.Pointer(unsafe.SliceData(p))), len(p)/8)
}

// Metadata is what a reader of this rank learns in the handshake. Its SlotsCount is how many slots the rank has.
func (w *Worker) Metadata() Metadata { return w.meta }

// Step does everything that is due: it carries out plan, posts reads, sends heartbeats, handles what arrived, verifies
// what was read, and ends leases that ran out, in the order of design.md, "One step". now is the step's time on this
// process's monotonic clock. It waits for no peer. What happened to requests is in the Result. The error is about this worker:
// parts of a plan that cannot be, NIXL's failures. The rest of the step was done, so log it and go on, unless it matches ErrClosed,
// or lease.ErrPlan: nothing of the plan was done then, and while READs of an earlier scheduler are active no KV block may be written.
func (w *Worker) Step(now time.Time, plan lease.Plan) (lease.Result, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	res := lease.Result{Rank: w.cfg.Rank}
	if w.closed {
		return res, ErrClosed
	}
	w.stats.Steps++
	w.now = now
	res.Worker, res.Scheduler = w.id, plan.Terms.Scheduler
	err := w.accept(now, plan.Terms)
	if err != nil {
		w.refusePlan(plan, &res)
		plan = lease.Plan{}
	}
	err = errors.Join(err, w.hold(now, plan, &res))
	w.takeHandshakes(now, &res)
	w.takeOutdated()
	w.takeSamples()
	for _, id := range plan.Cancel {
		w.giveUp(id, &res)
	}
	for _, p := range plan.Read {
		w.read(p, now, &res)
	}
	for _, h := range plan.Heartbeat {
		w.beat(h, now, &res)
	}
	for _, r := range plan.Release {
		w.release(r, now, &res)
	}
	err = errors.Join(err, w.drain(now))
	w.poll()
	w.refill(now, &res)
	w.verify()
	w.expire(now, &res)
	w.finish(&res)
	w.heal(now, &res)
	w.evict(now)
	w.sampleClocks(now)
	// Reaping comes last: a heartbeat that waited out a long forward pass has been handled above.
	w.table.Reap(now)
	res.Sent = w.table.Ended(res.Sent)
	return res, err
}

// hold writes the nonces of newly admitted requests, installs deadlines, and ends aborted lives. A life that is not here, because it
// could not be admitted, is reported as ended, so that the scheduler does not wait for it.
func (w *Worker) hold(now time.Time, plan lease.Plan, res *lease.Result) (err error) {
	refused := func(request string, nonce int64, e error) {
		if e != nil && !w.table.Has(lease.Key{Request: request, Nonce: nonce}) {
			res.Sent = append(res.Sent, lease.Ended{Request: request, Nonce: nonce, Reason: lease.ReasonAborted})
		}
		err = errors.Join(err, e)
	}
	for _, a := range plan.Admit {
		refused(a.Request, a.Nonce, w.table.Admit(now, a))
	}
	for _, g := range plan.Grant {
		refused(g.Request, g.Nonce, w.table.Grant(now, g))
	}
	for _, k := range plan.Abort {
		err = errors.Join(err, w.table.Abort(now, k))
	}
	return err
}

// drain handles every notification that arrived. Malformed and late ones are counted by the table.
func (w *Worker) drain(now time.Time) (err error) {
	w.notifs, err = w.fabric.Notifications(w.notifs[:0])
	for _, n := range w.notifs {
		if err := w.table.Notify(now, n.From, n.Payload); err != nil {
			w.quiet.Warn("ignored a notification", n.From, "error", err)
		}
	}
	clear(w.notifs)
	return err
}

// Busy reports whether a READ or a handshake that one waits for is under way, so that the next step should come soon, and the
// time of the last step in which one began or ended. An engine whose steps do nothing else may pause for 1/64 of the time since
// then, and 50 µs at least, as nixlgo.Node does.
func (w *Worker) Busy() (busy bool, moved time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.reads)+len(w.active) > 0, w.moved
}

// Stats returns a snapshot.
func (w *Worker) Stats() WorkerStats {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.stats
	s.Pulls = len(w.reads)
	for p := range w.everyone {
		if o := w.peers[p.info]; o != nil && o != p {
			continue // counted as one to read from
		}
		switch p.state {
		case idle:
			s.PeersIdle++
		case connecting:
			s.PeersConnecting++
		case connected:
			s.Peers++
		case broken:
			s.PeersBroken++
		}
		s.Waiting += p.pulls.Len()
	}
	if w.table != nil {
		s.Leases = w.table.Stats()
	}
	return s
}

// Close ends the agent; READs under way end with it and no byte of them lands afterwards. The KV memory is the caller's
// again when it returns. Peers learn nothing: an engine that holds leases revokes them first.
func (w *Worker) Close() error {
	w.closing.Do(func() { w.closeErr = w.close() })
	return w.closeErr
}

func (w *Worker) close() error {
	w.mu.Lock()
	w.closed = true // no Step starts anything in the background from here on
	w.mu.Unlock()
	w.cancel()
	w.background.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	for p := range w.everyone {
		p.endHandshake(time.Since(p.since), ErrClosed)
	}
	for _, x := range w.reads {
		x.end(ErrClosed)
	}
	w.quiet.Close()
	return w.fabric.Close()
}
