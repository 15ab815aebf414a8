package rdmatest_test

import (
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

const (
	layers   = 2
	blocks   = 16
	blockLen = 64
)

// engine is a Scheduler with the Workers of its ranks on an in-memory network, on a clock that the test moves. It owns and
// reads.
type engine struct {
	t     testing.TB
	net   *rdmatest.Network
	now   *time.Time
	name  string
	side  *rdma.SideChannel
	sched *lease.Scheduler
	ranks []*rank

	freed   map[string]lease.Reason
	ran     map[string]bool
	failed  map[string]lease.Failed
	settled map[string]bool
	outcome func(lease.Outcome) // called in addition
}

type rank struct {
	f     *rdmatest.Fabric
	mem   *rdmatest.Memory
	w     *rdma.Worker
	plans []lease.Plan // not carried out yet
	built int          // plans that were
}

type setting func(*rdma.WorkerConfig, *lease.SchedulerConfig)

func newEngine(t testing.TB, net *rdmatest.Network, now *time.Time, name string, change ...setting) *engine {
	t.Helper()
	e := &engine{t: t, net: net, now: now, name: name, freed: map[string]lease.Reason{}, ran: map[string]bool{},
		failed: map[string]lease.Failed{}, settled: map[string]bool{}}
	wc := rdma.WorkerConfig{Engine: name, MaxSeqs: 4, CheckPoll: 1, HandshakeTimeout: time.Minute}
	sc := lease.SchedulerConfig{Config: lease.DefaultConfig(), Engine: name, Host: "127.0.0.1", TPSize: 1, Ranks: 1,
		Blocks: blocks, MaxSeqs: 4, Seed: uint64(len(name)) + uint64(name[len(name)-1])}
	for _, f := range change {
		f(&wc, &sc)
	}
	var err error
	if sc.Port == 0 {
		e.side, err = rdma.ListenSideChannel(sc.Host, 0, nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, e.side.Close()) })
		sc.Port = e.side.Port()
	}
	wc.Lease, wc.TPSize = sc.Config, sc.TPSize
	sc.Ranks = sc.TPSize
	e.sched, err = lease.NewScheduler(sc)
	require.NoError(t, err)
	for i := range sc.Ranks {
		r := &rank{mem: net.NewMemory(layers * sc.Blocks * blockLen)}
		r.f = net.NewFabric(fmt.Sprintf("%s/%d/%x", name, i, r.mem.Addr()), r.mem)
		wc.Rank, wc.KV.Regions = i, nil
		for l := range layers {
			wc.KV.Regions = append(wc.KV.Regions, rdma.Region{Base: r.mem.Addr() + uint64(l*sc.Blocks*blockLen), BlockLen: blockLen, Blocks: sc.Blocks})
		}
		r.w, err = rdma.NewWorker(r.f, wc)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, r.w.Close()) })
		if e.side != nil {
			e.side.Serve(r.w)
		}
		e.ranks = append(e.ranks, r)
	}
	return e
}

// step runs one step on every rank, and another one when a request ran: that tells its owner.
func (e *engine) step() {
	e.t.Helper()
	for ran := len(e.ran); ; ran = len(e.ran) {
		e.plan()
		for i := range e.ranks {
			e.run(i)
		}
		if len(e.ran) == ran {
			return
		}
	}
}

// plan builds one step's plan for all ranks.
func (e *engine) plan() {
	p := e.sched.BuildPlan(*e.now)
	for _, r := range e.ranks {
		r.plans = append(r.plans, p)
	}
}

// run carries the next plan out on one rank, or none.
func (e *engine) run(i int) {
	e.t.Helper()
	r := e.ranks[i]
	var p lease.Plan
	if len(r.plans) > 0 {
		p, r.plans = r.plans[0], r.plans[1:]
		r.built++
	}
	res, err := r.w.Step(*e.now, p)
	require.NoError(e.t, err)
	out := e.sched.OnResults(*e.now, []lease.Result{res})
	for _, f := range out.Free {
		e.freed[f.Request] = f.Reason
	}
	for _, id := range out.Run {
		e.ran[id] = true
	}
	for _, f := range out.Fail {
		e.failed[f.Request] = f
	}
	for _, s := range out.Settled {
		e.settled[s.Request] = true
	}
	if e.outcome != nil {
		e.outcome(out)
	}
}

// until steps engines until done. Handshakes take real time; all else happens in the steps.
func until(t testing.TB, what string, done func() bool, engines ...*engine) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !done(); {
		require.True(t, time.Now().Before(deadline), "waited for: %s", what)
		for _, e := range engines {
			e.step()
		}
		time.Sleep(20 * time.Microsecond)
	}
}

// word is what a request's KV holds: each word names the request, the rank, the layer, the block's place in the request,
// and the word's own.
func word(tag uint64, rank, layer, place, w int) uint64 {
	x := tag<<24 | uint64(rank)<<20 | uint64(layer)<<16 | uint64(place)<<8 | uint64(w)
	x = (x ^ x>>31) * 0x9e3779b97f4a7c15 // bijective
	return x ^ x>>29
}

func (e *engine) block(rank, layer, b int) []byte {
	mem := e.ranks[rank].mem.Bytes()
	at := (layer*(len(mem)/layers/blockLen) + b) * blockLen
	return mem[at : at+blockLen]
}

