package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/nixlgo/nixlgo/lease/kvparams"
)

// apiServer is an OpenAI-style server.
type apiServer struct {
	role    string // P or D
	base    string // URL, without /v1
	metrics string // URL
	model   string
	api     kvparams.API
}

// What --api takes.
const (
	apiCompletions = "completions"
	apiChat        = "chat"
)

// newAPIServer takes the URL of a server, with or without /v1.
func newAPIServer(role, base, metrics string, c *checkConfig) *apiServer {
	base = strings.TrimSuffix(strings.TrimRight(base, "/"), "/v1")
	api := kvparams.Completions
	if c.api == apiChat {
		api = kvparams.ChatCompletions
	}
	return &apiServer{role, base, cmp.Or(metrics, base+"/metrics"), c.model, api}
}

// findModel asks for the model that the server has, unless the caller named one.
func (e *apiServer) findModel(ctx context.Context) error {
	if e.model != "" {
		return nil
	}
	text, err := request(ctx, http.MethodGet, e.base+"/v1/models", nil, "")
	if err != nil {
		return fmt.Errorf("%s: %w", e.role, err)
	}
	var models struct {
		Data []struct{ ID string }
	}
	if err := json.Unmarshal(text, &models); err != nil || len(models.Data) == 0 {
		return fmt.Errorf("%s: %s/v1/models names no model: give --model", e.role, e.base)
	}
	e.model = models.Data[0].ID
	return nil
}

// completion is the part of an answer that is looked at.
type completion struct {
	Choices []struct {
		Text     string
		Logprobs *struct {
			Tokens []string
			Own    []float64            `json:"token_logprobs"`
			Top    []map[string]float64 `json:"top_logprobs"`

			Content []struct { // of a chat: the same, token by token
				tokenLogprob
				Top []tokenLogprob `json:"top_logprobs"`
			}
		}
		Message struct{ Content string } // of a chat: the text
	}
	Usage struct {
		PromptTokens int `json:"prompt_tokens"`
	}
}

type tokenLogprob struct {
	Token   string
	Logprob float64
}

// flatten gives the answer of a chat the form of a completion.
func (c *completion) flatten() {
	choice := &c.Choices[0]
	choice.Text = choice.Message.Content
	l := choice.Logprobs
	if l == nil {
		return
	}
	for _, t := range l.Content {
		top := map[string]float64{}
		for _, other := range t.Top {
			top[other.Token] = other.Logprob
		}
		l.Tokens, l.Own, l.Top = append(l.Tokens, t.Token), append(l.Own, t.Logprob), append(l.Top, top)
	}
}

func (e *apiServer) complete(ctx context.Context, body []byte, requestID string) (c completion, raw []byte, err error) {
	raw, err = request(ctx, http.MethodPost, e.base+e.api.Path(), body, requestID)
	if err != nil {
		return c, nil, fmt.Errorf("%s: %w", e.role, err)
	}
	if err := json.Unmarshal(raw, &c); err != nil || len(c.Choices) != 1 {
		return c, nil, fmt.Errorf("%s: the answer is no completion with one choice: %.200s", e.role, raw)
	}
	if e.api == kvparams.ChatCompletions {
		c.flatten()
	}
	return c, raw, nil
}

