package nixl

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// vllmBlob is the NIXL metadata that a real vLLM 0.32.0 prefill instance sent
// in its handshake (UCX over TCP, one registration of 2 MiB).
func vllmBlob(t testing.TB) []byte {
	text, err := os.ReadFile("testdata/vllm-0.32.0.hex")
	require.NoError(t, err)
	blob, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	require.NoError(t, err)
	return blob
}

func TestMetadataOfVLLM(t *testing.T) {
	f, err := parseMetadata(vllmBlob(t))
	require.NoError(t, err)
	require.Equal(t, "dc802c90-0929-4635-aceb-b36d7de0973c", f.name)
	require.Equal(t, remoteRanges{{DRAM, Desc{Addr: 0x5557a86b33c0, Len: 0x200000}, "UCX\x00" + strings.Repeat("\x00", 9)}}, f.ranges)
	name, err := MetadataAgentName(vllmBlob(t))
	require.NoError(t, err)
	require.Equal(t, f.name, name)
}

func TestMetadataOfThisLibrary(t *testing.T) {
	a := newUCX(t, Config{})
	empty, err := a.LocalMetadata()
	require.NoError(t, err)
	f, err := parseMetadata(empty)
	require.NoError(t, err)
	require.Empty(t, f.ranges)
	_, err = a.CreateBackend("POSIX", nil)
	require.NoError(t, err)
	var want []Desc
	for range 5 {
		b := registered(t, a, 4096)
		want = append(want, Desc{Addr: b.Addr(), Len: 4096})
	}
	blob, err := a.LocalMetadata()
	require.NoError(t, err)
	f, err = parseMetadata(blob)
	require.NoError(t, err)
	require.Equal(t, a.Name(), f.name)
	var got []Desc
	for _, r := range f.ranges {
		require.Equal(t, DRAM, r.mem)
		got = append(got, r.Desc)
	}
	require.ElementsMatch(t, want, got)
}

// blobWriter builds metadata that is wrong in one place.
type blobWriter struct{ bytes.Buffer }

func (w *blobWriter) field(tag string, value []byte) *blobWriter {
	w.WriteString(tag)
	w.Write(binary.NativeEndian.AppendUint64(nil, uint64(len(value))))
	w.Write(value)
	w.WriteByte('|')
	return w
}

func (w *blobWriter) number(tag string, v uint64) *blobWriter {
	return w.field(tag, binary.NativeEndian.AppendUint64(nil, v))
}

type section struct {
	backend, list string
	mem           uint32
	count         uint64
	descs         []Desc
	key           string
}

// hostKey is a packed UCX key of no memory domain and the memory type 0, as TCP has it.
var hostKey = strings.Repeat("\x00", 9)

func metadataBlob(name string, conns uint64, count uint64, sections ...section) *blobWriter {
	w := new(blobWriter)
	w.WriteString(metadataIntro)
	w.field("Agent", []byte(name)).number("Conns", conns)
	if conns > 0 {
		w.field("t", []byte("UCX")).field("c", []byte("address"))
	}
	w.field("", []byte("MemSection")).number("nixlSecElms", count)
	for _, s := range sections {
		w.field("bknd", []byte(s.backend)).field("nixlDList", []byte(s.list))
		w.field("t", binary.NativeEndian.AppendUint32(nil, s.mem)).number("n", s.count)
		for _, d := range s.descs {
			v := binary.NativeEndian.AppendUint64(nil, d.Addr)
			v = binary.NativeEndian.AppendUint64(v, d.Len)
			v = binary.NativeEndian.AppendUint64(v, d.Dev)
			w.field("", append(v, s.key...))
		}
	}
	return w
}

