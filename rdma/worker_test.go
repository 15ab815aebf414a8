package rdma

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/ports"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
)

// TestMain leaves by the system call: the exit of libc runs a destructor of the wheel's libnl that crashes under -race.
func TestMain(m *testing.M) { syscall.Exit(m.Run()) }

const (
	testLayers = 3
	testBlocks = 16
	testLen    = 4096
)

// engine is one rank with its scheduler, on a clock that the test moves.
type engine struct {
	t     *testing.T
	now   *time.Time
	kv    *nixl.Buffer
	side  *SideChannel
	w     *Worker
	sched *lease.Scheduler
	steps int

	freed   map[string]lease.Reason
	ran     map[string]bool
	failed  map[string]lease.Failed
	settled map[string]bool
}

func newEngine(t *testing.T, now *time.Time, name string, change ...func(*WorkerConfig)) *engine {
	t.Helper()
	e := &engine{t: t, now: now, freed: map[string]lease.Reason{}, ran: map[string]bool{}, failed: map[string]lease.Failed{}, settled: map[string]bool{}}
	var err error
	e.kv, err = nixl.AllocBuffer(testLayers * testBlocks * testLen)
	require.NoError(t, err)
	cfg := WorkerConfig{Engine: name, Lease: lease.DefaultConfig(), MaxSeqs: 4}
	for l := range testLayers {
		cfg.KV.Regions = append(cfg.KV.Regions, Region{Base: e.kv.Addr() + uint64(l*testBlocks*testLen), BlockLen: testLen, Blocks: testBlocks})
	}
	for _, f := range change {
		f(&cfg)
	}
	f, err := OpenNIXL(NIXLConfig{Memory: []nixl.Memory{e.kv}})
	require.NoError(t, err)
	e.w, err = NewWorker(f, cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, e.w.Close())
		require.NoError(t, e.kv.Close())
	})
	e.side, err = ListenSideChannel("127.0.0.1", 0, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.side.Close()) })
	e.side.Serve(e.w)
	e.sched, err = lease.NewScheduler(lease.SchedulerConfig{Config: cfg.Lease, Engine: name, Host: "127.0.0.1", Port: e.side.Port(),
		TPSize: 1, Ranks: 1, Blocks: testBlocks, MaxSeqs: cfg.MaxSeqs})
	require.NoError(t, err)
	return e
}

// step runs one step at the test's time.
func (e *engine) step() {
	e.t.Helper()
	e.steps++
	res, err := e.w.Step(*e.now, e.sched.BuildPlan(*e.now))
	require.NoError(e.t, err)
	out := e.sched.OnResults(*e.now, []lease.Result{res})
	for _, f := range out.Free {
		e.freed[f.Request] = f.Reason
	}
	for _, id := range out.Run {
		e.ran[id] = true
	}
	for _, f := range out.Fail {
		e.failed[f.Request] = f
	}
	for _, s := range out.Settled {
		e.settled[s.Request] = true
	}
	if len(out.Run) > 0 {
		e.step() // which tells the owners
	}
}

// until steps the engines in turn, on the real network but on the test's clock, until done.
func until(t *testing.T, what string, done func() bool, engines ...*engine) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !done(); {
		require.True(t, time.Now().Before(deadline), "waited for: %s", what)
		for _, e := range engines {
			e.step()
		}
		time.Sleep(100 * time.Microsecond)
	}
}

func (e *engine) block(layer, b int) []byte {
	at := (layer*testBlocks + b) * testLen
	return e.kv.Bytes()[at : at+testLen]
}

func (e *engine) fill(v byte, blocks ...int) {
	for _, b := range blocks {
		for l := range testLayers {
			copy(e.block(l, b), bytes.Repeat([]byte{v}, testLen))
		}
	}
}

// holds reports whether every byte of blocks is v.
func (e *engine) holds(v byte, blocks ...int) bool {
	for _, b := range blocks {
		for l := range testLayers {
			if !bytes.Equal(e.block(l, b), bytes.Repeat([]byte{v}, testLen)) {
				return false
			}
		}
	}
	return true
}

// publish prefills a request in one step and exports it.
func (e *engine) publish(id string, blocks ...int) *lease.Params {
	e.t.Helper()
	groups := [][]int{blocks}
	require.NoError(e.t, e.sched.OnBlocksAllocated(*e.now, id, &lease.Params{DoRemoteDecode: true}, groups))
	e.step()
	p, delay, err := e.sched.RequestFinished(*e.now, id, lease.StatusLengthCapped, groups, len(blocks)*16)
	require.NoError(e.t, err)
	require.True(e.t, delay)
	e.step()
	return p
}

