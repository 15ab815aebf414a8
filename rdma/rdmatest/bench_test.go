package rdmatest_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// BenchmarkReaderStep is one step, with plan and results, of a reader that is connected to n owners and keeps one lease
// alive at each: a step in which nothing is due, one that heartbeats all, and the steps that read one request. min-ns is
// the fastest, which says more than the mean on a machine with other work.
func BenchmarkReaderStep(b *testing.B) {
	for _, n := range []int{1, 100, 1000} {
		start := time.Unix(1_000_000, 0)
		net := rdmatest.NewNetwork()
		reader := newEngine(b, net, &start, "reader")
		owners := make([]*engine, n)
		for i := range owners {
			owners[i] = newEngine(b, net, &start, fmt.Sprint("owner-", i))
			reader.arrive(fmt.Sprint("req-", i), owners[i].publish("req", 1, 0))
		}
		reader.connected(n)
		reader.step()
		measure := func(name string, before, step, after func(i int)) {
			b.Run(fmt.Sprintf("peers=%d/%s", n, name), func(b *testing.B) {
				least := time.Hour
				for i := 0; b.Loop(); i++ {
					before(i)
					from := time.Now()
					step(i)
					least = min(least, time.Since(from))
					after(i)
				}
				b.ReportMetric(float64(least.Nanoseconds()), "min-ns")
			})
		}
		none := func(int) {}
		measure("idle", none, func(int) { reader.step() }, none)
		measure("heartbeats", func(int) { start = start.Add(5 * time.Second) }, func(int) { reader.step() }, func(int) {
			for _, o := range owners {
				_, err := o.ranks[0].f.Notifications(nil)
				require.NoError(b, err)
			}
		})
		id := func(i int) string { return fmt.Sprint("read-", i) }
		measure("read", func(i int) {
			reader.pull(id(i), owners[i%n].publish(id(i), 7, 3, 4), 5, 6)
		}, func(i int) {
			for !reader.ran[id(i)] {
				reader.step()
			}
		}, func(i int) {
			reader.over(id(i))
			reader.step()
			owners[i%n].step()
		})
	}
}
