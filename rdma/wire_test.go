package rdma

import (
	"encoding/hex"
	"encoding/json"
	"math"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tinylib/msgp/msgp"
)

// golden reads one of the wire captures of a real vLLM (testdata/README.md).
func golden(t testing.TB, name string, into any) {
	t.Helper()
	b, err := os.ReadFile("../testdata/wire/" + name)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, into))
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	require.NoError(t, err)
	return b
}

type goldenHandshakes struct {
	Handshakes []struct {
		Name, Request, Payload, Clock string
		ClockSeconds                  float64 `json:"clock_seconds"`
	}
}

func TestHandshakeBytesAreVLLMs(t *testing.T) {
	var g goldenHandshakes
	golden(t, "handshake.json", &g)
	require.NotEmpty(t, g.Handshakes)
	for _, h := range g.Handshakes {
		t.Run(h.Name, func(t *testing.T) {
			name, id, err := parseAsk(unhex(t, h.Request))
			require.NoError(t, err)
			require.Equal(t, unhex(t, h.Request), appendAsk(nil, name, id))

			payload := unhex(t, h.Payload)
			r, err := parseReply([][]byte{payload, unhex(t, h.Clock)}, rankID{}, expected{})
			require.NoError(t, err)
			require.Equal(t, h.ClockSeconds, r.Clock)
			require.Equal(t, payload, appendReply(nil, r.Hash, r.Metadata, rankID{}, nil), "encoding what was decoded")
			require.Zero(t, r.Metadata.SlotsCount, "vLLM has no lease slots")
		})
	}
}

func TestLeaseKeysRideBehindVLLMs(t *testing.T) {
	m := sample()
	m.SlotsBase, m.SlotsCount, m.SlotHeartbeats = 0x1000, 7, true
	got, err := parseMetadata(appendMetadata(nil, m))
	require.NoError(t, err)
	require.Equal(t, m, got)
}

// vLLM's main sends (name, pp, pcp, tp) since August 2026.
func TestRequestOfFourElementsIsTaken(t *testing.T) {
	ask := func(v ...int) []byte {
		b := msgp.AppendBytes(msgp.AppendArrayHeader(nil, uint32(len(v)+1)), []byte(askName))
		for _, x := range v {
			b = msgp.AppendInt(b, x)
		}
		return b
	}
	_, id, err := parseAsk(ask(1, 0, 2))
	require.NoError(t, err)
	require.Equal(t, rankID{pp: 1, tp: 2}, id)
	for name, b := range map[string][]byte{
		"two elements": ask(0), "five elements": ask(0, 0, 0, 0), "negative": ask(0, -1), "pcp rank": ask(0, 1, 0), "empty": {}, "no array": {0xc0},
		"wrong name": append(msgp.AppendString(msgp.AppendArrayHeader(nil, 3), "get_meta"), 0, 0), "trailing": append(ask(0, 0), 0),
	} {
		_, _, err := parseAsk(b)
		require.ErrorIs(t, err, ErrWire, name)
	}
}

// sample is the metadata of a small owner.
func sample() *Metadata {
	return &Metadata{Engine: "e", Agent: []byte("blob"), BaseAddrs: []uint64{4096, 1 << 20}, NumBlocks: 10, BlockLens: []int{64, 64},
		BlockStrides: []int{64, 128}, Layout: "LBHNC", BlockSize: 16, Attention: "FLASH_ATTN", PhysicalPerLogical: 1, DCPSize: 1, PCPSize: 1}
}

// vllm#23587, cases.md 43: what is malformed or missing is refused by name, and never taken for zero.
func TestMalformedMetadataIsRefusedByName(t *testing.T) {
	t.Run("missing", func(t *testing.T) {
		for _, key := range required {
			fields := map[string]any{}
			decode(t, appendMetadata(nil, sample()), &fields)
			delete(fields, key)
			_, err := parseMetadata(encode(t, fields))
			require.ErrorIs(t, err, ErrWire)
			require.ErrorContains(t, err, key)
		}
	})
	t.Run("another type", func(t *testing.T) {
		for key, v := range map[string]any{
			"engine_id": []byte("bin"), "agent_metadata": "str", "kv_caches_base_addr": []any{1.5}, "device_id": "0", "num_blocks": 2.0,
			"block_lens": []any{-1}, "ssm_sizes": []any{0}, "region_num_blocks": 3, "lease_slots_count": "many",
		} {
			fields := map[string]any{}
			decode(t, appendMetadata(nil, sample()), &fields)
			fields[key] = v
			_, err := parseMetadata(encode(t, fields))
			require.ErrorIs(t, err, ErrWire, key)
			require.ErrorContains(t, err, key)
		}
	})
	t.Run("values that cannot be", func(t *testing.T) {
		for name, change := range map[string]func(*Metadata){
			"no regions":        func(m *Metadata) { m.BaseAddrs = nil },
			"no blocks":         func(m *Metadata) { m.NumBlocks = 0 },
			"stride below len":  func(m *Metadata) { m.BlockStrides[0] = 63 },
			"lengths of lists":  func(m *Metadata) { m.BlockLens = []int{64} },
			"region names":      func(m *Metadata) { m.RegionNames = []string{"a"} },
			"address overflow":  func(m *Metadata) { m.BaseAddrs[1] = math.MaxUint64 - 1000 },
			"stride overflow":   func(m *Metadata) { m.BlockStrides[0] = 1 << 62 },
			"slots overflow":    func(m *Metadata) { m.SlotsBase, m.SlotsCount = math.MaxUint64-15, 3 },
			"slots not aligned": func(m *Metadata) { m.SlotsBase, m.SlotsCount = 4, 3 },
		} {
			m := sample()
			change(m)
			_, err := parseMetadata(appendMetadata(nil, m))
			require.ErrorIs(t, err, ErrWire, name)
		}
	})
}

