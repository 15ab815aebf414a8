package nixl

import (
	"bytes"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

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

// peer-tests C11, B13: sizes from 40 bytes to 1 MB, both directions, each request
// posted three times, one notification for each post, and no byte outside.
func TestSizesBothDirectionsPostedThrice(t *testing.T) {
	const room = 8 << 20
	l := newLink(t, room, room)
	for _, c := range []struct{ size, count int }{{40, 100}, {4 << 10, 50}, {64 << 10, 16}, {1 << 20, 4}} {
		for _, op := range []Op{Read, Write} {
			from, to := l.src, l.dst
			if op == Write {
				from, to = l.dst, l.src
			}
			ours, theirs := blocks(l.dst, c.size)[:c.count], blocks(l.src, c.size)[:c.count]
			x, err := l.reader.CreateTransfer(op, DRAM, ours, l.owner.Name(), DRAM, theirs, TransferOptions{Notify: true, SkipMerge: true})
			require.NoError(t, err)
			for round := range byte(3) {
				moved := c.size * c.count
				fill(from.Bytes()[:moved], 0x10+round)
				fill(to.Bytes(), 0xee)
				finish(t, x)
				require.Equal(t, bytes.Repeat([]byte{0x10 + round}, moved), to.Bytes()[:moved], "%v of %d × %d bytes", op, c.count, c.size)
				require.EqualValues(t, 0xee, to.Bytes()[moved])
				require.EqualValues(t, 0xee, to.Bytes()[room-1])
			}
			require.NoError(t, x.Close())
			require.Len(t, receive(t, l.owner, 3), 3)
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

// peer-tests C7: an address that stays silent blocks no call, either.
func TestSendingToASilentAddressDoesNotBlock(t *testing.T) {
	a, _ := newListener(t)
	if a == nil {
		return
	}
	start := time.Now()
	require.NoError(t, a.SendMetadata(netip.MustParseAddrPort("10.10.10.10:8888")))
	require.Less(t, time.Since(start), patience)
	require.ErrorIs(t, a.CheckRemote("nobody", DRAM, nil), ErrNotFound)
}
