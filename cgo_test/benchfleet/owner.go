package main

import (
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
)

const (
	ownerName = "owner"
	blockLen  = 64
)

func requestID(i int) string { return "request-" + strconv.Itoa(i) }

// engine is a Scheduler with one Worker that owns leases, one block each.
type engine struct {
	worker *rdma.Worker
	sched  *lease.Scheduler
	side   *rdma.SideChannel
}

// newEngine makes an owner of blocks over a fabric, which the engine closes.
func newEngine(name string, f rdma.Fabric, kv rdma.Memory, c lease.Config, blocks int) (*engine, error) {
	e := &engine{}
	var err error
	e.worker, err = rdma.NewWorker(f, rdma.WorkerConfig{Engine: name, Lease: c,
		KV: rdma.KV{Regions: []rdma.Region{{Base: kv.Addr(), BlockLen: blockLen, Blocks: blocks}}}})
	if err != nil {
		return nil, err
	}
	if e.side, err = rdma.ListenSideChannel("127.0.0.1", 0, nil); err != nil {
		return nil, errors.Join(err, e.close())
	}
	e.side.Serve(e.worker)
	e.sched, err = lease.NewScheduler(lease.SchedulerConfig{Config: c, Engine: name, Host: "127.0.0.1", Port: e.side.Port(), Ranks: 1, Blocks: blocks})
	if err != nil {
		return nil, errors.Join(err, e.close())
	}
	return e, nil
}

func (e *engine) close() error {
	var err error
	if e.side != nil {
		err = e.side.Close()
	}
	return errors.Join(err, e.worker.Close())
}

func (e *engine) step(now time.Time) error {
	res, err := e.worker.Step(now, e.sched.BuildPlan(now))
	e.sched.OnResults(now, []lease.Result{res})
	return err
}

// publish grants n leases in two steps.
func (e *engine) publish(now func() time.Time, n int) (out []ticket, err error) {
	for i := range n {
		if err := e.sched.OnBlocksAllocated(now(), requestID(i), &lease.Params{DoRemoteDecode: true}, [][]int{{i}}); err != nil {
			return nil, err
		}
	}
	if err := e.step(now()); err != nil {
		return nil, err
	}
	for i := range n {
		p, _, err := e.sched.RequestFinished(now(), requestID(i), lease.StatusLengthCapped, [][]int{{i}}, 1)
		if err != nil {
			return nil, err
		}
		if p == nil || p.Lease == nil {
			return nil, fmt.Errorf("request %d got no lease", i)
		}
		out = append(out, ticket{i, p.Lease.Slot, p.Lease.Nonce})
	}
	return out, e.step(now())
}

// owner is the owner process: it steps every 2 ms, as an idle Node does.
type owner struct {
	*engine
	fleet fleet
	stop  chan struct{}
	ended sync.WaitGroup

	mu      sync.Mutex
	took    []time.Duration // steps of the phase
	work    time.Duration   // most CPU time of one of them
	err     error
	began   time.Time // of the phase, and what the counters were
	cpu     time.Duration
	leases  lease.TableStats
	sampled []sample
}

type sample struct {
	at       time.Time
	renewals int64
	cpu      time.Duration
}

func (o *owner) do(c command) (answer, error) {
	switch c.Cmd {
	case "publish":
		return o.publish(c.Fleet)
	case "renewed":
		return answer{}, o.renewed(int64(c.Times) * int64(o.fleet.Leases))
	case "phase":
		p, err := o.phase()
		return answer{Phase: p}, err
	case "end":
		if o.engine == nil {
			return answer{}, nil
		}
		close(o.stop)
		o.ended.Wait()
		return answer{}, o.close()
	}
	return answer{}, fmt.Errorf("unknown command %q", c.Cmd)
}

func (o *owner) publish(f fleet) (answer, error) {
	fabric, err := rdma.OpenNIXL(rdma.NIXLConfig{})
	if err != nil {
		return answer{}, err
	}
	kv, err := fabric.Alloc(f.Leases * blockLen)
	if err != nil {
		return answer{}, errors.Join(err, fabric.Close())
	}
	e, err := newEngine(ownerName, fabric, kv, f.config(), f.Leases)
	if err != nil {
		return answer{}, err
	}
	o.engine, o.fleet, o.stop = e, f, make(chan struct{})
	tickets, err := e.publish(time.Now, f.Leases)
	if err != nil {
		return answer{}, err
	}
	o.ended.Go(o.loop)
	return answer{Port: e.side.Port(), Leases: tickets}, nil
}

func (o *owner) loop() {
	runtime.LockOSThread() // for its CPU time
	tick := time.NewTimer(0)
	defer tick.Stop()
	var next time.Time
	for {
		select {
		case <-o.stop:
			return
		case <-tick.C:
		}
		used, now := cpu(unix.CLOCK_THREAD_CPUTIME_ID), time.Now()
		err := o.step(now)
		took, work := time.Since(now), cpu(unix.CLOCK_THREAD_CPUTIME_ID)-used
		var s sample
		if now.After(next) {
			s = sample{now, o.worker.Stats().Leases.Renewals, cpu(unix.CLOCK_PROCESS_CPUTIME_ID)}
		}
		o.mu.Lock()
		o.err = errors.Join(o.err, err)
		o.took, o.work = append(o.took, took), max(o.work, work)
		if now.After(next) {
			o.sampled = append(o.sampled, s)
			next = now.Add(o.fleet.config().Interval())
		}
		o.mu.Unlock()
		tick.Reset(2 * time.Millisecond)
	}
}

