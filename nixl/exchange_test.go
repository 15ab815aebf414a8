package nixl

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/ports"
)

// newListener returns an agent with NIXL's listener, and where that is, or nil once
// it is sure that a library whose listener is not safe is refused.
func newListener(t testing.TB) (*Agent, netip.AddrPort) {
	t.Helper()
	if libraryBefore(t, "1.5") {
		_, err := NewAgent("", Config{Listen: true, ListenPort: 9999})
		require.ErrorIs(t, err, errors.ErrUnsupported)
		require.ErrorContains(t, err, "needs NIXL 1.5.0")
		return nil, netip.AddrPort{}
	}
	for range 20 { // another test may take the port in between
		port, err := ports.Free()
		require.NoError(t, err)
		at := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(port))
		a, err := NewAgent("", Config{Listen: true, ListenPort: port, ListenDelay: time.Millisecond})
		if err != nil {
			continue
		}
		t.Cleanup(func() { require.NoError(t, a.Close()) })
		_, err = a.CreateBackend("UCX", nil)
		require.NoError(t, err)
		return a, at
	}
	require.FailNow(t, "no port for a listener")
	panic("not reached")
}

// eventually waits until check answers nil, or an error that matches want.
func eventually(t testing.TB, want error, check func() error) {
	t.Helper()
	require.Eventually(t, func() bool {
		err := check()
		if want != nil {
			return err != nil
		}
		return err == nil
	}, patience, 5*time.Millisecond)
	if want != nil {
		require.ErrorIs(t, check(), want)
	}
}

// peer-tests B1, B23, B24: the library itself fetches metadata; what it does not
// cover is refused all the same.
func TestFetchFromAListener(t *testing.T) {
	owner, at := newListener(t)
	reader, readerAt := newListener(t)
	if reader == nil {
		return
	}
	src, dst := registered(t, owner, 1<<16), registered(t, reader, 1<<16)
	fill(src.Bytes(), 9)
	known := func() error { return reader.CheckRemote(owner.Name(), DRAM, nil) }
	require.ErrorIs(t, known(), ErrNotFound)
	require.NoError(t, reader.FetchRemote(owner.Name(), at))
	eventually(t, nil, known)
	require.NoError(t, reader.CheckRemote(owner.Name(), DRAM, blocks(src, 4096)))
	for _, d := range []Desc{{0xdeadbeef, 8, 0}, {src.Addr() + 1<<16 - 8, 16, 0}, {src.Addr() - 8, 16, 0}, {src.Addr(), 8, 1}} {
		require.ErrorIs(t, reader.CheckRemote(owner.Name(), DRAM, []Desc{d}), ErrNotFound)
		_, err := reader.PrepareRemote(owner.Name(), DRAM, []Desc{d})
		require.ErrorIs(t, err, ErrInvalid, d)
		_, err = reader.CreateTransfer(Read, DRAM, []Desc{{dst.Addr(), d.Len, 0}}, owner.Name(), DRAM, []Desc{d}, TransferOptions{})
		require.ErrorIs(t, err, ErrInvalid, d)
	}
	remote, err := reader.PrepareRemote(owner.Name(), DRAM, blocks(src, 4096))
	require.NoError(t, err)
	local, err := reader.PrepareLocal(DRAM, blocks(dst, 4096))
	require.NoError(t, err)
	x, err := reader.NewTransfer(Read, local, nil, remote, nil, TransferOptions{})
	require.NoError(t, err)
	finish(t, x)
	require.Equal(t, src.Bytes(), dst.Bytes())

	// The owner takes itself back: lists and transfers of before are stale.
	require.NoError(t, owner.InvalidateLocal(readerAt))
	eventually(t, ErrNotFound, known)
	_, err = reader.NewTransfer(Read, local, nil, remote, nil, TransferOptions{})
	require.ErrorIs(t, err, ErrStale)
	_, err = x.Post()
	require.ErrorIs(t, err, ErrStale)
	_, err = reader.PrepareRemote(owner.Name(), DRAM, blocks(src, 4096))
	require.ErrorIs(t, err, ErrNotFound)
	require.NoError(t, x.Close())
	require.NoError(t, remote.Close())

	// What was fetched can be loaded by hand instead.
	require.NoError(t, reader.FetchRemote(owner.Name(), at))
	eventually(t, nil, known)
	introduce(t, owner, reader)
	_, err = reader.PrepareRemote(owner.Name(), DRAM, blocks(src, 4096))
	require.NoError(t, err)
}

// peer-tests B38, B25
func TestSendToAListener(t *testing.T) {
	owner, _ := newListener(t)
	reader, at := newListener(t)
	if reader == nil {
		return
	}
	src, extra := registered(t, owner, 4096), mustBuffer(t, 4096)
	require.NoError(t, owner.SendMetadata(at))
	eventually(t, nil, func() error { return reader.CheckRemote(owner.Name(), DRAM, blocks(src, 4096)) })
	require.ErrorIs(t, reader.CheckRemote(owner.Name(), DRAM, blocks(extra, 4096)), ErrNotFound)
	r, err := owner.Register(extra)
	require.NoError(t, err)
	require.NoError(t, owner.SendPartialMetadata(at, r))
	eventually(t, nil, func() error { return reader.CheckRemote(owner.Name(), DRAM, blocks(extra, 4096)) })
	require.NoError(t, reader.InvalidateRemote(owner.Name()))
	require.ErrorIs(t, reader.CheckRemote(owner.Name(), DRAM, nil), ErrNotFound)
}

