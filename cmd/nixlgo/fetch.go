package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
)

// fetchConfig is the command line of fetch.
type fetchConfig struct {
	sources    []string
	output     string
	overwrite  bool
	parallel   int
	memoryMiB  int
	attempts   int
	node       nixlgo.Config
	handshakes handshakes
	format     format
}

func newFetch() *cobra.Command {
	c := fetchConfig{node: fileNode()}
	cmd := &cobra.Command{
		Use:   "fetch http://HOST:PORT | PARAMS... | -",
		Short: "Read a file that nixlgo serve publishes, and prove what was read",
		Long: "fetch reads a file from `nixlgo serve`, by the URL that serve prints, or by the kv_transfer_params that serve --params\n" +
			"prints: as arguments, or on standard input with -, one JSON object a line.\n\n" +
			"It asks for one part after another, several at a time. Each is read into registered blocks, its lease is verified, and only\n" +
			"then it is written: a part whose lease lapsed under the read is asked for again, --attempts times. In the end the SHA-256 of\n" +
			"what is on the disk is compared with the one that serve took of its file.\n\n" +
			"The file gets its name when all of that is done. Before, and after a failure, there is nothing under that name, or what\n" +
			"was there before. Until then it is .NAME.part beside it; what a fetch that was killed has left there, the next one replaces.\n" +
			"Without --output, or where that is a directory, the file has the name that serve says, and replaces nothing unless\n" +
			"--overwrite is given.",
		Example: "  nixlgo fetch http://10.0.0.7:8300\n" +
			"  nixlgo fetch http://10.0.0.7:8300 --output /models/model.gguf --json\n" +
			"  nixlgo serve small.bin --params --json | nixlgo fetch -",
		RunE: func(cmd *cobra.Command, args []string) error {
			c.sources = args
			if err := c.check(); err != nil {
				return err
			}
			if err := c.run(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr()); err != nil {
				return fmt.Errorf("fetch: %w", err)
			}
			return nil
		},
	}
	cmd.Args = cobra.ArbitraryArgs // check says what is wrong with them
	f := cmd.Flags()
	f.StringVar(&c.output, "output", "", "file to write, which replaces one that is there, or a directory (default: this one)")
	f.BoolVar(&c.overwrite, "overwrite", false, "replace a file of the name that serve says")
	f.IntVar(&c.parallel, "parallel", 4, "parts that are read at a time")
	f.IntVar(&c.memoryMiB, "memory-mib", 512, "MiB of registered memory at most")
	f.IntVar(&c.attempts, "attempts", 3, "how often a part is asked for (by URL)")
	f.DurationVar(&c.node.ReadTimeout, "timeout", time.Minute, "longest wait for an answer about the file, and for the blocks of a part")
	c.handshakes.flags(f)
	libraryFlag(f, &c.node.Library)
	formatFlags(f, &c.format, false)
	return cmd
}

func (c *fetchConfig) check() error {
	bad := func(format string, a ...any) error { return usageError{fmt.Errorf("fetch: "+format, a...)} }
	url := func(s string) bool { return strings.HasPrefix(s, "http://") || strings.HasPrefix(s, "https://") }
	switch {
	case len(c.sources) == 0:
		return bad("say from where, as in nixlgo fetch http://10.0.0.7:8300")
	case len(c.sources) > 1 && (slices.Contains(c.sources, "-") || slices.ContainsFunc(c.sources, url)):
		return bad("name one URL, or -, or kv_transfer_params")
	case !url(c.sources[0]) && c.sources[0] != "-" && !strings.HasPrefix(c.sources[0], "{"):
		return bad("%.80q is no URL (http://HOST:PORT), no kv_transfer_params and not -", c.sources[0])
	case c.output == "-":
		return bad("--output -: want a file; what was read is told on standard output")
	case c.node.ReadTimeout <= 0:
		return bad("--timeout %v is not positive", c.node.ReadTimeout)
	}
	if url(c.sources[0]) {
		if err := checkURL(c.sources[0]); err != nil {
			return bad("%w", err)
		}
	}
	if err := c.handshakes.check(&c.node); err != nil {
		return bad("%w", err)
	}
	if err := checkBounds(bound{"parallel", c.parallel, 1, 1 << 16}, bound{"memory-mib", c.memoryMiB, 1, 1 << 20}, bound{"attempts", c.attempts, 1, math.MaxInt32}); err != nil {
		return bad("%w", err)
	}
	return nil
}

// fetchDone is the last line.
type fetchDone struct {
	Event string `json:"event"` // done
	File  string `json:"file"`
	fileOffer
	Seconds  float64 `json:"seconds"`
	GBs      float64 `json:"gb_s"` // bytes of the file by the time of all reads
	Verified int     `json:"verified"`
	Again    int     `json:"again"` // reads that failed and were repeated
}

