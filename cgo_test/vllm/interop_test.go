//go:build interop_vllm

package vllm

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

// vLLM's lease in whole seconds. Its heartbeats are a sixth of it apart, and one extends by two thirds.
const peerLease = 6

// pair is a prefill and a decode instance, which most items share: an engine takes half a minute to start.
type pair struct{ p, d *Peer }

// TestInterop is the report of `make interop-vllm`, in its order.
func TestInterop(t *testing.T) {
	extra := map[string]any{"kv_lease_duration": peerLease}
	more := []string{"--wire", "--prefix-caching", "--blocks", "128", "--engine-args", `{"max_num_seqs": 4}`}
	v := pair{
		p: Start(t, Options{Role: "kv_producer", EngineID: "p", Extra: extra, Args: more}),
		d: Start(t, Options{Role: "kv_consumer", EngineID: "d", Extra: extra, Args: more}),
	}
	check(t, "vLLM reads vLLM: the harness and the goldens", v.vllmReadsVLLM)
	check(t, "hash: computed from the configuration of running instances, and of the goldens", v.hashes)

	check(t, "Go reads vLLM: every byte, and read-complete frees at once", v.goReads)
	check(t, "Go reads vLLM: heartbeats keep a request past three leases", v.goHeartbeats)
	check(t, "Go reads vLLM: an abort in the queue frees at once", v.goAborts)
	check(t, "Go reads vLLM: no slots to verify, an expired lease", v.goAfterExpiry)

	check(t, "vLLM reads Go: handshake, every byte, its notification frees", v.vllmReads)
	check(t, "vLLM reads Go: its heartbeats renew, its abort releases", v.vllmHeartbeats)

	check(t, "hash: learned from running instances", v.learned)
	check(t, "hash: a mismatch is refused by name by Go, and by vLLM", v.hashMismatch)

	check(t, "relay: vLLM prefill, nixlgo relay, vLLM decode: the tokens of an instance alone", v.relay)
	check(t, "probe: both instances, with a READ", v.probe)

	check(t, "prefix hits: vLLM reads what it lacks of Go's blocks, and Go of vLLM's", v.prefixHits)

	d64 := Start(t, Options{Role: "kv_consumer", EngineID: "d64", Extra: map[string]any{"enforce_handshake_compat": false},
		Args: []string{"--wire", "--block-size", "64"}})
	check(t, "block size: vLLM with blocks of 64 tokens reads Go's of 32, of another hash, as it reads vLLM's", func(t *testing.T) { v.largerBlocks(t, d64) })
	check(t, "block size: Go refuses to cut the blocks of CPU attention", func(t *testing.T) { v.largerBlocksInGo(t, d64) })

	both := Start(t, Options{Role: "kv_both", EngineID: "b", Extra: map[string]any{"bidirectional_kv_xfer": true, "decoder_kv_blocks_ttl": 12},
		Args: []string{"--wire"}})
	check(t, "bidirectional: Go reads vLLM's decoder blocks back", func(t *testing.T) { v.goReadsBack(t, both) })
	check(t, "bidirectional: Go declines blocks whose time runs out", func(t *testing.T) { v.goDeclines(t, both) })
	check(t, "bidirectional: vLLM reads Go's decoder blocks back", func(t *testing.T) { v.vllmReadsBack(t, both) })
	check(t, "bidirectional: vLLM declines blocks whose time runs out, and Go frees them", func(t *testing.T) { v.vllmDeclines(t, both) })

	two := Start(t, Options{Role: "kv_both", EngineID: "tp2", Args: []string{"--engine-args", twoRanks}})
	check(t, "two ranks: Go reads both ranks of vLLM into one", func(t *testing.T) { v.goReadsTP(t, two) })
	check(t, "two ranks: both ranks of vLLM read one of Go", func(t *testing.T) { v.tpReadsGo(t, two) })

	check(t, "probe: a rank that vLLM does not have", v.unknownRank)
}

