package metrics_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/metrics"
)

// TestMain leaves by the system call: the exit of libc runs a destructor of the wheel's libnl that crashes under -race.
func TestMain(m *testing.M) { syscall.Exit(m.Run()) }

// all are sources of every kind, of what is set in them.
type all struct {
	worker rdma.WorkerStats
	engine lease.SchedulerStats
	side   rdma.SideChannelStats
	step   time.Duration
}

func (a *all) sources() metrics.Sources {
	return metrics.Sources{
		Worker: func() rdma.WorkerStats { return a.worker }, Scheduler: func() lease.SchedulerStats { return a.engine },
		SideChannel: func() rdma.SideChannelStats { return a.side }, LongestStep: func() time.Duration { return a.step },
	}
}

// gather is what a scrape finds: value by name{label="value"}.
func gather(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	require.NoError(t, err)
	found := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			name := f.GetName()
			if len(labels) > 0 {
				name += "{" + strings.Join(labels, ",") + "}"
			}
			// A metric has one of the two.
			found[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return found
}

func registered(t *testing.T, src metrics.Sources) *prometheus.Registry {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	_, err := metrics.Register(reg, src)
	require.NoError(t, err)
	return reg
}

// change is how the series of to differ from those of from.
func change(from, to map[string]float64) map[string]float64 {
	d := map[string]float64{}
	for name, v := range to {
		if v != from[name] {
			d[name] = v - from[name]
		}
	}
	return d
}

func TestEverySeriesIsThereFromTheStartAndLinted(t *testing.T) {
	reg := registered(t, new(all).sources())
	found := gather(t, reg)
	for name, v := range found {
		require.Zero(t, v, name)
	}
	for _, want := range []string{
		`nixlgo_verify_total{result="lapsed"}`, `nixlgo_verify_total{result="unverifiable"}`, `nixlgo_lease_expired_total`,
		`nixlgo_lease_released_total{reason="read"}`, `nixlgo_lease_renewed_total`, `nixlgo_lease_granted_total`, `nixlgo_lease_active`,
		`nixlgo_lease_slots{state="free"}`, `nixlgo_lease_late_completions_total`, `nixlgo_load_failures_total{cause="peer_lost"}`,
		`nixlgo_load_failures_total{cause="transfer"}`, `nixlgo_load_failures_total{cause="lapsed"}`,
		`nixlgo_load_failures_total{cause="expired"}`, `nixlgo_handshake_failures_total`, `nixlgo_notification_failures_total`,
		`nixlgo_scheduler_requests{state="pinned"}`,
	} {
		require.Contains(t, found, want)
	}
	families, err := reg.Gather()
	require.NoError(t, err)
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	require.NoError(t, err)
	require.Empty(t, problems)
	for _, f := range families {
		require.True(t, strings.HasPrefix(f.GetName(), "nixlgo_"), f.GetName())
		require.True(t, strings.HasPrefix(f.GetHelp(), "[ALPHA] "), f.GetName())
	}
}

// leaves calls f for every number in v, an addressable struct.
func leaves(v reflect.Value, path string, f func(path string, n reflect.Value)) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			leaves(v.Field(i), path+"."+v.Type().Field(i).Name, f)
		}
	case reflect.Array:
		for i := range v.Len() {
			leaves(v.Index(i), fmt.Sprintf("%s[%d]", path, i), f)
		}
	default:
		f(path, v)
	}
}

// A counter that is added to Stats must be shown, or be named here with the reason. Expiry, lapse, transport failure and lost
// peer never share a series.
func TestEveryNumberOfStatsHasASeriesOfItsOwn(t *testing.T) {
	left := map[string]string{
		"worker.TransfersFailed": "adds failed READs and lost peers up",
		"engine.Freed[0]":        "no reason", "engine.Failed[0]": "no cause",
	}
	shared := map[string]string{ // late read-completes: with another nonce there, or with nothing there
		"nixlgo_lease_late_completions_total": ".Leases.StaleReadCompletes .Leases.DroppedReadCompletes",
	}
	var stats all
	reg := registered(t, stats.sources())
	zero := gather(t, reg)
	series := map[string][]string{}
	try := func(path string, n reflect.Value) {
		n.SetInt(int64(time.Second))
		d := change(zero, gather(t, reg))
		n.SetInt(0)
		if left[path] != "" {
			require.Empty(t, d, path)
			return
		}
		require.Len(t, d, 1, path)
		for name, v := range d {
			require.Contains(t, []float64{1, 1e9}, v)
			series[name] = append(series[name], path)
		}
	}
	leaves(reflect.ValueOf(&stats.worker).Elem(), "worker", try)
	leaves(reflect.ValueOf(&stats.engine).Elem(), "engine", try)
	leaves(reflect.ValueOf(&stats.side).Elem(), "side", try)
	try("step", reflect.ValueOf(&stats.step).Elem())
	for name, paths := range series {
		if want := shared[name]; want != "" {
			require.ElementsMatch(t, strings.Fields(strings.ReplaceAll(want, ".Leases", "worker.Leases")), paths)
			continue
		}
		require.Len(t, paths, 1, name)
	}
	require.ElementsMatch(t, slices.Collect(maps.Keys(zero)), slices.Collect(maps.Keys(series)), "a series that nothing moves")
}

