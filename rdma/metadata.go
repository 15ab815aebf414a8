package rdma

import (
	"errors"
	"fmt"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
)

// Metadata is what an owner rank tells a reader about itself in the handshake: vLLM's NixlAgentMetadata
// (connector versions 14 and 15, vLLM 0.32 and 0.33) and the lease keys of this project, which vLLM ignores.
// Slices indexed by region are in region order.
type Metadata struct {
	Engine    string   // engine id; equals remote_engine_id of kv_transfer_params
	Agent     []byte   // NIXL metadata of the rank's agent, taken after registration
	BaseAddrs []uint64 // virtual address of block 0, per region
	Device    uint64   // NIXL device id of all regions; 0 for DRAM

	NumBlocks    int    // kernel blocks per region
	BlockLens    []int  // bytes transferred per kernel block, per region
	BlockStrides []int  // bytes between block starts, per region; at least the block length
	Layout       string // kv_cache_layout, such as LBHNC
	BlockSize    int    // tokens per kernel block
	SSMSizes     [2]int // conv and ssm state bytes per rank; zero without Mamba layers
	Attention    string // attn_backend_name, such as CPU_ATTN

	PhysicalPerLogical int // kernel blocks per block id of kv_transfer_params

	RegionBlocks   []int    // kernel blocks per region; nil: NumBlocks each
	RegionGroups   []int    // transfer group per region, -1 shared; nil: one group
	RegionNames    []string // first layer name per region; nil: not stated
	RegionMemTypes []string // "DRAM" or "VRAM" per region; nil: the reader's own type
	DCPSize        int      // decode context parallel size; 1 when absent
	PCPSize        int      // prefill context parallel size; 1 when absent

	SlotsBase      uint64 // address of lease slot 0 in DRAM, device 0; 0 when the owner has no slots
	SlotsCount     int    // number of int64 lease slots
	SlotHeartbeats bool   // the owner takes heartbeats by slot and nonce

	LeaseDuration time.Duration // of the owner's leases that nobody renews; 0: not stated
}

// required lists the keys without which a reader of vLLM 0.32 and 0.33 refuses metadata, in wire order.
var required = []string{
	"engine_id", "agent_metadata", "kv_caches_base_addr", "device_id", "num_blocks", "block_lens", "block_strides",
	"kv_cache_layout", "block_size", "ssm_sizes", "attn_backend_name", "physical_blocks_per_logical_kv_block",
}

const (
	keySlotsBase      = "lease_slots_base_addr"
	keySlotsCount     = "lease_slots_count"
	keySlotHeartbeats = "lease_slot_heartbeats"
	keyLeaseDuration  = "lease_duration" // seconds

	maxRegions = 1 << 16 // more is a malformed reply, not a model
)

var (
	// ErrWire marks a handshake message that does not have the agreed form.
	ErrWire = errors.New("malformed handshake")
	// ErrCompatibility marks an owner with another compatibility hash.
	ErrCompatibility = errors.New("compatibility hash")
)

