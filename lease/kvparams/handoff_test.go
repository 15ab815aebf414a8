package kvparams

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
)

// A3.6, A5.12, A2.8: the answers of a real vLLM.
func TestAnswersOfVLLMAreRead(t *testing.T) {
	for name, blocks := range map[string]int{"200 tokens": 7, "1 token": 1, "31 tokens": 1, "32 tokens": 1, "33 tokens": 2, "turn 2, owner P, after it read D's blocks": 9} {
		raw := golden(t, name)
		h, err := FromResponse([]byte(`{"id":"x","choices":[],"kv_transfer_params":` + string(raw) + `}`))
		require.NoError(t, err, name)
		require.Equal(t, string(raw), string(h.Raw()))
		p := h.Params()
		require.True(t, p.DoRemotePrefill)
		require.False(t, p.DoRemoteDecode)
		require.Len(t, p.RemoteBlockIDs, 1)
		require.Len(t, p.RemoteBlockIDs[0], blocks, name)
		require.Equal(t, lease.Peer{Engine: "engine-p", Host: "127.0.0.1", Port: 5941, TPSize: 1, PPSize: 1, DCPSize: 1}, p.Peer())
		require.Nil(t, p.Lease, "vLLM has no slots")
	}
	h := parsed(t, `{"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":1,"remote_block_ids":[[0]]}`)
	require.Equal(t, 1, h.Params().Peer().PPSize, "absent counts as 1")
	h = parsed(t, `{"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":1,"remote_block_ids":[[0]],"pp_size":2}`)
	require.Equal(t, 2, h.Params().Peer().PPSize)
}

// A4.15, A4.16, A4.17, A4.29: what D offers at the end of a turn.
func TestTheOfferOfAReaderIsRead(t *testing.T) {
	p := parsed(t, string(golden(t, "end of turn 1, owner D, bidirectional"))).Params()
	require.True(t, p.DoRemoteDecode)
	require.False(t, p.DoRemotePrefill)
	require.Positive(t, p.RemoteNumTokens)
	require.NotEmpty(t, p.RemoteBlockIDs[0])
	require.NotNil(t, p.RemoteBlocksExpiry)
}

// A4.18: a partial last block: fewer tokens than the blocks hold.
func TestAPartialLastBlockIsRead(t *testing.T) {
	p := parsed(t, `{"do_remote_decode":true,"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":1,"remote_block_ids":[[4,5,6]],"remote_num_tokens":40}`).Params()
	require.Len(t, p.RemoteBlockIDs[0], 3)
	require.Less(t, p.RemoteNumTokens, 48)
}

// llm-d-router#2855, kserve#5987: an answer without params is never silent.
func TestAnAnswerWithoutParamsIsNoHandoff(t *testing.T) {
	for _, body := range []string{
		`{"choices":[]}`, `{"choices":[],"kv_transfer_params":null}`, `{"choices":[{"kv_transfer_params":` + offer + `}]}`,
		`{"error":{"message":"x","code":500}}`, `{}`,
		`{"kv_transfer_params":` + string(golden(t, "33 tokens, without do_remote_decode")) + `}`,
	} {
		h, err := FromResponse([]byte(body))
		requireKey(t, err, ErrNoHandoff, "kv_transfer_params")
		require.True(t, h.IsZero(), body)
		require.Nil(t, h.Raw())
	}
	for _, raw := range []string{"", "null", " null\n"} {
		_, err := Parse([]byte(raw))
		require.ErrorIs(t, err, ErrNoHandoff)
	}
	for _, body := range []string{"", "data: {}", `[]`, `{"kv_transfer_params":{}`, "\x1f\x8b\x08", "<html>"} {
		_, err := FromResponse([]byte(body))
		require.ErrorIs(t, err, ErrUnusable, body)
		require.NotErrorIs(t, err, ErrMalformed, "not the client's fault")
	}
}