func (c *fetchConfig) run(ctx context.Context, in io.Reader, out, errs io.Writer) error {
	source, err := openSource(ctx, c.sources, in, c.node.ReadTimeout)
	if err != nil {
		return err
	}
	offer := source.offer()
	if err := offer.check(); err != nil {
		return fmt.Errorf("what serve says of its file: %w", err)
	}
	path, err := c.path(&offer)
	if err != nil {
		return err
	}
	_, _, whole := offer.part(0)
	c.node.Blocks = min(c.memoryMiB<<20/offer.BlockBytes, min(c.parallel, offer.Parts)*whole)
	if c.node.Blocks < whole {
		return fmt.Errorf("a part has %s, more than --memory-mib %d", byteSize(int64(whole)*int64(offer.BlockBytes)), c.memoryMiB)
	}
	c.node.BlockBytes = offer.BlockBytes
	c.node.Logger = slog.New(slog.NewTextHandler(errs, &slog.HandlerOptions{Level: slog.LevelWarn}))
	node, end, err := c.handshakes.open(c.node)
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() { _ = node.Run(running) }) // it returns nil
	defer work.Wait()
	defer stop()
	defer end()
	f := &fetcher{fetchConfig: c, source: source, offer: offer, node: node, blocks: newBlockPool(c.node.Blocks)}
	err = writeWhole(path, errs, func(file *os.File) error {
		return f.fetch(ctx, file, out, errs)
	})
	if err != nil {
		return err
	}
	d := fetchDone{"done", path, offer, round(f.took.Seconds()), gbs(offer.Bytes, f.took), offer.Parts, f.again}
	if err := say(out, c.format, d, "%s: %s in %.3f s, %.2f GB/s, %d of %s verified, SHA-256 %s", path, byteSize(offer.Bytes), d.Seconds, d.GBs, d.Verified, many(offer.Parts, "part"), offer.SHA256); err != nil {
		return err
	}
	return end()
}

// path is the file to write.
func (c *fetchConfig) path(o *fileOffer) (string, error) {
	info, err := os.Stat(c.output)
	if c.output != "" && (err != nil || !info.IsDir()) {
		return c.output, checkOutput(c.output)
	}
	// Another machine says it.
	if o.Name != filepath.Base(o.Name) || strings.HasPrefix(o.Name, ".") || strings.ContainsFunc(o.Name, func(r rune) bool { return r < ' ' || r == '/' || r == '\\' }) {
		return "", fmt.Errorf("serve calls its file %.80q: name one with --output", o.Name)
	}
	path := filepath.Join(c.output, o.Name)
	if _, err := os.Lstat(path); !c.overwrite && !errors.Is(err, os.ErrNotExist) {
		return "", errors.Join(err, fmt.Errorf("%s is there already: give --overwrite, or another --output", path))
	}
	return path, checkOutput(path)
}

// checkOutput refuses a path in no directory, and one of a device, a link or the like, such as /dev/stdout: the file that was
// read would take its place.
func checkOutput(path string) error {
	dir, _ := filepath.Split(path)
	if info, err := os.Stat(cmp.Or(dir, ".")); err != nil || !info.IsDir() {
		return fmt.Errorf("--output %s: there is no directory %s: make it first", path, dir)
	}
	if info, err := os.Lstat(path); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("%s is no regular file but a directory, a device, a link or the like: give another --output", path)
	}
	return nil
}

