package rdma

import (
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tinylib/msgp/msgp"
)

// lmdeploy#4804, LightLLM#1213, cases.md 20: the decoders of the side channel take a fixed schema and nothing else. A million
// messages with a few bytes changed, cut or doubled are decoded or refused, without a panic and without much memory.
func TestMillionMutatedMessages(t *testing.T) {
	messages := 1_000_000
	if testing.Short() {
		messages = 50_000
	}
	clock := msgp.AppendFloat64(nil, 1)
	replies := [][]byte{appendReply(nil, "h", sample(), rankID{}, nil), appendReply(nil, "h", sample(), rankID{}, testKey)}
	name := newName(testKey, rankID{1, 2})
	requests := [][]byte{appendAsk(nil, []byte(askName), rankID{0, 1}), appendAsk(nil, name, rankID{1, 2})}
	answers := seal(testKey, name, rankID{1, 2}, replies)
	rng := rand.New(rand.NewPCG(1, 2))
	var buf []byte
	mutate := func(of [][]byte) []byte {
		buf = append(buf[:0], of[rng.IntN(len(of))]...)
		for range 1 + rng.IntN(3) {
			at := rng.IntN(len(buf))
			switch rng.IntN(4) {
			case 0:
				buf[at] ^= 1 << rng.IntN(8)
			case 1:
				buf[at] = byte(rng.Uint32())
			case 2:
				buf = append(buf[:at], buf[min(len(buf), at+1+rng.IntN(8)):]...)
			default:
				buf = append(buf, buf[at:min(len(buf), at+8)]...)
			}
			if len(buf) == 0 {
				return buf
			}
		}
		return buf
	}
	runtime.GC()
	var before, peak runtime.MemStats
	runtime.ReadMemStats(&before)
	taken := 0
	for i := range messages {
		var err error
		switch i % 4 {
		case 0, 1:
			_, err = parseReply([][]byte{mutate(replies), clock}, rankID{}, expected{})
		case 2:
			_, _, err = parseAsk(mutate(requests))
		default:
			_, err = open(testKey, name, rankID{1, 2}, [][]byte{mutate(answers)})
		}
		if err == nil {
			taken++
		}
		if i%(messages/10) == 0 {
			runtime.ReadMemStats(&peak)
			require.Less(t, peak.HeapAlloc, before.HeapAlloc+64<<20)
		}
	}
	t.Logf("%d of %d are messages all the same", taken, messages)
	require.Less(t, taken, messages/2)
}
