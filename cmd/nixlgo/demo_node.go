package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
)

// nodeConfig is what a demo process is started with.
type nodeConfig struct {
	Name       string
	Library    string
	KV         string // file of KV bytes; empty: the dump built in
	Layers     int
	Blocks     int // of the node
	BlockBytes int
	Lease      time.Duration
	Trace      bool // report what a report needs, too
}

// command tells a demo process what to do. Commands run concurrently; each is answered by an event of the same ID.
type command struct {
	Cmd    string        `json:"cmd"` // publish, hold, fetch, resume, mark, stats
	ID     string        `json:"id,omitempty"`
	Blocks []int         `json:"blocks,omitempty"`
	Seed   int           `json:"seed,omitempty"`   // publish: which part of the KV bytes
	Params *lease.Params `json:"params,omitempty"` // hold, fetch
	Pause  bool          `json:"pause,omitempty"`  // fetch: stop between the block READ and the check until resume
}

// event is what a demo process reports.
type event struct {
	Event   string        `json:"event"` // ready, published, freed, holding, paused, fetched, refused, stats, marked, error; or of a trace
	At      time.Time     `json:"at"`
	Node    string        `json:"node,omitempty"`
	ID      string        `json:"id,omitempty"`
	Params  *lease.Params `json:"params,omitempty"`
	SHA256  []string      `json:"sha256,omitempty"` // per block and layer, block-major
	Bytes   int           `json:"bytes,omitempty"`
	Seconds float64       `json:"seconds,omitempty"`
	Reason  string        `json:"reason,omitempty"` // freed: how the lease ended; refused: the typed error
	Error   string        `json:"error,omitempty"`
	// Refused: bytes that are not zero in the blocks of a refused fetch.
	LeftBehind int `json:"left_behind,omitempty"`
	// Freed: seconds since the last mark, on the process's own clock.
	SinceMark float64 `json:"since_mark,omitempty"`

	Library string        `json:"library,omitempty"`
	PID     int           `json:"pid,omitempty"`
	Stats   *nixlgo.Stats `json:"stats,omitempty"`
}

// demoNode is one demo process: a Node driven by commands on stdin.
type demoNode struct {
	cfg  nodeConfig
	node *nixlgo.Node
	kv   []byte

	mu     sync.Mutex
	out    *json.Encoder
	held   map[string]*nixlgo.Held
	mark   time.Time
	pause  string // the request whose check is to wait; empty: none
	resume chan struct{}
	grants map[int64]time.Time // by nonce, for the trace
}