// A request id, an engine or a host as a label would make a series of each.
func TestLabelsAreOfAFixedSet(t *testing.T) {
	pattern := regexp.MustCompile(`^[a-z_]+(\{(cause|kind|order|reason|result|state)="[a-z_]+"\})?$`)
	for name := range gather(t, registered(t, new(all).sources())) {
		require.Regexp(t, pattern, name)
	}
}

func TestAnotherRegistrationTakesOver(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	first, second := new(all), new(all)
	first.worker.Steps, second.worker.Steps = 1, 2
	a, err := metrics.Register(reg, first.sources())
	require.NoError(t, err)
	b, err := metrics.Register(reg, second.sources())
	require.NoError(t, err)
	require.Same(t, a, b)
	require.EqualValues(t, 2, gather(t, reg)["nixlgo_worker_steps_total"])

	other := prometheus.NewPedanticRegistry()
	require.NoError(t, other.Register(prometheus.NewGauge(prometheus.GaugeOpts{Name: "nixlgo_lease_active", Help: "another's"})))
	_, err = metrics.Register(other, first.sources())
	require.ErrorContains(t, err, "nixlgo_lease_active")
}

func TestRanksOfOneProcessHaveALabelEach(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	for rank := range 2 {
		s := new(all)
		s.worker.Steps = int64(rank + 5)
		for range 2 { // again changes nothing
			_, err := metrics.Register(prometheus.WrapRegistererWith(prometheus.Labels{"rank": fmt.Sprint(rank)}, reg), metrics.Sources{Worker: s.sources().Worker})
			require.NoError(t, err)
		}
	}
	_, err := metrics.Register(reg, metrics.Sources{Scheduler: new(all).sources().Scheduler})
	require.NoError(t, err)
	found := gather(t, reg)
	require.EqualValues(t, 5, found[`nixlgo_worker_steps_total{rank="0"}`])
	require.EqualValues(t, 6, found[`nixlgo_worker_steps_total{rank="1"}`])
	require.Contains(t, found, "nixlgo_load_started_total")
	require.NotContains(t, found, "nixlgo_handshake_answered_total")
}

func TestTheDocumentationNamesRealSeries(t *testing.T) {
	doc, err := os.ReadFile("doc.go")
	require.NoError(t, err)
	named := regexp.MustCompile(`nixlgo_\w+(\{\w+(="\w+")?\})?`).FindAllString(string(doc), -1)
	require.Greater(t, len(named), 10)
	found := gather(t, registered(t, new(all).sources()))
	for _, n := range named {
		require.True(t, slices.ContainsFunc(slices.Collect(maps.Keys(found)), func(series string) bool {
			return series == n || strings.HasPrefix(series, strings.TrimSuffix(n, "}")+"=") || strings.HasPrefix(series, n+"{")
		}), n)
	}
}

// nodeSources are what a program with a Node registers.
func nodeSources(n *nixlgo.Node) metrics.Sources {
	return metrics.Sources{
		Worker:      func() rdma.WorkerStats { return n.Stats().Worker },
		Scheduler:   func() lease.SchedulerStats { return n.Stats().Scheduler },
		SideChannel: func() rdma.SideChannelStats { return n.Stats().SideChannel },
		LongestStep: func() time.Duration { return n.Stats().LongestStep },
	}
}

func startNode(t *testing.T, c nixlgo.Config) (*nixlgo.Node, *prometheus.Registry) {
	t.Helper()
	c.Layers, c.Blocks, c.BlockBytes = 1, 8, 4096
	n, err := nixlgo.New(c)
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- n.Run(context.Background()) }()
	t.Cleanup(func() {
		require.NoError(t, n.Close())
		require.NoError(t, <-ended)
	})
	return n, registered(t, nodeSources(n))
}