// peer-tests C7: an address that nobody answers at blocks no call.
func TestSendingToNobodyDoesNotBlock(t *testing.T) {
	a, _ := newListener(t)
	if a == nil {
		return
	}
	start := time.Now()
	require.NoError(t, a.SendMetadata(netip.MustParseAddrPort("127.0.0.1:9")))
	require.NoError(t, a.FetchRemote("nobody", netip.MustParseAddrPort("127.0.0.1:9")))
	require.Less(t, time.Since(start), patience)
	require.ErrorIs(t, a.CheckRemote("nobody", DRAM, nil), ErrNotFound)
}

// Natively the work is queued for a thread that does not exist, and -2 follows
// without a store.
func TestExchangeNeedsAThreadAndAPlace(t *testing.T) {
	a, at := newListener(t)
	if a == nil {
		return
	}
	quiet := newUCX(t, Config{})
	bare, err := NewAgent("", Config{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, bare.Close()) })
	store := netip.AddrPort{}
	for _, c := range []struct {
		agent *Agent
		at    netip.AddrPort
	}{
		{quiet, at},
		{bare, at},
		{a, store},
		{a, netip.MustParseAddrPort("127.0.0.1:0")},
		{a, netip.MustParseAddrPort("0.0.0.0:80")},
	} {
		require.ErrorIs(t, c.agent.SendMetadata(c.at), ErrInvalid, c.at)
		require.ErrorIs(t, c.agent.SendPartialMetadata(c.at), ErrInvalid, c.at)
		require.ErrorIs(t, c.agent.FetchRemote("x", c.at), ErrInvalid, c.at)
		require.ErrorIs(t, c.agent.InvalidateLocal(c.at), ErrInvalid, c.at)
	}
	require.ErrorContains(t, a.SendMetadata(store), "NIXL_ETCD_ENDPOINTS")
	require.ErrorIs(t, a.FetchRemote("", at), ErrInvalid)
	require.ErrorIs(t, a.FetchRemote(a.Name(), at), ErrInvalid)
	require.ErrorIs(t, a.SendPartialMetadata(at, nil), ErrInvalid)
	require.NoError(t, a.Close())
	require.ErrorIs(t, a.SendMetadata(at), ErrClosed)
	require.ErrorIs(t, a.FetchRemote("x", at), ErrClosed)
	require.ErrorIs(t, a.InvalidateLocal(at), ErrClosed)
	_, err = a.PartialMetadata()
	require.ErrorIs(t, err, ErrClosed)
}

// parts are an owner of three ranges and a reader that loads them one by one.
type parts struct {
	owner, reader *Agent
	dst           *Buffer
	regs          []*Registration
	descs         []Desc
	load          func(regs ...*Registration) error
}

func newParts(t *testing.T) parts {
	t.Helper()
	p := parts{owner: newUCX(t, Config{}), reader: newUCX(t, Config{})}
	p.dst = registered(t, p.reader, 4096)
	for range 3 {
		b := mustBuffer(t, 4096)
		r, err := p.owner.Register(b)
		require.NoError(t, err)
		p.regs, p.descs = append(p.regs, r), append(p.descs, blocks(b, 4096)...)
	}
	p.load = func(regs ...*Registration) error {
		blob, err := p.owner.PartialMetadata(regs...)
		require.NoError(t, err)
		_, err = p.reader.LoadRemote(blob)
		return err
	}
	return p
}

// read reads the first range by a list that was prepared before the others came.
func (p parts) read(t *testing.T, list *List) {
	t.Helper()
	local, err := p.reader.PrepareLocal(DRAM, blocks(p.dst, 4096))
	require.NoError(t, err)
	x, err := p.reader.NewTransfer(Read, local, nil, list, nil, TransferOptions{})
	require.NoError(t, err, "what was prepared before is not stale; into %#x, from %v", p.dst.Addr(), p.descs)
	finish(t, x)
	require.NoError(t, x.Close())
}

