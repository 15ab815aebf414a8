package lease

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// t0 is the start of every test's clock.
var t0 = time.Unix(1_000_000, 0)

func at(seconds float64) time.Time {
	return t0.Add(time.Duration(seconds * float64(time.Second)))
}

// rank is a Table with its slots, as one rank has them.
type rank struct {
	*Table
	t     testing.TB
	cells []int64
}

func newRank(t testing.TB, slots int, change ...func(*TableConfig)) *rank {
	cells := make([]int64, slots)
	cfg := TableConfig{Extension: 20 * time.Second, Slots: NewSlots(cells)}
	for _, c := range change {
		c(&cfg)
	}
	table, err := NewTable(cfg)
	require.NoError(t, err)
	return &rank{table, t, cells}
}

func (r *rank) admit(request string, nonce int64, slot int) {
	r.t.Helper()
	require.NoError(r.t, r.Admit(t0, Admission{request, nonce, slot}))
}

func (r *rank) grant(now time.Time, request string, nonce int64, seconds float64) {
	r.t.Helper()
	require.NoError(r.t, r.Grant(now, Grant{Request: request, Nonce: nonce, TTL: time.Duration(seconds * float64(time.Second)), Exported: true}))
}

func (r *rank) notify(now time.Time, sender, payload string) {
	r.t.Helper()
	require.NoError(r.t, r.Notify(now, sender, []byte(payload)))
}

func (r *rank) ends() []Ended { return r.Ended(nil) }

func (r *rank) deadline() time.Time {
	r.t.Helper()
	d, ok := r.NextDeadline()
	require.True(r.t, ok, "no deadline")
	return d
}

// engine is a Scheduler with the Tables of its ranks, carried out at once.
type engine struct {
	*Scheduler
	t     testing.TB
	ranks []*rank
	last  Plan
}

func newEngine(t testing.TB, ranks int, change ...func(*SchedulerConfig)) *engine {
	cfg := SchedulerConfig{Config: DefaultConfig(), Engine: "P-engine", Host: "p-host", Port: 5600, Ranks: ranks, Blocks: 64, MaxSeqs: 8, Seed: 7}
	for _, c := range change {
		c(&cfg)
	}
	s, err := NewScheduler(cfg)
	require.NoError(t, err)
	e := &engine{Scheduler: s, t: t}
	for range ranks {
		e.ranks = append(e.ranks, newRank(t, s.Slots(), func(tc *TableConfig) { tc.Extension = cfg.Extension() }))
	}
	return e
}

// step carries the plan out on every rank, reaps, and returns the outcome.
func (e *engine) step(now time.Time) Outcome {
	e.t.Helper()
	e.last = e.BuildPlan(now)
	var results []Result
	for i, r := range e.ranks {
		r.carryOut(now, e.last)
		r.Reap(now)
		results = append(results, Result{Rank: i, Sent: r.ends()})
	}
	return e.OnResults(now, results)
}

func (r *rank) carryOut(now time.Time, p Plan) {
	r.t.Helper()
	for _, a := range p.Admit {
		require.NoError(r.t, r.Admit(now, a))
	}
	for _, g := range p.Grant {
		require.NoError(r.t, r.Grant(now, g))
	}
	for _, k := range p.Abort {
		require.NoError(r.t, r.Abort(now, k))
	}
}

// publish takes an owner's request through prefill to its params.
func (e *engine) publish(now time.Time, id string, blocks ...int) *Params {
	e.t.Helper()
	p := &Params{DoRemoteDecode: true}
	require.NoError(e.t, e.OnNewRequest(now, id, p))
	require.NoError(e.t, e.OnBlocksAllocated(now, id, p, [][]int{blocks}))
	e.step(now)
	params, delayed, err := e.RequestFinished(now, id, StatusLengthCapped, [][]int{blocks}, 16*len(blocks))
	require.NoError(e.t, err)
	require.True(e.t, delayed)
	e.step(now)
	return params
}

// reader is a Scheduler on the reading side.
func newReader(t testing.TB, ranks int, change ...func(*SchedulerConfig)) *Scheduler {
	cfg := SchedulerConfig{Config: DefaultConfig(), Engine: "D-engine", Host: "d-host", Port: 5700, Ranks: ranks, Blocks: 64, MaxSeqs: 8, Seed: 9}
	for _, c := range change {
		c(&cfg)
	}
	s, err := NewScheduler(cfg)
	require.NoError(t, err)
	return s
}

// offer is what an owner answers with.
func offer(remoteID string, blocks ...int) *Params {
	return &Params{
		DoRemotePrefill: true, RemoteBlockIDs: [][]int{blocks}, RemoteEngineID: "P-engine", RemoteRequestID: remoteID,
		RemoteHost: "p-host", RemotePort: 5600, TPSize: 1, DCPSize: 1, PPSize: 1, RemoteNumTokens: 16 * len(blocks),
		TransferMode: "pull", Lease: &SlotRef{Slot: 3, Nonce: 7777},
	}
}

// peerOf is the peer that an offer of this engine names.
func peerOf(engine string) Peer {
	return with(offer("", 1), func(p *Params) { p.RemoteEngineID = engine }).Peer()
}

func with(p *Params, change func(*Params)) *Params {
	q := *p
	change(&q)
	return &q
}

// viaJSON shows that a value survives the way to another process.
func viaJSON[T any](t testing.TB, v T) T {
	t.Helper()
	b, err := json.Marshal(v)
	require.NoError(t, err)
	var back T
	require.NoError(t, json.Unmarshal(b, &back))
	return back
}

// requireRefused shows that err is an *Error that matches want.
func requireRefused(t testing.TB, err, want error) {
	t.Helper()
	require.Error(t, err)
	require.ErrorIs(t, err, want)
	_, typed := errors.AsType[*Error](err)
	require.True(t, typed, "%v is no *Error", err)
}
