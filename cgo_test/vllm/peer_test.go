//go:build interop_vllm

package vllm

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

// golden is testdata/kv/tiny-llama.json.
type golden struct {
	Prompt []int `json:"prompt"`
	Greedy []int `json:"greedy_tokens"`
}

// vllmReadsVLLM is the harness itself: two engines, and nothing of this library. What holds here is what the other items
// may rely on.
func (v pair) vllmReadsVLLM(t *testing.T) {
	p, d := v.p.For(t), v.d.For(t)
	var g golden
	require.NoError(t, json.Unmarshal(goldenFile(t, "kv/tiny-llama.json"), &g))
	params, o := prefill(t, p, "golden", g.Prompt)
	require.True(t, pinned(t, p, params.RemoteRequestID), "the lease pins the request")
	want := p.Blocks(params.RemoteBlockIDs[0])

	d.Generate("golden", g.Prompt, 16, o.Params)
	d.Wire("transfer ended", func(w Wire) bool { return w.State == "DONE" })
	decode := d.Output("golden")
	require.Equal(t, g.Greedy, decode.Tokens)
	p.Freed(params.RemoteRequestID)
	require.False(t, pinned(t, p, params.RemoteRequestID))

	full := len(want) - 1 // the decoder has gone on writing into the last block
	require.Equal(t, want[:full], d.Blocks(blockIDs(decode, full)))
}
