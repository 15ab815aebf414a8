package nixl

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// damaged returns blob i of a series: an original with one to three faults.
func damaged(originals [][]byte, i int) []byte {
	r := rand.New(rand.NewPCG(20, uint64(i)))
	b := bytes.Clone(originals[r.IntN(len(originals))])
	for range 1 + r.IntN(3) {
		if len(b) < 16 {
			return b
		}
		at := r.IntN(len(b))
		fields := fieldsOf(b)
		field := func() [2]int {
			if len(fields) == 0 {
				return [2]int{0, len(b)}
			}
			return fields[r.IntN(len(fields))]
		}
		switch r.IntN(9) {
		case 0:
			b[at] ^= 1 << r.IntN(8)
		case 1:
			b[at] = byte(r.Uint32())
		case 2: // cut
			b = b[:at]
		case 3: // bytes behind
			for range 1 + r.IntN(40) {
				b = append(b, byte(r.Uint32()))
			}
		case 4: // another length, or another count
			f := field()
			n := []uint64{0, 1, uint64(r.IntN(len(b))), uint64(f[1]-f[0]) - 8, 1 << 31, 1 << 32, 1 << 63, math.MaxUint64}[r.IntN(8)] + uint64(r.IntN(3)) - 1
			if start := f[0] + 8*r.IntN(2); start+8 <= len(b) {
				binary.NativeEndian.PutUint64(b[start:], n)
			}
		case 5: // the end of another
			other := originals[r.IntN(len(originals))]
			from := fieldsOf(other)[r.IntN(len(fieldsOf(other)))]
			b = append(b[:field()[0]:len(b)], other[from[0]:]...)
		case 6: // a field twice
			f := field()
			b = slices.Insert(b, f[1], b[f[0]:f[1]]...)
		case 7: // a field less
			f := field()
			b = slices.Delete(b, f[0], f[1])
		case 8: // zeros
			clear(b[at:min(len(b), at+1+r.IntN(16))])
		}
	}
	return b
}

// fieldsOf returns where the fields of a blob start, at the length, and end, behind the '|'.
func fieldsOf(b []byte) (fields [][2]int) {
	for p := len(metadataIntro); p+8 < len(b); p++ {
		if n := binary.NativeEndian.Uint64(b[p:]); n < uint64(len(b)-p-8) && b[p+8+int(n)] == '|' {
			fields = append(fields, [2]int{p, p + 8 + int(n) + 1})
		}
	}
	return fields
}

// opaque is what the library alone reads of metadata.
type opaque struct{ conns, keys map[string]bool }

func opaqueOf(t testing.TB, originals [][]byte) opaque {
	o := opaque{conns: map[string]bool{}, keys: map[string]bool{}}
	for _, b := range originals {
		f, err := parseMetadata(b)
		require.NoError(t, err)
		o.conns[string(f.conns)] = true
		for _, r := range f.ranges {
			o.keys[r.key] = true
		}
	}
	return o
}

// has reports whether a frame's connection information and keys are those of an original.
func (o opaque) has(f frame) bool {
	return (f.partial || o.conns[string(f.conns)]) && !slices.ContainsFunc(f.ranges, func(r remoteRange) bool { return !o.keys[r.key] })
}

// victim is a reader that loads damaged metadata, and is replaced now and then: a peer that is
// loaded and invalidated leaves a socket behind.
type victim struct {
	t     testing.TB
	owner *Agent
	good  []byte
	src   *Buffer

	reader *Agent
	dst    *Buffer
	loads  int
}

const loadsOfAVictim = 250

func (v *victim) load(blob []byte) error {
	if v.reader == nil {
		var err error
		v.reader, err = NewAgent("", Config{})
		require.NoError(v.t, err)
		_, err = v.reader.CreateBackend("UCX", nil)
		require.NoError(v.t, err)
		v.dst = registered(v.t, v.reader, v.src.Len())
		introduce(v.t, v.owner, v.reader)
	}
	name, err := v.reader.LoadRemote(blob)
	if err == nil && v.loads%2 == 0 { // the next one with the name replaces it otherwise
		require.NoError(v.t, v.reader.InvalidateRemote(name))
	}
	if v.loads++; v.loads == loadsOfAVictim {
		v.end()
	}
	return err
}

// end makes sure that the name of the owner is not poisoned, by a READ.
func (v *victim) end() {
	if v.reader == nil {
		return
	}
	name, err := v.reader.LoadRemote(v.good)
	require.NoError(v.t, err, "the good metadata no longer loads")
	remote, err := v.reader.PrepareRemote(name, DRAM, blocks(v.src, v.src.Len()))
	require.NoError(v.t, err)
	local, err := v.reader.PrepareLocal(DRAM, blocks(v.dst, v.dst.Len()))
	require.NoError(v.t, err)
	x, err := v.reader.NewTransfer(Read, local, nil, remote, nil, TransferOptions{})
	require.NoError(v.t, err)
	fill(v.dst.Bytes(), 0)
	finish(v.t, x)
	require.Equal(v.t, v.src.Bytes(), v.dst.Bytes())
	require.NoError(v.t, v.reader.Close())
	v.reader, v.loads = nil, 0
}

