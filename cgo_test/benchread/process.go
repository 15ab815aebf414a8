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
	"syscall"
	"time"
)

// patience is how long one answer of a process may take.
const patience = 40 * time.Second

// process is a child that answers each JSON line on its stdin with one on its stdout. It is stopped while it is not
// needed, so that its threads do not disturb what is measured.
type process struct {
	name    string
	cmd     *exec.Cmd
	stdin   io.WriteCloser
	answers chan []byte // closed when the child closed its stdout
}

func spawn(name string, cmd *exec.Cmd) (*process, error) {
	p := &process{name: name, cmd: cmd, answers: make(chan []byte)}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // a stopped child would outlive us
	var err error
	if p.stdin, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the %s process: %w", name, err)
	}
	go func() { // ends with the child
		defer close(p.answers)
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			p.answers <- append([]byte(nil), lines.Bytes()...)
		}
	}()
	return p, nil
}

// call sends a command and reads its answer.
func (p *process) call(ctx context.Context, c command) (answer, error) {
	fail := func(err error) (answer, error) {
		return answer{}, fmt.Errorf("%s of the %s process: %w", c.Cmd, p.name, err)
	}
	line, err := json.Marshal(c)
	if err != nil {
		return fail(err)
	}
	if _, err := p.stdin.Write(append(line, '\n')); err != nil {
		return fail(err)
	}
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	select {
	case line, ok := <-p.answers:
		if !ok {
			return fail(errors.New("it has ended"))
		}
		var a answer
		if err := json.Unmarshal(line, &a); err != nil {
			return fail(fmt.Errorf("answer %q: %w", line, err))
		}
		if a.Error != "" {
			return fail(errors.New(a.Error))
		}
		return a, nil
	case <-deadline.C:
		return fail(fmt.Errorf("no answer within %s", patience))
	case <-ctx.Done():
		return fail(context.Cause(ctx))
	}
}

func (p *process) stop() error { return p.cmd.Process.Signal(syscall.SIGSTOP) }
func (p *process) cont() error { return p.cmd.Process.Signal(syscall.SIGCONT) }

// end lets the child end by itself and kills it if it does not.
func (p *process) end() error {
	err := p.cont()
	p.stdin.Close()
	hung := time.AfterFunc(10*time.Second, func() { p.cmd.Process.Kill() })
	for range p.answers { // nothing is expected any more
	}
	if werr := p.cmd.Wait(); werr != nil {
		err = errors.Join(err, fmt.Errorf("end of the %s process: %w", p.name, werr))
	}
	hung.Stop()
	return err
}
