package rdmatest_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// ends are two fabrics that know each other.
type ends struct {
	t      *testing.T
	net    *rdmatest.Network
	a, b   *rdmatest.Fabric
	ma, mb *rdmatest.Memory
}

func newEnds(t *testing.T) *ends {
	n := rdmatest.NewNetwork()
	e := &ends{t: t, net: n, ma: n.NewMemory(4096), mb: n.NewMemory(4096)}
	e.a, e.b = n.NewFabric("A", e.ma), n.NewFabric("B", e.mb)
	e.load(e.a, e.b)
	e.load(e.b, e.a)
	return e
}

func (e *ends) load(f, of *rdmatest.Fabric) {
	e.t.Helper()
	blob, err := of.Metadata()
	require.NoError(e.t, err)
	name, err := f.Load(blob)
	require.NoError(e.t, err)
	require.Equal(e.t, of.Name(), name)
}

// post posts a READ of A from B.
func (e *ends) post(descs ...[3]int) (rdma.Read, error) {
	e.t.Helper()
	var local, remote []nixl.Desc
	for _, d := range descs { // local offset, remote offset, length
		local, remote = append(local, e.ma.Desc(d[0], d[2])), append(remote, e.mb.Desc(d[1], d[2]))
	}
	l, err := e.a.LocalList(nixl.DRAM, local)
	require.NoError(e.t, err)
	r, err := e.a.RemoteList("B", nixl.DRAM, remote)
	require.NoError(e.t, err)
	read, err := e.a.NewRead(l, nil, r, nil, true)
	require.NoError(e.t, err)
	_, err = read.Post()
	return read, err
}

func (e *ends) state(r rdma.Read) nixl.State {
	e.t.Helper()
	s := make([]nixl.State, 1)
	require.NoError(e.t, e.a.Poll([]rdma.Read{r}, s))
	return s[0]
}

func (e *ends) arrived(f *rdmatest.Fabric) (out []string) {
	e.t.Helper()
	got, err := f.Notifications(nil)
	require.NoError(e.t, err)
	for _, n := range got {
		out = append(out, string(n.Payload))
	}
	return out
}

func set(m *rdmatest.Memory, v byte) {
	for i := range m.Bytes() {
		m.Bytes()[i] = v
	}
}

func TestReadCopiesWhenItLands(t *testing.T) {
	e := newEnds(t)
	set(e.mb, 1)
	read, err := e.post([3]int{0, 0, 100})
	require.NoError(t, err)
	require.Zero(t, e.ma.Bytes()[0], "posted, not landed")
	set(e.mb, 2)
	require.Equal(t, nixl.Done, e.state(read))
	require.EqualValues(t, 2, e.ma.Bytes()[0])
}

func TestHeldReadLandsInThePartsThatTheTestChooses(t *testing.T) {
	e := newEnds(t)
	e.net.HoldReads(true)
	set(e.mb, 1)
	read, err := e.post([3]int{0, 100, 10}, [3]int{50, 0, 10}, [3]int{200, 200, 10})
	require.NoError(t, err)
	held := e.net.Reads()
	require.Len(t, held, 1)
	r := held[0]
	require.Same(t, read, rdma.Read(r))
	require.Equal(t, "A", r.Reader())
	require.Equal(t, "B", r.Owner())
	require.EqualValues(t, 30, r.Bytes())
	require.True(t, r.Land(5, 15)) // over the border of two descriptors
	set(e.mb, 2)
	require.True(t, r.Land(0, 20))
	want := make([]byte, 4096)
	copy(want[0:], []byte{2, 2, 2, 2, 2, 1, 1, 1, 1, 1})
	copy(want[50:], []byte{1, 1, 1, 1, 1, 2, 2, 2, 2, 2})
	require.Equal(t, want, e.ma.Bytes())
	require.Equal(t, nixl.Active, e.state(read))
	require.ErrorIs(t, read.Close(), nixl.ErrActive)
	require.True(t, r.Fetch())
	set(e.mb, 3)
	require.True(t, r.Land(25, 1000))
	require.True(t, r.Deliver())
	copy(want[200:], bytes.Repeat([]byte{2}, 10))
	require.Equal(t, want, e.ma.Bytes(), "fetched before the owner wrote 3")
	require.Equal(t, nixl.Done, e.state(read))
	require.False(t, r.Deliver())
	require.Empty(t, e.net.Reads())
	require.NoError(t, read.Close())
}

