package rdmatest

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
)

// End is one of two fabrics that can reach each other, and memory registered with it: at least 1 MiB, and the same size at
// both ends.
type End struct {
	Fabric rdma.Fabric
	Memory rdma.Memory
}

// Options say where a fabric cannot be like another.
type Options struct {
	// HoldReads keeps READs active until it is called with false. A network that cannot do so leaves it nil; the tests of
	// active READs then use the longest READ that fits and accept that it may have ended before it is asked about.
	HoldReads func(hold bool)
}

// TestFabric tests that a rdma.Fabric keeps the contract that rdma.Worker relies on. open makes two fresh, connected ends
// for each test; the test closes their fabrics, open's own clean-up the rest.
func TestFabric(t *testing.T, open func(t *testing.T) (a, b End), o Options) {
	for _, c := range []struct {
		name string
		run  func(*suite)
	}{
		{"ReadIsByteExact", (*suite).readIsByteExact},
		{"ReadCanBePostedAgain", (*suite).readCanBePostedAgain},
		{"DescriptorsOutsideOfRegisteredMemoryAreRefused", (*suite).descriptorsOutside},
		{"IndicesAndListsThatDoNotFitAreRefused", (*suite).listsThatDoNotFit},
		{"AllocatedMemoryIsZeroedAndReadable", (*suite).allocated},
		{"UnknownPeer", (*suite).unknownPeer},
		{"MetadataUnchangedOrGrownKeepsLists", (*suite).metadata},
		{"DamagedMetadataIsRefused", (*suite).damagedMetadata},
		{"ForgottenPeerMakesListsStale", (*suite).forgotten},
		{"NotificationsAreExactAndInOrder", (*suite).notifications},
		{"NotificationsToSelf", (*suite).selfNotifications},
		{"PollOfMany", (*suite).pollOfMany},
		{"ActiveReadCannotBeClosed", (*suite).activeRead},
		{"UseAfterClose", (*suite).useAfterClose},
		{"ClosedPeer", (*suite).closedPeer},
		{"HandshakesBesideSteps", (*suite).handshakesBeside},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &suite{T: t, o: o}
			s.a, s.b = open(t)
			t.Cleanup(func() {
				s.ok(s.a.Fabric.Close())
				s.ok(s.b.Fabric.Close())
			})
			s.size = len(s.a.Memory.Bytes())
			if s.size < 1<<20 || s.size != len(s.b.Memory.Bytes()) {
				t.Fatalf("the ends have %d and %d bytes of memory, want the same size of at least 1 MiB", s.size, len(s.b.Memory.Bytes()))
			}
			s.nameA, s.nameB = s.load(s.b.Fabric, s.a.Fabric), s.load(s.a.Fabric, s.b.Fabric)
			c.run(s)
		})
	}
}

// suite is one test: a reads from b.
type suite struct {
	*testing.T
	o            Options
	a, b         End
	nameA, nameB string // of the agents
	size         int
}

const patience = 20 * time.Second // for what a real network does in its own time

func (s *suite) ok(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *suite) is(err, want error, format string, args ...any) {
	s.Helper()
	if !errors.Is(err, want) {
		s.Fatalf("%s: got error %v, want one that matches %v", fmt.Sprintf(format, args...), err, want)
	}
}

func (s *suite) until(what string, done func() bool) {
	s.Helper()
	for deadline := time.Now().Add(patience); !done(); time.Sleep(50 * time.Microsecond) {
		if time.Now().After(deadline) {
			s.Fatalf("waited %v for: %s", patience, what)
		}
	}
}

// load makes of known to f.
func (s *suite) load(f, of rdma.Fabric) string {
	s.Helper()
	blob, err := of.Metadata()
	s.ok(err)
	name, err := f.Load(blob)
	s.ok(err)
	return name
}

func desc(m rdma.Memory, offset, length int) nixl.Desc {
	return nixl.Desc{Addr: m.Addr() + uint64(offset), Len: uint64(length)}
}

// descs are n descriptors of length bytes, stride bytes apart.
func descs(m rdma.Memory, n, length, stride int) (out []nixl.Desc) {
	for i := range n {
		out = append(out, desc(m, i*stride, length))
	}
	return out
}

