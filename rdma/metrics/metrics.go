package metrics

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

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
		f.each(&s, func(v float64, label ...string) {
			out <- prometheus.MustNewConstMetric(f.desc, f.kind, v, label...)
		})
	}
}

// family are the series of one name, with at most one label.
type family[S any] struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	each func(s *S, emit func(v float64, label ...string))
}

func counter[S any](name, help string, value func(*S) int64) family[S] {
	return single(prometheus.CounterValue, name, help, value)
}

func gauge[S any](name, help string, value func(*S) int64) family[S] {
	return single(prometheus.GaugeValue, name, help, value)
}

func single[S any](kind prometheus.ValueType, name, help string, value func(*S) int64) family[S] {
	return family[S]{describeOne(name, help), kind, func(s *S, emit func(float64, ...string)) { emit(float64(value(s))) }}
}

// split is a family of one series per value of a label.
func split[S any](kind prometheus.ValueType, name, label, help string, values func(s *S) []part) family[S] {
	return family[S]{describeOne(name, help, label), kind, func(s *S, emit func(float64, ...string)) {
		for _, p := range values(s) {
			emit(float64(p.value), p.label)
		}
	}}
}

type part struct {
	label string
	value int64
}

func describeOne(name, help string, label ...string) *prometheus.Desc {
	return prometheus.NewDesc("nixlgo_"+name, "[ALPHA] "+help, label, nil)
}

// byName names counts that are indexed by a constant of the package lease, from its first one on.
func byName[T ~uint8](counts []int64, name func(T) string) []part {
	var parts []part
	for i, n := range counts {
		if i > 0 {
			parts = append(parts, part{strings.ReplaceAll(name(T(i)), " ", "_"), n})
		}
	}
	return parts
}