// renewed waits until there were that many renewals in this phase.
func (o *owner) renewed(want int64) error {
	for until := time.Now().Add(patience - 5*time.Second); ; time.Sleep(5 * time.Millisecond) {
		s := o.worker.Stats().Leases
		o.mu.Lock()
		err, n := o.err, s.Renewals-o.leases.Renewals
		o.mu.Unlock()
		switch {
		case err != nil:
			return err
		case s.Live != int64(o.fleet.Leases):
			return fmt.Errorf("%d of %d leases are left: the machine is too slow for leases of %s", s.Live, o.fleet.Leases, o.fleet.Duration)
		case n >= want:
			return nil
		case time.Now().After(until):
			return fmt.Errorf("%d of %d renewals came", n, want)
		}
	}
}

// phase ends a phase and begins the next.
func (o *owner) phase() (phase, error) {
	s, used, now := o.worker.Stats().Leases, cpu(unix.CLOCK_PROCESS_CPUTIME_ID), time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	p := phase{Wall: now.Sub(o.began), CPU: used - o.cpu, Renewals: s.Renewals - o.leases.Renewals, Messages: s.Heartbeats - o.leases.Heartbeats,
		Live: s.Live}
	p.steps(o.took)
	p.MaxCPU = micro(o.work)
	for i := 1; i < len(o.sampled); i++ {
		a, b := o.sampled[i-1], o.sampled[i]
		n := float64(b.renewals - a.renewals)
		p.Rates = append(p.Rates, n/b.at.Sub(a.at).Seconds())
		if n > 0 {
			p.Costs = append(p.Costs, float64((b.cpu-a.cpu).Nanoseconds())/n)
		}
	}
	p.RSS, p.FDs = resources()
	o.took, o.work, o.sampled, o.began, o.cpu, o.leases = o.took[:0], 0, nil, now, used, s
	return p, o.err
}

// readers is a process with several readers, stepped in turn.
type readers struct {
	all   []*reader
	stop  chan struct{}
	ended sync.WaitGroup
	err   error // of the loop
}

// reader renews leases and reads nothing.
type reader struct {
	worker *rdma.Worker
	sched  *lease.Scheduler
}

func newReader(f rdma.Fabric, m rdma.Memory, name string, c lease.Config) (*reader, error) {
	w, err := rdma.NewWorker(f, rdma.WorkerConfig{Engine: name, Lease: c, HoldOnly: true, MaxSeqs: 1, HandshakeTimeout: 20 * time.Second,
		KV: rdma.KV{Regions: []rdma.Region{{Base: m.Addr(), BlockLen: blockLen, Blocks: 1}}}})
	if err != nil {
		return nil, err
	}
	s, err := lease.NewScheduler(lease.SchedulerConfig{Config: c, Engine: name, Host: "127.0.0.1", Ranks: 1, Blocks: 1, MaxSeqs: 1})
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return &reader{w, s}, nil
}

func (r *reader) hold(now time.Time, owner string, port int, tickets []ticket) error {
	for _, t := range tickets {
		err := r.sched.Hold(now, requestID(t.ID), &lease.Params{DoRemotePrefill: true, RemoteEngineID: owner, RemoteHost: "127.0.0.1", RemotePort: port,
			RemoteRequestID: requestID(t.ID), RemoteBlockIDs: [][]int{{t.ID}}, TPSize: 1, Lease: &lease.SlotRef{Slot: t.Slot, Nonce: t.Nonce}})
		if err != nil {
			return err
		}
	}
	return nil
}

// step is one step; heartbeats that could not be sent are an error.
func (r *reader) step(now time.Time) error {
	res, err := r.worker.Step(now, r.sched.BuildPlan(now))
	r.sched.OnResults(now, []lease.Result{res})
	if err == nil && len(res.HeartbeatFailed) > 0 {
		err = errors.New("a heartbeat could not be sent")
	}
	return err
}

func (rs *readers) do(c command) (answer, error) {
	switch c.Cmd {
	case "open":
		for i := range c.Fleet.Readers {
			kv, err := nixl.AllocBuffer(blockLen)
			if err != nil {
				return answer{}, err
			}
			f, err := rdma.OpenNIXL(rdma.NIXLConfig{Memory: []nixl.Memory{kv}})
			if err != nil {
				return answer{}, err
			}
			r, err := newReader(f, kv, fmt.Sprintf("reader-%d-%d", c.Number, i), c.Fleet.config())
			if err != nil {
				return answer{}, err
			}
			rs.all = append(rs.all, r)
		}
		return answer{}, nil
	case "hold":
		each := (len(c.Leases) + len(rs.all) - 1) / len(rs.all)
		for i, r := range rs.all {
			if err := r.hold(time.Now(), ownerName, c.Port, c.Leases[min(i*each, len(c.Leases)):min((i+1)*each, len(c.Leases))]); err != nil {
				return answer{}, err
			}
		}
		rs.stop = make(chan struct{})
		rs.ended.Go(rs.loop)
		return answer{}, nil
	case "quiet":
		return answer{}, rs.quiet()
	case "end":
		err := rs.quiet()
		for _, r := range rs.all {
			err = errors.Join(err, r.worker.Close())
		}
		return answer{}, err
	}
	return answer{}, fmt.Errorf("unknown command %q", c.Cmd)
}

// quiet ends the heartbeats.
func (rs *readers) quiet() error {
	if rs.stop != nil {
		close(rs.stop)
		rs.stop = nil
	}
	rs.ended.Wait()
	return rs.err
}

// loop steps the readers; it does not hurry, for only what the owner does is measured.
func (rs *readers) loop() {
	stop, tick := rs.stop, time.NewTicker(10*time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		for _, r := range rs.all {
			if err := r.step(time.Now()); err != nil {
				rs.err = err
				return
			}
		}
	}
}
