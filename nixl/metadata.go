package nixl

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"slices"
	"strings"
)

// The metadata that agents exchange is NIXL's own serialisation: the text
// "nixlSerDes|", then fields of a known tag, a uint64 length in the byte order
// of the machine, the value and '|':
//
//	Agent name
//	Conns count, then for each: t backend, c connection information
//	(no tag) "MemSection"
//	nixlSecElms count, then for each: bknd backend, nixlDList "nixlSDList",
//	  t memory type (uint32), n count (uint64),
//	  then for each: (no tag) address, length, device (uint64 each), remote key
//
// The library trusts it: a changed memory type or length makes it crash, and a
// blob that is cut inside its memory section poisons the name for good. So the
// frame is read here before the library sees it. Connection information and
// remote keys are UCX's own; of those only what UCX stops or crashes at most
// often is checked (see ucxAddress and ucxKey).
const metadataIntro = "nixlSerDes|"

// frame is what a metadata blob says.
type frame struct {
	name  string
	conns []byte // the fields of all connections
	// partial: there are none, so the blob only adds ranges to a peer that is known.
	partial bool
	ranges  remoteRanges
}

// remoteRange is memory that a peer offers.
type remoteRange struct {
	mem MemType
	Desc
	key string // backend, NUL, remote key
}

// remoteRanges are sorted by type, device and address. They may overlap: a
// region is offered once for each backend that serves it.
type remoteRanges []remoteRange

// MetadataAgentName returns the name of the agent that a metadata blob
// describes, without loading it. It checks the whole frame. Errors match
// ErrInvalid.
func MetadataAgentName(blob []byte) (string, error) {
	f, err := parseMetadata(blob)
	return f.name, err
}

// fieldReader reads fields of the serialisation; the first error sticks.
type fieldReader struct {
	rest []byte
	err  error
}

const parseOp = "parse metadata"

func (r *fieldReader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = invalid(parseOp, format, args...)
	}
}

// field returns the value of the next field, which must have the tag.
func (r *fieldReader) field(tag string) []byte {
	if r.err != nil {
		return nil
	}
	if !bytes.HasPrefix(r.rest, []byte(tag)) || len(r.rest) < len(tag)+8 {
		r.fail("the field %q is missing, %d bytes before the end", tag, len(r.rest))
		return nil
	}
	n := binary.NativeEndian.Uint64(r.rest[len(tag):])
	body := r.rest[len(tag)+8:]
	if n >= uint64(len(body)) || body[n] != '|' {
		r.fail("the field %q is cut: %d bytes announced, %d left", tag, n, len(body))
		return nil
	}
	r.rest = body[n+1:]
	return body[:n]
}

func (r *fieldReader) number(tag string, size int) uint64 {
	v := r.field(tag)
	if r.err == nil && len(v) != size {
		r.fail("the field %q has %d bytes, not %d", tag, len(v), size)
	}
	if r.err != nil {
		return 0
	}
	if size == 4 {
		return uint64(binary.NativeEndian.Uint32(v))
	}
	return binary.NativeEndian.Uint64(v)
}

// count reads a number of items, each of which needs at least least bytes.
func (r *fieldReader) count(tag string, least int) int {
	n := r.number(tag, 8)
	if n > uint64(len(r.rest)/least) {
		r.fail("the field %q announces %d items in %d bytes", tag, n, len(r.rest))
		return 0
	}
	return int(n)
}

// text reads a short name.
func (r *fieldReader) text(tag string) string {
	v := r.field(tag)
	if r.err == nil && (len(v) == 0 || len(v) > MaxName || bytes.IndexByte(v, 0) >= 0) {
		r.fail("the field %q is empty, longer than %d bytes, or contains NUL", tag, MaxName)
	}
	return string(v)
}

func (r *fieldReader) literal(tag, want string) {
	if v := r.field(tag); r.err == nil && string(v) != want {
		r.fail("the field %q is %q, not %q", tag, v, want)
	}
}

func parseMetadata(blob []byte) (frame, error) {
	r := fieldReader{rest: blob}
	if !bytes.HasPrefix(blob, []byte(metadataIntro)) {
		r.fail("%d bytes that do not start with %q", len(blob), metadataIntro)
		return frame{}, r.err
	}
	r.rest = blob[len(metadataIntro):]
	f := frame{name: r.text("Agent")}
	conns := r.rest
	n := r.count("Conns", 2*(1+8+1))
	f.partial = n == 0
	for range n {
		backend := r.text("t")
		switch c := r.field("c"); {
		case r.err != nil:
		case len(c) == 0:
			r.fail("a backend has no connection information")
		case backend == "UCX":
			r.ucxAddress(c)
		}
	}
	f.conns = bytes.Clone(conns[:len(conns)-len(r.rest)])
	r.literal("", "MemSection")
	for range r.count("nixlSecElms", 4+8+1) {
		f.section(&r, r.text("bknd"))
	}
	r.unknown()
	if r.err != nil {
		return frame{}, r.err
	}
	slices.SortFunc(f.ranges, func(a, b remoteRange) int { return a.compare(b) })
	return f, nil
}

