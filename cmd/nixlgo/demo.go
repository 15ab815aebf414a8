package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl/diagnose"
	"github.com/nixlgo/nixlgo/testdata"
)

// demoConfig is the demo's command line.
type demoConfig struct {
	tls        string
	library    string
	requests   int
	kv         string
	blockBytes int
	blocks     int
	layers     int
	lease      time.Duration
	json       bool
	report     string // file; empty: none
}

func newDemo() *cobra.Command {
	var cfg demoConfig
	c := &cobra.Command{
		Use:   "demo",
		Short: "Pass leased, verified KV blocks between two processes over real NIXL",
		Long: "demo starts a prefill process (the owner of KV blocks) and a decode process (their reader) on this machine and\n" +
			"shows five scenes: verified reads, a request that queues while heartbeats keep its lease, a read that is refused\n" +
			"because its lease lapsed under it, a reader that is killed, and a read without a lease.\n\n" +
			"It succeeds only if the two processes report that every scene went as told.",
		Example: "  nixlgo demo                                  # 25 s, no GPU, no RDMA device\n" +
			"  nixlgo demo --report demo.html               # and a page with the timeline of every lease\n" +
			"  nixlgo demo --tls rc --requests 1000 --json  # over InfiniBand or RoCE, for programs",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cfg.validate(); err != nil {
				return usageError{err}
			}
			if _, err := loadKV(cfg.kv, cfg.blockBytes); err != nil {
				return err
			}
			d := &demo{demoConfig: cfg, out: cmd.OutOrStdout(), start: time.Now()}
			if cfg.report == "" {
				return d.run(cmd.Context())
			}
			return d.runWithReport(cmd.Context())
		},
	}
	f := c.Flags()
	f.StringVar(&cfg.tls, "tls", "tcp", "UCX transports (UCX_TLS) of both processes, such as tcp or tcp,shm,self or rc")
	f.StringVar(&cfg.library, "library", "", "path of libnixl_capi.so (default: searched, see nixlgo doctor)")
	f.IntVar(&cfg.requests, "requests", 64, "requests to pass in the first scene")
	f.StringVar(&cfg.kv, "kv", "", "file of KV-cache bytes (default: a dump of a small real model, built in)")
	f.IntVar(&cfg.blockBytes, "block-bytes", 16384, "bytes of one block of one layer")
	f.IntVar(&cfg.blocks, "blocks", 4, "blocks per request")
	f.IntVar(&cfg.layers, "layers", 2, "layers")
	f.DurationVar(&cfg.lease, "lease", 3*time.Second, "lease duration")
	f.BoolVar(&cfg.json, "json", false, "print one JSON object per line")
	f.StringVar(&cfg.report, "report", "", "HTML file for a report with the timeline of every lease; it needs no network")
	return c
}

func (c *demoConfig) validate() error {
	if err := checkBounds(bound{"requests", c.requests, 1, 1 << 16}, bound{"block-bytes", c.blockBytes, 8, 1 << 28},
		bound{"blocks", c.blocks, 1, 1 << 12}, bound{"layers", c.layers, 1, 1 << 10}); err != nil {
		return err
	}
	const memory = 8 << 30
	if total := c.nodeBlocks() * c.layers; total > memory/c.blockBytes {
		return fmt.Errorf("--requests × --blocks × --layers × --block-bytes need more than %d GiB in each process", memory>>30)
	}
	if c.lease < 100*time.Millisecond || c.lease > 10*time.Minute {
		return fmt.Errorf("--lease %s is not in 100ms…10m", c.lease)
	}
	if unknown := diagnose.UnknownTransports(c.tls); unknown != nil {
		return fmt.Errorf("--tls %q: UCX has no transport %s; want some of tcp, rc, shm, self and so on, by comma", c.tls, strings.Join(unknown, ", "))
	}
	return nil
}

// nodeBlocks is the number of blocks of each process: all requests of the first scene at once, and those of the others.
func (c *demoConfig) nodeBlocks() int { return (c.requests + heldByKilled) * c.blocks }

// heldByKilled is the number of leases that the killed reader holds.
const heldByKilled = 8

