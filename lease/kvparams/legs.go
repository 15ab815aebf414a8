package kvparams

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

// API is the inference API that a body belongs to. It tells where the token
// limits are.
type API int

// The APIs whose bodies carry kv_transfer_params at top level (vLLM 0.33.0;
// Generate since 0.29).
const (
	ChatCompletions API = iota + 1
	Completions
	Responses
	Generate
)

var apiPaths = [...]string{"", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/inference/v1/generate"}

// Path is the URL path of the API, "" for an unknown one.
func (a API) Path() string {
	if a < 1 || int(a) >= len(apiPaths) {
		return ""
	}
	return apiPaths[a]
}

func (a API) String() string {
	if p := a.Path(); p != "" {
		return p
	}
	return fmt.Sprintf("API(%d)", int(a))
}

// APIOf is the API whose path ends the given URL path.
func APIOf(path string) (API, bool) {
	for a := ChatCompletions; a <= Generate; a++ {
		if strings.HasSuffix(path, a.Path()) {
			return a, true
		}
	}
	return 0, false
}

// askDecode is what P is sent: keep your blocks for a reader. The nulls are
// what llm-d's sidecar and vLLM's example proxy send.
const askDecode = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,` +
	`"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// Prefill makes the body for P from a client's: kv_transfer_params asks P to
// keep its blocks, stream is false, stream_options is gone, and the token
// limits are 1: max_tokens (max_output_tokens for Responses, in
// sampling_params for Generate), and max_completion_tokens and min_tokens
// where the body has them. A Responses body gets store false, for P's answer is
// nobody's. Every other byte is as it was. body is not changed.
//
// previous is what D offered at the end of the turn before, for P to read
// ([Turns]), or the zero Handoff. A retry must pass the zero Handoff: the first
// attempt may have read and released the blocks.
//
// The error matches [ErrMalformed], [ErrUnsplittable] (n, best_of, beam search,
// several prompts, a background response; [Error.Key] names it) or [ErrInvalid]
// (unknown api).
func Prefill(body []byte, api API, previous Handoff) ([]byte, error) {
	const op = "prefill body"
	if api.Path() == "" {
		return nil, fail(ErrInvalid, op, "", "unknown API %d", int(api))
	}
	o, err := clientBody(op, body)
	if err != nil {
		return nil, err
	}
	limits := o // the object that has the token limits
	if api == Generate {
		if limits, err = o.sub(op, keySampling); err != nil {
			return nil, err
		}
		if limits == nil {
			return nil, fail(ErrMalformed, op, keySampling, "want an object")
		}
	}
	if err := splittable(op, o, limits, api); err != nil {
		return nil, err
	}
	params := askDecode
	if !previous.IsZero() {
		params = previous.relayed(set(keyDoDecode, "true"), set(keyDoPrefill, "false"))
	}
	edits := []edit{set(keyStream, "false"), remove(keyStreamOpts), set(keyParams, params)}
	switch api {
	case ChatCompletions, Completions:
		edits = append(edits, set(keyMaxTokens, "1"), replace(keyMaxComplete, "1"), replace(keyMinTokens, "1"))
	case Responses:
		edits = append(edits, set(keyMaxOutput, "1"), set(keyStore, "false"))
	case Generate:
		edits = append(edits, set(keySampling, string(limits.edit(set(keyMaxTokens, "1"), replace(keyMinTokens, "1")))))
	}
	return o.edit(edits...), nil
}

// DecodeOptions are changes of the params on their way to D. The zero value
// makes none.
type DecodeOptions struct {
	// ForceFlags writes do_remote_prefill true and do_remote_decode false, as
	// llm-d's coordinator does.
	ForceFlags bool
	// Host replaces remote_host, for example by the pod's address when P
	// advertises one that D cannot reach. An IPv6 address has no brackets.
	Host string
}

// Decode makes the body for D: the client's, with P's params as they came.
// Every other byte is as it was, token limits and stream too. body is not
// changed.
//
// The error matches [ErrNoHandoff] for the zero Handoff, [ErrUnusable] when the
// params do not ask D to read (do_remote_prefill is not true) and o.ForceFlags
// is not set, [ErrInvalid] for a bad o.Host, or [ErrMalformed].
func Decode(body []byte, h Handoff, o DecodeOptions) ([]byte, error) {
	const op = "decode body"
	if h.IsZero() {
		return nil, fail(ErrNoHandoff, op, "", "send Strip of the body instead")
	}
	var edits []edit
	if o.ForceFlags {
		edits = append(edits, set(keyDoPrefill, "true"), set(keyDoDecode, "false"))
	} else if !h.params.DoRemotePrefill {
		return nil, fail(ErrUnusable, op, keyDoPrefill, "not true, so D would read nothing; ForceFlags sets it")
	}
	if o.Host != "" {
		if !validHost(o.Host) {
			return nil, fail(ErrInvalid, op, keyHost, "%q is no host name or address", o.Host)
		}
		edits = append(edits, set(keyHost, quote(o.Host)))
	}
	b, err := clientBody(op, body)
	if err != nil {
		return nil, err
	}
	return b.edit(set(keyParams, h.relayed(edits...))), nil
}

// relayed is the params with the edits made, the bytes as they came if none.
func (h Handoff) relayed(edits ...edit) string {
	if len(edits) == 0 {
		return string(h.raw)
	}
	o, _ := parseObject(h.raw) // Parse took it
	return string(o.edit(edits...))
}

// Strip makes the body for an instance that is to do all the work: the
// client's without any kv_transfer_params, so that no client names a peer
// (vllm-project/vllm#47843). The error matches [ErrMalformed].
func Strip(body []byte) ([]byte, error) {
	o, err := clientBody("strip body", body)
	if err != nil {
		return nil, err
	}
	return o.edit(remove(keyParams)), nil
}

// clientBody reads a client's body and removes the params that hide in
// vllm_xargs and sampling_params.extra_args: vLLM puts both into the dict that
// its connector reads.
func clientBody(op string, body []byte) (*object, error) {
	o, err := parseObject(body)
	if err != nil {
		return nil, fail(ErrMalformed, op, "", "%v", err)
	}
	for _, path := range [][]string{{keyXargs}, {keySampling, keyExtraArgs}} {
		if o, err = o.without(op, path, keyParams); err != nil {
			return nil, err
		}
	}
	return o, nil
}

// without removes a key from the object at the path, if they exist.
func (o *object) without(op string, path []string, key string) (*object, error) {
	if len(path) == 0 {
		if o.value(key) == nil {
			return o, nil
		}
		return parseObject(o.edit(remove(key)))
	}
	sub, err := o.sub(op, path[0])
	if err != nil || sub == nil {
		return o, err
	}
	changed, err := sub.without(op, path[1:], key)
	if err != nil || changed == sub {
		return o, err
	}
	return parseObject(o.edit(set(path[0], string(changed.src))))
}

// sub reads the object under a key; nil if there is none or it is something
// else.
func (o *object) sub(op, key string) (*object, error) {
	v := o.value(key)
	if len(v) == 0 || v[0] != '{' {
		return nil, nil
	}
	sub, err := parseObject(v)
	if err != nil {
		return nil, fail(ErrMalformed, op, key, "%v", err)
	}
	return sub, nil
}

// splittable refuses what makes several sequences or none of one request. The
// params name the blocks of one sequence; the second reader of the same blocks
// would find them released (vllm-project/vllm#51505).
func splittable(op string, o, limits *object, api API) error {
	for _, key := range []string{"n", "best_of"} {
		if v := limits.value(key); v != nil && !isNull(v) && !isOne(v) {
			return fail(ErrUnsplittable, op, key, "%.20s, want 1", v)
		}
	}
	for _, key := range []string{"use_beam_search", "background"} {
		if v := o.value(key); v != nil && !isNull(v) && string(v) != "false" {
			return fail(ErrUnsplittable, op, key, "%.20s, want false", v)
		}
	}
	if api == Completions {
		if n := prompts(o.value("prompt")) + prompts(o.value("prompt_embeds")); n > 1 {
			return fail(ErrUnsplittable, op, "prompt", "%d prompts, want 1", n)
		}
	}
	return nil
}

func isOne(v []byte) bool {
	f, err := strconv.ParseFloat(string(bytes.Trim(v, `"`)), 64)
	return err == nil && f == 1
}

// prompts counts the prompts of a value that is a string, a list of token ids,
// or a list of either.
func prompts(v []byte) int {
	if v == nil || isNull(v) {
		return 0
	}
	if list, ok := elements(v); ok && len(list) > 0 && (list[0][0] == '"' || list[0][0] == '[') {
		return len(list)
	}
	return 1
}