// fill writes a pattern that differs in every word and for every seed.
func fill(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i) ^ byte(i>>8)*31 ^ byte(i>>16)*17 ^ seed
	}
}

func (s *suite) lists(local, remote []nixl.Desc) (l, r rdma.List) {
	s.Helper()
	l, err := s.a.Fabric.LocalList(nixl.DRAM, local)
	s.ok(err)
	r, err = s.a.Fabric.RemoteList(s.nameB, nixl.DRAM, remote)
	s.ok(err)
	s.Cleanup(func() {
		s.ok(l.Close())
		s.ok(r.Close())
	})
	return l, r
}

func (s *suite) read(local, remote []nixl.Desc) rdma.Read {
	s.Helper()
	l, r := s.lists(local, remote)
	t, err := s.a.Fabric.NewRead(l, nil, r, nil, false)
	s.ok(err)
	return t
}

func (s *suite) state(r rdma.Read) nixl.State {
	s.Helper()
	states := make([]nixl.State, 1)
	s.ok(s.a.Fabric.Poll([]rdma.Read{r}, states))
	return states[0]
}

// run posts r, waits for its end and returns its error.
func (s *suite) run(r rdma.Read) error {
	s.Helper()
	state, err := r.Post()
	if err != nil {
		if state == nixl.Active || state == nixl.Done {
			s.Fatalf("Post answered %s with error %v", state, err)
		}
		return err
	}
	s.until("the end of a READ", func() bool {
		state = s.state(r)
		return state != nixl.Active
	})
	if err := r.Err(); (err == nil) != (state == nixl.Done) {
		s.Fatalf("a READ is %s with error %v", state, err)
	}
	return r.Err()
}

// close waits until r may be closed: a failed READ may still write.
func (s *suite) close(r rdma.Read) {
	s.Helper()
	s.until("a READ that can be closed", func() bool { return !errors.Is(r.Close(), nixl.ErrActive) })
	s.ok(r.Close())
}

