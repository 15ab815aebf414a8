package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The rows marked kvbench are printed in the README of benchmark/kvbench in ai-dynamo/nixl. The others are worked out by
// hand in their comments.
func TestModelShapesAreKVBench(t *testing.T) {
	r1 := workload{model: "deepseek-r1", tp: 1, pp: 16, isl: 10000, requests: 10, pageSize: 256, pattern: "block", kvType: "fp8"}
	for _, c := range []struct {
		name string
		w    workload
		want transferShape
	}{
		{"kvbench, block, pp 16", r1, transferShape{1, 5958, 589824}},
		{"kvbench, layer, pp 16", with(r1, func(w *workload) { w.pattern = "layer" }), transferShape{1, 23829, 147456}},
		{"kvbench, pp 32, 100 requests", with(r1, func(w *workload) { w.pp, w.requests = 32, 100 }), transferShape{1, 119141, 294912}},
		{"kvbench, pp 8, pages of 512", with(r1, func(w *workload) { w.pp, w.pageSize = 8, 512 }), transferShape{1, 1490, 2359296}},
		// 8 heads × 128 × 2 (K and V) × 2 bytes × 16 tokens = 64 KiB; 32 layers × 8192/16 pages = 16384.
		{"llama 8b", workload{model: "llama-3.1-8b", tp: 1, pp: 1, isl: 8192, requests: 1, pageSize: 16, pattern: "layer", kvType: "bfloat16"},
			transferShape{32, 16384, 65536}},
		// 1 of 8 heads: 8 KiB; 80 layers × 512 pages × 8 ranks = 327680.
		{"llama 70b, tp 8", workload{model: "llama-3.1-70b", tp: 8, pp: 1, isl: 8192, requests: 1, pageSize: 16, pattern: "layer", kvType: "bfloat16"},
			transferShape{80, 327680, 8192}},
		// 100 tokens are 6.25 pages: 200 layers' worth of 32 rounds up from 200.0.
		{"isl is no multiple of a page", workload{model: "llama-3.1-8b", tp: 1, pp: 1, isl: 100, requests: 1, pageSize: 16, pattern: "layer", kvType: "fp16"},
			transferShape{1, 200, 65536}},
		// 8 × 64 × 2 × 1 byte × 16 tokens × 36 layers = 589824; 1024/16 pages.
		{"gpt-oss, block", workload{model: "gpt-oss-120b", tp: 1, pp: 1, isl: 1024, requests: 1, pageSize: 16, pattern: "block", kvType: "fp8"},
			transferShape{1, 64, 589824}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := c.w.shape()
			require.NoError(t, err)
			require.Equal(t, c.want, got)
		})
	}
}

func with(w workload, change func(*workload)) workload {
	change(&w)
	return w
}

// Llama's and DeepSeek's are the model files of kvbench, Qwen's the public config.json, cut.
func TestModelFilesTellTheSameAsThePresets(t *testing.T) {
	for name, text := range map[string]string{
		"llama-3.1-70b": "model: 'LLAMA3.1_70B'\nnum_layers: 80\nnum_query_heads_with_mha: 64\nquery_head_dimension: 128\ngqa_num_queries_in_group: 8\nnum_model_params: 70000000000",
		"deepseek-r1": "model: 'DEEPSEEK_R1'\nnum_layers: 61\nnum_query_heads: 128\nquery_head_dimension: 128\nembedding_dimension: 7168\nrope_mla_dimension: 64\n" +
			"mla_latent_vector_dimension: 512\nnum_model_params: 671000000000",
		"gpt-oss-120b": "model_name: 'GPT_OSS_120B'\nnum_layers: 36\nnum_query_heads: 64\nnum_kv_heads: 8\nquery_head_dimension: 64\n",
		"qwen3-8b":     `{"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8}`,
		"llama-3.1-8b": `{"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}`,
	} {
		path := filepath.Join(t.TempDir(), "model")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		got, err := readModel(path)
		require.NoError(t, err, name)
		want := modelShapes[name]
		if want.Latent > 0 { // heads do not count then
			got.KVHeads, got.HeadDim = 0, 0
		}
		require.Equal(t, want, got, name)
	}
}

func TestModelsThatMakeNoSenseAreRefused(t *testing.T) {
	good := workload{model: "llama-3.1-8b", tp: 1, pp: 1, isl: 1, requests: 1, pageSize: 1, pattern: "layer", kvType: "fp8"}
	_, err := good.shape()
	require.NoError(t, err)
	bad := filepath.Join(t.TempDir(), "bad.json")
	require.NoError(t, os.WriteFile(bad, []byte(`{"num_hidden_layers": 3}`), 0o600))
	prose := filepath.Join(t.TempDir(), "prose")
	require.NoError(t, os.WriteFile(prose, []byte("a few words"), 0o600))
	for want, change := range map[string]func(*workload){
		"contradict":           func(w *workload) { w.file = bad },
		`"gpt-2"`:              func(w *workload) { w.model = "gpt-2" },
		"--tp 16":              func(w *workload) { w.tp = 16 },
		"--tp 0":               func(w *workload) { w.tp = 0 },
		"--pp 33":              func(w *workload) { w.pp = 33 },
		"--isl -1":             func(w *workload) { w.isl = -1 },
		"--page-size 0":        func(w *workload) { w.pageSize = 0 },
		"--num-requests 0":     func(w *workload) { w.requests = 0 },
		`--access-pattern "x"`: func(w *workload) { w.pattern = "x" },
		"kvcache-quant-mode":   func(w *workload) { w.kvType = "q4" },
		"num_key_value_heads":  func(w *workload) { w.model, w.file = "", bad },
		"no model's config":    func(w *workload) { w.model, w.file = "", prose },
		"no such file":         func(w *workload) { w.model, w.file = "", bad+"x" },
	} {
		w := with(good, change)
		_, err := w.shape()
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "struct")
	}
}
