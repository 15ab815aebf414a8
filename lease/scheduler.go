package lease

import (
	"cmp"
	crand "crypto/rand"
	"encoding/binary"
	"slices"
	"time"
	"unicode/utf8"
)

// SchedulerConfig configures a Scheduler.
type SchedulerConfig struct {
	Config
	// Engine is this engine's id, Host and Port its side channel; an owner
	// exports them in kv_transfer_params.
	Engine string
	Host   string
	Port   int
	// TPSize, PPSize and DCPSize are exported; 0 means 1.
	TPSize, PPSize, DCPSize int
	// Ranks is how many ranks report results, the world size; 0 means 1.
	Ranks int
	// Blocks is the number of KV blocks; ids of own blocks must be below. 0
	// leaves them unchecked, and then there are as many slots as Config.Slots and
	// MaxSeqs, which is max_num_seqs, say: with neither nothing can be verified.
	Blocks, MaxSeqs int
	// BlockBytes is the size of one KV block of each transfer group, on all ranks
	// together. It is for SchedulerStats.PinnedBytes alone; nil leaves that at 0.
	BlockBytes []int64
	// Epoch is the zero of the clock of remote_blocks_expiry_time, the same that
	// the side channel tells readers. The zero Epoch is the time of the first call.
	Epoch time.Time
	// Seed makes the nonces repeatable, for tests. 0 seeds from the system.
	Seed uint64
	// Trace is called when something happens to a lease or a fetch.
	Trace SchedulerTrace
}

// Status is how a request left the engine.
type Status uint8

// The states a request can be in when RequestFinished is called.
const (
	StatusRunning      Status = iota // not finished: RequestFinished does nothing
	StatusStopped                    // generated its end of sequence
	StatusLengthCapped               // reached max_tokens, as every prefill does
	StatusAborted                    // cancelled
	StatusError                      // failed, or stopped for a reason that nobody continues
)

// exports reports whether a reader may continue from the request's blocks.
func (st Status) exports() bool { return st == StatusStopped || st == StatusLengthCapped }

// SchedulerStats counts what a Scheduler decided.
type SchedulerStats struct {
	// Owner.
	Running, Pinned int64 // lives now: before and after their request finished
	FreeSlots       int64
	UsedSlots       int64 // lent, and not back yet
	PinnedBlocks    int64 // blocks that the engine may not reuse before Outcome.Free
	PinnedTokens    int64 // that those of them that were exported hold
	PinnedBytes     int64 // of those blocks, if SchedulerConfig.BlockBytes is set
	Admitted        int64
	NoSlot          int64 // admitted without a slot: verifying readers decline them
	Exported        int64
	Revoked         int64
	Freed           [reasonEnd]int64 // by Reason
	EarlyReports    int64            // ranks that reported a life before it finished
	RepeatedReports int64            // ranks that reported a life twice
	UnknownReports  int64            // of lives, requests, ranks or engines that are not known

	// Reader.
	Tracked, Peers   int64 // requests heartbeated now, and engines that requests are at
	Pulls            int64
	Received         int64
	Failed           [causeEnd]int64 // by Cause
	Released         int64           // owners told that nothing will be read
	Heartbeats       int64           // batches planned, one a peer
	HeartbeatsFailed int64
}

// Scheduler decides for all ranks of one engine, which may own blocks and read
// others' at once. The engine tells it what happens to requests; BuildPlan
// returns what the ranks have to do; OnResults takes what they did.
//
// As owner it lends every do_remote_decode request a slot and a nonce, builds
// the params from the block table at finish, and frees blocks when the last rank
// reported, and only then lends the slot again. As reader it heartbeats from the
// moment a request is queued until its blocks are in, and lets the owner go when
// a request is given up.
//
// Not safe for concurrent use. An error means that nothing changed.
type Scheduler struct {
	cfg   SchedulerConfig
	id    uint64 // in the terms of its plans
	epoch time.Time

	lives     map[string]*life // newest of its id
	nonces    nonces
	unused    int   // slots from here on were never lent
	freeSlots []int // lent before and back

	fetches map[string]*fetch
	peers   peers

	workers []uint64 // the life of each rank that reported last
	gone    []uint64 // lives of ranks that were replaced

	queue   queue
	outcome Outcome // found outside OnResults, handed out by the next one
	stats   SchedulerStats
}