func (e *engine) arrive(id string, p *lease.Params) {
	e.t.Helper()
	require.NoError(e.t, e.sched.OnNewRequest(*e.now, id, p))
}

func (e *engine) pull(id string, p *lease.Params, blocks ...int) {
	e.t.Helper()
	e.arrive(id, p)
	require.NoError(e.t, e.sched.OnBlocksAllocated(*e.now, id, p, [][]int{blocks}))
}

func pair2(t *testing.T, change ...func(*WorkerConfig)) (now *time.Time, owner, reader *engine) {
	start := time.Now()
	now = &start
	return now, newEngine(t, now, "owner", change...), newEngine(t, now, "reader", change...)
}

// vllm#21570, aws-do-eks#84, vllm#52234, cases.md 1 (a).
func TestLeasedReadIsVerifiedAndReleasesTheOwner(t *testing.T) {
	now, owner, reader := pair2(t)
	owner.fill(0xA1, 0, 1, 2, 3)
	p := owner.publish("req", 0, 1, 2, 3)
	require.NotNil(t, p.Lease)
	*now = now.Add(10 * time.Second)
	reader.pull("local", p, 5, 6, 7, 8)
	until(t, "the read", func() bool { return reader.ran["local"] }, reader)
	require.True(t, reader.holds(0xA1, 5, 6, 7, 8))
	until(t, "the owner's blocks", func() bool { return owner.freed["req"] == lease.ReasonRead }, owner)
	s := reader.w.Stats()
	require.EqualValues(t, 1, s.Verified)
	require.EqualValues(t, 1, s.Checks)
	require.EqualValues(t, 4*testLayers*testLen, s.BytesRead)
	require.Zero(t, s.Pulls)
	require.Empty(t, reader.failed)
}

// vllm#52234, cases.md 1 (b): the ticket of an ended lease reads the next request's blocks, and is refused.
func TestReadAfterTheLeaseLapsedIsRefused(t *testing.T) {
	now, owner, reader := pair2(t)
	owner.fill(0xA1, 0, 1)
	p := owner.publish("req", 0, 1)
	*now = now.Add(31 * time.Second)
	owner.step()
	require.Equal(t, lease.ReasonExpired, owner.freed["req"])
	owner.fill(0xB2, 0, 1)
	second := owner.publish("next", 0, 1)
	reader.pull("local", p, 5, 6)
	until(t, "the verdict", func() bool { return len(reader.failed) > 0 }, reader)
	require.ErrorIs(t, reader.failed["local"].Err, lease.ErrLapsed)
	require.False(t, reader.failed["local"].Quarantined)
	require.EqualValues(t, 1, reader.w.Stats().Lapsed)
	require.Empty(t, reader.ran)
	reader.pull("again", second, 5, 6)
	until(t, "the next request's own read", func() bool { return reader.ran["again"] }, reader)
	require.True(t, reader.holds(0xB2, 5, 6))
}

// vllm#52234, cases.md 1 (c): the blocks are reused between the block READ and the slot READ.
func TestLeaseThatLapsesBetweenReadAndCheckIsRefused(t *testing.T) {
	var lapse func()
	now, owner, reader := pair2(t, func(c *WorkerConfig) {
		c.Trace.BeforeCheck = func(string, int, int) { lapse() }
	})
	owner.fill(0xA1, 0)
	p := owner.publish("req", 0)
	lapse = func() {
		require.True(t, reader.holds(0xA1, 5), "the READ itself is in")
		owner.step() // the heartbeat that left with the handshake still counts from now
		*now = now.Add(31 * time.Second)
		owner.step()
		require.Equal(t, lease.ReasonExpired, owner.freed["req"])
		owner.fill(0xB2, 0)
		owner.publish("next", 0)
	}
	reader.pull("local", p, 5)
	until(t, "the verdict", func() bool { return len(reader.failed) > 0 }, reader)
	require.ErrorIs(t, reader.failed["local"].Err, lease.ErrLapsed)
	require.Empty(t, reader.ran)
	until(t, "nothing said to the owner", func() bool { return reader.w.Stats().Pulls == 0 }, reader)
	owner.step()
	require.NotContains(t, owner.freed, "next", "a refused reader does not complete anything")
}

