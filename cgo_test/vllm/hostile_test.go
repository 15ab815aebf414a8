package vllm

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tinylib/msgp/msgp"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/zmtp"
)

// What a vLLM of another version, or something worse, says to a node: it fails the request that it is about and nothing
// else. No vLLM is needed here; the messages are those of connector versions 4 to 15 and variations of them.

func startNode(t *testing.T) *nixlgo.Node {
	t.Helper()
	n, err := nixlgo.New(nixlgo.Config{Layers: 2, Blocks: 8, BlockBytes: 4096, AnyCompatibility: true, HandshakeTimeout: 30 * time.Second})
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- n.Run(context.Background()) }()
	t.Cleanup(func() {
		require.NoError(t, n.Close())
		require.NoError(t, <-ended)
	})
	return n
}

func fill(n *nixlgo.Node, v byte, blocks ...int) {
	for _, b := range blocks {
		for l := range 2 {
			copy(n.Block(l, b), bytes.Repeat([]byte{v}, 4096))
		}
	}
}

func requireBlock(t *testing.T, n *nixlgo.Node, v byte, b int) {
	t.Helper()
	for l := range 2 {
		require.Equal(t, bytes.Repeat([]byte{v}, 4096), n.Block(l, b))
	}
}

// ask sends one request to a side channel and returns the frames of the answer.
func ask(t *testing.T, port int, request ...[]byte) ([][]byte, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	c, err := zmtp.Dial(ctx, fmt.Sprintf("127.0.0.1:%d", port), 0)
	require.NoError(t, err)
	defer c.Close()
	return c.Request(ctx, request)
}

func unpack(t *testing.T, b []byte) map[string]any {
	t.Helper()
	v, rest, err := msgp.ReadIntfBytes(b)
	require.NoError(t, err)
	require.Empty(t, rest)
	return v.(map[string]any)
}

func pack(t *testing.T, v any) []byte {
	t.Helper()
	b, err := msgp.AppendIntf(nil, v)
	require.NoError(t, err)
	return b
}

// fake is a side channel that answers what the test says.
type fake struct {
	port  int
	reply atomic.Pointer[[][]byte]
}

func (f *fake) answer(frames ...[]byte) { f.reply.Store(&frames) }

func newFake(t *testing.T) *fake {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	f := &fake{port: l.Addr().(*net.TCPAddr).Port}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	s := &zmtp.Server{Handler: func(context.Context, [][]byte) ([][]byte, error) { return *f.reply.Load(), nil }}
	go func() { served <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-served)
	})
	return f
}

var (
	request = []byte("\x93\xc4\x0cget_meta_msg\x00\x00")
	clock   = []byte{0xcb, 0, 0, 0, 0, 0, 0, 0, 0}

	// The keys of connector version 4, all of them required; 14 and 15 added block_strides and those with defaults.
	version4 = []string{"engine_id", "agent_metadata", "kv_caches_base_addr", "device_id", "num_blocks", "block_lens", "kv_cache_layout", "block_size",
		"ssm_sizes", "attn_backend_name", "physical_blocks_per_logical_kv_block"}
	required = append(slices.Clone(version4), "block_strides")
	optional = []string{"region_num_blocks", "region_group_ids", "region_names", "region_mem_types", "dcp_size", "pcp_size", "ple_block_len",
		"region_members", "packed_member_layouts", "lease_slots_base_addr", "lease_slots_count", "lease_slot_heartbeats", "lease_duration"}
)

