// Benchfleet measures what holding leases costs an owner: 64 readers in four processes renew 100,000 leases of one owner over
// real NIXL, each of them twenty times; the same at another scale on the in-memory fabric; and what a node costs while nothing
// happens, and how long it takes to notice that something does.
//
//	go run ./cgo_test/benchfleet [-quick]
//
// Leases are as short as it takes to renew them that often in the time of the run: with the default duration of 30 s there is
// a fifth of the heartbeats per second.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/nixlgo/nixlgo/cgo_test/child"
	"github.com/nixlgo/nixlgo/cgo_test/measure"
	"github.com/nixlgo/nixlgo/lease"
)

// fleet is the size of a run.
type fleet struct {
	Leases    int
	Processes int
	Readers   int // per process
	Renewals  int // of each lease
	Duration  time.Duration
}

// config is the lease configuration of both sides.
func (f fleet) config() lease.Config {
	c := lease.DefaultConfig()
	c.Duration = f.Duration
	return c
}

func main() {
	f := fleet{Leases: 100_000, Processes: 4, Readers: 16, Renewals: 20, Duration: 6 * time.Second}
	role := flag.String("role", "", "internal: owner, readers or idle, driven on stdin")
	quick := flag.Bool("quick", false, "a few seconds, for figures that only show that it works")
	tls := flag.String("tls", "tcp", "UCX transports (UCX_TLS)")
	limit := flag.Duration("limit", 88*time.Second, "give up after this time")
	flag.DurationVar(&f.Duration, "duration", f.Duration, "kv_lease_duration; a sixth of it is the time between heartbeats")
	flag.Parse()
	simulated := []size{{10, 10_000}, {100, 1000}, {1000, 100}, {1000, 10}}
	if *quick {
		f.Leases, f.Processes, f.Readers, f.Renewals = 10_000, 2, 4, 3
		simulated = []size{{100, 10}}
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	ctx, cancel := context.WithTimeoutCause(ctx, *limit, fmt.Errorf("not done within %s", *limit))
	var err error
	switch *role {
	case "owner":
		err = serve(os.Stdin, os.Stdout, (&owner{}).do)
	case "readers":
		err = serve(os.Stdin, os.Stdout, (&readers{}).do)
	case "idle":
		err = serve(os.Stdin, os.Stdout, idle)
	default:
		err = run(ctx, f, simulated, *tls)
	}
	cancel()
	stop()
	child.Exit("bench-fleet", err)
}

func run(ctx context.Context, f fleet, simulated []size, tls string) error {
	report := measure.NewReport("bench-fleet")
	if err := runIdle(ctx, tls, report); err != nil {
		return err
	}
	if err := runFleet(ctx, f, tls, report); err != nil {
		return err
	}
	for _, s := range simulated {
		if err := simulate(ctx, s, f.Renewals, report); err != nil {
			return err
		}
	}
	owners := []int{10, 100, 1000}
	if len(simulated) == 1 {
		owners = []int{10}
	}
	for _, n := range owners {
		if err := simulateReader(ctx, n, 10, f.Renewals, report); err != nil {
			return err
		}
	}
	return report.Finish(os.Stdout)
}

// self starts this program in a role.
func self(name, role, tls string) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(exe, "-role", role)
	cmd.Env = append(os.Environ(), "UCX_TLS="+tls)
	cmd.Stderr = os.Stderr
	p, err := child.Start(name, cmd, patience)
	return &process{p}, err
}

