package rdmatest_test

import (
	"fmt"
	"log"
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
	did   []string
}

const blockBytes = 4096

// NewEngine takes what differs in a test: memory and fabric. Otherwise they are those of rdma.OpenNIXL.
func NewEngine(name string, mem *rdmatest.Memory, fabric rdma.Fabric) *Engine {
	e := &Engine{mem: mem}
	e.side = must(rdma.ListenSideChannel("127.0.0.1", 0, nil))
	e.work = must(rdma.NewWorker(fabric, rdma.WorkerConfig{Engine: name,
		KV: rdma.KV{Regions: []rdma.Region{{Base: mem.Addr(), BlockLen: blockBytes, Blocks: 8}}}}))
	e.side.Serve(e.work)
	e.sched = must(lease.NewScheduler(lease.SchedulerConfig{Config: lease.DefaultConfig(), Engine: name, Host: "127.0.0.1",
		Port: e.side.Port(), Blocks: 8}))
	return e
}

// Step is one pass of the engine's loop.
func (e *Engine) Step(now time.Time) {
	out := e.sched.OnResults(now, []lease.Result{must(e.work.Step(now, e.sched.BuildPlan(now)))})
	for _, f := range out.Free {
		e.did = append(e.did, fmt.Sprintf("P frees the block (%s)", f.Reason))
	}
	for range out.Run {
		e.did = append(e.did, fmt.Sprintf("D decodes %q", e.mem.Bytes()[5*blockBytes:][:5]))
	}
	for _, f := range out.Fail {
		e.did = append(e.did, fmt.Sprintf("D recomputes blocks %v (%s)", f.InvalidBlocks, f.Cause))
	}
}

func (e *Engine) Close() {
	e.work.Close()
	e.side.Close()
}

func must[T any](v T, err error) T {
	check(err)
	return v
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Trial is one request that P prefilled in its block 3 and D is to read into its block 5, on a clock of the test's own.
type Trial struct {
	net  *rdmatest.Network
	p, d *Engine
	now  time.Time
}

func NewTrial() *Trial {
	t := &Trial{net: rdmatest.NewNetwork(), now: time.Now()}
	memP, memD := t.net.NewMemory(8*blockBytes), t.net.NewMemory(8*blockBytes)
	t.p, t.d = NewEngine("P", memP, t.net.NewFabric("P", memP)), NewEngine("D", memD, t.net.NewFabric("D", memD))
	check(t.p.sched.OnBlocksAllocated(t.now, "r", &lease.Params{DoRemoteDecode: true}, [][]int{{3}}))
	t.p.Step(t.now)
	copy(memP.Bytes()[3*blockBytes:], "right")
	params, _, err := t.p.sched.RequestFinished(t.now, "r", lease.StatusLengthCapped, [][]int{{3}}, 16)
	check(err)
	t.p.Step(t.now)

	t.net.HoldReads(true)         // from here on a READ lands when the test says so,
	t.net.HoldNotifications(true) // and a notification arrives when it says so
	check(t.d.sched.OnNewRequest(t.now, "r", params))
	check(t.d.sched.OnBlocksAllocated(t.now, "r", params, [][]int{{5}}))
	for len(t.net.Reads()) == 0 {
		t.d.Step(t.now) // the handshake takes real time; nothing else does
	}
	return t
}

// Pass lets time pass on both engines.
func (t *Trial) Pass(d time.Duration) {
	t.now = t.now.Add(d)
	t.p.Step(t.now)
	t.d.Step(t.now)
}

// Land lets every READ through, block READ and slot READ, and then what notifications there are.
func (t *Trial) Land() {
	t.net.HoldReads(false)
	t.Pass(0)
	t.Pass(0)
	t.net.HoldNotifications(false)
	t.Pass(0)
}

// A test of one's own engine against what a network does rarely, and never when asked. No NIXL, no cgo, no sleep.
func Example() {
	faults := []struct {
		name  string
		cause func(t *Trial)
	}{
		{"no fault", func(t *Trial) {}},
		{"delay: the READ takes 50 s", func(t *Trial) {
			for range 10 { // D's heartbeats arrive meanwhile
				t.Pass(5 * time.Second)
				for _, m := range t.net.Messages() {
					m.Deliver()
				}
			}
		}},
		{"drop: the read-complete is lost", func(t *Trial) {
			t.net.HoldReads(false)
			t.Pass(0)
			t.Pass(0)
			for _, m := range t.net.Messages() {
				m.Drop()
			}
			t.Pass(31 * time.Second)
		}},
		{"reorder: the read-complete overtakes the heartbeats", func(t *Trial) {
			t.net.HoldReads(false)
			t.Pass(6 * time.Second)
			t.Pass(0)
			messages := t.net.Messages()
			for i := range messages {
				messages[len(messages)-1-i].Deliver()
			}
			t.Pass(0)
		}},
		{"stale: the lease runs out amid the READ, and the block is reused", func(t *Trial) {
			t.net.Reads()[0].Land(0, blockBytes/2)
			t.now = t.now.Add(31 * time.Second)
			t.p.Step(t.now)
			copy(t.p.mem.Bytes()[3*blockBytes:], "wrong")
		}},
	}
	for _, fault := range faults {
		t := NewTrial()
		fault.cause(t)
		t.Land()
		fmt.Println(fault.name)
		for _, did := range append(t.d.did, t.p.did...) {
			fmt.Println("   ", did)
		}
		t.d.Close()
		t.p.Close()
	}
	// Output:
	// no fault
	//     D decodes "right"
	//     P frees the block (read)
	// delay: the READ takes 50 s
	//     D decodes "right"
	//     P frees the block (read)
	// drop: the read-complete is lost
	//     D decodes "right"
	//     P frees the block (expired)
	// reorder: the read-complete overtakes the heartbeats
	//     D decodes "right"
	//     P frees the block (read)
	// stale: the lease runs out amid the READ, and the block is reused
	//     D recomputes blocks [[5]] (lapsed)
	//     P frees the block (expired)
}