func (s *suite) readIsByteExact() {
	const n, length = 64, 4096
	all := make([]int32, n)
	for i := range all {
		all[i] = int32(i)
	}
	backwards := slices.Clone(all)
	slices.Reverse(backwards)
	for i, c := range []struct {
		name          string
		local, remote []nixl.Desc
		li, ri        []int32
	}{
		{"one", descs(s.a.Memory, 1, length, length), descs(s.b.Memory, 1, length, length), nil, nil},
		{"one byte", descs(s.a.Memory, 1, 1, 1), []nixl.Desc{desc(s.b.Memory, 4097, 1)}, nil, nil},
		{"one word", []nixl.Desc{desc(s.a.Memory, 16, 8)}, []nixl.Desc{desc(s.b.Memory, 4096, 8)}, nil, nil},
		{"last byte", []nixl.Desc{desc(s.a.Memory, s.size-1, 1)}, []nixl.Desc{desc(s.b.Memory, s.size-1, 1)}, nil, nil},
		{"all memory", []nixl.Desc{desc(s.a.Memory, 0, s.size)}, []nixl.Desc{desc(s.b.Memory, 0, s.size)}, nil, nil},
		{"many, contiguous", descs(s.a.Memory, n, length, length), descs(s.b.Memory, n, length, length), nil, nil},
		{"many, apart", descs(s.a.Memory, n, length, 2*length), descs(s.b.Memory, n, length, 3*length), nil, nil},
		{"many, unaligned", descs(s.a.Memory, n, 1001, 1003), descs(s.b.Memory, n, 1001, 1007), nil, nil},
		{"many, contiguous here only", descs(s.a.Memory, n, length, length), descs(s.b.Memory, n, length, 2*length), nil, nil},
		{"indices of all", descs(s.a.Memory, n, length, length), descs(s.b.Memory, n, length, length), all, all},
		{"indices backwards", descs(s.a.Memory, n, length, length), descs(s.b.Memory, n, length, length), all, backwards},
		{"both backwards", descs(s.a.Memory, n, length, length), descs(s.b.Memory, n, length, length), backwards, backwards},
		{"some", descs(s.a.Memory, n, length, length), descs(s.b.Memory, n, length, length), []int32{3, 4, 5, 60}, []int32{10, 11, 12, 63}},
		{"one descriptor twice", descs(s.a.Memory, n, length, length), descs(s.b.Memory, n, length, length), []int32{1, 2}, []int32{7, 7}},
		{"lengths differ", []nixl.Desc{desc(s.a.Memory, 0, 8), desc(s.a.Memory, 100, 3), desc(s.a.Memory, 4096, 9000)},
			[]nixl.Desc{desc(s.b.Memory, 50, 8), desc(s.b.Memory, 0, 3), desc(s.b.Memory, 70, 9000)}, nil, nil},
		{"slots", descs(s.a.Memory, n, 8, 8), descs(s.b.Memory, n, 8, 8), all, backwards},
	} {
		for _, separate := range []bool{false, true} {
			fill(s.b.Memory.Bytes(), byte(i+1))
			fill(s.a.Memory.Bytes(), 0x5a)
			want, owner := bytes.Clone(s.a.Memory.Bytes()), bytes.Clone(s.b.Memory.Bytes())
			l, r := s.lists(c.local, c.remote)
			read, err := s.a.Fabric.NewRead(l, c.li, r, c.ri, separate)
			s.ok(err)
			total := uint64(0)
			for k := range max(len(c.li), len(c.local)) {
				li, ri := k, k
				if c.li != nil {
					if k >= len(c.li) {
						break
					}
					li, ri = int(c.li[k]), int(c.ri[k])
				}
				from, to := c.remote[ri].Addr-s.b.Memory.Addr(), c.local[li].Addr-s.a.Memory.Addr()
				total += uint64(copy(want[to:], owner[from:from+c.remote[ri].Len]))
			}
			if read.Bytes() != total {
				s.Fatalf("%s: the READ says %d bytes, want %d", c.name, read.Bytes(), total)
			}
			s.ok(s.run(read))
			s.ok(read.Close())
			if at := difference(s.a.Memory.Bytes(), want); at >= 0 {
				s.Fatalf("%s, separate %v: byte %d at the reader is wrong", c.name, separate, at)
			}
			if at := difference(s.b.Memory.Bytes(), owner); at >= 0 {
				s.Fatalf("%s, separate %v: byte %d at the owner changed", c.name, separate, at)
			}
		}
	}
}

// difference is the first byte at which a and b differ, -1 for none.
func difference(a, b []byte) int {
	if bytes.Equal(a, b) {
		return -1
	}
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return len(a)
}

func (s *suite) readCanBePostedAgain() {
	read := s.read(descs(s.a.Memory, 4, 4096, 4096), descs(s.b.Memory, 4, 4096, 4096))
	if got := s.state(read); got != nixl.Idle {
		s.Fatalf("a READ that was not posted is %s", got)
	}
	for i := range 5 {
		fill(s.b.Memory.Bytes(), byte(i+1))
		s.ok(s.run(read))
		if at := difference(s.a.Memory.Bytes()[:4*4096], s.b.Memory.Bytes()[:4*4096]); at >= 0 {
			s.Fatalf("post %d: byte %d is wrong", i, at)
		}
	}
	s.ok(read.Close())
	s.ok(read.Close())
	_, err := read.Post()
	s.is(err, net.ErrClosed, "post of a closed READ")
}

