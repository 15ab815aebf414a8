package nixl

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
)

func TestReadMovesBytesAndNotifies(t *testing.T) {
	l := newLink(t, 1<<20, 4096)
	for i := range l.src.Bytes() {
		l.src.Bytes()[i] = byte(i>>12) ^ byte(i)
	}
	x := l.read(t, TransferOptions{Notification: []byte("done")})
	require.EqualValues(t, 1<<20, x.Bytes())
	require.Equal(t, 256, x.Count())
	finish(t, x)
	require.Equal(t, l.src.Bytes(), l.dst.Bytes())
	require.Equal(t, []Notification{{From: l.reader.Name(), Payload: []byte("done")}}, receive(t, l.owner, 1))
	require.True(t, x.Settled())
	require.NoError(t, x.Err())
	require.NoError(t, x.Close())
}

func TestWriteMovesBytesTheOtherWay(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	fill(l.dst.Bytes(), 0x77)
	x, err := l.reader.NewTransfer(Write, l.local, nil, l.remote, nil, TransferOptions{Notify: true})
	require.NoError(t, err)
	finish(t, x)
	require.Equal(t, []Notification{{From: l.reader.Name(), Payload: []byte{}}}, receive(t, l.owner, 1))
	require.Equal(t, l.dst.Bytes(), l.src.Bytes())
}

func TestIndicesPickDescriptors(t *testing.T) {
	const n, block = 64, 4096
	for _, skip := range []bool{false, true} {
		l := newLink(t, n*block, block)
		for i := range n {
			fill(l.src.Bytes()[i*block:][:block], byte(i+1))
		}
		to, from := rand.Perm(n), rand.Perm(n)
		var li, ri []int32
		for k := range n / 2 {
			li, ri = append(li, int32(to[k])), append(ri, int32(from[k]))
		}
		x, err := l.reader.NewTransfer(Read, l.local, li, l.remote, ri, TransferOptions{SkipMerge: skip})
		require.NoError(t, err)
		finish(t, x)
		want := make([]byte, n*block)
		for k := range li {
			fill(want[int(li[k])*block:][:block], byte(ri[k]+1))
		}
		require.Equal(t, want, l.dst.Bytes())
	}
}

func TestListsOfMixedLengths(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	lengths := []uint64{8, 4096, 8, 1, 500}
	var rd, ld []Desc
	var off uint64
	for i, n := range lengths {
		fill(l.src.Bytes()[off:][:n], byte(i+1))
		rd = append(rd, Desc{Addr: l.src.Addr() + off, Len: n})
		ld = append(ld, Desc{Addr: l.dst.Addr() + off, Len: n})
		off += n
	}
	remote, err := l.reader.PrepareRemote(l.owner.Name(), DRAM, rd)
	require.NoError(t, err)
	local, err := l.reader.PrepareLocal(DRAM, ld)
	require.NoError(t, err)
	require.Equal(t, len(lengths), local.Len())
	x, err := l.reader.NewTransfer(Read, local, nil, remote, nil, TransferOptions{})
	require.NoError(t, err)
	require.Equal(t, off, x.Bytes())
	finish(t, x)
	require.Equal(t, l.src.Bytes()[:off], l.dst.Bytes()[:off])
	_, err = l.reader.NewTransfer(Read, local, []int32{0, 2}, remote, []int32{2, 0}, TransferOptions{})
	require.NoError(t, err, "equal lengths at other indices")
	_, err = l.reader.NewTransfer(Read, local, []int32{0, 1}, remote, []int32{0, 3}, TransferOptions{})
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "pair 1 joins local descriptor 1 of 4096 bytes with remote descriptor 3 of 1 bytes")
}

