package kvparams

import (
	"bytes"
	"encoding/json"
	"errors"

	"github.com/nixlgo/nixlgo/lease"
)

// The keys of kv_transfer_params that a router looks at.
const (
	keyParams      = "kv_transfer_params"
	keyDoPrefill   = "do_remote_prefill"
	keyDoDecode    = "do_remote_decode"
	keyEngineID    = "remote_engine_id"
	keyRequestID   = "remote_request_id"
	keyHost        = "remote_host"
	keyPort        = "remote_port"
	keyBlockIDs    = "remote_block_ids"
	keyResponse    = "response"
	keyXargs       = "vllm_xargs"
	keySampling    = "sampling_params"
	keyExtraArgs   = "extra_args"
	keyStream      = "stream"
	keyStreamOpts  = "stream_options"
	keyStore       = "store"
	keyMinTokens   = "min_tokens"
	keyMaxTokens   = "max_tokens"
	keyMaxComplete = "max_completion_tokens"
	keyMaxOutput   = "max_output_tokens"
)

// Handoff is the kv_transfer_params of an answer: what one engine keeps and
// another may read. It is immutable; the zero Handoff is none.
type Handoff struct {
	raw    []byte
	params lease.Params
}

// Parse reads a kv_transfer_params object. Integers may have become doubles
// (5600.0) or decimal strings on the way. The error matches [ErrNoHandoff] for
// null, and [ErrUnusable] when it is no object, a value is out of place, a key
// comes twice, or remote_engine_id, remote_request_id, remote_host,
// remote_port or remote_block_ids is missing or empty: [Error.Key] is that key.
func Parse(raw []byte) (Handoff, error) {
	const op = "read " + keyParams
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || isNull(raw) {
		return Handoff{}, fail(ErrNoHandoff, op, "", "null")
	}
	o, err := parseObject(raw)
	if err != nil {
		return Handoff{}, fail(ErrUnusable, op, "", "%v", err)
	}
	var p lease.Params
	if err := p.UnmarshalJSON(raw); err != nil {
		return Handoff{}, &Error{Op: op, Key: o.culprit(), Err: errors.Join(ErrUnusable, err)}
	}
	blocks := 0
	for _, group := range p.RemoteBlockIDs {
		blocks += len(group)
	}
	for _, need := range []struct {
		key     string
		missing bool
	}{
		{keyEngineID, p.RemoteEngineID == ""},
		{keyRequestID, p.RemoteRequestID == ""},
		{keyHost, p.RemoteHost == ""},
		{keyPort, p.RemotePort == 0},
		{keyBlockIDs, blocks == 0},
	} {
		if need.missing {
			return Handoff{}, fail(ErrUnusable, op, need.key, "missing or empty")
		}
	}
	return Handoff{raw: bytes.Clone(raw), params: p}, nil
}

// culprit is the first key that lease.Params refuses on its own.
func (o *object) culprit() string {
	for _, m := range o.members {
		one := append(append([]byte{'{'}, o.src[m.start:m.end]...), '}')
		if new(lease.Params).UnmarshalJSON(one) != nil {
			return m.name
		}
	}
	return ""
}

// IsZero tells whether h is none.
func (h Handoff) IsZero() bool { return h.raw == nil }

// Raw is the object as it came, a copy.
func (h Handoff) Raw() json.RawMessage { return bytes.Clone(h.raw) }

// Params is the object read, all zero for no handoff. The slices and maps are
// shared: do not write to them.
func (h Handoff) Params() *lease.Params {
	p := h.params
	return &p
}

// FromResponse reads the params of an answer that is one JSON object: a chat
// completion, a completion, a response, or an answer of /inference/v1/generate.
// Call it for status 200 only. The error is as for [Parse]: absent params are
// [ErrNoHandoff], an answer that is no JSON object is [ErrUnusable].
func FromResponse(body []byte) (Handoff, error) {
	const op = "read answer"
	o, err := parseObject(body)
	if err != nil {
		return Handoff{}, fail(ErrUnusable, op, "", "%v", err)
	}
	raw := o.value(keyParams)
	if raw == nil {
		return Handoff{}, fail(ErrNoHandoff, op, keyParams, "absent")
	}
	if isNull(raw) {
		return Handoff{}, fail(ErrNoHandoff, op, keyParams, "null")
	}
	return Parse(raw)
}

// RouterKey tells whether key is one that routers and other connectors put
// into kv_transfer_params for themselves (llm-d's sidecar and coordinator,
// MoRI-IO, kthena). A reader of NIXL blocks ignores them; they are relayed like
// every key and are in [lease.Params].Extra.
func RouterKey(key string) bool {
	switch key {
	case "remote_decoder", "remote_prefiller", "remote_kv_source", "transfer_id", "remote_notify_port",
		"remote_handshake_port", "remote_dp_rank", "remote_dp_rank_override", "remote_hosts", "remote_dp_size",
		"remote_dp_size_local":
		return true
	}
	return false
}