// appendMetadata appends m as vLLM encodes it: a msgpack map with all 21 keys in declaration order, then the lease
// keys.
func appendMetadata(b []byte, m *Metadata) []byte {
	n := uint32(21)
	if m.SlotsCount > 0 {
		n += 3
	}
	if m.LeaseDuration > 0 {
		n++
	}
	b = msgp.AppendMapHeader(b, n)
	b = msgp.AppendString(msgp.AppendString(b, "engine_id"), m.Engine)
	b = msgp.AppendBytes(msgp.AppendString(b, "agent_metadata"), m.Agent)
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "kv_caches_base_addr"), uint32(len(m.BaseAddrs)))
	for _, a := range m.BaseAddrs {
		b = msgp.AppendUint64(b, a)
	}
	b = msgp.AppendUint64(msgp.AppendString(b, "device_id"), m.Device)
	b = appendInt(msgp.AppendString(b, "num_blocks"), m.NumBlocks)
	b = appendInts(msgp.AppendString(b, "block_lens"), m.BlockLens)
	b = appendInts(msgp.AppendString(b, "block_strides"), m.BlockStrides)
	b = msgp.AppendString(msgp.AppendString(b, "kv_cache_layout"), m.Layout)
	b = appendInt(msgp.AppendString(b, "block_size"), m.BlockSize)
	b = appendInts(msgp.AppendString(b, "ssm_sizes"), m.SSMSizes[:])
	b = msgp.AppendString(msgp.AppendString(b, "attn_backend_name"), m.Attention)
	b = appendInt(msgp.AppendString(b, "physical_blocks_per_logical_kv_block"), m.PhysicalPerLogical)
	b = appendInts(msgp.AppendString(b, "region_num_blocks"), m.RegionBlocks)
	b = appendInts(msgp.AppendString(b, "region_group_ids"), m.RegionGroups)
	b = appendStrings(msgp.AppendString(b, "region_names"), m.RegionNames)
	b = appendStrings(msgp.AppendString(b, "region_mem_types"), m.RegionMemTypes)
	b = appendInt(msgp.AppendString(b, "dcp_size"), max(1, m.DCPSize))
	b = appendInt(msgp.AppendString(b, "pcp_size"), max(1, m.PCPSize))
	b = msgp.AppendNil(msgp.AppendString(b, "ple_block_len"))
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "region_members"), 0)
	b = msgp.AppendMapHeader(msgp.AppendString(b, "packed_member_layouts"), 0)
	if m.SlotsCount > 0 {
		b = msgp.AppendUint64(msgp.AppendString(b, keySlotsBase), m.SlotsBase)
		b = appendInt(msgp.AppendString(b, keySlotsCount), m.SlotsCount)
		b = msgp.AppendBool(msgp.AppendString(b, keySlotHeartbeats), m.SlotHeartbeats)
	}
	if m.LeaseDuration > 0 {
		b = msgp.AppendFloat64(msgp.AppendString(b, keyLeaseDuration), m.LeaseDuration.Seconds())
	}
	return b
}

// appendInt writes v in the shortest form, which for positive numbers is an unsigned one, as msgspec does.
func appendInt(b []byte, v int) []byte {
	if v >= 0 {
		return msgp.AppendUint64(b, uint64(v))
	}
	return msgp.AppendInt(b, v)
}

func appendInts(b []byte, v []int) []byte {
	if v == nil {
		return msgp.AppendNil(b)
	}
	b = msgp.AppendArrayHeader(b, uint32(len(v)))
	for _, x := range v {
		b = appendInt(b, x)
	}
	return b
}

func appendStrings(b []byte, v []string) []byte {
	if v == nil {
		return msgp.AppendNil(b)
	}
	b = msgp.AppendArrayHeader(b, uint32(len(v)))
	for _, x := range v {
		b = msgp.AppendString(b, x)
	}
	return b
}

