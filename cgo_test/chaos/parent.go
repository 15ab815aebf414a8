package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/nixlgo/nixlgo/cgo_test/child"
	"github.com/nixlgo/nixlgo/cgo_test/measure"
	"github.com/nixlgo/nixlgo/cgo_test/ports"
)

// process is a child as the parent sees it.
type process struct {
	*child.Process
	role    string
	engine  string
	port    int
	stopped bool
	open    map[string]bool // requests given to a reader that it has not answered
	final   *message
}

// heard is a line of a child, or its end: no kind of message.
type heard struct {
	from *process
	message
}

// tally is what a run saw.
type tally struct {
	published, verified int
	results             map[string]int // how fetches ended
	freed               map[string]int // how leases ended
	faults              map[string]int
	wrongBytes          int
	leaked, doubleFrees int
	stuck               []string
}

// chaos is one run.
type chaos struct {
	cfg   config
	rng   *rand.Rand
	lines chan heard
	procs []*process // 2 owners, 2 readers
	t     tally
	late  []message // params that will be delivered when they are stale
	salt  uint64
	over  bool // no request reaches a reader any more
}

func run(ctx context.Context, cfg config) (*tally, error) {
	c := &chaos{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.seed, 1)), lines: make(chan heard, 4096),
		t: tally{results: map[string]int{}, freed: map[string]int{}, faults: map[string]int{}}}
	defer c.killAll()
	for i := range 4 {
		role := "owner"
		if i >= 2 {
			role = "reader"
		}
		p, err := c.spawn(role, identity{})
		if err != nil {
			return nil, err
		}
		c.procs = append(c.procs, p)
	}
	end := time.After(cfg.duration)
	fault := time.NewTimer(time.Second)
	for running := true; running; {
		select {
		case h := <-c.lines:
			if err := c.handle(h); err != nil {
				return nil, err
			}
		case <-fault.C:
			if err := c.fault(); err != nil {
				return nil, err
			}
			fault.Reset(time.Duration(100+c.rng.IntN(400)) * time.Millisecond)
		case <-end:
			running = false
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	return &c.t, c.drain(ctx)
}

// spawn starts a child and waits until it is ready.
func (c *chaos) spawn(role string, id identity) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c.salt++
	id.Salt = c.salt
	if id.Port == 0 {
		if id.Port, err = ports.Free(); err != nil { // it may be restarted there
			return nil, err
		}
	}
	env, err := json.Marshal(id)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(exe, "-role", role, "-lease", c.cfg.lease.String(), "-blocks", strconv.Itoa(c.cfg.blocks), "-verify="+strconv.FormatBool(c.cfg.verify))
	cmd.Env = append(os.Environ(), "UCX_TLS="+c.cfg.tls, "UCX_LOG_LEVEL=fatal", "NIXL_LOG_LEVEL=FATAL", identityVar+"="+string(env))
	cmd.Stderr = os.Stderr
	p := &process{role: role, open: map[string]bool{}}
	if p.Process, err = child.Start(role, cmd, 20*time.Second); err != nil {
		return nil, err
	}
	var ready message
	if err := p.Receive(context.Background(), &ready); err != nil {
		p.Kill()
		return nil, err
	}
	p.engine, p.port = ready.Engine, ready.Port
	go func() {
		for line := range p.Lines {
			var m message
			if err := json.Unmarshal(line, &m); err != nil {
				m = message{Kind: "garbage", Error: string(line)}
			}
			c.lines <- heard{p, m}
		}
		c.lines <- heard{from: p}
	}()
	return p, nil
}

func (c *chaos) handle(h heard) error {
	if !slices.Contains(c.procs, h.from) {
		return nil // a process that was killed
	}
	switch h.Kind {
	case "published":
		c.t.published++
		if !c.over {
			c.route(h.message)
		}
	case "freed":
		c.t.freed[h.Result]++
	case "done":
		delete(h.from.open, h.ID)
		c.t.results[h.Result]++
		if h.Result == "verified" {
			c.t.verified++
			c.t.wrongBytes += h.Wrong
		}
	case "continued":
		h.from.stopped = false
	case "final":
		h.from.final = &h.message
	case "":
		return c.buried(h.from)
	default:
		return fmt.Errorf("the %s process %d said %q %s", h.from.role, h.from.Cmd.Process.Pid, h.Kind, h.Error)
	}
	return nil
}

// buried replaces an owner that UCX took down after a reader was killed in the middle of a READ (package nixl, "Readers
// that die over TCP"). Nothing else may end a process.
func (c *chaos) buried(p *process) error {
	status, ok := p.Cmd.ProcessState.Sys().(syscall.WaitStatus)
	if p.role != "owner" || !ok || !status.Signaled() || c.t.faults["SIGKILL reader"] == 0 {
		return fmt.Errorf("the %s process %d ended on its own: %v", p.role, p.Cmd.Process.Pid, p.Cmd.ProcessState)
	}
	c.t.faults["owner lost to UCX after a reader's death"]++
	i := slices.Index(c.procs, p)
	var err error
	if c.procs[i], err = c.spawn(p.role, identity{}); err == nil && c.over {
		err = c.procs[i].Send(message{Kind: "drain"})
	}
	return err
}