// Over real NIXL, while something scrapes all the time: what happened moves its own series, and no other of those that stand
// for trouble.
func TestWhatHappenedMovesItsOwnSeries(t *testing.T) {
	lc := lease.DefaultConfig()
	lc.Duration = 300 * time.Millisecond
	owner, ownerReg := startNode(t, nixlgo.Config{})
	shortLived, shortReg := startNode(t, nixlgo.Config{Lease: lc})
	reader, readerReg := startNode(t, nixlgo.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var scrapes sync.WaitGroup
	defer scrapes.Wait()
	scraping, stop := context.WithCancel(ctx)
	defer stop()
	for _, reg := range []*prometheus.Registry{ownerReg, readerReg} {
		scrapes.Go(func() {
			for scraping.Err() == nil {
				if _, err := reg.Gather(); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
	trouble := regexp.MustCompile(`expired|aborted|failures|lapsed|unverifiable|missed|late|unmatched|malformed|refused|duplicate|nonceless|overtaken|without_slot|reports`)
	troubles := func(reg *prometheus.Registry) map[string]float64 {
		d := gather(t, reg)
		maps.DeleteFunc(d, func(name string, v float64) bool { return v == 0 || !trouble.MatchString(name) })
		return d
	}

	read, err := owner.Publish(ctx, "read", []int{1}, 16)
	require.NoError(t, err)
	require.NoError(t, reader.Fetch(ctx, read.Params(), []int{1}))
	<-read.Done()
	of, rf := gather(t, ownerReg), gather(t, readerReg)
	require.Empty(t, troubles(ownerReg))
	require.Empty(t, troubles(readerReg))
	for name, want := range map[string]float64{`nixlgo_lease_granted_total`: 1, `nixlgo_lease_released_total{reason="read"}`: 1, `nixlgo_lease_active`: 0,
		`nixlgo_lease_slots{state="free"}`: 8, `nixlgo_handshake_answered_total`: 1, `nixlgo_scheduler_freed_total{reason="read"}`: 1} {
		require.Equal(t, want, of[name], name)
	}
	for name, want := range map[string]float64{`nixlgo_verify_total{result="ok"}`: 1, `nixlgo_transfer_bytes_total`: 4096, `nixlgo_load_received_total`: 1,
		`nixlgo_peer_connections`: 1, `nixlgo_transfer_pulls`: 0} {
		require.Equal(t, want, rf[name], name)
	}

	// Released by its owner before it is read: the reader finds a lapse.
	gone, err := owner.Publish(ctx, "gone", []int{1}, 16)
	require.NoError(t, err)
	require.NoError(t, gone.Revoke())
	<-gone.Done()
	require.ErrorIs(t, reader.Fetch(ctx, gone.Params(), []int{1}), lease.ErrLapsed)
	require.Equal(t, map[string]float64{`nixlgo_verify_total{result="lapsed"}`: 1, `nixlgo_load_failures_total{cause="lapsed"}`: 1}, troubles(readerReg))
	require.Subset(t, troubles(ownerReg), map[string]float64{`nixlgo_lease_released_total{reason="aborted"}`: 1, `nixlgo_scheduler_freed_total{reason="aborted"}`: 1})
	require.Zero(t, troubles(ownerReg)["nixlgo_lease_expired_total"])

	// Nobody came.
	late, err := shortLived.Publish(ctx, "late", []int{1}, 16)
	require.NoError(t, err)
	<-late.Done()
	require.Equal(t, map[string]float64{`nixlgo_lease_expired_total`: 1, `nixlgo_scheduler_freed_total{reason="expired"}`: 1}, troubles(shortReg))

	// Nobody is there.
	before := troubles(readerReg)
	nowhere := late.Params()
	nowhere.RemotePort, nowhere.RemoteEngineID = 1, "nowhere"
	require.ErrorIs(t, reader.Fetch(ctx, nowhere, []int{1}), lease.ErrHandshake)
	d := change(before, troubles(readerReg))
	require.EqualValues(t, 1, d[`nixlgo_load_failures_total{cause="handshake"}`])
	require.Positive(t, d[`nixlgo_handshake_failures_total`])
	for name := range d {
		require.Contains(t, []string{`nixlgo_load_failures_total{cause="handshake"}`, `nixlgo_handshake_failures_total`, `nixlgo_heartbeat_failures_total`}, name)
	}
}
