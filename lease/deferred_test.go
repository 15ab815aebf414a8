package lease_test

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// gated is a fabric whose handshakes wait at their end for open.
type gated struct {
	*rdmatest.Fabric
	open chan struct{}
}

func (g gated) Load(metadata []byte) (string, error) {
	<-g.open
	return g.Fabric.Load(metadata)
}

// connecting is a reader whose handshake with an owner waits for open. Its scheduler is not told when it is connected, which would
// send heartbeats anew.
type connecting struct {
	t     *testing.T
	net   *rdmatest.Network
	sched *lease.Scheduler
	w     *rdma.Worker
	open  func()
	offer lease.Params
	now   time.Time
}

func newConnecting(t *testing.T) *connecting {
	t.Helper()
	c := &connecting{t: t, net: rdmatest.NewNetwork(), now: time.Unix(1_000_000, 0)}
	worker := func(name string, f rdma.Fabric, m *rdmatest.Memory) *rdma.Worker {
		w, err := rdma.NewWorker(f, rdma.WorkerConfig{Engine: name, MaxSeqs: 4, HandshakeTimeout: time.Minute,
			KV: rdma.KV{Regions: []rdma.Region{{Base: m.Addr(), BlockLen: 64, Blocks: 4}}}})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, w.Close()) })
		return w
	}
	mine, theirs := c.net.NewMemory(256), c.net.NewMemory(256)
	owner := worker("owner", c.net.NewFabric("owner", theirs), theirs)
	side, err := rdma.ListenSideChannel("", 0, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, side.Close()) })
	side.Serve(owner)
	g := gated{c.net.NewFabric("reader", mine), make(chan struct{})}
	c.w = worker("reader", g, mine)
	c.open = sync.OnceFunc(func() { close(g.open) })
	t.Cleanup(c.open) // the worker's Close waits for the handshake
	c.sched, err = lease.NewScheduler(lease.SchedulerConfig{Config: lease.DefaultConfig(), Engine: "reader", Host: "h", Port: 1, Blocks: 4, MaxSeqs: 4})
	require.NoError(t, err)
	c.offer = lease.Params{DoRemotePrefill: true, RemoteBlockIDs: [][]int{{1}}, RemoteEngineID: "owner", RemoteHost: "127.0.0.1", RemotePort: side.Port()}
	c.net.HoldNotifications(true)
	return c
}

func (c *connecting) arrive(id string) {
	c.t.Helper()
	p := c.offer
	p.RemoteRequestID = "P-" + id
	require.NoError(c.t, c.sched.OnNewRequest(c.now, id, &p))
}

// beat carries out a plan with heartbeats.
func (c *connecting) beat() {
	c.t.Helper()
	plan := c.sched.BuildPlan(c.now)
	require.Len(c.t, plan.Heartbeat, 1)
	c.step(plan)
}

func (c *connecting) step(plan lease.Plan) {
	c.t.Helper()
	res, err := c.w.Step(c.now, plan)
	require.NoError(c.t, err)
	require.Empty(c.t, res.HeartbeatFailed)
}

// sent is what has left for the owner.
func (c *connecting) sent() (said []string) {
	for _, m := range c.net.Messages() {
		said = append(said, string(m.Payload()))
	}
	return said
}

// connected opens the gate and returns what leaves then, without another plan.
func (c *connecting) connected() []string {
	c.t.Helper()
	require.Empty(c.t, c.sent())
	c.open()
	for deadline := time.Now().Add(time.Minute); c.w.Stats().Peers == 0; time.Sleep(20 * time.Microsecond) {
		require.True(c.t, time.Now().Before(deadline), "the handshake")
		c.step(lease.Plan{})
	}
	c.step(lease.Plan{})
	return c.sent()
}

// "If D hasn't yet handshaked with P for a given engine …, it triggers a proactive handshake in a background thread. The heartbeat
// is deferred to the next step once the handshake completes."
func TestHeartbeatsAreDeferredUntilTheHandshakeCompletes(t *testing.T) {
	c := newConnecting(t)
	c.arrive("a")
	c.beat()
	for range 3 {
		c.step(lease.Plan{})
	}
	require.Equal(t, []string{"HB:P-a"}, c.connected(), "without another plan that says so")
}

// A handshake may take longer than a heartbeat interval. What is renewed when it is done is what the last plan named, not what the
// first did: requests have come since, and others have ended.
func TestOfDeferredHeartbeatsTheNewestAreSent(t *testing.T) {
	c := newConnecting(t)
	c.arrive("a")
	c.beat()
	c.arrive("b")
	c.now = c.now.Add(5 * time.Second)
	c.beat()
	_, _, err := c.sched.RequestFinished(c.now, "a", lease.StatusAborted, nil, 0)
	require.NoError(t, err)
	c.now = c.now.Add(5 * time.Second)
	plan := c.sched.BuildPlan(c.now)
	plan.Release = nil // of a, which is not looked at here
	c.step(plan)
	require.Equal(t, []string{"HB:P-b"}, c.connected())
}