// queue is what the next plan will hold.
type queue struct {
	admit   []*life
	grant   []*life
	abort   []*life
	read    []*fetch
	release []*sharing
	cancel  []*fetch
}

// NewScheduler checks cfg and makes a Scheduler.
func NewScheduler(cfg SchedulerConfig) (*Scheduler, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	const op = "new scheduler"
	cfg.TPSize, cfg.PPSize, cfg.DCPSize, cfg.Ranks = max(cfg.TPSize, 1), max(cfg.PPSize, 1), max(cfg.DCPSize, 1), max(cfg.Ranks, 1)
	switch {
	case cfg.Engine == "" || !utf8.ValidString(cfg.Engine):
		return nil, invalid(op, "", "the engine id %q is empty or no UTF-8, which JSON could not carry", cfg.Engine)
	case cfg.Port < 0 || cfg.Port > 65535:
		return nil, invalid(op, "", "port is %d", cfg.Port)
	case max(cfg.TPSize, cfg.PPSize, cfg.DCPSize) > maxParallel || cfg.Ranks > maxRanks:
		return nil, invalid(op, "", "sizes tp %d, pp %d, dcp %d of %d ranks, must be at most %d and %d", cfg.TPSize, cfg.PPSize, cfg.DCPSize, cfg.Ranks, maxParallel, maxRanks)
	case cfg.Blocks < 0 || cfg.MaxSeqs < 0:
		return nil, invalid(op, "", "%d blocks and %d sequences", cfg.Blocks, cfg.MaxSeqs)
	}
	return &Scheduler{
		cfg: cfg, id: newID(), epoch: cfg.Epoch, nonces: newNonces(cfg.Seed),
		workers: make([]uint64, cfg.Ranks),
		lives:   make(map[string]*life), fetches: make(map[string]*fetch),
		peers: newPeers(cfg.Duration),
	}, nil
}

const maxRanks = 1 << 16

// newID is a number that no other Scheduler has, and that is not 0.
func newID() uint64 {
	var b [8]byte
	crand.Read(b[:]) // never fails (Go 1.24)
	return max(binary.LittleEndian.Uint64(b[:]), 1)
}

// Terms are what a rank has to agree with to carry out the plans.
func (s *Scheduler) Terms(now time.Time) Terms {
	s.start(now)
	t := Terms{Scheduler: s.id, Ranks: s.cfg.Ranks, Slots: s.Slots(), MaxNotification: cmp.Or(s.cfg.MaxNotification, DefaultMaxNotification),
		Workers: s.workers}
	if s.cfg.Bidirectional {
		clock := now.Sub(s.epoch)
		t.Clock = &clock
	}
	return t
}

// Slots is the number of slots that every rank has to register.
func (s *Scheduler) Slots() int { return s.cfg.slots(s.cfg.Blocks, s.cfg.MaxSeqs) }

// Config is the configuration with defaults filled in, the number of slots among
// them: a rank that takes its Config has as many.
func (s *Scheduler) Config() SchedulerConfig {
	c := s.cfg
	if c.Slots = s.Slots(); c.Slots == 0 {
		c.Slots = NoSlot
	}
	return c
}

// role says what a request with these params is to this engine.
func (s *Scheduler) role(p *Params) (own, read bool) {
	if p == nil {
		return false, false
	}
	names := p.RemoteRequestID != "" || p.RemoteEngineID != "" || len(p.RemoteBlockIDs) > 0
	return p.DoRemoteDecode || p.DoRemotePrefill && s.cfg.Bidirectional,
		p.DoRemotePrefill || p.DoRemoteDecode && s.cfg.Bidirectional && names
}

