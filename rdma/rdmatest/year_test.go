package rdmatest_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// E2: over a year of uptime, on a connection that is used all the time, a turn is read back on every day of it, a lease of 30 s
// is a lease of 30 s, and heartbeats leave every interval.
func TestAYearOfUptimeChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		network := rdmatest.NewNetwork()
		both := func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.Bidirectional, s.Epoch = true, rdma.Epoch() }
		decoder, prefill := newVirtual(t, network, &now, "decoder", both), newVirtual(t, network, &now, "prefill", both)
		turns := 0
		turn := func() {
			turns++
			id := fmt.Sprint("turn-", turns)
			p := decoder.publish(id, uint64(turns), 3)
			expiry := now.Sub(rdma.Epoch()).Seconds() + 480
			p.DoRemotePrefill, p.DoRemoteDecode, p.RemoteBlocksExpiry, p.RemoteBlocksTTL = false, true, &expiry, 480*time.Second
			prefill.pull(id, p, 5)
			pass(&now, 2*time.Second, time.Second, prefill, decoder)
			require.True(t, prefill.ran[id], "after %d turns: %v", turns, failure(prefill.engine, id))
			require.Zero(t, prefill.wrong(uint64(turns), 5))
			_, _, err := prefill.sched.RequestFinished(now, id, lease.StatusAborted, nil, 0) // it owns the blocks as well
			require.NoError(t, err)
			pass(&now, 2*time.Second, time.Second, prefill, decoder)
		}
		start := now
		for day := range 366 {
			for now.Before(start.Add(time.Duration(day) * 24 * time.Hour)) {
				// Traffic every half an hour keeps the connection: engine_ttl is an hour.
				id := fmt.Sprint("kept ", now.Unix())
				prefill.pull(id, decoder.publish(id, 1, 0), 0)
				pass(&now, 2*time.Second, time.Second, prefill, decoder)
				require.True(t, prefill.ran[id], "day %d: %v", day, failure(prefill.engine, id))
				_, _, err := prefill.sched.RequestFinished(now, id, lease.StatusAborted, nil, 0)
				require.NoError(t, err)
				pass(&now, 2*time.Second, time.Second, prefill, decoder)
				time.Sleep(30 * time.Minute)
				now = time.Now()
			}
			turn()
		}
		require.Zero(t, prefill.ranks[0].w.Stats().PeersEvicted, "one connection all the time")

		p := decoder.publish("unread", 9, 4)
		pass(&now, 29*time.Second, time.Second, decoder)
		require.NotContains(t, decoder.freed, "unread")
		sent := prefill.ranks[0].w.Stats().HeartbeatsSent
		prefill.arrive("queued", p)
		pass(&now, 100*time.Second, time.Second, prefill, decoder)
		require.NotContains(t, decoder.freed, "unread", "it was renewed")
		require.InDelta(t, 20, prefill.ranks[0].w.Stats().HeartbeatsSent-sent, 1, "every 5 s")
		_, _, err := prefill.sched.RequestFinished(now, "queued", lease.StatusAborted, nil, 0)
		require.NoError(t, err)
		pass(&now, 2*time.Hour, time.Minute, prefill, decoder)
		require.EqualValues(t, 1, prefill.ranks[0].w.Stats().PeersEvicted, "engine_ttl")
	})
}

// The clocks of two hosts part by 100 ppm on either side: a sample of a year ago, whatever its error, is never believed where it
// could hand out blocks that are gone, and one of ten minutes costs a fraction of a second.
func TestClocksThatDriftAreBelievedAsFarAsTheyGo(t *testing.T) {
	year := 365 * 24 * time.Hour
	for _, ppm := range []float64{-200, -100, 0, 100, 200} { // of the owner's clock against ours
		for _, age := range []time.Duration{0, time.Minute, 10 * time.Minute, 24 * time.Hour, 30 * 24 * time.Hour, year} {
			var c lease.ClockOffset
			start := time.Now()
			require.NoError(t, c.Add(start, start.Add(200*time.Microsecond), 100))
			now := start.Add(age)
			owners := 100 + (age.Seconds())*(1+ppm/1e6)
			for _, left := range []float64{-10, 0, 4.9, 60, 480} {
				deadline := owners + left
				err := c.Check(now, lease.Pull{Request: "r", Expiry: &deadline, LocalBlocks: [][]int{{1}}, Verify: true})
				if left <= 5 {
					require.ErrorIs(t, err, lease.ErrExpired, "%v ppm after %v, %v s left", ppm, age, left)
				} else if age <= 10*time.Minute {
					require.NoError(t, err, "%v ppm after %v, %v s left", ppm, age, left)
				}
			}
		}
	}
}

// Wall clocks step, by an hour and more; nothing here looks at one. A time.Time of time.Now has a monotonic reading, which Sub,
// Before and After use; what would lose it, or ask for the wall clock, is not in the code that decides.
func TestNoWallClockDecides(t *testing.T) {
	wall := regexp.MustCompile(`\.(Unix(Nano|Milli|Micro)?|UTC|Local|Round|Truncate|In|Date|Clock|Hour|Minute|Format|MarshalText)\(\)|time\.(Unix|Date|Parse)\(|\.Round\(0\)`)
	for _, root := range []string{"../../lease", "../../rdma"} {
		require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() && (d.Name() == "bench" || d.Name() == "spec") {
				return filepath.SkipDir
			}
			if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return nil
			}
			src, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			for i, line := range strings.Split(string(src), "\n") {
				code, _, _ := strings.Cut(line, "//")
				if strings.Contains(code, "var past = time.Unix(1, 0)") { // a deadline of a connection that is over in any case
					continue
				}
				require.False(t, wall.MatchString(code), "%s:%d: %s", path, i+1, line)
			}
			return nil
		}))
	}
}
