package main

import (
	"bytes"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// phase is what an owner did in a part of the run. Step times are in µs.
type phase struct {
	Wall, CPU     time.Duration // of the process, all threads
	Renewals      int64
	Messages      int64 // heartbeat messages
	Live          int64 // leases at the end
	Steps         int
	P50, P99, Max float64
	MaxCPU        float64   // of one step, by its thread's clock: Max is more where the step did not get a core
	Rates         []float64 // renewals per second in each interval
	Costs         []float64 // ns of CPU per renewal in each interval
	RSS           int64     // bytes
	FDs           int
}

// spread is (max-min)/min.
func spread(v []float64) float64 {
	if len(v) == 0 || slices.Min(v) == 0 {
		return 0
	}
	return (slices.Max(v) - slices.Min(v)) / slices.Min(v)
}

func (p *phase) steps(took []time.Duration) {
	p.Steps = len(took)
	p.P50, p.P99, p.Max = micro(quantile(took, 0.5)), micro(quantile(took, 0.99)), micro(quantile(took, 1))
}

func micro(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// quantile is the smallest of ds that a part q of them does not exceed; 0 when there is none. It sorts ds.
func quantile(ds []time.Duration, q float64) time.Duration {
	if len(ds) == 0 {
		return 0
	}
	slices.Sort(ds)
	i := int(q * float64(len(ds)))
	if float64(i) < q*float64(len(ds)) {
		i++
	}
	return ds[min(max(i, 1), len(ds))-1]
}

// cpu is what this process (unix.CLOCK_PROCESS_CPUTIME_ID) or thread (unix.CLOCK_THREAD_CPUTIME_ID) has used.
func cpu(clock int32) time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(clock, &ts); err != nil {
		return 0 // cannot fail with these clocks
	}
	return time.Duration(ts.Nano())
}

// resources are the resident memory and the open descriptors of this process.
func resources() (rss int64, fds int) {
	status, err := os.ReadFile("/proc/self/statm")
	if fields := bytes.Fields(status); err == nil && len(fields) > 1 {
		pages, _ := strconv.ParseInt(string(fields[1]), 10, 64)
		rss = pages * int64(os.Getpagesize())
	}
	open, _ := os.ReadDir("/proc/self/fd")
	return rss, len(open)
}