// loadKV reads the KV bytes that the demo passes: file, or the dump that is built in.
func loadKV(file string, blockBytes int) ([]byte, error) {
	if file == "" {
		return testdata.KV, nil
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("--kv: %w", err)
	}
	if len(b) < blockBytes {
		return nil, fmt.Errorf("--kv %s has %s, less than one block of %d (--block-bytes)", file, many(len(b), "byte"), blockBytes)
	}
	return b, nil
}

// demo runs the scenes. What it says of them comes from the events of the processes.
type demo struct {
	demoConfig
	out   io.Writer
	start time.Time
	scene int

	owner, reader *process
	summary       demoSummary
	events        recorder
}

// demoSummary is the last line.
type demoSummary struct {
	Event               string  `json:"event"`
	TLS                 string  `json:"tls"`
	Library             string  `json:"library"`
	Requests            int     `json:"requests"`
	Verified            int     `json:"verified"`
	WrongBytes          int     `json:"wrong_bytes"`
	Renewals            int64   `json:"renewals"`
	QueuedOK            int     `json:"queued_ok"`
	LapsedRefused       int     `json:"lapsed_refused"`
	UnverifiableRefused int     `json:"unverifiable_refused"`
	ReaderKilledFreedS  float64 `json:"reader_killed_freed_s"`
	LeaseS              float64 `json:"lease_s"`
	Seconds             float64 `json:"seconds"`
}

func (d *demo) run(ctx context.Context) (err error) {
	d.summary = demoSummary{Event: "summary", TLS: d.tls, Requests: d.requests, LeaseS: d.lease.Seconds()}
	defer func() {
		for _, p := range []*process{d.reader, d.owner} {
			err = errors.Join(err, p.stop())
		}
	}()
	if d.owner, err = d.spawn(ctx, "prefill"); err != nil {
		return err
	}
	if d.reader, err = d.spawn(ctx, "decode"); err != nil {
		return err
	}
	for i, scene := range []struct {
		title string
		play  func(context.Context) error
	}{
		{many(d.requests, "request") + " published under a lease, read, verified and completed", d.verifiedReads},
		{"a request queues for four lease durations; heartbeats alone keep its lease", d.queued},
		{"a lease lapses between the block READ and the check, and the blocks are reused", d.lapsed},
		{"the reader is killed while it holds leases", d.killed},
		{"a read whose params carry no lease", d.unverifiable},
	} {
		d.scene = i + 1
		d.events.begin(scene.title)
		d.say("scene", "", fmt.Sprintf("scene %d: %s", d.scene, scene.title), map[string]any{"title": scene.title})
		if err := scene.play(ctx); err != nil {
			return fmt.Errorf("scene %d (%s): %w", d.scene, scene.title, err)
		}
	}
	stats, err := d.owner.call(ctx, command{Cmd: "stats", ID: "stats"}, "stats")
	if err != nil {
		return err
	}
	s := &d.summary
	s.Renewals = stats.Stats.Worker.Leases.Renewals
	s.Seconds = round(time.Since(d.start).Seconds())
	if s.WrongBytes != 0 || s.Renewals == 0 {
		err = fmt.Errorf("%s, %s", many(s.WrongBytes, "wrong byte"), many(s.Renewals, "renewal"))
	}
	d.sum()
	return err
}

// linesOfReads is how many reads of the first scene a person is shown; a program is shown all.
const linesOfReads = 4