func (s *suite) descriptorsOutside() {
	local := func(mem nixl.MemType, d []nixl.Desc) (rdma.List, error) { return s.a.Fabric.LocalList(mem, d) }
	remote := func(mem nixl.MemType, d []nixl.Desc) (rdma.List, error) {
		return s.a.Fabric.RemoteList(s.nameB, mem, d)
	}
	for _, side := range []struct {
		name string
		of   rdma.Memory
		list func(nixl.MemType, []nixl.Desc) (rdma.List, error)
	}{{"local", s.a.Memory, local}, {"remote", s.b.Memory, remote}} {
		good := desc(side.of, 0, 4096)
		base, size := side.of.Addr(), uint64(s.size)
		for name, d := range map[string][]nixl.Desc{
			"none":                  nil,
			"no length":             {{Addr: base}},
			"one byte too long":     {{Addr: base, Len: size + 1}},
			"one byte behind":       {{Addr: base + size - 4095, Len: 4096}},
			"right behind":          {{Addr: base + size, Len: 1}},
			"one byte before":       {{Addr: base - 1, Len: 4096}},
			"address 0":             {{Addr: 0, Len: 8}},
			"another device":        {{Addr: base, Len: 8, Dev: 7}},
			"to the end of all":     {{Addr: base, Len: math.MaxUint64 - base}},
			"wraps around":          {{Addr: base + 4096, Len: math.MaxUint64 - base}},
			"wraps to the start":    {{Addr: math.MaxUint64 - 4095, Len: 8192}},
			"all of the space":      {{Addr: 0, Len: math.MaxUint64}},
			"the last of three bad": {good, good, {Addr: base + size - 1, Len: 2}},
		} {
			_, err := side.list(nixl.DRAM, d)
			s.is(err, nixl.ErrInvalid, "%s list, %s", side.name, name)
		}
		for _, mem := range []nixl.MemType{nixl.VRAM, -1, 99} {
			_, err := side.list(mem, []nixl.Desc{good})
			s.is(err, nixl.ErrInvalid, "%s list of memory type %d", side.name, mem)
		}
		l, err := side.list(nixl.DRAM, []nixl.Desc{good, {Addr: base + size - 1, Len: 1}})
		s.ok(err)
		s.ok(l.Close())
		s.ok(l.Close())
	}
}

// foreign is a list and a READ of no fabric.
type foreign struct{}

func (foreign) Post() (nixl.State, error) { return nixl.Idle, nil }
func (foreign) Err() error                { return nil }
func (foreign) Bytes() uint64             { return 0 }
func (foreign) Close() error              { return nil }

func (s *suite) listsThatDoNotFit() {
	l, r := s.lists(descs(s.a.Memory, 4, 4096, 4096), descs(s.b.Memory, 4, 4096, 4096))
	short, _ := s.lists(descs(s.a.Memory, 2, 100, 100), descs(s.b.Memory, 1, 1, 1))
	theirs, err := s.b.Fabric.LocalList(nixl.DRAM, descs(s.b.Memory, 4, 4096, 4096))
	s.ok(err)
	defer theirs.Close()
	shut, err := s.a.Fabric.LocalList(nixl.DRAM, descs(s.a.Memory, 4, 4096, 4096))
	s.ok(err)
	s.ok(shut.Close())
	for _, c := range []struct {
		name          string
		local, remote rdma.List
		li, ri        []int32
		want          error
	}{
		{"fewer here", l, r, []int32{0}, []int32{0, 1}, nixl.ErrInvalid},
		{"fewer there", l, r, []int32{0, 1}, []int32{0}, nixl.ErrInvalid},
		{"no indices", l, r, []int32{}, []int32{}, nixl.ErrInvalid},
		{"below the list", l, r, []int32{-1}, []int32{0}, nixl.ErrInvalid},
		{"behind the list", l, r, []int32{0}, []int32{4}, nixl.ErrInvalid},
		{"far behind", l, r, []int32{math.MaxInt32}, []int32{math.MinInt32}, nixl.ErrInvalid},
		{"other lengths", short, r, []int32{0, 1}, []int32{0, 1}, nixl.ErrInvalid},
		{"all of lists that differ", short, r, nil, nil, nixl.ErrInvalid},
		{"swapped", r, l, nil, nil, nixl.ErrInvalid},
		{"both local", l, l, nil, nil, nixl.ErrInvalid},
		{"a list of the peer's", theirs, r, nil, nil, nixl.ErrInvalid},
		{"no list", nil, r, nil, nil, nixl.ErrInvalid},
		{"a list of nobody", l, foreign{}, nil, nil, nixl.ErrInvalid},
		{"a closed list", shut, r, nil, nil, net.ErrClosed},
	} {
		_, err := s.a.Fabric.NewRead(c.local, c.li, c.remote, c.ri, false)
		s.is(err, c.want, "%s", c.name)
	}
	// The lists serve sound READs all the same, also after they are closed.
	read, err := s.a.Fabric.NewRead(l, []int32{3}, r, []int32{0}, false)
	s.ok(err)
	fill(s.b.Memory.Bytes(), 9)
	s.ok(l.Close())
	s.ok(r.Close())
	s.ok(s.run(read))
	s.ok(read.Close())
	if !bytes.Equal(s.a.Memory.Bytes()[3*4096:4*4096], s.b.Memory.Bytes()[:4096]) {
		s.Fatal("the READ of closed lists is wrong")
	}
}