// parseMetadata decodes an owner's metadata. Key order is free and unknown keys are skipped; a missing required key or
// a value of another type is an error that names the key, as in vLLM's decoder.
func parseMetadata(b []byte) (*Metadata, error) {
	m := &Metadata{DCPSize: 1, PCPSize: 1}
	seen := map[string]bool{}
	err := parseMap(b, func(key string, b []byte) (rest []byte, err error) {
		seen[key] = true
		switch key {
		case "engine_id":
			m.Engine, rest, err = msgp.ReadStringBytes(b)
		case "agent_metadata":
			m.Agent, rest, err = readBin(b)
		case "kv_caches_base_addr":
			m.BaseAddrs, rest, err = readArray(b, msgp.ReadUint64Bytes)
		case "device_id":
			m.Device, rest, err = msgp.ReadUint64Bytes(b)
		case "num_blocks":
			m.NumBlocks, rest, err = readInt(b)
		case "block_lens":
			m.BlockLens, rest, err = readArray(b, readInt)
		case "block_strides":
			m.BlockStrides, rest, err = readArray(b, readInt)
		case "kv_cache_layout":
			m.Layout, rest, err = msgp.ReadStringBytes(b)
		case "block_size":
			m.BlockSize, rest, err = readInt(b)
		case "ssm_sizes":
			var v []int
			if v, rest, err = readArray(b, readInt); err == nil && len(v) != 2 {
				err = fmt.Errorf("%d elements, want 2", len(v))
			}
			copy(m.SSMSizes[:], v)
		case "attn_backend_name":
			m.Attention, rest, err = msgp.ReadStringBytes(b)
		case "physical_blocks_per_logical_kv_block":
			m.PhysicalPerLogical, rest, err = readInt(b)
		case "region_num_blocks":
			m.RegionBlocks, rest, err = readOptional(b, readInt)
		case "region_group_ids":
			m.RegionGroups, rest, err = readOptional(b, msgp.ReadIntBytes)
		case "region_names":
			m.RegionNames, rest, err = readOptional(b, msgp.ReadStringBytes)
		case "region_mem_types":
			m.RegionMemTypes, rest, err = readOptional(b, msgp.ReadStringBytes)
		case "dcp_size":
			m.DCPSize, rest, err = readInt(b)
		case "pcp_size":
			m.PCPSize, rest, err = readInt(b)
		case keySlotsBase:
			m.SlotsBase, rest, err = msgp.ReadUint64Bytes(b)
		case keySlotsCount:
			m.SlotsCount, rest, err = readInt(b)
		case keySlotHeartbeats:
			m.SlotHeartbeats, rest, err = msgp.ReadBoolBytes(b)
		case keyLeaseDuration:
			m.LeaseDuration, rest, err = readSeconds(b)
		default:
			return msgp.Skip(b)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		return rest, nil
	})
	if err != nil {
		return nil, fmt.Errorf("%w: agent metadata: %w", ErrWire, err)
	}
	for _, key := range required {
		if !seen[key] {
			return nil, fmt.Errorf("%w: agent metadata: key %s is missing", ErrWire, key)
		}
	}
	return m, m.validate()
}

// validate checks what a reader relies on before it computes an address from m.
func (m *Metadata) validate() error {
	bad := func(format string, a ...any) error {
		return fmt.Errorf("%w: agent metadata of engine %q: "+format, append([]any{ErrWire, m.Engine}, a...)...)
	}
	n := len(m.BaseAddrs)
	switch {
	case n == 0:
		return bad("kv_caches_base_addr is empty")
	case m.NumBlocks < 1:
		return bad("num_blocks is %d", m.NumBlocks)
	case m.BlockSize < 1:
		return bad("block_size is %d", m.BlockSize)
	case m.PhysicalPerLogical < 1:
		return bad("physical_blocks_per_logical_kv_block is %d", m.PhysicalPerLogical)
	case len(m.BlockLens) != n || len(m.BlockStrides) != n:
		return bad("%d regions, but %d block_lens and %d block_strides", n, len(m.BlockLens), len(m.BlockStrides))
	}
	for _, list := range []struct {
		key string
		len int
	}{
		{"region_num_blocks", len(m.RegionBlocks)}, {"region_group_ids", len(m.RegionGroups)},
		{"region_names", len(m.RegionNames)}, {"region_mem_types", len(m.RegionMemTypes)},
	} {
		if list.len != 0 && list.len != n {
			return bad("%d regions, but %d entries in %s", n, list.len, list.key)
		}
	}
	for r := range n {
		blocks, length, stride := m.regionBlocks(r), m.BlockLens[r], m.BlockStrides[r]
		if blocks < 1 || length < 1 || stride < length {
			return bad("region %d: %d blocks of %d bytes every %d bytes", r, blocks, length, stride)
		}
		if _, ok := extent(m.BaseAddrs[r], blocks, length, stride); !ok {
			return bad("region %d: %d blocks every %d bytes from %#x end beyond the address space", r, blocks, stride, m.BaseAddrs[r])
		}
	}
	if m.SlotsCount > 0 {
		if _, ok := extent(m.SlotsBase, m.SlotsCount, 8, 8); !ok || m.SlotsBase%8 != 0 {
			return bad("lease slots: %d at %#x", m.SlotsCount, m.SlotsBase)
		}
	}
	return nil
}

// regionBlocks is the number of kernel blocks in region r.
func (m *Metadata) regionBlocks(r int) int {
	if len(m.RegionBlocks) > 0 {
		return m.RegionBlocks[r]
	}
	return m.NumBlocks
}

// memType is the memory type of the owner's regions; own is the reader's, for owners that do not state theirs.
func (m *Metadata) memType(own nixl.MemType) (nixl.MemType, error) {
	t := own
	for r, name := range m.RegionMemTypes {
		v, err := nixl.ParseMemType(name)
		if err != nil {
			return 0, fmt.Errorf("region_mem_types: %w", err)
		}
		if r > 0 && v != t {
			return 0, fmt.Errorf("region_mem_types mixes %s and %s", t, v)
		}
		t = v
	}
	return t, nil
}

// parseMap walks a msgpack map with string keys; a key twice, or bytes after the map, is an error.
func parseMap(b []byte, value func(key string, b []byte) ([]byte, error)) error {
	n, b, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	for range n {
		var key string
		if key, b, err = msgp.ReadStringBytes(b); err != nil {
			return fmt.Errorf("key: %w", err)
		}
		if seen[key] {
			return fmt.Errorf("key %q twice", key)
		}
		seen[key] = true
		if b, err = value(key, b); err != nil {
			return err
		}
	}
	if len(b) > 0 {
		return fmt.Errorf("%d bytes after the map", len(b))
	}
	return nil
}

// readBin reads a msgpack bin, copied; a str is refused, as vLLM refuses it.
func readBin(b []byte) (v, rest []byte, err error) {
	v, rest, err = msgp.ReadBytesZC(b)
	return append([]byte(nil), v...), rest, err
}

// readInt reads a non-negative int of at most 2^62, so that sums of two cannot overflow.
func readInt(b []byte) (int, []byte, error) {
	v, rest, err := msgp.ReadInt64Bytes(b)
	if err == nil && (v < 0 || v > 1<<62) {
		err = fmt.Errorf("%d is out of range", v)
	}
	return int(v), rest, err
}

// readNumber reads a number of any type.
func readNumber(b []byte) (v float64, rest []byte, err error) {
	switch msgp.NextType(b) {
	case msgp.Float32Type:
		var f float32
		f, rest, err = msgp.ReadFloat32Bytes(b)
		v = float64(f)
	case msgp.IntType, msgp.UintType:
		var i int64
		i, rest, err = msgp.ReadInt64Bytes(b)
		v = float64(i)
	default:
		v, rest, err = msgp.ReadFloat64Bytes(b)
	}
	return v, rest, err
}

// readSeconds reads a duration of up to lease.MaxTTL in seconds.
func readSeconds(b []byte) (time.Duration, []byte, error) {
	v, rest, err := readNumber(b)
	if err == nil && !(v >= 0 && v <= lease.MaxTTL.Seconds()) {
		err = fmt.Errorf("%v s is out of range", v)
	}
	if err != nil {
		return 0, nil, err
	}
	return time.Duration(v * float64(time.Second)), rest, nil
}

func readArray[T any](b []byte, element func([]byte) (T, []byte, error)) ([]T, []byte, error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return nil, nil, err
	}
	if n > maxRegions || int(n) > len(b) {
		return nil, nil, fmt.Errorf("array of %d elements in %d bytes", n, len(b))
	}
	out := make([]T, n)
	for i := range out {
		if out[i], b, err = element(b); err != nil {
			return nil, nil, err
		}
	}
	return out, b, nil
}

// readOptional reads an array, or nil for a msgpack nil.
func readOptional[T any](b []byte, element func([]byte) (T, []byte, error)) ([]T, []byte, error) {
	if msgp.IsNil(b) {
		rest, err := msgp.ReadNilBytes(b)
		return nil, rest, err
	}
	return readArray(b, element)
}
