// Package child is for programs that start processes, tell them what to do in JSON lines on their standard input, and read JSON
// lines from their standard output. Process is a process as its parent sees it; Commands, Say and Exit are for the process itself.
package child

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// Process is a child that runs.
type Process struct {
	Name string
	Cmd  *exec.Cmd // its ProcessState is there once Lines is closed
	// Lines are what it says, for Receive or for whoever ranges over them. They have to be taken, or it cannot go on. The channel is
	// closed when it has ended.
	Lines <-chan []byte

	patience time.Duration
	stdin    io.WriteCloser
	stderr   tail
	err      error // of its end; there once Lines is closed
}

// starts does things on a thread that lasts: a child with Pdeathsig dies with the thread that started it, not with the process, and
// a thread of Go ends together with a goroutine that is locked to it.
var starts = sync.OnceValue(func() chan<- func() {
	todo := make(chan func())
	go func() {
		runtime.LockOSThread()
		for do := range todo {
			do()
		}
	}()
	return todo
})

// Start starts a child, each of whose answers, and whose end, may take as long as patience. The end of its standard error is kept
// for Stderr unless cmd has another place for it. When this process dies the child is killed, for a stopped one would not hear of it.
func Start(name string, cmd *exec.Cmd, patience time.Duration) (*Process, error) {
	lines := make(chan []byte)
	p := &Process{Name: name, Cmd: cmd, Lines: lines, patience: patience}
	if cmd.Stderr == nil {
		cmd.Stderr = &p.stderr
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.stdin = stdin
	started := make(chan error)
	starts() <- func() { started <- cmd.Start() }
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start the %s process: %w", name, err)
	}
	go func() { // ends with the child
		defer close(lines)
		for r := bufio.NewReaderSize(stdout, 64<<10); ; {
			line, err := r.ReadBytes('\n')
			if err != nil { // what it had not ended was not said
				break
			}
			lines <- line
		}
		p.err = cmd.Wait()
	}()
	return p, nil
}

func (p *Process) failed(err error) error { return fmt.Errorf("the %s process: %w", p.Name, err) }

// Send tells the child something. It may be called by several goroutines.
func (p *Process) Send(message any) error {
	if err := json.NewEncoder(p.stdin).Encode(message); err != nil {
		return p.failed(err)
	}
	return nil
}

// Receive waits for the child's next line. A line with an error in its member "error" is returned as that error.
func (p *Process) Receive(ctx context.Context, message any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, p.patience, fmt.Errorf("no answer within %s", p.patience))
	defer cancel()
	select {
	case line, ok := <-p.Lines:
		if !ok {
			return p.failed(fmt.Errorf("it has ended: %v", p.Cmd.ProcessState))
		}
		var refusal struct{ Error string }
		if json.Unmarshal(line, &refusal) == nil && refusal.Error != "" {
			return p.failed(errors.New(refusal.Error))
		}
		if err := json.Unmarshal(line, message); err != nil {
			return p.failed(fmt.Errorf("it said %q: %w", line, err))
		}
		return nil
	case <-ctx.Done():
		return p.failed(context.Cause(ctx))
	}
}

// Call tells the child something and waits for its answer. It is for one goroutine at a time.
func (p *Process) Call(ctx context.Context, command, answer any) error {
	if err := p.Send(command); err != nil {
		return err
	}
	return p.Receive(ctx, answer)
}

// Stopped says whether every thread of the child has stopped; after SIGSTOP that takes a moment.
func (p *Process) Stopped() bool {
	threads, err := filepath.Glob("/proc/" + strconv.Itoa(p.Cmd.Process.Pid) + "/task/*/stat")
	return err == nil && len(threads) > 0 && !slices.ContainsFunc(threads, func(name string) bool {
		text, err := os.ReadFile(name)
		return err == nil && !bytes.Contains(text, []byte(") T "))
	})
}

// Kill ends the child, which has ended when it returns. What it said last may be lost.
func (p *Process) Kill() {
	_ = p.Cmd.Process.Kill() // it may have ended
	for range p.Lines {
	}
}

// End closes the standard input of the child, which is to end by itself then, and well; one that does not in time is killed. What
// it said last may be lost. A stopped child is continued.
func (p *Process) End() error {
	_ = p.Cmd.Process.Signal(syscall.SIGCONT) // it may have ended
	_ = p.stdin.Close()
	hung := time.AfterFunc(p.patience, func() { _ = p.Cmd.Process.Kill() })
	for range p.Lines {
	}
	err := p.err
	if late := !hung.Stop(); late && err != nil {
		err = fmt.Errorf("it did not end within %s: %w", p.patience, err)
	}
	if err != nil {
		return fmt.Errorf("end of the %s process: %w", p.Name, err)
	}
	return nil
}

// Stderr is the end of what the child said on its standard error, once Lines is closed.
func (p *Process) Stderr() string { return string(p.stderr) }

// tail keeps the end of what is written to it.
type tail []byte

const tailSize = 64 << 10

func (t *tail) Write(b []byte) (int, error) {
	all := append(*t, b...)
	*t = append(all[:0], all[max(0, len(all)-tailSize):]...)
	return len(b), nil
}