// vllm#23587, vllm#29503, cases.md 43
func TestReaderOfMetadataOfOtherVersions(t *testing.T) {
	owner, reader, side := startNode(t), startNode(t), newFake(t)
	answer, err := ask(t, owner.Port(), request)
	require.NoError(t, err)
	payload := unpack(t, answer[0])
	meta := unpack(t, payload["agent_metadata_bytes"].([]byte))
	require.Len(t, meta, len(required)+len(optional))
	blob := meta["agent_metadata"].([]byte)

	type change func(m map[string]any)
	without := func(keys ...string) change {
		return func(m map[string]any) {
			for _, k := range keys {
				delete(m, k)
			}
		}
	}
	with := func(key string, v any) change { return func(m map[string]any) { m[key] = v } }
	only := func(keys []string) change {
		return func(m map[string]any) {
			maps.DeleteFunc(m, func(k string, _ any) bool { return !slices.Contains(keys, k) })
		}
	}
	type row struct {
		name   string
		change change
		says   string // of the refusal; "" for metadata that is taken
	}
	rows := []row{
		{"as nixlgo sends it", func(map[string]any) {}, ""},
		{"version 2", only(version4[:8]), "is missing"},
		{"version 4", only(version4), "key block_strides is missing"},
		{"version 14 without its defaults", only(append(required, "lease_slots_base_addr", "lease_slots_count")), ""},
		{"no heartbeats by slot", without("lease_slot_heartbeats"), ""},
		{"no lease duration", without("lease_duration"), ""},
		{"a lease duration in whole seconds", with("lease_duration", 30), ""},
		{"a lease duration of centuries", with("lease_duration", 1e18), "lease_duration"},
		{"a lease duration that is none", with("lease_duration", "30s"), "lease_duration"},
		{"a fork's pipeline ranks", func(m map[string]any) {
			m["pp_rank"], m["pp_size"], m["registered_layer_names"] = 0, 1, []any{"a", "b"}
		}, ""},
		{"extra keys of every type", func(m map[string]any) {
			m["x1"], m["x2"], m["x3"], m["x4"], m["x5"] = nil, true, -5, 1.5, "text"
			m["x6"], m["x7"], m["x8"] = []byte{1}, []any{1, []any{}}, map[string]any{"a": map[string]any{}}
		}, ""},

		{"another engine", with("engine_id", "stranger"), "stranger"},
		{"another layout", with("kv_cache_layout", "BLHNC"), "kv_cache_layout"},
		{"another attention", with("attn_backend_name", "FLASH_ATTN"), "attn_backend_name"},
		{"Mamba state", with("ssm_sizes", []any{16, 16}), "ssm_sizes"},
		{"three state sizes", with("ssm_sizes", []any{0, 0, 0}), "ssm_sizes"},
		{"a layer more", func(m map[string]any) {
			base := m["kv_caches_base_addr"].([]any)
			m["kv_caches_base_addr"] = append(slices.Clone(base), base[0])
		}, "3 regions"},
		{"a list too short", with("region_num_blocks", []any{8}), "region_num_blocks"},
		{"no regions", with("kv_caches_base_addr", []any{}), "kv_caches_base_addr"},
		{"no blocks", with("num_blocks", 0), "num_blocks"},
		{"a negative length", with("block_lens", []any{-1, 4096}), "block_lens"},
		{"a length as float", with("block_lens", []any{4096.0, 4096.0}), "block_lens"},
		{"stride below length", with("block_strides", []any{2048, 2048}), "2048"},
		{"blocks beyond the address space", with("kv_caches_base_addr", []any{uint64(math.MaxUint64 - 4096), uint64(1 << 40)}), "address space"},
		{"blocks that are not registered", with("kv_caches_base_addr", []any{uint64(4096), uint64(1 << 40)}), "blocks that engine"},
		{"more blocks than are registered", func(m map[string]any) {
			m["num_blocks"], m["region_num_blocks"] = 1<<20, nil
		}, "blocks that engine"},
		{"mixed memory", with("region_mem_types", []any{"DRAM", "VRAM"}), "region_mem_types"},
		{"memory of no known type", with("region_mem_types", []any{"CORE", "CORE"}), "region_mem_types"},
		{"context parallel", with("dcp_size", 2), "dcp_size"},
		{"slots at an odd address", with("lease_slots_base_addr", uint64(12345)), "lease slots"},
		{"agent metadata as text", with("agent_metadata", "text"), "agent_metadata"},
		{"no agent metadata", with("agent_metadata", []byte{}), "NIXL metadata"},
		{"agent metadata cut in half", with("agent_metadata", blob[:len(blob)/2]), "NIXL metadata"},
		{"agent metadata with a lying length", with("agent_metadata", append(append(slices.Clone(blob[:20]), 0xff, 0xff, 0xff, 0x7f), blob[24:]...)), "NIXL metadata"},
	}
	for _, k := range required {
		rows = append(rows, row{"without " + k, without(k), k}, row{"null " + k, with(k, nil), k}, row{"a map for " + k, with(k, map[string]any{}), k})
	}
	for i, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			m := maps.Clone(meta)
			engine := fmt.Sprint("case-", i) // a reader waits before it asks an engine again that was refused
			m["engine_id"] = engine
			r.change(m)
			side.answer(pack(t, map[string]any{"compatibility_hash": "other", "agent_metadata_bytes": pack(t, m)}), clock)
			fill(owner, byte(i+1), 3)
			pub, err := owner.Publish(t.Context(), engine, []int{3}, 16)
			require.NoError(t, err)
			p := pub.Params()
			p.RemoteEngineID, p.RemotePort = engine, side.port
			err = reader.Fetch(t.Context(), p, []int{5})
			if r.says == "" {
				require.NoError(t, err)
				requireBlock(t, reader, byte(i+1), 5)
				<-pub.Done()
				return
			}
			require.ErrorIs(t, err, lease.ErrHandshake)
			require.ErrorContains(t, err, r.says)
			requireBlock(t, reader, 0, 5)
			require.NoError(t, pub.Revoke())
			<-pub.Done()
		})
	}
	healthy(t, owner, reader)
}

