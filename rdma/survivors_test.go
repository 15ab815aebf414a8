package rdma

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tinylib/msgp/msgp"

	"github.com/nixlgo/nixlgo/rdma/zmtp"
)

// What is proved cannot be cut elsewhere: a byte of one part is never one of the next.
func TestPartsOfAProofCannotBeCutElsewhere(t *testing.T) {
	one := proof(testKey, "purpose", []byte("ab"), []byte("c"))
	for _, other := range [][]byte{
		proof(testKey, "purpose", []byte("a"), []byte("bc")),
		proof(testKey, "purpose", []byte("abc")),
		proof(testKey, "purpose", []byte("abc"), nil),
		proof(testKey, "purpose", []byte("ab\x00\x00\x00\x00c")),
		proof(testKey, "purpose", []byte("ab\x01\x00\x00\x00c")),
		proof(testKey, "purposea", []byte("b"), []byte("c")),
		proof(testKey, "another", []byte("ab"), []byte("c")),
		proof(otherKey, "purpose", []byte("ab"), []byte("c")),
	} {
		require.NotEqual(t, one, other)
	}
	require.Equal(t, one, proof(testKey, "purpose", []byte("ab"), []byte("c")))
}

func sideChannel(t *testing.T) *SideChannel {
	t.Helper()
	s, err := ListenSideChannel("", 0, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func probe(t *testing.T, port int) (*Reply, error) {
	t.Helper()
	ctx, cancel := contextFor(t, 20*time.Second)
	defer cancel()
	return Probe(ctx, "127.0.0.1", port, 0, 0)
}

// A configuration without a key has an empty one, as often as none.
func TestAnEmptyKeyAnswersEverybody(t *testing.T) {
	s := sideChannel(t)
	s.ServeReply(0, appendReply(nil, "h", sample(), rankID{}, nil))
	for name, key := range map[string][]byte{"nil": nil, "empty": {}} {
		s.RequireKey(testKey)
		_, err := probe(t, s.Port())
		require.ErrorIs(t, err, ErrKey, name)
		s.RequireKey(key)
		_, err = probe(t, s.Port())
		require.NoError(t, err, name)
	}
}

// What was served is the side channel's own: the caller may use its bytes again, those of the key, too.
func TestAServedReplyIsTheSideChannelsOwn(t *testing.T) {
	s := sideChannel(t)
	key := append([]byte(nil), testKey...)
	reply := appendReply(nil, "h", sample(), rankID{}, key)
	s.RequireKey(key)
	s.ServeReply(0, reply)
	clear(reply)
	clear(key)
	ctx, cancel := contextFor(t, 20*time.Second)
	defer cancel()
	r, err := ProbeWithKey(ctx, "127.0.0.1", s.Port(), 0, 0, testKey)
	require.NoError(t, err)
	require.Equal(t, sample(), r.Metadata)
}

// The offset is off by half the round trip at most, whenever in it the owner looked at its clock: here at its end.
func TestTheOffsetOfASlowAnswerIsWithinHalfItsRoundTrip(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	server := &zmtp.Server{Handler: func(context.Context, [][]byte) ([][]byte, error) {
		for start := monotonic(); monotonic() < start+0.02; { // a slow owner
			time.Sleep(time.Millisecond)
		}
		return [][]byte{appendReply(nil, "h", sample(), rankID{}, nil), msgp.AppendFloat64(nil, monotonic())}, nil
	}}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(ctx, l) }()
	for range 3 {
		r, err := probe(t, l.Addr().(*net.TCPAddr).Port)
		require.NoError(t, err)
		const rounding = 1e-6
		require.LessOrEqual(t, r.Offset, r.RTT.Seconds()/2+rounding, "it is the same clock")
		require.GreaterOrEqual(t, r.Offset, -r.RTT.Seconds()/2-rounding)
	}
	cancel()
	require.NoError(t, <-ended)
}

// A key that comes twice says two things: which of them holds is not for us to guess.
func TestAKeyThatComesTwiceIsRefused(t *testing.T) {
	meta := appendMetadata(nil, sample())
	require.Equal(t, byte(0xde), meta[0], "a map of 16 bits")
	twice := append([]byte(nil), meta...)
	twice[2]++
	twice = msgp.AppendString(msgp.AppendString(twice, "engine_id"), "another")
	_, err := parseMetadata(twice)
	require.ErrorIs(t, err, ErrWire)
	require.ErrorContains(t, err, `"engine_id" twice`)
	unknown := append([]byte(nil), meta...)
	unknown[2] += 2
	for range 2 {
		unknown = msgp.AppendBool(msgp.AppendString(unknown, "nobody's"), true)
	}
	_, err = parseMetadata(unknown)
	require.ErrorContains(t, err, "twice")
}

// The number of descriptors is exact up to the largest list, and says so of a larger one, whatever it is made of.
func TestDescriptorsAreCountedUpToTheLargestList(t *testing.T) {
	for _, each := range []int{1, 2, 3, 8} {
		m := sample()
		m.NumBlocks = maxDescriptors / each
		cuts := []cut{{rows: 1, pieces: each, size: 8}, {}}
		require.Equal(t, m.NumBlocks*each, count(m, cuts))
		m.NumBlocks++
		require.Equal(t, maxDescriptors+1, count(m, cuts), "%d of each block", each)
		m.NumBlocks = maxDescriptors / each / 2
		cuts[1] = cut{rows: each, pieces: 1, size: 8}
		require.LessOrEqual(t, count(m, cuts), maxDescriptors)
		m.NumBlocks = maxDescriptors/each/2 + 1
		require.Equal(t, maxDescriptors+1, count(m, cuts), "%d of each block", each)
	}
}

// A reader of vLLM 0.32 and 0.33 refuses metadata without these. None of them has a default.
func TestWhatVLLMRequiresOfMetadataIsRequired(t *testing.T) {
	for _, key := range []string{"engine_id", "agent_metadata", "kv_caches_base_addr", "device_id", "num_blocks", "block_lens", "block_strides",
		"kv_cache_layout", "block_size", "ssm_sizes", "attn_backend_name", "physical_blocks_per_logical_kv_block"} {
		fields := map[string]any{}
		decode(t, appendMetadata(nil, sample()), &fields)
		require.Contains(t, fields, key)
		delete(fields, key)
		_, err := parseMetadata(encode(t, fields))
		require.ErrorIs(t, err, ErrWire)
		require.ErrorContains(t, err, "key "+key+" is missing")
	}
}
