package nixl

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestStartMakesAndPosts(t *testing.T) {
	l := newLink(t, 1<<20, 4096)
	fill(l.src.Bytes(), 0xA7)
	x, state, err := l.reader.Start(Read, l.local, nil, l.remote, nil, TransferOptions{Notification: []byte("done")})
	require.NoError(t, err)
	require.Contains(t, []State{Active, Done}, state)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(t, x.Wait(ctx))
	require.Equal(t, l.src.Bytes(), l.dst.Bytes())
	require.Equal(t, []Notification{{From: l.reader.Name(), Payload: []byte("done")}}, receive(t, l.owner, 1))
	fill(l.src.Bytes(), 0x11)
	finish(t, x) // as one of NewTransfer
	require.Equal(t, l.src.Bytes(), l.dst.Bytes())
	require.NoError(t, x.Close())
}

func TestStartRefusesWithoutMakingAnything(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	closed, err := l.reader.PrepareLocal(DRAM, blocks(l.dst, 4096))
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	for name, c := range map[string]struct {
		local  *List
		li, ri []int32
		want   error
	}{
		"no list":       {nil, nil, nil, ErrInvalid},
		"counts differ": {l.local, []int32{0}, []int32{0, 1}, ErrInvalid},
		"no such index": {l.local, []int32{0}, []int32{16}, ErrInvalid},
		"closed list":   {closed, nil, nil, ErrClosed},
	} {
		x, state, err := l.reader.Start(Read, c.local, c.li, l.remote, c.ri, TransferOptions{})
		require.ErrorIs(t, err, c.want, name)
		require.Nil(t, x, name)
		require.Equal(t, Idle, state, name)
	}
	l.reader.s.mu.Lock()
	l.reader.s.closing = true // as the agent's Close does before it waits
	l.reader.s.mu.Unlock()
	_, _, err = l.reader.Start(Read, l.local, nil, l.remote, nil, TransferOptions{})
	require.ErrorIs(t, err, ErrClosed)
	l.reader.s.mu.Lock()
	l.reader.s.closing = false
	l.reader.s.mu.Unlock()
	require.Empty(t, l.reader.s.transfers)
	require.NoError(t, l.reader.InvalidateRemote(l.owner.Name()))
	_, _, err = l.reader.Start(Read, l.local, nil, l.remote, nil, TransferOptions{})
	require.ErrorIs(t, err, ErrStale)
}

// The library drops a peer by itself when its connection fails.
func TestStartTowardsADroppedPeerFails(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	l.reader.s.mu.Lock()
	rawInvalidate(l.reader.s.h, cname(l.owner.Name()))
	l.reader.s.mu.Unlock()
	x, state, err := l.reader.Start(Read, l.local, nil, l.remote, nil, TransferOptions{})
	if err == nil { // made, but not posted
		require.Equal(t, Failed, state)
		err = x.Err()
		require.True(t, x.Settled(), "nothing left")
		require.NoError(t, x.Close())
	}
	require.Error(t, err)
	require.NotErrorIs(t, err, ErrInvalid)
}

// Indices are checked many at a time: a wrong one is found wherever it is.
func TestAWrongIndexIsFoundAnywhere(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	for n := 1; n <= 67; n++ {
		for k := range n {
			for _, wrong := range []int32{16, -1, math.MinInt32, math.MaxInt32} {
				li, ri := make([]int32, n), make([]int32, n)
				for _, indices := range [][]int32{li, ri} {
					indices[k] = wrong
					_, err := l.reader.NewTransfer(Read, l.local, li, l.remote, ri, TransferOptions{})
					require.ErrorIs(t, err, ErrInvalid)
					require.ErrorContains(t, err, "16 remote ones")
					indices[k] = 15
				}
				x, err := l.reader.NewTransfer(Read, l.local, li, l.remote, ri, TransferOptions{})
				require.NoError(t, err)
				require.NoError(t, x.Close())
			}
		}
	}
}

// The memory behind a closed Transfer serves another one, which the closed one must not reach.
func TestAClosedTransferStaysClosed(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	x := l.read(t, TransferOptions{}, 1, 2)
	finish(t, x)
	require.NoError(t, x.Close())
	y := l.read(t, TransferOptions{}, 3)
	_, err := x.Post()
	require.ErrorIs(t, err, ErrClosed)
	_, err = x.Poll()
	require.ErrorIs(t, err, ErrClosed)
	_, err = x.EstimateCost()
	require.ErrorIs(t, err, ErrClosed)
	require.NoError(t, x.Close())
	require.True(t, x.Settled())
	require.NoError(t, x.Err())
	require.Equal(t, 2, x.Count())
	require.EqualValues(t, 8192, x.Bytes())
	states := make([]State, 2)
	require.NoError(t, PollAll([]*Transfer{x, y}, states))
	require.Equal(t, []State{Done, Idle}, states)
	finish(t, y)
	require.NoError(t, y.Close())
}

func TestTransfersInAnyOrder(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	s := l.reader.s
	var open []*Transfer
	for round, most := range []int{10, keepTransfers + 100, 3} {
		for len(open) < most {
			open = append(open, l.read(t, TransferOptions{}, int32(rand.N(16))))
		}
		require.Len(t, s.transfers, len(open))
		for i, x := range s.transfers {
			require.EqualValues(t, i, x.place)
		}
		handles := map[handle]bool{}
		for _, x := range open {
			require.Same(t, x.s, s.transfers[x.s.place])
			handles[x.s.h] = true
		}
		require.Len(t, handles, len(open))
		rand.Shuffle(len(open), func(i, j int) { open[i], open[j] = open[j], open[i] })
		for len(open) > round {
			require.NoError(t, open[0].Close())
			open = open[1:]
		}
		for _, x := range open {
			finish(t, x)
		}
	}
	for i, x := range s.transfers[:cap(s.transfers)] {
		require.False(t, i > keepTransfers && x != nil, "%d is kept", i)
	}
}