// OnNewRequest tells of a request that entered the engine's queue, with the
// kv_transfer_params it came with, nil if none. A reader heartbeats from here
// on, long before the request is scheduled. Params that cannot be used are
// refused here: ids that notifications cannot carry, missing addresses, this
// engine as its own peer. Call RequestFinished when the request is over, however
// it ends; not for a request that was refused.
func (s *Scheduler) OnNewRequest(now time.Time, id string, p *Params) error {
	const op = "new request"
	s.start(now)
	own, read := s.role(p)
	if err := s.validate(op, id, p, own, read); err != nil {
		return err
	}
	if read {
		if f := s.fetches[id]; f != nil {
			if f.phase == fetchWaiting && !f.held && f.peer.Peer == p.Peer() && f.target == targetOf(p) {
				return nil
			}
			return &Error{Op: op, Request: id, Detail: "an earlier request of this id is not finished", Err: ErrBusy}
		}
		s.track(now, id, p)
	}
	s.supersede(id)
	return nil
}

func (s *Scheduler) validate(op, id string, p *Params, own, read bool) error {
	if p != nil && p.DoRemoteDecode && p.DoRemotePrefill {
		return invalid(op, id, "do_remote_prefill and do_remote_decode are both set")
	}
	if id == "" {
		return invalid(op, "", "the request id is empty")
	}
	if own {
		if err := ValidateRequestID(id, s.cfg.MaxNotification); err != nil {
			return err
		}
	}
	if !read {
		return nil
	}
	switch {
	case p.RemoteEngineID == "" || p.RemoteHost == "" || p.RemoteRequestID == "":
		return invalid(op, id, "kv_transfer_params lack remote_engine_id, remote_host or remote_request_id")
	case p.RemotePort < 1 || p.RemotePort > 65535:
		return invalid(op, id, "remote_port is %d", p.RemotePort)
	case p.RemoteEngineID == s.cfg.Engine:
		return invalid(op, id, "remote_engine_id %q is this engine", p.RemoteEngineID)
	case min(p.TPSize, p.PPSize, p.DCPSize) < 0 || max(p.TPSize, p.PPSize, p.DCPSize) > maxParallel:
		return invalid(op, id, "sizes tp %d, pp %d, dcp %d, must be at most %d", p.TPSize, p.PPSize, p.DCPSize, maxParallel)
	}
	if err := ValidateRequestID(p.RemoteRequestID, s.cfg.MaxNotification); err != nil {
		return &Error{Op: op, Request: id, Detail: "remote_request_id", Err: err}
	}
	return validateBlocks(op, id, "remote", p.RemoteBlockIDs, 0)
}

// validateBlocks refuses ids below 0, ids of limit and above unless limit is 0,
// and ids named twice in one group.
func validateBlocks(op, id, whose string, blocks [][]int, limit int) error {
	for g, group := range blocks {
		seen := make(map[int]struct{}, len(group))
		for _, b := range group {
			if b < 0 || limit > 0 && b >= limit {
				return invalid(op, id, "%s block id %d of group %d, there are %d blocks", whose, b, g, limit)
			}
			if _, twice := seen[b]; twice {
				return invalid(op, id, "%s block id %d twice in group %d", whose, b, g)
			}
			seen[b] = struct{}{}
		}
	}
	return nil
}

// OnBlocksAllocated tells of a request that was scheduled with these local block
// ids, one list per transfer group. For an owner it is a life that begins: the
// nonce goes out in the next plan, before the prefill runs. For a reader the
// blocks are those to fill, and the pull goes out in the next plan; with none
// to fill the owner is released and the request runs. It ends in one
// Outcome.Run or Outcome.Fail. A request whose pull has ended is not pulled
// again, so an engine may call this for every time it schedules a request. One
// that is being read, or was given up and not settled yet, is ErrBusy.
func (s *Scheduler) OnBlocksAllocated(now time.Time, id string, p *Params, blocks [][]int) error {
	const op = "allocate"
	s.start(now)
	own, read := s.role(p)
	if !own && !read {
		return nil
	}
	if err := s.validate(op, id, p, own, read); err != nil {
		return err
	}
	if err := validateBlocks(op, id, "local", blocks, s.cfg.Blocks); err != nil {
		return err
	}
	if read {
		if err := s.canPull(op, id, p, blocks); err != nil {
			return err
		}
	}
	if own {
		s.admit(id, blocks)
	}
	if read {
		s.pull(now, id, p, blocks)
	}
	return nil
}