// peer-tests C5, B25, B37: connection information first, then range by range.
func TestPartialMetadataAdds(t *testing.T) {
	p := newParts(t)
	owner, reader, regs, descs, load := p.owner, p.reader, p.regs, p.descs, p.load
	check := func(d Desc) error {
		err := reader.CheckRemote(owner.Name(), DRAM, []Desc{d})
		list, prepared := reader.PrepareRemote(owner.Name(), DRAM, []Desc{d})
		require.Equal(t, err == nil, prepared == nil, "%v, but %v", err, prepared)
		if prepared == nil {
			require.NoError(t, list.Close())
		}
		return err
	}
	require.ErrorIs(t, load(regs[0]), ErrNotFound, "no connection information yet. peer-tests C6")
	require.NoError(t, load())
	require.NoError(t, reader.CheckRemote(owner.Name(), DRAM, nil))
	require.ErrorIs(t, check(descs[0]), ErrNotFound)
	require.NoError(t, load(regs[0]))
	require.NoError(t, check(descs[0]))
	require.ErrorIs(t, check(descs[1]), ErrNotFound)

	list, err := reader.PrepareRemote(owner.Name(), DRAM, descs[:1])
	require.NoError(t, err)
	require.NoError(t, load(regs[1], regs[2]))
	require.NoError(t, load(regs[1]), "again")
	for _, d := range descs {
		require.NoError(t, check(d))
	}
	p.read(t, list)

	require.NoError(t, reader.InvalidateRemote(owner.Name()))
	require.ErrorIs(t, check(descs[0]), ErrNotFound)
	require.ErrorIs(t, reader.InvalidateRemote(owner.Name()), ErrNotFound, "a second time")
	require.ErrorIs(t, load(regs[0]), ErrNotFound)
}

// The same wherever the memory lies: the library keeps its ranges sorted by address.
func TestPartialMetadataAddsInAnyLayout(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	var holes []*Buffer
	for range 25 {
		for range rng.IntN(20) {
			holes = append(holes, mustBuffer(t, 4096*(1+rng.IntN(4))))
		}
		rng.Shuffle(len(holes), func(i, j int) { holes[i], holes[j] = holes[j], holes[i] })
		for range rng.IntN(len(holes) + 1) {
			require.NoError(t, holes[0].Close())
			holes = holes[1:]
		}
		p := newParts(t)
		require.NoError(t, p.load())
		require.NoError(t, p.load(p.regs[0]))
		list, err := p.reader.PrepareRemote(p.owner.Name(), DRAM, p.descs[:1])
		require.NoError(t, err)
		require.NoError(t, p.load(p.regs[1], p.regs[2]))
		require.NoError(t, p.load(p.regs[1]))
		p.read(t, list)
	}
}

// A range whose key changed makes the library drop the peer but keep the
// connection, and the name never loads again.
func TestPartialMetadataOfMemoryRegisteredAnew(t *testing.T) {
	l := newLink(t, 4096, 4096)
	blob, err := l.owner.PartialMetadata()
	require.NoError(t, err)
	f, err := parseMetadata(blob)
	require.NoError(t, err)
	require.False(t, f.partial)
	old := section{backend: "UCX", list: "nixlSDList", mem: uint32(DRAM), count: 1, descs: []Desc{{l.src.Addr(), 4096, 0}}, key: hostKey[1:] + "\x00\x00"}
	_, err = l.reader.LoadRemote(metadataBlob(l.owner.Name(), 0, 1, old).Bytes())
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "registered anew")
	finish(t, l.read(t, TransferOptions{}))
}

// peer-tests B36, B37, C6
func TestPartialMetadataIsChecked(t *testing.T) {
	a, other := newUCX(t, Config{}), newUCX(t, Config{})
	r, err := a.Register(mustBuffer(t, 4096))
	require.NoError(t, err)
	for _, regs := range [][]*Registration{{nil}, {r, nil}} {
		_, err := a.PartialMetadata(regs...)
		require.ErrorIs(t, err, ErrInvalid)
	}
	_, err = other.PartialMetadata(r)
	require.ErrorIs(t, err, ErrInvalid)
	require.NoError(t, r.Close())
	_, err = a.PartialMetadata(r)
	require.ErrorIs(t, err, ErrClosed)
	blob, err := a.PartialMetadata()
	require.NoError(t, err)
	name, err := MetadataAgentName(blob)
	require.NoError(t, err)
	require.Equal(t, a.Name(), name)
}

// peer-tests B22: what is sent and drained through a named backend is the same.
func TestNotificationsThroughABackend(t *testing.T) {
	l := newLink(t, 4096, 8)
	from, to := l.owner.s.backends[0], l.reader.s.backends[0]
	require.NoError(t, from.Connect(l.reader.Name()))
	want := []Notification{{l.owner.Name(), []byte("\x00through\xff")}}
	for _, c := range []struct {
		send  func(string, []byte) error
		drain func([]Notification) ([]Notification, error)
	}{
		{l.owner.Notify, l.reader.Notifications},
		{l.owner.Notify, to.Notifications},
		{from.Notify, l.reader.Notifications},
		{from.Notify, to.Notifications},
	} {
		require.NoError(t, c.send(l.reader.Name(), want[0].Payload))
		var got []Notification
		require.Eventually(t, func() bool {
			var err error
			got, err = c.drain(got)
			require.NoError(t, err)
			return len(got) > 0
		}, patience, time.Millisecond)
		require.Equal(t, want, got)
	}
	require.ErrorIs(t, from.Notify("nobody", nil), ErrNotFound)
	require.NoError(t, l.owner.Close())
	require.ErrorIs(t, from.Notify(l.reader.Name(), nil), ErrClosed)
	require.ErrorIs(t, from.Connect(l.reader.Name()), ErrClosed)
	_, err := from.Notifications(nil)
	require.ErrorIs(t, err, ErrClosed)
}
