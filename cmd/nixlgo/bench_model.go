package main

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// modelShape is what the size of a model's KV cache depends on.
type modelShape struct {
	Layers  int
	KVHeads int
	HeadDim int
	Latent  int // elements that MLA keeps of a token, instead of keys and values of heads; 0: no MLA
}

// modelShapes are public models by name, with the values of their config.json: num_hidden_layers, num_key_value_heads,
// head_dim, and kv_lora_rank + qk_rope_head_dim of those with MLA.
var modelShapes = map[string]modelShape{
	"deepseek-r1":    {Layers: 61, Latent: 512 + 64},
	"gpt-oss-20b":    {Layers: 24, KVHeads: 8, HeadDim: 64},
	"gpt-oss-120b":   {Layers: 36, KVHeads: 8, HeadDim: 64},
	"llama-3.1-8b":   {Layers: 32, KVHeads: 8, HeadDim: 128},
	"llama-3.1-70b":  {Layers: 80, KVHeads: 8, HeadDim: 128},
	"llama-3.1-405b": {Layers: 126, KVHeads: 8, HeadDim: 128},
	"qwen3-8b":       {Layers: 36, KVHeads: 8, HeadDim: 128},
	"qwen3-32b":      {Layers: 64, KVHeads: 8, HeadDim: 128},
}

func modelNames() string { return strings.Join(slices.Sorted(maps.Keys(modelShapes)), ", ") }

// kvTypes are the bytes of an element by kvbench's names of its quantisation modes.
var kvTypes = map[string]int{"fp8": 1, "int8": 1, "fp16": 2, "bfloat16": 2}

// workload is how a model is served, in kvbench's words.
type workload struct {
	model, file string
	tp, pp      int
	isl         int
	requests    int
	pageSize    int
	pattern     string
	kvType      string
}

func (w *workload) flags(f *pflag.FlagSet) {
	f.StringVar(&w.model, "model", "", "block and batch size of a model's KV cache, as kvbench computes them: "+modelNames())
	f.StringVar(&w.file, "model-file", "", "the same of a model's config.json, or of a model file of kvbench")
	f.IntVar(&w.tp, "tp", 1, "tensor parallelism: the ranks that the KV heads are spread over")
	f.IntVar(&w.pp, "pp", 1, "pipeline parallelism, which counts for --access-pattern block")
	f.IntVar(&w.isl, "isl", 8192, "tokens of a request")
	f.IntVar(&w.requests, "num-requests", 1, "requests in one transfer")
	f.IntVar(&w.pageSize, "page-size", 16, "tokens of a block")
	f.StringVar(&w.pattern, "access-pattern", "layer", "layer: a block is of one layer, block: of all layers of a pipeline stage")
	f.StringVar(&w.kvType, "kvcache-quant-mode", "bfloat16", "type of an element: fp8, int8, fp16, bfloat16")
}

// workloadFlags are those that mean nothing without a model.
var workloadFlags = []string{"tp", "pp", "isl", "num-requests", "page-size", "access-pattern", "kvcache-quant-mode"}

// transferShape is what one transfer moves.
type transferShape struct {
	Layers     int `json:"layers"`      // equal parts of Batch, 1 where there are none
	Batch      int `json:"batch"`       // blocks of all layers
	BlockBytes int `json:"block_bytes"` // of one layer
}

func (s transferShape) bytes() int { return s.Batch * s.BlockBytes }

