package failures

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/cgo_test/child"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

const (
	blocks     = bigs*big + smalls*small
	blockBytes = 64 << 10
	// small and big are the blocks of a request: big is 32 MiB, enough to be met in the middle of its READ.
	small, big   = 4, 512
	smalls, bigs = 16, 4 // requests of an owner at once

	leaseTime        = 2 * time.Second
	readTimeout      = 2 * time.Second
	handshakeTimeout = 1500 * time.Millisecond
	patience         = 30 * time.Second // for what must happen at some time; nothing is measured against it
)

// setup configures a child.
type setup struct {
	Engine        string
	Host          string
	Port          int
	BlockBytes    int
	Compatibility string
	ReadTimeout   time.Duration
	Memlock       *uint64 // RLIMIT_MEMLOCK
}

// command is a line to a child. It answers with lines of the same number: one, or as many as Do says.
type command struct {
	Number int
	Do     string
	// publish: published, freed. fetch: checking if Halt, verified if HaltLate, done, settled if in quarantine. release, go, spoil,
	// exhaust, relax: ok. stats: stats.

	Request string
	Params  *lease.Params
	Blocks  []int
	Tag     byte // what every byte of the request is
	Halt    bool // wait for "go" between block and slot READ
	// HaltLate: wait for "go" between slot READ and read-complete.
	HaltLate bool
	Pid      int // once the block READ is posted, send Signal to this process
	Signal   syscall.Signal
	Left     int // exhaust: file descriptors left free
}

// answer is a line of a child.
type answer struct {
	Number int
	Kind   string
	Port   int
	Engine string
	Params *lease.Params

	Cause       string // of a fetch: the name of a lease.Cause, empty for a verified one, untyped for an error that is none
	Quarantined bool
	Error       string
	First       byte
	Wrong       int // bytes of a verified fetch that are not the request's, or bytes that a failed one left

	Reason lease.Reason
	Held   time.Duration // from Publish to its end on the owner's clock

	Stats           nixlgo.Stats
	Goroutines, FDs int
}

type worker struct {
	node  *nixlgo.Node
	halt  atomic.Pointer[halted]
	late  atomic.Pointer[halted]
	goOn  chan struct{}
	fill  []*os.File // what takes the file descriptors
	files syscall.Rlimit
}

// halted is a fetch that is to wait before its check.
type halted struct {
	number int
	signal func()
}

const childVariable = "NIXLGO_FAILURES_CHILD"

// TestMain leaves by the system call: the exit of libc runs a destructor of the wheel's libnl that crashes under -race.
func TestMain(m *testing.M) {
	if text := os.Getenv(childVariable); text != "" {
		child.Exit("child", runChild(text))
	}
	syscall.Exit(m.Run())
}

