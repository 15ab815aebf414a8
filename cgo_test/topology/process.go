package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/nixlgo/nixlgo/cgo_test/child"
	"github.com/nixlgo/nixlgo/cgo_test/topology/shape"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

// rankVar holds, as JSON, which rank a process of this binary is.
const rankVar = "NIXLGO_TOPOLOGY_RANK"

type rankOf struct {
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

// runRank is a rank, until its standard input ends; false when this process is not one.
func runRank() (bool, error) {
	text, ok := os.LookupEnv(rankVar)
	if !ok {
		return false, nil
	}
	var c rankOf
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return true, fmt.Errorf("%s: %w", rankVar, err)
	}
	s := shape.Named(c.Shape)
	if s == nil {
		return true, fmt.Errorf("%s: no shape %q", rankVar, c.Shape)
	}
	r, err := shape.OpenRank(s, c.Owner, c.Rank, shape.NIXL)
	if err != nil {
		return true, err
	}
	if err := child.Say(answer{Reply: r.Worker.Reply()}); err != nil {
		return true, err
	}
	for o, err := range child.Commands[order](os.Stdin) {
		if err == nil {
			err = child.Say(obey(r, o))
		}
		if err != nil {
			return true, errors.Join(err, r.Close())
		}
	}
	return true, r.Close()
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
	*child.Process
	reply []byte
}

var _ shape.Ranker = (*process)(nil)

// spawn starts a rank; the process is killed when ctx ends.
func spawn(ctx context.Context, r rankOf, limit time.Duration) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	env, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	role := "reader"
	if r.Owner {
		role = "owner"
	}
	cmd := exec.CommandContext(ctx, exe)
	cmd.Env = append(os.Environ(), rankVar+"="+string(env))
	cmd.Stderr = os.Stderr
	c, err := child.Start(fmt.Sprintf("%s rank %d", role, r.Rank), cmd, limit)
	if err != nil {
		return nil, err
	}
	var a answer
	if err := c.Receive(ctx, &a); err != nil {
		return nil, errors.Join(err, c.End())
	}
	return &process{c, a.Reply}, nil
}

func (p *process) ask(o order) (a answer, err error) {
	err = p.Call(context.Background(), o, &a)
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
func (p *process) Close() error { return p.End() }
