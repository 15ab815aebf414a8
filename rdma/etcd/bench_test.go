//go:build etcd

package etcd

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/nixlgo/nixlgo/cgo_test/etcdserver"
)

const (
	fleetRanks   = 8
	fleetReaders = 10
	fleetReply   = 2510 // bytes: the Reply of a Node of 64 layers over UCX and TCP
)

// fleet are engines with a session each, as processes have them, and readers of all.
type fleet struct {
	*testing.B
	s       *etcdserver.Server
	owners  []*Directory
	readers []*Directory
	ranks   []int
	reply   []byte
}

// BenchmarkFleet measures what a fleet asks of one etcd, and what watching it costs a reader. An operation is an engine of the
// fleet, so -benchtime 1000x has one of 1,000.
func BenchmarkFleet(b *testing.B) {
	f := &fleet{B: b, s: etcdserver.Start(b), reply: bytes.Repeat([]byte("x"), fleetReply)}
	for r := range fleetRanks {
		f.ranks = append(f.ranks, r)
	}
	for range b.N {
		f.owners = append(f.owners, f.open())
	}
	for range fleetReaders {
		f.readers = append(f.readers, f.open())
	}
	b.ResetTimer()
	f.publish()
	f.lookUp()
	f.watch()
	f.StopTimer()
	var wg sync.WaitGroup
	for _, d := range slices.Concat(f.readers, f.owners) {
		wg.Go(func() { d.Close() })
	}
	wg.Wait()
}

func (f *fleet) open() *Directory {
	d, err := Open(Config{Client: clientv3.Config{Endpoints: []string{f.s.URL}}})
	require.NoError(f, err)
	return d
}

func (f *fleet) name(i int) string { return fmt.Sprintf("5f0c2e6e-8d0e-4a57-91cf-%012d", i) }

// each calls do for all engines, so many at a time.
func (f *fleet) each(atATime int, do func(i int)) {
	var wg sync.WaitGroup
	next := make(chan int)
	for range atATime {
		wg.Go(func() {
			for i := range next {
				do(i)
			}
		})
	}
	for i := range f.N {
		next <- i
	}
	close(next)
	wg.Wait()
}

func (f *fleet) percentiles(what string, took []time.Duration) {
	slices.Sort(took)
	f.ReportMetric(took[len(took)/2].Seconds()*1e3, what+"-p50-ms")
	f.ReportMetric(took[len(took)*99/100].Seconds()*1e3, what+"-p99-ms")
}

// publish has all engines start at once.
func (f *fleet) publish() {
	start := time.Now()
	f.each(f.N, func(i int) {
		for _, r := range f.ranks {
			require.NoError(f, f.owners[i].Publish(f.Context(), f.name(i), r, f.reply))
		}
	})
	f.ReportMetric(time.Since(start).Seconds(), "publish-all-s")
}

// lookUp has one reader connect to all engines.
func (f *fleet) lookUp() {
	took := make([]time.Duration, f.N)
	start := time.Now()
	f.each(16, func(i int) {
		start := time.Now()
		_, _, err := f.readers[0].Lookup(f.Context(), f.name(i), f.ranks)
		require.NoError(f, err)
		took[i] = time.Since(start)
	})
	f.ReportMetric(float64(f.N)/time.Since(start).Seconds(), "lookups/s")
	f.percentiles("lookup", took)
}

// idle measures etcd while nothing changes: keep-alives, and the looks at the keys.
func (f *fleet) idle() {
	long := min(time.Duration(f.N)*100*time.Millisecond, 3*time.Second)
	cpu := f.s.CPU()
	time.Sleep(long)
	f.ReportMetric(100*float64(f.s.CPU()-cpu)/float64(long), "etcd-idle-CPU%")
	f.ReportMetric(float64(f.s.RSS())/1e6, "etcd-MB")
}

// awaitWatches waits until etcd serves all watches.
func (f *fleet) awaitWatches(n int) {
	require.Eventually(f, func() bool { return f.s.Metric("etcd_debugging_mvcc_watcher_total") == float64(n) }, time.Minute, 20*time.Millisecond)
}

// inUse is the memory of this process, heap and stacks.
func inUse() int64 {
	runtime.GC()
	runtime.GC() // what pools held
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// watch has readers watch all engines as rdma.Worker does, changes these, and kills and restarts etcd.
func (f *fleet) watch() {
	ctx, cancel := context.WithCancel(f.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	_, revision, err := f.readers[0].Lookup(ctx, f.name(0), f.ranks)
	require.NoError(f, err)
	watch := func(d *Directory, i int, noticed chan<- time.Time) {
		wg.Go(func() {
			for since := revision; ctx.Err() == nil; {
				if d.Changed(ctx, f.name(i), since) != nil {
					continue
				}
				if noticed != nil {
					noticed <- time.Now()
				}
				_, now, err := d.Lookup(ctx, f.name(i), f.ranks)
				if err == nil {
					since = now
				}
			}
		})
	}

	noticed := make([]chan time.Time, f.N) // of the first reader
	for i := range noticed {
		noticed[i] = make(chan time.Time, 100)
	}
	goroutines, before := runtime.NumGoroutine(), inUse()
	for i := range f.N {
		watch(f.readers[0], i, noticed[i])
	}
	f.awaitWatches(f.N)
	f.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/float64(f.N), "reader-goroutines/watch")
	f.ReportMetric(float64(inUse()-before)/float64(f.N), "reader-B/watch")
	for _, d := range f.readers[1:] {
		for i := range f.N {
			watch(d, i, nil)
		}
	}
	all := f.N * fleetReaders
	f.awaitWatches(all)
	f.ReportMetric(f.s.Metric("etcd_debugging_mvcc_watch_stream_total")/fleetReaders, "streams/reader")
	f.idle()

	took := make([]time.Duration, f.N)
	f.each(4, func(i int) {
		start := time.Now()
		require.NoError(f, f.owners[i].Publish(ctx, f.name(i), 0, f.reply))
		took[i] = (<-noticed[i]).Sub(start)
	})
	f.percentiles("notice", took)

	f.awaitWatches(all)
	f.s.Kill()
	f.s.Restart()
	start := time.Now()
	f.awaitWatches(all)
	f.ReportMetric(time.Since(start).Seconds(), "rewatch-all-s")
}
