package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nixlgo/nixlgo/nixl"
)

// benchRow is what was measured with one block and batch size.
type benchRow struct {
	shape     transferShape
	transfers int
	perThread int
	raw       rawStats
	leased    *leasedStats // nil: not measured
}

func (r *benchRow) gbSec() float64 {
	return float64(r.shape.bytes()) * float64(r.transfers) / float64(r.raw.total.Nanoseconds())
}

// latency of one block in µs, as nixlbench counts it.
func (r *benchRow) latency() float64 {
	return float64(r.raw.total.Nanoseconds()) / 1e3 / float64(r.perThread) / float64(r.shape.Batch)
}

// benchColumns are nixlbench's, in its order, widths and precision. JSON and CSV have the names that NVIDIA's cloudai gives
// them, as far as it does.
var benchColumns = []column{
	{"block_size", "Block Size (B)", 20, ""}, {"batch_size", "Batch Size", 15, ""}, {"bw_gb_sec", "B/W (GB/Sec)", 15, "%.6f"},
	{"avg_lat", "Avg Lat. (us)", 15, "%.1f"}, {"avg_prep_us", "Avg Prep (us)", 15, "%.1f"}, {"p99_prep_us", "P99 Prep (us)", 15, "%.1f"},
	{"avg_post_us", "Avg Post (us)", 15, "%.1f"}, {"p99_post_us", "P99 Post (us)", 15, "%.1f"},
	{"avg_tx_us", "Avg Tx (us)", 15, "%.1f"}, {"p99_tx_us", "P99 Tx (us)", 15, "%.1f"},
}

// ownColumns stand to the right of them, leasedColumns to the right of those.
var (
	ownColumns = []column{
		{"p50_post_us", "P50 Post (us)", 15, "%.1f"}, {"p50_tx_us", "P50 Tx (us)", 15, "%.1f"},
		{"p50_xfer_us", "P50 Xfer (us)", 15, "%.1f"}, {"p99_xfer_us", "P99 Xfer (us)", 15, "%.1f"},
	}
	leasedColumns = []column{
		{"fetch_gb_sec", "Fetch (GB/Sec)", 16, "%.6f"}, {"p50_fetch_us", "P50 Fetch (us)", 16, "%.1f"}, {"p99_fetch_us", "P99 Fetch (us)", 16, "%.1f"},
		{"verify_us", "Verify (us)", 15, "%.1f"}, {"verify_percent", "Verify (%)", 15, "%.2f"}, {"margin_s", "Margin (s)", 15, "%.3f"},
	}
)

func (c *benchConfig) columns() []column {
	all := slices.Concat(benchColumns, ownColumns)
	if c.leaseIterations > 0 {
		all = append(all, leasedColumns...)
	}
	return all
}

// values of a row, one for each column.
func (r *benchRow) values() []any {
	s := &r.raw
	v := []any{r.shape.BlockBytes, r.shape.Batch, r.gbSec(), r.latency(), s.prep.mean(), s.prep.at(0.99), s.post.mean(), s.post.at(0.99), s.tx.mean(), s.tx.at(0.99),
		s.post.at(0.5), s.tx.at(0.5), s.xfer.at(0.5), s.xfer.at(0.99)}
	if l := r.leased; l != nil {
		v = append(v, l.gbSec(), l.fetch.at(0.5), l.fetch.at(0.99), l.verify.at(0.5), 100*l.verifyShare(), l.margin.Seconds())
	}
	return v
}

// counts are the transfers of a row and its warm-up, as nixlbench shortens them for large blocks and shares them out.
func (c *benchConfig) counts(block int) (transfers, warmup, leased int) {
	transfers, warmup, leased = c.iterations, c.warmup, c.leaseIterations
	if block > 1<<20 {
		transfers, warmup, leased = transfers/c.largeFactor, warmup/c.largeFactor, min(leased, max(leased/c.largeFactor, 10))
	}
	up := func(n int) int { return (n + c.threads - 1) / c.threads * c.threads }
	return max(up(transfers), c.threads), up(warmup), leased
}

// shapes are the sizes to measure, block by block.
func (c *benchConfig) shapes() (out []transferShape) {
	if c.workload.model != "" || c.workload.file != "" {
		s, _ := c.workload.shape() // complete has seen it
		return []transferShape{s}
	}
	for block := c.startBlock; block <= c.maxBlock; block *= 2 {
		for batch := c.startBatch; batch <= c.maxBatch; batch *= 2 {
			out = append(out, transferShape{1, batch, block})
		}
	}
	return out
}