func TestMetadataFrames(t *testing.T) {
	one := []Desc{{Addr: 4096, Len: 8}}
	good := section{"UCX", "nixlSDList", 0, 1, one, hostKey}
	address := func(backend, address string) []byte {
		w := new(blobWriter)
		w.WriteString(metadataIntro)
		w.field("Agent", []byte("a")).number("Conns", 1).field("t", []byte(backend)).field("c", []byte(address))
		return w.field("", []byte("MemSection")).number("nixlSecElms", 0).Bytes()
	}
	for name, blob := range map[string][]byte{
		"several sections":  metadataBlob("a", 1, 3, good, section{"UCX", "nixlSDList", 1, 1, one, hostKey}, section{"GDS", "nixlSDList", 4, 1, one, ""}).Bytes(),
		"no sections":       metadataBlob("a", 1, 0).Bytes(),
		"no connections":    metadataBlob("a", 0, 0).Bytes(),
		"address version 2": address("UCX", "\x21\x00"),
		"another's address": address("OTHER", "\x22"),
		"key of type 12":    metadataBlob("a", 1, 1, section{"UCX", "nixlSDList", 1, 1, one, hostKey[:8] + "\x0c"}).Bytes(),
		"another's key":     metadataBlob("a", 1, 1, section{"GDS", "nixlSDList", 1, 1, one, "k"}).Bytes(),
		"unknown fields":    metadataBlob("a", 1, 1, good).field("User", nil).field("k", []byte("key")).field("v", []byte("x")).Bytes(),
	} {
		_, err := parseMetadata(blob)
		require.NoError(t, err, name)
	}
	for name, blob := range map[string][]byte{
		"nothing":                 nil,
		"intro only":              []byte(metadataIntro),
		"no intro":                vllmBlob(t)[1:],
		"empty name":              metadataBlob("", 1, 1, good).Bytes(),
		"name with NUL":           metadataBlob("a\x00b", 1, 1, good).Bytes(),
		"name too long":           metadataBlob(strings.Repeat("n", MaxName+1), 1, 1, good).Bytes(),
		"too many connections":    metadataBlob("a", 2, 1, good).Bytes(),
		"2^64-1 connections":      metadataBlob("a", math.MaxUint64, 1, good).Bytes(),
		"2^63 sections":           metadataBlob("a", 1, 1<<63, good).Bytes(),
		"too few sections":        metadataBlob("a", 1, 2, good).Bytes(),
		"memory type 5":           metadataBlob("a", 1, 1, section{"UCX", "nixlSDList", 5, 1, one, hostKey}).Bytes(),
		"memory type -1":          metadataBlob("a", 1, 1, section{"UCX", "nixlSDList", math.MaxUint32, 1, one, hostKey}).Bytes(),
		"another list":            metadataBlob("a", 1, 1, section{"UCX", "nixlBDList", 0, 1, one, hostKey}).Bytes(),
		"no backend name":         metadataBlob("a", 1, 1, section{"", "nixlSDList", 0, 1, one, hostKey}).Bytes(),
		"too many descriptors":    metadataBlob("a", 1, 1, section{"UCX", "nixlSDList", 0, 2, one, hostKey}).Bytes(),
		"2^64-1 descriptors":      metadataBlob("a", 1, 1, section{"UCX", "nixlSDList", 0, math.MaxUint64, one, hostKey}).Bytes(),
		"descriptor wraps around": metadataBlob("a", 1, 1, section{"UCX", "nixlSDList", 0, 1, []Desc{{Addr: math.MaxUint64, Len: 2}}, hostKey}).Bytes(),
		"address version 3":       address("UCX", "\x22\x00"),
		"key of type 13":          metadataBlob("a", 1, 1, section{"UCX", "nixlSDList", 1, 1, one, hostKey[:8] + "\x0d"}).Bytes(),
		"cut key":                 metadataBlob("a", 1, 1, section{"UCX", "nixlSDList", 0, 1, one, hostKey[:8]}).Bytes(),
		"bytes behind":            append(metadataBlob("a", 1, 1, good).Bytes(), "rest"...),
		"a cut field behind":      metadataBlob("a", 1, 1, good).field("User", []byte("x")).Bytes()[:200],
	} {
		_, err := parseMetadata(blob)
		require.ErrorIs(t, err, ErrInvalid, name)
	}
}

// A blob cut inside its memory section poisons the name natively: later good
// metadata is -1 for ever.
func TestCutMetadataIsRefusedAtEveryLength(t *testing.T) {
	blob := vllmBlob(t)
	for n := range blob {
		_, err := parseMetadata(blob[:n])
		require.ErrorIs(t, err, ErrInvalid, n)
	}
}

// A changed memory type makes the library crash (11 of 1,910 mutations).
// Everything outside of names, connection information and keys is checked.
// cases.md 21
func TestFlippedBytesOfTheFrameAreRefused(t *testing.T) {
	blob := vllmBlob(t)
	free := map[int]bool{} // bytes whose value only the peer can know
	for _, value := range []string{"dc802c90-0929-4635-aceb-b36d7de0973c", "UCX"} {
		for i := range blob {
			if bytes.HasPrefix(blob[i:], []byte(value)) {
				for k := range value {
					free[i+k] = true
				}
			}
		}
	}
	conn := bytes.Index(blob, []byte{'|', 'c', 106}) + 2 + 8
	for k := range 106 {
		free[conn+k] = true
	}
	for k := range 33 { // address, length, device, key
		free[len(blob)-2-k] = true
	}
	refused := 0
	for i := range blob {
		if free[i] {
			continue
		}
		for _, flip := range []byte{1, 0x80, 0xff} {
			changed := bytes.Clone(blob)
			changed[i] ^= flip
			f, err := parseMetadata(changed)
			if err == nil && f.ranges[0].mem == VRAM { // DRAM's zero became a one
				continue
			}
			require.ErrorIs(t, err, ErrInvalid, "byte %d", i)
			refused++
		}
	}
	require.Greater(t, refused, 3*150)
}

