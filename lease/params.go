package lease

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"time"
)

// MaxNonce is the largest nonce: 2^53-1, so that no JSON router rounds it.
const MaxNonce = 1<<53 - 1

// maxParallel bounds tp_size, pp_size and dcp_size. The values come from
// clients, and each rank costs the reader a handshake.
const maxParallel = 1024

// Params is kv_transfer_params, the JSON object that an owner answers with and
// that a router hands on to the reader.
type Params struct {
	DoRemotePrefill bool // the receiver is to read the blocks named here
	DoRemoteDecode  bool // the receiver is to keep its blocks for a reader
	// RemoteBlockIDs are the owner's logical block ids, one list per transfer
	// group, always nested. A JSON null is nil.
	RemoteBlockIDs  [][]int
	RemoteEngineID  string
	RemoteRequestID string // the owner's request id
	RemoteHost      string // side channel
	RemotePort      int    // 0 = absent
	TPSize          int    // 0 = absent, which counts as 1
	DCPSize         int    // 0 = absent, which counts as 1
	PPSize          int    // 0 = absent, which counts as 1
	RemoteNumTokens int    // tokens the blocks hold; 0 if nothing is pinned
	// RemoteBlocksExpiry is the deadline of blocks that a decoder keeps, in
	// seconds on its own clock (remote_blocks_expiry_time). Nil when a
	// heartbeat renews the lease.
	RemoteBlocksExpiry *float64
	// RemoteBlocksTTL is what was left until RemoteBlocksExpiry when the params
	// were made (remote_blocks_ttl, seconds, an addition of this library).
	RemoteBlocksTTL time.Duration
	TransferMode    string // "pull"; "" = absent
	// Lease is the slot to check after the READ, nil when the owner had none or
	// the fields did not survive the way here.
	Lease *SlotRef
	// Extra are the keys this package does not know, as they came.
	Extra map[string]json.RawMessage
}

// Clone returns a copy that shares nothing with p.
func (p *Params) Clone() *Params {
	q := *p
	q.RemoteBlockIDs = cloneBlocks(p.RemoteBlockIDs)
	if p.RemoteBlocksExpiry != nil {
		at := *p.RemoteBlocksExpiry
		q.RemoteBlocksExpiry = &at
	}
	if p.Lease != nil {
		l := *p.Lease
		q.Lease = &l
	}
	q.Extra = maps.Clone(p.Extra)
	for k, v := range q.Extra {
		q.Extra[k] = bytes.Clone(v)
	}
	return &q
}

// Peer is the engine that p names, with absent sizes as 1.
func (p *Params) Peer() Peer {
	return Peer{
		Engine: p.RemoteEngineID, Host: p.RemoteHost, Port: p.RemotePort,
		TPSize: max(p.TPSize, 1), PPSize: max(p.PPSize, 1), DCPSize: max(p.DCPSize, 1),
	}
}

// The keys of kv_transfer_params (vLLM 0.33.0), in the order written.
const (
	pDoRemotePrefill = "do_remote_prefill"
	pDoRemoteDecode  = "do_remote_decode"
	pBlockIDs        = "remote_block_ids"
	pEngineID        = "remote_engine_id"
	pRequestID       = "remote_request_id"
	pHost            = "remote_host"
	pPort            = "remote_port"
	pTPSize          = "tp_size"
	pDCPSize         = "dcp_size"
	pPPSize          = "pp_size"
	pNumTokens       = "remote_num_tokens"
	pExpiry          = "remote_blocks_expiry_time"
	pTTL             = "remote_blocks_ttl"
	pTransferMode    = "transfer_mode"
	pSlot            = "remote_lease_slot"
	pNonce           = "remote_lease_nonce"
)

