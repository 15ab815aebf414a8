//go:build interop_vllm

package vllm

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

// Prefix hits, other block sizes, and both sides of a second turn.

func (v pair) prefixHits(t *testing.T) {
	p, d := v.p.For(t), v.d.For(t)
	e := newEngine(t, "go-prefix", d.Ready(), engineOptions{})
	s := v.serve(t, e, "whole", 200, 8, 1)
	d.Generate("prefix-1", s.tokens, 8, s.params)
	s.hasRead(t, d, d.Output("prefix-1"))

	// The decoder has cached the six blocks that the prompt fills, so it wants the seventh.
	again := e.publish(t, "again", 200, sequence(20, 7)...)
	e.fill(sequence(20, 7), s.bytes)
	d.Generate("prefix-2", s.tokens, 8, again)
	require.Equal(t, s.answer, d.Output("prefix-2").Tokens)
	require.Equal(t, lease.ReasonRead, e.ended(t, "again"))
	n := d.Ready().NumBlocks
	d.Wire("make transfer", func(w Wire) bool { return len(w.Remote) == 2 && w.Remote[0] == 26 && w.Remote[1] == n+26 })

	// And the other way: Go lacks the last two.
	params, _ := prefill(t, p, "prefix-3", prompt(200))
	want := p.Blocks(params.RemoteBlockIDs[0])
	reader := newEngine(t, "go-lacks", p.Ready(), engineOptions{lease: unverified})
	reader.read(t, "local", params, 3, 4)
	require.Equal(t, want[5:], reader.blocks([]int{3, 4}))
	require.Equal(t, make([]byte, 16384), reader.block(0, 5))
	p.Freed(params.RemoteRequestID)
}

// A page of vLLM's CPU attention holds the keys of all its tokens and then the values, in an order that the CPU decides, so
// pages of another size are not its pages' parts: a vLLM with blocks of 64 tokens that reads a vLLM with 32 decodes nonsense,
// without an error. What it makes of Go's blocks has to be the same.
func (v pair) largerBlocks(t *testing.T, d *Peer) {
	p := v.p.For(t)
	d = d.For(t)
	require.Equal(t, 64, d.Ready().BlockSize)
	e := newEngine(t, "go-32", p.Ready(), engineOptions{worker: func(c *rdma.WorkerConfig) { c.Compatibility = "0123" }})
	first := 1
	for i, length := range []int{64, 128, 200, 250} {
		tokens := prompt(length)
		id := fmt.Sprint("32-", i)
		params, prefilled := prefill(t, p, id+"-prefill", tokens)
		bytes := p.Blocks(params.RemoteBlockIDs[0])
		d.Generate(id+"-vllm", tokens, 12, prefilled.Params)
		want := d.Output(id + "-vllm")
		require.Equal(t, "length", want.FinishReason)
		p.Freed(params.RemoteRequestID)
		wantBytes := d.Blocks(blockIDs(want, length/64))

		blocks := sequence(first, len(bytes))
		first += len(blocks)
		e.fill(blocks, bytes)
		d.Generate(id, tokens, 12, e.publish(t, id, length, blocks...))
		got := d.Output(id)
		require.Equal(t, want.Tokens, got.Tokens, "%d tokens", length)
		require.Equal(t, wantBytes, d.Blocks(blockIDs(got, length/64)))
		require.Equal(t, lease.ReasonRead, e.ended(t, id))
	}
}

// blockIDs are the first n blocks of a request.
func blockIDs(o Output, n int) (ids []int) {
	for _, b := range o.Blocks[:n] {
		ids = append(ids, b.ID)
	}
	return ids
}

// Go does not read what it would have to cut between tokens and cannot.
func (v pair) largerBlocksInGo(t *testing.T, d *Peer) {
	p := v.p.For(t)
	e := newEngine(t, "go-64", d.For(t).Ready(), engineOptions{lease: unverified, worker: func(c *rdma.WorkerConfig) { c.KV.Heads = 2 }})
	params, _ := prefill(t, p, "64", prompt(64))
	f := e.refused(t, "local", params, 1)
	require.ErrorIs(t, f.Err, lease.ErrHandshake)
	require.ErrorContains(t, f.Err, "block_size")
	require.ErrorContains(t, f.Err, "CPU_ATTN")
	require.Zero(t, e.w.Stats().Reads)
}

// bidirectional is vLLM's mode in which a decoder keeps its blocks for the next turn.
func bidirectional(c *lease.Config) { c.Verification, c.Bidirectional = lease.VerifyOffered, true }