// The C layer answers -2 to all of these, or crashes. nixl#2114, nixl#656, cases.md 28
func TestWrongArgumentsAreErrInvalidBeforeTheLibrary(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	n := int32(l.local.Len())
	other := newLink(t, 4096, 4096)
	for name, c := range map[string]struct {
		op            Op
		local, remote *List
		li, ri        []int32
	}{
		"operation":              {Op(2), l.local, l.remote, nil, nil},
		"no local list":          {Read, nil, l.remote, nil, nil},
		"no remote list":         {Read, l.local, nil, nil, nil},
		"lists exchanged":        {Read, l.remote, l.local, nil, nil},
		"two local lists":        {Read, l.local, l.local, nil, nil},
		"another agent's list":   {Read, l.local, other.remote, []int32{0}, []int32{0}},
		"empty indices":          {Read, l.local, l.remote, []int32{}, []int32{}},
		"counts differ":          {Read, l.local, l.remote, []int32{0, 1}, []int32{0}},
		"nil against some":       {Read, l.local, l.remote, nil, []int32{0}},
		"local index too large":  {Read, l.local, l.remote, []int32{n}, []int32{0}},
		"remote index too large": {Read, l.local, l.remote, []int32{0}, []int32{n}},
		"local index negative":   {Read, l.local, l.remote, []int32{-1}, []int32{0}},
		"remote index minimal":   {Read, l.local, l.remote, []int32{0}, []int32{math.MinInt32}},
		"remote index maximal":   {Read, l.local, l.remote, []int32{0}, []int32{math.MaxInt32}},
	} {
		_, err := l.reader.NewTransfer(c.op, c.local, c.li, c.remote, c.ri, TransferOptions{})
		require.ErrorIs(t, err, ErrInvalid, name)
		require.NotErrorIs(t, err, ErrBackend, name)
	}
	finish(t, l.read(t, TransferOptions{})) // nothing was harmed
}

// A remote address that wraps around 2^64, or lies outside of the registered
// memory, passes the C API and kills the owner. vllm#52234, cases.md 22
func TestDescriptorsOutsideOfWhatThePeerOffersAreRefused(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	base, end := l.src.Addr(), l.src.Addr()+uint64(l.src.Len())
	for name, d := range map[string]Desc{
		"wraps":             {Addr: math.MaxUint64 - 4095, Len: 8192},
		"wraps by one":      {Addr: math.MaxUint64, Len: 2},
		"ends at 2^64":      {Addr: math.MaxUint64 - 4095, Len: 4096},
		"SIZE_MAX":          {Addr: base, Len: math.MaxUint64},
		"no length":         {Addr: base, Len: 0},
		"before":            {Addr: base - 1, Len: 1},
		"across the start":  {Addr: base - 1, Len: 2},
		"behind":            {Addr: end, Len: 1},
		"across the end":    {Addr: end - 1, Len: 2},
		"larger than it":    {Addr: base, Len: uint64(l.src.Len()) + 1},
		"another device":    {Addr: base, Len: 8, Dev: 1},
		"null":              {Addr: 0, Len: 8},
		"block id -1":       {Addr: base - 4096, Len: 4096},
		"block id 16":       {Addr: base + 16*4096, Len: 4096},
		"block id 2^31":     {Addr: base + 1<<31*4096, Len: 4096},
		"block id 2^63 - 1": {Addr: base + (1<<63-1)*4096&math.MaxUint64, Len: 4096},
	} {
		_, err := l.reader.PrepareRemote(l.owner.Name(), DRAM, []Desc{{Addr: base, Len: 8}, d})
		require.ErrorIs(t, err, ErrInvalid, name)
		require.ErrorContains(t, err, "descriptor 1", name)
	}
	for name, mem := range map[string]MemType{"VRAM": VRAM, "negative": -1, "too large": 5} {
		_, err := l.reader.PrepareRemote(l.owner.Name(), mem, []Desc{{Addr: base, Len: 8}})
		require.ErrorIs(t, err, ErrInvalid, name)
	}
	_, err := l.reader.PrepareRemote(l.owner.Name(), DRAM, nil)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = l.reader.PrepareRemote("nobody", DRAM, []Desc{{Addr: base, Len: 8}})
	require.ErrorIs(t, err, ErrNotFound)
	fill(l.src.Bytes(), 1)
	finish(t, l.read(t, TransferOptions{})) // the owner is alive
	require.Equal(t, l.src.Bytes(), l.dst.Bytes())
}

// Registering or reading into memory that is not ours answers 0 natively, and
// the first READ kills this process.
func TestLocalDescriptorsMustLieInsideARegistration(t *testing.T) {
	a := newUCX(t, Config{})
	b := registered(t, a, 1<<16)
	unregistered := mustBuffer(t, 4096)
	for name, d := range map[string]Desc{
		"unregistered":   {Addr: unregistered.Addr(), Len: 8},
		"across the end": {Addr: b.Addr() + 1<<16 - 4, Len: 8},
		"wraps":          {Addr: math.MaxUint64 - 7, Len: 16},
		"no length":      {Addr: b.Addr()},
		"device":         {Addr: b.Addr(), Len: 8, Dev: 3},
	} {
		_, err := a.PrepareLocal(DRAM, []Desc{d})
		require.ErrorIs(t, err, ErrInvalid, name)
		_, err = a.PrepareRemote(a.Name(), DRAM, []Desc{d})
		require.ErrorIs(t, err, ErrInvalid, "own memory, "+name)
	}
}

