//go:build interop_vllm

package vllm

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

// Two ranks, each with one of the model's two KV heads. Both are pinned to one core and wait for each other there, so that a
// token takes seconds: few are asked for.
const twoRanks = `{"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}`

// goReadsTP has a Go engine of one rank read both ranks of a vLLM; a vLLM of one rank then goes on from what Go holds.
func (v pair) goReadsTP(t *testing.T, two *Peer) {
	p, d := v.p.For(t), v.d.For(t)
	two = two.For(t)
	two.Ready()
	e := newEngine(t, "go-of-tp2", d.Ready(), engineOptions{lease: unverified, worker: func(c *rdma.WorkerConfig) { c.KV.Heads = 2 }})
	tokens := prompt(100)
	p.Generate("tp-alone", tokens, 8, nil)
	answer := p.Output("tp-alone").Tokens
	params, _ := prefill(t, two, "tp-prefill", tokens)
	require.Equal(t, 2, params.TPSize)
	e.arrive(t, "local", params)
	e.read(t, "local", params, 1, 2, 3, 4)
	two.Freed(params.RemoteRequestID)
	require.EqualValues(t, 2, e.w.Stats().Reads, "one a rank")

	d.Generate("of-tp2", tokens, 8, e.publish(t, "of-tp2", 100, 1, 2, 3, 4))
	require.Equal(t, answer, d.Output("of-tp2").Tokens)
}

// tpReadsGo has both ranks of a vLLM read their heads from a Go engine of one rank, which is free when both have said so.
func (v pair) tpReadsGo(t *testing.T, two *Peer) {
	two = two.For(t)
	two.Ready()
	e := newEngine(t, "go-for-tp2", v.d.For(t).Ready(), engineOptions{})
	s := v.serve(t, e, "for-tp2", 100, 3, 1)
	two.Generate("for-tp2", s.tokens, 3, s.params)
	require.Equal(t, s.answer, two.Output("for-tp2").Tokens)
	require.Equal(t, lease.ReasonRead, e.ended(t, "for-tp2"))
	require.EqualValues(t, 2, e.w.Stats().Leases.ReadCompletes)
}