func TestRemoteRangesContain(t *testing.T) {
	rs := remoteRanges{
		{mem: DRAM, Desc: Desc{Addr: 100, Len: 1000}},
		{mem: DRAM, Desc: Desc{Addr: 200, Len: 10}}, // inside of the other: a second backend's
		{mem: DRAM, Desc: Desc{Addr: 2000, Len: 100}},
		{mem: DRAM, Desc: Desc{Addr: 100, Len: 10, Dev: 1}},
		{mem: VRAM, Desc: Desc{Addr: 5000, Len: 10}},
	}
	for _, c := range []struct {
		mem  MemType
		d    Desc
		want bool
	}{
		{DRAM, Desc{Addr: 100, Len: 1000}, true},
		{DRAM, Desc{Addr: 100, Len: 1001}, false},
		{DRAM, Desc{Addr: 99, Len: 1}, false},
		{DRAM, Desc{Addr: 205, Len: 500}, true},
		{DRAM, Desc{Addr: 1099, Len: 1}, true},
		{DRAM, Desc{Addr: 1100, Len: 1}, false},
		{DRAM, Desc{Addr: 2000, Len: 100}, true},
		{DRAM, Desc{Addr: 2099, Len: 2}, false},
		{DRAM, Desc{Addr: 109, Len: 1, Dev: 1}, true},
		{DRAM, Desc{Addr: 110, Len: 1, Dev: 1}, false},
		{VRAM, Desc{Addr: 100, Len: 1}, false},
		{VRAM, Desc{Addr: 5009, Len: 1}, true},
		{File, Desc{Addr: 5009, Len: 1}, false},
		{DRAM, Desc{Addr: 100, Len: math.MaxUint64 - 50}, false},
	} {
		require.Equal(t, c.want, rs.containing(c.mem, c.d) != nil, "%v %v", c.mem, c.d)
	}
}

// FuzzParseMetadata: no input crashes it, and what it accepts is sound.
func FuzzParseMetadata(f *testing.F) {
	f.Add(vllmBlob(f))
	f.Add(metadataBlob("a", 1, 1, section{"UCX", "nixlSDList", 0, 1, []Desc{{Addr: 1, Len: 1}}, hostKey}).field("User", nil).Bytes())
	f.Add([]byte(metadataIntro))
	f.Fuzz(func(t *testing.T, blob []byte) {
		frame, err := parseMetadata(blob)
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatal(err)
			}
			return
		}
		if err := checkName("test", frame.name); err != nil {
			t.Fatal(err)
		}
		for _, r := range frame.ranges {
			if _, ok := r.end(); !ok || !r.mem.valid() {
				t.Fatalf("%v %v", r.mem, r.Desc)
			}
		}
	})
}

func TestPeerLifecycle(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	name := l.owner.Name()
	require.NoError(t, l.reader.CheckRemote(name, DRAM, nil))
	require.NoError(t, l.reader.CheckRemote(name, DRAM, blocks(l.src, 4096)))
	require.ErrorIs(t, l.reader.CheckRemote(name, DRAM, []Desc{{Addr: 8, Len: 8}}), ErrNotFound)
	require.NoError(t, l.reader.Connect(name))
	x := l.read(t, TransferOptions{})
	finish(t, x)
	require.NoError(t, l.reader.InvalidateRemote(name))
	require.ErrorIs(t, l.reader.CheckRemote(name, DRAM, nil), ErrNotFound)
	require.ErrorIs(t, l.reader.InvalidateRemote(name), ErrNotFound)
	require.ErrorIs(t, l.reader.Notify(name, nil), ErrNotFound)
	_, err := x.Post()
	require.ErrorIs(t, err, ErrStale)
	_, err = l.reader.NewTransfer(Read, l.local, nil, l.remote, nil, TransferOptions{})
	require.ErrorIs(t, err, ErrStale)
	_, err = l.reader.PrepareRemote(name, DRAM, blocks(l.src, 4096))
	require.ErrorIs(t, err, ErrNotFound)
	introduce(t, l.owner, l.reader)
	_, err = x.Post()
	require.ErrorIs(t, err, ErrStale, "its keys were freed with the old metadata")
	require.NoError(t, x.Close())
	require.NoError(t, l.remote.Close())
	l.prepare(t, 4096)
	finish(t, l.read(t, TransferOptions{}))
	require.ErrorIs(t, l.reader.InvalidateRemote(l.reader.Name()), ErrInvalid)
}