// Specification: heartbeats start when the request arrives, and keep the lease while it queues.
func TestQueuedRequestIsKeptAliveByHeartbeatsAlone(t *testing.T) {
	now, owner, reader := pair2(t)
	owner.fill(0xA1, 2)
	p := owner.publish("req", 2)
	reader.arrive("local", p)
	until(t, "the handshake", func() bool { return reader.w.Stats().Peers == 1 }, reader)
	for waited := time.Duration(0); waited < 4*30*time.Second; waited += 5 * time.Second {
		sent := reader.w.Stats().HeartbeatsSent
		renewed := owner.w.Stats().Leases.Renewals
		until(t, "a heartbeat", func() bool { return reader.w.Stats().HeartbeatsSent > sent }, reader)
		until(t, "its renewal", func() bool { return owner.w.Stats().Leases.Renewals > renewed }, owner)
		*now = now.Add(5 * time.Second)
	}
	require.Empty(t, owner.freed)
	require.NoError(t, reader.sched.OnBlocksAllocated(*now, "local", p, [][]int{{9}}))
	until(t, "the read", func() bool { return reader.ran["local"] }, reader)
	require.True(t, reader.holds(0xA1, 9))
	until(t, "the release", func() bool { return owner.freed["req"] == lease.ReasonRead }, owner)
	// Heartbeats stop with the read; without one the next lease would not last.
	sent := reader.w.Stats().HeartbeatsSent
	for range 3 {
		*now = now.Add(6 * time.Second)
		reader.step()
	}
	require.Equal(t, sent, reader.w.Stats().HeartbeatsSent)
}

// Specification: a reader that dies is noticed by its silence.
func TestWithoutHeartbeatsTheOwnerFreesAtTheDeadline(t *testing.T) {
	now, owner, reader := pair2(t)
	p := owner.publish("req", 2)
	reader.arrive("local", p)
	until(t, "a renewal", func() bool { owner.step(); return owner.w.Stats().Leases.Renewals > 0 }, reader)
	*now = now.Add(29900 * time.Millisecond)
	owner.step()
	require.Empty(t, owner.freed)
	*now = now.Add(100 * time.Millisecond)
	owner.step()
	require.Equal(t, lease.ReasonExpired, owner.freed["req"])
}

func TestReadWithoutALeaseIsUnverifiable(t *testing.T) {
	t.Run("the params carry none", func(t *testing.T) {
		_, owner, reader := pair2(t)
		p := owner.publish("req", 2)
		p.Lease = nil
		reader.pull("local", p, 1)
		reader.step()
		require.ErrorIs(t, reader.failed["local"].Err, lease.ErrUnverifiable)
		require.Zero(t, reader.w.Stats().Reads, "nothing was posted")
	})
	t.Run("the owner has no slots", func(t *testing.T) {
		start := time.Now()
		owner := newEngine(t, &start, "owner", func(c *WorkerConfig) { c.Lease.Slots = lease.NoSlot })
		reader := newEngine(t, &start, "reader")
		p := owner.publish("req", 2)
		p.Lease = &lease.SlotRef{Slot: 0, Nonce: 7}
		reader.pull("local", p, 1)
		until(t, "the verdict", func() bool { return len(reader.failed) > 0 }, reader)
		require.ErrorIs(t, reader.failed["local"].Err, lease.ErrUnverifiable)
		require.Zero(t, reader.w.Stats().Reads)
	})
	t.Run("the slot is not one of the owner's", func(t *testing.T) {
		_, owner, reader := pair2(t)
		p := owner.publish("req", 2)
		p.Lease.Slot = 1 << 30
		reader.pull("local", p, 1)
		until(t, "the verdict", func() bool { return len(reader.failed) > 0 }, reader)
		require.ErrorIs(t, reader.failed["local"].Err, lease.ErrUnverifiable)
		require.Zero(t, reader.w.Stats().Reads)
	})
	t.Run("read unverified when verification is off", func(t *testing.T) {
		_, owner, reader := pair2(t, func(c *WorkerConfig) { c.Lease.Verification = lease.VerifyNone })
		owner.fill(0xA1, 2)
		p := owner.publish("req", 2)
		p.Lease = nil
		reader.pull("local", p, 1)
		until(t, "the read", func() bool { return reader.ran["local"] }, reader)
		require.True(t, reader.holds(0xA1, 1))
		require.EqualValues(t, 1, reader.w.Stats().Unverified)
		until(t, "the release", func() bool { return owner.freed["req"] == lease.ReasonRead }, owner)
	})
}

