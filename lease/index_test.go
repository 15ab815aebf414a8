package lease

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// The index agrees with a map, also where tags and homes collide.
func TestTheIndexAgreesWithAMap(t *testing.T) {
	for _, collide := range []uint64{0, ^uint64(0), 7, 0xffffffff_0000000f, 0x00000001_00000003} {
		rng := rand.New(rand.NewPCG(collide, 1))
		x := newIndex()
		hashOf := func(life int32) uint64 {
			h := x.hash(fmt.Sprint(life))
			if collide != 0 {
				h &= collide // few tags, few homes
			}
			return h
		}
		find := func(life int32) (int, bool) {
			hash := hashOf(life)
			for at := x.home(hash); ; at++ {
				got, position := x.candidate(hash, at&(len(x.entries)-1))
				if got == none || got == life {
					return position, got != none
				}
				at = position
			}
		}
		want := map[int32]bool{}
		limit := int32(2000)
		if collide < 100 {
			limit = 60 // one probe sequence
		}
		for step := range 20_000 {
			life := rng.Int32N(limit)
			at, ok := find(life)
			require.Equal(t, want[life], ok)
			grow := step%10_000 < 6000
			switch {
			case !ok && (grow || rng.IntN(3) == 0):
				x.put(hashOf(life), life, hashOf)
				want[life] = true
			case ok && (!grow || rng.IntN(3) == 0):
				x.remove(at, hashOf)
				delete(want, life)
			}
			require.Equal(t, len(want), x.used)
		}
		for life := range limit {
			_, ok := find(life)
			require.Equal(t, want[life], ok)
		}
		require.LessOrEqual(t, 4*x.used, 3*len(x.entries))
	}
}

// Several ids of one tag are told apart by their bytes.
func TestAHeartbeatTellsCollidingIDsApart(t *testing.T) {
	r := newRank(t, 0)
	for i := range 500 {
		r.admit(fmt.Sprint("r", i), int64(i+1), NoSlot)
		r.grant(t0, fmt.Sprint("r", i), int64(i+1), 30)
	}
	for i := range r.byID.entries { // forge: every entry has the tag of r7
		if r.byID.entries[i].ref != 0 {
			r.byID.entries[i].tag = tagOf(r.byID.hash("r7"))
		}
	}
	r.notify(at(20), "D", "HB:r7,no-such,r7")
	require.EqualValues(t, 2, r.Stats().Renewals)
	require.EqualValues(t, 1, r.Stats().UnknownRenewals)
	moved := 0
	for _, h := range r.hot {
		if h.deadline != r.hot[0].deadline {
			moved++
		}
	}
	require.Equal(t, 1, moved)
}
