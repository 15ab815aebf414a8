package rdmatest_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// parts are a scheduler and its one rank that were configured apart.
type parts struct {
	t     *testing.T
	now   time.Time
	w     *rdma.Worker
	sched *lease.Scheduler
	freed map[string]lease.Reason
	out   lease.Outcome
	err   error
}

func newParts(t *testing.T, change setting) *parts {
	t.Helper()
	p := &parts{t: t, now: time.Now(), freed: map[string]lease.Reason{}}
	network := rdmatest.NewNetwork()
	mem := network.NewMemory(4 * blockLen)
	wc := rdma.WorkerConfig{Engine: "o", Lease: lease.DefaultConfig(), KV: rdma.KV{Regions: []rdma.Region{{Base: mem.Addr(), BlockLen: blockLen, Blocks: 4}}}}
	sc := lease.SchedulerConfig{Config: lease.DefaultConfig(), Engine: "o", Host: "h", Port: 1, Blocks: 4}
	change(&wc, &sc)
	var err error
	p.w, err = rdma.NewWorker(network.NewFabric("o", mem), wc)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.w.Close()) })
	p.sched, err = lease.NewScheduler(sc)
	require.NoError(t, err)
	return p
}

func (p *parts) step() {
	var res lease.Result
	res, p.err = p.w.Step(p.now, p.sched.BuildPlan(p.now))
	p.out = p.sched.OnResults(p.now, []lease.Result{res})
	for _, f := range p.out.Free {
		p.freed[f.Request] = f.Reason
	}
}

// E5: parts that do not fit are refused when they meet, which a first, empty step shows; and if requests came first, nothing of
// them stays behind.
func TestPartsThatDoNotFitAreRefusedAndLoseNothing(t *testing.T) {
	for name, c := range map[string]struct {
		change setting
		says   string
	}{
		"more slots lent than there are":  {func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) { w.Lease.Slots = 1 }, "lends 4 lease slots, and this rank has 1"},
		"slots lent where there are none": {func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) { w.Lease.Slots = lease.NoSlot }, "has 0"},
		"longer ids than notifications":   {func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) { w.Lease.MaxNotification = 100 }, "notifications of 16384 bytes, and this rank for 100"},
		"a rank beyond the last":          {func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) { w.Rank, w.TPSize = 1, 2 }, "rank 1, and the scheduler has 1"},
		"another clock": {func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) {
			s.Bidirectional, s.Epoch = true, time.Now()
		}, "rdma.Epoch"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newParts(t, c.change)
			p.step()
			require.ErrorIs(t, p.err, lease.ErrPlan, "they meet")
			require.ErrorContains(t, p.err, c.says)

			p = newParts(t, c.change) // they meet later
			for i, id := range []string{"a", "b", "gone"} {
				require.NoError(t, p.sched.OnBlocksAllocated(p.now, id, &lease.Params{DoRemoteDecode: true}, [][]int{{i}}))
			}
			load := &lease.Params{DoRemotePrefill: true, RemoteEngineID: "x", RemoteRequestID: "x", RemoteHost: "h", RemotePort: 1,
				RemoteBlockIDs: [][]int{{1}}, RemoteNumTokens: 16, Lease: &lease.SlotRef{Slot: 1, Nonce: 5000}}
			require.NoError(t, p.sched.OnBlocksAllocated(p.now, "load", load, [][]int{{3}}))
			p.step()
			require.ErrorIs(t, p.err, lease.ErrPlan)
			if c.says == "rank 1, and the scheduler has 1" {
				return // its results are of no rank
			}
			require.Len(t, p.out.Fail, 1)
			for i, id := range []string{"a", "b"} {
				params, delayed, err := p.sched.RequestFinished(p.now, id, lease.StatusLengthCapped, [][]int{{i}}, 16)
				require.NoError(t, err)
				require.Nil(t, params, "no lease protects them")
				require.True(t, delayed)
			}
			_, _, err := p.sched.RequestFinished(p.now, "gone", lease.StatusAborted, [][]int{{2}}, 0)
			require.NoError(t, err)
			_, _, err = p.sched.RequestFinished(p.now, "load", lease.StatusError, nil, 0)
			require.NoError(t, err)
			p.step()
			p.step()
			st := p.sched.Stats()
			require.Zero(t, st.Pinned+st.Running+st.UsedSlots+st.PinnedBlocks)
			require.Equal(t, map[string]lease.Reason{"a": lease.ReasonAborted, "b": lease.ReasonAborted, "gone": lease.ReasonAborted}, p.freed)
		})
	}
}

