package rdmatest_test

import (
	"fmt"
	"time"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// Engine stands for yours: a scheduler, a worker, and what it does with the outcome.
type Engine struct {
	mem   *rdmatest.Memory
	side  *rdma.SideChannel
	work  *rdma.Worker
	sched *lease.Scheduler
	log   []string
}

// NewEngine takes what differs in a test: memory and fabric. Otherwise they are those of rdma.OpenNIXL.
func NewEngine(name string, mem *rdmatest.Memory, fabric rdma.Fabric) *Engine {
	e := &Engine{mem: mem}
	e.side = must(rdma.ListenSideChannel("127.0.0.1", 0, nil))
	e.work = must(rdma.NewWorker(fabric, rdma.WorkerConfig{Engine: name,
		KV: rdma.KV{Regions: []rdma.Region{{Base: mem.Addr(), BlockLen: 4096, Blocks: 8}}}}))
	e.side.Serve(e.work)
	e.sched = must(lease.NewScheduler(lease.SchedulerConfig{Config: lease.DefaultConfig(), Engine: name, Host: "127.0.0.1",
		Port: e.side.Port(), Blocks: 8}))
	return e
}

// Step is one pass of the engine's loop.
func (e *Engine) Step(now time.Time) {
	out := e.sched.OnResults(now, []lease.Result{must(e.work.Step(now, e.sched.BuildPlan(now)))})
	for _, id := range out.Run {
		e.log = append(e.log, id+" runs")
	}
	for _, f := range out.Fail {
		e.log = append(e.log, fmt.Sprintf("%s failed: %s, recompute blocks %v", f.Request, f.Cause, f.InvalidBlocks))
	}
}

func (e *Engine) Close() {
	e.work.Close()
	e.side.Close()
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// A test of one's own engine: does D use blocks whose lease ran out while they were read? No NIXL, no cgo, no sleep.
func Example() {
	net := rdmatest.NewNetwork()
	memP, memD := net.NewMemory(8*4096), net.NewMemory(8*4096)
	p, d := NewEngine("P", memP, net.NewFabric("P", memP)), NewEngine("D", memD, net.NewFabric("D", memD))
	defer p.Close()
	defer d.Close()
	now := time.Now()

	// P prefills block 3 and publishes it.
	p.sched.OnBlocksAllocated(now, "request", &lease.Params{DoRemoteDecode: true}, [][]int{{3}})
	p.Step(now)
	copy(memP.Bytes()[3*4096:], "the request's keys and values")
	params, _, _ := p.sched.RequestFinished(now, "request", lease.StatusLengthCapped, [][]int{{3}}, 16)
	p.Step(now)

	// D reads it into block 5. The test loses D's heartbeats, lets half of the READ land …
	net.HoldNotifications(true)
	net.HoldReads(true)
	d.sched.OnNewRequest(now, "request", params)
	d.sched.OnBlocksAllocated(now, "request", params, [][]int{{5}})
	for len(net.Reads()) == 0 {
		d.Step(now) // the handshake takes real time
	}
	net.Reads()[0].Land(0, 2048)

	// … then the lease runs out, and P uses its block for another request …
	now = now.Add(31 * time.Second)
	p.Step(now)
	copy(memP.Bytes()[3*4096:], "another request's keys and values")

	// … and then the rest lands.
	net.HoldReads(false)
	for len(d.log) == 0 {
		d.Step(now)
	}
	fmt.Println(d.log[0])
	// Output: request failed: lapsed, recompute blocks [[5]]
}
