package failures

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/child"
	"github.com/nixlgo/nixlgo/cgo_test/ports"
	"github.com/nixlgo/nixlgo/lease"
)

// process is a child as the test sees it.
type process struct {
	*child.Process
	t     testing.TB
	setup setup
	dead  chan struct{}
	ready chan answer

	mu    sync.Mutex
	calls map[int]chan answer
	last  int
	tag   byte
	held  map[int][]int // blocks of the requests that it owns, by call
}

// where is how a child is started: in which network namespace, and with what in its environment.
type where struct {
	namespace string
	env       []string
}

// launch starts children that need not be ready yet.
func launch(t testing.TB, name string, s setup, w where) *process {
	t.Helper()
	if s.BlockBytes == 0 {
		s.BlockBytes = blockBytes
	}
	if s.Port == 0 {
		port, err := ports.Free() // it may be restarted there
		require.NoError(t, err)
		s.Port = port
	}
	text, err := json.Marshal(s)
	require.NoError(t, err)
	exe, err := os.Executable()
	require.NoError(t, err)
	args := []string{exe}
	if w.namespace != "" {
		args = []string{"ip", "netns", "exec", w.namespace, exe} // replaces itself, so the pid is the child's
	}
	cmd := exec.Command(args[0], args[1:]...)
	// A receive buffer that the kernel may grow takes a whole READ, and nothing happens in its middle any more.
	cmd.Env = append(append(os.Environ(), childVariable+"="+string(text), "UCX_TLS=tcp", "UCX_LOG_LEVEL=fatal", "NIXL_LOG_LEVEL=FATAL",
		"UCX_TCP_RCVBUF=256K", "GORACE=atexit_sleep_ms=0"), w.env...)
	p := &process{t: t, setup: s, dead: make(chan struct{}), ready: make(chan answer, 1), calls: map[int]chan answer{}, held: map[int][]int{}}
	p.Process, err = child.Start(name, cmd, patience)
	require.NoError(t, err)
	go p.listen()
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("%s (%v) said:\n%s", name, cmd.ProcessState, p.Stderr())
		}
	})
	return p
}

// started waits until the child serves.
func (p *process) started() *process {
	p.t.Helper()
	select {
	case a := <-p.ready:
		p.setup.Engine, p.setup.Port = a.Engine, a.Port
	case <-p.dead:
		p.t.Fatalf("the %s did not start: %v", p.Name, p.Cmd.ProcessState)
	case <-time.After(patience):
		p.t.Fatalf("the %s did not start in time", p.Name)
	}
	return p
}

// start starts children with names beside each other.
func start(t testing.TB, names ...string) []*process {
	t.Helper()
	var ps []*process
	for _, n := range names {
		ps = append(ps, launch(t, n, setup{}, where{}))
	}
	for _, p := range ps {
		p.started()
	}
	return ps
}

func (p *process) listen() {
	defer close(p.dead)
	for line := range p.Lines {
		var a answer
		if err := json.Unmarshal(line, &a); err != nil {
			a = answer{Kind: "garbage", Error: string(line)}
		}
		if a.Kind == "ready" {
			p.ready <- a
			continue
		}
		p.mu.Lock()
		to := p.calls[a.Number]
		if a.Kind == "freed" {
			delete(p.held, a.Number)
		}
		p.mu.Unlock()
		if to != nil {
			to <- a
		}
	}
}

// call is a command under way.
type call struct {
	p       *process
	cmd     command
	answers chan answer
}

func (p *process) send(c command) *call {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.write(c)
}

func (p *process) write(c command) *call {
	p.last++
	c.Number = p.last
	answers := make(chan answer, 8)
	p.calls[c.Number] = answers
	if c.Do == "publish" {
		p.held[c.Number] = c.Blocks
	}
	_ = p.Send(c) // a dead child is met by next
	return &call{p, c, answers}
}

// next is the call's next answer, or an error once the child is dead.
func (c *call) next() (answer, error) {
	select {
	case a := <-c.answers:
		return a, nil
	case <-c.p.dead:
		select {
		case a := <-c.answers:
			return a, nil
		default:
			return answer{}, fmt.Errorf("the %s died: %v", c.p.Name, c.p.Cmd.ProcessState)
		}
	case <-time.After(patience):
		return answer{}, fmt.Errorf("the %s does not answer %q %q", c.p.Name, c.cmd.Do, c.cmd.Request)
	}
}

func (c *call) want(kind string) answer {
	c.p.t.Helper()
	a, err := c.next()
	require.NoError(c.p.t, err)
	require.Equal(c.p.t, kind, a.Kind, "%s: %s %s: %s", c.p.Name, c.cmd.Do, c.cmd.Request, a.Error)
	return a
}

