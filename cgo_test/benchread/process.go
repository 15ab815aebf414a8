package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/nixlgo/nixlgo/cgo_test/child"
)

// patience is how long one answer of a process may take, and its end.
const patience = 40 * time.Second

// process is a child that answers each command. It is stopped while it is not needed, so that its threads do not disturb what is
// measured.
type process struct{ *child.Process }

func spawn(name string, cmd *exec.Cmd) (*process, error) {
	cmd.Stderr = os.Stderr
	p, err := child.Start(name, cmd, patience)
	return &process{p}, err
}

func (p *process) call(ctx context.Context, c command) (a answer, err error) {
	if err = p.Call(ctx, c, &a); err != nil {
		err = fmt.Errorf("%s: %w", c.Cmd, err)
	}
	return a, err
}

func (p *process) stop() error { return p.Cmd.Process.Signal(syscall.SIGSTOP) }
func (p *process) cont() error { return p.Cmd.Process.Signal(syscall.SIGCONT) }