// MarshalJSON writes the object that vLLM writes, the lease fields if there is
// a lease, and Extra in the order of its keys. Absent strings, ports and block
// ids are null.
func (p Params) MarshalJSON() ([]byte, error) {
	b := append(make([]byte, 0, 512), '{')
	put := func(key string, value any) error {
		v, err := json.Marshal(value)
		if err != nil {
			return &Error{Op: "write params", Request: p.RemoteRequestID, Detail: key, Err: errors.Join(ErrInvalid, err)}
		}
		if len(b) > 1 {
			b = append(b, ',')
		}
		k, _ := json.Marshal(key) // a string always marshals
		b = append(append(append(b, k...), ':'), v...)
		return nil
	}
	orNull := func(s string) any {
		if s == "" {
			return nil
		}
		return s
	}
	type field struct {
		key   string
		value any
		write bool
	}
	fields := []field{
		{pDoRemotePrefill, p.DoRemotePrefill, true},
		{pDoRemoteDecode, p.DoRemoteDecode, true},
		{pBlockIDs, p.RemoteBlockIDs, true},
		{pEngineID, orNull(p.RemoteEngineID), true},
		{pRequestID, orNull(p.RemoteRequestID), true},
		{pHost, orNull(p.RemoteHost), true},
		{pPort, nil, true},
		{pTPSize, p.TPSize, p.TPSize != 0},
		{pDCPSize, p.DCPSize, p.DCPSize != 0},
		{pPPSize, p.PPSize, p.PPSize != 0},
		{pNumTokens, p.RemoteNumTokens, true},
		{pExpiry, p.RemoteBlocksExpiry, true},
		{pTTL, p.RemoteBlocksTTL.Seconds(), p.RemoteBlocksTTL != 0},
		{pTransferMode, p.TransferMode, p.TransferMode != ""},
	}
	if p.RemotePort != 0 {
		fields[6].value = p.RemotePort
	}
	if p.Lease != nil {
		fields = append(fields, field{pSlot, p.Lease.Slot, true}, field{pNonce, p.Lease.Nonce, true})
	}
	for _, f := range fields {
		if !f.write {
			continue
		}
		if err := put(f.key, f.value); err != nil {
			return nil, err
		}
	}
	for _, k := range slices.Sorted(maps.Keys(p.Extra)) {
		if knownParam(k) {
			continue
		}
		if err := put(k, p.Extra[k]); err != nil {
			return nil, err
		}
	}
	return append(b, '}'), nil
}

func knownParam(k string) bool {
	switch k {
	case pDoRemotePrefill, pDoRemoteDecode, pBlockIDs, pEngineID, pRequestID, pHost, pPort, pTPSize, pDCPSize,
		pPPSize, pNumTokens, pExpiry, pTTL, pTransferMode, pSlot, pNonce:
		return true
	}
	return false
}

// UnmarshalJSON reads the object. Routers written in other languages turn
// integers into 5600.0 or "5600"; both are taken where an integer is meant
// (ai-dynamo/dynamo#12247). Anything else out of place is an error that names
// the key, and leaves p as it was. One lease field without the other counts as
// none.
func (p *Params) UnmarshalJSON(data []byte) error {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(data, &object); err != nil {
		return &Error{Op: "read params", Detail: "want a JSON object", Err: errors.Join(ErrInvalid, err)}
	}
	r := paramReader{object: object}
	var q Params
	q.DoRemotePrefill = r.boolean(pDoRemotePrefill)
	q.DoRemoteDecode = r.boolean(pDoRemoteDecode)
	q.RemoteBlockIDs = r.blocks(pBlockIDs)
	q.RemoteEngineID = r.text(pEngineID)
	q.RemoteRequestID = r.text(pRequestID)
	q.RemoteHost = r.text(pHost)
	q.RemotePort = int(r.integer(pPort, 1, 65535))
	q.TPSize = int(r.integer(pTPSize, 1, maxParallel))
	q.DCPSize = int(r.integer(pDCPSize, 1, maxParallel))
	q.PPSize = int(r.integer(pPPSize, 1, maxParallel))
	q.RemoteNumTokens = int(r.integer(pNumTokens, 0, math.MaxInt32))
	q.RemoteBlocksExpiry = r.float(pExpiry)
	if ttl := r.float(pTTL); ttl != nil {
		if *ttl < 0 || *ttl > MaxTTL.Seconds() {
			r.fail(pTTL, "want seconds from 0 to %v", MaxTTL.Seconds())
		} else {
			q.RemoteBlocksTTL = time.Duration(*ttl * float64(time.Second))
		}
	}
	q.TransferMode = r.text(pTransferMode)
	slot, nonce := r.integer(pSlot, 0, math.MaxInt32), r.integer(pNonce, 1, MaxNonce)
	if r.has(pSlot) && r.has(pNonce) {
		q.Lease = &SlotRef{Slot: int(slot), Nonce: nonce}
	}
	if r.err != nil {
		return r.err
	}
	for k, v := range object {
		if !knownParam(k) {
			if q.Extra == nil {
				q.Extra = make(map[string]json.RawMessage)
			}
			q.Extra[k] = v
		}
	}
	*p = q
	return nil
}

