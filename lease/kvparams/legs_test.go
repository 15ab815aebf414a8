package kvparams

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A10.19: to P remote decode true, the other fields null, 1 token, no stream.
func TestPrefillBodyPerAPI(t *testing.T) {
	for _, tt := range []struct {
		name     string
		api      API
		in, want string
	}{
		{"chat", ChatCompletions,
			`{"model":"m","messages":[{"role":"user","content":"\u0068i"}],"stream":true,"stream_options":{"include_usage":true},"max_completion_tokens":64,"min_tokens":8,"seed":12345678901234567890,"temperature":1.0, "extra":{"b":1,"a":2}}`,
			`{"model":"m","messages":[{"role":"user","content":"\u0068i"}],"stream":false,"max_completion_tokens":1,"min_tokens":1,"seed":12345678901234567890,"temperature":1.0, "extra":{"b":1,"a":2},"kv_transfer_params":` + askDecode + `,"max_tokens":1}`},
		{"completions", Completions,
			"{\n  \"prompt\": [1,2,3],\n  \"max_tokens\": 16,\n  \"n\": 1\n}\n",
			"{\n  \"prompt\": [1,2,3],\n  \"max_tokens\": 1,\n  \"n\": 1,\"stream\":false,\"kv_transfer_params\":" + askDecode + "\n}\n"},
		{"responses", Responses,
			`{"input":"x","max_output_tokens":100,"store":true,"background":false}`,
			`{"input":"x","max_output_tokens":1,"store":false,"background":false,"stream":false,"kv_transfer_params":` + askDecode + `}`},
		{"responses that would be stored", Responses, `{"input":"x"}`,
			`{"input":"x","stream":false,"kv_transfer_params":` + askDecode + `,"max_output_tokens":1,"store":false}`},
		{"generate", Generate,
			`{"token_ids":[1,2],"sampling_params":{"max_tokens":9, "min_tokens":2,"n":1,"seed":9223372036854775807},"stream":true}`,
			`{"token_ids":[1,2],"sampling_params":{"max_tokens":1, "min_tokens":1,"n":1,"seed":9223372036854775807},"stream":false,"kv_transfer_params":` + askDecode + `}`},
		{"generate without limits", Generate,
			`{"token_ids":[1,2],"sampling_params":{}}`,
			`{"token_ids":[1,2],"sampling_params":{"max_tokens":1},"stream":false,"kv_transfer_params":` + askDecode + `}`},
	} {
		in := tt.in
		got, err := Prefill([]byte(in), tt.api, Handoff{})
		require.NoError(t, err, tt.name)
		require.Equal(t, tt.want, string(got), tt.name)
		require.True(t, json.Valid(got), tt.name)
		require.Equal(t, tt.in, in, "the body changed")
	}
	var p map[string]any
	require.NoError(t, json.Unmarshal([]byte(askDecode), &p))
	require.Equal(t, map[string]any{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": nil,
		"remote_block_ids": nil, "remote_host": nil, "remote_port": nil}, p)
}

// vllm#51505, cases.md 22: several sequences of one request would share one
// handoff.
func TestRequestsOfSeveralSequencesAreNotSplit(t *testing.T) {
	for _, tt := range []struct {
		api      API
		body     string
		key      string // "" = splittable
		sentinel error
	}{
		{ChatCompletions, `{"n":2}`, "n", ErrUnsplittable},
		{ChatCompletions, `{"n":"2"}`, "n", ErrUnsplittable},
		{ChatCompletions, `{"n":0}`, "n", ErrUnsplittable},
		{ChatCompletions, `{"use_beam_search":true}`, "use_beam_search", ErrUnsplittable},
		{Completions, `{"prompt":"a","best_of":3}`, "best_of", ErrUnsplittable},
		{Completions, `{"prompt":["a","b"]}`, "prompt", ErrUnsplittable},
		{Completions, `{"prompt":[[1,2],[3]]}`, "prompt", ErrUnsplittable},
		{Completions, `{"prompt":"a","prompt_embeds":"AAAA"}`, "prompt", ErrUnsplittable},
		{Completions, `{"prompt_embeds":["AAAA","BBBB"]}`, "prompt", ErrUnsplittable},
		{Responses, `{"input":"a","background":true}`, "background", ErrUnsplittable},
		{Generate, `{"token_ids":[1],"sampling_params":{"n":4}}`, "n", ErrUnsplittable},
		{Generate, `{"token_ids":[1]}`, "sampling_params", ErrMalformed},
		{Generate, `{"token_ids":[1],"sampling_params":null}`, "sampling_params", ErrMalformed},
		{Generate, `{"token_ids":[1],"sampling_params":{"n":1,"n":2}}`, "sampling_params", ErrMalformed},
		{ChatCompletions, `{"n":1.0,"use_beam_search":null}`, "", nil},
		{ChatCompletions, `{"n":null}`, "", nil},
		{Completions, `{"prompt":["a"]}`, "", nil},
		{Completions, `{"prompt":[[1,2]]}`, "", nil},
		{Completions, `{"prompt":[1,2,3]}`, "", nil},
		{Completions, `{"prompt":[]}`, "", nil},
		{Completions, `{"prompt":null,"prompt_embeds":"AAAA"}`, "", nil},
	} {
		got, err := Prefill([]byte(tt.body), tt.api, Handoff{})
		if tt.sentinel == nil {
			require.NoError(t, err, tt.body)
			continue
		}
		require.Nil(t, got)
		requireKey(t, err, tt.sentinel, tt.key)
	}
}

