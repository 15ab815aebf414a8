package metrics_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
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
			// A metric is one of these.
			found[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + m.GetHistogram().GetSampleSum()
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
		`nixlgo_load_failures_total{cause="expired"}`, `nixlgo_scheduler_requests{state="pinned"}`,
		`nixlgo_handshake_failures_total{cause="unreachable"}`, `nixlgo_handshake_failures_total{cause="incompatible"}`,
		`nixlgo_notification_failures_total{cause="peer_lost"}`, `nixlgo_notification_failures_total{cause="transfer"}`,
		`nixlgo_transfer_failures_total{cause="peer_lost",op="read"}`, `nixlgo_transfer_failures_total{cause="transfer",op="verify"}`,
		`nixlgo_transfer_posted_total{op="read"}`, `nixlgo_transfer_duration_seconds`, `nixlgo_transfer_post_duration_seconds`,
		`nixlgo_transfer_size_bytes`, `nixlgo_transfer_descriptors`, `nixlgo_verify_duration_seconds`, `nixlgo_lease_margin_seconds`,
		`nixlgo_lease_hold_duration_seconds{reason="read"}`, `nixlgo_lease_oldest_age_seconds`, `nixlgo_lease_pinned_blocks`,
		`nixlgo_lease_pinned_tokens`, `nixlgo_lease_pinned_bytes`, `nixlgo_lease_slots{state="used"}`, `nixlgo_peers{state="connected"}`,
	} {
		require.Contains(t, found, want)
	}
	require.NoError(t, metrics.RegisterBuildInfo(reg))
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

