package lease

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The object that vLLM 0.33.0 answers with (vllm-wire.md 3.2), with our lease.
const paramsGolden = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[5,6,7]],` +
	`"remote_engine_id":"P-engine","remote_request_id":"cmpl-1-0-abcdef01","remote_host":"localhost","remote_port":5600,` +
	`"tp_size":2,"dcp_size":1,"pp_size":1,"remote_num_tokens":40,"remote_blocks_expiry_time":null,"transfer_mode":"pull",` +
	`"remote_lease_slot":3,"remote_lease_nonce":9007199254740991}`

func goldenParams() Params {
	return Params{
		DoRemotePrefill: true, RemoteBlockIDs: [][]int{{5, 6, 7}}, RemoteEngineID: "P-engine",
		RemoteRequestID: "cmpl-1-0-abcdef01", RemoteHost: "localhost", RemotePort: 5600, TPSize: 2, DCPSize: 1, PPSize: 1,
		RemoteNumTokens: 40, TransferMode: "pull", Lease: &SlotRef{3, MaxNonce},
	}
}

func TestParamsAreWrittenAsVLLMWritesThem(t *testing.T) {
	b, err := json.Marshal(goldenParams())
	require.NoError(t, err)
	require.Equal(t, paramsGolden, string(b))

	var back Params
	require.NoError(t, json.Unmarshal(b, &back))
	require.Equal(t, goldenParams(), back)
}

// What a router sends to P (A10.19): only do_remote_decode, the rest null.
func TestParamsOfARouterAreRead(t *testing.T) {
	var p Params
	require.NoError(t, json.Unmarshal([]byte(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,
		"remote_block_ids":null,"remote_host":null,"remote_port":null}`), &p))
	require.Equal(t, Params{DoRemoteDecode: true}, p)
	b, err := json.Marshal(p)
	require.NoError(t, err)
	require.JSONEq(t, `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_request_id":null,
		"remote_block_ids":null,"remote_host":null,"remote_port":null,"remote_num_tokens":0,"remote_blocks_expiry_time":null}`, string(b))
}

// dynamo#12247, cases.md 23: a router makes doubles or strings of integers.
func TestIntegersComeAsDoublesOrStrings(t *testing.T) {
	for _, port := range []string{`5600`, `5600.0`, `"5600"`, `5.6e3`} {
		var p Params
		require.NoError(t, json.Unmarshal([]byte(`{"remote_port":`+port+`}`), &p), port)
		require.Equal(t, 5600, p.RemotePort, port)
	}
	for _, nonce := range []string{`9007199254740991`, `"9007199254740991"`, `9007199254740991.0`} {
		var p Params
		require.NoError(t, json.Unmarshal([]byte(`{"remote_lease_slot":"7","remote_lease_nonce":`+nonce+`}`), &p), nonce)
		require.Equal(t, &SlotRef{7, MaxNonce}, p.Lease)
	}
	var p Params
	require.NoError(t, json.Unmarshal([]byte(`{"remote_block_ids":[[1.0,"2",3]],"tp_size":2.0,"pp_size":"2"}`), &p))
	require.Equal(t, [][]int{{1, 2, 3}}, p.RemoteBlockIDs)
	require.Equal(t, 2, p.TPSize)
	require.Equal(t, 2, p.PPSize, "A2.8")
}

// cases.md 22, 23; vllm-wire.md 9.3 to 9.6: what clients send must not reach an assertion.
func TestParamsOutOfRangeAreRefusedByName(t *testing.T) {
	for _, tt := range []struct{ key, value string }{
		{"remote_port", `5600.5`}, {"remote_port", `70000`}, {"remote_port", `-1`}, {"remote_port", `"x"`}, {"remote_port", `0`},
		{"remote_port", `[5600]`}, {"remote_port", `true`},
		{"remote_lease_nonce", `9007199254740992`}, {"remote_lease_nonce", `9007199254740993`}, {"remote_lease_nonce", `"9007199254740993"`},
		{"remote_lease_nonce", `0`}, {"remote_lease_nonce", `-4`}, {"remote_lease_nonce", `1.5`},
		{"remote_lease_slot", `-1`}, {"remote_lease_slot", `4294967296`},
		{"remote_block_ids", `[5,6]`}, {"remote_block_ids", `[[-1]]`}, {"remote_block_ids", `[[2147483648]]`},
		{"remote_block_ids", `[[9223372036854775807]]`}, {"remote_block_ids", `[[1.5]]`}, {"remote_block_ids", `"5"`}, {"remote_block_ids", `[[null]]`},
		{"tp_size", `0`}, {"tp_size", `100000`}, {"pp_size", `-2`}, {"dcp_size", `"a"`},
		{"remote_num_tokens", `-1`}, {"remote_engine_id", `5`}, {"remote_host", `{}`}, {"do_remote_prefill", `"yes"`},
		{"remote_blocks_expiry_time", `"soon"`}, {"remote_blocks_ttl", `-3`}, {"remote_blocks_ttl", `1e12`}, {"transfer_mode", `1`},
	} {
		p := Params{RemoteHost: "kept"}
		err := json.Unmarshal([]byte(`{"`+tt.key+`":`+tt.value+`}`), &p)
		requireRefused(t, err, ErrInvalid)
		require.ErrorContains(t, err, tt.key)
		require.Equal(t, Params{RemoteHost: "kept"}, p, "%s %s", tt.key, tt.value)
	}
	requireRefused(t, new(Params).UnmarshalJSON([]byte(`[]`)), ErrInvalid)
}

