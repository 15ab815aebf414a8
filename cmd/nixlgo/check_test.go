package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
)

// fakeServer is an inference server: it answers as an OpenAI server does and counts as vLLM does.
type fakeServer struct {
	t      *testing.T
	tokens []string  // its answer to every prompt
	logps  []float64 // of them; the second choice of each is "other", 0.2 below
	status int       // of an answer, when not 0
	chat   bool      // it speaks chat completions, and no others; a word is two tokens

	// prefill, when not nil, makes the kv_transfer_params of a request that asks for them.
	prefill func(prompt []int) any
	// decode, when not nil, gets the kv_transfer_params of a request, and says how many of its tokens came from elsewhere.
	decode func(params json.RawMessage, prompt []int) (external int)
	// counted says which series it has: sources, nixl.
	sources, nixl bool
	others        float64 // requests, and a thousand tokens of each kind, that others add meanwhile

	mu                           sync.Mutex
	requests, computed, external float64
	bodies                       []map[string]json.RawMessage
}

func (s *fakeServer) start() string {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"data":[{"id":"tiny"}]}`) })
	if s.chat {
		mux.HandleFunc("POST /v1/chat/completions", s.complete)
	} else {
		mux.HandleFunc("POST /v1/completions", s.complete)
	}
	mux.HandleFunc("GET /metrics", s.metrics)
	server := httptest.NewServer(mux)
	s.t.Cleanup(server.Close)
	return server.URL
}

func (s *fakeServer) complete(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Prompt    []int
		MaxTokens int             `json:"max_tokens"`
		Params    json.RawMessage `json:"kv_transfer_params"`
		Messages  []struct{ Content string }
		Logprobs  json.RawMessage
	}
	text, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(text, &body)
	}
	var all map[string]json.RawMessage
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	if err != nil || strings.Contains(r.Header.Get("X-Request-Id"), ",") {
		http.Error(w, fmt.Sprint(err), http.StatusBadRequest)
		return
	}
	if s.chat {
		body.Prompt = make([]int, 2*len(strings.Fields(body.Messages[0].Content)))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bodies = append(s.bodies, all)
	var params any
	external := 0
	asked := bytes.Contains(body.Params, []byte(`"do_remote_decode":true`))
	if asked && s.prefill != nil {
		params = s.prefill(body.Prompt)
	} else if body.Params != nil && !asked && s.decode != nil {
		external = s.decode(body.Params, body.Prompt)
	}
	s.requests += 1 + s.others
	s.external += float64(external) + 1000*s.others
	s.computed += float64(len(body.Prompt)-external) + 1000*s.others
	if s.status != 0 && body.Params != nil {
		w.WriteHeader(s.status)
		io.WriteString(w, `{"error":{"message":"KV load failure"}}`)
		return
	}
	n := min(body.MaxTokens, len(s.tokens))
	if s.chat {
		var content []any
		for i := range n {
			top := []tokenLogprob{{s.tokens[i], s.logps[i]}, {"other", s.logps[i] - 0.2}}
			content = append(content, map[string]any{"token": s.tokens[i], "logprob": s.logps[i], "top_logprobs": top})
		}
		choice := map[string]any{"message": map[string]any{"role": "assistant", "content": strings.Join(s.tokens[:n], "")}, "logprobs": nil}
		if string(body.Logprobs) == "true" {
			choice["logprobs"] = map[string]any{"content": content}
		}
		answer(w, http.StatusOK, map[string]any{"kv_transfer_params": params, "usage": map[string]int{"prompt_tokens": len(body.Prompt)}, "choices": []any{choice}})
		return
	}
	var top []map[string]float64
	for i := range n {
		top = append(top, map[string]float64{s.tokens[i]: s.logps[i], "other": s.logps[i] - 0.2})
	}
	answer(w, http.StatusOK, map[string]any{"kv_transfer_params": params, "usage": map[string]int{"prompt_tokens": len(body.Prompt)},
		"choices": []any{map[string]any{"text": strings.Join(s.tokens[:n], ""), "logprobs": map[string]any{"tokens": s.tokens[:n], "token_logprobs": s.logps[:n], "top_logprobs": top}}}})
}

// answerTo changes what is done with the params of a request, between two of them.
func (s *fakeServer) answerTo(decode func(json.RawMessage, []int) int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.decode = decode
}

func (s *fakeServer) metrics(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.sources && !s.nixl {
		http.NotFound(w, nil)
		return
	}
	fmt.Fprintf(w, "# TYPE vllm:request_success_total counter\nvllm:request_success_total{engine=\"0\",finished_reason=\"length\"} %g\n", s.requests)
	if s.sources {
		fmt.Fprintf(w, "# TYPE vllm:prompt_tokens_by_source_total counter\nvllm:prompt_tokens_by_source_total{engine=\"0\",source=\"local_compute\"} %g\n"+
			"vllm:prompt_tokens_by_source_total{engine=\"0\",source=\"external_kv_transfer\"} %g\n", s.computed, s.external)
	}
	if s.nixl {
		fmt.Fprintf(w, "# TYPE vllm:nixl_bytes_transferred histogram\nvllm:nixl_bytes_transferred_bucket{le=\"+Inf\"} %g\nvllm:nixl_bytes_transferred_sum %g\n"+
			"vllm:nixl_bytes_transferred_count %g\n", s.external, 1024*s.external, s.external)
	}
}

var (
	fakeTokens = []string{"a", "b", "c"}
	fakeLogps  = []float64{-1, -2, -3}
)

// blocksOf16 are params that name a side channel where nobody is.
func blocksOf16(prompt []int) any {
	return map[string]any{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [][]int{{3, 4, 5}}, "remote_engine_id": "P",
		"remote_request_id": "cmpl-1", "remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1, "remote_num_tokens": len(prompt)}
}

func allTokens(_ json.RawMessage, prompt []int) int { return len(prompt) }

// llm-d-router#2855, kserve#5987, vllm#52234: what a cluster does in silence is said, with an exit code of its own.
func TestCheckTellsWhatHappened(t *testing.T) {
	exe := program(t)
	for _, c := range []struct {
		name   string
		p, d   func(*fakeServer)
		args   []string
		code   int
		answer string
		why    string
	}{
		{"D reads", nil, nil, nil, 0, "transferred", "took 48 prompt tokens from elsewhere and computed 0"},
		{"D counts bytes only", nil, func(d *fakeServer) { d.sources = false }, nil, 0, "transferred", "bytes over NIXL"},
		{"D parts where P finds both likely", nil, func(d *fakeServer) { d.tokens = []string{"a", "other", "x"} }, nil, 0, "transferred", ""},
		{"D's numbers differ a little", nil, func(d *fakeServer) { d.logps = []float64{-1.1, -2.3, -2.8} }, nil, 0, "transferred", ""},
		{"P offers nothing", func(p *fakeServer) { p.prefill = nil }, nil, nil, exitRecomputed, "recomputed", "no handoff"},
		{"P offers what nobody can read", func(p *fakeServer) { p.prefill = func([]int) any { return map[string]any{"do_remote_prefill": true} } }, nil, nil, exitRecomputed, "recomputed", "remote_engine_id"},
		{"D ignores the params", nil, func(d *fakeServer) { d.decode = nil }, nil, exitRecomputed, "recomputed", "took 0 of 48 prompt tokens from elsewhere and computed 48"},
		{"D has no connector", nil, func(d *fakeServer) { d.decode, d.nixl = nil, false }, nil, exitRecomputed, "recomputed", "without the NixlConnector"},
		{"D counts bytes only, and reads none", nil, func(d *fakeServer) { d.decode, d.sources = nil, false }, nil, exitRecomputed, "recomputed", "read nothing over NIXL"},
		{"D refuses", nil, func(d *fakeServer) { d.status = 500 }, nil, exitWrong, "wrong", "KV load failure"},
		{"D reads something else", nil, func(d *fakeServer) { d.tokens = []string{"a", "z", "c"} }, nil, exitWrong, "wrong", `token 2 is "z" at D and "b" at P, although`},
		{"D is as sure of other things", nil, func(d *fakeServer) { d.logps = []float64{-1, -2.6, -3} }, nil, exitWrong, "wrong", "log probability of token 2"},
		{"D has another model", nil, func(d *fakeServer) { d.decode, d.tokens = nil, []string{"z"} }, nil, exitWrong, "wrong", "the sides differ in model"},
		{"texts only", nil, func(d *fakeServer) { d.tokens = []string{"a", "z", "c"} }, []string{"--tolerance", "100"}, exitWrong, "wrong", "token 2"},
		{"D has no metrics", nil, func(d *fakeServer) { d.sources, d.nixl = false, false }, nil, exitFailed, "unknown", "--metrics-d"},
		{"D is busy", nil, func(d *fakeServer) { d.others = 3 }, nil, exitFailed, "unknown", "repeat when it is quieter"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := &fakeServer{t: t, tokens: fakeTokens, logps: fakeLogps, prefill: blocksOf16, sources: true, nixl: true}
			d := &fakeServer{t: t, tokens: fakeTokens, logps: fakeLogps, decode: allTokens, sources: true, nixl: true}
			if c.p != nil {
				c.p(p)
			}
			if c.d != nil {
				c.d(d)
			}
			args := append([]string{"check", p.start() + "/v1", d.start(), "--json", "--read=false", "--prompt-tokens", "48", "--max-tokens", "3"}, c.args...)
			code, stdout, stderr := run(t, exe, args...)
			var r checkReport
			require.NoError(t, json.Unmarshal([]byte(stdout), &r), stderr)
			require.Equal(t, c.answer, r.Answer, r.Why)
			require.Equal(t, c.code, code, stderr)
			require.Contains(t, r.Why, c.why)
			require.Equal(t, 48, r.PromptTokens)
			require.Equal(t, r.Request != "", r.LeaseLeftS != nil, stdout)

			require.JSONEq(t, "1", string(p.bodies[0]["max_tokens"]), "the prefill leg")
			require.Contains(t, string(p.bodies[0]["kv_transfer_params"]), `"do_remote_decode":true`)
			require.Equal(t, p.bodies[0]["prompt"], d.bodies[0]["prompt"])
			if r.Blocks > 0 {
				require.Contains(t, string(d.bodies[0]["kv_transfer_params"]), `"remote_request_id":"cmpl-1"`)
			}
			if d.status == 0 {
				require.Nil(t, p.bodies[1]["kv_transfer_params"], "the whole request")
				require.JSONEq(t, "3", string(p.bodies[1]["max_tokens"]))
			}
		})
	}
}

func TestCheckSaysNothingOfALeaseThatNobodyGave(t *testing.T) {
	r := checkReport{LeaseSlot: "none"}
	require.NotContains(t, r.text(), "lease")
	text, err := json.Marshal(r)
	require.NoError(t, err)
	require.NotContains(t, string(text), "lease_left_s")
	left := 29.9
	r.LeaseLeftS = &left
	require.Contains(t, r.text(), "29.9 s left")
}

// Servers for chats alone, as many are, answer 404 to a completion.
func TestCheckAsksForAChat(t *testing.T) {
	exe := program(t)
	for _, c := range []struct {
		name   string
		d      func(*fakeServer)
		args   []string
		code   int
		answer string
		why    string
	}{
		{"D reads", nil, nil, 0, checkTransferred, "took 48 prompt tokens from elsewhere and computed 0"},
		{"D computes", func(d *fakeServer) { d.decode = nil }, nil, exitRecomputed, checkRecomputed, "took 0 of 48"},
		{"D is as sure of other things", func(d *fakeServer) { d.logps = []float64{-1, -2.6, -3} }, nil, exitWrong, checkWrong, "log probability of token 2"},
		{"D parts where P finds both likely", func(d *fakeServer) { d.tokens = []string{"a", "other", "x"} }, nil, 0, checkTransferred, ""},
		{"texts only", func(d *fakeServer) { d.tokens = []string{"a", "z", "c"} }, []string{"--logprobs", "0"}, exitWrong, checkWrong, `D answers "azc", P "abc"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := &fakeServer{t: t, tokens: fakeTokens, logps: fakeLogps, prefill: blocksOf16, sources: true, nixl: true, chat: true}
			d := &fakeServer{t: t, tokens: fakeTokens, logps: fakeLogps, decode: allTokens, sources: true, nixl: true, chat: true}
			if c.d != nil {
				c.d(d)
			}
			args := append([]string{"check", p.start(), d.start(), "--api", "chat", "--json", "--read=false", "--prompt-tokens", "47", "--max-tokens", "3"}, c.args...)
			code, stdout, stderr := run(t, exe, args...)
			var r checkReport
			require.NoError(t, json.Unmarshal([]byte(stdout), &r), stderr)
			require.Equal(t, c.answer, r.Answer, r.Why)
			require.Equal(t, c.code, code, stderr)
			require.Contains(t, r.Why, c.why)
			require.Equal(t, 48, r.PromptTokens, "as P counts them")
			require.Empty(t, r.Notes)
			require.Equal(t, p.bodies[0]["messages"], d.bodies[0]["messages"])
			require.Contains(t, string(p.bodies[0]["kv_transfer_params"]), `"do_remote_decode":true`)
			require.Contains(t, string(d.bodies[0]["kv_transfer_params"]), `"remote_request_id":"cmpl-1"`)
		})
	}
	p := &fakeServer{t: t, tokens: fakeTokens, logps: fakeLogps, sources: true, chat: true}
	url := p.start()
	code, _, stderr := run(t, exe, "check", url, url)
	require.Equal(t, exitFailed, code)
	require.Contains(t, stderr, "try --api chat")
}

