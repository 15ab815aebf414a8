package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/nixlgo/nixlgo/cgo_test/child"
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

// patience is how long one answer of a child may take, and its end.
const patience = 45 * time.Second

type process struct{ *child.Process }

func (p *process) call(ctx context.Context, c command) (a answer, err error) {
	if err = p.Call(ctx, c, &a); err != nil {
		err = fmt.Errorf("%s: %w", c.Cmd, err)
	}
	return a, err
}

// serve answers commands until in ends, which do is told as the command "end".
func serve(in io.Reader, out io.Writer, do func(command) (answer, error)) error {
	answers := json.NewEncoder(out)
	for c, err := range child.Commands[command](in) {
		if err != nil {
			return err
		}
		a, err := do(c)
		if err != nil {
			a = answer{Error: err.Error()}
		}
		if err := answers.Encode(a); err != nil {
			return err
		}
	}
	_, err := do(command{Cmd: "end"})
	return err
}