// There is no abort: a release answers 0 natively while all the bytes land
// later. nixl#2044, cases.md 3
func TestActiveTransferCannotBeClosed(t *testing.T) {
	const size = 64 << 20
	l := newLink(t, size, size)
	fill(l.src.Bytes(), 0xA1)
	stuck, peer := l.readFromSilence(t)
	require.False(t, stuck.Settled())
	require.ErrorIs(t, stuck.Close(), ErrActive)
	require.ErrorIs(t, l.reader.InvalidateRemote(peer), ErrActive)
	_, err := stuck.Post()
	require.ErrorIs(t, err, ErrActive, "posting twice deletes the request natively")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	require.ErrorIs(t, stuck.Wait(ctx), context.Canceled)
	require.ErrorIs(t, stuck.Close(), ErrActive, "a wait that ended ends no transfer")

	x := l.read(t, TransferOptions{})
	finish(t, x)
	require.True(t, x.Settled())
	require.NoError(t, x.Close())
	require.NoError(t, l.reader.InvalidateRemote(l.owner.Name()))
	fill(l.dst.Bytes(), 0x55) // ours again
	other := newLink(t, size, size)
	finish(t, other.read(t, TransferOptions{})) // a full READ's time for late bytes
	require.Equal(t, size, bytes.Count(l.dst.Bytes(), []byte{0x55}), "bytes changed after Close")
}

// A reader that vanishes amid a READ can crash the owner over TCP (assertion in
// sys/stubs.c, or SIGSEGV), so Close lets active transfers end first.
func TestAgentCloseWaitsForActiveTransfers(t *testing.T) {
	const size = 4 << 20
	for round := range 8 {
		l := newLink(t, size, 1<<16)
		fill(l.src.Bytes(), 0xA1)
		x := l.read(t, TransferOptions{SkipMerge: round%2 == 0, Notification: []byte("done")})
		_, err := x.Post()
		require.NoError(t, err)
		require.NoError(t, l.reader.Close())
		require.Equal(t, l.src.Bytes(), l.dst.Bytes())
		require.Len(t, receive(t, l.owner, 1), 1)
		require.True(t, x.Settled())
		_, err = x.Poll()
		require.ErrorIs(t, err, ErrClosed)
	}
}

// The library answers -6 once a peer's metadata is gone, and the bytes of a READ
// in flight land all the same. cases.md 3
func TestReadWhosePeerWasDroppedStaysQuarantined(t *testing.T) {
	const size = 64 << 20
	l := newLink(t, size, size)
	fill(l.src.Bytes(), 0xA1)
	x, state, err := l.read(t, TransferOptions{}), Idle, error(nil)
	for range 50 { // until one is not done within its post
		fill(l.dst.Bytes(), 0)
		if state, err = x.Post(); state == Active {
			break
		}
		require.NoError(t, err)
	}
	require.Equal(t, Active, state)
	l.reader.s.mu.Lock()
	rawInvalidate(l.reader.s.h, cname(l.owner.Name())) // as the library does by itself
	l.reader.s.mu.Unlock()
	require.Eventually(t, func() bool {
		state, err = x.Poll()
		return state == Failed
	}, patience, time.Millisecond)
	require.ErrorIs(t, err, ErrNotFound)
	require.ErrorIs(t, err, ErrPeer)
	require.False(t, x.Settled())
	require.ErrorIs(t, x.Close(), ErrActive)
	require.Eventually(t, func() bool { // it did land
		b := l.dst.Bytes()
		return b[0] == 0xA1 && b[size/2] == 0xA1 && b[size-1] == 0xA1
	}, patience, time.Millisecond)
	require.False(t, x.Settled(), "nobody can tell from outside")
	require.NoError(t, l.reader.Close())
	require.True(t, x.Settled())
}

