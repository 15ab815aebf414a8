// Benchread compares reads of KV blocks: Held.Fetch, with and without verification, and the same READ posted through
// NIXL's own Python package as vLLM posts it. Owner and reader are two processes, over TCP and over shared memory, and the
// alternatives run interleaved in one run, in processes that are replaced often: two connections of one kind can differ more
// than two ways of using them. Rates and ratios are those of the fastest repeats; the medians are given beside them.
//
//	go run ./cgo_test/benchread [-quick]
//
// The peer needs a folder with the packages nixl-cu12 and numpy for python3 (-python). Its processes get UCX_TLS and
// otherwise the environment of this one: none of the defaults that package nixl sets.
package main

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/nixlgo/nixlgo/cgo_test/measure"
)

//go:embed peer.py
var peerScript string

// shape is the memory of one process and the request read from it.
type shape struct {
	Layers     int
	NodeBlocks int // per layer
	Blocks     int // per layer, of a request
	BlockBytes int
}

func (s shape) bytes() int { return s.Layers * s.Blocks * s.BlockBytes }

type options struct {
	tls     string
	fresh   int // times that new processes are measured
	repeats int // of each time
	fetches int // per repeat; the shortest counts
	python  string
	env     string
	params  string
	blocks  string
	limit   time.Duration
}

func main() {
	var o options
	quick := flag.Bool("quick", false, "a few seconds, for figures that only show that it works")
	flag.StringVar(&o.tls, "tls", "tcp tcp,shm,cma,self", "UCX transports (UCX_TLS), each measured on its own")
	flag.StringVar(&o.blocks, "blocks", "65536 16384 4096", "bytes of a block, each measured on its own")
	flag.IntVar(&o.fresh, "fresh", 4, "how many times new processes are started and measured")
	flag.IntVar(&o.repeats, "repeats", 4, "interleaved repeats with the same processes; three times as many of requests of a few MiB")
	flag.IntVar(&o.fetches, "fetches", 3, "reads per repeat, of which the shortest counts")
	flag.StringVar(&o.python, "python", "", "folder with nixl-cu12 and numpy for python3 (default: .nixl-python at the module root)")
	flag.StringVar(&o.env, "env", "", "more environment of our processes, such as 'A=1 B=2'")
	flag.StringVar(&o.params, "params", "", "backend parameters of our processes, such as 'num_threads=2'")
	flag.DurationVar(&o.limit, "limit", 10*time.Minute, "give up after this time")
	role := flag.String("role", "", "internal: owner, reader or unverified, driven on stdin")
	size := flag.Int("size", 0, "internal: bytes of a block")
	flag.Parse()
	if *quick {
		o.fresh, o.repeats, o.fetches, o.blocks = 1, 1, 1, "16384"
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	var err error
	if *role != "" {
		err = runNode(ctx, newShape(*size), *role != "unverified", pairs(o.params))
	} else {
		err = run(ctx, o)
	}
	cancel()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-read:", err)
		os.Exit(1)
	}
}

// newShape is 32 layers, and requests of 32 blocks per layer out of 64: the blocks of neighbouring layers are apart.
func newShape(blockBytes int) shape {
	return shape{Layers: 32, NodeBlocks: 64, Blocks: 32, BlockBytes: blockBytes}
}

// pairs parses "A=1 B=2".
func pairs(s string) map[string]string {
	m := map[string]string{}
	for _, p := range strings.Fields(s) {
		k, v, _ := strings.Cut(p, "=")
		m[k] = v
	}
	return m
}

func run(ctx context.Context, o options) error {
	ctx, cancel := context.WithTimeoutCause(ctx, o.limit, fmt.Errorf("not done within %s", o.limit))
	defer cancel()
	root, err := measure.Root()
	if err != nil {
		return err
	}
	o.python = cmp.Or(o.python, filepath.Join(root, ".nixl-python"))
	if _, err := os.Stat(filepath.Join(o.python, "nixl_cu12")); err != nil {
		return fmt.Errorf("the peer's Python packages: %w (make %s)", err, ".nixl-python")
	}
	limits, err := newLimits()
	if err != nil {
		return err
	}
	defer limits.conn.Close()
	report := measure.NewReport("bench-read")
	for _, tls := range strings.Fields(o.tls) {
		for _, text := range strings.Fields(o.blocks) {
			size, err := strconv.Atoi(text)
			if err != nil || size < 8 || size%8 != 0 {
				return fmt.Errorf("-blocks: %q is no multiple of 8 bytes", text)
			}
			b := &bench{options: o, shape: newShape(size), transport: tls, orders: []*order{{name: "contiguous"}, {name: "shuffled", shuffled: true}}}
			for range o.fresh {
				if err := errors.Join(b.run(ctx, limits), b.end()); err != nil {
					return fmt.Errorf("UCX_TLS=%s, blocks of %d bytes: %w", tls, size, err)
				}
			}
			b.report(report)
		}
	}
	return report.Finish(os.Stdout)
}