// 100,000 blobs are damaged: bits, bytes, lengths and counts changed, cut, spliced, fields
// doubled and left out. Natively some crash the library, and one that is cut poisons the name.
// What has another's connection information or keys after that, the library alone can read,
// and UCX does so without a check: a process of its own loads those. cases.md 21
func TestHundredThousandDamagedBlobs(t *testing.T) {
	t.Parallel()
	n := 100_000
	if testing.Short() {
		n = 5000
	}
	owner, other := newUCX(t, Config{}), newUCX(t, Config{})
	src := registered(t, owner, 4096)
	fill(src.Bytes(), 0x42)
	blob := func(a *Agent) []byte {
		b, err := a.LocalMetadata()
		require.NoError(t, err)
		return b
	}
	small := blob(owner)
	conns, err := owner.PartialMetadata()
	require.NoError(t, err)
	for range 2 {
		registered(t, owner, 8192)
	}
	more, err := owner.Register(mustBuffer(t, 8192))
	require.NoError(t, err)
	part, err := owner.PartialMetadata(more)
	require.NoError(t, err)
	registered(t, other, 4096)
	originals := [][]byte{blob(owner), small, conns, part, blob(other)}
	known := opaqueOf(t, originals)

	v := &victim{t: t, owner: owner, good: originals[0], src: src}
	var refused, tried, loaded int
	var altered []int
	for i := range n {
		b := damaged(originals, i)
		f, err := parseMetadata(b)
		switch {
		case err != nil:
			refused++
			require.ErrorIs(t, err, ErrInvalid, i)
			_, err = owner.LoadRemote(b)
			require.ErrorIs(t, err, ErrInvalid, i)
		case !known.has(f):
			altered = append(altered, i)
		default:
			tried++
			if err := v.load(b); err == nil {
				loaded++
			}
		}
	}
	v.end()
	t.Logf("%d blobs: %d refused, %d loaded of %d, %d for another process", n, refused, loaded, tried, len(altered))
	require.Greater(t, refused, n/2)
	require.Greater(t, loaded, n/100, "a changed name, address or length is another peer's")
	require.Less(t, len(altered), n/3)

	s := &sacrifice{Originals: originals, Blobs: altered[:min(len(altered), n/200)]}
	crashes, poisoned := s.run(t)
	t.Logf("%d blobs in processes of their own: %d crashes, %d names poisoned", len(s.Blobs), crashes, poisoned)
	require.LessOrEqual(t, crashes, len(s.Blobs)/50+1, "see the package comment for what is known")
}

// A sacrifice is a process that loads blobs which may end it. Its progress is in a file:
// how many it has loaded, and how many names of the owner it lost.
type sacrifice struct {
	Originals [][]byte
	Blobs     []int
	Progress  string
}

const sacrificeVariable = "NIXLGO_TEST_SACRIFICE"

// loadAll is what the process does, from where the one before ended.
func (s *sacrifice) loadAll() error {
	done, poisoned, err := s.progress()
	if err != nil {
		return err
	}
	var reader *Agent
	for at := done; at < len(s.Blobs); at++ {
		if reader == nil {
			if reader, err = NewAgent("", Config{}); err != nil {
				return err
			}
			if _, err := reader.CreateBackend("UCX", nil); err != nil {
				return err
			}
		}
		if err := s.save(at+1, poisoned); err != nil {
			return err
		}
		name, err := reader.LoadRemote(damaged(s.Originals, s.Blobs[at]))
		if err == nil {
			reader.InvalidateRemote(name)
		}
		if _, err := reader.LoadRemote(s.Originals[0]); err != nil {
			poisoned++
		} else if at%loadsOfAVictim != 0 {
			continue
		}
		if err := reader.Close(); err != nil {
			return err
		}
		reader = nil
	}
	return s.save(len(s.Blobs), poisoned)
}

func (s *sacrifice) save(done, poisoned int) error {
	return os.WriteFile(s.Progress, fmt.Appendf(nil, "%d %d", done, poisoned), 0o600)
}

func (s *sacrifice) progress() (done, poisoned int, err error) {
	text, err := os.ReadFile(s.Progress)
	if err == nil {
		_, err = fmt.Sscan(string(text), &done, &poisoned)
	}
	return done, poisoned, err
}

// runSacrifice is the process.
func runSacrifice(file string) int {
	var s sacrifice
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err == nil {
		err = s.loadAll()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sacrifice:", err)
		return 1
	}
	return 0
}

// run starts a process after the other until all blobs were loaded, and counts those that ended one.
func (s *sacrifice) run(t *testing.T) (crashes, poisoned int) {
	s.Progress = filepath.Join(t.TempDir(), "progress")
	require.NoError(t, s.save(0, 0))
	text, err := json.Marshal(s)
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "sacrifice.json")
	require.NoError(t, os.WriteFile(file, text, 0o600))
	for {
		ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
		c := exec.CommandContext(ctx, os.Args[0])
		c.Env = append(os.Environ(), sacrificeVariable+"="+file)
		out, err := c.CombinedOutput()
		require.NoError(t, ctx.Err(), "a blob hangs the process: %s", out)
		cancel()
		done, lost, progressErr := s.progress()
		require.NoError(t, progressErr)
		if err == nil {
			require.Equal(t, len(s.Blobs), done)
			return crashes, lost
		}
		require.NotContains(t, string(out), "sacrifice: ")
		crashes++
	}
}