// Measured (capi-facts.md): 8 bytes are never torn, cases.md 10.
func TestAlignedWordIsNeverTorn(t *testing.T) {
	e := newEnds(t)
	e.net.HoldReads(true)
	set(e.mb, 1)
	_, err := e.post([3]int{8, 16, 8}, [3]int{100, 101, 8})
	require.NoError(t, err)
	r := e.net.Reads()[0]
	require.True(t, r.Land(3, 4))
	require.Equal(t, bytes.Repeat([]byte{1}, 8), e.ma.Bytes()[8:16])
	require.True(t, r.Land(9, 10))
	require.Equal(t, []byte{0, 1, 0, 0, 0, 0, 0, 0}, e.ma.Bytes()[100:108], "not aligned there, so torn")
}

// Every order of landing parts yields the owner's bytes, each once.
func TestAnyPartitionOfAReadIsWhole(t *testing.T) {
	for seed := range uint64(200) {
		e := newEnds(t)
		for i := range e.mb.Bytes() {
			e.mb.Bytes()[i] = byte(i*7) ^ byte(i>>8)
		}
		s := e.net.Shuffle(seed)
		s.Part, s.Fetch = 0.9, 0.1
		read, err := e.post([3]int{0, 1000, 777}, [3]int{1000, 0, 8}, [3]int{1016, 16, 8}, [3]int{2001, 3000, 1})
		require.NoError(t, err)
		for s.Step() {
		}
		require.Equal(t, nixl.Done, e.state(read))
		want := make([]byte, 4096)
		copy(want[0:777], e.mb.Bytes()[1000:])
		copy(want[1000:1008], e.mb.Bytes()[0:])
		copy(want[1016:1024], e.mb.Bytes()[16:])
		want[2001] = e.mb.Bytes()[3000]
		require.Equal(t, want, e.ma.Bytes(), "seed %d", seed)
	}
}

// nixl#2044, cases.md 3: a negative status is no proof that writing stopped.
func TestBrokenReadIsFailedAndStillLands(t *testing.T) {
	e := newEnds(t)
	e.net.HoldReads(true)
	set(e.mb, 1)
	read, err := e.post([3]int{0, 0, 100})
	require.NoError(t, err)
	r := e.net.Reads()[0]
	cause := errors.New("told so")
	r.Break(cause)
	require.Equal(t, nixl.Failed, e.state(read))
	require.ErrorIs(t, read.Err(), cause)
	require.ErrorIs(t, read.Close(), nixl.ErrActive)
	require.True(t, r.Land(0, 50))
	require.EqualValues(t, 1, e.ma.Bytes()[49])
	r.Fail(nil)
	require.False(t, r.Deliver())
	require.Zero(t, e.ma.Bytes()[50])
	require.ErrorIs(t, read.Err(), cause)
	require.NoError(t, read.Close())
}

// nixl#2047, cases.md 4.
func TestStoppedPeerLeavesReadsActiveAndTakesNotifications(t *testing.T) {
	e := newEnds(t)
	set(e.mb, 1)
	e.b.Stop()
	read, err := e.post([3]int{0, 0, 100})
	require.NoError(t, err)
	for i := range 100 {
		require.Equal(t, nixl.Active, e.state(read))
		require.NoError(t, e.a.Notify("B", fmt.Append(nil, i)))
	}
	require.False(t, e.net.Reads()[0].Deliver())
	require.ErrorIs(t, e.a.Forget("B"), nixl.ErrActive)
	require.Zero(t, e.ma.Bytes()[0])
	e.b.Continue()
	require.Equal(t, nixl.Done, e.state(read))
	got := e.arrived(e.b)
	require.Len(t, got, 100)
	require.Equal(t, "99", got[99])
}