// none requires that nothing was said beyond what was read: a request ends once.
func (c *call) none() {
	c.p.t.Helper()
	select {
	case a := <-c.answers:
		c.p.t.Fatalf("%s: %s %s went on with %+v", c.p.Name, c.cmd.Do, c.cmd.Request, a)
	default:
	}
}

func (p *process) ok(c command) {
	p.t.Helper()
	require.Empty(p.t, p.send(c).want("ok").Error, "%s: %s", p.Name, c.Do)
}

func (p *process) stats() answer {
	p.t.Helper()
	a := p.send(command{Do: "stats"}).want("stats")
	require.Empty(p.t, a.Error)
	return a
}

// publication is a request of an owner.
type publication struct {
	*call
	params *lease.Params
}

// publish publishes a request of n blocks, small or big.
func (p *process) publish(n int) (*publication, error) {
	p.mu.Lock()
	blocks, tag := p.unheld(n)
	if blocks == nil {
		p.mu.Unlock()
		return nil, fmt.Errorf("the %s has no %d free blocks", p.Name, n)
	}
	c := p.write(command{Do: "publish", Request: fmt.Sprintf("%s-%d-%d", p.Name, blocks[0], tag), Blocks: blocks, Tag: tag})
	p.mu.Unlock()
	a, err := c.next()
	if err == nil && a.Error != "" {
		err = fmt.Errorf("%s", a.Error)
	}
	return &publication{c, a.Params}, err
}

// unheld is n blocks that no request holds, and a tag for them.
func (p *process) unheld(n int) ([]int, byte) {
	p.tag = p.tag%250 + 1
	from, to := 0, bigs*big
	if n == small {
		from, to = to, blocks
	}
	held := map[int]bool{}
	for _, h := range p.held {
		held[h[0]] = true
	}
	for ; from < to; from += n {
		if !held[from] {
			return some(from, n), p.tag
		}
	}
	return nil, 0
}

func (p *process) mustPublish(n int) *publication {
	p.t.Helper()
	x, err := p.publish(n)
	require.NoError(p.t, err)
	require.NotNil(p.t, x.params.Lease)
	return x
}

// freed waits until the owner has the blocks back. A lease that ran out did not end before its time on the owner's clock.
func (x *publication) freed(reasons ...lease.Reason) answer {
	x.p.t.Helper()
	a := x.want("freed")
	require.Contains(x.p.t, reasons, a.Reason)
	if a.Reason == lease.ReasonExpired {
		require.GreaterOrEqual(x.p.t, a.Held, leaseTime)
	}
	x.none()
	return a
}

// fetch starts to fetch x into the same blocks here.
func (p *process) fetch(x *publication, change ...func(*command)) *call {
	c := command{Do: "fetch", Request: x.cmd.Request, Params: x.params, Blocks: x.cmd.Blocks, Tag: x.cmd.Tag}
	for _, f := range change {
		f(&c)
	}
	return p.send(c)
}

func halt(c *command) { c.Halt = true }

func haltLate(c *command) { c.HaltLate = true }

// kill makes the child send s to pid when its block READ is posted.
func kill(pid int, s syscall.Signal) func(*command) {
	return func(c *command) { c.Pid, c.Signal = pid, s }
}

func through(g *gate) func(*command) {
	return func(c *command) {
		q := *c.Params
		q.RemotePort = g.port
		c.Params = &q
	}
}

// ended waits for the verdict of a fetch, which leaves no byte that is not the request's. Empty is verified.
func (c *call) ended(causes ...string) answer {
	c.p.t.Helper()
	a := c.want("done")
	require.Zero(c.p.t, a.Wrong, "bytes are wrong, the first is %d, not %d: %q %s", a.First, c.cmd.Tag, a.Cause, a.Error)
	require.Contains(c.p.t, causes, a.Cause, "%s: %s", c.p.Name, a.Error)
	return a
}

// settled waits until the blocks of a fetch that ended with a are free.
func (c *call) settled(a answer) {
	c.p.t.Helper()
	if a.Quarantined {
		require.Zero(c.p.t, c.want("settled").Wrong)
	}
	c.none()
}

// exchange publishes a request at owner and fetches it here.
func (p *process) exchange(owner *process, n int) error {
	x, err := owner.publish(n)
	if err != nil {
		return fmt.Errorf("publish: %w", err)
	}
	a, err := p.fetch(x).next()
	switch {
	case err != nil:
		return err
	case a.Cause != "" || a.Wrong != 0:
		return fmt.Errorf("%s fetches from %s: %s: %s, %d bytes are wrong", p.Name, owner.Name, a.Cause, a.Error, a.Wrong)
	}
	a, err = x.next()
	if err == nil && a.Reason != lease.ReasonRead {
		err = fmt.Errorf("%s: the lease of a verified request is %s", owner.Name, a.Reason)
	}
	return err
}

func (p *process) mustExchange(owner *process) {
	p.t.Helper()
	require.NoError(p.t, p.exchange(owner, small))
}