// sameAnswer compares what D says with what P says to the same prompt. Numbers differ a little between two machines, so
// tokens may part where P itself finds both about as likely. why is empty when they are the same.
func sameAnswer(p, d completion, tolerance float64) (why string) {
	a, b := p.Choices[0], d.Choices[0]
	if a.Logprobs == nil || b.Logprobs == nil {
		if a.Text != b.Text {
			return fmt.Sprintf("D answers %.60q, P %.60q", b.Text, a.Text)
		}
		return ""
	}
	for i, token := range a.Logprobs.Tokens {
		if i >= len(b.Logprobs.Tokens) || i >= len(a.Logprobs.Own) || i >= len(b.Logprobs.Own) {
			return fmt.Sprintf("D answers %s, P %d", many(len(b.Logprobs.Tokens), "token"), len(a.Logprobs.Tokens))
		}
		if other := b.Logprobs.Tokens[i]; other != token {
			if i < len(a.Logprobs.Top) {
				if likely, ok := a.Logprobs.Top[i][other]; ok && a.Logprobs.Own[i]-likely <= tolerance {
					return "" // what follows are answers to different texts
				}
			}
			return fmt.Sprintf("token %d is %q at D and %q at P", i+1, other, token)
		}
		if diff := math.Abs(a.Logprobs.Own[i] - b.Logprobs.Own[i]); diff > tolerance {
			return fmt.Sprintf("the log probability of token %d, %q, is %.3f at D and %.3f at P", i+1, token, b.Logprobs.Own[i], a.Logprobs.Own[i])
		}
	}
	return ""
}

// counters are what a server's /metrics say, of all its engines together. Each is -1 when the server does not have it.
type counters struct {
	requests  float64 // finished
	computed  float64 // prompt tokens that were computed
	external  float64 // prompt tokens whose KV came from elsewhere
	bytes     float64 // that were read over NIXL
	transfers float64
	failed    float64 // transfers, handshakes and notifications
	expired   float64 // leases that ran out
}

// since is what was counted from old to c.
func (c counters) since(old counters) counters {
	minus := func(a, b float64) float64 {
		if a < 0 || b < 0 {
			return -1
		}
		return a - b
	}
	return counters{minus(c.requests, old.requests), minus(c.computed, old.computed), minus(c.external, old.external), minus(c.bytes, old.bytes),
		minus(c.transfers, old.transfers), minus(c.failed, old.failed), minus(c.expired, old.expired)}
}

var noCounters = counters{-1, -1, -1, -1, -1, -1, -1}

func (e *apiServer) counters(ctx context.Context) (counters, error) {
	text, err := request(ctx, http.MethodGet, e.metrics, nil, "")
	if err != nil {
		return noCounters, fmt.Errorf("%s: %w", e.role, err)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return noCounters, fmt.Errorf("%s: %s: %w", e.role, e.metrics, err)
	}
	sum := func(name string, value func(*dto.Metric) float64, label ...string) float64 {
		f := families[name]
		if f == nil {
			return -1
		}
		total := 0.0
		for _, m := range f.Metric {
			if len(label) == 0 || hasLabel(m, label[0], label[1]) {
				total += value(m)
			}
		}
		return total
	}
	count := func(m *dto.Metric) float64 { return m.GetCounter().GetValue() + m.GetUntyped().GetValue() }
	const bySource = "vllm:prompt_tokens_by_source_total"
	c := counters{
		requests:  sum("vllm:request_success_total", count),
		computed:  sum(bySource, count, "source", "local_compute"),
		external:  sum(bySource, count, "source", "external_kv_transfer"),
		bytes:     sum("vllm:nixl_bytes_transferred", func(m *dto.Metric) float64 { return m.GetHistogram().GetSampleSum() }),
		transfers: sum("vllm:nixl_bytes_transferred", func(m *dto.Metric) float64 { return float64(m.GetHistogram().GetSampleCount()) }),
		failed:    sum("vllm:nixl_num_failed_transfers_total", count),
		expired:   sum("vllm:nixl_num_kv_expired_reqs_total", count),
	}
	if c.external < 0 {
		c.external = sum("vllm:external_prefix_cache_hits_total", count)
	}
	if c.requests < 0 {
		return c, fmt.Errorf("%s: %s: %w", e.role, e.metrics, errors.New("no series of vLLM are there"))
	}
	return c, nil
}

func hasLabel(m *dto.Metric, name, value string) bool {
	for _, l := range m.Label {
		if l.GetName() == name {
			return l.GetValue() == value
		}
	}
	return false
}
