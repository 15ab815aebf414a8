package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nixlgo/nixlgo/cgo_test/measure"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// size is how many readers hold how many leases each.
type size struct{ readers, leases int }

// simulate has readers renew leases of one owner on the in-memory fabric, all in this goroutine and on a clock of its own:
// the owner steps a thousand times per interval, and each reader once, at its own moment. What the network costs is left out.
func simulate(ctx context.Context, s size, renewals int, report *measure.Report) error {
	with, without, err := simulated(ctx, s, renewals)
	if err != nil {
		return fmt.Errorf("%d simulated readers of %d leases: %w", s.readers, s.leases, err)
	}
	name := fmt.Sprintf("in memory, %d readers, %d leases", s.readers, s.readers*s.leases)
	report.Add(measure.Row{Name: name + ": owner CPU per renewal", Unit: "ns", Ours: 1e9 * with.CPU.Seconds() / float64(with.Renewals), Repeats: renewals,
		Extra: map[string]float64{"us_per_message": 1e6 * with.CPU.Seconds() / float64(with.Messages), "renewals_per_s": float64(with.Renewals) / with.CPU.Seconds(), "leases_per_message": float64(with.Renewals) / float64(with.Messages)}})
	report.Add(stepRow(name, with, without))
	return nil
}

func simulated(ctx context.Context, s size, renewals int) (with, without phase, err error) {
	const steps = 1000 // of the owner, per interval
	c := lease.DefaultConfig()
	interval := c.Interval()
	now := time.Unix(1_000_000, 0)
	clock := func() time.Time { return now }
	net := rdmatest.NewNetwork()
	total := s.readers * s.leases
	kv := net.NewMemory(total * blockLen)
	own, err := newEngine(ownerName, net.NewFabric(ownerName, kv), kv, c, total)
	if err != nil {
		return with, without, err
	}
	defer func() { err = errors.Join(err, own.close()) }()
	tickets, err := own.publish(clock, total)
	if err != nil {
		return with, without, err
	}
	all := make([]*reader, s.readers)
	defer func() {
		for _, r := range all {
			if r != nil {
				err = errors.Join(err, r.worker.Close())
			}
		}
	}()
	for i := range all {
		m := net.NewMemory(blockLen)
		name := fmt.Sprint("reader-", i)
		if all[i], err = newReader(net.NewFabric(name, m), m, name, c); err != nil {
			return with, without, err
		}
		if err = all[i].hold(now, ownerName, own.side.Port(), tickets[i*s.leases:(i+1)*s.leases]); err != nil {
			return with, without, err
		}
	}
	if err := connect(ctx, all, clock); err != nil {
		return with, without, err
	}
	if err := own.step(now); err != nil {
		return with, without, err
	}

	runtime.LockOSThread() // the owner's steps are measured by the thread's CPU time
	defer runtime.UnlockOSThread()
	run := func(steps, perInterval int, beat bool) (p phase, err error) {
		before, took, due := own.worker.Stats().Leases, make([]time.Duration, 0, steps), 0
		for k := range steps {
			now = now.Add(interval / time.Duration(perInterval))
			for until := (k%perInterval + 1) * len(all) / perInterval; beat && due < until; due++ {
				if err := all[due].step(now); err != nil {
					return p, err
				}
			}
			if due == len(all) {
				due = 0
			}
			used, start := cpu(unix.CLOCK_THREAD_CPUTIME_ID), time.Now()
			if err := own.step(now); err != nil {
				return p, err
			}
			took = append(took, time.Since(start))
			p.CPU += cpu(unix.CLOCK_THREAD_CPUTIME_ID) - used
		}
		s := own.worker.Stats().Leases
		p.Renewals, p.Messages, p.Live = s.Renewals-before.Renewals, s.Heartbeats-before.Heartbeats, s.Live
		p.steps(took)
		return p, context.Cause(ctx)
	}
	if with, err = run(renewals*steps, steps, true); err != nil {
		return with, without, err
	}
	if without, err = run(2*steps, steps, false); err != nil {
		return with, without, err
	}
	if want := int64(renewals * total); with.Renewals != want || with.Live != int64(total) || without.Renewals != 0 {
		return with, without, fmt.Errorf("%d renewals of %d, %d of %d leases left, %d renewals without heartbeats",
			with.Renewals, want, with.Live, total, without.Renewals)
	}
	return with, without, nil
}