func TestCutLinkIsSilentAndBrokenLinkIsNot(t *testing.T) {
	e := newEnds(t)
	e.net.Cut(e.a, e.b)
	read, err := e.post([3]int{0, 0, 100})
	require.NoError(t, err)
	require.NoError(t, e.a.Notify("B", []byte("1")))
	require.NoError(t, e.b.Notify("A", []byte("2")))
	require.Equal(t, nixl.Active, e.state(read))
	require.Empty(t, e.arrived(e.b))
	e.net.Mend(e.a, e.b)
	require.Equal(t, nixl.Done, e.state(read))
	require.Equal(t, []string{"1"}, e.arrived(e.b))
	require.Equal(t, []string{"2"}, e.arrived(e.a))

	e.net.Cut(e.a, e.b)
	read, err = e.post([3]int{0, 0, 100})
	require.NoError(t, err)
	require.NoError(t, e.a.Notify("B", []byte("lost")))
	e.net.Break(e.a, e.b)
	require.Equal(t, nixl.Failed, e.state(read))
	require.ErrorIs(t, read.Err(), nixl.ErrPeer)
	require.ErrorIs(t, read.Err(), nixl.ErrBackend)
	require.ErrorIs(t, e.a.Notify("B", nil), nixl.ErrPeer)
	require.ErrorIs(t, e.b.Notify("A", nil), nixl.ErrPeer)
	e.load(e.a, e.b) // unchanged: no help
	_, err = e.post([3]int{0, 0, 100})
	require.ErrorIs(t, err, nixl.ErrPeer)
	require.NoError(t, e.a.Forget("B"))
	e.load(e.a, e.b)
	require.NoError(t, e.a.Notify("B", []byte("again")))
	require.Equal(t, []string{"again"}, e.arrived(e.b))
}

// nixl#1986, cases.md 15: the successor of a dead peer under its name.
func TestSuccessorUnderTheSameNameMakesOldListsStale(t *testing.T) {
	e := newEnds(t)
	l, err := e.a.LocalList(nixl.DRAM, []nixl.Desc{e.ma.Desc(0, 8)})
	require.NoError(t, err)
	r, err := e.a.RemoteList("B", nixl.DRAM, []nixl.Desc{e.mb.Desc(0, 8)})
	require.NoError(t, err)
	read, err := e.a.NewRead(l, nil, r, nil, false)
	require.NoError(t, err)
	e.net.HoldReads(true)
	active, err := e.post([3]int{0, 0, 100})
	require.NoError(t, err)
	require.Panics(t, func() { e.net.NewFabric("B") }, "peers would merge two agents of one name")
	e.b.Kill()
	require.Equal(t, nixl.Failed, e.state(active))
	require.ErrorIs(t, active.Err(), nixl.ErrPeer)
	e.b = e.net.NewFabric("B", e.mb)
	e.load(e.a, e.b)
	_, err = read.Post()
	require.ErrorIs(t, err, nixl.ErrStale)
	_, err = e.a.NewRead(l, nil, r, nil, false)
	require.ErrorIs(t, err, nixl.ErrStale)
	_, err = e.post([3]int{0, 0, 100})
	require.NoError(t, err)
	require.True(t, e.net.Reads()[0].Deliver())
}

func TestNothingLandsAfterTheReaderClosed(t *testing.T) {
	e := newEnds(t)
	e.net.HoldReads(true)
	set(e.mb, 1)
	for range 2 {
		_, err := e.post([3]int{0, 0, 100})
		require.NoError(t, err)
	}
	reads := e.net.Reads()
	reads[0].Break(nil)
	require.NoError(t, e.a.Close())
	for _, r := range reads {
		require.False(t, r.Deliver())
	}
	require.Equal(t, make([]byte, 4096), e.ma.Bytes())
	require.Empty(t, e.net.Reads())
}

