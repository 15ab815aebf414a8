package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
)

// fileHash is the compatibility hash of nodes that pass files: nothing else reads their blocks.
const fileHash = "nixlgo file 1"

// fileNode is the part of a node's configuration that serve and fetch share.
func fileNode() nixlgo.Config {
	return nixlgo.Config{Layers: 1, BlockTokens: 1, Compatibility: fileHash, Lease: lease.DefaultConfig()}
}

// fileOffer says what a file is and how it is cut: into parts, each a request, of blocks. The last block is padded.
type fileOffer struct {
	Name       string `json:"name"`
	Bytes      int64  `json:"bytes"`
	SHA256     string `json:"sha256"`
	BlockBytes int    `json:"block_bytes"`
	PartBlocks int    `json:"part_blocks"` // of every part but the last
	Parts      int    `json:"parts"`       // at least 1: an empty file is a block of padding
}

// fileKey is where kv_transfer_params carry a filePart.
const fileKey = "nixlgo_file"

// filePart is what kv_transfer_params say of the blocks that they name.
type filePart struct {
	fileOffer
	Part int `json:"part"`
}

func newOffer(name string, bytes int64, blockBytes, partBlocks int) fileOffer {
	o := fileOffer{Name: name, Bytes: bytes, BlockBytes: blockBytes, PartBlocks: partBlocks}
	o.Parts = int(max(ceil(bytes, o.partBytes()), 1))
	return o
}

func ceil(a, b int64) int64 { return (a + b - 1) / b }

func (o *fileOffer) partBytes() int64 { return int64(o.PartBlocks) * int64(o.BlockBytes) }

// part is where part n lies in the file and how many blocks it has.
func (o *fileOffer) part(n int) (offset, bytes int64, blocks int) {
	offset = int64(n) * o.partBytes()
	bytes = min(o.Bytes-offset, o.partBytes())
	return offset, bytes, int(max(ceil(bytes, int64(o.BlockBytes)), 1))
}

// check refuses an offer that no serve makes: it comes from another machine.
func (o *fileOffer) check() error {
	const most = 1 << 40 // bytes of a part
	sum, err := hex.DecodeString(o.SHA256)
	switch {
	case o.Bytes < 0 || o.BlockBytes < 1 || o.PartBlocks < 1 || o.BlockBytes > most/o.PartBlocks || o.Bytes > 1<<60:
		return fmt.Errorf("a file of %s in parts of %s of %s", many(o.Bytes, "byte"), many(o.PartBlocks, "block"), many(o.BlockBytes, "byte"))
	case int64(o.Parts) != max(ceil(o.Bytes, o.partBytes()), 1):
		return fmt.Errorf("a file of %s in %s of %s", many(o.Bytes, "byte"), many(o.Parts, "part"), many(o.partBytes(), "byte"))
	case err != nil || len(sum) != sha256.Size:
		return fmt.Errorf("%.80q is no SHA-256", o.SHA256)
	}
	return nil
}

// servedFile is a file and its offer, with what it was like when that was made.
type servedFile struct {
	*os.File
	since os.FileInfo
	offer fileOffer
}

// openFile opens a regular file and makes its offer, for which it is read once.
func openFile(ctx context.Context, path string, blockBytes, partBlocks int, errs io.Writer) (f servedFile, err error) {
	if f.File, err = os.Open(path); err != nil {
		return f, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if f.since, err = f.Stat(); err != nil {
		return f, err
	}
	if !f.since.Mode().IsRegular() {
		return f, fmt.Errorf("%s is no regular file", path)
	}
	f.offer = newOffer(filepath.Base(path), f.since.Size(), blockBytes, partBlocks)
	f.offer.SHA256, err = hashFile(ctx, f, f.offer.Bytes, errs)
	return f, err
}

var errFileChanged = errors.New("the file has changed since it was opened: start serve again")

// read copies part n into blocks, each of them padded with zeros.
func (f servedFile) read(n int, block func(i int) []byte) error {
	now, err := f.Stat()
	if err != nil {
		return err
	}
	if now.Size() != f.since.Size() || !now.ModTime().Equal(f.since.ModTime()) {
		return errFileChanged
	}
	at, left, blocks := f.offer.part(n)
	for i := range blocks {
		b := block(i)
		have := int(min(left, int64(len(b))))
		if _, err := f.ReadAt(b[:have], at); err != nil {
			return fmt.Errorf("%w: %w", errFileChanged, err)
		}
		clear(b[have:])
		at, left = at+int64(have), left-int64(have)
	}
	return nil
}

// hashFile is the SHA-256 of the first bytes of f.
func hashFile(ctx context.Context, f io.ReaderAt, bytes int64, errs io.Writer) (string, error) {
	p := newProgress(errs, "SHA-256", bytes, true)
	defer p.end()
	h := sha256.New()
	n, err := io.Copy(h, &watchedReader{ctx, io.NewSectionReader(f, 0, bytes), p})
	if err == nil && n != bytes {
		err = fmt.Errorf("the file shrank from %d to %s while it was read", bytes, many(n, "byte"))
	}
	return hex.EncodeToString(h.Sum(nil)), err
}

// watchedReader tells a bar what was read, and ends with a context.
type watchedReader struct {
	ctx context.Context
	io.Reader
	bar *progress
}

func (r *watchedReader) Read(b []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	n, err := r.Reader.Read(b)
	r.bar.add(int64(n))
	return n, err
}

// fileEvent is a line of serve or fetch.
type fileEvent struct {
	Event    string  `json:"event"`
	T        float64 `json:"t"`                 // seconds since the start
	Request  string  `json:"request,omitempty"` // of the owner
	Part     *int    `json:"part,omitempty"`
	Reader   string  `json:"reader,omitempty"` // address of who asked for the part
	Blocks   int     `json:"blocks,omitempty"`
	Bytes    int64   `json:"bytes,omitempty"`
	Seconds  float64 `json:"seconds,omitempty"` // that it took, or that the lease lasted
	LeftS    float64 `json:"left_s,omitempty"`  // until the lease runs out
	GBs      float64 `json:"gb_s,omitempty"`    // 10^9 bytes a second
	Renewals int64   `json:"renewals,omitempty"`
	Leases   int     `json:"leases,omitempty"` // that live
	Error    string  `json:"error,omitempty"`
}

// fileLog prints the events of serve or fetch as they come. Safe for concurrent use.
type fileLog struct {
	start  time.Time
	format format

	mu  sync.Mutex
	out io.Writer
	err error // the first of writing
}

func newFileLog(out io.Writer, f format) *fileLog {
	return &fileLog{start: time.Now(), format: f, out: out}
}

// say prints e; text and what follows it is e for people.
func (l *fileLog) say(e fileEvent, text string, a ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e.T = round(time.Since(l.start).Seconds())
	err := say(l.out, l.format, e, "%9.3fs  %-9s %s", e.T, e.Event, fmt.Sprintf(text, a...))
	if l.err == nil {
		l.err = err
	}
}

func gbs(bytes int64, took time.Duration) float64 {
	if took <= 0 {
		return 0
	}
	return float64(bytes) / took.Seconds() / 1e9
}

// byteSize is a size for people, with a digit behind the point where it needs one.
func byteSize(bytes int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	v, u := float64(bytes), 0
	for v >= 1024 && u < len(units)-1 {
		v, u = v/1024, u+1
	}
	return strconv.FormatFloat(math.Round(v*10)/10, 'f', -1, 64) + " " + units[u]
}
