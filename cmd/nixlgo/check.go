package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	mathrand "math/rand/v2"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/lease/kvparams"
)

// checkConfig is the command line of check.
type checkConfig struct {
	urls               []string
	model              string
	api                string
	metricsP, metricsD string
	promptTokens       int
	maxTokens          int
	logprobs           int
	tolerance          float64
	pause              time.Duration
	lease              time.Duration
	read               bool
	keyFile            string
	key                []byte
	library            string
	timeout            time.Duration
	format             format
}

func newCheck() *cobra.Command {
	var c checkConfig
	cmd := &cobra.Command{
		Use:   "check URL-P URL-D",
		Short: "Send one request through a prefill and a decode server, and say whether the KV cache moved",
		Long: "check does what a router does with one request: it sends a prompt to P with max_tokens 1, gives the kv_transfer_params of\n" +
			"P's answer to D, and lets P answer the whole request, too. A cluster whose D computes every prompt itself answers just as\n" +
			"well, only slower, and nobody notices; one whose D reads the wrong blocks answers HTTP 200, too. check tells these apart:\n\n" +
			"  transferred  exit 0  D got P's KV cache and says what P says\n" +
			"  recomputed   exit 3  D says what P says, and computed the prompt itself\n" +
			"  wrong        exit 4  D says something else, refused, or read blocks whose lease had run out\n" +
			"  unknown      exit 1  D does not say where its tokens came from, or served too many others meanwhile\n\n" +
			"The prompt is random token ids, so that no prefix cache knows it. Servers that speak chat completions alone are asked with\n" +
			"--api chat: the prompt is random words then, and P says how many tokens they are. What D did is in its counters (vLLM's /metrics, before and\n" +
			"after); the answers are compared by token and log probability. P's blocks are read over NIXL before and after D was asked,\n" +
			"without a word to P, and their SHA-256 compared; where P has lease slots, so is the nonce; where D says which blocks it keeps\n" +
			"(bidirectional_kv_xfer), those are compared with P's byte for byte.\n\n" +
			"--pause waits between the legs, as a slow router does, to find out whether the lease lives that long.",
		Example: "  nixlgo check http://10.0.0.6:8000 http://10.0.0.7:8000\n" +
			"  nixlgo check http://p:8000 http://d:8000 --prompt-tokens 4000 --json\n" +
			"  nixlgo check http://p:8000 http://d:8000 --pause 25s        # does the lease outlive a queue of 25 s?",
		RunE: func(cmd *cobra.Command, args []string) error {
			c.urls = args
			if err := c.check(); err != nil {
				return usageError{fmt.Errorf("check: %w", err)}
			}
			return c.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Args = cobra.ArbitraryArgs // check says what is wrong with them
	f := cmd.Flags()
	f.StringVar(&c.model, "model", "", "model (default: the first that each server names)")
	f.StringVar(&c.api, "api", apiCompletions, "completions, or chat for /v1/chat/completions")
	f.StringVar(&c.metricsP, "metrics-p", "", "URL of P's metrics (default: URL-P/metrics)")
	f.StringVar(&c.metricsD, "metrics-d", "", "URL of D's metrics (default: URL-D/metrics)")
	f.IntVar(&c.promptTokens, "prompt-tokens", 200, "length of the prompt, with --api chat about so; several blocks of both sides")
	f.IntVar(&c.maxTokens, "max-tokens", 16, "length of the answers")
	f.IntVar(&c.logprobs, "logprobs", 5, "alternatives a token that are asked for, to tell rounding from other KV; 0: only texts are compared")
	f.Float64Var(&c.tolerance, "tolerance", 0.5, "how far log probabilities may be apart")
	f.DurationVar(&c.pause, "pause", 0, "wait between the legs")
	f.DurationVar(&c.lease, "lease", lease.DefaultConfig().Duration, "P's kv_lease_duration, to say how much of it was left")
	f.BoolVar(&c.read, "read", true, "read the blocks over NIXL")
	keyFlag(f, &c.keyFile)
	libraryFlag(f, &c.library)
	f.DurationVar(&c.timeout, "timeout", 2*time.Minute, "longest wait for one answer")
	formatFlags(f, &c.format, false)
	return cmd
}

func (c *checkConfig) check() (err error) {
	if c.key, err = readKey(c.keyFile); err != nil {
		return err
	}
	switch {
	case len(c.urls) != 2:
		return errors.New("name two servers, as in nixlgo check http://p:8000 http://d:8000")
	case c.api != apiCompletions && c.api != apiChat:
		return fmt.Errorf("--api %q: want completions or chat", c.api)
	case !(c.tolerance >= 0 && c.tolerance <= math.MaxFloat64): // nor NaN
		return fmt.Errorf("--tolerance %v: want a number that is not negative", c.tolerance)
	case c.pause < 0:
		return fmt.Errorf("--pause %v is negative", c.pause)
	case c.lease <= 0:
		return fmt.Errorf("--lease %v is not positive", c.lease)
	case c.timeout <= 0:
		return fmt.Errorf("--timeout %v is not positive", c.timeout)
	}
	for _, u := range c.urls {
		if err := checkURL(u); err != nil {
			return err
		}
	}
	for _, m := range []struct{ flag, url string }{{"metrics-p", c.metricsP}, {"metrics-d", c.metricsD}} {
		if m.url != "" {
			if err := checkURL(m.url); err != nil {
				return fmt.Errorf("--%s: %w", m.flag, err)
			}
		}
	}
	return checkBounds(bound{"prompt-tokens", c.promptTokens, 2, 1 << 20}, bound{"max-tokens", c.maxTokens, 1, 1 << 16}, bound{"logprobs", c.logprobs, 0, 1 << 16})
}

// checkReport is the object of --json.
type checkReport struct {
	Event        string       `json:"event"` // check
	Answer       string       `json:"answer"`
	Why          string       `json:"why"`
	P            string       `json:"p"`
	D            string       `json:"d"`
	Model        string       `json:"model"`
	PromptTokens int          `json:"prompt_tokens"`
	Request      string       `json:"request,omitempty"` // P's
	Engine       string       `json:"engine,omitempty"`
	Blocks       int          `json:"blocks"`
	Bytes        int          `json:"bytes"`                  // of the blocks; 0: not read
	PrefillS     float64      `json:"prefill_s"`              // until P had answered
	DecodeS      float64      `json:"decode_s"`               // until D had
	LeaseLeftS   *float64     `json:"lease_left_s,omitempty"` // when D had answered, if no heartbeat came; nil: P gave no lease
	LeaseSlot    string       `json:"lease_slot"`             // held, lapsed, or none when P has no lease slots
	TextEqual    bool         `json:"answers_equal"`          // within the tolerance
	BlocksKept   string       `json:"blocks_kept"`            // yes, no or unknown: P's blocks have the same SHA-256 before and after
	SHA256       string       `json:"sha256,omitempty"`       // of the hashes of P's blocks, before
	DBlocks      string       `json:"d_blocks"`               // equal, different or unknown
	DCounted     checkCounted `json:"d_counted"`
	Notes        []string     `json:"notes"`
}

// checkCounted is what D counted meanwhile; -1: it does not count it.
type checkCounted struct {
	Requests  float64 `json:"requests"`
	Computed  float64 `json:"prompt_tokens_computed"`
	External  float64 `json:"prompt_tokens_external"`
	Bytes     float64 `json:"nixl_bytes"`
	Transfers float64 `json:"nixl_transfers"`
	Failed    float64 `json:"nixl_failed"`
}

func (c *checkConfig) run(ctx context.Context, out, errs io.Writer) error {
	r := &checkReport{Event: "check", P: c.urls[0], D: c.urls[1], PromptTokens: c.promptTokens, LeaseSlot: "none", BlocksKept: "unknown", DBlocks: "unknown", Notes: []string{}}
	bar := newProgress(errs, "check", 0, false)
	facts, err := c.ask(ctx, r)
	bar.end()
	if err != nil {
		return fmt.Errorf("check: %w", err)
	}
	r.Answer, r.Why = facts.judge()
	r.TextEqual, r.BlocksKept = facts.refused == nil && facts.differs == "", facts.kept()
	r.DCounted = checkCounted{facts.d.requests, facts.d.computed, facts.d.external, facts.d.bytes, facts.d.transfers, facts.d.failed}
	if err := say(out, c.format, r, "%s", r.text()); err != nil {
		return fmt.Errorf("check: %w", err)
	}
	code, ok := map[string]int{checkTransferred: 0, checkRecomputed: exitRecomputed, checkWrong: exitWrong}[r.Answer]
	if !ok {
		code = exitFailed
	}
	if code == 0 {
		return nil
	}
	return verdictError{fmt.Errorf("check: %s", r.Answer), code} // the report says why
}

// ask sends the request and collects what can be seen of it. The error is about what keeps check from an answer.
func (c *checkConfig) ask(ctx context.Context, r *checkReport) (*checkFacts, error) {
	note := func(format string, a ...any) { r.Notes = append(r.Notes, fmt.Sprintf(format, a...)) }
	p, d := newAPIServer("P", c.urls[0], c.metricsP, c), newAPIServer("D", c.urls[1], c.metricsD, c)
	short := func() (context.Context, context.CancelFunc) { return context.WithTimeout(ctx, c.timeout) }
	for _, e := range []*apiServer{p, d} {
		ctx, cancel := short()
		err := e.findModel(ctx)
		cancel()
		if err != nil {
			return nil, err
		}
	}
	r.Model = p.model
	if d.model != p.model {
		note("D has model %q, P %q", d.model, p.model)
	}
	f := &checkFacts{promptTokens: c.promptTokens, d: noCounters, p: noCounters}
	dBefore, derr := d.counters(ctx)
	f.dMetrics = derr
	pBefore, perr := p.counters(ctx)
	if perr != nil {
		note("P's counters cannot be read: %v", perr)
	}

	body := c.body()
	requestID := "nixlgo-check-" + rand.Text()
	prefill, err := kvparams.Prefill(body(p.model), p.api, kvparams.Handoff{})
	if err != nil {
		return nil, err
	}
	leg, cancel := short()
	start := time.Now()
	counted, answer, err := p.complete(leg, prefill, requestID)
	cancel()
	r.PrefillS = round(time.Since(start).Seconds())
	if no, ok := errors.AsType[*statusError](err); ok && no.status == http.StatusNotFound && c.api == apiCompletions {
		err = fmt.Errorf("%w: does it speak chat completions alone? try --api chat", err)
	}
	if err != nil {
		return nil, fmt.Errorf("the prefill leg failed: %w", err)
	}
	if c.api == apiChat {
		if f.promptTokens = counted.Usage.PromptTokens; f.promptTokens < 2 {
			return nil, fmt.Errorf("the prefill leg failed: P's answer does not say how many tokens the prompt has (usage.prompt_tokens is %d)", f.promptTokens)
		}
		r.PromptTokens = f.promptTokens
	}
	granted := time.Now()
	handoff, err := kvparams.FromResponse(answer)
	f.noHandoff = err
	if err == nil {
		params := handoff.Params()
		r.Request, r.Engine = params.RemoteRequestID, params.RemoteEngineID
		for _, g := range params.RemoteBlockIDs {
			r.Blocks += len(g)
		}
		if params.RemoteNumTokens != f.promptTokens {
			note("P says that its blocks hold %s, of %d", many(params.RemoteNumTokens, "token"), f.promptTokens)
		}
		f.before = c.look(ctx, r, params, "before D was asked", note)
	}
	if err := sleep(ctx, c.pause); err != nil {
		return nil, err
	}

	var decode []byte
	if f.noHandoff == nil {
		decode, err = kvparams.Decode(body(d.model), handoff, kvparams.DecodeOptions{ForceFlags: true})
	} else {
		decode, err = kvparams.Strip(body(d.model))
	}
	if err != nil {
		return nil, err
	}
	leg, cancel = short()
	start = time.Now()
	got, answer, err := d.complete(leg, decode, requestID)
	cancel()
	r.DecodeS = round(time.Since(start).Seconds())
	f.leaseLeft = c.lease - time.Since(granted)
	if f.noHandoff == nil {
		left := round(f.leaseLeft.Seconds())
		r.LeaseLeftS = &left
	}
	if _, answered := errors.AsType[*statusError](err); answered {
		f.refused = err
	} else if err != nil {
		return nil, fmt.Errorf("the decode leg failed: %w", err)
	}
	if f.noHandoff == nil && f.before != nil {
		f.after = c.look(ctx, r, handoff.Params(), "after", note)
	}
	if kept, err := kvparams.FromResponse(answer); err == nil && f.before != nil {
		c.compareBlocks(ctx, r, f, kept.Params(), note)
	}
	if f.refused == nil {
		whole, err := kvparams.Strip(body(p.model))
		if err != nil {
			return nil, err
		}
		leg, cancel := short()
		want, _, err := p.complete(leg, whole, requestID+"-whole")
		cancel()
		if err != nil {
			return nil, fmt.Errorf("the prefill server answered its leg, and not the whole request: %w", err)
		}
		f.differs = sameAnswer(want, got, c.tolerance)
	}
	if derr == nil {
		f.d, f.dMetrics = c.counted(ctx, d, dBefore)
	}
	if perr == nil {
		after, err := p.counters(ctx)
		if err != nil {
			note("P's counters cannot be read: %v", err)
		}
		f.p = after.since(pBefore)
	}
	return f, nil
}

// body is the client's request, to either model.
func (c *checkConfig) body() func(model string) []byte {
	q := map[string]any{"max_tokens": c.maxTokens, "temperature": 0, "ignore_eos": true, "stream": false}
	if c.api == apiChat {
		words := make([]string, (c.promptTokens+1)/2) // of four letters, which are two tokens or so
		for i := range words {
			words[i] = strings.ToLower(rand.Text()[:4])
		}
		q["messages"] = []any{map[string]string{"role": "user", "content": strings.Join(words, " ")}}
		q["logprobs"] = c.logprobs > 0
		if c.logprobs > 0 {
			q["top_logprobs"] = c.logprobs
		}
	} else {
		prompt := make([]int, c.promptTokens)
		for i := range prompt {
			prompt[i] = 10 + mathrand.IntN(240) // every vocabulary has them, and few of them are special
		}
		q["prompt"] = prompt
		if c.logprobs > 0 {
			q["logprobs"] = c.logprobs
		}
	}
	return func(model string) []byte {
		q["model"] = model
		text, _ := json.Marshal(q) // strings and numbers always marshal
		return text
	}
}

// look reads the blocks of params and returns their hashes; nil, and a note, when that cannot be done.
func (c *checkConfig) look(ctx context.Context, r *checkReport, params *lease.Params, when string, note func(string, ...any)) []string {
	if !c.read {
		return nil
	}
	b, err := readRequest(ctx, params, c.library, c.key, 10*time.Second)
	if err != nil {
		note("P's blocks were not read %s: %v", when, err)
		return nil
	}
	if when == "after" {
		return b.Blocks
	}
	r.Bytes, r.SHA256 = b.Bytes, digest(b.Blocks)
	if b.Lease != "" {
		r.LeaseSlot = b.Lease
	}
	return b.Blocks
}

// compareBlocks compares the full blocks that D keeps with P's, where they have one form.
func (c *checkConfig) compareBlocks(ctx context.Context, r *checkReport, f *checkFacts, kept *lease.Params, note func(string, ...any)) {
	b, err := readRequest(ctx, kept, c.library, c.key, 10*time.Second)
	if err != nil {
		note("D's blocks were not read: %v", err)
		return
	}
	full := f.promptTokens / b.Tokens // D has gone on writing into the last one
	if full == 0 || full > len(b.Blocks) || full > len(f.before) || b.Bytes/len(b.Blocks) != r.Bytes/len(f.before) {
		note("D's blocks (%d of %s) have another form than P's", len(b.Blocks), many(b.Tokens, "token"))
		return
	}
	f.own = b.Blocks[:full]
	r.DBlocks = "different"
	if digest(f.own) == digest(f.before[:full]) {
		r.DBlocks = "equal"
	}
}

// counted waits until D has counted the request: it counts a moment after it has answered.
func (c *checkConfig) counted(ctx context.Context, d *apiServer, before counters) (counters, error) {
	for deadline := time.Now().Add(3 * time.Second); ; {
		now, err := d.counters(ctx)
		if err != nil {
			return noCounters, err
		}
		if since := now.since(before); since.requests > 0 || time.Now().After(deadline) {
			return since, nil
		}
		if err := sleep(ctx, 50*time.Millisecond); err != nil {
			return noCounters, err
		}
	}
}

// text is the report for people.
func (r *checkReport) text() string {
	var b strings.Builder
	line := func(label, format string, a ...any) { fmt.Fprintf(&b, "%-13s %s\n", label, fmt.Sprintf(format, a...)) }
	line("P", "%s, model %s: %d tokens in %.3f s", r.P, r.Model, r.PromptTokens, r.PrefillS)
	if r.Request != "" {
		line("handoff", "request %s of engine %s, %s", r.Request, r.Engine, many(r.Blocks, "block"))
	}
	if r.Bytes > 0 {
		line("blocks", "%s read, SHA-256 %.16s…; as they were after D: %s; D's own: %s", byteSize(int64(r.Bytes)), r.SHA256, r.BlocksKept, r.DBlocks)
	}
	if r.LeaseLeftS != nil {
		line("lease", "%.1f s left when D had answered; slot: %s", *r.LeaseLeftS, r.LeaseSlot)
	}
	line("D", "%s: answered in %.3f s", r.D, r.DecodeS)
	counted := func(n float64) string {
		if n < 0 {
			return "unknown"
		}
		return fmt.Sprintf("%.0f", n)
	}
	line("D counted", "prompt tokens computed %s, from elsewhere %s; over NIXL %s bytes in %s transfers, %s failed; requests %s", counted(r.DCounted.Computed),
		counted(r.DCounted.External), counted(r.DCounted.Bytes), counted(r.DCounted.Transfers), counted(r.DCounted.Failed), counted(r.DCounted.Requests))
	for _, n := range r.Notes {
		line("note", "%s", n)
	}
	line("answer", "%s: %s", r.Answer, r.Why)
	return strings.TrimSuffix(b.String(), "\n")
}