// verifiedReads passes all requests, a few at a time.
func (d *demo) verifiedReads(ctx context.Context) error {
	ids := make([]string, d.requests)
	published := map[string]event{}
	for i := range ids {
		ids[i] = fmt.Sprintf("req-%02d", i+1)
		if err := d.owner.send(command{Cmd: "publish", ID: ids[i], Seed: i, Blocks: d.blocksOf(i)}); err != nil {
			return err
		}
	}
	for range ids {
		e, err := d.owner.wait(ctx, "published", "")
		if err != nil {
			return err
		}
		published[e.ID] = e
	}
	const atOnce = 8
	for i := range min(atOnce, len(ids)) {
		if err := d.fetch(ids[i], published[ids[i]].Params, i); err != nil {
			return err
		}
	}
	for done := range ids {
		e, err := d.reader.wait(ctx, "fetched", "")
		if err != nil {
			return err
		}
		p := published[e.ID]
		if err := d.compare(p, e); err != nil {
			return err
		}
		d.summary.Verified++
		if d.json || done < linesOfReads {
			d.say("verified", "decode", fmt.Sprintf("%s: %s × %s, %s in %.1f ms, slot %d holds its nonce, %d SHA-256 equal",
				e.ID, many(d.blocks, "block"), many(d.layers, "layer"), byteSize(int64(e.Bytes)), 1000*e.Seconds, p.Params.Lease.Slot, len(e.SHA256)),
				map[string]any{"id": e.ID, "bytes": e.Bytes, "seconds": e.Seconds, "slot": p.Params.Lease.Slot, "nonce": p.Params.Lease.Nonce})
		}
		if next := done + atOnce; next < len(ids) {
			if err := d.fetch(ids[next], published[ids[next]].Params, next); err != nil {
				return err
			}
		}
	}
	if more := len(ids) - linesOfReads; more > 0 && !d.json {
		d.say("verified", "decode", fmt.Sprintf("… %d more", more), nil)
	}
	for range ids {
		e, err := d.owner.wait(ctx, "freed", "")
		if err != nil {
			return err
		}
		if e.Reason != lease.ReasonRead.String() {
			return fmt.Errorf("the owner freed %s because it %s, not because it was read", e.ID, e.Reason)
		}
	}
	d.say("completed", "prefill", many(len(ids), "read-complete notification")+", all blocks free again", map[string]any{"requests": len(ids)})
	return nil
}

func (d *demo) queued(ctx context.Context) error {
	p, err := d.publish(ctx, "queued", 0)
	if err != nil {
		return err
	}
	if _, err := d.reader.call(ctx, command{Cmd: "hold", ID: p.ID, Params: p.Params}, "holding"); err != nil {
		return err
	}
	before, err := d.renewals(ctx)
	if err != nil {
		return err
	}
	for i := range 4 {
		if err := sleep(ctx, d.lease); err != nil {
			return err
		}
		now, err := d.renewals(ctx)
		if err != nil {
			return err
		}
		if e, ok := d.owner.seen("freed", p.ID); ok {
			return fmt.Errorf("the owner freed the request (%s) while it was queued", e.Reason)
		}
		d.say("renewed", "prefill", fmt.Sprintf("queued for %d × %s: the lease was renewed %s", i+1, d.lease, many(now-before, "time")),
			map[string]any{"id": p.ID, "queued_s": round(float64(i+1) * d.lease.Seconds()), "renewals": now - before})
	}
	e, err := d.reader.call(ctx, command{Cmd: "fetch", ID: p.ID, Blocks: d.blocksOf(0)}, "fetched")
	if err != nil {
		return err
	}
	if err := d.compare(p, e); err != nil {
		return err
	}
	if _, err := d.owner.freed(ctx, p.ID, lease.ReasonRead); err != nil {
		return err
	}
	d.summary.QueuedOK++
	d.say("verified", "decode", fmt.Sprintf("%s: read and verified in %.1f ms after the wait", p.ID, 1000*e.Seconds), map[string]any{"id": p.ID, "seconds": e.Seconds})
	return nil
}