func TestUnknownKeysOfAnOwnerAreIgnored(t *testing.T) {
	fields := map[string]any{}
	decode(t, appendMetadata(nil, sample()), &fields)
	fields["some_future_key"] = map[string]any{"a": []any{1, "b"}}
	got, err := parseMetadata(encode(t, fields))
	require.NoError(t, err)
	require.Equal(t, sample().BaseAddrs, got.BaseAddrs)
}

func TestAnotherHashIsRefusedBeforeTheMetadataIsDecoded(t *testing.T) {
	b := msgp.AppendMapHeader(nil, 2)
	b = msgp.AppendString(msgp.AppendString(b, "compatibility_hash"), "theirs")
	b = msgp.AppendBytes(msgp.AppendString(b, "agent_metadata_bytes"), []byte{0xff})
	frames := [][]byte{b, msgp.AppendFloat64(nil, 1)}
	_, err := parseReply(frames, rankID{}, expected{hash: "ours"})
	require.ErrorContains(t, err, "theirs")
	require.ErrorContains(t, err, "ours")
	require.NotErrorIs(t, err, ErrWire)
	_, err = parseReply(frames, rankID{}, expected{})
	require.ErrorIs(t, err, ErrWire)
}

func TestCompatibilityHashIsVLLMs(t *testing.T) {
	var g struct {
		Vectors []struct {
			Name, Canonical, SHA256 string
			Inputs                  json.RawMessage
		}
	}
	golden(t, "compatibility.json", &g)
	require.NotEmpty(t, g.Vectors)
	for _, v := range g.Vectors {
		t.Run(v.Name, func(t *testing.T) {
			var c Compatibility
			require.NoError(t, json.Unmarshal(v.Inputs, &c))
			hash, err := c.Hash()
			require.NoError(t, err)
			require.Equal(t, v.SHA256, hash)
		})
	}
}

// Python escapes everything outside printable ASCII, sorts keys at every depth, and separates with ", " and ": ".
func TestCompatibilityTextIsPythons(t *testing.T) {
	got, err := pythonJSON(map[string]any{"é,:": "\"\\\u2028<&>\x7f😀", "a": []any{map[string]any{"z": 1, "b": nil}, true}})
	require.NoError(t, err)
	require.Equal(t, `{"a": [{"b": null, "z": 1}, true], "\u00e9,:": "\"\\\u2028<&>\u007f\ud83d\ude00"}`, got)
}

func FuzzReply(f *testing.F) {
	var g goldenHandshakes
	golden(f, "handshake.json", &g)
	for _, h := range g.Handshakes {
		f.Add(unhex(f, h.Payload), unhex(f, h.Clock))
	}
	f.Add(appendReply(nil, "h", sample(), rankID{}, nil), msgp.AppendFloat64(nil, 1))
	f.Fuzz(func(t *testing.T, payload, clock []byte) {
		r, err := parseReply([][]byte{payload, clock}, rankID{}, expected{})
		if err != nil {
			return
		}
		// What passes is safe to compute addresses from, and survives our own encoding.
		for i := range r.Metadata.BaseAddrs {
			end, ok := extent(r.Metadata.BaseAddrs[i], r.Metadata.regionBlocks(i), r.Metadata.BlockLens[i], r.Metadata.BlockStrides[i])
			require.True(t, ok)
			require.Greater(t, end, r.Metadata.BaseAddrs[i])
		}
		_, err = parseMetadata(appendMetadata(nil, r.Metadata))
		require.NoError(t, err)
	})
}

func FuzzAsk(f *testing.F) {
	f.Add(appendAsk(nil, []byte(askName), rankID{1, 2}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, id, err := parseAsk(b); err == nil {
			require.GreaterOrEqual(t, id.pp, 0)
			require.GreaterOrEqual(t, id.tp, 0)
		}
	})
}

func decode(t *testing.T, b []byte, into *map[string]any) {
	t.Helper()
	v, rest, err := msgp.ReadMapStrIntfBytes(b, nil)
	require.NoError(t, err)
	require.Empty(t, rest)
	*into = v
}

func encode(t *testing.T, v map[string]any) []byte {
	t.Helper()
	b, err := msgp.AppendIntf(nil, v)
	require.NoError(t, err)
	return b
}