func TestRequestsOfOneStepAreAllReadAndReleased(t *testing.T) {
	_, owner, reader := pair2(t)
	for i := range 4 {
		owner.fill(byte(i+1), i)
		reader.pull(fmt.Sprint("local-", i), owner.publish(fmt.Sprint("req-", i), i), i)
	}
	until(t, "all reads", func() bool { return len(reader.ran) == 4 }, reader)
	for i := range 4 {
		require.True(t, reader.holds(byte(i+1), i))
	}
	require.EqualValues(t, 4, reader.w.Stats().Reads)
	until(t, "the releases", func() bool { return len(owner.freed) == 4 }, owner)
}

// vllm#52234, vllm#51505, cases.md 22: a client's block ids fail that request only, before anything is posted.
func TestBadBlockIDsFailOneRequestOnly(t *testing.T) {
	_, owner, reader := pair2(t)
	owner.fill(0xA1, 2)
	good := owner.publish("req", 2)
	for i, ids := range [][][]int{{{testBlocks}}, {{1 << 31}}, {{1 << 62}}} {
		p := *good
		p.RemoteBlockIDs = ids
		id := fmt.Sprint("bad-", i)
		reader.pull(id, &p, 1)
		until(t, "the failure", func() bool { return reader.failed[id].Err != nil }, reader)
		require.ErrorIs(t, reader.failed[id].Err, lease.ErrMismatch)
	}
	require.Zero(t, reader.w.Stats().Reads)
	reader.pull("local", good, 1)
	until(t, "the good one", func() bool { return reader.ran["local"] }, reader)
	require.True(t, reader.holds(0xA1, 1))
}

func TestPeerThatIsNotThereFailsTheHandshake(t *testing.T) {
	now, owner, reader := pair2(t)
	p := owner.publish("req", 2)
	gone, err := ports.Free()
	require.NoError(t, err)
	t.Run("nobody listens", func(t *testing.T) {
		q := *p
		q.RemotePort, q.RemoteEngineID = gone, "elsewhere"
		reader.pull("a", &q, 1)
		until(t, "the failure", func() bool { return reader.failed["a"].Err != nil }, reader)
		require.ErrorIs(t, reader.failed["a"].Err, lease.ErrHandshake)
		require.ErrorContains(t, reader.failed["a"].Err, strconv.Itoa(gone))
	})
	t.Run("another engine listens", func(t *testing.T) {
		q := *p
		q.RemoteEngineID = "somebody"
		reader.pull("b", &q, 1)
		until(t, "the failure", func() bool { return reader.failed["b"].Err != nil }, reader)
		require.ErrorIs(t, reader.failed["b"].Err, lease.ErrHandshake)
		require.ErrorContains(t, reader.failed["b"].Err, `serves engine "owner", not "somebody"`)
	})
	t.Run("another shape", func(t *testing.T) {
		q := *p
		q.TPSize, q.RemoteEngineID = 2, "wider"
		reader.pull("c", &q, 1)
		until(t, "the failure", func() bool { return reader.failed["c"].Err != nil }, reader)
		require.ErrorContains(t, reader.failed["c"].Err, "tp_size is 2 there and 1 here")
	})
	t.Run("ourselves", func(t *testing.T) {
		q := *p
		q.RemoteEngineID = "reader"
		err := reader.sched.OnNewRequest(*now, "d", &q)
		if err == nil {
			require.NoError(t, reader.sched.OnBlocksAllocated(*now, "d", &q, [][]int{{1}}))
			until(t, "the failure", func() bool { return reader.failed["d"].Err != nil }, reader)
			err = reader.failed["d"].Err
		}
		require.Error(t, err)
	})
	// The healthy peer is served all the same.
	reader.pull("good", p, 1)
	until(t, "the good one", func() bool { return reader.ran["good"] }, reader)
}