// healthy checks that two nodes still serve each other.
func healthy(t *testing.T, owner, reader *nixlgo.Node) {
	t.Helper()
	fill(owner, 0xAB, 1)
	pub, err := owner.Publish(t.Context(), "healthy", []int{1}, 16)
	require.NoError(t, err)
	require.NoError(t, reader.Fetch(t.Context(), pub.Params(), []int{2}))
	requireBlock(t, reader, 0xAB, 2)
	<-pub.Done()
	require.Equal(t, lease.ReasonRead, pub.Reason())
}

func TestReaderOfMalformedReplies(t *testing.T) {
	owner, reader, side := startNode(t), startNode(t), newFake(t)
	answer, err := ask(t, owner.Port(), request)
	require.NoError(t, err)
	good := answer[0]
	for i, r := range []struct {
		name  string
		reply [][]byte
		says  string
	}{
		{"one frame", [][]byte{good}, "1 frames"},
		{"three frames", [][]byte{good, clock, clock}, "3 frames"},
		{"empty frames", [][]byte{{}, {}}, "clock"},
		{"no clock", [][]byte{good, {0xc0}}, "clock"},
		{"half a clock", [][]byte{good, clock[:5]}, "clock"},
		{"no map", [][]byte{{0x93, 1, 2, 3}, clock}, "reply"},
		{"an empty map", [][]byte{{0x80}, clock}, "missing"},
		{"text", [][]byte{[]byte("HTTP/1.1 200 OK"), clock}, "reply"},
		{"cut", [][]byte{good[:len(good)-1], clock}, "reply"},
		{"a byte more", [][]byte{append(slices.Clone(good), 0), clock}, "reply"},
		{"a map of 2^32 entries", [][]byte{{0xdf, 0xff, 0xff, 0xff, 0xff}, clock}, "reply"},
		{"no hash", [][]byte{pack(t, map[string]any{"agent_metadata_bytes": []byte{0x80}}), clock}, "missing"},
		{"a hash that is no text", [][]byte{pack(t, map[string]any{"compatibility_hash": 5, "agent_metadata_bytes": []byte{0x80}}), clock}, "compatibility_hash"},
		{"metadata that is no map", [][]byte{pack(t, map[string]any{"compatibility_hash": "x", "agent_metadata_bytes": []byte{0x01}}), clock}, "agent metadata"},
		{"nested without end", [][]byte{bytes.Repeat([]byte{0x91}, 1<<20), clock}, "reply"},
		{"deep in an unknown key", [][]byte{append([]byte("\x81\xa1x"), bytes.Repeat([]byte{0x91}, 1<<20)...), clock}, "reply"},
	} {
		t.Run(r.name, func(t *testing.T) {
			side.answer(r.reply...)
			p := &lease.Params{DoRemotePrefill: true, RemoteBlockIDs: [][]int{{1}}, RemoteEngineID: fmt.Sprint("m", i), RemoteRequestID: "r",
				RemoteHost: "127.0.0.1", RemotePort: side.port, Lease: &lease.SlotRef{Slot: 0, Nonce: 1 << 40}}
			err := reader.Fetch(t.Context(), p, []int{5})
			require.ErrorIs(t, err, lease.ErrHandshake)
			require.ErrorContains(t, err, r.says)
		})
	}
	healthy(t, owner, reader)
}