func (v pair) hashes(t *testing.T) {
	p, d := v.p.For(t), v.d.For(t)
	require.Equal(t, p.Ready().CompatibilityHash, d.Ready().CompatibilityHash)
	for _, ready := range []Ready{p.Ready(), d.Ready()} {
		var c rdma.Compatibility
		require.NoError(t, json.Unmarshal(ready.HashInputs, &c))
		hash, err := c.Hash()
		require.NoError(t, err)
		require.Equal(t, ready.CompatibilityHash, hash)
	}
	var golden struct {
		Vectors []struct {
			Name   string             `json:"name"`
			Inputs rdma.Compatibility `json:"inputs"`
			SHA256 string             `json:"sha256"`
		} `json:"vectors"`
	}
	require.NoError(t, json.Unmarshal(goldenFile(t, "wire/compatibility.json"), &golden))
	require.NotEmpty(t, golden.Vectors)
	for _, x := range golden.Vectors {
		hash, err := x.Inputs.Hash()
		require.NoError(t, err)
		require.Equal(t, x.SHA256, hash, x.Name)
	}
}

// keep renews a request from a third engine until the test ends, so that its end is nobody's expiry.
func (v pair) keep(t *testing.T, params ...*lease.Params) *engine {
	t.Helper()
	k := newEngine(t, "keeper", v.p.For(t).Ready(), engineOptions{lease: func(c *lease.Config) { c.Duration = peerLease * time.Second }})
	for i, p := range params {
		k.arrive(t, fmt.Sprint("keep", i), p)
	}
	k.until(t, "the first heartbeat", func() bool { return k.w.Stats().HeartbeatsSent > 0 })
	return k
}

func (v pair) goReads(t *testing.T) {
	p := v.p.For(t)
	e := newEngine(t, "go-reader", p.Ready(), engineOptions{lease: unverified})
	type request struct {
		params *lease.Params
		want   [][][]byte
		local  []int
	}
	var requests []request
	var all []*lease.Params
	next := 3
	for i, length := range []int{1, 31, 32, 33, 200, 256} {
		params, o := prefill(t, p, fmt.Sprint("bytes", i), prompt(length))
		ids := params.RemoteBlockIDs[0]
		require.Len(t, ids, blockCount(length, p.Ready().BlockSize))
		require.Equal(t, length, params.RemoteNumTokens)
		require.Equal(t, "p", params.RemoteEngineID)
		require.Len(t, o.Blocks, len(ids))
		requests = append(requests, request{params, p.Blocks(ids), sequence(next, len(ids))})
		all = append(all, params)
		next += len(ids)
	}
	v.keep(t, all...)
	for i, r := range requests {
		e.pull(t, fmt.Sprint("local", i), r.params, r.local...)
	}
	for i, r := range requests {
		id := fmt.Sprint("local", i)
		e.until(t, id, func() bool {
			require.NotContains(t, e.failed, id)
			return e.ran[id]
		})
		require.Equal(t, r.want, e.blocks(r.local), "%s", id)
		p.Freed(r.params.RemoteRequestID)
	}
	require.NotEqual(t, make([]byte, len(requests[4].want[0][0])), requests[4].want[0][0], "vLLM computed something")
	s := e.w.Stats()
	require.EqualValues(t, len(requests), s.Unverified)
	require.EqualValues(t, len(requests), s.Reads)
}

func (v pair) goHeartbeats(t *testing.T) {
	p := v.p.For(t)
	e := newEngine(t, "go-waits", p.Ready(), engineOptions{lease: func(c *lease.Config) {
		c.Verification, c.Duration = lease.VerifyOffered, peerLease*time.Second
	}})
	params, _ := prefill(t, p, "kept", prompt(100))
	want := p.Blocks(params.RemoteBlockIDs[0])
	e.arrive(t, "local", params)
	start := time.Now()
	for time.Since(start) < (3*peerLease+2)*time.Second {
		require.True(t, pinned(t, p, params.RemoteRequestID), "after %s", time.Since(start))
		time.Sleep(500 * time.Millisecond)
	}
	e.read(t, "local", params, 1, 2, 3, 4)
	require.Equal(t, want, e.blocks([]int{1, 2, 3, 4}))
	p.Freed(params.RemoteRequestID)
	require.GreaterOrEqual(t, e.w.Stats().HeartbeatsSent, int64(3*peerLease))
}

