package rdma

import (
	"bytes"
	"context"
	"net"
	"strconv"
	"sync"
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
		"a key to no lock": {plain, testKey, lease.ErrHandshake, "or none"},
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

// A request proves the key for one rank, and no two are alike.
func TestRequestsProveTheKeyForOneRank(t *testing.T) {
	r := rankID{tp: 3}
	good := newName(testKey, r)
	require.NoError(t, admit(testKey, good, r))
	require.NotEqual(t, good, newName(testKey, r))
	damaged := bytes.Clone(good)
	damaged[len(sealedName)] ^= 1
	for name, err := range map[string]error{
		"another rank":    admit(testKey, good, rankID{tp: 4}),
		"another key":     admit(testKey, newName(otherKey, r), r),
		"a damaged nonce": admit(testKey, damaged, r),
		"a shorter proof": admit(testKey, good[:len(good)-1], r),
		"no proof":        admit(testKey, good[:len(sealedName)+nonceLen], r),
		"no nonce":        admit(testKey, []byte(sealedName), r),
		"more":            admit(testKey, append(bytes.Clone(good), 0), r),
		"vLLM's request":  admit(testKey, []byte(askName), r),
	} {
		require.ErrorIs(t, err, ErrKey, name)
	}
}

// middle is who answers requests in an owner's place, and may ask the owner.
type middle func(request [][]byte, owner func([][]byte) [][]byte) [][]byte

// between listens in the place of an owner.
func between(t *testing.T, owner *SideChannel, pass middle) (port int) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() {
		served <- (&zmtp.Server{Handler: func(ctx context.Context, request [][]byte) ([][]byte, error) {
			return pass(request, func(request [][]byte) [][]byte {
				c, err := zmtp.Dial(ctx, net.JoinHostPort("127.0.0.1", strconv.Itoa(owner.Port())), 0)
				if err != nil {
					return nil
				}
				defer c.Close()
				answer, _ := c.Request(ctx, request)
				return answer
			}), nil
		}}).Serve(ctx, l)
	}()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-served)
	})
	return l.Addr().(*net.TCPAddr).Port
}

// cases.md 20: who is asked in an owner's place, passes on what is said and plays it back, gets no metadata, and no reader takes from
// him what the owner did not answer to this request.
func TestNobodyBetweenEnginesWithAKeyLearnsOrChangesAnything(t *testing.T) {
	owner, err := ListenSideChannel("", 0, nil)
	require.NoError(t, err)
	defer owner.Close()
	owner.RequireKey(testKey)
	for tp := range 2 {
		owner.ServeReply(tp, appendReply(nil, "h", sample(), rankID{tp: tp}, testKey))
	}
	var mu sync.Mutex
	var heard [][][]byte
	var again middle
	port := between(t, owner, func(request [][]byte, owner func([][]byte) [][]byte) [][]byte {
		mu.Lock()
		defer mu.Unlock()
		answer := again(request, owner)
		heard = append(heard, request, answer)
		return answer
	})
	get := func(answer middle) (*Reply, error) {
		mu.Lock()
		again = answer
		mu.Unlock()
		ctx, cancel := contextFor(t, 10*time.Second)
		defer cancel()
		replies, err := ask(ctx, dial, "127.0.0.1", port, []rankID{{}}, expected{hash: "h", key: testKey})
		if err != nil {
			return nil, err
		}
		return replies[0], nil
	}
	r, err := get(func(request [][]byte, owner func([][]byte) [][]byte) [][]byte { return owner(request) })
	require.NoError(t, err, "the owner is asked through it")
	require.Equal(t, sample(), r.Metadata)
	mu.Lock()
	require.Len(t, heard, 2)
	request, old := heard[0], heard[1]
	mu.Unlock()
	for _, f := range append(request, old...) {
		require.NotContains(t, string(f), string(sample().Agent))
	}
	for name, c := range map[string]middle{
		"an old answer":                func([][]byte, func([][]byte) [][]byte) [][]byte { return old },
		"the answer to an old request": func(_ [][]byte, owner func([][]byte) [][]byte) [][]byte { return owner(request) },
		"the answer to one of his own": func(_ [][]byte, owner func([][]byte) [][]byte) [][]byte {
			return owner([][]byte{appendAsk(nil, newName(otherKey, rankID{}), rankID{})})
		},
		"a clock of his own": func(request [][]byte, owner func([][]byte) [][]byte) [][]byte {
			return [][]byte{owner(request)[0], msgp.AppendFloat64(nil, 1e6)}
		},
		"an older clock": func(request [][]byte, owner func([][]byte) [][]byte) [][]byte {
			return [][]byte{owner(request)[0], old[1]}
		},
		"frames in another order": func(request [][]byte, owner func([][]byte) [][]byte) [][]byte {
			a := owner(request)
			return [][]byte{a[1], a[0]}
		},
		"of another rank": func(request [][]byte, owner func([][]byte) [][]byte) [][]byte {
			other := bytes.Clone(request[0])
			other[len(other)-1] = 1
			return owner([][]byte{other})
		},
		"what has leaked in a directory": func([][]byte, func([][]byte) [][]byte) [][]byte {
			return [][]byte{appendReply(nil, "h", sample(), rankID{}, testKey), msgp.AppendFloat64(nil, 1)}
		},
		"empty frames": func([][]byte, func([][]byte) [][]byte) [][]byte { return [][]byte{{}, {}} },
	} {
		_, err := get(c)
		require.ErrorIs(t, err, ErrKey, name)
	}
	require.EqualValues(t, 2, owner.Stats().Bad, "his own request, and one for another rank")
}

// An owner without a key says so at once.
func TestReaderWithAKeyIsToldOfAnOwnerWithout(t *testing.T) {
	start := time.Now()
	plain := newEngine(t, &start, "plain")
	_, err := ask(t.Context(), dial, "127.0.0.1", plain.side.Port(), []rankID{{}}, expected{key: testKey})
	require.ErrorIs(t, err, ErrKey)
	require.ErrorContains(t, err, "or none")
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
	_, err = ask(t.Context(), dial, "127.0.0.1", l.Addr().(*net.TCPAddr).Port, []rankID{{tp: 1}, {tp: 2}}, expected{key: testKey})
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
	r := rankID{1, 2}
	name := newName(testKey, r)
	f.Add(appendAsk(nil, name, r))
	f.Add(appendAsk(nil, newName(otherKey, r), r))
	f.Add(appendAsk(nil, []byte(askName), r))
	f.Fuzz(func(t *testing.T, b []byte) {
		said, of, err := parseAsk(b)
		if err == nil && admit(testKey, said, of) == nil {
			// Another encoding of the same request is fine, another request is not.
			require.Equal(t, name, said)
			require.Equal(t, r, of)
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
