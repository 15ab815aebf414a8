package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"

	"github.com/nixlgo/nixlgo/cgo_test/topology/shape"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

// childVar holds, as JSON, which rank a process of this binary is.
const childVar = "NIXLGO_TOPOLOGY_RANK"

type child struct {
	Shape string
	Owner bool
	Rank  int
}

// order is a line to a rank process, answer one from it. The first answer comes unasked and has the handshake reply.
type order struct {
	Plan  *lease.Plan `json:",omitempty"`
	Fill  int         `json:",omitempty"` // salt of the request
	Check int         `json:",omitempty"` // salt of the request
	Stats bool        `json:",omitempty"`
}

type answer struct {
	Reply  []byte            `json:",omitempty"`
	Result lease.Result      `json:",omitzero"`
	Read   int               `json:",omitempty"`
	Stats  *rdma.WorkerStats `json:",omitempty"`
	Error  string            `json:",omitempty"`
}

// runChild is a rank, until its standard input ends; false when this process is not one.
func runChild() (bool, error) {
	text, ok := os.LookupEnv(childVar)
	if !ok {
		return false, nil
	}
	var c child
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return true, fmt.Errorf("%s: %w", childVar, err)
	}
	s := shape.Named(c.Shape)
	if s == nil {
		return true, fmt.Errorf("%s: no shape %q", childVar, c.Shape)
	}
	r, err := shape.OpenRank(s, c.Owner, c.Rank, shape.NIXL)
	if err != nil {
		return true, err
	}
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for a := (answer{Reply: r.Worker.Reply()}); ; {
		if err := out.Encode(a); err != nil {
			return true, err
		}
		var o order
		if err := in.Decode(&o); err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return true, errors.Join(err, r.Close())
		}
		a = obey(r, o)
	}
}

func obey(r *shape.Rank, o order) (a answer) {
	var err error
	switch {
	case o.Plan != nil:
		a.Result, err = r.Step(*o.Plan)
	case o.Fill != 0:
		err = r.Fill(o.Fill)
	case o.Check != 0:
		a.Read, err = r.Check(o.Check)
	case o.Stats:
		st, e := r.Stats()
		a.Stats, err = &st, e
	}
	if err != nil {
		a.Error = err.Error()
	}
	return a
}

// process is a rank in a process of its own.
type process struct {
	child
	cmd   *exec.Cmd
	stdin io.Closer
	in    *json.Encoder
	out   *json.Decoder
	reply []byte
}

var _ shape.Ranker = (*process)(nil)

// spawn starts a rank; the process is killed when ctx ends.
func spawn(ctx context.Context, c child) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	env, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	p := &process{child: c, cmd: exec.CommandContext(ctx, exe)}
	p.cmd.Env = append(os.Environ(), childVar+"="+string(env))
	p.cmd.Stderr = os.Stderr
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.stdin, p.in, p.out = stdin, json.NewEncoder(stdin), json.NewDecoder(stdout)
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	var a answer
	if err := p.out.Decode(&a); err != nil {
		return nil, errors.Join(p.failed(err), p.Close())
	}
	p.reply = a.Reply
	return p, nil
}

func (p *process) failed(err error) error {
	role := "reader"
	if p.Owner {
		role = "owner"
	}
	return fmt.Errorf("process of %s rank %d: %w", role, p.Rank, err)
}

func (p *process) ask(o order) (a answer, err error) {
	if err := p.in.Encode(o); err != nil {
		return a, p.failed(err)
	}
	if err := p.out.Decode(&a); err != nil {
		return a, p.failed(err)
	}
	if a.Error != "" {
		err = p.failed(errors.New(a.Error))
	}
	return a, err
}

func (p *process) Step(plan lease.Plan) (lease.Result, error) {
	a, err := p.ask(order{Plan: &plan})
	return a.Result, err
}

func (p *process) Fill(salt int) error {
	_, err := p.ask(order{Fill: salt})
	return err
}

func (p *process) Check(salt int) (int, error) {
	a, err := p.ask(order{Check: salt})
	return a.Read, err
}

func (p *process) Stats() (rdma.WorkerStats, error) {
	a, err := p.ask(order{Stats: true})
	if err != nil {
		return rdma.WorkerStats{}, err
	}
	return *a.Stats, nil
}

// Close ends the process, which must end well.
func (p *process) Close() error {
	p.stdin.Close()
	if err := p.cmd.Wait(); err != nil {
		return p.failed(err)
	}
	return nil
}