// leaves calls f for every number and every histogram in v, an addressable struct.
func leaves(v reflect.Value, path string, f func(path string, n reflect.Value)) {
	switch {
	case v.Type() == reflect.TypeFor[lease.Histogram]():
		f(path, v.FieldByName("Sum"))
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			leaves(v.Field(i), path+"."+v.Type().Field(i).Name, f)
		}
	case v.Kind() == reflect.Array:
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
		"engine.Freed[0]": "no reason", "engine.Failed[0]": "no cause", "worker.Leases.Held[0]": "no reason",
	}
	shared := map[string]string{ // late read-completes: with another nonce there, or with nothing there
		"nixlgo_lease_late_completions_total": ".Leases.StaleReadCompletes .Leases.DroppedReadCompletes",
	}
	var stats all
	reg := registered(t, stats.sources())
	zero := gather(t, reg)
	series := map[string][]string{}
	try := func(path string, n reflect.Value) {
		if n.CanInt() {
			n.SetInt(int64(time.Second))
		} else {
			n.SetFloat(1)
		}
		d := change(zero, gather(t, reg))
		n.SetZero()
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

// Buckets are neighbours.md (3)'s, which are vLLM's where it has the histogram, and what is counted arrives in them.
func TestHistogramsHaveTheirBuckets(t *testing.T) {
	var stats all
	b := rdma.StatsBounds()
	stats.worker.ReadTime.Observe(.06, b.ReadTime)
	stats.worker.ReadTime.Observe(60, b.ReadTime)
	families, err := registered(t, stats.sources()).Gather()
	require.NoError(t, err)
	found := map[string]*dto.Histogram{}
	for _, f := range families {
		if h := f.GetMetric()[0].GetHistogram(); h != nil {
			found[f.GetName()] = h
		}
	}
	var size []float64
	for v := float64(1 << 11); v <= 1<<33; v *= 4 {
		size = append(size, v)
	}
	times := []float64{.005, .01, .025, .05, .075, .1, .2, .3, .5, .75, 1, 5}
	for name, want := range map[string][]float64{
		"nixlgo_transfer_duration_seconds":      times,
		"nixlgo_transfer_post_duration_seconds": append([]float64{.001}, times...),
		"nixlgo_transfer_size_bytes":            size,
		"nixlgo_transfer_descriptors":           {10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000},
		"nixlgo_lease_margin_seconds":           lease.LeaseSeconds(),
		"nixlgo_lease_hold_duration_seconds":    lease.LeaseSeconds(),
	} {
		var got []float64
		for _, x := range found[name].GetBucket() {
			got = append(got, x.GetUpperBound())
		}
		require.Equal(t, want, got, name)
	}
	h := found["nixlgo_transfer_duration_seconds"]
	require.EqualValues(t, 2, h.GetSampleCount())
	require.Zero(t, h.GetBucket()[3].GetCumulativeCount())
	require.EqualValues(t, 1, h.GetBucket()[4].GetCumulativeCount())
	require.EqualValues(t, 1, h.GetBucket()[11].GetCumulativeCount(), "the other is above every bound")
}

func TestBuildInfoNamesTheLibraryOfTheProcess(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	require.NoError(t, metrics.RegisterBuildInfo(reg))
	require.NoError(t, metrics.RegisterBuildInfo(reg), "again changes nothing")
	lib, err := nixl.Load("")
	require.NoError(t, err)
	families, err := reg.Gather()
	require.NoError(t, err)
	require.Len(t, families, 1)
	require.Equal(t, "nixlgo_build_info", families[0].GetName())
	labels := map[string]string{}
	for _, l := range families[0].GetMetric()[0].GetLabel() {
		labels[l.GetName()] = l.GetValue()
	}
	require.Equal(t, lib.Path, labels["library"])
	require.Regexp(t, `^\d+\.\d+\.\d+$`, labels["nixl_version"])
	require.Equal(t, runtime.Version(), labels["go_version"])
	require.NotEmpty(t, labels["version"])
	require.EqualValues(t, 1, families[0].GetMetric()[0].GetGauge().GetValue())

	other := prometheus.NewPedanticRegistry()
	require.NoError(t, other.Register(prometheus.NewGauge(prometheus.GaugeOpts{Name: "nixlgo_build_info", Help: "another's"})))
	require.ErrorContains(t, metrics.RegisterBuildInfo(other), "nixlgo_build_info")
}

// A request id, an engine or a host as a label would make a series of each.
func TestLabelsAreOfAFixedSet(t *testing.T) {
	const label = `(cause|kind|op|order|reason|result|state)="[a-z_]+"`
	pattern := regexp.MustCompile(`^[a-z_]+(\{` + label + `(,` + label + `)*\})?$`)
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
		n = strings.TrimSuffix(n, "_bucket")
		require.True(t, slices.ContainsFunc(slices.Collect(maps.Keys(found)), func(series string) bool {
			return series == n || strings.HasPrefix(series, strings.TrimSuffix(n, "}")+"=") || strings.HasPrefix(series, n+"{")
		}), n)
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
	return n, registered(t, metrics.NodeSources(n))
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
		maps.DeleteFunc(d, func(name string, v float64) bool {
			return v == 0 || !trouble.MatchString(name) || strings.Contains(name, "duration")
		})
		return d
	}

	read, err := owner.Publish(ctx, "read", []int{1}, 16)
	require.NoError(t, err)
	pinned := gather(t, ownerReg)
	for name, want := range map[string]float64{"nixlgo_lease_pinned_blocks": 1, "nixlgo_lease_pinned_tokens": 16, "nixlgo_lease_pinned_bytes": 4096,
		`nixlgo_lease_slots{state="used"}`: 1, `nixlgo_lease_slots{state="free"}`: 7 + 256} {
		require.Equal(t, want, pinned[name], name)
	}
	require.NoError(t, reader.Fetch(ctx, read.Params(), []int{1}))
	<-read.Done()
	of, rf := gather(t, ownerReg), gather(t, readerReg)
	require.Empty(t, troubles(ownerReg))
	require.Empty(t, troubles(readerReg))
	for name, want := range map[string]float64{`nixlgo_lease_granted_total`: 1, `nixlgo_lease_released_total{reason="read"}`: 1, `nixlgo_lease_active`: 0,
		`nixlgo_lease_slots{state="free"}`: 8 + 256, `nixlgo_handshake_answered_total`: 1, `nixlgo_scheduler_freed_total{reason="read"}`: 1} {
		require.Equal(t, want, of[name], name)
	}
	for name, want := range map[string]float64{`nixlgo_verify_total{result="ok"}`: 1, `nixlgo_transfer_bytes_total`: 4096, `nixlgo_load_received_total`: 1,
		`nixlgo_peers{state="connected"}`: 1, `nixlgo_transfer_pulls`: 0, `nixlgo_transfer_size_bytes`: 4096, `nixlgo_transfer_descriptors`: 1,
		`nixlgo_transfer_posted_total{op="read"}`: 1, `nixlgo_transfer_posted_total{op="verify"}`: 1} {
		require.Equal(t, want, rf[name], name)
	}
	require.InDelta(t, 30, of["nixlgo_lease_margin_seconds"], 29, "of a lease of 30 s")
	require.Positive(t, of[`nixlgo_lease_hold_duration_seconds{reason="read"}`])
	for _, name := range []string{"nixlgo_transfer_duration_seconds", "nixlgo_transfer_post_duration_seconds", "nixlgo_verify_duration_seconds",
		"nixlgo_handshake_duration_seconds"} {
		require.Positive(t, rf[name], name)
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
	require.Positive(t, d[`nixlgo_handshake_failures_total{cause="unreachable"}`])
	for name := range d {
		require.Contains(t, []string{`nixlgo_load_failures_total{cause="handshake"}`, `nixlgo_handshake_failures_total{cause="unreachable"}`, `nixlgo_heartbeat_failures_total`}, name)
	}
}