// Half a lease cannot be checked, so it is none.
func TestHalfALeaseIsNone(t *testing.T) {
	for _, s := range []string{`{"remote_lease_slot":1}`, `{"remote_lease_nonce":1}`, `{"remote_lease_slot":1,"remote_lease_nonce":null}`} {
		var p Params
		require.NoError(t, json.Unmarshal([]byte(s), &p))
		require.Nil(t, p.Lease)
	}
}

// vllm-wire.md 3: unknown keys pass through untouched (remote_registration_generation,
// remote_prefill_cached_tokens; A1.3 pcp_size).
func TestUnknownKeysSurvive(t *testing.T) {
	in := `{"do_remote_prefill":true,"remote_registration_generation":1,"pcp_size":2,"x\"y":{"a":[1.0,12345678901234567890]},"tp_size":4,"dcp_size":2,"pp_size":3}`
	var p Params
	require.NoError(t, json.Unmarshal([]byte(in), &p))
	require.Equal(t, [3]int{4, 2, 3}, [3]int{p.TPSize, p.DCPSize, p.PPSize})
	b, err := json.Marshal(p)
	require.NoError(t, err)
	require.Contains(t, string(b), `"remote_registration_generation":1`)
	require.Contains(t, string(b), `"pcp_size":2`)
	require.Contains(t, string(b), `"x\"y":{"a":[1.0,12345678901234567890]}`)

	p.Extra = map[string]json.RawMessage{"tp_size": json.RawMessage(`9`)}
	b, err = json.Marshal(p)
	require.NoError(t, err)
	require.NotContains(t, string(b), "9", "a field wins over Extra")

	p.Extra = map[string]json.RawMessage{"k": json.RawMessage(`{`)}
	_, err = json.Marshal(p)
	require.ErrorIs(t, err, ErrInvalid)
}

func TestAbsentSizesCountAsOne(t *testing.T) {
	p := Params{RemoteEngineID: "e", RemoteHost: "h", RemotePort: 1}
	require.Equal(t, Peer{"e", "h", 1, 1, 1, 1}, p.Peer())
}

func TestExpiryAndRemainingTimeRoundTrip(t *testing.T) {
	expiry := 1234.5
	p := Params{DoRemoteDecode: true, RemoteBlocksExpiry: &expiry, RemoteBlocksTTL: 480 * time.Second}
	require.Equal(t, p, viaJSON(t, p))
}

func FuzzParams(f *testing.F) {
	for _, s := range []string{paramsGolden, `{}`, `{"remote_port":"5600"}`, `{"remote_block_ids":[[],[1,2]]}`, `null`, `{"a":{"b":[1]}}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var p Params
		if json.Unmarshal(data, &p) != nil {
			return
		}
		b, err := json.Marshal(p)
		require.NoError(t, err)
		var back Params
		require.NoError(t, json.Unmarshal(b, &back), string(b))
		again, err := json.Marshal(back)
		require.NoError(t, err)
		require.Equal(t, string(b), string(again))
	})
}

func TestCloneSharesNothing(t *testing.T) {
	at := 1.5
	p := &Params{DoRemotePrefill: true, RemoteBlockIDs: [][]int{{1, 2}, nil}, RemoteEngineID: "e", RemoteBlocksExpiry: &at,
		Lease: &SlotRef{Slot: 3, Nonce: 4}, Extra: map[string]json.RawMessage{"k": json.RawMessage(`"v"`)}}
	q := p.Clone()
	require.Equal(t, p, q)
	q.RemoteBlockIDs[0][0], *q.RemoteBlocksExpiry, q.Lease.Nonce, q.Extra["k"][1] = 9, 9, 9, '9'
	q.Extra["new"] = nil
	require.Equal(t, &Params{DoRemotePrefill: true, RemoteBlockIDs: [][]int{{1, 2}, nil}, RemoteEngineID: "e", RemoteBlocksExpiry: &at,
		Lease: &SlotRef{Slot: 3, Nonce: 4}, Extra: map[string]json.RawMessage{"k": json.RawMessage(`"v"`)}}, p)
	require.Equal(t, 1.5, at)
	require.Equal(t, &Params{}, (&Params{}).Clone())
}