// bench is one transport and one block size with its processes.
type bench struct {
	options
	shape
	transport                   string
	orders                      []*order
	owner, verified, unverified *process
	nixlOwner, nixlReader       *process
	all                         []*process
}

// order is the way in which the blocks of a request lie, with what was measured.
type order struct {
	name     string
	shuffled bool
	samples  []measure.Sample
	checks   []float64 // seconds of lease checks
}

// The ways of reading, in the order of their samples.
const (
	fetched = iota
	fetchedUnverified
	byNIXL
	memcpy
	loopback
)

func (b *bench) start() error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	env := append(os.Environ(), "UCX_TLS="+b.transport)
	ours := func(role string) *exec.Cmd {
		cmd := exec.Command(exe, "-role", role, "-size", strconv.Itoa(b.BlockBytes), "-params", b.params)
		cmd.Env = append(slices.Clone(env), strings.Fields(b.env)...)
		return cmd
	}
	peer := func(role string) *exec.Cmd {
		cmd := exec.Command("python3", "-c", peerScript, role, strconv.Itoa(b.Layers), strconv.Itoa(b.NodeBlocks), strconv.Itoa(b.BlockBytes))
		cmd.Env = append(slices.Clone(env), "PYTHONPATH="+b.python)
		return cmd
	}
	for _, c := range []struct {
		name string
		to   **process
		cmd  *exec.Cmd
	}{
		{"owner", &b.owner, ours("owner")}, {"reader", &b.verified, ours("reader")}, {"unverified reader", &b.unverified, ours("unverified")},
		{"NIXL owner", &b.nixlOwner, peer("owner")}, {"NIXL reader", &b.nixlReader, peer("reader")},
	} {
		p, err := spawn(c.name, c.cmd)
		if err != nil {
			return err
		}
		*c.to = p
		b.all = append(b.all, p)
	}
	return nil
}

func (b *bench) end() (err error) {
	for _, p := range b.all {
		err = errors.Join(err, p.End())
	}
	b.all = nil
	return err
}

// run measures every order with new processes.
func (b *bench) run(ctx context.Context, limits *limits) error {
	if err := b.start(); err != nil {
		return err
	}
	owner, err := b.nixlOwner.call(ctx, command{Cmd: "fill"})
	if err != nil {
		return err
	}
	if _, err := b.nixlReader.call(ctx, command{Cmd: "connect", Metadata: owner.Metadata, Base: owner.Base}); err != nil {
		return err
	}
	repeats := b.repeats
	if b.bytes() < large {
		repeats *= 3
	}
	for _, o := range b.orders {
		local, remote := b.request(o.shuffled)
		ways := []measure.Alternative{
			fetched:           {Name: "fetch", Run: b.fetch(b.verified, local, remote, &o.checks)},
			fetchedUnverified: {Name: "unverified", Run: b.fetch(b.unverified, local, remote, nil)},
			byNIXL:            {Name: "nixl", Run: b.nixl(local, remote)},
			memcpy:            {Name: "memcpy", Run: limits.memcpy},
			loopback:          {Name: "loopback", Run: limits.loopback},
		}
		// The first READ of a connection, of a memory range and of a process pays for what the later ones find done. It
		// also leaves every process stopped.
		for _, w := range ways {
			if _, err := w.Run(ctx); err != nil {
				return err
			}
		}
		samples, err := measure.Interleave(ctx, repeats, ways...)
		if err != nil {
			return err
		}
		if o.samples == nil {
			o.samples = samples
			continue
		}
		for i, s := range samples {
			o.samples[i].Times = append(o.samples[i].Times, s.Times...)
		}
	}
	return nil
}

// large is the size of a request from which on the check may cost a twentieth of its time at most.
const large = 16 << 20