// vllm#41863, cases.md 44: the back-off is an address's, not an engine's.
func TestAddressThatWasWrongDoesNotHoldUpTheRightOne(t *testing.T) {
	_, owner, reader := pair2(t)
	owner.fill(0xA1, 2)
	good := owner.publish("req", 2)
	for i := range 4 { // the third failure starts a back-off of two seconds
		bad := *good
		bad.RemotePort = 1
		id := fmt.Sprint("bad-", i)
		reader.pull(id, &bad, 1)
		until(t, "the failure", func() bool { return reader.failed[id].Err != nil }, reader)
	}
	reader.pull("local", good, 1)
	until(t, "the read", func() bool { return reader.ran["local"] || reader.failed["local"].Err != nil }, reader)
	require.NoError(t, reader.failed["local"].Err)
	require.True(t, reader.holds(0xA1, 1))
}

func TestAnotherCompatibilityHashIsRefusedUnlessAsked(t *testing.T) {
	start := time.Now()
	owner := newEngine(t, &start, "owner", func(c *WorkerConfig) { c.Compatibility = "theirs" })
	strict := newEngine(t, &start, "strict", func(c *WorkerConfig) { c.Compatibility = "ours" })
	lax := newEngine(t, &start, "lax", func(c *WorkerConfig) { c.Compatibility, c.AnyCompatibility = "ours", true })
	p := owner.publish("req", 2)
	strict.pull("local", p, 1)
	until(t, "the refusal", func() bool { return len(strict.failed) > 0 }, strict)
	require.ErrorContains(t, strict.failed["local"].Err, "theirs")
	lax.pull("local", p, 1)
	until(t, "the read", func() bool { return lax.ran["local"] }, lax)
}

// vllm#54757, vllm#44486, cases.md 18: malformed packets do not stop the side channel.
func TestMalformedSideChannelPacketsDoNotStopIt(t *testing.T) {
	_, owner, reader := pair2(t)
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(owner.side.Port()))
	attacks := [][]byte{nil, {0}, bytes.Repeat([]byte{0xa5}, 64<<10), []byte("GET / HTTP/1.1\r\n\r\n"),
		append(append([]byte{0xff}, make([]byte, 8)...), 0x7f, 3, 1)}
	for _, a := range attacks {
		c, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		defer c.Close()
		c.Write(a)
	}
	for _, frames := range [][][]byte{{{}}, {{0xc1}}, {appendAsk(nil, []byte(askName), rankID{tp: 9})}, {appendAsk(nil, []byte(askName), rankID{}), {1}}} {
		c, err := zmtpDial(t, addr)
		require.NoError(t, err)
		ctx, cancel := contextFor(t, 200*time.Millisecond)
		_, err = c.Request(ctx, frames)
		cancel()
		require.Error(t, err)
		require.NoError(t, c.Close())
	}
	owner.fill(0xA1, 2)
	reader.pull("local", owner.publish("req", 2), 1)
	until(t, "the read", func() bool { return reader.ran["local"] }, reader)
	require.True(t, reader.holds(0xA1, 1))
	require.NotZero(t, owner.side.Stats().Bad)
}

// vLLM 0.33.0 source, cases.md 25: malformed notifications are counted, and the next valid one is handled.
func TestMalformedNotificationsAreCountedAndIgnored(t *testing.T) {
	_, owner, reader := pair2(t)
	owner.fill(0xA1, 2)
	p := owner.publish("req", 2)
	stranger, err := nixl.NewAgent("", nixl.Config{})
	require.NoError(t, err)
	defer stranger.Close()
	_, err = stranger.CreateBackend("UCX", nil)
	require.NoError(t, err)
	name, err := stranger.LoadRemote(owner.w.Metadata().Agent)
	require.NoError(t, err)
	bad := []string{"", "\xff", "HB:", "x", "x:-1", "x:9999999999", "x:1:0", "HB2:123", "PUSH_REG:\x80"}
	for _, m := range bad {
		require.NoError(t, stranger.Notify(name, []byte(m)))
	}
	until(t, "the count", func() bool { return owner.w.Stats().Leases.MalformedNotifications >= int64(len(bad)) }, owner)
	require.Empty(t, owner.freed)
	reader.pull("local", p, 1)
	until(t, "the read", func() bool { return reader.ran["local"] }, reader)
	until(t, "the release", func() bool { return owner.freed["req"] == lease.ReasonRead }, owner)
}

