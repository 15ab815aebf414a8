package nixl

import (
	"bytes"
	"fmt"
	"net/netip"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// peer-tests C8, C9, C10: goroutines that notify at once, also their own agent and
// with nothing in it. Each message arrives once.
func TestNotificationsOfManyGoroutinesArriveOnceEach(t *testing.T) {
	l := newLink(t, 4096, 8)
	for name, c := range map[string]struct {
		to             *Agent
		senders, count int
		empty          bool
	}{
		"a peer":  {l.reader, 4, 100, false},
		"itself":  {l.owner, 4, 100, false},
		"nothing": {l.reader, 2, 16, true},
	} {
		var wg sync.WaitGroup
		want := map[string]int{}
		for s := range c.senders {
			for k := range c.count {
				message := fmt.Sprint(s, "/", k)
				if c.empty {
					message = ""
				}
				want[message]++
			}
			wg.Go(func() {
				for k := range c.count {
					message := fmt.Appendf(nil, "%d/%d", s, k)
					if c.empty {
						message = nil
					}
					if err := l.owner.Notify(c.to.Name(), message); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		got := map[string]int{}
		for _, n := range receive(t, c.to, c.senders*c.count) {
			require.Equal(t, l.owner.Name(), n.From)
			got[string(n.Payload)]++
		}
		wg.Wait()
		require.Equal(t, want, got, name)
		more, err := c.to.Notifications(nil)
		require.NoError(t, err)
		require.Empty(t, more, name)
	}
}

// peer-tests C11: 1000 descriptors of 40 bytes to 100 of 1 MB, both directions, as one
// request and as four at once, each posted three times, one notification for each post,
// and no byte outside.
func TestSizesBothDirectionsPostedThrice(t *testing.T) {
	cases := []struct{ size, count int }{{40, 1000}, {4 << 10, 500}, {64 << 10, 200}, {1 << 20, 100}}
	room := 128 << 20
	if testing.Short() {
		cases, room = cases[:2], 8<<20
	}
	l := newLink(t, room, room)
	for _, c := range cases {
		for _, op := range []Op{Read, Write} {
			for _, goroutines := range []int{1, 4} {
				from, to := l.src, l.dst
				if op == Write {
					from, to = l.dst, l.src
				}
				ours, theirs := blocks(l.dst, c.size)[:c.count], blocks(l.src, c.size)[:c.count]
				var xs []*Transfer
				for part := range goroutines {
					first, last := part*c.count/goroutines, (part+1)*c.count/goroutines
					x, err := l.reader.CreateTransfer(op, DRAM, ours[first:last], l.owner.Name(), DRAM, theirs[first:last], TransferOptions{Notify: true, SkipMerge: true})
					require.NoError(t, err)
					xs = append(xs, x)
				}
				moved := c.size * c.count
				for round := range byte(3) {
					fill(from.Bytes()[:moved], 0x10+round)
					fill(to.Bytes(), 0xee)
					var wg sync.WaitGroup
					for _, x := range xs {
						wg.Go(func() {
							if _, err := x.Post(); err != nil {
								t.Error(err)
							} else if err := x.Wait(t.Context()); err != nil {
								t.Error(err)
							}
						})
					}
					wg.Wait()
					require.Equal(t, moved, bytes.Count(to.Bytes()[:moved], []byte{0x10 + round}), "%v of %d × %d bytes", op, c.count, c.size)
					require.EqualValues(t, 0xee, to.Bytes()[moved])
					require.EqualValues(t, 0xee, to.Bytes()[room-1])
				}
				for _, x := range xs {
					require.NoError(t, x.Close())
				}
				require.Len(t, receive(t, l.owner, 3*goroutines), 3*goroutines)
			}
		}
	}
}

// peer-tests B13: neither what is read nor what is written touches another registration.
func TestRegistrationsDoNotCross(t *testing.T) {
	owner, reader := newUCX(t, Config{}), newUCX(t, Config{})
	theirs := []*Buffer{registered(t, owner, 1024), registered(t, owner, 2048)}
	ours := []*Buffer{registered(t, reader, 1024), registered(t, reader, 2048)}
	introduce(t, owner, reader)
	introduce(t, reader, owner)
	for i, op := range []Op{Read, Write, Write, Read} {
		for k, b := range append(theirs, ours...) {
			fill(b.Bytes(), byte(1+k))
		}
		which := i % 2
		x, err := reader.CreateTransfer(op, DRAM, blocks(ours[which], ours[which].Len()), owner.Name(), DRAM, blocks(theirs[which], theirs[which].Len()), TransferOptions{})
		require.NoError(t, err)
		finish(t, x)
		require.NoError(t, x.Close())
		want := []byte{1, 2, 3, 4}
		if op == Read {
			want[2+which] = want[which]
		} else {
			want[which] = want[2+which]
		}
		for k, b := range append(theirs, ours...) {
			require.Equal(t, b.Len(), bytes.Count(b.Bytes(), want[k:k+1]), "%v of memory %d: memory %d", op, which, k)
		}
	}
}

// peer-tests C13, B17: registering again and again leaves nothing behind: what
// 128 registrations add to the metadata goes with them, round for round.
func TestRegisteringAgainAndAgainLeavesNothing(t *testing.T) {
	a := newUCX(t, Config{})
	size := func() int {
		blob, err := a.LocalMetadata()
		require.NoError(t, err)
		return len(blob)
	}
	var buffers []*Buffer
	for range 128 {
		buffers = append(buffers, mustBuffer(t, 4096))
	}
	before, files, full := size(), 0, 0
	for round := range 64 {
		var regs []*Registration
		for _, b := range buffers {
			r, err := a.Register(b)
			require.NoError(t, err)
			regs = append(regs, r)
		}
		now := size()
		require.Greater(t, now, before+128*24)
		if round == 0 {
			full, files = now, openFiles(t)
		}
		require.InDelta(t, full, now, 128*8, "keys may differ in length")
		for _, r := range regs {
			require.NoError(t, r.Close())
		}
		require.Equal(t, before, size())
	}
	require.Less(t, openFiles(t), files+64, "less than one a round")
}

// peer-tests C7: a peer that stays silent blocks no call, either, nor the agent's Close.
func TestSendingToASilentAddressDoesNotBlock(t *testing.T) {
	a, _ := newListener(t)
	if a == nil {
		return
	}
	silent := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), silentPort(t))
	require.NoError(t, a.SendMetadata(silent))
	require.NoError(t, a.FetchRemote("nobody", silent))
	require.ErrorIs(t, a.CheckRemote("nobody", DRAM, nil), ErrNotFound)
}