// writeWhole lets fill write a file that gets its name only when fill has succeeded and the bytes are on the disk. What a fetch
// that was killed has left of it is said to errs, and replaced.
func writeWhole(path string, errs io.Writer, fill func(*os.File) error) (err error) {
	f, err := openPart(path, errs)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
		err = errors.Join(err, f.Close()) // which ends the lock: not before the file has its name, or is gone
	}()
	if err := fill(f); err != nil {
		return err
	}
	if err := errors.Join(f.Chmod(0o644), f.Sync()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// openPart makes the file that becomes path, .NAME.part beside it. Its lock ends with the process, so what is left without one
// is of a fetch that was killed.
func openPart(path string, errs io.Writer) (*os.File, error) {
	dir, name := filepath.Split(path)
	part := filepath.Join(dir, "."+name+".part")
	for {
		f, err := os.OpenFile(part, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
		if err != nil {
			return nil, err
		}
		info, err := f.Stat()
		if err == nil && !info.Mode().IsRegular() {
			err = fmt.Errorf("%s is in the way, and no regular file", part)
		}
		if err == nil {
			err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		}
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = fmt.Errorf("another nixlgo fetch is writing %s", path)
		}
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if now, err := os.Lstat(part); err != nil || !os.SameFile(now, info) {
			f.Close() // the fetch that had it has renamed or removed it meanwhile
			continue
		}
		if info.Size() > 0 {
			fmt.Fprintf(errs, "fetch: %s, %s, was left by a fetch that was killed: it is replaced\n", part, byteSize(info.Size()))
		}
		if err := f.Truncate(0); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		return f, nil
	}
}

// fetcher reads the parts of one file.
type fetcher struct {
	*fetchConfig
	source fileSource
	offer  fileOffer
	node   *nixlgo.Node
	blocks *blockPool
	log    *fileLog
	bar    *progress
	took   time.Duration // of all reads
	again  int

	settling sync.WaitGroup
}

// fetch fills file, and proves that it is the one that was offered.
func (f *fetcher) fetch(ctx context.Context, file *os.File, out, errs io.Writer) error {
	f.bar = newProgress(errs, f.offer.Name, f.offer.Bytes, true)
	defer f.bar.end()
	f.log = newFileLog(f.bar.lines(out), f.format)
	ctx, cancel := context.WithCancelCause(ctx)
	defer f.settling.Wait()
	defer cancel(nil)
	parts := make(chan int)
	var readers sync.WaitGroup
	var failed error
	var mu sync.Mutex // of failed and again
	for range min(f.parallel, f.offer.Parts) {
		readers.Go(func() {
			for n := range parts {
				again, err := f.part(ctx, n, file)
				mu.Lock()
				f.again += again
				if err != nil && failed == nil {
					failed = fmt.Errorf("part %d of %d: %w", n+1, f.offer.Parts, err)
					cancel(failed)
				}
				mu.Unlock()
			}
		})
	}
	for n := range f.offer.Parts {
		parts <- n
	}
	close(parts)
	readers.Wait()
	if failed != nil {
		return failed
	}
	f.took = time.Since(f.log.start)
	f.bar.end()
	if f.log.err != nil {
		return f.log.err
	}
	sum, err := hashFile(ctx, file, f.offer.Bytes, errs)
	if err == nil && sum != f.offer.SHA256 {
		err = fmt.Errorf("SHA-256 is %s, and serve's file had %s: it was changed while it was read", sum, f.offer.SHA256)
	}
	return err
}

// part reads a part and writes it, as often as is allowed.
func (f *fetcher) part(ctx context.Context, n int, file *os.File) (again int, err error) {
	for ; ; again++ {
		err = f.once(ctx, n, file)
		_, refused := errors.AsType[*statusError](err)
		if err == nil || refused || ctx.Err() != nil || again+1 >= f.attempts || !f.source.repeatable() {
			return again, err
		}
	}
}

func (f *fetcher) once(ctx context.Context, n int, file *os.File) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	offset, size, count := f.offer.part(n)
	blocks, err := f.blocks.take(ctx, count)
	if err != nil {
		return err
	}
	slices.Sort(blocks) // neighbours are read as one
	give := func() { f.blocks.give(blocks) }
	p, err := f.source.part(ctx, n)
	if err != nil {
		give()
		return err
	}
	start := time.Now()
	held, err := f.node.Hold(p)
	if err == nil {
		defer held.Close()
		err = held.Fetch(ctx, blocks)
	}
	took := time.Since(start)
	if err != nil {
		e := fileEvent{Event: lease.CauseOf(err).String(), Request: p.RemoteRequestID, Part: &n, Seconds: round(took.Seconds()), Error: err.Error()}
		if ctx.Err() == nil { // else it is told once, in the end
			f.log.say(e, "part %d of %d: %v", n+1, f.offer.Parts, err)
		}
		if errors.Is(err, nixlgo.ErrQuarantined) { // a READ may still write them
			f.settling.Go(func() {
				select {
				case <-held.Settled():
					give()
				case <-ctx.Done():
				}
			})
			return err
		}
		give()
		return err
	}
	defer give()
	left := size
	for i, b := range blocks {
		bytes := f.node.Block(0, b)
		bytes = bytes[:min(left, int64(len(bytes)))]
		if _, err := file.WriteAt(bytes, offset+int64(i)*int64(f.offer.BlockBytes)); err != nil {
			return err
		}
		left -= int64(len(bytes))
	}
	f.bar.add(size)
	e := fileEvent{Event: "verified", Request: p.RemoteRequestID, Part: &n, Blocks: count, Bytes: size, Seconds: round(took.Seconds()), GBs: gbs(size, took)}
	slot := "no slot"
	if p.Lease != nil {
		slot = fmt.Sprintf("slot %d held its nonce", p.Lease.Slot)
	}
	f.log.say(e, "part %d of %d: %s in %.3f s, %.2f GB/s, %s", n+1, f.offer.Parts, byteSize(size), took.Seconds(), e.GBs, slot)
	return nil
}