func TestParamsThatCannotBeReadFromNameTheKey(t *testing.T) {
	for _, tt := range []struct{ old, new, key string }{
		{`"remote_engine_id":"P-engine"`, `"x1":1`, "remote_engine_id"},
		{`"remote_engine_id":"P-engine"`, `"remote_engine_id":null`, "remote_engine_id"},
		{`"remote_engine_id":"P-engine"`, `"remote_engine_id":""`, "remote_engine_id"},
		{`"remote_engine_id":"P-engine"`, `"remote_engine_id":7`, "remote_engine_id"},
		{`"remote_request_id":"chatcmpl-a:b,c-0-abcdef01"`, `"x1":1`, "remote_request_id"},
		{`"remote_host":"localhost"`, `"remote_host":null`, "remote_host"},
		{`"remote_port":5600`, `"remote_port":null`, "remote_port"},
		{`"remote_port":5600`, `"x1":1`, "remote_port"},
		// dynamo#12247, cases.md 23
		{`"remote_port":5600`, `"remote_port":5600.5`, "remote_port"},
		{`"remote_port":5600`, `"remote_port":70000`, "remote_port"},
		{`"remote_port":5600`, `"remote_port":-1`, "remote_port"},
		{`"remote_block_ids":[[5,6,7]]`, `"remote_block_ids":null`, "remote_block_ids"},
		{`"remote_block_ids":[[5,6,7]]`, `"remote_block_ids":[]`, "remote_block_ids"},
		{`"remote_block_ids":[[5,6,7]]`, `"remote_block_ids":[[],[]]`, "remote_block_ids"},
		// cases.md 22
		{`[[5,6,7]]`, `[[-1]]`, "remote_block_ids"},
		{`[[5,6,7]]`, `[[2147483648]]`, "remote_block_ids"},
		{`[[5,6,7]]`, `[[9223372036854775807]]`, "remote_block_ids"},
		{`[[5,6,7]]`, `[5,6,7]`, "remote_block_ids"},
		{`"tp_size":2`, `"tp_size":0`, "tp_size"},
		{`9007199254740991`, `9007199254740993`, "remote_lease_nonce"},
	} {
		raw := strings.Replace(offer, tt.old, tt.new, 1)
		require.NotEqual(t, offer, raw)
		h, err := FromResponse([]byte(`{"kv_transfer_params":` + raw + `}`))
		requireKey(t, err, ErrUnusable, tt.key)
		require.NotErrorIs(t, err, ErrNoHandoff)
		require.True(t, h.IsZero())
	}
	for _, raw := range []string{`[]`, `"x"`, `5`, `true`, `{"a":1,"a":2}`, `{"remote_host":"a","remote_hos\u0074":"b"}`, `{`} {
		_, err := Parse([]byte(raw))
		require.ErrorIs(t, err, ErrUnusable, raw)
	}
	_, err := Parse([]byte(strings.Replace(offer, `5600`, `5600.5`, 1)))
	require.ErrorIs(t, err, lease.ErrInvalid, "the cause stays")
}

// dynamo#12247, cases.md 23: the ways of the routers that stand in between.
func TestParamsSurviveRoutersThatRound(t *testing.T) {
	asAny := func(raw []byte) []byte { // llm-d's sidecar, kthena: JSON into any and back
		var v map[string]any
		require.NoError(t, json.Unmarshal(raw, &v))
		out, err := json.Marshal(v)
		require.NoError(t, err)
		return out
	}
	podIP := func(raw []byte) []byte { // AIBrix: as above, with the pod's address
		var v map[string]any
		require.NoError(t, json.Unmarshal(raw, &v))
		v["remote_host"] = "10.1.2.3"
		out, err := json.Marshal(v)
		require.NoError(t, err)
		return out
	}
	asStruct := func(raw []byte) []byte { // a protobuf Struct: every number a double, written with a fraction
		d := json.NewDecoder(bytes.NewReader(raw))
		d.UseNumber()
		var v any
		require.NoError(t, d.Decode(&v))
		var walk func(any) any
		walk = func(v any) any {
			switch v := v.(type) {
			case json.Number:
				f, err := v.Float64()
				require.NoError(t, err)
				return json.Number(fmt.Sprintf("%.1f", f))
			case map[string]any:
				for k := range v {
					v[k] = walk(v[k])
				}
			case []any:
				for i := range v {
					v[i] = walk(v[i])
				}
			}
			return v
		}
		out, err := json.Marshal(walk(v))
		require.NoError(t, err)
		require.Contains(t, string(out), "5600.0")
		return out
	}
	asStrings := func(raw []byte) []byte {
		return []byte(strings.NewReplacer(`5600`, `"5600"`, `9007199254740991`, `"9007199254740991"`, `slot":3`, `slot":"3"`, `[[5,6,7]]`, `[["5","6","7"]]`).Replace(string(raw)))
	}
	for name, router := range map[string]func([]byte) []byte{"any": asAny, "pod address": podIP, "protobuf Struct": asStruct, "strings": asStrings} {
		p, d := parsed(t, offer), Handoff{}
		// Our relay before and after the other router.
		body, err := Decode([]byte(`{}`), p, DecodeOptions{})
		require.NoError(t, err)
		d, err = FromResponse(body)
		require.NoError(t, err)
		d, err = Parse(router(d.Raw()))
		require.NoError(t, err, name)
		got, want := d.Params(), p.Params()
		require.Equal(t, &lease.SlotRef{Slot: 3, Nonce: lease.MaxNonce}, got.Lease, name)
		require.Equal(t, want.RemoteBlockIDs, got.RemoteBlockIDs, name)
		require.Equal(t, want.RemoteRequestID, got.RemoteRequestID, name)
		require.Equal(t, want.RemoteEngineID, got.RemoteEngineID, name)
		require.Equal(t, 5600, got.RemotePort, name)
		if name == "pod address" {
			require.Equal(t, "10.1.2.3", got.RemoteHost)
		}
	}
}

