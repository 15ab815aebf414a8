// Package doctor tries the library for the command doctor, after what package diagnose can say without it.
//
// The parent process never loads the library: a child process does (see Loopback), so that a library that crashes or hangs is
// a finding too, and so that whatever C prints stays apart from the report.
package doctor

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"github.com/nixlgo/nixlgo/nixl/diagnose"
)

// Options configure Run.
type Options struct {
	Child   []string      // command line of a process that calls Loopback; its report goes to descriptor 3
	Timeout time.Duration // for each step of it
	Stderr  io.Writer     // takes what the libraries print
}

// message is a line from the child: a step begins, a finding was made, or all steps are done.
type message struct {
	Begin   string            `json:"begin,omitempty"`
	Finding *diagnose.Finding `json:"finding,omitempty"`
	Done    bool              `json:"done,omitempty"`
}

// Run examines the host and then the library, and reports each finding as it is made. It returns the names of the checks
// that were not reached because an earlier one failed.
func Run(ctx context.Context, h *diagnose.Host, o Options, report func(diagnose.Finding)) (skipped []string, err error) {
	for _, f := range h.Findings() {
		report(f)
	}
	// The child dies with this thread, so the thread must stay: PR_SET_PDEATHSIG is about the parent's thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	c := exec.CommandContext(ctx, o.Child[0], o.Child[1:]...)
	c.Stdout, c.Stderr, c.ExtraFiles = o.Stderr, o.Stderr, []*os.File{w}
	c.WaitDelay = time.Second // for what a process of the library's own left open
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	err = c.Start()
	w.Close() // the child has its own
	if err != nil {
		return nil, err
	}
	reached := follow(ctx, h, o.Timeout, c, r, report)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	for _, s := range steps[reached:] {
		skipped = append(skipped, s.name)
	}
	return skipped, nil
}

// follow reports what the child says until it ends, and kills it when a step takes too long. It returns how many steps
// the child began.
func follow(ctx context.Context, h *diagnose.Host, timeout time.Duration, c *exec.Cmd, r io.Reader, report func(diagnose.Finding)) (reached int) {
	messages := make(chan message)
	go func() { // ends with the child, whose pipe then closes
		defer close(messages)
		for lines := bufio.NewReader(r); ; {
			line, err := lines.ReadBytes('\n')
			var m message
			if err != nil || json.Unmarshal(line, &m) != nil {
				return
			}
			messages <- m
		}
	}()
	at := step{name: "start", waiting: "the process that tries the library to start"}
	done := false
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	for {
		select {
		case m, ok := <-messages:
			switch {
			case !ok:
				c.Process.Kill() // it has ended, or it writes what is no report
				err := c.Wait()
				if !done && ctx.Err() == nil {
					report(h.Advise(diagnose.Finding{Name: at.name, Status: diagnose.Fail, Value: died(err), Cause: "the process died while it waited for " + at.waiting}))
				}
				return reached
			case m.Finding != nil:
				report(h.Advise(*m.Finding))
			case m.Done:
				done = true
			default:
				for i, s := range steps {
					if s.name == m.Begin {
						at, reached = s, i+1
					}
				}
				deadline.Reset(timeout)
			}
		case <-deadline.C:
			c.Process.Kill()
			for range messages {
			}
			c.Wait()
			report(h.Advise(diagnose.Finding{Name: at.name, Status: diagnose.Fail, Value: fmt.Sprintf("nothing within %v", timeout), Cause: "waited for " + at.waiting}))
			return reached
		}
	}
}

func died(err error) string {
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			return "signal: " + ws.Signal().String()
		}
		return exit.Error()
	}
	return "ended early"
}