// secondTurn lets the vLLM engine b decode what a Go engine serves, and returns what b keeps for the next turn.
func (v pair) secondTurn(t *testing.T, b *Peer, e *engine, id string) *lease.Params {
	t.Helper()
	s := v.serve(t, e, id, 200, 40, 1)
	b.Generate(id, s.tokens, 40, s.params)
	o := b.Output(id)
	require.Equal(t, s.answer, o.Tokens)
	require.Equal(t, lease.ReasonRead, e.ended(t, id))
	back := paramsOf(t, o)
	require.True(t, back.DoRemoteDecode)
	require.False(t, back.DoRemotePrefill)
	require.Equal(t, "b", back.RemoteEngineID)
	require.NotNil(t, back.RemoteBlocksExpiry)
	require.True(t, pinned(t, b, back.RemoteRequestID))
	return back
}

func (v pair) goReadsBack(t *testing.T, b *Peer) {
	b = b.For(t)
	e := newEngine(t, "go-turn", b.Ready(), engineOptions{lease: bidirectional})
	back := v.secondTurn(t, b, e, "turn")
	ids := back.RemoteBlockIDs[0]
	want := b.Blocks(ids)
	local := sequence(30, len(ids))
	e.arrive(t, "turn-2", back)
	e.read(t, "turn-2", back, local...)
	require.Equal(t, want, e.blocks(local))
	b.Freed(back.RemoteRequestID)
	require.Zero(t, e.w.Stats().HeartbeatsSent, "a decoder's blocks are not renewed")
}

func (v pair) goDeclines(t *testing.T, b *Peer) {
	b = b.For(t)
	e := newEngine(t, "go-late-turn", b.Ready(), engineOptions{lease: bidirectional})
	first := v.secondTurn(t, b, e, "late-turn-0")
	e.read(t, "connect", first, sequence(50, len(first.RemoteBlockIDs[0]))...)
	reads := e.w.Stats().Reads
	back := v.secondTurn(t, b, e, "late-turn")
	expiry := epoch(t).Add(time.Duration(*back.RemoteBlocksExpiry * float64(time.Second)))
	for time.Until(expiry) > lease.ExpiryMargin {
		time.Sleep(50 * time.Millisecond)
	}
	f := e.refused(t, "late-turn-2", back, sequence(30, len(back.RemoteBlockIDs[0]))...)
	require.ErrorIs(t, f.Err, lease.ErrExpired)
	require.Equal(t, reads, e.w.Stats().Reads)
	b.Freed(back.RemoteRequestID)
}

// goTurn has a Go engine read a prompt from the vLLM engine b as a decoder does, and finish with its blocks kept for the
// next turn.
func goTurn(t *testing.T, b *Peer, e *engine, id string, tokens []int) (*lease.Params, []int) {
	t.Helper()
	params, _ := prefill(t, b, id+"-prefill", tokens)
	blocks := sequence(1, len(params.RemoteBlockIDs[0]))
	e.arrive(t, id, params)
	e.read(t, id, params, blocks...)
	b.Freed(params.RemoteRequestID)
	var back *lease.Params
	e.with(func(now time.Time) {
		var err error
		back, _, err = e.sched.RequestFinished(now, id, lease.StatusStopped, [][]int{blocks}, len(tokens))
		require.NoError(t, err)
	})
	require.True(t, back.DoRemoteDecode)
	require.NotNil(t, back.RemoteBlocksExpiry)
	return back, blocks
}

func (v pair) vllmReadsBack(t *testing.T, b *Peer) {
	b = b.For(t)
	e := newEngine(t, "go-decoder", b.Ready(), engineOptions{lease: bidirectional})
	tokens := prompt(200)
	back, blocks := goTurn(t, b, e, "decoder", tokens)
	next := append(append([]int{}, tokens...), prompt(30)...)
	b.Generate("next-alone", next, 1, nil)
	answer := b.Output("next-alone").Tokens
	b.Generate("next", next, 1, back)
	o := b.Output("next")
	require.Equal(t, answer, o.Tokens)
	require.Equal(t, lease.ReasonRead, e.ended(t, "decoder"))
	// Of the seventh the engine fills the rest.
	require.Equal(t, e.blocks(blocks[:6]), b.Blocks(blockIDs(o, 6)))
}

func (v pair) vllmDeclines(t *testing.T, b *Peer) {
	b = b.For(t)
	// vLLM wants five seconds to be left.
	e := newEngine(t, "go-short", b.Ready(), engineOptions{lease: func(c *lease.Config) {
		bidirectional(c)
		c.DecoderTTL = 4 * time.Second
	}})
	tokens := prompt(200)
	back, _ := goTurn(t, b, e, "short", tokens)
	b.Generate("declined", append(append([]int{}, tokens...), prompt(30)...), 1, back)
	require.Equal(t, "error", b.Output("declined").FinishReason)
	require.Equal(t, lease.ReasonExpired, e.ended(t, "short"))
	require.Zero(t, e.w.Stats().Leases.ReadCompletes)
}