func (s *suite) allocated() {
	for _, size := range []int{8, 4096, 100_000} {
		m, err := s.b.Fabric.Alloc(size)
		s.ok(err)
		b := m.Bytes()
		if len(b) != size || m.Addr()%8 != 0 || difference(b, make([]byte, size)) >= 0 {
			s.Fatalf("%d bytes at %#x for %d, or not zeroed", len(b), m.Addr(), size)
		}
		s.load(s.a.Fabric, s.b.Fabric) // it has to be told of the new memory
		fill(b, byte(size))
		s.ok(s.run(s.read([]nixl.Desc{desc(s.a.Memory, 0, size)}, []nixl.Desc{desc(m, 0, size)})))
		if at := difference(s.a.Memory.Bytes()[:size], b); at >= 0 {
			s.Fatalf("byte %d of %d is wrong", at, size)
		}
		own, err := s.a.Fabric.Alloc(size)
		s.ok(err)
		s.ok(s.run(s.read([]nixl.Desc{desc(own, 0, size)}, []nixl.Desc{desc(m, 0, size)})))
		if at := difference(own.Bytes(), b); at >= 0 {
			s.Fatalf("byte %d of %d is wrong in memory allocated by the reader", at, size)
		}
	}
	for _, size := range []int{0, -1} {
		_, err := s.a.Fabric.Alloc(size)
		s.is(err, nixl.ErrInvalid, "%d bytes", size)
	}
}

func (s *suite) unknownPeer() {
	for _, name := range []string{"nobody", s.nameB + "x"} {
		_, err := s.a.Fabric.RemoteList(name, nixl.DRAM, descs(s.b.Memory, 1, 8, 8))
		s.is(err, nixl.ErrNotFound, "list of %q", name)
		s.is(s.a.Fabric.Notify(name, []byte("x")), nixl.ErrNotFound, "notify %q", name)
		s.ok(s.a.Fabric.Forget(name))
	}
}

func (s *suite) metadata() {
	one, err := s.b.Fabric.Metadata()
	s.ok(err)
	two, err := s.b.Fabric.Metadata()
	s.ok(err)
	if !bytes.Equal(one, two) {
		s.Fatal("metadata differs although nothing changed")
	}
	read := s.read(descs(s.a.Memory, 4, 4096, 4096), descs(s.b.Memory, 4, 4096, 4096))
	for range 10 {
		if name := s.load(s.a.Fabric, s.b.Fabric); name != s.nameB {
			s.Fatalf("loaded again, the peer is %q and not %q", name, s.nameB)
		}
	}
	fill(s.b.Memory.Bytes(), 1)
	s.ok(s.run(read))
	more, err := s.b.Fabric.Alloc(4096)
	s.ok(err)
	_, err = s.a.Fabric.RemoteList(s.nameB, nixl.DRAM, descs(more, 1, 8, 8))
	s.is(err, nixl.ErrInvalid, "memory that the metadata does not tell of")
	s.load(s.a.Fabric, s.b.Fabric)
	l, err := s.a.Fabric.RemoteList(s.nameB, nixl.DRAM, descs(more, 1, 8, 8))
	s.ok(err)
	s.ok(l.Close())
	fill(s.b.Memory.Bytes(), 2)
	s.ok(s.run(read)) // made before the reload
	s.ok(read.Close())
	if !bytes.Equal(s.a.Memory.Bytes()[:4*4096], s.b.Memory.Bytes()[:4*4096]) {
		s.Fatal("the READ after a reload is wrong")
	}
}