// vllm#54757, vllm#44486, cases.md 18: one bad request must not end the listener.
func TestOwnerOfRequestsOfOtherVersions(t *testing.T) {
	owner := startNode(t)
	want, err := ask(t, owner.Port(), request)
	require.NoError(t, err)
	for name, frame := range map[string]string{
		"three elements":            "\x93\xc4\x0cget_meta_msg\x00\x00",
		"four, with a pcp rank":     "\x94\xc4\x0cget_meta_msg\x00\x00\x00",
		"a name of type str":        "\x93\xacget_meta_msg\x00\x00",
		"ranks of eight bytes":      "\x93\xc4\x0cget_meta_msg\xcf\x00\x00\x00\x00\x00\x00\x00\x00\xd3\x00\x00\x00\x00\x00\x00\x00\x00",
		"a name with a long header": "\x93\xc6\x00\x00\x00\x0cget_meta_msg\x00\x00",
	} {
		got, err := ask(t, owner.Port(), []byte(frame))
		require.NoError(t, err, name)
		require.Len(t, got, 2)
		require.Equal(t, want[0], got[0], name)
		require.Len(t, got[1], 9, "float64 clock")
	}
	bad := map[string][][]byte{
		"two elements":      {[]byte("\x92\xc4\x0cget_meta_msg\x00")},
		"five elements":     {[]byte("\x95\xc4\x0cget_meta_msg\x00\x00\x00\x00")},
		"another name":      {[]byte("\x93\xc4\x0cshutdown_msg\x00\x00")},
		"an unknown rank":   {[]byte("\x93\xc4\x0cget_meta_msg\x00\x01")},
		"another pcp rank":  {[]byte("\x94\xc4\x0cget_meta_msg\x00\x01\x00")},
		"a negative rank":   {[]byte("\x93\xc4\x0cget_meta_msg\x00\xff")},
		"no msgpack":        {{0xc1}},
		"empty":             {{}},
		"pickle":            {[]byte("\x80\x05\x95\x10\x00\x00\x00\x00\x00\x00\x00cos\nsystem\n")},
		"two frames":        {request, request},
		"64 KiB of nothing": {make([]byte, 64<<10)},
	}
	for name, frames := range bad {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		c, err := zmtp.Dial(ctx, fmt.Sprintf("127.0.0.1:%d", owner.Port()), 0)
		if err == nil {
			_, err = c.Request(ctx, frames)
			c.Close()
		}
		cancel()
		require.Error(t, err, name)
	}
	got, err := ask(t, owner.Port(), request)
	require.NoError(t, err)
	require.Equal(t, want[0], got[0])
	require.GreaterOrEqual(t, owner.Stats().SideChannel.Bad, int64(len(bad)))
}

// A stray push registration or a notification that is no text ends an engine step of vLLM up to 0.33; cases.md 25.
func TestOwnerOfNotificationsOfOtherVersions(t *testing.T) {
	owner, reader := startNode(t), startNode(t)
	pub, err := owner.Publish(t.Context(), "held", []int{4}, 16)
	require.NoError(t, err)
	reply, err := rdma.Probe(t.Context(), "127.0.0.1", owner.Port(), 0, 0)
	require.NoError(t, err)
	a, err := nixl.NewAgent("", nixl.Config{})
	require.NoError(t, err)
	defer func() { require.NoError(t, a.Close()) }()
	_, err = a.CreateBackend("UCX", nil)
	require.NoError(t, err)
	name, err := a.LoadRemote(reply.Metadata.Agent)
	require.NoError(t, err)

	var golden struct {
		Notifications []struct{ Kind, Bytes string }
	}
	text, err := os.ReadFile("../../testdata/wire/notifications.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &golden))
	var registration []byte
	for _, n := range golden.Notifications {
		if n.Kind == "push-registration" {
			registration, err = hex.DecodeString(n.Bytes)
			require.NoError(t, err)
		}
	}
	require.NotEmpty(t, registration)
	malformed := [][]byte{registration, {0xff}, {0}, []byte("held"), []byte("held:"), []byte("held:-1"), []byte("held:x"), []byte("held:99999999999"),
		[]byte("HB:"), bytes.Repeat([]byte("A"), 1<<20), []byte("HB2:123")}
	for _, m := range malformed {
		require.NoError(t, a.Notify(name, m))
	}
	require.NoError(t, a.Notify(name, []byte("HB:held,somebody-else,\xff\xfe")))
	require.NoError(t, a.Notify(name, []byte("nobody:1")))
	require.NoError(t, a.Notify(name, []byte("RBLNS:0:0:1:2:held:1"))) // a fork's read-complete: of an id that nobody has
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		s := owner.Stats().Worker.Leases
		if s.Renewals > 0 && s.UnmatchedReadCompletes > 1 {
			require.EqualValues(t, len(malformed), s.MalformedNotifications, "%+v", s)
			break
		}
		require.True(t, time.Now().Before(deadline), "%+v", s)
	}
	select {
	case <-pub.Done():
		t.Fatalf("a malformed message ended the lease as %s", pub.Reason())
	default:
	}
	require.NoError(t, reader.Fetch(t.Context(), pub.Params(), []int{6}))
	<-pub.Done()
	require.Equal(t, lease.ReasonRead, pub.Reason())
	healthy(t, owner, reader)
}