func (d *demo) lapsed(ctx context.Context) error {
	p, err := d.publish(ctx, "lapsing", 1)
	if err != nil {
		return err
	}
	if err := d.reader.send(command{Cmd: "fetch", ID: p.ID, Params: p.Params, Blocks: d.blocksOf(0), Pause: true}); err != nil {
		return err
	}
	if _, err := d.reader.wait(ctx, "paused", ""); err != nil {
		return err
	}
	d.say("read", "decode", p.ID+": the block READ is done; the reader stalls before the check and sends no heartbeat", map[string]any{"id": p.ID})
	f, err := d.owner.freed(ctx, p.ID, lease.ReasonExpired)
	if err != nil {
		return err
	}
	d.say("expired", "prefill", fmt.Sprintf("%s: no heartbeat, the lease ran out after %.2f s", p.ID, f.Seconds), map[string]any{"id": p.ID, "seconds": f.Seconds})
	other, err := d.publish(ctx, "reusing", 1)
	if err != nil {
		return err
	}
	d.say("reused", "prefill", fmt.Sprintf("%s: the same blocks now hold another request's bytes", other.ID), map[string]any{"id": other.ID})
	if err := sleep(ctx, d.lease/4); err != nil { // so that the order of events shows in a picture
		return err
	}
	if err := d.reader.send(command{Cmd: "resume"}); err != nil {
		return err
	}
	e, err := d.reader.wait(ctx, "refused", p.ID)
	if err != nil {
		return err
	}
	d.summary.WrongBytes += e.LeftBehind
	if e.Reason != lease.CauseLapsed.String() || e.LeftBehind != 0 {
		return fmt.Errorf("the reader refused %s as %q with %s left behind, not as lapsed: %s", p.ID, e.Reason, many(e.LeftBehind, "byte"), e.Error)
	}
	d.summary.LapsedRefused++
	d.say("refused", "decode", "lease.ErrLapsed, no byte reaches the caller: "+e.Error, map[string]any{"id": p.ID, "error": e.Error, "cause": e.Reason})
	e, err = d.reader.call(ctx, command{Cmd: "fetch", ID: other.ID, Params: other.Params, Blocks: d.blocksOf(0)}, "fetched")
	if err != nil {
		return err
	}
	if err := d.compare(other, e); err != nil {
		return err
	}
	_, err = d.owner.freed(ctx, other.ID, lease.ReasonRead)
	return err
}

func (d *demo) killed(ctx context.Context) error {
	extension := lease.Config{Duration: d.lease}.Extension()
	for i := range heldByKilled {
		p, err := d.publish(ctx, fmt.Sprintf("orphan-%d", i+1), i)
		if err != nil {
			return err
		}
		if _, err := d.reader.call(ctx, command{Cmd: "hold", ID: p.ID, Params: p.Params}, "holding"); err != nil {
			return err
		}
	}
	// After a lease and a half it is heartbeats that hold the leases, not the grant.
	if err := sleep(ctx, d.lease*3/2); err != nil {
		return err
	}
	if err := d.reader.kill(); err != nil {
		return err
	}
	if _, err := d.owner.call(ctx, command{Cmd: "mark", ID: "kill"}, "marked"); err != nil {
		return err
	}
	d.events.note("the reader is killed")
	d.say("killed", "decode", fmt.Sprintf("SIGKILL to process %d, which holds %d leases; a heartbeat extends them by %s; "+
		"what UCX now says of it on standard error is expected", d.reader.pid, heldByKilled, extension.Round(time.Millisecond)),
		map[string]any{"pid": d.reader.pid, "leases": heldByKilled})
	for range heldByKilled {
		e, err := d.owner.wait(ctx, "freed", "")
		if err != nil {
			return err
		}
		if e.Reason != lease.ReasonExpired.String() || e.SinceMark == 0 {
			return fmt.Errorf("the owner freed %s because it %s, before the reader was killed", e.ID, e.Reason)
		}
		d.summary.ReaderKilledFreedS = max(d.summary.ReaderKilledFreedS, round(e.SinceMark))
	}
	stats, err := d.owner.call(ctx, command{Cmd: "stats", ID: "stats"}, "stats")
	if err != nil {
		return err
	}
	// A heartbeat may have waited a step to be handled, and a deadline another to be noticed.
	step := stats.Stats.LongestStep
	if limit := (extension + 2*step).Seconds() + 0.1; d.summary.ReaderKilledFreedS > limit {
		return fmt.Errorf("the owner held the blocks for %.2f s after the kill, longer than an extension of %s and its steps of up to %s",
			d.summary.ReaderKilledFreedS, extension, step)
	}
	d.say("freed", "prefill", fmt.Sprintf("%d leases ran out, all blocks free %.2f s after the kill (extension %s, longest step %s)",
		heldByKilled, d.summary.ReaderKilledFreedS, extension.Round(time.Millisecond), step.Round(time.Millisecond)),
		map[string]any{"leases": heldByKilled, "seconds": d.summary.ReaderKilledFreedS, "extension_s": extension.Seconds()})
	d.reader, err = d.spawn(ctx, "decode")
	return err
}