func (s *suite) damagedMetadata() {
	good, err := s.b.Fabric.Metadata()
	s.ok(err)
	own, err := s.a.Fabric.Metadata()
	s.ok(err)
	for name, blob := range map[string][]byte{
		"nothing": nil, "text": []byte("invalid"), "zeroes": make([]byte, 500), "half": good[:len(good)/2],
		"one byte short": good[:len(good)-1], "more behind": append(bytes.Clone(good), "{}"...), "our own": own,
	} {
		if _, err := s.a.Fabric.Load(blob); err == nil {
			s.Fatalf("metadata was accepted: %s", name)
		}
	}
	s.ok(s.run(s.read(descs(s.a.Memory, 1, 8, 8), descs(s.b.Memory, 1, 8, 8)))) // nothing changed
}

func (s *suite) forgotten() {
	l, r := s.lists(descs(s.a.Memory, 1, 4096, 4096), descs(s.b.Memory, 1, 4096, 4096))
	read, err := s.a.Fabric.NewRead(l, nil, r, nil, false)
	s.ok(err)
	s.ok(s.a.Fabric.Forget(s.nameB))
	s.ok(s.a.Fabric.Forget(s.nameB))
	_, err = read.Post()
	s.is(err, nixl.ErrStale, "post")
	_, err = s.a.Fabric.NewRead(l, nil, r, nil, false)
	s.is(err, nixl.ErrStale, "make a READ")
	s.is(s.a.Fabric.Notify(s.nameB, nil), nixl.ErrNotFound, "notify")
	_, err = s.a.Fabric.RemoteList(s.nameB, nixl.DRAM, descs(s.b.Memory, 1, 8, 8))
	s.is(err, nixl.ErrNotFound, "list")
	s.load(s.a.Fabric, s.b.Fabric)
	_, err = s.a.Fabric.NewRead(l, nil, r, nil, false)
	s.is(err, nixl.ErrStale, "make a READ of the old list after a new load")
	s.ok(read.Close())
	fill(s.b.Memory.Bytes(), 3)
	s.ok(s.run(s.read(descs(s.a.Memory, 1, 4096, 4096), descs(s.b.Memory, 1, 4096, 4096))))
}

// arrived collects n notifications of f.
func (s *suite) arrived(f rdma.Fabric, n int) (got []nixl.Notification) {
	s.Helper()
	s.until(fmt.Sprintf("%d notifications", n), func() bool {
		var err error
		got, err = f.Notifications(got)
		s.ok(err)
		return len(got) >= n
	})
	return got
}

func payloads() [][]byte {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	out := [][]byte{{}, {0}, {0xff}, []byte("HB:a,b"), []byte("id:1:77"), bytes.Repeat([]byte{0}, 1000), bytes.Repeat([]byte{0xff}, 1000), every}
	for _, n := range []int{64 << 10, 1 << 20} {
		big := make([]byte, n)
		fill(big, byte(n>>12))
		out = append(out, big)
	}
	return append(out, []byte{}, []byte("end"))
}

func (s *suite) notifications() {
	keep := []nixl.Notification{{From: "kept"}}
	got, err := s.b.Fabric.Notifications(keep)
	s.ok(err)
	if len(got) != 1 || got[0].From != "kept" {
		s.Fatalf("no notification was sent, and %v came", got)
	}
	msgs := payloads()
	buf := make([]byte, 2<<20)
	for _, m := range msgs {
		n := copy(buf, m)
		s.ok(s.a.Fabric.Notify(s.nameB, buf[:n]))
		clear(buf[:n]) // the caller's again
	}
	s.same(s.arrived(s.b.Fabric, len(msgs)), s.nameA, msgs)
	const many = 2000
	msgs = nil
	for i := range many {
		msgs = append(msgs, fmt.Appendf(nil, "%d", i))
		s.ok(s.a.Fabric.Notify(s.nameB, msgs[i]))
	}
	s.same(s.arrived(s.b.Fabric, many), s.nameA, msgs)
	s.ok(s.b.Fabric.Notify(s.nameA, []byte("back")))
	s.same(s.arrived(s.a.Fabric, 1), s.nameB, [][]byte{[]byte("back")})
}