// The blocks are read from a real owner, and nothing of that is seen by it.
func TestCheckReadsTheBlocksThatPOffers(t *testing.T) {
	exe := program(t)
	owner, reader := startNode(t), startNode(t)
	fillNode(owner, 7, 3, 4, 5)
	var pub atomic.Pointer[nixlgo.Publication]
	p := &fakeServer{t: t, tokens: fakeTokens, logps: fakeLogps, sources: true, nixl: true}
	p.prefill = func(prompt []int) any {
		one, err := owner.Publish(context.Background(), fmt.Sprint("req", len(p.bodies)), []int{3, 4, 5}, len(prompt))
		if err != nil {
			t.Error(err)
			return nil
		}
		pub.Store(one)
		return one.Params()
	}
	fetch := func(then func()) func(json.RawMessage, []int) int {
		return func(text json.RawMessage, prompt []int) int {
			params := new(lease.Params)
			err := json.Unmarshal(text, params)
			if err == nil {
				err = reader.Fetch(context.Background(), params, []int{0, 1, 2})
			}
			if err != nil {
				t.Error(err)
			}
			then()
			return len(prompt)
		}
	}
	d := &fakeServer{t: t, tokens: fakeTokens, logps: fakeLogps, sources: true, nixl: true}
	urlP, urlD := p.start(), d.start()
	check := func() (r checkReport) {
		_, stdout, stderr := run(t, exe, "check", urlP, urlD, "--json", "--prompt-tokens", "48")
		require.NoError(t, json.Unmarshal([]byte(stdout), &r), stderr)
		return r
	}
	d.answerTo(fetch(func() {}))
	r := check()
	require.Equal(t, []any{"transferred", "held", "yes", 3, 3 * 2 * 4096, []string{}}, []any{r.Answer, r.LeaseSlot, r.BlocksKept, r.Blocks, r.Bytes, r.Notes}, r.Why)
	require.Len(t, r.SHA256, 64)
	<-pub.Load().Done()
	require.Equal(t, lease.ReasonRead, pub.Load().Reason(), "by the decoder")
	require.EqualValues(t, 1, owner.Stats().Worker.Leases.ReadCompletes, "check did not end the lease, nor renew it")

	d.answerTo(fetch(func() {
		<-pub.Load().Done()
		fillNode(owner, 99, 3)
	}))
	fillNode(owner, 7, 3)
	r = check()
	require.Equal(t, []string{"transferred", "no"}, []string{r.Answer, r.BlocksKept}, "P may reuse them once D has read")
}