// Each invalidate and load of a live peer leaks a socket on both sides, so an
// unchanged blob is no work. cases.md 16
func TestUnchangedMetadataCostsNoSockets(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	finish(t, l.read(t, TransferOptions{}))
	blob, err := l.owner.LocalMetadata()
	require.NoError(t, err)
	before := openFiles(t)
	for range 200 {
		name, err := l.reader.LoadRemote(blob)
		require.NoError(t, err)
		require.Equal(t, l.owner.Name(), name)
	}
	require.LessOrEqual(t, openFiles(t), before+2)
	finish(t, l.read(t, TransferOptions{})) // the lists are still good
}

func openFiles(t testing.TB) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(files)
}

// A peer that registered more keeps its connection and our lists.
// nixl#1267
func TestMetadataThatOnlyGrewKeepsLists(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	x := l.read(t, TransferOptions{})
	finish(t, x)
	files := openFiles(t)
	more := registered(t, l.owner, 1<<16)
	_, err := l.reader.PrepareRemote(l.owner.Name(), DRAM, blocks(more, 4096))
	require.ErrorIs(t, err, ErrInvalid, "not offered yet")
	introduce(t, l.owner, l.reader)
	finish(t, x)
	require.Equal(t, files, openFiles(t))
	fill(more.Bytes(), 9)
	remote, err := l.reader.PrepareRemote(l.owner.Name(), DRAM, blocks(more, 4096))
	require.NoError(t, err)
	y, err := l.reader.NewTransfer(Read, l.local, nil, remote, nil, TransferOptions{})
	require.NoError(t, err)
	finish(t, y)
	require.Equal(t, more.Bytes(), l.dst.Bytes())
}

// Natively new metadata under a known name is -2 until invalidated.
// smg#2382, nixl#1986, cases.md 15
func TestRestartedPeerIsReloaded(t *testing.T) {
	reader := newUCX(t, Config{})
	dst := registered(t, reader, 4096)
	local, err := reader.PrepareLocal(DRAM, blocks(dst, 4096))
	require.NoError(t, err)
	for life := range byte(50) {
		owner, err := NewAgent("restarts", Config{})
		require.NoError(t, err)
		_, err = owner.CreateBackend("UCX", nil)
		require.NoError(t, err)
		src := registered(t, owner, 4096)
		fill(src.Bytes(), life)
		introduce(t, owner, reader)
		remote, err := reader.PrepareRemote("restarts", DRAM, blocks(src, 4096))
		require.NoError(t, err)
		x, err := reader.NewTransfer(Read, local, nil, remote, nil, TransferOptions{})
		require.NoError(t, err)
		finish(t, x)
		require.Equal(t, src.Bytes(), dst.Bytes())
		require.NoError(t, owner.Close())
	}
}

func TestMetadataUnderOurOwnNameIsRefused(t *testing.T) {
	a := newUCX(t, Config{})
	blob, err := a.LocalMetadata()
	require.NoError(t, err)
	_, err = a.LoadRemote(blob)
	require.ErrorIs(t, err, ErrInvalid)
}

// A load that the library refuses leaves nothing behind.
func TestRefusedMetadataDoesNotPoisonTheName(t *testing.T) {
	owner, reader := newUCX(t, Config{}), newUCX(t, Config{})
	src, dst := registered(t, owner, 4096), registered(t, reader, 4096)
	for _, blob := range [][]byte{
		metadataBlob(owner.Name(), 1, 0).Bytes(), // an address that is none
		metadataBlob(owner.Name(), 0, 1, section{"UCX", "nixlSDList", 0, 1, []Desc{{Addr: 4096, Len: 8}}, hostKey}).Bytes(),
		metadataBlob(owner.Name(), 1, 0).Bytes()[:60],
	} {
		_, err := reader.LoadRemote(blob)
		require.Error(t, err)
	}
	introduce(t, owner, reader)
	remote, err := reader.PrepareRemote(owner.Name(), DRAM, blocks(src, 4096))
	require.NoError(t, err)
	local, err := reader.PrepareLocal(DRAM, blocks(dst, 4096))
	require.NoError(t, err)
	x, err := reader.NewTransfer(Read, local, nil, remote, nil, TransferOptions{})
	require.NoError(t, err)
	finish(t, x)
}

func BenchmarkPrepareRemote(b *testing.B) {
	for _, n := range []int{1000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			l := newLink(b, n*64, 64)
			ds := blocks(l.src, 64)
			b.ReportAllocs()
			for b.Loop() {
				r, err := l.reader.PrepareRemote(l.owner.Name(), DRAM, ds)
				require.NoError(b, err)
				require.NoError(b, r.Close())
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/desc")
		})
	}
}
