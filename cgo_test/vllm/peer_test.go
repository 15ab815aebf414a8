//go:build interop_vllm

package vllm

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// golden is testdata/kv/tiny-llama.json.
type golden struct {
	Prompt []int `json:"prompt"`
	Greedy []int `json:"greedy_tokens"`
}

func readGolden(t *testing.T) golden {
	text, err := os.ReadFile("../../testdata/kv/tiny-llama.json")
	require.NoError(t, err)
	var g golden
	require.NoError(t, json.Unmarshal(text, &g))
	return g
}

// The harness itself: two engines, and nothing of this library. What holds here is what the other tests may rely on.
func TestVLLMReadsVLLM(t *testing.T) {
	g := readGolden(t)
	p := Start(t, Options{Role: "kv_producer", EngineID: "p"})
	d := Start(t, Options{Role: "kv_consumer", EngineID: "d", Args: []string{"--wire"}})
	require.Equal(t, p.Ready().CompatibilityHash, d.Ready().CompatibilityHash)

	p.Generate("a", g.Prompt, 1, map[string]any{"do_remote_decode": true})
	prefill := p.Output("a")
	var params struct {
		BlockIDs  [][]int `json:"remote_block_ids"`
		RequestID string  `json:"remote_request_id"`
	}
	require.NoError(t, json.Unmarshal(prefill.Params, &params))
	require.Equal(t, []string{params.RequestID}, p.Status().Requests, "the lease pins the request")
	want := p.Blocks(params.BlockIDs[0])

	d.Generate("a", g.Prompt, 16, prefill.Params)
	d.Wire("transfer ended", func(w Wire) bool { return w.State == "DONE" })
	decode := d.Output("a")
	require.Equal(t, g.Greedy, decode.Tokens)
	p.Freed(params.RequestID)
	require.Empty(t, p.Status().Requests)

	var ids []int
	for _, b := range decode.Blocks {
		ids = append(ids, b.ID)
	}
	got := d.Blocks(ids)
	// The decoder has gone on writing into the last block.
	require.Equal(t, want[:len(want)-1], got[:len(want)-1])
}