func TestTransferIsPostedAgainAndAgain(t *testing.T) {
	l := newLink(t, 4096, 8)
	x := l.read(t, TransferOptions{Notification: []byte("again")}, 3)
	for i := range uint64(200) {
		binary.NativeEndian.PutUint64(l.src.Bytes()[24:], i)
		finish(t, x)
		require.Equal(t, i, binary.NativeEndian.Uint64(l.dst.Bytes()[24:]))
	}
	require.Len(t, receive(t, l.owner, 200), 200)
}

func TestWaitNeedsAPost(t *testing.T) {
	l := newLink(t, 4096, 8)
	x := l.read(t, TransferOptions{})
	require.ErrorIs(t, x.Wait(context.Background()), ErrState)
	state, err := x.Poll()
	require.NoError(t, err)
	require.Equal(t, Idle, state)
}

// A READ's target need not poll. nixl#2090, cases.md 30
func TestReadCompletesAgainstAnIdleOwner(t *testing.T) {
	l := newLink(t, 1<<20, 4096)
	finish(t, l.read(t, TransferOptions{})) // nobody calls the owner
}

func TestPollAllAcrossAgents(t *testing.T) {
	l, m := newLink(t, 1<<20, 4096), newLink(t, 1<<20, 4096)
	var xs []*Transfer
	for i := range int32(8) {
		xs = append(xs, l.read(t, TransferOptions{}, 8*i, 8*i+1), m.read(t, TransferOptions{}, 8*i, 8*i+1))
	}
	xs = append(xs, m.read(t, TransferOptions{}, 0), xs[0], xs[1])
	for i, x := range xs {
		if i < 12 {
			_, err := x.Post()
			require.NoError(t, err)
		}
	}
	states := make([]State, len(xs))
	require.Eventually(t, func() bool {
		require.NoError(t, PollAll(xs, states))
		for i, s := range states {
			if i >= 12 && i < 17 {
				require.Equal(t, Idle, s)
			} else if s != Done {
				return false
			}
		}
		return true
	}, patience, time.Millisecond)
	require.ErrorIs(t, PollAll(xs, states[1:]), ErrInvalid)
	require.ErrorIs(t, PollAll([]*Transfer{nil}, states[:1]), ErrInvalid)
	require.NoError(t, PollAll(nil, nil))
}

// Posting with optional arguments would lose the notification for good, and it
// leaves only when the reader polls. cases.md 29
func TestEachReadNotifiesOnce(t *testing.T) {
	const n = 1000
	l := newLink(t, 1<<16, 4096)
	var got []Notification
	x := make([]*Transfer, 8)
	for i := range x {
		x[i] = l.read(t, TransferOptions{Notification: fmt.Appendf(nil, "transfer %d", i)}, int32(i))
	}
	for i := range n {
		finish(t, x[i%8])
		var err error
		got, err = l.owner.Notifications(got)
		require.NoError(t, err)
	}
	for len(got) < n {
		got = append(got, receive(t, l.owner, 1)...)
	}
	finish(t, l.read(t, TransferOptions{Notification: []byte("last")}))
	rest := receive(t, l.owner, 1)
	require.Equal(t, "last", string(rest[0].Payload))
	require.Len(t, rest, 1)
	require.Len(t, got, n)
	count := map[string]int{}
	for _, g := range got {
		count[string(g.Payload)]++
	}
	require.Len(t, count, 8)
	for _, c := range count {
		require.Equal(t, n/8, c)
	}
}

// Natively a READ that nobody polls never notifies: 0 after 3 s. cases.md 29
func TestForgottenReadStillNotifies(t *testing.T) {
	l := newLink(t, 1<<20, 4096)
	x := l.read(t, TransferOptions{Notification: []byte("done")})
	_, err := x.Post()
	require.NoError(t, err)
	require.Len(t, receive(t, l.owner, 1), 1) // only the agent polls the transfer
	state, err := x.Poll()
	require.NoError(t, err)
	require.Equal(t, Done, state)
}