func (v pair) goAborts(t *testing.T) {
	p := v.p.For(t)
	params, _ := prefill(t, p, "aborted", prompt(70))
	v.keep(t, params)
	e := newEngine(t, "go-aborts", p.Ready(), engineOptions{})
	e.arrive(t, "local", params)
	require.True(t, pinned(t, p, params.RemoteRequestID))
	e.giveUp(t, "local")
	p.Freed(params.RemoteRequestID)
	require.Zero(t, e.w.Stats().Reads)
}

func (v pair) goAfterExpiry(t *testing.T) {
	p := v.p.For(t)
	params, _ := prefill(t, p, "expired", prompt(70))
	strict := newEngine(t, "go-strict", p.Ready(), engineOptions{})
	f := strict.refused(t, "local", params, 1, 2, 3)
	require.ErrorIs(t, f.Err, lease.ErrUnverifiable)
	require.Equal(t, lease.CauseUnverifiable, f.Cause)
	require.Zero(t, strict.w.Stats().Reads)

	late, _ := prefill(t, p, "late", prompt(70))
	want := p.Blocks(late.RemoteBlockIDs[0])
	p.Freed(late.RemoteRequestID) // nobody renews it
	e := newEngine(t, "go-late", p.Ready(), engineOptions{lease: unverified})
	// Without the check nothing tells that the lease is over. The engine has not reused the blocks yet.
	e.read(t, "local", late, 1, 2, 3)
	require.Equal(t, want, e.blocks([]int{1, 2, 3}))
	require.EqualValues(t, 1, e.w.Stats().Unverified)
}

// served is a request whose blocks p computed and a Go owner publishes.
type served struct {
	tokens []int
	answer []int // of an instance that had the prompt alone
	blocks []int // of the Go owner
	bytes  [][][]byte
	params *lease.Params
}

// serve has p compute a prompt, writes its blocks into the Go owner's memory from block first on and publishes them there.
func (v pair) serve(t *testing.T, e *engine, id string, length, answer, first int) served {
	t.Helper()
	p := v.p.For(t)
	s := served{tokens: prompt(length)}
	p.Generate(id+"-alone", s.tokens, answer, nil)
	s.answer = p.Output(id + "-alone").Tokens
	require.Len(t, s.answer, answer)
	params, _ := prefill(t, p, id+"-prefill", s.tokens)
	ids := params.RemoteBlockIDs[0]
	s.blocks, s.bytes = sequence(first, len(ids)), p.Blocks(ids)
	e.fill(s.blocks, s.bytes)
	s.params = e.publish(t, id, length, s.blocks...)
	return s
}

// hasRead checks what a decoder made of a served request.
func (s served) hasRead(t *testing.T, d *Peer, o Output) {
	t.Helper()
	require.Equal(t, "length", o.FinishReason)
	require.Equal(t, s.answer, o.Tokens)
	full := len(s.tokens) / d.Ready().BlockSize
	if full == 0 {
		return
	}
	require.Equal(t, s.bytes[:full], d.Blocks(blockIDs(o, full))) // the decoder has gone on writing into the last block
}

