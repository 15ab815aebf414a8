//go:build interop_vllm

package vllm

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
)

// engine is a Go engine of one rank with vLLM's geometry. Its own goroutine steps it, as an engine's loop would.
type engine struct {
	t    testing.TB
	kv   *nixl.Buffer
	geo  Ready
	side *rdma.SideChannel
	w    *rdma.Worker

	mu      sync.Mutex
	sched   *lease.Scheduler
	freed   map[string]lease.Reason
	ran     map[string]bool
	failed  map[string]lease.Failed
	stop    chan struct{}
	stopped chan struct{}
}

// engineOptions changes what a Go engine takes from the vLLM that it mirrors.
type engineOptions struct {
	lease  func(*lease.Config)
	worker func(*rdma.WorkerConfig)
}

// unverified turns the check off: vLLM offers no slots.
func unverified(c *lease.Config) { c.Verification = lease.VerifyOffered }

// newEngine makes a Go engine with the geometry and the compatibility hash of a running vLLM.
func newEngine(t testing.TB, name string, like Ready, o engineOptions) *engine {
	t.Helper()
	e := &engine{t: t, geo: like, freed: map[string]lease.Reason{}, ran: map[string]bool{}, failed: map[string]lease.Failed{},
		stop: make(chan struct{}), stopped: make(chan struct{})}
	size := 0
	for _, n := range like.BlockLens {
		size += n * like.NumBlocks
	}
	var err error
	e.kv, err = nixl.AllocBuffer(size)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.kv.Close()) })
	cfg := rdma.WorkerConfig{Engine: name, Lease: lease.DefaultConfig(), Compatibility: like.CompatibilityHash,
		KV: rdma.KV{Layout: like.Layout, BlockTokens: like.BlockSize}}
	base := e.kv.Addr()
	for r, n := range like.BlockLens {
		cfg.KV.Regions = append(cfg.KV.Regions, rdma.Region{Name: like.RegionNames[r], Base: base, BlockLen: n, Blocks: like.NumBlocks})
		base += uint64(n * like.NumBlocks)
	}
	if o.lease != nil {
		o.lease(&cfg.Lease)
	}
	if o.worker != nil {
		o.worker(&cfg)
	}
	fabric, err := rdma.OpenNIXL(rdma.NIXLConfig{Memory: []nixl.Memory{e.kv}})
	require.NoError(t, err)
	e.w, err = rdma.NewWorker(fabric, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.w.Close()) })
	e.side, err = rdma.ListenSideChannel("127.0.0.1", 0, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.side.Close()) })
	e.side.Serve(e.w)
	e.sched, err = lease.NewScheduler(lease.SchedulerConfig{Config: cfg.Lease, Engine: name, Host: "127.0.0.1", Port: e.side.Port(),
		TPSize: 1, Ranks: 1, Blocks: like.NumBlocks, Epoch: epoch(t)})
	require.NoError(t, err)
	go e.run()
	t.Cleanup(func() {
		close(e.stop)
		<-e.stopped
	})
	return e
}

// epoch is the zero of the clock that a side channel tells: CLOCK_MONOTONIC.
func epoch(t testing.TB) time.Time {
	t.Helper()
	var ts unix.Timespec
	require.NoError(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts))
	return time.Now().Add(-time.Duration(ts.Nano()))
}

func (e *engine) run() {
	defer close(e.stopped)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-e.stop:
			return
		case <-tick.C:
		}
		e.mu.Lock()
		now := time.Now()
		res, err := e.w.Step(now, e.sched.BuildPlan(now))
		if err != nil {
			e.t.Errorf("step: %v", err)
		}
		out := e.sched.OnResults(now, []lease.Result{res})
		for _, f := range out.Free {
			e.freed[f.Request] = f.Reason
		}
		for _, id := range out.Run {
			e.ran[id] = true
		}
		for _, f := range out.Fail {
			e.failed[f.Request] = f
		}
		e.mu.Unlock()
	}
}

// with runs f between two steps.
func (e *engine) with(f func(now time.Time)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f(time.Now())
}

// until waits for done, which is asked between two steps.
func (e *engine) until(t testing.TB, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		ok := false
		e.with(func(time.Time) { ok = done() })
		if ok {
			return
		}
		require.True(t, time.Now().Before(deadline), "waited for: %s", what)
	}
}

// arrive queues a request: heartbeats begin.
func (e *engine) arrive(t testing.TB, id string, p *lease.Params) {
	t.Helper()
	e.with(func(now time.Time) { require.NoError(t, e.sched.OnNewRequest(now, id, p)) })
}

// pull starts to read a request's blocks.
func (e *engine) pull(t testing.TB, id string, p *lease.Params, blocks ...int) {
	t.Helper()
	e.with(func(now time.Time) {
		require.NoError(t, e.sched.OnBlocksAllocated(now, id, p, [][]int{blocks}))
	})
}