// RequestFinished tells of a request that left the engine, with its block table
// of this moment and the number of tokens the blocks hold.
//
// An owner whose request can be continued gets the params for the reader; when
// they hold blocks, those stay until Outcome.Free names the request (delayFree).
// Blocks of an aborted request stay until every rank has taken its nonce back,
// normally one step. A reader that still reads keeps the blocks until
// Outcome.Settled. Without delayFree the engine frees the blocks itself, now.
// The params are good once the next plan was carried out; there are none for a
// request whose lease a rank has refused or ended before. An id that is not
// known is no error: there is nothing to keep. A second call returns no params,
// and says again whether the blocks are kept.
func (s *Scheduler) RequestFinished(now time.Time, id string, st Status, blocks [][]int, tokens int) (p *Params, delayFree bool, err error) {
	const op = "finish"
	s.start(now)
	if st > StatusError {
		return nil, false, invalid(op, id, "status is %d", st)
	}
	if tokens < 0 {
		return nil, false, invalid(op, id, "%d tokens", tokens)
	}
	if err := validateBlocks(op, id, "local", blocks, s.cfg.Blocks); err != nil {
		return nil, false, err
	}
	if st == StatusRunning {
		return nil, false, nil
	}
	f := s.fetches[id]
	l := s.lives[id]
	if f != nil && f.phase == fetchReading && l != nil && l.phase == lifeRunning {
		st = StatusAborted // its blocks are not filled
	}
	if l != nil {
		if l.phase == lifeRunning {
			p, delayFree = s.finish(now, l, st, blocks, tokens, f)
		} else if !l.old {
			delayFree = l.holds // finished before: the blocks are not the engine's
		}
	}
	if f != nil && s.endFetch(f, st, blocks, l) {
		delayFree = true
	}
	return p, delayFree, nil
}

// Preempted tells of a request that lost its blocks and will be scheduled again.
// An owner keeps slot and nonce: the params are built from the block table at
// finish. A pull that has not gone out is taken back. One that is being read is
// ErrBusy: its blocks are written to. An id that is not known, or called again,
// is no error.
func (s *Scheduler) Preempted(now time.Time, id string) error {
	s.start(now)
	f := s.fetches[id]
	if f == nil {
		return nil
	}
	if f.phase == fetchReading {
		return &Error{Op: "preempt", Request: id, Detail: "its blocks are being read into; finish it and wait for Settled", Err: ErrBusy}
	}
	if f.phase == fetchQueued {
		s.queue.read = slices.DeleteFunc(s.queue.read, func(q *fetch) bool { return q == f })
		f.phase = fetchWaiting
		s.traceAbort(f)
	}
	return nil
}

// BuildPlan returns what every rank has to do in this step, and considers it
// done: carry it out or lose it.
func (s *Scheduler) BuildPlan(now time.Time) Plan {
	p := Plan{Terms: s.Terms(now)}
	for _, l := range s.queue.admit {
		l.admitted = true
		p.Admit = append(p.Admit, Admission{l.request, l.nonce, l.slot})
	}
	for _, l := range s.queue.grant {
		p.Grant = append(p.Grant, Grant{l.request, l.nonce, l.ttl, true, l.fixed})
		l.granted = true
	}
	for _, l := range s.queue.abort {
		p.Abort = append(p.Abort, Key{l.request, l.nonce})
	}
	for _, f := range s.queue.read {
		p.Read = append(p.Read, s.ship(f))
	}
	for _, f := range s.queue.cancel {
		p.Cancel = append(p.Cancel, f.id)
	}
	p.Release = s.releases()
	s.queue = queue{}
	p.Heartbeat = s.peers.due(now)
	s.stats.Heartbeats += int64(len(p.Heartbeat))
	return p
}

// Pending reports whether the next plan has something to do that no clock has to
// wait for. A program with nothing else to do steps at once; one that goes out
// of service steps until there is nothing.
func (s *Scheduler) Pending() bool {
	q := &s.queue
	return len(q.admit)+len(q.grant)+len(q.abort)+len(q.read)+len(q.release)+len(q.cancel) > 0
}