func (v pair) vllmReads(t *testing.T) {
	d := v.d.For(t)
	e := newEngine(t, "go-owner", d.Ready(), engineOptions{})
	first := 1
	var all []served
	for i, length := range []int{5, 64, 100, 200} {
		s := v.serve(t, e, fmt.Sprint("req:", i), length, 12, first)
		first += len(s.blocks)
		all = append(all, s)
	}
	for i, s := range all {
		d.Generate(fmt.Sprint("read", i), s.tokens, 12, s.params)
	}
	for i, s := range all {
		s.hasRead(t, d, d.Output(fmt.Sprint("read", i)))
		require.Equal(t, lease.ReasonRead, e.ended(t, fmt.Sprint("req:", i)))
	}
	e.with(func(time.Time) {
		require.EqualValues(t, 1, e.side.Stats().Answered, "one handshake serves them all")
		s := e.w.Stats().Leases
		require.EqualValues(t, len(all), s.NoncelessReadCompletes, "vLLM 0.32 leaves our nonce out")
		require.Zero(t, s.MalformedNotifications)
		require.Zero(t, s.UnmatchedReadCompletes)
	})
}

func (v pair) vllmHeartbeats(t *testing.T) {
	const ours = 3 * time.Second // the decoder's heartbeats come every second, and one is worth two
	d := v.d.For(t)
	e := newEngine(t, "go-waited-for", d.Ready(), engineOptions{lease: func(c *lease.Config) { c.Duration = ours }})

	// The decoder runs four requests at a time, so what comes now waits.
	var busy []string
	for i := range 40 {
		busy = append(busy, fmt.Sprint("busy", i))
		d.Generate(busy[i], prompt(3), 450, nil)
	}
	aborted := v.serve(t, e, "aborted", 100, 4, 1)
	d.Generate("aborted", aborted.tokens, 4, aborted.params)
	read := v.serve(t, e, "read", 100, 4, 10)
	d.Generate("read", read.tokens, 4, read.params)
	start := time.Now()
	e.until(t, "three leases", func() bool {
		require.Empty(t, e.freed, "after %s", time.Since(start))
		return time.Since(start) > 3*ours+time.Second
	})
	e.with(func(time.Time) { require.NotZero(t, e.w.Stats().Leases.Renewals) })

	d.Abort("aborted")
	require.Equal(t, lease.ReasonRead, e.ended(t, "aborted"))
	for _, id := range busy {
		d.Abort(id)
	}
	read.hasRead(t, d, d.Output("read"))
	require.Equal(t, lease.ReasonRead, e.ended(t, "read"))
}

func (v pair) hashMismatch(t *testing.T) {
	p, d := v.p.For(t), v.d.For(t)
	other := func(c *rdma.WorkerConfig) { c.Compatibility = "0123" }
	params, _ := prefill(t, p, "other-hash", prompt(40))
	e := newEngine(t, "go-other-hash", p.Ready(), engineOptions{lease: unverified, worker: other})
	f := e.refused(t, "local", params, 1, 2)
	require.ErrorIs(t, f.Err, lease.ErrHandshake)
	require.ErrorContains(t, f.Err, p.Ready().CompatibilityHash)
	require.ErrorContains(t, f.Err, "0123")

	// Blocks that nobody has had to do with, and that P holds until they are read.
	params, _ = prefill(t, p, "any-hash", prompt(41))
	want := p.Blocks(params.RemoteBlockIDs[0])
	lax := newEngine(t, "go-any-hash", p.Ready(), engineOptions{lease: unverified, worker: func(c *rdma.WorkerConfig) {
		other(c)
		c.AnyCompatibility = true
	}})
	lax.read(t, "local", params, 1, 2)
	require.Equal(t, want, lax.blocks([]int{1, 2}))
	p.Freed(params.RemoteRequestID)

	owner := newEngine(t, "go-owner-other-hash", d.Ready(), engineOptions{worker: other})
	s := v.serve(t, owner, "other", 40, 2, 1)
	d.Generate("other-hash", s.tokens, 2, s.params)
	require.Equal(t, "error", d.Output("other-hash").FinishReason)
	owner.with(func(time.Time) { require.Empty(t, owner.freed, "vLLM tells an owner nothing about a load that failed") })
}