func (s *suite) same(got []nixl.Notification, from string, want [][]byte) {
	s.Helper()
	if len(got) != len(want) {
		s.Fatalf("%d notifications, want %d", len(got), len(want))
	}
	for i, n := range got {
		if n.From != from {
			s.Fatalf("notification %d is from %q, want %q", i, n.From, from)
		}
		if !bytes.Equal(n.Payload, want[i]) {
			s.Fatalf("notification %d of %d bytes is not the one of %d bytes that was sent", i, len(n.Payload), len(want[i]))
		}
	}
}

func (s *suite) selfNotifications() {
	msgs := payloads()
	for _, m := range msgs {
		s.ok(s.a.Fabric.Notify(s.nameA, m))
	}
	s.same(s.arrived(s.a.Fabric, len(msgs)), s.nameA, msgs)
}

func (s *suite) pollOfMany() {
	const n = 200
	fill(s.b.Memory.Bytes(), 4)
	clear(s.a.Memory.Bytes())
	reads, states := make([]rdma.Read, n), make([]nixl.State, n)
	for i := range reads {
		reads[i] = s.read([]nixl.Desc{desc(s.a.Memory, i*4096, 4096)}, []nixl.Desc{desc(s.b.Memory, (n-1-i)*4096, 4096)})
	}
	for i := 0; i < n; i += 2 {
		_, err := reads[i].Post()
		s.ok(err)
	}
	s.until("half of the READs", func() bool {
		s.ok(s.a.Fabric.Poll(reads, states))
		return !slices.Contains(states, nixl.Active)
	})
	for i := range reads {
		want, data := nixl.Idle, make([]byte, 4096)
		if i%2 == 0 {
			want = nixl.Done
			copy(data, s.b.Memory.Bytes()[(n-1-i)*4096:])
		}
		if states[i] != want || !bytes.Equal(s.a.Memory.Bytes()[i*4096:(i+1)*4096], data) {
			s.Fatalf("READ %d is %s, want %s, or its bytes are wrong", i, states[i], want)
		}
		s.ok(reads[i].Close())
	}
	s.ok(s.a.Fabric.Poll(nil, nil))
	s.is(s.a.Fabric.Poll(reads, states[1:]), nixl.ErrInvalid, "room for one state less")
	s.is(s.a.Fabric.Poll([]rdma.Read{foreign{}}, states[:1]), nixl.ErrInvalid, "a READ of nobody")
}

func (s *suite) activeRead() {
	if s.o.HoldReads != nil {
		s.o.HoldReads(true)
		defer s.o.HoldReads(false)
	}
	fill(s.b.Memory.Bytes(), 5)
	clear(s.a.Memory.Bytes())
	read := s.read([]nixl.Desc{desc(s.a.Memory, 0, s.size)}, []nixl.Desc{desc(s.b.Memory, 0, s.size)})
	state, err := read.Post()
	s.ok(err)
	closed := read.Close()
	if closed == nil { // only a READ that ended can be closed
		if s.o.HoldReads != nil || difference(s.a.Memory.Bytes(), s.b.Memory.Bytes()) >= 0 {
			s.Fatalf("a READ that was %s could be closed before its bytes were there", state)
		}
		return
	}
	s.is(closed, nixl.ErrActive, "close")
	if _, err = read.Post(); err != nil { // nil: it ended in between, and is under way again
		s.is(err, nixl.ErrActive, "post again")
	}
	if err := s.a.Fabric.Forget(s.nameB); err != nil || s.o.HoldReads != nil {
		s.is(err, nixl.ErrActive, "forget the owner")
	}
	if s.o.HoldReads != nil {
		if got := s.state(read); got != nixl.Active {
			s.Fatalf("a held READ is %s", got)
		}
		s.is(read.Close(), nixl.ErrActive, "close")
		s.o.HoldReads(false)
	}
	s.until("the end", func() bool { return s.state(read) == nixl.Done })
	if at := difference(s.a.Memory.Bytes(), s.b.Memory.Bytes()); at >= 0 {
		s.Fatalf("byte %d is wrong", at)
	}
	s.ok(read.Close())
}

