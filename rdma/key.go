package rdma

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tinylib/msgp/msgp"
)

// The shared key of engines of this library, which vLLM knows nothing of. A reader asks for a challenge, and proves with the
// next request that it has the key; only then the owner answers with its metadata, which carries a proof of its own, also in a
// Directory. Neither side sends the key.
//
//	reader                                             owner
//	["get_meta_challenge", pp, tp]                 →
//	                                               ←   challenge
//	["get_meta_msg", pp, tp, challenge, proof]     →
//	                                               ←   {compatibility_hash, agent_metadata_bytes, nixlgo_proof}, clock
//
// The first request is one that vLLM's listener, which dies of any other shape, takes for a request of metadata. So a reader
// with a key does vLLM's owners no harm: it refuses what they answer.
//
// It keeps out who can connect, and lets readers refuse what somebody else answers. It does not hide the metadata from who
// can listen on the network, nor what is read. Nor does it help against who can change what passes by: the owner's proof is of
// its metadata alone, so an old answer can be played back and the clock be forged, and a reader proves itself to whatever
// address the params name, which may pass the proof on.

// ErrKey marks an engine that has another shared key, or none.
var ErrKey = errors.New("shared key")

const (
	minKey = 16 // bytes

	challengeName = "get_meta_challenge"
	keyProof      = "nixlgo_proof"
	refused       = "nixlgo: another key"

	challengeLife = 10 * time.Second
	challengeLen  = 8 + 16 + sha256.Size
	maxKeyed      = 2 * (challengeLen + sha256.Size) // bytes of a request
)

// proof is the message authentication code of parts under key. purpose keeps a proof of one thing from being one of another.
func proof(key []byte, purpose string, parts ...[]byte) []byte {
	h := hmac.New(sha256.New, key)
	for _, p := range append([][]byte{[]byte(purpose)}, parts...) {
		h.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(p))))
		h.Write(p)
	}
	return h.Sum(nil)
}

func (r rankID) bytes() []byte {
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, uint64(r.pp)), uint64(r.tp))
}

// gate lets those in who have a key. Its challenges need no memory: it knows its own.
type gate struct {
	key    []byte
	secret []byte
}

func newGate(key []byte) *gate {
	g := &gate{key: slices.Clone(key), secret: make([]byte, sha256.Size)}
	rand.Read(g.secret) // never fails (Go 1.24)
	return g
}

func (g *gate) challenge(now time.Duration) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(now))
	b = append(b, make([]byte, 16)...)
	rand.Read(b[8:])
	return append(b, proof(g.secret, "challenge", b)...)
}

// fresh reports whether c is a challenge of this gate that is not old.
func (g *gate) fresh(c []byte, now time.Duration) bool {
	if len(c) != challengeLen {
		return false
	}
	said, mac := c[:8+16], c[8+16:]
	at := time.Duration(binary.LittleEndian.Uint64(said))
	return hmac.Equal(mac, proof(g.secret, "challenge", said)) && now >= at && now-at <= challengeLife
}

// answer answers a request with a challenge, or finds which rank it may be told of.
func (g *gate) answer(request []byte, now time.Duration) (challenge []byte, r rankID, err error) {
	bad := func(format string, a ...any) ([]byte, rankID, error) {
		return nil, r, fmt.Errorf("%w: request: "+format, append([]any{ErrWire}, a...)...)
	}
	if len(request) > maxKeyed {
		return bad("%d bytes", len(request))
	}
	n, b, err := msgp.ReadArrayHeaderBytes(request)
	if err != nil {
		return bad("%w", err)
	}
	name, b, err := msgp.ReadBytesZC(b)
	switch {
	case err != nil:
		return bad("name: %w", err)
	case n == 3 && string(name) == challengeName:
		return g.challenge(now), r, nil
	case string(name) != askName:
		return bad("name %.40q", name)
	case n != 5:
		return nil, r, fmt.Errorf("%w: a request without one", ErrKey)
	}
	if r.pp, b, err = readInt(b); err == nil {
		r.tp, b, err = readInt(b)
	}
	var said, mac []byte
	if err == nil {
		said, b, err = msgp.ReadBytesZC(b)
	}
	if err == nil {
		mac, b, err = msgp.ReadBytesZC(b)
	}
	switch {
	case err != nil:
		return bad("%w", err)
	case len(b) > 0:
		return bad("%d bytes after the array", len(b))
	case !g.fresh(said, now):
		return nil, r, fmt.Errorf("%w: a challenge that is old or another's", ErrKey)
	case !hmac.Equal(mac, proof(g.key, "reader", said, r.bytes())):
		return nil, r, fmt.Errorf("%w: another one", ErrKey)
	}
	return nil, r, nil
}

func appendChallengeAsk(b []byte, r rankID) []byte {
	b = msgp.AppendBytes(msgp.AppendArrayHeader(b, 3), []byte(challengeName))
	return appendInt(appendInt(b, r.pp), r.tp)
}

// asksChallenge reports whether b is what appendChallengeAsk made.
func asksChallenge(b []byte) bool {
	return bytes.HasPrefix(b, msgp.AppendBytes(msgp.AppendArrayHeader(nil, 3), []byte(challengeName)))
}

// appendKeyedAsk is appendAsk with the answer to a challenge.
func appendKeyedAsk(b []byte, r rankID, challenge, key []byte) []byte {
	b = msgp.AppendBytes(msgp.AppendArrayHeader(b, 5), []byte(askName))
	b = appendInt(appendInt(b, r.pp), r.tp)
	return msgp.AppendBytes(msgp.AppendBytes(b, challenge), proof(key, "reader", challenge, r.bytes()))
}