// paramReader reads typed values and keeps the first error.
type paramReader struct {
	object map[string]json.RawMessage
	err    error
}

func (r *paramReader) has(key string) bool {
	v, ok := r.object[key]
	return ok && string(v) != "null"
}

func (r *paramReader) fail(key, format string, args ...any) {
	if r.err == nil {
		r.err = invalid("read params", "", "%s is %.60s, %s", key, r.object[key], fmt.Sprintf(format, args...))
	}
}

func (r *paramReader) boolean(key string) (b bool) {
	if r.has(key) && json.Unmarshal(r.object[key], &b) != nil {
		r.fail(key, "want true or false")
	}
	return b
}

func (r *paramReader) text(key string) (s string) {
	if r.has(key) && json.Unmarshal(r.object[key], &s) != nil {
		r.fail(key, "want a string")
	}
	return s
}

func (r *paramReader) integer(key string, lo, hi int64) int64 {
	if !r.has(key) {
		return 0
	}
	n, err := parseInt(r.object[key])
	if err != nil || n < lo || n > hi {
		r.fail(key, "want a whole number from %d to %d", lo, hi)
		return 0
	}
	return n
}

func (r *paramReader) float(key string) *float64 {
	if !r.has(key) {
		return nil
	}
	var f float64
	if json.Unmarshal(r.object[key], &f) != nil {
		r.fail(key, "want a number of seconds")
		return nil
	}
	return &f
}

func (r *paramReader) blocks(key string) [][]int {
	if !r.has(key) {
		return nil
	}
	var groups [][]json.RawMessage
	if json.Unmarshal(r.object[key], &groups) != nil {
		r.fail(key, "want one list of block ids per transfer group, as in [[5,6,7]]")
		return nil
	}
	out := make([][]int, len(groups))
	for g, ids := range groups {
		out[g] = make([]int, len(ids))
		for i, id := range ids {
			n, err := parseInt(id)
			if err != nil || n < 0 || n > math.MaxInt32 {
				r.fail(key, "block id %.20s of group %d is no number from 0 to %d", id, g, math.MaxInt32)
				return nil
			}
			out[g][i] = int(n)
		}
	}
	return out
}

var errNotInteger = errors.New("not an integer")

// parseInt reads a JSON integer, a number with a zero fraction, or an integer
// in a string.
func parseInt(v json.RawMessage) (int64, error) {
	s := string(v)
	if len(s) >= 2 && s[0] == '"' {
		if err := json.Unmarshal(v, &s); err != nil {
			return 0, err
		}
		return strconv.ParseInt(s, 10, 64)
	}
	if n, err := strconv.ParseInt(s, 10, 64); err == nil {
		return n, nil
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return 0, err
	}
	if f != math.Trunc(f) || math.Abs(f) > MaxNonce {
		return 0, errNotInteger
	}
	return int64(f), nil
}