func (d *demo) unverifiable(ctx context.Context) error {
	p, err := d.publish(ctx, "unleased", 2)
	if err != nil {
		return err
	}
	stripped := *p.Params
	stripped.Lease = nil
	e, err := d.reader.call(ctx, command{Cmd: "fetch", ID: p.ID, Params: &stripped, Blocks: d.blocksOf(0)}, "refused")
	if err != nil {
		return err
	}
	d.summary.WrongBytes += e.LeftBehind
	if e.Reason != lease.CauseUnverifiable.String() {
		return fmt.Errorf("the reader refused %s as %q, not as unverifiable: %s", p.ID, e.Reason, e.Error)
	}
	d.summary.UnverifiableRefused++
	d.say("refused", "decode", "lease.ErrUnverifiable: "+e.Error, map[string]any{"id": p.ID, "error": e.Error, "cause": e.Reason})
	return nil
}

// blocksOf is the i-th group of blocks of a node.
func (d *demo) blocksOf(i int) []int {
	out := make([]int, d.blocks)
	for k := range out {
		out[k] = i*d.blocks + k
	}
	return out
}

func (d *demo) publish(ctx context.Context, id string, group int) (event, error) {
	return d.owner.call(ctx, command{Cmd: "publish", ID: id, Seed: 1000 + d.scene*heldByKilled*2 + len(id) + group, Blocks: d.blocksOf(group)}, "published")
}

func (d *demo) fetch(id string, p *lease.Params, group int) error {
	return d.reader.send(command{Cmd: "fetch", ID: id, Params: p, Blocks: d.blocksOf(group)})
}

// compare counts blocks whose bytes differ between the processes.
func (d *demo) compare(owner, reader event) error {
	if !slices.Equal(owner.SHA256, reader.SHA256) {
		d.summary.WrongBytes += reader.Bytes
		return fmt.Errorf("%s: the blocks that the reader accepted are not the owner's", reader.ID)
	}
	return nil
}

func (d *demo) renewals(ctx context.Context) (int64, error) {
	e, err := d.owner.call(ctx, command{Cmd: "stats", ID: "stats"}, "stats")
	if err != nil {
		return 0, err
	}
	return e.Stats.Worker.Leases.Renewals, nil
}

// say prints one line: text for a person, or the event as JSON.
func (d *demo) say(name, node, text string, fields map[string]any) {
	t := time.Since(d.start).Seconds()
	if !d.json {
		if node == "" {
			fmt.Fprintf(d.out, "%7.3fs %s\n", t, text)
		} else {
			fmt.Fprintf(d.out, "%7.3fs   %-8s %s\n", t, node, text)
		}
		return
	}
	line := map[string]any{"event": name, "t": round(t), "scene": d.scene}
	if node != "" {
		line["node"] = node
	}
	maps.Copy(line, fields)
	d.encode(line)
}

func (d *demo) sum() {
	s := d.summary
	if d.json {
		d.encode(s)
		return
	}
	fmt.Fprintf(d.out, "%7.3fs done over UCX %s with %s: %d of %s verified, %s, %s, %d queued, %d lapsed and %d unverifiable "+
		"refused, blocks of a killed reader free after %.2f s\n", time.Since(d.start).Seconds(), s.TLS, s.Library, s.Verified, many(s.Requests, "read"),
		many(s.WrongBytes, "wrong byte"), many(s.Renewals, "renewal"), s.QueuedOK, s.LapsedRefused, s.UnverifiableRefused, s.ReaderKilledFreedS)
}

func (d *demo) encode(v any) {
	if err := json.NewEncoder(d.out).Encode(v); err != nil {
		fmt.Fprintln(os.Stderr, "nixlgo: write to stdout:", err)
	}
}

func round(seconds float64) float64 { return float64(int(seconds*1000+0.5)) / 1000 }

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