// route brings a request to a reader as a router would, or as a bad one does.
func (c *chaos) route(m message) {
	readers := c.procs[2:]
	m.Kind = "fetch"
	m.Queue = time.Duration(c.rng.IntN(20)) * time.Millisecond
	switch n := c.rng.IntN(100); {
	case n < 4:
		c.t.faults["params lost"]++
		return
	case n < 8:
		c.t.faults["params delivered when stale"]++
		c.late = append(c.late, m)
		return
	case n < 12:
		c.t.faults["params delivered twice"]++
		c.give(readers[0], m)
		c.give(readers[1], m)
		return
	case n < 15:
		c.t.faults["lease fields dropped"]++
		p := *m.Params
		p.Lease = nil
		m.Params = &p
	case n < 18:
		c.t.faults["block ids damaged"]++
		p := *m.Params
		p.RemoteBlockIDs = [][]int{append(slices.Clone(p.RemoteBlockIDs[0])[1:], 1<<30)}
		m.Params = &p
	case n < 20:
		c.t.faults["wrong engine id"]++
		p := *m.Params
		p.RemoteEngineID += "x"
		m.Params = &p
	case n < 26:
		c.t.faults["reader queues past its lease"]++
		m.Queue = c.cfg.lease * time.Duration(1+c.rng.IntN(2))
	case n < 34:
		c.t.faults["reader stalls before the check"]++
		m.Stall = time.Duration(c.rng.Int64N(int64(c.cfg.lease) * 5 / 2))
	}
	c.give(readers[c.rng.IntN(2)], m)
}

func (c *chaos) give(p *process, m message) {
	if p.Send(m) == nil { // a dead one is replaced
		p.open[m.ID] = true
	}
}

// fault does something to a process.
func (c *chaos) fault() error {
	for len(c.late) > 0 && c.rng.IntN(3) > 0 {
		m := c.late[0]
		c.late = c.late[1:]
		m.Stall = time.Duration(c.rng.Int64N(int64(c.cfg.lease)))
		c.give(c.procs[2+c.rng.IntN(2)], m)
	}
	i := c.rng.IntN(4)
	p := c.procs[i]
	if p.stopped {
		return nil
	}
	switch n := c.rng.IntN(10); {
	case n < 2:
		c.t.faults["SIGKILL "+p.role]++
		id := identity{}
		if p.role == "owner" && c.rng.IntN(2) == 0 {
			c.t.faults["owner back at its address under its name"]++
			id = identity{Engine: p.engine, Port: p.port}
		}
		p.Kill()
		var err error
		c.procs[i], err = c.spawn(p.role, id)
		return err
	case n < 6:
		c.t.faults["SIGSTOP "+p.role]++
		if err := p.Cmd.Process.Signal(syscall.SIGSTOP); errors.Is(err, os.ErrProcessDone) {
			return nil // UCX took it down just now, which its end will say
		} else if err != nil {
			return err
		}
		p.stopped = true
		time.AfterFunc(time.Duration(c.rng.Int64N(int64(c.cfg.lease)*5/2)), func() {
			p.Cmd.Process.Signal(syscall.SIGCONT)
			c.lines <- heard{p, message{Kind: "continued"}}
		})
	default:
		c.t.faults["garbage to a side channel"]++
		return attack(p.port, c.rng)
	}
	return nil
}

// attack sends random bytes to a side channel, sometimes behind a good greeting.
func attack(port int, rng *rand.Rand) error {
	conn, err := net.DialTimeout("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), time.Second)
	if err != nil {
		return nil // a stopped process may have a full backlog
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(100 * time.Millisecond))
	b := make([]byte, 1+rng.IntN(300))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	if rng.IntN(2) == 0 {
		greeting := make([]byte, 64)
		greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
		copy(greeting[12:], "NULL")
		b = append(greeting, b...)
	}
	conn.Write(b)
	return nil
}

// drain ends the trouble, lets every lease and pull end, and takes stock.
func (c *chaos) drain(ctx context.Context) error {
	c.over = true
	for _, p := range c.procs {
		p.Cmd.Process.Signal(syscall.SIGCONT)
		p.Send(message{Kind: "drain"}) // one that has died is replaced, and drained then
	}
	deadline := time.After(2*fetchTimeout + 4*readTimeout + 4*c.cfg.lease)
	for slices.ContainsFunc(c.procs, func(p *process) bool { return p.final == nil }) {
		select {
		case h := <-c.lines:
			if err := c.handle(h); err != nil {
				return err
			}
		case <-deadline:
			for _, p := range c.procs {
				if p.final == nil {
					c.t.stuck = append(c.t.stuck, fmt.Sprintf("%s process %d did not end its work: %v", p.role, p.Cmd.Process.Pid, slices.Collect(maps.Keys(p.open))))
				}
			}
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	for _, p := range c.procs {
		c.t.leaked += p.final.Leaked
		c.t.doubleFrees += p.final.Double
		if p.final.Live != 0 || len(p.open) > 0 || p.final.Error != "" {
			c.t.stuck = append(c.t.stuck, fmt.Sprintf("%s process: %d leases or pulls are left, %d requests are unanswered, %s", p.role, p.final.Live, len(p.open), p.final.Error))
		}
	}
	return nil
}

func (c *chaos) killAll() {
	for _, p := range c.procs {
		p.Kill()
	}
}

func (t *tally) rows() []measure.Row {
	faults := 0
	for _, n := range t.faults {
		faults += n
	}
	var rows []measure.Row
	add := func(name, unit string, n int) {
		rows = append(rows, measure.Row{Name: name, Unit: unit, Ours: float64(n), Repeats: 1})
	}
	add("requests published", "requests", t.published)
	add("reads verified", "reads", t.verified)
	add("lapses refused", "reads", t.results["lapsed"])
	add("faults injected", "faults", faults)
	add("wrong bytes delivered", "bytes", t.wrongBytes)
	add("blocks leaked", "blocks", t.leaked)
	add("double frees", "blocks", t.doubleFrees)
	for _, group := range []struct {
		name string
		m    map[string]int
	}{{"fetch ended: ", t.results}, {"lease ended: ", t.freed}, {"fault: ", t.faults}} {
		for _, k := range slices.Sorted(maps.Keys(group.m)) {
			add(group.name+k, "times", group.m[k])
		}
	}
	return rows
}