// connect steps the readers, a few at a time, until each is connected: handshakes are real and take real time.
func connect(ctx context.Context, all []*reader, clock func() time.Time) error {
	for len(all) > 0 {
		some := all[:min(50, len(all))]
		for left := len(some); left > 0; {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			left = 0
			for _, r := range some {
				if r.worker.Stats().Peers > 0 {
					continue
				}
				left++
				if err := r.step(clock()); err != nil {
					return err
				}
			}
			time.Sleep(100 * time.Microsecond)
		}
		all = all[len(some):]
	}
	return nil
}

// simulateReader is the other side of a fleet: one reader that holds leases at many owners, which are there and do nothing.
func simulateReader(ctx context.Context, owners, leases, renewals int, report *measure.Report) error {
	p, err := simulatedReader(ctx, owners, leases, renewals)
	if err != nil {
		return fmt.Errorf("a simulated reader of %d owners: %w", owners, err)
	}
	name := fmt.Sprintf("in memory, reader of %d owners, %d leases", owners, owners*leases)
	report.Add(measure.Row{Name: name + ": CPU per step", Unit: "µs", Ours: 1e6 * p.CPU.Seconds() / float64(p.Steps), Repeats: renewals,
		Extra: map[string]float64{"messages_per_step": float64(p.Messages) / float64(p.Steps), "leases_per_message": float64(leases), "step_p50": p.P50,
			"step_p99": p.P99, "step_max": p.Max}})
	return nil
}

func simulatedReader(ctx context.Context, owners, leases, renewals int) (p phase, err error) {
	const steps = 1000 // per interval
	c := lease.DefaultConfig()
	now := time.Unix(1_000_000, 0)
	clock := func() time.Time { return now }
	net := rdmatest.NewNetwork()
	m := net.NewMemory(blockLen)
	r, err := newReader(net.NewFabric("reader", m), m, "reader", c)
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, r.worker.Close()) }()
	for i := range owners {
		kv := net.NewMemory(leases * blockLen)
		name := fmt.Sprint("owner-", i)
		own, err := newEngine(name, net.NewFabric(name, kv), kv, c, leases)
		if err != nil {
			return p, err
		}
		defer own.close()
		tickets, err := own.publish(clock, leases)
		if err != nil {
			return p, err
		}
		for k := range tickets {
			tickets[k].ID += i * leases
		}
		if err := r.hold(now, name, own.side.Port(), tickets); err != nil {
			return p, err
		}
		for r.worker.Stats().Peers <= i { // one after the other, so that the heartbeats are spread over the interval
			if ctx.Err() != nil {
				return p, context.Cause(ctx)
			}
			if err := r.step(now); err != nil {
				return p, err
			}
			time.Sleep(50 * time.Microsecond)
		}
		now = now.Add(c.Interval() / time.Duration(owners))
	}

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, took := r.worker.Stats().HeartbeatsSent, make([]time.Duration, 0, renewals*steps)
	for range renewals * steps {
		now = now.Add(c.Interval() / steps)
		used, start := cpu(unix.CLOCK_THREAD_CPUTIME_ID), time.Now()
		if err := r.step(now); err != nil {
			return p, err
		}
		took = append(took, time.Since(start))
		p.CPU += cpu(unix.CLOCK_THREAD_CPUTIME_ID) - used
	}
	p.Messages = r.worker.Stats().HeartbeatsSent - before
	p.steps(took)
	if want := int64(owners * renewals); p.Messages < want-int64(owners) || p.Messages > want+int64(owners) {
		return p, fmt.Errorf("%d messages in %d intervals", p.Messages, renewals)
	}
	return p, context.Cause(ctx)
}