// fill is the prefill of a request: its KV into these blocks.
func (e *engine) fill(tag uint64, ids ...int) {
	for r := range e.ranks {
		for l := range layers {
			for place, b := range ids {
				for w := range blockLen / 8 {
					binary.LittleEndian.PutUint64(e.block(r, l, b)[8*w:], word(tag, r, l, place, w))
				}
			}
		}
	}
}

// wrong counts the words of the blocks that are not the request's.
func (e *engine) wrong(tag uint64, ids ...int) (n int) {
	for r := range e.ranks {
		for l := range layers {
			for place, b := range ids {
				for w := range blockLen / 8 {
					if binary.LittleEndian.Uint64(e.block(r, l, b)[8*w:]) != word(tag, r, l, place, w) {
						n++
					}
				}
			}
		}
	}
	return n
}

// publish prefills a request with tag's KV and exports it.
func (e *engine) publish(id string, tag uint64, ids ...int) *lease.Params {
	e.t.Helper()
	require.NoError(e.t, e.sched.OnBlocksAllocated(*e.now, id, &lease.Params{DoRemoteDecode: true}, [][]int{ids}))
	e.step()
	e.fill(tag, ids...)
	p, delay, err := e.sched.RequestFinished(*e.now, id, lease.StatusLengthCapped, [][]int{ids}, len(ids)*16)
	require.NoError(e.t, err)
	require.True(e.t, delay)
	delete(e.freed, id)
	e.step()
	return p
}

func (e *engine) arrive(id string, p *lease.Params) {
	e.t.Helper()
	require.NoError(e.t, e.sched.OnNewRequest(*e.now, id, p))
}

func (e *engine) pull(id string, p *lease.Params, ids ...int) {
	e.t.Helper()
	e.arrive(id, p)
	require.NoError(e.t, e.sched.OnBlocksAllocated(*e.now, id, p, [][]int{ids}))
}

// over tells the reader that it has no more use for a request.
func (e *engine) over(id string) (delayFree bool) {
	e.t.Helper()
	_, delayFree, err := e.sched.RequestFinished(*e.now, id, lease.StatusStopped, nil, 0)
	require.NoError(e.t, err)
	delete(e.ran, id)
	delete(e.failed, id)
	return delayFree
}

// connected waits until e is connected to n engines; one request must have come from each.
func (e *engine) connected(n int) {
	e.t.Helper()
	until(e.t, "the handshake", func() bool {
		for _, r := range e.ranks {
			if r.w.Stats().Peers != n {
				return false
			}
		}
		return true
	}, e)
}

// duo is one owner and one reader that are connected, the clock under the test's control.
type duo struct {
	t             testing.TB
	net           *rdmatest.Network
	now           *time.Time
	owner, reader *engine
}

func newDuo(t testing.TB, change ...setting) *duo {
	t.Helper()
	start := time.Unix(1_000_000, 0)
	d := &duo{t: t, net: rdmatest.NewNetwork(), now: &start}
	d.owner = newEngine(t, d.net, d.now, "owner", change...)
	d.reader = newEngine(t, d.net, d.now, "reader", change...)
	d.reader.pull("first", d.owner.publish("first", 1, 0), 0)
	until(t, "the first READ", func() bool { return d.reader.ran["first"] }, d.reader)
	d.owner.step()
	require.Equal(t, lease.ReasonRead, d.owner.freed["first"])
	d.reader.over("first")
	d.reader.step()
	d.owner.step()
	return d
}

func (d *duo) pass(seconds float64) {
	*d.now = d.now.Add(time.Duration(seconds * float64(time.Second)))
}

// lapse lets the owner's lease of a request run out and the blocks go to the next one. Notifications must be held, or the
// reader must not have stepped.
func (d *duo) lapse(id string, tag uint64, ids ...int) (next *lease.Params) {
	d.t.Helper()
	d.pass(31)
	d.owner.step()
	require.Equal(d.t, lease.ReasonExpired, d.owner.freed[id])
	return d.owner.publish(id+"'", tag, ids...)
}

// held is the READ under way at this place, the oldest first; how says which kind it has to be.
func (d *duo) held(i int, slot bool) *rdmatest.Read {
	d.t.Helper()
	reads := d.net.Reads()
	require.Greater(d.t, len(reads), i)
	require.Equal(d.t, slot, reads[i].Bytes()%blockLen != 0, "READ %d of %d bytes", i, reads[i].Bytes())
	return reads[i]
}

func failure(e *engine, id string) error {
	if f, ok := e.failed[id]; ok {
		return f.Err
	}
	return nil
}

// clean requires that nothing is left: no pull, no lease, no slot that is not free.
func clean(t testing.TB, engines ...*engine) {
	t.Helper()
	for _, e := range engines {
		s := e.sched.Stats()
		require.Zero(t, s.Pinned+s.Running, "%s holds leases", e.name)
		require.EqualValues(t, e.sched.Slots(), s.FreeSlots, "%s lost slots", e.name)
		require.Zero(t, s.Tracked+s.Peers, "%s still heartbeats", e.name)
		for i, r := range e.ranks {
			ws := r.w.Stats()
			require.Zero(t, ws.Pulls, "%s, rank %d", e.name, i)
			require.Zero(t, ws.Leases.Live, "%s, rank %d", e.name, i)
		}
	}
}