func TestNotificationsAreDeliveredAsTheTestChooses(t *testing.T) {
	e := newEnds(t)
	e.net.HoldNotifications(true)
	for _, m := range []string{"1", "2", "3", "4"} {
		require.NoError(t, e.a.Notify("B", []byte(m)))
	}
	require.Empty(t, e.arrived(e.b))
	m := e.net.Messages()
	require.Len(t, m, 4)
	require.Equal(t, "A", m[0].From())
	require.Equal(t, "B", m[0].To())
	require.Equal(t, []byte("3"), m[2].Payload())
	m[1].Drop()
	require.True(t, m[2].Deliver())
	require.True(t, m[0].Deliver())
	require.False(t, m[0].Deliver(), "gone")
	require.False(t, m[1].Deliver(), "dropped")
	m[3].Duplicate()
	require.Equal(t, []string{"3", "1"}, e.arrived(e.b))
	e.net.HoldNotifications(false)
	require.Equal(t, []string{"4", "4"}, e.arrived(e.b))
	e.net.HoldNotifications(true)
	require.NoError(t, e.a.Notify("B", []byte("5")))
	last := e.net.Messages()[0]
	e.b.Kill()
	require.False(t, last.Deliver())
	require.Empty(t, e.net.Messages())
	require.ErrorIs(t, e.a.Notify("B", nil), nixl.ErrPeer)
	_, err := e.b.Notifications(nil)
	require.ErrorIs(t, err, net.ErrClosed)
}

func TestChosenCallFails(t *testing.T) {
	e := newEnds(t)
	cause := errors.New("told so")
	e.a.Fail(rdmatest.OpNotify, 3, cause)
	e.a.Fail(rdmatest.OpPost, 2, nil)
	for i := range 5 {
		if err := e.a.Notify("B", fmt.Append(nil, i)); i == 2 {
			require.ErrorIs(t, err, cause)
		} else {
			require.NoError(t, err)
		}
		if _, err := e.post([3]int{0, 0, 8}); i == 1 {
			require.ErrorIs(t, err, nixl.ErrPeer)
		} else {
			require.NoError(t, err)
		}
	}
	require.Equal(t, []string{"0", "1", "3", "4"}, e.arrived(e.b))
	for op, call := range map[rdmatest.Op]func() error{
		rdmatest.OpAlloc:         func() error { _, err := e.a.Alloc(8); return err },
		rdmatest.OpMetadata:      func() error { _, err := e.a.Metadata(); return err },
		rdmatest.OpForget:        func() error { return e.a.Forget("nobody") },
		rdmatest.OpPoll:          func() error { return e.a.Poll(nil, nil) },
		rdmatest.OpNotifications: func() error { _, err := e.a.Notifications(nil); return err },
		rdmatest.OpLocalList:     func() error { _, err := e.a.LocalList(nixl.DRAM, []nixl.Desc{e.ma.Desc(0, 8)}); return err },
		rdmatest.OpRemoteList:    func() error { _, err := e.a.RemoteList("B", nixl.DRAM, []nixl.Desc{e.mb.Desc(0, 8)}); return err },
		rdmatest.OpLoad: func() error {
			blob, err := e.b.Metadata()
			require.NoError(t, err)
			_, err = e.a.Load(blob)
			return err
		},
	} {
		e.a.Fail(op, 1, cause)
		require.ErrorIs(t, call(), cause, "op %d", op)
		require.NoError(t, call(), "op %d", op)
	}
}

// ucx#9623, cases.md 2, 22: over TCP, forged metadata would crash the owner.
func TestForgedMetadataDoesNotCrash(t *testing.T) {
	e := newEnds(t)
	blob, err := e.b.Metadata()
	require.NoError(t, err)
	forged := bytes.Replace(blob, []byte(`"Len":4096`), []byte(`"Len":8192`), 1)
	require.NotEqual(t, blob, forged)
	require.NoError(t, e.a.Forget("B"))
	_, err = e.a.Load(forged)
	require.NoError(t, err)
	l, err := e.a.LocalList(nixl.DRAM, []nixl.Desc{e.ma.Desc(0, 8)})
	require.NoError(t, err)
	r, err := e.a.RemoteList("B", nixl.DRAM, []nixl.Desc{e.mb.Desc(8000, 8)})
	require.NoError(t, err)
	read, err := e.a.NewRead(l, nil, r, nil, false)
	require.NoError(t, err)
	_, err = read.Post()
	require.ErrorIs(t, err, nixl.ErrPeer)
}