func TestCheckGivesUpOnServersThatDoNotAnswer(t *testing.T) {
	exe := program(t)
	d := &fakeServer{t: t, tokens: fakeTokens, logps: fakeLogps, sources: true}
	p := &fakeServer{t: t, tokens: fakeTokens, logps: fakeLogps, sources: true, status: 503}
	none := httptest.NewServer(http.NotFoundHandler())
	defer none.Close()
	silent := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer silent.Close()
	urlP, urlD := p.start(), d.start()
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{urlP, urlD}, exitFailed, "the prefill leg failed: P: POST " + urlP + "/v1/completions: HTTP 503: KV load failure"},
		{[]string{none.URL, urlD}, exitFailed, "P: GET " + none.URL + "/v1/models: HTTP 404"},
		{[]string{urlD, "http://127.0.0.1:1"}, exitFailed, "D: Get"},
		{[]string{silent.URL, urlD, "--timeout", "200ms"}, exitFailed, "deadline exceeded"},
		{[]string{urlP, "d:8000"}, exitUsage, `"d:8000" is no URL`},
		{[]string{urlP, urlD, "--metrics-d", "nonsense"}, exitUsage, `"nonsense" is no URL`},
		{[]string{urlP}, exitUsage, "name two servers"},
		{[]string{urlP, urlD, "--prompt-tokens", "1"}, exitUsage, "--prompt-tokens 1"},
		{[]string{urlP, urlD, "--lease", "0s"}, exitUsage, "--lease"},
	} {
		code, stdout, stderr := run(t, exe, append([]string{"check", "--json"}, c.args...)...)
		require.Equal(t, c.code, code, stderr)
		require.Empty(t, stdout)
		require.Contains(t, stderr, c.says)
	}
}