func (c *benchConfig) run(ctx context.Context, out, errs io.Writer) (err error) {
	start := time.Now()
	var file *reportFile
	if c.report != "" {
		if file, err = createReport(c.report); err != nil {
			return err
		}
		defer file.discard()
	}
	addr := c.connect
	if addr == "" {
		target, serr := c.startTarget(ctx)
		if serr != nil {
			return serr
		}
		addr = target.addr
		defer func() { err = errors.Join(err, target.end()) }()
	}
	conn, err := (&net.Dialer{Timeout: c.timeout}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("no target at %s: %w (start it with nixlgo bench --listen)", addr, err)
	}
	l := newLink(ctx, "the target at "+addr, conn, c.timeout)
	defer l.close()
	m, err := c.open(l)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.close()) }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go l.keepAlive(ctx)

	if c.format == formatText {
		fmt.Fprintf(out, "%s over %s; initiator: %s; target: %s; threads: %d; pipeline depth: %d\n\n", c.opType, c.backend, hostFacts(), m.target.Host, c.threads, c.depth)
	}
	shapes := c.shapes()
	var total int64
	for _, s := range shapes {
		transfers, warmup, leased := c.counts(s.BlockBytes)
		total += int64(transfers + warmup + leased)
	}
	bar := newProgress(errs, "bench", total, false)
	defer bar.end()
	rows := newTable(bar.lines(out), c.format, c.columns())
	var measured []benchRow
	for _, s := range shapes {
		row, err := m.measure(ctx, s, bar)
		if err != nil {
			return fmt.Errorf("batch of %s of %s: %w", many(s.Batch, "block"), many(s.BlockBytes, "byte"), err)
		}
		measured = append(measured, row)
		rows.row(row.values()...)
	}
	if _, err := l.call(benchCall{Op: opDone}, "end"); err != nil {
		return err
	}
	if file != nil {
		if err := file.write(c.page(measured, m.target, start)); err != nil {
			return err
		}
	}
	return rows.end()
}

// targetProcess is the target of a bench on one machine.
type targetProcess struct {
	cmd  *exec.Cmd
	addr string
}

// startTarget starts a target of its own and waits until it says where it listens.
func (c *benchConfig) startTarget(ctx context.Context) (*targetProcess, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	t := &targetProcess{cmd: exec.CommandContext(ctx, exe, "bench-target", "--timeout", c.timeout.String(), "--library", c.library)}
	t.cmd.Stderr = os.Stderr
	out, err := t.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := t.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the target process: %w", err)
	}
	said := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(out).ReadString('\n')
		said <- strings.TrimSpace(line)
	}()
	select {
	case t.addr = <-said:
	case <-time.After(c.timeout):
		err = fmt.Errorf("waited %s in vain for the target process %d to listen (--timeout)", c.timeout, t.cmd.Process.Pid)
	}
	if err == nil && t.addr == "" {
		err = fmt.Errorf("the target process ended before it listened; its own output says why")
	}
	if err != nil {
		t.cmd.Process.Kill()
		return nil, errors.Join(err, t.end())
	}
	return t, nil
}

// end waits for the process, which ends with its connection. How it ended is said on standard error.
func (t *targetProcess) end() error {
	hung := time.AfterFunc(10*time.Second, func() { t.cmd.Process.Kill() })
	defer hung.Stop()
	err := t.cmd.Wait()
	if _, exited := errors.AsType[*exec.ExitError](err); exited {
		return nil
	}
	return err
}

// newBenchTarget is the target process: --listen at a free port of the loopback, which it prints.
func newBenchTarget() *cobra.Command {
	var timeout time.Duration
	var library string
	c := &cobra.Command{
		Use: "bench-target", Short: "The target of bench on one machine", Hidden: true, Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, err := nixl.Load(library); err != nil {
				return err
			}
			err := listenForBench(cmd.Context(), "127.0.0.1:0", timeout,
				func(at net.Addr) { fmt.Fprintln(cmd.OutOrStdout(), at) }, func(err error) { fmt.Fprintln(cmd.ErrOrStderr(), err) })
			if errors.Is(err, errPeerEnded) { // the initiator, which has said why
				return nil
			}
			return err
		},
	}
	c.Flags().DurationVar(&timeout, "timeout", time.Minute, "longest wait for the initiator")
	libraryFlag(c.Flags(), &library)
	return c
}

// measurement is an initiator that is connected to its target.
type measurement struct {
	*benchConfig
	link     *link
	raw      *rawBench
	node     *benchNode
	leased   *leasedBench
	target   benchAnswer
	notified int // transfers that the target heard of
}