func (f *frame) section(r *fieldReader, backend string) {
	const fixed = 3 * 8
	r.literal("nixlDList", "nixlSDList")
	mem := r.number("t", 4)
	if mem >= uint64(memTypes) {
		r.fail("the memory type %d does not exist", mem)
	}
	n := r.count("n", 8+fixed+1)
	if n == 0 {
		r.fail("a section is empty")
	}
	for range n {
		v := r.field("")
		if r.err != nil {
			return
		}
		if len(v) < fixed {
			r.fail("a descriptor has %d bytes, less than %d", len(v), fixed)
			return
		}
		d := Desc{
			Addr: binary.NativeEndian.Uint64(v),
			Len:  binary.NativeEndian.Uint64(v[8:]),
			Dev:  binary.NativeEndian.Uint64(v[16:]),
		}
		if _, ok := d.end(); !ok {
			r.fail("the descriptor %v wraps around", d)
			return
		}
		if backend == "UCX" {
			r.ucxKey(v[fixed:])
		}
		f.ranges = append(f.ranges, remoteRange{MemType(mem), d, backend + "\x00" + string(v[fixed:])})
	}
}

// ucxAddress checks the start of a UCX worker address: the format's version in
// the low half of the first byte. UCX aborts at one that it does not know.
func (r *fieldReader) ucxAddress(a []byte) {
	const known = 1 // UCP_OBJECT_VERSION_V2
	if version := a[0] & 0x0f; version > known {
		r.fail("the UCX address is of version %d, and %d is the newest", version+1, known+1)
	}
}

// ucxKey checks the start of a packed UCX remote key: a set of 64 memory domains,
// and the type of the memory, which UCX takes for an index without a look.
func (r *fieldReader) ucxKey(key []byte) {
	const domains, types = 8, 13 // UCX 1.23 has fewer types; larger numbers crash it
	if len(key) <= domains || key[domains] >= types {
		r.fail("a UCX key of %d bytes names no type of memory", len(key))
	}
}

// unknown accepts fields that later versions of NIXL append, if their framing
// is sound. The first is neither a descriptor (no tag) nor a section (bknd):
// those would be more than their counts announce.
func (r *fieldReader) unknown() {
	const longestTag = 32
	for shortest := 1; r.err == nil && len(r.rest) > 0; shortest = 0 {
		before := len(r.rest)
		if shortest == 1 && bytes.HasPrefix(r.rest, []byte("bknd")) {
			break
		}
		for n := 0; n <= longestTag && n+8 < before; n++ {
			try := fieldReader{rest: r.rest}
			if try.field(string(r.rest[:n])); try.err == nil && n >= shortest {
				r.rest = try.rest
				break
			}
			if c := r.rest[n]; c <= ' ' || c > '~' {
				break
			}
		}
		if len(r.rest) == before {
			break
		}
	}
	if r.err == nil && len(r.rest) > 0 {
		r.fail("%d bytes behind the memory section are not part of it", len(r.rest))
	}
}

func (a remoteRange) compare(b remoteRange) int {
	return cmp.Or(cmp.Compare(a.mem, b.mem), cmp.Compare(a.Dev, b.Dev), cmp.Compare(a.Addr, b.Addr), cmp.Compare(a.Len, b.Len), cmp.Compare(a.key, b.key))
}

// covers reports whether d lies inside.
func (r *remoteRange) covers(mem MemType, d Desc) bool { return r.mem == mem && r.Desc.covers(d) }

// containing returns the range of its type and device that d lies inside, or nil.
func (rs remoteRanges) containing(mem MemType, d Desc) *remoteRange {
	i, _ := slices.BinarySearchFunc(rs, d, func(r remoteRange, d Desc) int {
		return cmp.Or(cmp.Compare(r.mem, mem), cmp.Compare(r.Dev, d.Dev), cmp.Compare(r.Addr, d.Addr), -1)
	})
	for i--; i >= 0 && rs[i].mem == mem && rs[i].Dev == d.Dev; i-- {
		if rs[i].covers(mem, d) {
			return &rs[i]
		}
	}
	return nil
}

// include reports whether all of the others are among them.
func (rs remoteRanges) include(others remoteRanges) bool {
	for _, o := range others {
		if _, found := slices.BinarySearchFunc(rs, o, remoteRange.compare); !found {
			return false
		}
	}
	return true
}

// conflict returns one of the others that is here with another key, or nil.
func (rs remoteRanges) conflict(others remoteRanges) *remoteRange {
	for i := range others {
		o := &others[i]
		for _, r := range rs {
			if r.mem == o.mem && r.Desc == o.Desc && r.key != o.key && r.backend() == o.backend() {
				return o
			}
		}
	}
	return nil
}

func (r *remoteRange) backend() string {
	name, _, _ := strings.Cut(r.key, "\x00")
	return name
}

// union returns those of both, sorted.
func (rs remoteRanges) union(others remoteRanges) remoteRanges {
	all := slices.Concat(rs, others)
	slices.SortFunc(all, func(a, b remoteRange) int { return a.compare(b) })
	return slices.Compact(all)
}

func (rs remoteRanges) String() string {
	const most = 4
	var b strings.Builder
	for i, r := range rs {
		if i == most {
			b.WriteString(" …")
			break
		}
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(r.mem.String() + r.Desc.String())
	}
	return b.String()
}