// OnResults takes the results of any number of ranks and returns what the engine
// has to do. Call it in every step, with or without results. Reports that match
// nothing are counted in Stats and otherwise ignored.
func (s *Scheduler) OnResults(now time.Time, rs []Result) Outcome {
	s.start(now)
	for _, r := range rs {
		if r.Rank < 0 || r.Rank >= s.cfg.Ranks || r.Scheduler != 0 && r.Scheduler != s.id || slices.Contains(s.gone, r.Worker) {
			s.stats.UnknownReports++
			continue
		}
		if was := s.workers[r.Rank]; r.Worker != 0 && r.Worker != was {
			s.workers = slices.Clone(s.workers) // plans have the old one
			s.workers[r.Rank] = r.Worker
			if was != 0 {
				s.gone = append(s.gone, was)
				s.restarted(r.Rank)
			}
		}
		for _, e := range r.Sent {
			s.sent(r.Rank, e)
		}
		for _, id := range r.Received {
			s.received(r.Rank, id)
		}
		for _, f := range r.Failed {
			s.failed(r.Rank, f)
		}
		for _, id := range r.Settled {
			s.settled(r.Rank, id)
		}
		for _, c := range r.Connected {
			s.peers.connected(c)
		}
		s.stats.HeartbeatsFailed += int64(len(r.HeartbeatFailed))
	}
	out := s.outcome
	s.outcome = Outcome{}
	return out
}

// restarted ends what a rank was told before it was started anew: its slots and
// its READs ended with it.
func (s *Scheduler) restarted(rank int) {
	for _, l := range s.lives {
		for ; l != nil; l = l.older {
			if l.admitted && !l.reported.has(rank) {
				s.sent(rank, Ended{l.request, l.nonce, ReasonAborted})
			}
		}
	}
	for _, f := range s.fetches {
		if f.phase == fetchReading && !f.ended.has(rank) {
			s.failed(rank, Failure{Request: f.id, Cause: CauseTransfer, Message: "it was started anew"})
		}
	}
}

// Stats is a snapshot of the counters.
func (s *Scheduler) Stats() SchedulerStats {
	st := s.stats
	st.UsedSlots = int64(s.unused - len(s.freeSlots))
	st.FreeSlots = int64(s.Slots()) - st.UsedSlots
	st.Tracked, st.Peers = s.peers.tracked, int64(s.peers.used)
	return st
}

func (s *Scheduler) start(now time.Time) {
	if s.epoch.IsZero() {
		s.epoch = now
	}
}

// nonces is a walk over 1 … MaxNonce with a random start and a random odd step:
// it meets every value once before any repeats, and neighbours are no
// neighbours. Values up to MaxReaders are left out, so that a reader count is
// never taken for a nonce.
type nonces struct{ at, step uint64 }

func newNonces(seed uint64) nonces {
	var b [16]byte
	if seed == 0 {
		crand.Read(b[:]) // never fails (Go 1.24)
	} else {
		binary.LittleEndian.PutUint64(b[:], mix(seed))
		binary.LittleEndian.PutUint64(b[8:], mix(^seed))
	}
	return nonces{binary.LittleEndian.Uint64(b[:]) & MaxNonce, binary.LittleEndian.Uint64(b[8:])&MaxNonce | 1}
}

// mix is the finaliser of splitmix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func (n *nonces) next() int64 {
	for {
		n.at = (n.at + n.step) & MaxNonce
		if n.at > MaxReaders {
			return int64(n.at)
		}
	}
}

// rankSet is a set of ranks.
type rankSet []uint64

func (r rankSet) has(rank int) bool {
	return rank/64 < len(r) && r[rank/64]&(1<<(rank%64)) != 0
}

func (r *rankSet) add(rank int) bool {
	for rank/64 >= len(*r) {
		*r = append(*r, 0)
	}
	if r.has(rank) {
		return false
	}
	(*r)[rank/64] |= 1 << (rank % 64)
	return true
}

func cloneBlocks(blocks [][]int) [][]int {
	if blocks == nil {
		return nil
	}
	out := make([][]int, len(blocks))
	for i, b := range blocks {
		out[i] = slices.Clone(b)
	}
	return out
}

func countBlocks(blocks [][]int) (n int) {
	for _, b := range blocks {
		n += len(b)
	}
	return n
}