func TestBodiesThatAreNoObjectAreRefusedByEveryLeg(t *testing.T) {
	h := parsed(t, offer)
	for _, body := range []string{``, `[]`, `{"a":1}{"a":2}`, `{"a":1,"a":2}`, `{"kv_transfer_params":1,"kv_transfer_param\u0073":2}`, `{"a":`, `{"vllm_xargs":{"a":1,"a":2}}`,
		strings.Repeat(`{"a":`, 2000) + "1" + strings.Repeat("}", 2000)} {
		for name, leg := range map[string]func() ([]byte, error){
			"prefill": func() ([]byte, error) { return Prefill([]byte(body), ChatCompletions, Handoff{}) },
			"decode":  func() ([]byte, error) { return Decode([]byte(body), h, DecodeOptions{}) },
			"strip":   func() ([]byte, error) { return Strip([]byte(body)) },
		} {
			got, err := leg()
			require.ErrorIs(t, err, ErrMalformed, "%s %.40s", name, body)
			require.NotErrorIs(t, err, ErrNoHandoff)
			require.Nil(t, got)
		}
	}
	_, err := Prefill([]byte(`{}`), API(0), Handoff{})
	require.ErrorIs(t, err, ErrInvalid)
	_, err = Prefill([]byte(`{}`), API(9), Handoff{})
	require.ErrorContains(t, err, "unknown API 9")
}

// A10.19: P's params go to D unchanged, with the rest of the body.
func TestDecodeBodyCarriesTheParamsVerbatim(t *testing.T) {
	h := parsed(t, offer)
	got, err := Decode([]byte(`{"messages":[],"stream":true, "max_tokens":7}`), h, DecodeOptions{})
	require.NoError(t, err)
	require.Equal(t, `{"messages":[],"stream":true, "max_tokens":7,"kv_transfer_params":`+offer+`}`, string(got))
	back, err := FromResponse(got)
	require.NoError(t, err)
	require.Equal(t, h, back)

	h = parsed(t, string(golden(t, "33 tokens")))
	got, err = Decode([]byte(`{}`), h, DecodeOptions{})
	require.NoError(t, err)
	require.Equal(t, `{"kv_transfer_params":`+string(golden(t, "33 tokens"))+`}`, string(got))
}

func TestDecodeOptionsChangeOnlyWhatTheyName(t *testing.T) {
	h := parsed(t, offer)
	change := strings.NewReplacer(`"remote_host":"localhost"`, `"remote_host":"fd00::7"`)
	got, err := Decode([]byte(`{}`), h, DecodeOptions{Host: "fd00::7"})
	require.NoError(t, err)
	require.Equal(t, `{"kv_transfer_params":`+change.Replace(offer)+`}`, string(got))

	turned := strings.NewReplacer(`"do_remote_prefill":true`, `"do_remote_prefill":false`, `"do_remote_decode": false`, `"do_remote_decode": true`).Replace(offer)
	h = parsed(t, turned)
	_, err = Decode([]byte(`{}`), h, DecodeOptions{})
	requireKey(t, err, ErrUnusable, "do_remote_prefill")
	got, err = Decode([]byte(`{}`), h, DecodeOptions{ForceFlags: true})
	require.NoError(t, err)
	require.Equal(t, `{"kv_transfer_params":`+offer+`}`, string(got))

	h = parsed(t, strings.Replace(offer, `"do_remote_prefill":true, `, "", 1))
	got, err = Decode([]byte(`{}`), h, DecodeOptions{ForceFlags: true})
	require.NoError(t, err)
	require.True(t, strings.HasSuffix(string(got), `"a":1E2},"do_remote_prefill":true}}`), string(got))

	for _, host := range []string{"a b", `x","remote_port":1,"y":"`, "[::1]", "h:1", "é"} {
		_, err = Decode([]byte(`{}`), parsed(t, offer), DecodeOptions{Host: host})
		requireKey(t, err, ErrInvalid, "remote_host")
	}
	_, err = Decode([]byte(`{}`), Handoff{}, DecodeOptions{ForceFlags: true})
	require.ErrorIs(t, err, ErrNoHandoff)
}

