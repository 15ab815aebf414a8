package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nixlgo/nixlgo/lease"
)

// patience is how long the demo waits for one event of a process.
const patience = 30 * time.Second

// process is a demo process with its commands and events.
type process struct {
	name   string
	pid    int
	cmd    *exec.Cmd
	stdin  io.Closer
	in     *json.Encoder
	events chan event // closed when the process ended
	early  []event    // events that came while another was waited for
	ended  bool
	said   sync.WaitGroup // until its standard error was passed on
}

// passOn writes the lines of a process, behind its name.
func passOn(to io.Writer, from io.Reader, name string) {
	for r := bufio.NewReader(from); ; {
		line, err := r.ReadString('\n')
		if line != "" {
			fmt.Fprintf(to, "%s: %s\n", name, strings.TrimSuffix(line, "\n"))
		}
		if err != nil {
			return
		}
	}
}

// spawn starts a demo process over the chosen transport and waits until it is ready.
func (d *demo) spawn(ctx context.Context, name string) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(exe, "demo-node", "--name", name, "--library", d.library, "--kv", d.kv,
		"--layers", strconv.Itoa(d.layers), "--blocks", strconv.Itoa(d.nodeBlocks()), "--block-bytes", strconv.Itoa(d.blockBytes),
		"--lease", d.lease.String(), "--trace="+strconv.FormatBool(d.report != ""))
	cmd.Env = append(os.Environ(), "UCX_TLS="+d.tls)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	said, err := cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the %s process: %w", name, err)
	}
	p := &process{name: name, pid: cmd.Process.Pid, cmd: cmd, stdin: in, in: json.NewEncoder(in), events: make(chan event, 1024)}
	p.said.Go(func() { passOn(os.Stderr, said, name) })
	go func() {
		defer close(p.events)
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 16<<20)
		for lines.Scan() {
			var e event
			if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
				e = event{Event: "error", Error: fmt.Sprintf("not an event: %q", lines.Text())}
			}
			if !d.events.add(e) {
				p.events <- e
			}
		}
	}()
	e, err := p.wait(ctx, "ready", "")
	if err != nil {
		return nil, errors.Join(err, p.stop())
	}
	d.summary.Library = e.Library
	d.say("ready", name, fmt.Sprintf("process %d, UCX %s", p.pid, d.tls), map[string]any{"pid": p.pid, "library": e.Library})
	return p, nil
}

func (p *process) send(c command) error {
	if err := p.in.Encode(c); err != nil {
		return fmt.Errorf("the %s process does not take commands: %w", p.name, err)
	}
	return nil
}

// call sends c and waits for the event that answers it.
func (p *process) call(ctx context.Context, c command, want string) (event, error) {
	if err := p.send(c); err != nil {
		return event{}, err
	}
	return p.wait(ctx, want, c.ID)
}

// wait returns the next event of that name, and of that id unless id is empty. Others are kept for later.
func (p *process) wait(ctx context.Context, name, id string) (event, error) {
	if e, ok := p.take(name, id); ok {
		return e, nil
	}
	deadline := time.After(patience)
	for {
		select {
		case e, ok := <-p.events:
			switch {
			case !ok:
				err := p.stop() // which learns how it ended
				return e, errors.Join(fmt.Errorf("the %s process ended while the demo waited for %q of it (%v); what it said is above", p.name, name, p.cmd.ProcessState), err)
			case e.Event == name && (id == "" || e.ID == id):
				return e, nil
			case e.Event == "error" || e.Event == "refused" && e.ID == id:
				return e, fmt.Errorf("the %s process: %s", p.name, e.Error)
			}
			p.early = append(p.early, e)
		case <-deadline:
			return event{}, fmt.Errorf("the %s process did not report %q %s within %s", p.name, name, id, patience)
		case <-ctx.Done():
			return event{}, context.Cause(ctx)
		}
	}
}

// take removes a kept event.
func (p *process) take(name, id string) (event, bool) {
	i := slices.IndexFunc(p.early, func(e event) bool { return e.Event == name && (id == "" || e.ID == id) })
	if i < 0 {
		return event{}, false
	}
	e := p.early[i]
	p.early = slices.Delete(p.early, i, i+1)
	return e, true
}

// seen reports an event that has arrived already.
func (p *process) seen(name, id string) (event, bool) {
	for {
		select {
		case e, ok := <-p.events:
			if ok {
				p.early = append(p.early, e)
				continue
			}
		default:
		}
		i := slices.IndexFunc(p.early, func(e event) bool { return e.Event == name && e.ID == id })
		if i < 0 {
			return event{}, false
		}
		return p.early[i], true
	}
}

// freed waits until the owner says that it freed id for the given reason.
func (p *process) freed(ctx context.Context, id string, want lease.Reason) (event, error) {
	e, err := p.wait(ctx, "freed", id)
	if err == nil && e.Reason != want.String() {
		err = fmt.Errorf("the owner freed %s because it %s, not because it %s", id, e.Reason, want)
	}
	return e, err
}

// kill ends the process with SIGKILL, as a crash would.
func (p *process) kill() error {
	if err := p.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill the %s process: %w", p.name, err)
	}
	return p.end()
}

// stop closes the process's stdin, which ends it, and kills it if that does not help. A process that ended is left alone.
func (p *process) stop() error {
	if p == nil || p.ended {
		return nil
	}
	p.stdin.Close()
	hung := time.AfterFunc(patience, func() { p.cmd.Process.Kill() })
	err := p.end()
	if !hung.Stop() {
		err = fmt.Errorf("the %s process did not end within %s and was killed", p.name, patience)
	}
	return err
}

// end reads what is left of the process's events and waits for its end. How it ended is not judged: the scenes are, by
// its events.
func (p *process) end() error {
	p.ended = true
	for e := range p.events {
		p.early = append(p.early, e)
	}
	p.said.Wait()
	err := p.cmd.Wait()
	if _, exited := errors.AsType[*exec.ExitError](err); exited {
		return nil
	}
	return err
}
