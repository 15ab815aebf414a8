package rdma

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// The shared key of engines of this library, which vLLM knows nothing of. A reader proves in its request that it has the key, and
// the owner seals its answer for that request. Neither side sends the key.
//
//	reader                                                  owner
//	["get_meta_sealed:" + nonce + proof, pp, tp]         →
//	                                                     ←  sealed {compatibility_hash, agent_metadata_bytes, nixlgo_proof}, sealed clock
//
// The request has the shape of one without a key, for vLLM's listener dies of any other, and answers whatever the name is. So a
// reader with a key does vLLM's owners no harm: it refuses what they answer.
//
// Who has no key and sits between the two, or plays back what they said, can withhold and delay. He learns no metadata, since an
// answer opens with the key alone, and changes nothing, since it opens for the request that it answers alone. What a Directory
// lists is proved by nixlgo_proof, but not sealed: who may read there can use it, and who may write there can put back what the
// owner listed before. READs and notifications are NIXL's and in the clear.

// ErrKey marks an engine that has another shared key, or none.
var ErrKey = errors.New("shared key")

const (
	minKey = 16 // bytes

	sealedName = "get_meta_sealed:"
	nonceLen   = 16
	keyProof   = "nixlgo_proof"
	refused    = "nixlgo: another key"
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

// newName is the name of a request of one who has the key. There are no two alike.
func newName(key []byte, r rankID) []byte {
	b := append([]byte(sealedName), make([]byte, nonceLen)...)
	rand.Read(b[len(sealedName):]) // never fails (Go 1.24)
	return append(b, proof(key, "reader", b, r.bytes())...)
}

// admit checks that the name of a request was made with the key.
func admit(key, name []byte, r rankID) error {
	if !bytes.HasPrefix(name, []byte(sealedName)) {
		return fmt.Errorf("%w: a request without one", ErrKey)
	}
	said := min(len(name), len(sealedName)+nonceLen)
	if !hmac.Equal(name[said:], proof(key, "reader", name[:said], r.bytes())) {
		return fmt.Errorf("%w: another one", ErrKey)
	}
	return nil
}

// sealer seals and opens the answers to a request for those who have the key.
func sealer(key, name []byte, r rankID) cipher.AEAD {
	block, err := aes.NewCipher(proof(key, "answer", name, r.bytes()))
	if err != nil {
		panic(err) // another length than AES has
	}
	aead, err := cipher.NewGCMWithRandomNonce(block) // a request that is played back is answered under the same key
	if err != nil {
		panic(err)
	}
	return aead
}

func seal(key, name []byte, r rankID, frames [][]byte) [][]byte {
	s := sealer(key, name, r)
	out := make([][]byte, len(frames))
	for i, f := range frames {
		out[i] = s.Seal(nil, nil, f, []byte{byte(i)})
	}
	return out
}

func isRefusal(frames [][]byte) bool { return len(frames) == 1 && string(frames[0]) == refused }

// open is the reverse of seal. A refusal is not sealed.
func open(key, name []byte, r rankID, frames [][]byte) ([][]byte, error) {
	if isRefusal(frames) {
		return frames, nil
	}
	s := sealer(key, name, r)
	out := slices.Clone(frames)
	for i, f := range frames {
		var err error
		if out[i], err = s.Open(nil, nil, f, []byte{byte(i)}); err != nil {
			return nil, fmt.Errorf("%w: what the owner answers is not sealed with ours", ErrKey)
		}
	}
	return out, nil
}