func TestJudgeNamesWhatItDoesNotTrust(t *testing.T) {
	moved := func(change func(*checkFacts)) *checkFacts {
		f := &checkFacts{promptTokens: 100, leaseLeft: time.Second, p: noCounters,
			d: counters{requests: 1, computed: 0, external: 100, bytes: 1 << 20, transfers: 1}, before: []string{"a", "b"}, after: []string{"a", "b"}}
		change(f)
		return f
	}
	for name, c := range map[string]struct {
		facts       *checkFacts
		answer, why string
	}{
		"the lease ran out":              {moved(func(f *checkFacts) { f.leaseLeft, f.p.expired = -time.Second, 1 }), checkWrong, "luck"},
		"heartbeats kept it":             {moved(func(f *checkFacts) { f.leaseLeft, f.p.expired = -time.Second, 0 }), checkTransferred, ""},
		"another's lease ran out":        {moved(func(f *checkFacts) { f.p.expired = 1 }), checkTransferred, ""},
		"D's blocks are others":          {moved(func(f *checkFacts) { f.own = []string{"x"} }), checkWrong, "byte for byte"},
		"D's blocks are P's":             {moved(func(f *checkFacts) { f.own = []string{"a"} }), checkTransferred, ""},
		"overwritten":                    {moved(func(f *checkFacts) { f.differs, f.after = "token 1", []string{"a", "c"} }), checkWrong, "have other bytes by now"},
		"not overwritten":                {moved(func(f *checkFacts) { f.differs = "token 1" }), checkWrong, "are as they were"},
		"handshake refused, recomputed":  {moved(func(f *checkFacts) { f.d.external, f.d.computed, f.d.failed = 0, 100, 1 }), checkRecomputed, "compatibility hash"},
		"a refusal says what D counted":  {moved(func(f *checkFacts) { f.refused, f.d.failed = errors.New("HTTP 500"), 2 }), checkWrong, "2 failed"},
		"busy, all of them read":         {moved(func(f *checkFacts) { f.d.requests, f.d.external, f.d.computed = 9, 900, 9 }), checkTransferred, ""},
		"busy, all of them computed":     {moved(func(f *checkFacts) { f.d.requests, f.d.external, f.d.computed = 9, 20, 900 }), checkRecomputed, ""},
		"busy, some of each":             {moved(func(f *checkFacts) { f.d.requests, f.d.external, f.d.computed = 9, 500, 500 }), checkUnknown, "9 requests"},
		"an old vLLM, busy":              {moved(func(f *checkFacts) { f.d.requests, f.d.external, f.d.computed = 9, 900, -1 }), checkUnknown, "9 requests"},
		"neither sources nor NIXL":       {moved(func(f *checkFacts) { f.d.external, f.d.computed, f.d.bytes = -1, -1, -1 }), checkUnknown, "counts neither"},
		"an answer that cannot be moved": {moved(func(f *checkFacts) { f.differs, f.d.external, f.d.computed = "token 1", 0, 100 }), checkWrong, "the sides differ in model, dtype or version"},
	} {
		answer, why := c.facts.judge()
		require.Equal(t, c.answer, answer, "%s: %s", name, why)
		require.Contains(t, why, c.why, name)
	}
}