func runChild(text string) error {
	var s setup
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return err
	}
	if s.Memlock != nil {
		const rlimitMemlock = 8
		if err := syscall.Setrlimit(rlimitMemlock, &syscall.Rlimit{Cur: *s.Memlock, Max: *s.Memlock}); err != nil {
			return err
		}
	}
	c := &worker{goOn: make(chan struct{})}
	lc := lease.DefaultConfig()
	lc.Duration = leaseTime
	var err error
	c.node, err = nixlgo.New(nixlgo.Config{
		Engine: s.Engine, Host: s.Host, Port: s.Port, Layers: 1, Blocks: blocks, BlockBytes: s.BlockBytes, Lease: lc,
		Compatibility: s.Compatibility, HandshakeTimeout: handshakeTimeout, ReadTimeout: cmp.Or(s.ReadTimeout, readTimeout),
		Trace:  rdma.Trace{BeforeCheck: c.beforeCheck, Verify: c.verify},
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ran := make(chan error, 1)
	go func() { ran <- c.node.Run(ctx) }()
	c.say(answer{Kind: "ready", Port: c.node.Port(), Engine: c.node.Engine()})
	for cmd, err := range child.Commands[command](os.Stdin) {
		if err != nil {
			return err
		}
		go c.do(cmd)
	}
	cancel()
	return errors.Join(<-ran, c.node.Close())
}

func (c *worker) say(a answer) {
	if err := child.Say(a); err != nil {
		fmt.Fprintln(os.Stderr, "child:", err)
	}
}

func (c *worker) do(cmd command) {
	a := answer{Number: cmd.Number, Kind: "ok"}
	var err error
	switch cmd.Do {
	case "publish":
		c.publish(cmd)
		return
	case "fetch":
		c.fetch(cmd)
		return
	case "release":
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		err = c.node.Release(ctx, cmd.Params)
	case "go":
		c.goOn <- struct{}{}
	case "spoil":
		c.write(cmd.Blocks, cmd.Tag)
	case "exhaust":
		err = c.exhaust(cmd.Left)
	case "relax":
		err = c.relax()
	case "stats":
		a.Kind, a.Stats, a.Goroutines = "stats", c.node.Stats(), runtime.NumGoroutine()
		a.FDs, err = openFiles()
	default:
		err = fmt.Errorf("command %q", cmd.Do)
	}
	if err != nil {
		a.Error = err.Error()
	}
	c.say(a)
}

func (c *worker) write(blocks []int, tag byte) {
	for _, b := range blocks {
		p := c.node.Block(0, b)
		for i := range p {
			p[i] = tag
		}
	}
}

// differ counts the bytes that are not tag.
func (c *worker) differ(blocks []int, tag byte) (n int) {
	for _, b := range blocks {
		p := c.node.Block(0, b)
		n += len(p) - bytes.Count(p, []byte{tag})
	}
	return n
}

func (c *worker) publish(cmd command) {
	a := answer{Number: cmd.Number, Kind: "published"}
	c.write(cmd.Blocks, cmd.Tag)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	start := time.Now()
	p, err := c.node.Publish(ctx, cmd.Request, cmd.Blocks, 16*len(cmd.Blocks))
	if err != nil {
		a.Error = err.Error()
		c.say(a)
		return
	}
	a.Params = p.Params()
	c.say(a)
	<-p.Done()
	c.say(answer{Number: cmd.Number, Kind: "freed", Reason: p.Reason(), Held: time.Since(start)})
}

func (c *worker) fetch(cmd command) {
	a := answer{Number: cmd.Number, Kind: "done"}
	ended := make(chan struct{})
	signal := func() {}
	if cmd.Signal != 0 {
		signal = sync.OnceFunc(func() {
			if err := syscall.Kill(cmd.Pid, cmd.Signal); err != nil {
				fmt.Fprintln(os.Stderr, "child: signal:", err)
			}
		})
		go c.whenReading(c.node.Stats().Worker.Reads, ended, signal)
	}
	wait := &halted{cmd.Number, signal}
	if cmd.Halt {
		c.halt.Store(wait)
	}
	if cmd.HaltLate {
		c.late.Store(wait)
	}
	h, err := c.node.Hold(cmd.Params)
	if err == nil {
		err = h.Fetch(context.Background(), cmd.Blocks)
	}
	close(ended)
	c.halt.CompareAndSwap(wait, nil)
	c.late.CompareAndSwap(wait, nil)
	a.Quarantined = errors.Is(err, nixlgo.ErrQuarantined)
	a.First = c.node.Block(0, cmd.Blocks[0])[0]
	if err == nil {
		a.Wrong = c.differ(cmd.Blocks, cmd.Tag)
	} else {
		a.Error, a.Cause = err.Error(), "untyped"
		if cause := lease.CauseOf(err); errors.Is(err, cause.Err()) {
			a.Cause = cause.String()
		}
		if !a.Quarantined {
			a.Wrong = c.differ(cmd.Blocks, 0)
		}
	}
	c.say(a)
	if a.Quarantined {
		<-h.Settled()
		c.say(answer{Number: cmd.Number, Kind: "settled", Wrong: c.differ(cmd.Blocks, 0)})
	}
}

// whenReading calls signal when a block READ is posted. The way over the test process is longer than most READs.
func (c *worker) whenReading(before int64, ended <-chan struct{}, signal func()) {
	for c.node.Stats().Worker.Reads == before {
		select {
		case <-ended: // faster than we looked
			signal()
			return
		default:
			runtime.Gosched()
		}
	}
	signal()
}

// beforeCheck runs on the node's own goroutine between block and slot READ.
func (c *worker) beforeCheck(string, int, int) {
	if h := c.halt.Swap(nil); h != nil {
		h.signal() // if the READ was faster than we looked
		c.say(answer{Number: h.number, Kind: "checking"})
		<-c.goOn
	}
}

// verify halts the node's own goroutine when a check has ended well, before the owner is told.
func (c *worker) verify(lease.Pull) func(error) {
	return func(err error) {
		if err != nil {
			return
		}
		if h := c.late.Swap(nil); h != nil {
			c.say(answer{Number: h.number, Kind: "verified"})
			<-c.goOn
		}
	}
}

// exhaust takes file descriptors until left more can be opened.
func (c *worker) exhaust(left int) error {
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &c.files); err != nil {
		return err
	}
	n, err := openFiles()
	if err != nil {
		return err
	}
	limit := syscall.Rlimit{Cur: uint64(n + 32), Max: c.files.Max}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	for {
		f, err := os.Open(os.DevNull)
		if errors.Is(err, syscall.EMFILE) {
			break
		}
		if err != nil {
			return err
		}
		c.fill = append(c.fill, f)
	}
	if len(c.fill) < left {
		return fmt.Errorf("only %d file descriptors could be taken", len(c.fill))
	}
	for range left {
		c.fill[len(c.fill)-1].Close()
		c.fill = c.fill[:len(c.fill)-1]
	}
	return nil
}

func (c *worker) relax() error {
	for _, f := range c.fill {
		f.Close()
	}
	c.fill = nil
	return syscall.Setrlimit(syscall.RLIMIT_NOFILE, &c.files)
}

func openFiles() (int, error) {
	names, err := os.ReadDir("/proc/self/fd")
	return len(names) - 1, err // less the directory itself
}

// some is n neighbouring blocks.
func some(first, n int) []int {
	b := make([]int, n)
	for i := range b {
		b[i] = first + i
	}
	return slices.Clip(b)
}
