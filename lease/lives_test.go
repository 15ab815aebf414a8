package lease

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// vllm#58004: who holds what, and for how long yet, can be seen.
func TestLivesAreSeenPieceByPiece(t *testing.T) {
	r := newRank(t, 6)
	r.admit("admitted", 11, 4)
	r.admit("granted", 12, 1)
	r.grant(t0, "granted", 12, 30)
	r.admit("slotless", 13, NoSlot)
	r.grant(at(5), "slotless", 13, 30)
	r.admit("kept", 14, 0)
	require.NoError(t, r.Grant(at(5), Grant{Request: "kept", Nonce: 14, TTL: time.Minute, Exported: true, Fixed: true}))
	r.admit("ended", 15, 2)
	r.grant(t0, "ended", 15, 9)
	r.notify(at(8), "D", "half:2:12") // one of two readers, of a life that is not here
	r.notify(at(8), "D", "granted:2:12")
	r.notify(at(10), "D", "HB:granted,slotless,kept")
	r.Reap(at(10))

	want := []Life{
		{Request: "kept", Nonce: 14, Slot: 0, Granted: true, Fixed: true, Age: 5 * time.Second, Left: 55 * time.Second},
		{Request: "granted", Nonce: 12, Slot: 1, Granted: true, Readers: 1, Age: 10 * time.Second, Left: 20 * time.Second},
		{Request: "admitted", Nonce: 11, Slot: 4},
		{Request: "slotless", Nonce: 13, Slot: NoSlot, Granted: true, Age: 5 * time.Second, Left: 25 * time.Second},
	}
	for _, limit := range []int{1, 2, 3, 100} {
		var got []Life
		pieces := 0
		for from := 0; ; {
			n := len(got)
			got, from = r.Lives(got, from, limit)
			require.LessOrEqual(t, len(got)-n, limit)
			if pieces++; from == 0 {
				break
			}
		}
		require.Equal(t, want, got, "limit %d", limit)
		require.LessOrEqual(t, pieces, 7/limit+1)
	}
	got, next := newRank(t, 6).Lives(nil, 0, 10)
	require.Empty(t, got)
	require.Zero(t, next)
}

// How long a step can be held up by somebody who looks: a piece of 4096.
func BenchmarkLives(b *testing.B) {
	const n = 100_000
	r := newRank(b, n)
	for i := range n {
		id := fmt.Sprint("cmpl-", i)
		r.admit(id, int64(i+100), i)
		r.grant(t0, id, int64(i+100), 30)
	}
	var lives []Life
	for from := 0; b.Loop(); {
		lives, from = r.Lives(lives[:0], from, 4096)
	}
}