// shape is what kvbench computes (benchmark/kvbench/models and commands/plan.py in ai-dynamo/nixl): the block is that of one
// rank, and the batch holds the blocks of all ranks, for one pair of processes moves them. Where kvbench would cut off a
// fraction of a head or a byte, this is an error.
func (w *workload) shape() (transferShape, error) {
	fail := func(format string, a ...any) (transferShape, error) { return transferShape{}, fmt.Errorf(format, a...) }
	m, ok := modelShapes[w.model]
	switch {
	case w.model != "" && w.file != "":
		return fail("--model and --model-file contradict each other")
	case w.file != "":
		var err error
		if m, err = readModel(w.file); err != nil {
			return fail("--model-file %s: %w", w.file, err)
		}
	case !ok:
		return fail("--model %q is not known; want one of %s, or use --model-file", w.model, modelNames())
	}
	const most = 1 << 24
	if err := checkBounds(bound{"tp", w.tp, 1, most}, bound{"pp", w.pp, 1, most}, bound{"isl", w.isl, 1, most}, bound{"num-requests", w.requests, 1, most},
		bound{"page-size", w.pageSize, 1, most}); err != nil {
		return transferShape{}, err
	}
	element, ok := kvTypes[w.kvType]
	if !ok {
		return fail("--kvcache-quant-mode %q: want fp8, int8, fp16 or bfloat16", w.kvType)
	}
	token := m.Latent * element // bytes of one layer
	if m.Latent == 0 {
		token = 2 * m.KVHeads * m.HeadDim * element
		if m.KVHeads%w.tp != 0 {
			return fail("--tp %d does not divide the model's %d KV heads", w.tp, m.KVHeads)
		}
	}
	if token%w.tp != 0 {
		return fail("--tp %d does not divide the %d bytes of a token and layer", w.tp, token)
	}
	if w.pp > m.Layers {
		return fail("--pp %d is more than the model's %d layers", w.pp, m.Layers)
	}
	s := transferShape{Layers: 1, BlockBytes: token / w.tp * w.pageSize}
	switch w.pattern {
	case "layer":
	case "block":
		s.BlockBytes *= (m.Layers + w.pp - 1) / w.pp
	default:
		return fail("--access-pattern %q: want layer or block", w.pattern)
	}
	s.Batch = (token*m.Layers*w.isl*w.requests + s.BlockBytes - 1) / s.BlockBytes
	if w.pattern == "layer" && s.Batch%m.Layers == 0 {
		s.Layers = m.Layers
	}
	return s, nil
}

// readModel reads the config.json of a model, or a model file of kvbench, which is YAML as JSON is.
func readModel(path string) (modelShape, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return modelShape{}, err
	}
	var c struct {
		HiddenLayers   int `yaml:"num_hidden_layers"`
		Hidden         int `yaml:"hidden_size"`
		AttentionHeads int `yaml:"num_attention_heads"`
		KVHeads        int `yaml:"num_key_value_heads"`
		HeadDim        int `yaml:"head_dim"`
		LoraRank       int `yaml:"kv_lora_rank"`
		RopeDim        int `yaml:"qk_rope_head_dim"`

		Layers       int `yaml:"num_layers"`
		MHAHeads     int `yaml:"num_query_heads_with_mha"`
		GroupQueries int `yaml:"gqa_num_queries_in_group"`
		BenchKVHeads int `yaml:"num_kv_heads"`
		QueryHeadDim int `yaml:"query_head_dimension"`
		RopeMLA      int `yaml:"rope_mla_dimension"`
		LatentMLA    int `yaml:"mla_latent_vector_dimension"`
	}
	if err := yaml.Unmarshal(b, &c); err != nil {
		text, _, _ := strings.Cut(err.Error(), " into ") // what follows is Go
		return modelShape{}, fmt.Errorf("it is no model's configuration in JSON or YAML: %s", text)
	}
	m := modelShape{Layers: cmp.Or(c.HiddenLayers, c.Layers), KVHeads: cmp.Or(c.KVHeads, c.BenchKVHeads), HeadDim: cmp.Or(c.HeadDim, c.QueryHeadDim)}
	if c.LoraRank > 0 {
		m.Latent = c.LoraRank + c.RopeDim
	} else if c.LatentMLA > 0 {
		m.Latent = c.LatentMLA + c.RopeMLA
	}
	if m.KVHeads == 0 && c.GroupQueries > 0 {
		m.KVHeads = c.MHAHeads / c.GroupQueries
	}
	m.KVHeads = cmp.Or(m.KVHeads, c.AttentionHeads) // no grouped queries
	if m.HeadDim == 0 && c.AttentionHeads > 0 {
		m.HeadDim = c.Hidden / c.AttentionHeads
	}
	const most = 1 << 20
	for _, v := range []int{m.Layers, m.KVHeads, m.HeadDim, m.Latent} {
		if v < 0 || v > most {
			return m, fmt.Errorf("a dimension of %d", v)
		}
	}
	if m.Layers == 0 || m.Latent == 0 && (m.KVHeads == 0 || m.HeadDim == 0) {
		return m, errors.New("it does not tell the layers, KV heads and head dimension (num_hidden_layers, num_key_value_heads and head_dim of a config.json; " +
			"num_layers, num_query_heads_with_mha, gqa_num_queries_in_group and query_head_dimension of kvbench)")
	}
	return m, nil
}