func (s *suite) useAfterClose() {
	f := s.a.Fabric
	l, r := s.lists(descs(s.a.Memory, 1, 8, 8), descs(s.b.Memory, 1, 8, 8))
	read, err := f.NewRead(l, nil, r, nil, false)
	s.ok(err)
	blob, err := s.b.Fabric.Metadata()
	s.ok(err)
	s.ok(f.Close())
	s.ok(f.Close())
	_, err = f.Alloc(8)
	s.is(err, net.ErrClosed, "Alloc")
	_, err = f.Metadata()
	s.is(err, net.ErrClosed, "Metadata")
	_, err = f.Load(blob)
	s.is(err, net.ErrClosed, "Load")
	s.is(f.Forget(s.nameB), net.ErrClosed, "Forget")
	_, err = f.LocalList(nixl.DRAM, descs(s.a.Memory, 1, 8, 8))
	s.is(err, net.ErrClosed, "LocalList")
	_, err = f.RemoteList(s.nameB, nixl.DRAM, descs(s.b.Memory, 1, 8, 8))
	s.is(err, net.ErrClosed, "RemoteList")
	_, err = f.NewRead(l, nil, r, nil, false)
	s.is(err, net.ErrClosed, "NewRead")
	s.is(f.Poll([]rdma.Read{read}, make([]nixl.State, 1)), net.ErrClosed, "Poll")
	s.is(f.Notify(s.nameB, nil), net.ErrClosed, "Notify")
	got, err := f.Notifications([]nixl.Notification{{From: "kept"}})
	s.is(err, net.ErrClosed, "Notifications")
	if len(got) != 1 {
		s.Fatalf("Notifications of a closed fabric returned %v", got)
	}
	_, err = read.Post()
	s.is(err, net.ErrClosed, "Post")
	s.ok(read.Close())
	s.ok(l.Close())
	s.ok(r.Close())
}

func (s *suite) closedPeer() {
	read := s.read(descs(s.a.Memory, 4, 4096, 4096), descs(s.b.Memory, 4, 4096, 4096))
	s.ok(s.run(read)) // connected
	s.ok(s.a.Fabric.Notify(s.nameB, []byte("x")))
	s.ok(s.b.Fabric.Close())
	s.until("the READ to fail", func() bool {
		err := s.run(read)
		if err != nil {
			s.is(err, nixl.ErrPeer, "READ from a closed peer")
		}
		return err != nil
	})
	if got := s.state(read); got != nixl.Failed {
		s.Fatalf("the READ is %s", got)
	}
	_, err := read.Post()
	s.is(err, nixl.ErrState, "post of a failed READ")
	s.close(read)
	s.until("the notification to fail", func() bool {
		err := s.a.Fabric.Notify(s.nameB, []byte("x"))
		if err != nil {
			s.is(err, nixl.ErrPeer, "notify a closed peer")
		}
		return err != nil
	})
	s.ok(s.a.Fabric.Forget(s.nameB))
	_, err = s.a.Fabric.Notifications(nil)
	s.ok(err)
}

// handshakesBeside is for the race detector.
func (s *suite) handshakesBeside() {
	blob, err := s.b.Fabric.Metadata()
	s.ok(err)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 50 {
				name, err := s.a.Fabric.Load(blob)
				if err == nil {
					var l rdma.List
					if l, err = s.a.Fabric.RemoteList(name, nixl.DRAM, descs(s.b.Memory, 16, 4096, 4096)); err == nil {
						err = l.Close()
					}
				}
				if err != nil {
					s.Error(err)
					return
				}
			}
		})
	}
	read := s.read(descs(s.a.Memory, 4, 4096, 4096), descs(s.b.Memory, 4, 4096, 4096))
	for range 100 {
		s.ok(s.run(read))
		s.ok(s.a.Fabric.Notify(s.nameB, []byte("x")))
	}
	s.arrived(s.b.Fabric, 100)
	s.ok(read.Close())
	wg.Wait()
}