func runFleet(ctx context.Context, f fleet, tls string, report *measure.Report) (err error) {
	var all []*process
	defer func() {
		for _, p := range all {
			err = errors.Join(err, p.End())
		}
	}()
	start := func(name, role string) (*process, error) {
		p, err := self(name, role, tls)
		if err == nil {
			all = append(all, p)
		}
		return p, err
	}
	own, err := start("owner", "owner")
	if err != nil {
		return err
	}
	// The readers are up before the leases are granted, or those would expire.
	rs := make([]*process, f.Processes)
	for i := range rs {
		if rs[i], err = start(fmt.Sprintf("readers %d", i), "readers"); err != nil {
			return err
		}
	}
	for i, p := range rs {
		if _, err := p.call(ctx, command{Cmd: "open", Fleet: f, Number: i}); err != nil {
			return err
		}
	}
	published, err := own.call(ctx, command{Cmd: "publish", Fleet: f})
	if err != nil {
		return err
	}
	each := (f.Leases + len(rs) - 1) / len(rs)
	for i, p := range rs {
		part := published.Leases[min(i*each, f.Leases):min((i+1)*each, f.Leases)]
		if _, err := p.call(ctx, command{Cmd: "hold", Port: published.Port, Leases: part}); err != nil {
			return err
		}
	}
	for _, c := range []command{{Cmd: "renewed", Times: 1}, {Cmd: "phase"}, {Cmd: "renewed", Times: f.Renewals}} {
		if _, err := own.call(ctx, c); err != nil {
			return err
		}
	}
	with, err := own.call(ctx, command{Cmd: "phase"})
	if err != nil {
		return err
	}
	for _, p := range rs {
		if _, err := p.call(ctx, command{Cmd: "quiet"}); err != nil {
			return err
		}
	}
	// What has been sent arrives, and the rest of an extension of four intervals is left to measure in.
	if err := pause(ctx, f.config().Interval()/4); err != nil {
		return err
	}
	if _, err := own.call(ctx, command{Cmd: "phase"}); err != nil {
		return err
	}
	if err := pause(ctx, 3*f.config().Interval()/2); err != nil {
		return err
	}
	without, err := own.call(ctx, command{Cmd: "phase"})
	if err != nil {
		return err
	}
	w, o := with.Phase, without.Phase
	switch {
	case w.Renewals < int64(f.Leases*f.Renewals) || o.Renewals != 0:
		return fmt.Errorf("%d renewals with heartbeats and %d without: these are not the phases that were to be measured", w.Renewals, o.Renewals)
	case o.Live != int64(f.Leases):
		return fmt.Errorf("%d of %d leases are left: the machine was too slow for leases of %s", o.Live, f.Leases, f.Duration)
	}
	name := fmt.Sprintf("NIXL %s, %d readers, %d leases of %s", tls, f.Processes*f.Readers, f.Leases, f.Duration)
	seconds := w.Wall.Seconds()
	report.Add(measure.Row{Name: name + ": renewals", Unit: "1/s", Ours: float64(w.Renewals) / seconds, Repeats: len(w.Rates), Spread: spread(w.Rates),
		Extra: map[string]float64{"messages_per_s": float64(w.Messages) / seconds, "owner_rss_mb": float64(w.RSS) / 1e6, "owner_fds": float64(w.FDs), "run_s": seconds}})
	busy, quiet := w.CPU.Seconds()/seconds, o.CPU.Seconds()/o.Wall.Seconds()
	report.Add(measure.Row{Name: name + ": owner CPU per renewal", Unit: "ns", Ours: 1e9 * w.CPU.Seconds() / float64(w.Renewals), Repeats: len(w.Costs), Spread: spread(w.Costs),
		Extra: map[string]float64{"cores_with": busy, "cores_without": quiet, "ns_beyond_without": 1e9 * (busy - quiet) * seconds / float64(w.Renewals),
			"us_per_message_beyond_without": 1e6 * (busy - quiet) * seconds / float64(w.Messages)}})
	steps := stepRow(name, w, o)
	steps.Extra["max_cpu_with"], steps.Extra["max_cpu_without"] = w.MaxCPU, o.MaxCPU
	report.Add(steps)
	return nil
}

// stepRow is the owner's step with heartbeats and without.
func stepRow(name string, with, without phase) measure.Row {
	return measure.Row{Name: name + ": owner step p99", Unit: "µs", Ours: with.P99, Repeats: with.Steps,
		Extra: map[string]float64{"p50_with": with.P50, "p50_without": without.P50, "p99_without": without.P99, "max_with": with.Max, "max_without": without.Max,
			"steps_without": float64(without.Steps)}}
}

func runIdle(ctx context.Context, tls string, report *measure.Report) error {
	p, err := self("idle node", "idle", tls)
	if err != nil {
		return err
	}
	a, err := p.call(ctx, command{Cmd: "measure"})
	if err = errors.Join(err, p.End()); err != nil {
		return err
	}
	i := a.Idle
	load := measure.Row{Name: "idle node: CPU", Unit: "% of a core", Ours: 100 * i.CPU.Seconds() / i.Wall.Seconds(), Repeats: 1,
		Extra: map[string]float64{"seconds": i.Wall.Seconds(), "steps_per_s": float64(i.Steps) / i.Wall.Seconds()}}
	load.Aim("< 5 %", load.Ours < 5)
	report.Add(load)
	reaction := measure.Row{Name: "idle node: reaction to a notification, p99", Unit: "ms", Ours: i.P99, Repeats: i.Reactions,
		Extra: map[string]float64{"p50": i.P50, "p90": i.P90, "max": i.Max}}
	reaction.Aim("≤ 5 ms", i.P99 <= 5)
	report.Add(reaction)
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