// A rank that refuses one admission says so, and serves the others.
func TestARefusedAdmissionIsReported(t *testing.T) {
	p := newParts(t, func(*rdma.WorkerConfig, *lease.SchedulerConfig) {})
	plan := lease.Plan{Admit: []lease.Admission{{Request: "a", Nonce: 5001, Slot: 0}, {Request: "b", Nonce: 5002, Slot: 0}, {Request: "c", Nonce: 5003, Slot: 1}}}
	res, err := p.w.Step(p.now, plan)
	require.ErrorIs(t, err, lease.ErrInvalid)
	require.Equal(t, []lease.Ended{{Request: "b", Nonce: 5002, Reason: lease.ReasonAborted}}, res.Sent)
	require.EqualValues(t, 2, p.w.Stats().Leases.Live)
}

// A plan that comes twice ends no lease: what was admitted and granted is here.
func TestAPlanThatComesTwiceEndsNothing(t *testing.T) {
	p := newParts(t, func(*rdma.WorkerConfig, *lease.SchedulerConfig) {})
	for _, plan := range []lease.Plan{
		{Admit: []lease.Admission{{Request: "a", Nonce: 5001, Slot: 0}}},
		{Grant: []lease.Grant{{Request: "a", Nonce: 5001, TTL: time.Minute, Exported: true}}},
	} {
		for range 2 {
			res, _ := p.w.Step(p.now, plan)
			require.Empty(t, res.Sent)
		}
	}
	require.EqualValues(t, 1, p.w.Stats().Leases.Live)
	res, err := p.w.Step(p.now, lease.Plan{Grant: []lease.Grant{{Request: "never admitted", Nonce: 5002, TTL: time.Minute}}})
	require.ErrorIs(t, err, lease.ErrUnknown)
	require.Len(t, res.Sent, 1)
}

// A scheduler that was started anew meets living ranks: the old leases end, since the blocks are its own to lend, and it waits for
// the READs that may still write them. What they bring is nobody's.
func TestANewSchedulerTakesOverLivingRanks(t *testing.T) {
	d := newDuo(t)
	owned := d.owner.publish("pinned", 7, 3)
	d.reader.pull("leased", owned, 5)
	d.net.HoldReads(true)
	d.reader.step()
	mine := lease.SchedulerConfig{Config: lease.DefaultConfig(), Engine: "reader", Host: "127.0.0.1", Port: 1, Blocks: blocks, MaxSeqs: 4}
	next, err := lease.NewScheduler(mine)
	require.NoError(t, err)
	w := d.reader.ranks[0].w
	step := func(s *lease.Scheduler) (lease.Outcome, error) {
		res, err := w.Step(*d.now, s.BuildPlan(*d.now))
		return s.OnResults(*d.now, []lease.Result{res}), err
	}
	require.NoError(t, next.OnBlocksAllocated(*d.now, "leased", owned, [][]int{{5}})) // the same name, the same block
	out, err := step(next)
	require.ErrorIs(t, err, lease.ErrPlan)
	require.ErrorContains(t, err, "READs of an earlier scheduler")
	require.Len(t, out.Fail, 1)
	require.Empty(t, out.Run)
	_, _, err = next.RequestFinished(*d.now, "leased", lease.StatusError, nil, 0)
	require.NoError(t, err)
	d.held(0, false).Deliver()
	out, err = step(next)
	require.ErrorIs(t, err, lease.ErrPlan, "it ends in this step")
	require.Empty(t, out)
	d.net.HoldReads(false)
	require.NoError(t, next.OnBlocksAllocated(*d.now, "again", owned, [][]int{{5}}))
	until(t, "the read", func() bool {
		out, err = step(next)
		require.NoError(t, err)
		require.Empty(t, out.Fail)
		return len(out.Run) == 1
	})

	// The owner's scheduler: what the old one had lent is free, and no slot shows its nonce.
	heir, err := lease.NewScheduler(lease.SchedulerConfig{Config: lease.DefaultConfig(), Engine: "owner", Host: "127.0.0.1", Port: 1, Blocks: blocks, MaxSeqs: 4})
	require.NoError(t, err)
	require.EqualValues(t, 1, d.owner.ranks[0].w.Stats().Leases.Live)
	res, err := d.owner.ranks[0].w.Step(*d.now, heir.BuildPlan(*d.now))
	require.NoError(t, err)
	require.Empty(t, res.Sent, "nobody waits for them")
	require.Zero(t, d.owner.ranks[0].w.Stats().Leases.Live)

	// A plan of the old one that was under way all the time does not bring it back.
	require.NoError(t, heir.OnBlocksAllocated(*d.now, "heirs", &lease.Params{DoRemoteDecode: true}, [][]int{{3}}))
	_, err = d.owner.ranks[0].w.Step(*d.now, heir.BuildPlan(*d.now))
	require.NoError(t, err)
	res, err = d.owner.ranks[0].w.Step(*d.now, d.owner.sched.BuildPlan(*d.now))
	require.ErrorIs(t, err, lease.ErrPlan)
	require.Empty(t, res.Sent)
	require.EqualValues(t, 1, d.owner.ranks[0].w.Stats().Leases.Live)
}