// giveUp aborts a request that is queued.
func (e *engine) giveUp(t testing.TB, id string) {
	t.Helper()
	e.with(func(now time.Time) {
		_, _, err := e.sched.RequestFinished(now, id, lease.StatusAborted, nil, 0)
		require.NoError(t, err)
	})
}

// read reads a request's blocks and waits until they are in.
func (e *engine) read(t testing.TB, id string, p *lease.Params, blocks ...int) {
	t.Helper()
	e.pull(t, id, p, blocks...)
	e.until(t, "read of "+id, func() bool {
		require.NotContains(t, e.failed, id)
		return e.ran[id]
	})
}

// refused reads a request's blocks and waits until that fails.
func (e *engine) refused(t testing.TB, id string, p *lease.Params, blocks ...int) lease.Failed {
	t.Helper()
	e.pull(t, id, p, blocks...)
	var f lease.Failed
	e.until(t, "refusal of "+id, func() bool {
		require.NotContains(t, e.ran, id)
		f = e.failed[id]
		return f.Err != nil
	})
	return f
}

// publish exports blocks as a prefill of tokens tokens does and returns the params that a router would carry.
func (e *engine) publish(t testing.TB, id string, tokens int, blocks ...int) *lease.Params {
	t.Helper()
	groups := [][]int{blocks}
	e.with(func(now time.Time) {
		require.NoError(t, e.sched.OnBlocksAllocated(now, id, &lease.Params{DoRemoteDecode: true}, groups))
	})
	steps := int64(0)
	e.with(func(time.Time) { steps = e.w.Stats().Steps })
	e.until(t, "the nonce of "+id, func() bool { return e.w.Stats().Steps > steps })
	var p *lease.Params
	e.with(func(now time.Time) {
		var err error
		p, _, err = e.sched.RequestFinished(now, id, lease.StatusLengthCapped, groups, tokens)
		require.NoError(t, err)
	})
	return p
}

// ended waits until the lease of a published request has ended, and returns why.
func (e *engine) ended(t testing.TB, id string) lease.Reason {
	t.Helper()
	var r lease.Reason
	e.until(t, "end of the lease of "+id, func() bool {
		r = e.freed[id]
		return r != 0
	})
	return r
}

// block is the memory of one block of one region.
func (e *engine) block(region, b int) []byte {
	at := 0
	for r := range region {
		at += e.geo.BlockLens[r] * e.geo.NumBlocks
	}
	at += b * e.geo.BlockLens[region]
	return e.kv.Bytes()[at : at+e.geo.BlockLens[region]]
}

// blocks are copies of the bytes of blocks: for each block, per region.
func (e *engine) blocks(ids []int) (all [][][]byte) {
	for _, b := range ids {
		var regions [][]byte
		for r := range e.geo.BlockLens {
			regions = append(regions, append([]byte(nil), e.block(r, b)...))
		}
		all = append(all, regions)
	}
	return all
}

// fill writes the bytes of blocks: for each block, per region.
func (e *engine) fill(ids []int, bytes [][][]byte) {
	for i, b := range ids {
		for r := range e.geo.BlockLens {
			copy(e.block(r, b), bytes[i][r])
		}
	}
}

// prompt makes length token ids that no other prompt of a test begins with.
func prompt(length int) []int {
	tokens := make([]int, length)
	for i := range tokens {
		tokens[i] = rand.IntN(256)
	}
	return tokens
}

// sequence is n block ids from first on.
func sequence(first, n int) []int {
	ids := make([]int, n)
	for i := range ids {
		ids[i] = first + i
	}
	return ids
}

func blockCount(tokens, blockSize int) int { return (tokens + blockSize - 1) / blockSize }

// paramsOf decodes the kv_transfer_params of a finished request.
func paramsOf(t testing.TB, o Output) *lease.Params {
	t.Helper()
	p := new(lease.Params)
	require.NotEqual(t, "null", string(o.Params), "%s ended with %s and no kv_transfer_params", o.ID, o.FinishReason)
	require.NoError(t, json.Unmarshal(o.Params, p))
	return p
}

var remoteDecode = map[string]any{"do_remote_decode": true}

// prefill runs a prompt on an owner that then pins its blocks.
func prefill(t testing.TB, p *Peer, id string, tokens []int) (*lease.Params, Output) {
	t.Helper()
	p = p.For(t)
	p.Generate(id, tokens, 1, remoteDecode)
	o := p.Output(id)
	return paramsOf(t, o), o
}

// pinned reports whether vLLM's scheduler holds a request.
func pinned(t testing.TB, p *Peer, id string) bool {
	t.Helper()
	for _, r := range p.For(t).Status().Requests {
		if r == id {
			return true
		}
	}
	return false
}

func goldenFile(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(here(), "..", "..", "testdata", name))
	require.NoError(t, err)
	return b
}
