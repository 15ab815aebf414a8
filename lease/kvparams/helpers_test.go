package kvparams

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// An offer with our lease, keys of routers and keys that nobody knows.
const offer = `{"do_remote_prefill":true, "do_remote_decode": false,"remote_block_ids":[[5,6,7]],` +
	`"remote_engine_id":"P-engine","remote_request_id":"chatcmpl-a:b,c-0-abcdef01","remote_host":"localhost","remote_port":5600,` +
	`"tp_size":2,"remote_num_tokens":40,"remote_blocks_expiry_time":null,"transfer_mode":"pull",` +
	`"remote_lease_slot":3,"remote_lease_nonce":9007199254740991,"transfer_id":"tx1","x":{"b":[1.0,12345678901234567890,9007199254740993],"a":1E2}}`

// golden is the params of one capture from vLLM in testdata/wire.
func golden(t testing.TB, name string) []byte {
	t.Helper()
	var file struct {
		Params []struct {
			Name   string          `json:"name"`
			Params json.RawMessage `json:"kv_transfer_params"`
		}
	}
	data, err := os.ReadFile("../../testdata/wire/params.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, &file))
	for _, p := range file.Params {
		if p.Name == name {
			return p.Params
		}
	}
	require.FailNow(t, "no such golden", name)
	return nil
}

func parsed(t testing.TB, raw string) Handoff {
	t.Helper()
	h, err := Parse([]byte(raw))
	require.NoError(t, err)
	return h
}

// requireKey checks the sentinel, and that the error names the key both ways.
func requireKey(t testing.TB, err, sentinel error, key string) {
	t.Helper()
	require.ErrorIs(t, err, sentinel)
	e, ok := errors.AsType[*Error](err)
	require.True(t, ok, "%T", err)
	require.Equal(t, key, e.Key, err.Error())
	require.Contains(t, err.Error(), key)
	require.True(t, strings.HasPrefix(err.Error(), "kvparams: "), err.Error())
}