// A rank that was started anew refuses the plan that was built for the one before, so that nothing of it is carried out after the
// scheduler has called it over.
func TestARankThatWasStartedAnewRefusesAnEarlierPlan(t *testing.T) {
	net, now := rdmatest.NewNetwork(), time.Now()
	p, d := newEngine(t, net, &now, "P"), newEngine(t, net, &now, "D")
	params := p.publish("A", 1, 1)
	d.step() // the scheduler knows the first worker
	r := d.ranks[0]
	require.NoError(t, r.w.Close())
	r.mem = net.NewMemory(layers * blocks * blockLen)
	r.f = net.NewFabric("D/anew", r.mem)
	wc := rdma.WorkerConfig{Engine: "D", MaxSeqs: 4, CheckPoll: 1, HandshakeTimeout: time.Minute, Lease: d.sched.Config().Config}
	for l := range layers {
		wc.KV.Regions = append(wc.KV.Regions, rdma.Region{Base: r.mem.Addr() + uint64(l*blocks*blockLen), BlockLen: blockLen, Blocks: blocks})
	}
	var err error
	r.w, err = rdma.NewWorker(r.f, wc)
	require.NoError(t, err)
	d.pull("a", params, 5)
	res, _ := r.w.Step(now, d.sched.BuildPlan(now))
	for _, f := range d.sched.OnResults(now, []lease.Result{res}).Fail {
		d.failed[f.Request] = f
	}
	f, failed := d.failed["a"]
	require.True(t, failed)
	require.False(t, f.Quarantined)
	d.over("a")
	d.fill(2, 5) // block 5 is another request's now
	require.Zero(t, r.w.Stats().Pulls, "nothing will write it")
	d.pull("b", p.publish("B", 3, 2), 6)
	until(t, "the read", func() bool { return d.ran["b"] || failure(d, "b") != nil }, d, p)
	require.NoError(t, failure(d, "b"), "the next plan is for this life")
	require.Zero(t, d.wrong(3, 6))
	require.Zero(t, d.wrong(2, 5), "words of block 5 that are not its request's")
}

// A READ that comes twice is refused, and its blocks stay in quarantine while the first one may write.
func TestAReadThatComesTwiceKeepsItsBlocksInQuarantine(t *testing.T) {
	d := newDuo(t)
	d.reader.pull("a", d.owner.publish("A", 7, 3), 5)
	d.net.HoldReads(true)
	plan := d.reader.sched.BuildPlan(*d.now)
	for i := 0; i < 2; i++ {
		res, err := d.reader.ranks[0].w.Step(*d.now, plan)
		require.NoError(t, err)
		out := d.reader.sched.OnResults(*d.now, []lease.Result{res})
		for _, f := range out.Fail {
			require.True(t, f.Quarantined, "%v", f.Err)
		}
	}
}
