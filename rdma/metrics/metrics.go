package metrics

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

// Sources are where the numbers come from at each collection: the Stats methods of what there is. Those that are nil have
// no series. They are called from any goroutine. lease.Scheduler.Stats needs the lock of its engine; a nixlgo.Node has it.
type Sources struct {
	Worker      func() rdma.WorkerStats
	Scheduler   func() lease.SchedulerStats
	SideChannel func() rdma.SideChannelStats
	LongestStep func() time.Duration // nixlgo.Stats.LongestStep
}

// NodeSources are the sources of a node.
func NodeSources(n *nixlgo.Node) Sources {
	return Sources{
		Worker:      func() rdma.WorkerStats { return n.Stats().Worker },
		Scheduler:   func() lease.SchedulerStats { return n.Stats().Scheduler },
		SideChannel: func() rdma.SideChannelStats { return n.Stats().SideChannel },
		LongestStep: func() time.Duration { return n.Stats().LongestStep },
	}
}

// Collector is a prometheus.Collector over Sources. It is safe for concurrent use.
type Collector struct {
	mu  sync.Mutex
	src Sources
}

// New makes a Collector that is not registered.
func New(src Sources) *Collector { return &Collector{src: src} }

// Register registers a Collector over src with reg. If there is one of the same series already, that one reads src from now
// on and is returned: a worker that was made anew goes on under its old names. Ranks of one process need a label each:
//
//	metrics.Register(prometheus.WrapRegistererWith(prometheus.Labels{"rank": "0"}, reg), metrics.Sources{Worker: w.Stats})
func Register(reg prometheus.Registerer, src Sources) (*Collector, error) {
	c := New(src)
	err := reg.Register(c)
	if err == nil {
		return c, nil
	}
	if again, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if old, ok := again.ExistingCollector.(*Collector); ok {
			old.mu.Lock()
			defer old.mu.Unlock()
			old.src = src
			return old, nil
		}
	}
	return nil, fmt.Errorf("metrics: register: %w", err)
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(out chan<- *prometheus.Desc) {
	src := c.sources()
	describe(out, worker, src.Worker)
	describe(out, scheduler, src.Scheduler)
	describe(out, sideChannel, src.SideChannel)
	describe(out, longestStep, src.LongestStep)
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(out chan<- prometheus.Metric) {
	src := c.sources()
	collect(out, worker, src.Worker)
	collect(out, scheduler, src.Scheduler)
	collect(out, sideChannel, src.SideChannel)
	collect(out, longestStep, src.LongestStep)
}

func (c *Collector) sources() Sources {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.src
}

func describe[S any](out chan<- *prometheus.Desc, fs []family[S], stats func() S) {
	if stats == nil {
		return
	}
	for _, f := range fs {
		out <- f.desc
	}
}

func collect[S any](out chan<- prometheus.Metric, fs []family[S], stats func() S) {
	if stats == nil {
		return
	}
	s := stats()
	for _, f := range fs {
		f.collect(f.desc, &s, out)
	}
}

// family are the series of one name.
type family[S any] struct {
	desc    *prometheus.Desc
	collect func(desc *prometheus.Desc, s *S, out chan<- prometheus.Metric)
}

func counter[S any](name, help string, value func(*S) int64) family[S] {
	return single(prometheus.CounterValue, name, help, func(s *S) float64 { return float64(value(s)) })
}

func gauge[S any](name, help string, value func(*S) int64) family[S] {
	return single(prometheus.GaugeValue, name, help, func(s *S) float64 { return float64(value(s)) })
}

func seconds[S any](name, help string, value func(*S) time.Duration) family[S] {
	return single(prometheus.GaugeValue, name, help, func(s *S) float64 { return value(s).Seconds() })
}

func single[S any](kind prometheus.ValueType, name, help string, value func(*S) float64) family[S] {
	return family[S]{describeOne(name, help), func(desc *prometheus.Desc, s *S, out chan<- prometheus.Metric) {
		out <- prometheus.MustNewConstMetric(desc, kind, value(s))
	}}
}

// split is a family of one series per value of its labels.
func split[S any](kind prometheus.ValueType, name, help string, labels []string, values func(s *S) []part) family[S] {
	return family[S]{describeOne(name, help, labels...), func(desc *prometheus.Desc, s *S, out chan<- prometheus.Metric) {
		for _, p := range values(s) {
			out <- prometheus.MustNewConstMetric(desc, kind, float64(p.value), p.labels...)
		}
	}}
}

// part is one series of a split family.
type part struct {
	value  int64
	labels []string
}

func of(value int64, labels ...string) part { return part{value, labels} }

func histogram[S any](name, help string, bounds []float64, value func(*S) *lease.Histogram) family[S] {
	return family[S]{describeOne(name, help), func(desc *prometheus.Desc, s *S, out chan<- prometheus.Metric) {
		out <- constHistogram(desc, value(s), bounds)
	}}
}

func constHistogram(desc *prometheus.Desc, h *lease.Histogram, bounds []float64, labels ...string) prometheus.Metric {
	upTo, n := make(map[float64]uint64, len(bounds)), int64(0)
	for i, b := range bounds {
		n += h.Buckets[i]
		upTo[b] = uint64(n)
	}
	return prometheus.MustNewConstHistogram(desc, uint64(h.Count), h.Sum, upTo, labels...)
}

func describeOne(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("nixlgo_"+name, "[ALPHA] "+help, labels, nil)
}

// byName names what is indexed by a constant, from the index first on.
func byName[T ~uint8](counts []int64, first T, name func(T) string) []part {
	var parts []part
	for i := first; int(i) < len(counts); i++ {
		parts = append(parts, of(counts[i], label(name(i))))
	}
	return parts
}

// label is a name as the value of a label.
func label(name string) string { return strings.ReplaceAll(name, " ", "_") }
