package rdma

import (
	"bytes"
	"context"
	"errors"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tinylib/msgp/msgp"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma/zmtp"
)

var (
	testKey  = []byte("sixteen bytes or more")
	otherKey = []byte("sixteen other bytes..")
)

func keyed(key []byte) func(*WorkerConfig) {
	return func(c *WorkerConfig) { c.Key, c.HandshakeTimeout = key, 200*time.Millisecond }
}

// lmdeploy#4804, LightLLM#1213, vllm#17192, cases.md 20: with a shared key, no metadata leaves before the reader has proved that it
// has it, and a reader takes none that was not made with it.
func TestEnginesWithAKeyDealWithThoseWhoHaveItOnly(t *testing.T) {
	start := time.Now()
	owner, plain := newEngine(t, &start, "owner", keyed(testKey)), newEngine(t, &start, "plain")
	owner.side.RequireKey(testKey)
	owner.fill(0xA1, 2)
	for name, c := range map[string]struct {
		owner *engine
		key   []byte
		want  error
		text  string
	}{
		"the same key":     {owner, testKey, nil, ""},
		"another key":      {owner, otherKey, ErrKey, "the owner has another one"},
		"no key":           {owner, nil, ErrKey, "the owner has another one"},
		"a key to no lock": {plain, testKey, lease.ErrHandshake, "without a shared key"},
	} {
		t.Run(name, func(t *testing.T) {
			reader := newEngine(t, &start, "reader", keyed(c.key))
			answered := c.owner.side.Stats().Answered
			reader.pull("local", c.owner.publish("req-"+name, 2), 1)
			until(t, "the verdict", func() bool { return reader.ran["local"] || reader.failed["local"].Err != nil }, reader)
			require.Equal(t, c.want == nil, reader.ran["local"])
			if c.want == nil {
				require.True(t, reader.holds(0xA1, 1))
				return
			}
			require.ErrorIs(t, reader.failed["local"].Err, lease.ErrHandshake)
			require.ErrorContains(t, reader.failed["local"].Err, c.text)
			require.Equal(t, answered, c.owner.side.Stats().Answered, "nothing was told")
			require.Zero(t, reader.w.Stats().Peers)
		})
	}
}

// What is listed in a directory is proved by the same key, for its rank.
func TestReplyCarriesTheProofOfTheKey(t *testing.T) {
	with := func(key []byte, rank rankID) []byte { return appendReply(nil, "h", sample(), rank, key) }
	good := with(testKey, rankID{tp: 1})
	r, err := parsePayload(good, rankID{tp: 1}, expected{key: testKey})
	require.NoError(t, err)
	require.Equal(t, sample(), r.Metadata)
	_, err = parsePayload(good, rankID{tp: 1}, expected{})
	require.NoError(t, err, "a reader without a key looks for no proof")
	for name, b := range map[string][]byte{
		"none":              with(nil, rankID{tp: 1}),
		"another key":       with(otherKey, rankID{tp: 1}),
		"another rank":      with(testKey, rankID{tp: 2}),
		"another hash":      bytes.Replace(good, []byte("compatibility_hash\xa1h"), []byte("compatibility_hash\xa1x"), 1),
		"other metadata":    bytes.Replace(good, []byte("LBHNC"), []byte("LBNHC"), 1),
		"proof cut to zero": append(good[:len(good)-34:len(good)-34], 0xc4, 0),
	} {
		require.NotEqual(t, good, b, name)
		_, err := parsePayload(b, rankID{tp: 1}, expected{key: testKey, hash: "h"})
		require.ErrorIs(t, err, ErrKey, name)
	}
}

// A proof opens the gate once it is asked for, for a while, for one rank, and for nobody else's gate.
func TestChallengesAreFreshAndOnesOwn(t *testing.T) {
	g, other := newGate(testKey), newGate(testKey)
	now := time.Hour
	c, _, err := g.answer(appendChallengeAsk(nil, rankID{}), now)
	require.NoError(t, err)
	again, _, err := g.answer(appendChallengeAsk(nil, rankID{}), now)
	require.NoError(t, err)
	require.NotEqual(t, c, again)
	ask := appendKeyedAsk(nil, rankID{tp: 3}, c, testKey)
	for _, late := range []time.Duration{0, challengeLife} {
		said, r, err := g.answer(ask, now+late)
		require.NoError(t, err)
		require.Nil(t, said)
		require.Equal(t, rankID{tp: 3}, r)
	}
	moved := bytes.Clone(ask)
	moved[bytes.Index(ask, []byte(askName))+len(askName)+1] = 4 // tp
	damaged := bytes.Clone(c)
	damaged[0] ^= 1
	for name, f := range map[string]func() error{
		"too late":           func() error { _, _, err := g.answer(ask, now+challengeLife+1); return err },
		"before it was made": func() error { _, _, err := g.answer(ask, now-1); return err },
		"another gate's":     func() error { _, _, err := other.answer(ask, now); return err },
		"another rank":       func() error { _, _, err := g.answer(moved, now); return err },
		"another key":        func() error { _, _, err := g.answer(appendKeyedAsk(nil, rankID{tp: 3}, c, otherKey), now); return err },
		"a damaged challenge": func() error {
			_, _, err := g.answer(appendKeyedAsk(nil, rankID{tp: 3}, damaged, testKey), now)
			return err
		},
		"an empty challenge":   func() error { _, _, err := g.answer(appendKeyedAsk(nil, rankID{tp: 3}, nil, testKey), now); return err },
		"vLLM's request":       func() error { _, _, err := g.answer(appendAsk(nil, rankID{tp: 3}), now); return err },
		"a request of the old": func() error { _, _, err := g.answer(appendInt(appendAsk(nil, rankID{}), 0), now); return err },
	} {
		require.ErrorIs(t, f(), ErrKey, name)
	}
	for name, b := range map[string][]byte{
		"empty": {}, "no array": {0xc0}, "cut": ask[:len(ask)-1], "more": append(bytes.Clone(ask), 0), "long": make([]byte, 1<<16),
		"another name": msgp.AppendBytes(msgp.AppendArrayHeader(nil, 1), []byte("get_meta")),
	} {
		_, _, err := g.answer(b, now)
		require.Error(t, err, name)
		require.True(t, errors.Is(err, ErrWire) || errors.Is(err, ErrKey), "%s: %v", name, err)
	}
}

