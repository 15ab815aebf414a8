package main

import (
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

// command is what a child is told, and answer what it says; one JSON value each.
type command struct {
	Cmd    string
	Fleet  fleet    `json:",omitzero"`
	Number int      `json:",omitempty"` // of a process of readers
	Port   int      `json:",omitempty"` // of the owner's side channel
	Leases []ticket `json:",omitempty"`
	Times  int      `json:",omitempty"`
}

type answer struct {
	Error  string       `json:",omitempty"`
	Port   int          `json:",omitempty"`
	Leases []ticket     `json:",omitempty"`
	Phase  phase        `json:",omitzero"`
	Idle   measuredNode `json:",omitzero"`
}

// ticket is a lease as its reader has to know it.
type ticket struct {
	ID    int   `json:"i"`
	Slot  int   `json:"s"`
	Nonce int64 `json:"n"`
}

// patience is how long one answer of a child may take.
const patience = 45 * time.Second

type process struct {
	name    string
	cmd     *exec.Cmd
	stdin   io.WriteCloser
	answers chan answer // closed when the child ended
}

func spawn(name string, cmd *exec.Cmd) (*process, error) {
	p := &process{name: name, cmd: cmd, answers: make(chan answer)}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
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
		for d := json.NewDecoder(out); ; {
			var a answer
			if err := d.Decode(&a); err != nil {
				return
			}
			p.answers <- a
		}
	}()
	return p, nil
}

func (p *process) call(ctx context.Context, c command) (answer, error) {
	fail := func(err error) (answer, error) {
		return answer{}, fmt.Errorf("%s of the %s process: %w", c.Cmd, p.name, err)
	}
	if err := json.NewEncoder(p.stdin).Encode(c); err != nil {
		return fail(err)
	}
	select {
	case a, ok := <-p.answers:
		switch {
		case !ok:
			return fail(errors.New("it has ended"))
		case a.Error != "":
			return fail(errors.New(a.Error))
		}
		return a, nil
	case <-time.After(patience):
		return fail(fmt.Errorf("no answer within %s", patience))
	case <-ctx.Done():
		return fail(context.Cause(ctx))
	}
}

// end lets the child end by itself, and kills it if it does not.
func (p *process) end() error {
	p.stdin.Close()
	hung := time.AfterFunc(10*time.Second, func() { p.cmd.Process.Kill() })
	defer hung.Stop()
	for range p.answers { // nothing is expected any more
	}
	if err := p.cmd.Wait(); err != nil {
		return fmt.Errorf("end of the %s process: %w", p.name, err)
	}
	return nil
}

// serve answers commands until in ends, which do is told as the command "end".
func serve(in io.Reader, out io.Writer, do func(command) (answer, error)) error {
	e := json.NewEncoder(out)
	for d := json.NewDecoder(in); ; {
		var c command
		if err := d.Decode(&c); errors.Is(err, io.EOF) {
			_, err := do(command{Cmd: "end"})
			return err
		} else if err != nil {
			return err
		}
		a, err := do(c)
		if err != nil {
			a = answer{Error: err.Error()}
		}
		if err := e.Encode(a); err != nil {
			return err
		}
	}
}