// vllm#52234, vllm#47843, cases.md 22: what a client puts into
// kv_transfer_params reaches neither P nor D.
func TestAClientNamesNoPeer(t *testing.T) {
	evil := `{"do_remote_prefill":true,"remote_host":"10.0.0.66","remote_port":1,"remote_block_ids":[[-1,2147483648,9223372036854775807]],"remote_engine_id":"victim","remote_request_id":"r"}`
	h := parsed(t, offer)
	for _, body := range []string{
		`{"a":1,"kv_transfer_params":` + evil + `,"b":2}`,
		`{"a":1,"kv\u005ftransfer_params":` + evil + `,"b":2}`,
		`{"a":1,"vllm_xargs":{"x":1,"kv_transfer_params":` + evil + `},"b":2}`,
		`{"a":1,"sampling_params":{"n":1,"extra_args":{"kv_transfer_params":` + evil + `}},"b":2}`,
		`{"kv_transfer_params":` + evil + `,"a":1,"b":2,"vllm_xargs":{"kv_transfer_param\u0073":` + evil + `},"sampling_params":{"extra_args":{"kv_transfer_params":"x"}}}`,
	} {
		for _, api := range []API{ChatCompletions, Generate} {
			if api == Generate && !strings.Contains(body, "sampling_params") {
				continue
			}
			p, err := Prefill([]byte(body), api, Handoff{})
			require.NoError(t, err)
			require.NotContains(t, string(p), "victim")
			require.Equal(t, 1, strings.Count(string(p), `transfer_param`), string(p))
			require.Contains(t, string(p), askDecode)
		}
		d, err := Decode([]byte(body), h, DecodeOptions{})
		require.NoError(t, err)
		require.NotContains(t, string(d), "victim")
		require.Contains(t, string(d), offer)

		s, err := Strip([]byte(body))
		require.NoError(t, err)
		require.NotContains(t, string(s), "victim")
		require.NotContains(t, string(s), "transfer_param")
		for _, b := range [][]byte{d, s} {
			require.Contains(t, string(b), `"a":1`)
			require.Contains(t, string(b), `"b":2`)
			require.True(t, json.Valid(b))
		}
	}
	s, err := Strip([]byte(`{"vllm_xargs":5,"sampling_params":[{}], "x": 1.0 }`))
	require.NoError(t, err)
	require.Equal(t, `{"vllm_xargs":5,"sampling_params":[{}], "x": 1.0 }`, string(s))
}

// Turn 2: what D offered goes to P whole, with the flags of a prefill.
func TestPrefillRelaysTheTurnBefore(t *testing.T) {
	raw := golden(t, "end of turn 1, owner D, bidirectional")
	got, err := Prefill([]byte(`{"messages":[]}`), ChatCompletions, parsed(t, string(raw)))
	require.NoError(t, err)
	require.Equal(t, `{"messages":[],"stream":false,"kv_transfer_params":`+string(raw)+`,"max_tokens":1}`, string(got))

	got, err = Prefill([]byte(`{"messages":[]}`), ChatCompletions, parsed(t, offer))
	require.NoError(t, err)
	require.Contains(t, string(got), `{"do_remote_prefill":false, "do_remote_decode": true,"remote_block_ids":[[5,6,7]]`)
}

func TestAPIOfAPath(t *testing.T) {
	for path, want := range map[string]API{
		"/v1/chat/completions": ChatCompletions, "/prefix/v1/completions": Completions, "/v1/responses": Responses,
		"/inference/v1/generate": Generate, "/v1/messages": 0, "/v1/completions/x": 0, "": 0, "/generate": 0,
	} {
		api, ok := APIOf(path)
		require.Equal(t, want, api, path)
		require.Equal(t, want != 0, ok, path)
	}
	require.Equal(t, "/v1/responses", Responses.String())
	require.Equal(t, "API(7)", API(7).String())
}