func (b *bench) report(r *measure.Report) {
	transport, limit := "tcp", loopback
	if strings.Contains(b.transport, "shm") {
		transport, limit = "shm", memcpy
	}
	for _, o := range b.orders {
		name := fmt.Sprintf("%s, %d × %d × %d KiB, %s", transport, b.Layers, b.Blocks, b.BlockBytes>>10, o.name)
		rate := func(way int) float64 { return o.samples[way].GBs(b.bytes()) }
		row := func(name string, peer int) measure.Row {
			times := o.samples[fetched].Times
			return measure.Row{Name: name, Unit: "GB/s", Ours: rate(fetched), Peer: rate(peer), Ratio: rate(fetched) / rate(peer), Repeats: len(times), Spread: o.samples[fetched].Spread()}
		}
		medians := func(peer int) float64 {
			return float64(o.samples[peer].Median()) / float64(o.samples[fetched].Median())
		}
		reads, check := row(name, byNIXL), slices.Min(o.checks)
		least := 1.0
		switch {
		case transport == "tcp" && b.BlockBytes >= 64<<10 && o.shuffled:
			least = 1.4
		case transport == "tcp" && b.BlockBytes >= 64<<10:
			least = 2
		}
		reads.Aim(fmt.Sprintf("≥ %g", least), reads.Ratio >= least)
		of := o.samples[limit].GBs(limitBytes)
		reads.Extra = map[string]float64{"median_ratio": medians(byNIXL), "peer_spread": o.samples[byNIXL].Spread(),
			"memcpy": o.samples[memcpy].GBs(limitBytes), "tcp_loopback": o.samples[loopback].GBs(limitBytes), "of_" + o.samples[limit].Name: rate(fetched) / of}
		r.Add(reads)
		checked := row(name+", verified ÷ not", fetchedUnverified)
		if b.bytes() >= large {
			checked.Aim("≥ 0.95", checked.Ratio >= 0.95)
		}
		// What the check costs is less than the noise between two ways of reading: check_us and check_share tell it directly.
		checked.Extra = map[string]float64{"median_ratio": medians(fetchedUnverified), "check_us": 1e6 * check,
			"check_share": check / o.samples[fetched].Min().Seconds()}
		r.Add(checked)
	}
}

// request picks the blocks of a request on both sides.
func (b *bench) request(shuffled bool) (local, remote []int) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, side := range []*[]int{&local, &remote} {
		*side = make([]int, b.Blocks)
		for i := range *side {
			(*side)[i] = i
		}
		if shuffled {
			*side = r.Perm(b.NodeBlocks)[:b.Blocks]
		}
	}
	return local, remote
}

// fetch reads a request through Node, with one of our readers. What its lease checks took is appended to checks.
func (b *bench) fetch(reader *process, local, remote []int, checks *[]float64) func(context.Context) (time.Duration, error) {
	return b.shortest(b.owner, reader, func(ctx context.Context) (float64, error) {
		published, err := b.owner.call(ctx, command{Cmd: "publish", Local: remote})
		if err != nil {
			return 0, err
		}
		a, err := reader.call(ctx, command{Cmd: "fetch", Params: published.Params, Local: local})
		if err != nil {
			return 0, err
		}
		if checks != nil {
			*checks = append(*checks, a.Check)
		}
		_, err = b.owner.call(ctx, command{Cmd: "freed"})
		return a.Seconds, err
	})
}

// nixl reads it through NIXL's Python package.
func (b *bench) nixl(local, remote []int) func(context.Context) (time.Duration, error) {
	return b.shortest(b.nixlOwner, b.nixlReader, func(ctx context.Context) (float64, error) {
		a, err := b.nixlReader.call(ctx, command{Cmd: "read", Local: local, Remote: remote})
		if err != nil {
			return 0, err
		}
		_, err = b.nixlOwner.call(ctx, command{Cmd: "complete"})
		return a.Seconds, err
	})
}

// shortest wakes two processes for a few reads and returns the time of the shortest.
func (b *bench) shortest(owner, reader *process, read func(context.Context) (float64, error)) func(context.Context) (time.Duration, error) {
	return func(ctx context.Context) (time.Duration, error) {
		if err := errors.Join(owner.cont(), reader.cont()); err != nil {
			return 0, err
		}
		var best float64
		for i := range b.fetches {
			seconds, err := read(ctx)
			if err != nil {
				return 0, err
			}
			if i == 0 || seconds < best {
				best = seconds
			}
		}
		return time.Duration(best * float64(time.Second)), errors.Join(owner.stop(), reader.stop())
	}
}