// A slot is read alone, as 8 bytes: no READ sees half of a store. cases.md 10
func TestEightByteReadsAreNotTorn(t *testing.T) {
	const n1, n2, reads = 0x0101010101010101, 0x7e7e7e7e7e7e7e7e, 3000
	l := newLink(t, 4096, 8)
	slot := (*atomic.Uint64)(unsafe.Pointer(&l.src.Bytes()[64]))
	slot.Store(n1)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				slot.Store(n1)
				slot.Store(n2)
			}
		}
	})
	x := l.read(t, TransferOptions{}, 8)
	cell := (*atomic.Uint64)(unsafe.Pointer(&l.dst.Bytes()[64]))
	seen := map[uint64]int{}
	for range reads {
		cell.Store(0)
		finish(t, x)
		seen[cell.Load()]++
	}
	close(stop)
	wg.Wait()
	require.Equal(t, reads, seen[n1]+seen[n2], "%x", seen)
}

// Two threads that poll one request crash natively, whatever the agent's
// synchronisation; so does a release beside a poll. sglang#28897, nixl#1811, cases.md 32
func TestGoroutinesShareTransfers(t *testing.T) {
	const workers, reads = 8, 300
	l := newLink(t, 1<<20, 4096)
	third := newUCX(t, Config{})
	thirdBlob, err := third.LocalMetadata()
	require.NoError(t, err)
	shared := l.read(t, TransferOptions{}, 200)
	var wg sync.WaitGroup
	var ok atomic.Int64
	for w := range workers {
		wg.Go(func() {
			for i := range reads {
				x, err := l.reader.NewTransfer(Read, l.local, []int32{int32(w)}, l.remote, []int32{int32(w)}, TransferOptions{Notification: []byte("n")})
				if err != nil {
					t.Error(err)
					return
				}
				shared.Post() // ErrActive most of the time
				shared.Poll()
				if _, err := x.Post(); err != nil {
					t.Error(err)
				}
				if err := x.Wait(context.Background()); err != nil {
					t.Error(i, err)
					continue
				}
				if err := x.Close(); err != nil {
					t.Error(err)
				}
				ok.Add(1)
			}
		})
	}
	stop := make(chan struct{})
	var churn sync.WaitGroup
	churn.Go(func() {
		for range 100 {
			select {
			case <-stop:
				return
			default:
			}
			name, err := l.reader.LoadRemote(thirdBlob)
			if err != nil {
				t.Error(err)
				return
			}
			if err := l.reader.InvalidateRemote(name); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Wait()
	close(stop)
	churn.Wait()
	require.EqualValues(t, workers*reads, ok.Load())
	require.Len(t, receive(t, l.owner, workers*reads), workers*reads)
}

// Natively a list of more than 2^31-1 items is cut to an int. Only the lengths
// are looked at, so address space without memory will do.
func TestTooManyItemsAreRefused(t *testing.T) {
	const n = math.MaxInt32 + 1
	space, err := syscall.Mmap(-1, 0, n*int(unsafe.Sizeof(Desc{})), syscall.PROT_NONE, syscall.MAP_PRIVATE|syscall.MAP_ANON|syscall.MAP_NORESERVE)
	require.NoError(t, err)
	defer syscall.Munmap(space)
	l := newLink(t, 4096, 8)
	_, err = l.reader.PrepareLocal(DRAM, unsafe.Slice((*Desc)(unsafe.Pointer(&space[0])), n))
	require.ErrorIs(t, err, ErrInvalid)
	indices := unsafe.Slice((*int32)(unsafe.Pointer(&space[0])), n)
	_, err = l.reader.NewTransfer(Read, l.local, indices, l.remote, indices, TransferOptions{})
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorIs(t, l.reader.Notify(l.owner.Name(), space[:n]), ErrInvalid)
}

func TestPostPollAndDrainAllocateNothing(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	x := l.read(t, TransferOptions{}, 0)
	xs, states := []*Transfer{x, l.read(t, TransferOptions{}, 1), l.read(t, TransferOptions{}, 2)}, make([]State, 3)
	finish(t, x)
	require.Zero(t, testing.AllocsPerRun(200, func() {
		for _, x := range xs {
			x.Post()
		}
		for states[0] = Active; states[0] == Active || states[1] == Active || states[2] == Active; {
			PollAll(xs, states)
		}
		for s := Active; s == Active; {
			s, _ = x.Poll()
		}
	}))
	var box []Notification
	require.Zero(t, testing.AllocsPerRun(200, func() { box, _ = l.owner.Notifications(box) }))
	require.Empty(t, box)
	msg := []byte("heartbeat")
	require.Zero(t, testing.AllocsPerRun(20, func() { l.owner.Notify(l.reader.Name(), msg) }))
}