// vllm#36958, vllm#53244, cases.md 24: the owner's id is what the relay hands
// on, whatever is in it.
func TestRequestIDsAreRelayedAsTheyAre(t *testing.T) {
	for _, id := range []string{"a:b", "a,b", "HB:x", "with space", "é→😀", strings.Repeat("x", 512), `q"\u00e9\n`, "</script>"} {
		raw := strings.Replace(offer, `"chatcmpl-a:b,c-0-abcdef01"`, quote(id), 1)
		h := parsed(t, raw)
		require.Equal(t, id, h.Params().RemoteRequestID)
		body, err := Decode([]byte(`{}`), h, DecodeOptions{Host: "10.0.0.1", ForceFlags: true})
		require.NoError(t, err)
		back, err := FromResponse(body)
		require.NoError(t, err)
		require.Equal(t, id, back.Params().RemoteRequestID)
		require.Contains(t, string(body), quote(id))
	}
}

// vllm#23587, cases.md 43: unknown keys are ignored and survive; an older
// peer's params without the newer ones still name a peer.
func TestKeysOfRoutersAreIgnoredAndRelayed(t *testing.T) {
	keys := []string{"remote_decoder", "remote_prefiller", "remote_kv_source", "transfer_id", "remote_notify_port", "remote_handshake_port",
		"remote_dp_rank", "remote_dp_rank_override", "remote_hosts", "remote_dp_size", "remote_dp_size_local"}
	raw := string(golden(t, "1 token"))
	for i, k := range keys {
		require.True(t, RouterKey(k), k)
		raw = strings.TrimSuffix(raw, "}") + fmt.Sprintf(`,%q: [%d.50, {"a":null}]}`, k, i)
	}
	raw = strings.TrimSuffix(raw, "}") + `,"remote_registration_generation":4,"from_2027":{"z":1,"a":9007199254740993}}`
	h := parsed(t, raw)
	require.Equal(t, parsed(t, string(golden(t, "1 token"))).Params().Peer(), h.Params().Peer())
	body, err := Decode([]byte(`{}`), h, DecodeOptions{})
	require.NoError(t, err)
	require.Equal(t, `{"kv_transfer_params":`+raw+`}`, string(body))
	for _, k := range []string{"remote_host", "from_2027", "remote_registration_generation", ""} {
		require.False(t, RouterKey(k), k)
	}
}

func TestAHandoffKeepsItsBytes(t *testing.T) {
	raw := []byte(offer)
	h, err := Parse(raw)
	require.NoError(t, err)
	clear(raw)
	require.Equal(t, offer, string(h.Raw()))
	clear(h.Raw())
	require.Equal(t, offer, string(h.Raw()))
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(offer))
	f.Add([]byte(`{"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":"1","remote_block_ids":[["0"]]}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, data []byte) {
		h, err := Parse(data)
		if err != nil {
			if !h.IsZero() {
				t.Fatal("an error and a handoff")
			}
			return
		}
		body, err := Decode([]byte(`{"a":1}`), h, DecodeOptions{ForceFlags: true, Host: "10.0.0.1"})
		if err != nil {
			t.Fatal(err)
		}
		back, err := FromResponse(body)
		if err != nil {
			t.Fatalf("%q: %v", body, err)
		}
		got, want := back.Params(), h.Params()
		want.DoRemotePrefill, want.DoRemoteDecode, want.RemoteHost = true, false, "10.0.0.1"
		if fmt.Sprint(got.Peer(), got.RemoteBlockIDs, got.Lease == nil) != fmt.Sprint(want.Peer(), want.RemoteBlockIDs, want.Lease == nil) {
			t.Fatalf("%+v, want %+v", got, want)
		}
	})
}