// vllm#19223, vllm#41269, cases.md 11: a request that will not be read releases the owner at once.
func TestRequestThatIsNotReadReleasesTheOwner(t *testing.T) {
	_, owner, reader := pair2(t)
	t.Run("aborted in the queue", func(t *testing.T) {
		reader.arrive("a", owner.publish("req-a", 1))
		_, _, err := reader.sched.RequestFinished(*reader.now, "a", lease.StatusAborted, nil, 0)
		require.NoError(t, err)
		until(t, "the release", func() bool { owner.step(); return owner.freed["req-a"] == lease.ReasonRead }, reader)
	})
	t.Run("no block needed", func(t *testing.T) {
		p := owner.publish("req-b", 2)
		reader.arrive("b", p)
		require.NoError(t, reader.sched.OnBlocksAllocated(*reader.now, "b", p, [][]int{{}}))
		until(t, "the release", func() bool { owner.step(); return owner.freed["req-b"] == lease.ReasonRead }, reader)
		require.Zero(t, reader.w.Stats().Reads)
		require.Empty(t, reader.failed)
	})
}

// vllm#49238, nixl#1986, cases.md 14, 15: an owner that died is noticed, and its successor is read without a restart.
func TestOwnerThatCameBackUnderItsNameIsReadAgain(t *testing.T) {
	start := time.Now()
	now := &start
	reader := newEngine(t, now, "reader")
	for life := range 3 {
		owner := newEngine(t, now, "owner")
		owner.fill(byte(life+1), 2)
		id := fmt.Sprint("life-", life)
		p := owner.publish("req", 2)
		reader.pull(id, p, 1)
		until(t, "a verdict", func() bool { return reader.ran[id] || reader.failed[id].Err != nil }, reader)
		if !reader.ran[id] { // the old connection was still trusted; its failure heals it
			require.Positive(t, life)
			id += "-again"
			reader.pull(id, p, 1)
			until(t, "the read", func() bool { return reader.ran[id] }, reader)
		}
		require.True(t, reader.holds(byte(life+1), 1))
		require.NoError(t, owner.side.Close())
		require.NoError(t, owner.w.Close())
	}
}

// vllm#49238, nixl#1986, cases.md 16: readers that come, read and go leave no file descriptors and no state with their owner.
func TestSixtyReadersComeAndGo(t *testing.T) {
	start := time.Now()
	owner := newEngine(t, &start, "owner")
	owner.fill(0xA1, 2)
	files := func() int {
		names, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(names)
	}
	var before int
	var gone sync.WaitGroup
	for i := range 60 {
		id := fmt.Sprint("req-", i)
		reader := newEngine(t, &start, "reader-"+id)
		reader.pull(id, owner.publish(id, 2), 1)
		until(t, "the read", func() bool { return reader.ran[id] }, reader)
		until(t, "the release", func() bool { return owner.freed[id] == lease.ReasonRead }, owner, reader)
		require.NoError(t, reader.side.Close())
		gone.Go(func() { reader.w.Close() }) // again by the end of the test, which looks at the error
		if i == 4 {
			gone.Wait()
			before = files()
		}
	}
	gone.Wait()
	require.Eventually(t, func() bool { return files() <= before }, 20*time.Second, time.Millisecond, "they left %d files open", files()-before)
	require.Empty(t, owner.w.peers)
	require.Zero(t, owner.w.Stats().Leases.Live)
}

// peer-tests A3.33, A3.34: what belongs to an engine that was not used for engine_ttl goes, and comes back with its next use.
func TestIdleEngineIsForgotten(t *testing.T) {
	now, owner, reader := pair2(t)
	owner.fill(0xA1, 2)
	read := func(id string) {
		t.Helper()
		reader.pull(id, owner.publish(id, 2), 1)
		until(t, "the read", func() bool { return reader.ran[id] }, reader)
		until(t, "the release", func() bool { return owner.freed[id] == lease.ReasonRead }, owner, reader)
		require.True(t, reader.holds(0xA1, 1))
	}
	read("first")
	var agent string
	for p := range reader.w.everyone {
		agent = p.ranks[0].agent
	}
	known := func() error { return reader.w.fabric.(*nixlFabric).CheckRemote(agent, nixl.DRAM, nil) }
	require.NoError(t, known())
	*now = now.Add(time.Hour - time.Second)
	reader.step()
	require.Len(t, reader.w.peers, 1)
	*now = now.Add(time.Second)
	reader.step()
	require.Empty(t, reader.w.peers)
	require.ErrorIs(t, known(), nixl.ErrNotFound)
	require.EqualValues(t, 1, reader.w.Stats().PeersEvicted)
	read("second")

	never := newEngine(t, now, "never", func(c *WorkerConfig) { c.Lease.EngineTTL = 0 })
	never.pull("local", owner.publish("third", 2), 1)
	until(t, "the read", func() bool { return never.ran["local"] }, never)
	*now = now.Add(9999 * time.Second)
	never.step()
	require.Len(t, never.w.peers, 1)
}

