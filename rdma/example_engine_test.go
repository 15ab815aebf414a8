package rdma_test

import (
	"fmt"
	"log"
	"slices"
	"time"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
)

const (
	ranks     = 2 // tensor-parallel: one worker each, in earnest in a process of its own beside its GPU
	kvLayers  = 2
	kvBlocks  = 8
	blockSize = 4096 // bytes of one block of one layer on one rank
)

// Engine is a toy model instance: one scheduler, a worker for each rank, and a table of the blocks of its requests.
type Engine struct {
	name    string
	side    *rdma.SideChannel
	sched   *lease.Scheduler
	workers [ranks]*rdma.Worker
	memory  [ranks]*nixl.Buffer
	free    []int            // the block allocator
	blocks  map[string][]int // by request
}

func NewEngine(name string) (*Engine, error) {
	e := &Engine{name: name, free: []int{0, 1, 2, 3, 4, 5, 6, 7}, blocks: map[string][]int{}}
	var err error
	if e.side, err = rdma.ListenSideChannel("127.0.0.1", 0, nil); err != nil {
		return nil, err
	}
	e.sched, err = lease.NewScheduler(lease.SchedulerConfig{Config: lease.DefaultConfig(), Engine: name, Host: "127.0.0.1",
		Port: e.side.Port(), TPSize: ranks, Ranks: ranks, Blocks: kvBlocks, Epoch: rdma.Epoch()})
	if err != nil {
		return nil, err
	}
	for r := range ranks {
		if e.memory[r], err = nixl.AllocBuffer(kvLayers * kvBlocks * blockSize); err != nil {
			return nil, err
		}
		var regions []rdma.Region
		for l := range kvLayers {
			base := e.memory[r].Addr() + uint64(l*kvBlocks*blockSize)
			regions = append(regions, rdma.Region{Base: base, BlockLen: blockSize, Blocks: kvBlocks})
		}
		fabric, err := rdma.OpenNIXL(rdma.NIXLConfig{Memory: []nixl.Memory{e.memory[r]}})
		if err != nil {
			return nil, err
		}
		e.workers[r], err = rdma.NewWorker(fabric, rdma.WorkerConfig{Engine: name, Rank: r, TPSize: ranks,
			KV: rdma.KV{Regions: regions}, Lease: e.sched.Config().Config}) // with as many slots
		if err != nil {
			return nil, err
		}
		e.side.Serve(e.workers[r])
	}
	return e, nil
}

// Schedule gives a request n blocks: to prefill, with params of do_remote_decode, or to read, with those of an owner.
func (e *Engine) Schedule(now time.Time, request string, params *lease.Params, n int) error {
	e.blocks[request], e.free = slices.Clone(e.free[:n]), e.free[n:]
	if err := e.sched.OnNewRequest(now, request, params); err != nil {
		return err
	}
	return e.sched.OnBlocksAllocated(now, request, params, [][]int{e.blocks[request]})
}

// Step is one pass of the engine's loop: one plan for all ranks, a step on each, and what became of the requests. A real
// engine runs its forward pass in between; nothing here waits for a peer.
func (e *Engine) Step(now time.Time) error {
	plan := e.sched.BuildPlan(now)
	var results []lease.Result
	for _, w := range e.workers { // plan and result are plain data, and marshal to JSON
		r, err := w.Step(now, plan)
		if err != nil {
			return err
		}
		results = append(results, r)
	}
	out := e.sched.OnResults(now, results)
	for _, f := range out.Free { // owner: no rank shows the nonce any more, so nobody can use these blocks
		fmt.Printf("%s: %s ended (%s), blocks %v are free\n", e.name, f.Request, f.Reason, e.blocks[f.Request])
		e.reclaim(f.Request)
	}
	for _, request := range out.Run { // reader: the blocks are in on every rank, and proved to be the request's
		fmt.Printf("%s: %s decodes from %q\n", e.name, request, e.Block(1, 1, e.blocks[request][0])[:7])
		if err := e.Finish(now, request, lease.StatusStopped); err != nil {
			return err
		}
	}
	for _, f := range out.Fail { // reader: do not use f.InvalidBlocks; prefill here, or end the request with f.Err
		fmt.Printf("%s: %s failed: %s\n", e.name, f.Request, f.Cause)
		if err := e.Finish(now, f.Request, lease.StatusError); err != nil {
			return err
		}
	}
	for _, s := range out.Settled { // reader: a READ that could not be stopped has ended, and writes these blocks no more
		e.reclaim(s.Request)
	}
	return nil
}

// Finish ends a request. Its blocks are free now, or when an outcome names it.
func (e *Engine) Finish(now time.Time, request string, s lease.Status) error {
	_, later, err := e.sched.RequestFinished(now, request, s, [][]int{e.blocks[request]}, 16*len(e.blocks[request]))
	if err == nil && !later {
		e.reclaim(request)
	}
	return err
}

// Prefill fills the blocks of a request and leases them: the params are for the decode instance.
func (e *Engine) Prefill(now time.Time, request string, n int) (*lease.Params, error) {
	if err := e.Schedule(now, request, &lease.Params{DoRemoteDecode: true}, n); err != nil {
		return nil, err
	}
	if err := e.Step(now); err != nil { // the nonce stands in its slot before the forward pass
		return nil, err
	}
	for r := range ranks {
		for l := range kvLayers {
			for _, b := range e.blocks[request] {
				copy(e.Block(r, l, b), "KV of "+request)
			}
		}
	}
	params, _, err := e.sched.RequestFinished(now, request, lease.StatusLengthCapped, [][]int{e.blocks[request]}, 16*n)
	if err != nil {
		return nil, err
	}
	return params, e.Step(now) // the deadline runs; now the params may leave
}

func (e *Engine) Block(rank, layer, block int) []byte {
	at := (layer*kvBlocks + block) * blockSize
	return e.memory[rank].Bytes()[at : at+blockSize]
}

func (e *Engine) reclaim(request string) {
	e.free = append(e.free, e.blocks[request]...)
	delete(e.blocks, request)
}

func (e *Engine) Close() {
	e.side.Close()
	for r := range ranks {
		e.workers[r].Close() // before the memory that it registered
		e.memory[r].Close()
	}
}

// Two engines of two ranks, over NIXL. P prefills two requests and loses the second one's lease before D reads it.
func Example_engine() {
	p, err := NewEngine("P")
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close()
	d, err := NewEngine("D")
	if err != nil {
		log.Fatal(err)
	}
	defer d.Close()
	run := func(e *Engine, now time.Time, until string) { // the loop of an engine
		for e.blocks[until] != nil {
			time.Sleep(100 * time.Microsecond) // the forward pass
			if err := e.Step(now); err != nil {
				log.Fatal(err)
			}
		}
	}
	for _, request := range []string{"A", "B"} {
		now := time.Now()
		params, err := p.Prefill(now, request, 2)
		if err != nil {
			log.Fatal(err)
		}
		if request == "B" {
			run(p, now.Add(31*time.Second), "B") // D is late, and nobody renewed the lease
		}
		if err := d.Schedule(now, request, params, 2); err != nil {
			log.Fatal(err)
		}
		run(d, now, request)
		if err := d.Step(now); err != nil { // the next pass tells P
			log.Fatal(err)
		}
		run(p, now, request)
	}
	// Output:
	// D: A decodes from "KV of A"
	// P: A ended (read), blocks [0 1] are free
	// P: B ended (expired), blocks [2 3] are free
	// D: B failed: lapsed
}