func newDemoNode() *cobra.Command {
	var cfg nodeConfig
	c := &cobra.Command{
		Use:    "demo-node",
		Short:  "One process of the demo, driven by JSON lines on stdin",
		Hidden: true,
		Args:   noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDemoNode(cmd.Context(), cfg, cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&cfg.Name, "name", "", "what this process calls itself")
	f.StringVar(&cfg.Library, "library", "", "path of libnixl_capi.so")
	f.StringVar(&cfg.KV, "kv", "", "file of KV bytes")
	f.IntVar(&cfg.Layers, "layers", 1, "layers")
	f.IntVar(&cfg.Blocks, "blocks", 1, "blocks of this node")
	f.IntVar(&cfg.BlockBytes, "block-bytes", 1, "bytes of a block of one layer")
	f.DurationVar(&cfg.Lease, "lease", time.Second, "lease duration")
	f.BoolVar(&cfg.Trace, "trace", false, "report grants, renewals and the parts of a fetch")
	return c
}

func runDemoNode(ctx context.Context, cfg nodeConfig, in io.Reader, out io.Writer) error {
	d := &demoNode{cfg: cfg, out: json.NewEncoder(out), held: map[string]*nixlgo.Held{}, resume: make(chan struct{}), grants: map[int64]time.Time{}}
	var err error
	if d.kv, err = loadKV(cfg.KV, cfg.BlockBytes); err != nil {
		return err
	}
	lc := lease.DefaultConfig()
	lc.Duration = cfg.Lease
	d.node, err = nixlgo.New(nixlgo.Config{
		Layers: cfg.Layers, Blocks: cfg.Blocks, BlockBytes: cfg.BlockBytes, Lease: lc, Library: cfg.Library,
		Trace:  d.trace(),
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	if err != nil {
		return err
	}
	defer d.node.Close()
	ctx, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	work.Go(func() { d.node.Run(ctx) })
	if cfg.Trace {
		work.Go(func() { d.watchRenewals(ctx, lc.Extension()) })
	}
	d.emit(event{Event: "ready", Library: nixl.Loaded().Path, PID: os.Getpid()})

	lines := bufio.NewScanner(in) // ends with the parent
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var c command
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			return fmt.Errorf("command %q: %w", lines.Text(), err)
		}
		work.Go(func() { d.do(ctx, c) })
	}
	return lines.Err()
}

func (d *demoNode) do(ctx context.Context, c command) {
	switch c.Cmd {
	case "publish":
		d.publish(ctx, c)
	case "hold":
		h, err := d.node.Hold(c.Params)
		if err != nil {
			d.emit(event{Event: "error", ID: c.ID, Error: err.Error()})
			return
		}
		d.mu.Lock()
		d.held[c.ID] = h
		d.mu.Unlock()
		d.emit(event{Event: "holding", ID: c.ID})
	case "fetch":
		d.fetch(ctx, c)
	case "resume":
		d.resume <- struct{}{}
	case "mark":
		d.mu.Lock()
		d.mark = time.Now()
		d.mu.Unlock()
		d.emit(event{Event: "marked", ID: c.ID})
	case "stats":
		s := d.node.Stats()
		d.emit(event{Event: "stats", ID: c.ID, Stats: &s})
	default:
		d.emit(event{Event: "error", ID: c.ID, Error: fmt.Sprintf("unknown command %q", c.Cmd)})
	}
}

func (d *demoNode) publish(ctx context.Context, c command) {
	size := d.cfg.BlockBytes
	for i, b := range c.Blocks {
		for l := range d.cfg.Layers {
			fill(d.node.Block(l, b), d.kv, ((c.Seed*len(c.Blocks)+i)*d.cfg.Layers+l)*size)
		}
	}
	sums := d.hash(c.Blocks)
	p, err := d.node.Publish(ctx, c.ID, c.Blocks, 0)
	if err != nil {
		d.emit(event{Event: "error", ID: c.ID, Error: err.Error()})
		return
	}
	start := time.Now()
	d.emit(event{Event: "published", ID: c.ID, Params: p.Params(), SHA256: sums})
	select {
	case <-p.Done():
	case <-ctx.Done():
		return
	}
	d.mu.Lock()
	mark := d.mark
	d.mu.Unlock()
	e := event{Event: "freed", ID: c.ID, Reason: p.Reason().String(), Seconds: time.Since(start).Seconds()}
	if !mark.IsZero() {
		e.SinceMark = time.Since(mark).Seconds()
	}
	d.emit(e)
}

func (d *demoNode) fetch(ctx context.Context, c command) {
	d.mu.Lock()
	h := d.held[c.ID]
	if c.Pause {
		d.pause = c.ID
	}
	d.mu.Unlock()
	if d.cfg.Trace {
		d.emit(event{Event: traceFetching, ID: c.ID})
	}
	start := time.Now()
	var err error
	if h == nil {
		err = d.node.Fetch(ctx, c.Params, c.Blocks)
	} else {
		err = h.Fetch(ctx, c.Blocks)
	}
	took := time.Since(start).Seconds()
	if err == nil {
		d.emit(event{Event: "fetched", ID: c.ID, SHA256: d.hash(c.Blocks), Seconds: took, Bytes: len(c.Blocks) * d.cfg.Layers * d.cfg.BlockBytes})
		return
	}
	e := event{Event: "refused", ID: c.ID, Reason: lease.CauseOf(err).String(), Error: err.Error(), Seconds: took}
	if errors.Is(err, nixlgo.ErrQuarantined) {
		e.Reason = "quarantined"
	}
	for _, b := range c.Blocks {
		for l := range d.cfg.Layers {
			for _, v := range d.node.Block(l, b) {
				if v != 0 {
					e.LeftBehind++
				}
			}
		}
	}
	d.emit(e)
}

// beforeCheck is the long forward pass of the lapse scene: it holds up the reader's step, heartbeats included, until the
// parent resumes it.
func (d *demoNode) beforeCheck(string, int, int) {
	d.mu.Lock()
	pause := d.pause
	d.pause = ""
	d.mu.Unlock()
	if pause != "" {
		d.emit(event{Event: "paused", ID: pause})
		<-d.resume
	}
}

func (d *demoNode) hash(blocks []int) []string {
	var out []string
	for _, b := range blocks {
		for l := range d.cfg.Layers {
			sum := sha256.Sum256(d.node.Block(l, b))
			out = append(out, hex.EncodeToString(sum[:]))
		}
	}
	return out
}

func (d *demoNode) emit(e event) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e.Node = d.cfg.Name
	if e.At.IsZero() {
		e.At = time.Now()
	}
	if err := d.out.Encode(e); err != nil {
		fmt.Fprintln(os.Stderr, "demo process", d.cfg.Name, "cannot report:", err)
	}
}

// trace are the hooks that the demo needs, and those that its report needs.
func (d *demoNode) trace() rdma.Trace {
	t := rdma.Trace{BeforeCheck: d.beforeCheck}
	if !d.cfg.Trace {
		return t
	}
	t.Lease.Granted = func(g lease.Grant) {
		now := time.Now()
		d.mu.Lock()
		d.grants[g.Nonce] = now
		d.mu.Unlock()
		d.emit(event{Event: traceGranted, ID: g.Request, At: now})
	}
	part := func(name string, p lease.Pull) func(error) {
		start := time.Now()
		return func(error) { d.emit(event{Event: name, ID: p.RemoteRequest, Seconds: time.Since(start).Seconds()}) }
	}
	t.Read = func(p lease.Pull, _ int64) func(error) { return part(traceRead, p) }
	t.Verify = func(p lease.Pull) func(error) { return part(traceChecked, p) }
	return t
}

// watchRenewals reports them. It finds them by looking at the deadlines again and again: a renewal sets the deadline to its
// own time plus the extension, so the time that it reports is exact.
func (d *demoNode) watchRenewals(ctx context.Context, extension time.Duration) {
	lives := map[int64]time.Duration{} // from the grant to the deadline, by nonce
	for pause := 5 * time.Millisecond; sleep(ctx, pause) == nil; {
		start := time.Now()
		for _, l := range d.node.Leases() {
			life, known := lives[l.Nonce]
			now := l.Age + l.Left
			if !l.Granted || known && now <= life {
				continue
			}
			lives[l.Nonce] = now
			if known {
				d.mu.Lock()
				granted := d.grants[l.Nonce]
				d.mu.Unlock()
				d.emit(event{Event: traceRenewed, ID: l.Request, At: granted.Add(now - extension)})
			}
		}
		// A twentieth of a core, unless heartbeats come too fast for that.
		pause = min(max(5*time.Millisecond, 20*time.Since(start)), extension/16)
	}
}

// fill tiles dst with src from offset on.
func fill(dst, src []byte, offset int) {
	for n := 0; n < len(dst); {
		n += copy(dst[n:], src[(offset+n)%len(src):])
	}
}