// open makes both sides ready for raw transfers.
func (c *benchConfig) open(l *link) (_ *measurement, err error) {
	m := &measurement{benchConfig: c, link: l}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	size := c.threads * c.maxBatch * c.maxBlock
	m.target, err = l.call(benchCall{Op: opOpen, Protocol: benchProtocol, Backend: c.backend, Devices: c.devices, Bytes: size, Lease: c.lease, Wait: c.timeout},
		"open its agent with a buffer of "+byteSize(int64(size)))
	if err != nil {
		return nil, err
	}
	op := nixl.Write
	if c.opType == "READ" {
		op = nixl.Read
	}
	m.raw = &rawBench{op: op, threads: c.threads, depth: c.depth, prepared: c.prepared, recreate: c.recreate, wait: c.timeout, remoteAddr: m.target.Addr}
	if m.raw.local, err = openEndpoint(c.backend, size, initiatorByte); err != nil {
		return nil, err
	}
	if m.raw.remote, err = m.raw.local.agent.LoadRemote(m.target.Metadata); err != nil {
		return nil, fmt.Errorf("metadata of %s: %w", l.peer, err)
	}
	return m, nil
}

func (m *measurement) close() error {
	err := m.node.close()
	if m.raw != nil && m.raw.local != nil {
		err = errors.Join(err, m.raw.local.close())
	}
	return err
}

// measure makes one row.
func (m *measurement) measure(ctx context.Context, s transferShape, bar *progress) (r benchRow, err error) {
	transfers, warmup, leased := m.counts(s.BlockBytes)
	r = benchRow{shape: s, transfers: transfers, perThread: transfers / m.threads}
	if m.check {
		m.raw.local.fill(initiatorByte)
		if _, err := m.link.call(benchCall{Op: opFill, Fill: targetByte}, "fill its buffer"); err != nil {
			return r, err
		}
	}
	if warmup > 0 {
		if _, err := m.transfer(ctx, s, warmup); err != nil {
			return r, err
		}
		bar.add(int64(warmup))
	}
	if r.raw, err = m.transfer(ctx, s, transfers); err != nil {
		return r, err
	}
	bar.add(int64(transfers))
	if _, err := m.link.call(benchCall{Op: opNotified, Count: m.notified}, "count the notifications of "+many(m.notified, "transfer")); err != nil {
		return r, err
	}
	if m.check {
		if err := m.consistent(s); err != nil {
			return r, err
		}
	}
	if leased == 0 {
		return r, nil
	}
	if err := m.openNodes(ctx, s); err != nil {
		return r, err
	}
	const unmeasured = 2 // the first read of a node pays for the handshake and for the memory that is touched
	var got leasedStats
	for _, requests := range []int{unmeasured, leased} {
		if got, err = m.leased.run(ctx, s.Batch/s.Layers, requests); err != nil {
			return r, fmt.Errorf("leased read: %w", err)
		}
	}
	r.leased = &got
	bar.add(int64(leased))
	return r, nil
}

// transfer does so many transfers.
func (m *measurement) transfer(ctx context.Context, s transferShape, transfers int) (rawStats, error) {
	m.notified += transfers
	st, err := m.raw.run(ctx, s, transfers)
	if err != nil {
		err = fmt.Errorf("transfers with %s: %w", m.link.peer, err)
	}
	return st, err
}

// consistent checks every byte where the transfers went.
func (m *measurement) consistent(s transferShape) error {
	ranges := m.raw.ranges(s)
	wrong := 0
	if m.raw.op == nixl.Read {
		for _, r := range ranges {
			wrong += m.raw.local.wrong(r, targetByte)
		}
	} else {
		a, err := m.link.call(benchCall{Op: opCheck, Fill: initiatorByte, Ranges: ranges}, "check its buffer")
		if err != nil {
			return err
		}
		wrong = a.Wrong
	}
	if wrong > 0 {
		return fmt.Errorf("consistency check of what was transferred: %s wrong", many(wrong, "byte"))
	}
	return nil
}

// openNodes makes both sides ready for leased reads of blocks like those of s, unless they are.
func (m *measurement) openNodes(ctx context.Context, s transferShape) (err error) {
	if s.Layers == 1 {
		s.Batch = m.maxBatch // serves all rows of this block size
	}
	if m.node != nil && m.node.shape == s {
		return nil
	}
	if err := m.node.close(); err != nil {
		return err
	}
	m.node = nil
	if _, err := m.link.call(benchCall{Op: opNode, Shape: s}, "open a node for leased reads"); err != nil {
		return err
	}
	host, _, _ := net.SplitHostPort(m.link.conn.LocalAddr().String())
	if m.node, err = openBenchNode(ctx, host, m.backend, s, m.lease, m.timeout); err != nil {
		return err
	}
	m.leased = &leasedBench{link: m.link, node: m.node, check: m.check, order: rand.New(rand.NewPCG(m.seed, 0))}
	return nil
}