// An owner without a key says so at once.
func TestReaderWithAKeyIsToldOfAnOwnerWithout(t *testing.T) {
	start := time.Now()
	plain := newEngine(t, &start, "plain")
	_, err := ask(t.Context(), "127.0.0.1", plain.side.Port(), []rankID{{}}, expected{key: testKey})
	require.ErrorIs(t, err, ErrKey)
	require.ErrorContains(t, err, "without a shared key")
	require.Equal(t, SideChannelStats{Bad: 1}, plain.side.Stats())
}

// vLLM's listener takes arrays of a name and two ranks that it has, answers metadata whatever the name, and dies of all else.
func TestReaderWithAKeyDoesVLLMsListenerNoHarm(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	asked := make(chan []byte, 10)
	go func() {
		served <- (&zmtp.Server{Handler: func(_ context.Context, request [][]byte) ([][]byte, error) {
			asked <- request[0]
			return [][]byte{appendReply(nil, "h", sample(), rankID{tp: 1}, nil), msgp.AppendFloat64(nil, 1)}, nil
		}}).Serve(ctx, l)
	}()
	_, err = ask(t.Context(), "127.0.0.1", l.Addr().(*net.TCPAddr).Port, []rankID{{tp: 1}, {tp: 2}}, expected{key: testKey})
	require.ErrorIs(t, err, ErrKey)
	require.Equal(t, HandshakeKey, HandshakeCauseOf(err))
	cancel()
	require.NoError(t, <-served)
	close(asked)
	for b := range asked {
		n, b, err := msgp.ReadArrayHeaderBytes(b)
		require.NoError(t, err)
		require.EqualValues(t, 3, n)
		_, b, err = msgp.ReadBytesZC(b)
		require.NoError(t, err)
		pp, b, err := readInt(b)
		require.NoError(t, err)
		tp, b, err := readInt(b)
		require.NoError(t, err)
		require.Equal(t, rankID{tp: 1}, rankID{pp, tp})
		require.Empty(t, b)
	}
}

func FuzzGate(f *testing.F) {
	g := newGate(testKey)
	c := g.challenge(time.Second)
	f.Add(appendChallengeAsk(nil, rankID{}))
	f.Add(appendKeyedAsk(nil, rankID{1, 2}, c, testKey))
	f.Add(appendKeyedAsk(nil, rankID{1, 2}, c, otherKey))
	f.Add(appendAsk(nil, rankID{1, 2}))
	f.Fuzz(func(t *testing.T, b []byte) {
		challenge, r, err := g.answer(b, time.Second)
		if err == nil && challenge == nil && !bytes.Equal(b, appendKeyedAsk(nil, r, c, testKey)) {
			// Another encoding of the same request is fine, another request is not.
			require.Contains(t, string(b), string(proof(testKey, "reader", c, r.bytes())))
		}
	})
}

func TestKeyThatIsShortIsRefused(t *testing.T) {
	for _, key := range [][]byte{{}, []byte("fifteen bytes..")} {
		_, err := (WorkerConfig{Engine: "e", Key: key, KV: KV{Regions: []Region{{Base: 4096, BlockLen: 64, Blocks: 1}}}}).withDefaults()
		require.ErrorIs(t, err, ErrConfig)
		require.ErrorContains(t, err, "Key is of "+strconv.Itoa(len(key)))
	}
}

// cases.md 20: by default nobody but this machine reaches the side channel.
func TestSideChannelIsOnTheLoopbackUnlessAsked(t *testing.T) {
	dial := func(host, from string) error {
		s, err := ListenSideChannel(host, 0, nil)
		require.NoError(t, err)
		defer s.Close()
		c, err := net.Dial("tcp", net.JoinHostPort(from, strconv.Itoa(s.Port())))
		if err == nil {
			c.Close()
		}
		return err
	}
	require.NoError(t, dial("", "127.0.0.1"))
	require.Error(t, dial("", "127.0.0.2"), "another address of this machine")
	require.NoError(t, dial("0.0.0.0", "127.0.0.2"))
}