func TestHandshakeThatNeverEndsIsATimeout(t *testing.T) {
	now, owner, reader := pair2(t, func(c *WorkerConfig) { c.ReadTimeout = time.Minute })
	p := owner.publish("req", 2)
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer mute.Close()
	p.RemotePort = mute.Addr().(*net.TCPAddr).Port
	reader.pull("local", p, 1)
	reader.step()
	require.Empty(t, reader.failed, "the handshake is under way")
	*now = now.Add(time.Minute)
	reader.step()
	require.ErrorIs(t, reader.failed["local"].Err, lease.ErrTimeout)
	require.False(t, reader.failed["local"].Quarantined, "nothing was posted")
	require.Zero(t, reader.w.Stats().Pulls)
}

func TestUnusableConfigurationNamesTheValue(t *testing.T) {
	kv, err := nixl.AllocBuffer(4096)
	require.NoError(t, err)
	defer kv.Close()
	good := func() WorkerConfig {
		return WorkerConfig{Engine: "e", KV: KV{Regions: []Region{{Base: kv.Addr(), BlockLen: 512, Blocks: 8}}}}
	}
	for want, change := range map[string]func(*WorkerConfig){
		"Engine":     func(c *WorkerConfig) { c.Engine = "" },
		"Rank 2":     func(c *WorkerConfig) { c.Rank, c.TPSize = 2, 2 },
		"0 regions":  func(c *WorkerConfig) { c.KV.Regions = nil },
		"timeout":    func(c *WorkerConfig) { c.ReadTimeout = -1 },
		"Peer -2, M": func(c *WorkerConfig) { c.MaxBytesPerPeer = -2 },
		"Peer -3":    func(c *WorkerConfig) { c.MaxReadsPerPeer = -3 },
		"9 blocks":   func(c *WorkerConfig) { c.KV.Regions[0].Base, c.KV.Regions[0].Blocks = ^uint64(0)-100, 9 },
		"num_blocks": func(c *WorkerConfig) { c.KV.Regions[0].Blocks = -1 },
		"2147483647": func(c *WorkerConfig) { c.KV.Regions[0].Blocks = 1 << 31 },
		"0 bytes":    func(c *WorkerConfig) { c.KV.Regions[0].BlockLen = 0 },
		"KV regions": func(c *WorkerConfig) { c.KV.Regions[0].Blocks = 9 }, // beyond the memory
		"duration":   func(c *WorkerConfig) { c.Lease = lease.Config{Duration: -1} },
	} {
		c := good()
		change(&c)
		f, err := OpenNIXL(NIXLConfig{Memory: []nixl.Memory{kv}})
		require.NoError(t, err)
		w, err := NewWorker(f, c)
		require.Nil(t, w, want)
		require.ErrorContains(t, err, want)
	}
	_, err = OpenNIXL(NIXLConfig{Backend: "XYZ"})
	require.ErrorContains(t, err, "XYZ")
	_, err = NewWorker(nil, good())
	require.ErrorIs(t, err, ErrConfig)
	f, err := OpenNIXL(NIXLConfig{Memory: []nixl.Memory{kv}})
	require.NoError(t, err)
	w, err := NewWorker(f, good())
	require.NoError(t, err)
	require.NoError(t, w.Close())
}

func TestSideChannelPortInUseIsNamed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	_, err = ListenSideChannel("127.0.0.1", l.Addr().(*net.TCPAddr).Port, nil)
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	require.ErrorContains(t, err, l.Addr().String())
	_, err = ListenSideChannel("127.0.0.1", 70000, nil)
	require.ErrorContains(t, err, "70000")
}

func TestClosedWorkerRefusesSteps(t *testing.T) {
	_, owner, _ := pair2(t)
	require.NoError(t, owner.w.Close())
	require.NoError(t, owner.w.Close())
	_, err := owner.w.Step(*owner.now, lease.Plan{})
	require.ErrorIs(t, err, ErrClosed)
	require.ErrorIs(t, err, net.ErrClosed)
	owner.w.Stats()
	require.Zero(t, owner.w.Metadata().Device)
}

var _ io.Closer = (*Worker)(nil)