// recovers tries until an exchange works: a peer that was lost is found lost by the first use, and handshakes back off.
func (p *process) recovers(owner *process) {
	p.t.Helper()
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if err = p.exchange(owner, small); err == nil {
			return
		}
	}
	require.NoError(p.t, err)
}

// traffic lets a third process exchange requests with the owner until the returned function is called, which requires that
// every one was verified.
func (p *process) traffic(owner *process) (stop func()) {
	p.t.Helper()
	p.mustExchange(owner)
	over, result := make(chan struct{}), make(chan error, 1)
	n := 0
	go func() {
		for {
			select {
			case <-over:
				result <- nil
				return
			default:
			}
			if err := p.exchange(owner, small); err != nil {
				result <- err
				return
			}
			n++
		}
	}()
	return func() {
		p.t.Helper()
		close(over)
		require.NoError(p.t, <-result, "the third process was disturbed")
		require.Positive(p.t, n)
		p.t.Logf("%d exchanges beside it", n)
	}
}

// level is what must not grow.
type level struct{ goroutines, files int }

func (p *process) level() level {
	p.t.Helper()
	a := p.stats()
	return level{a.Goroutines, a.FDs}
}

// idle requires that nothing is left of what happened: no pull, no lease, no request that is heartbeated.
func (p *process) idle() {
	p.t.Helper()
	p.flat(level{math.MaxInt, math.MaxInt}, 0)
}

// flat requires, beyond idle, at most one goroutine more, the one that package nixl keeps once a READ was posted, and at most
// sockets more file descriptors than before.
func (p *process) flat(before level, sockets int) {
	p.t.Helper()
	var a answer
	require.Eventually(p.t, func() bool {
		a = p.stats()
		w, s := a.Stats.Worker, a.Stats.Scheduler
		return w.Pulls == 0 && w.Leases.Live == 0 && s.Tracked+s.Peers == 0 && s.Running+s.Pinned == 0 &&
			a.Goroutines-1 <= before.goroutines && a.FDs-sockets <= before.files
	}, patience, 20*time.Millisecond, "%s", stringer(func() string {
		return fmt.Sprintf("%s was at %+v and is at %d goroutines and %d files, %+v", p.Name, before, a.Goroutines, a.FDs, a.Stats)
	}))
}

type stringer func() string

func (f stringer) String() string { return f() }

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	require.NoError(p.t, p.Cmd.Process.Signal(s))
}

// stopped waits until every thread of the child has stopped.
func (p *process) stopped() {
	p.t.Helper()
	require.Eventually(p.t, p.Stopped, patience, time.Millisecond, "the %s does not stop", p.Name)
}

func (p *process) stop() {
	p.t.Helper()
	p.signal(syscall.SIGSTOP)
	p.stopped()
}

// killed ends the child and requires that it lived until then.
func (p *process) killed() {
	p.t.Helper()
	p.signal(syscall.SIGKILL)
	require.Equal(p.t, syscall.SIGKILL, p.died(), "%s: %v", p.Name, p.Cmd.ProcessState)
}

// died waits until the child is dead and says by what signal.
func (p *process) died() syscall.Signal {
	p.t.Helper()
	select {
	case <-p.dead:
	case <-time.After(patience):
		p.t.Fatalf("the %s lives on", p.Name)
	}
	return p.Cmd.ProcessState.Sys().(syscall.WaitStatus).Signal()
}

// again starts a dead child anew, at its address and under its engine id.
func (p *process) again() *process {
	p.t.Helper()
	p.died()
	return launch(p.t, p.Name, p.setup, where{}).started()
}

// gate stands in front of a side channel and holds what the owner says after the ZMTP greeting back.
type gate struct {
	port int
	held chan struct{}
	open chan struct{}
}

func newGate(t testing.TB, owner *process) *gate {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	g := &gate{l.Addr().(*net.TCPAddr).Port, make(chan struct{}), make(chan struct{})}
	t.Cleanup(func() { l.Close() })
	target := net.JoinHostPort("127.0.0.1", strconv.Itoa(owner.setup.Port))
	go func() {
		var once sync.Once
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer in.Close()
				out, err := net.Dial("tcp", target)
				if err != nil {
					return
				}
				defer out.Close()
				go func() {
					io.Copy(out, in)
					out.Close()
				}()
				const greeting = 64 // bytes
				if _, err := io.CopyN(in, out, greeting); err != nil {
					return
				}
				once.Do(func() { close(g.held) })
				<-g.open
				io.Copy(in, out)
			}()
		}
	}()
	return g
}

// reached waits until a handshake is in the middle.
func (g *gate) reached(t testing.TB) {
	t.Helper()
	select {
	case <-g.held:
	case <-time.After(patience):
		t.Fatal("no handshake came to the gate")
	}
}
