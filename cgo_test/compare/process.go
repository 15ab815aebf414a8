package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const patience = 2 * time.Minute // for one answer of a process

// process is one language's.
type process struct {
	name    string
	pid     int
	stdin   io.Writer
	answers chan string // closed when the process ended
}

// wait returns when the process has ended; somebody else ends it.
func (p *process) wait() {
	for range p.answers {
	}
}

// environment is the same for all. malloc keeps the memory that it once had;
// otherwise the first large lists of a process decide what later ones cost.
var environment = []string{"UCX_TLS=shm,self", "UCX_LOG_FILE=stderr", "UCX_HANDLE_ERRORS=none", "UCX_USE_MT_MUTEX=y", "UCX_CMA_TX_QUOTA=16",
	"UCX_RCACHE_MAX_UNRELEASED=1024", "UCX_LOG_LEVEL=error", "NIXL_LOG_LEVEL=ERROR",
	"GLIBC_TUNABLES=glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824"}

func start(ctx context.Context, name string, env []string, args ...string) (*process, error) {
	c := exec.CommandContext(ctx, args[0], args[1:]...)
	c.Env = append(append(os.Environ(), environment...), env...)
	c.Stderr = os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := c.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &process{name: name, pid: c.Process.Pid, stdin: in, answers: make(chan string)}
	go func() { // ends with the process
		defer close(p.answers)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			p.answers <- lines.Text()
		}
		c.Wait() // tells of a signal: ours
	}()
	ready, err := p.answer()
	if err == nil && ready != "ready" {
		err = fmt.Errorf("%s said %q", name, ready)
	}
	return p, err
}

func (p *process) answer() (string, error) {
	select {
	case line, ok := <-p.answers:
		if !ok {
			return "", fmt.Errorf("the %s process ended", p.name)
		}
		return line, nil
	case <-time.After(patience):
		return "", fmt.Errorf("the %s process did not answer within %v", p.name, patience)
	}
}

func (p *process) ask(command string) ([]float64, error) {
	if _, err := fmt.Fprintln(p.stdin, command); err != nil {
		return nil, fmt.Errorf("%s: %s: %w", p.name, command, err)
	}
	line, err := p.answer()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", command, err)
	}
	var numbers []float64
	for _, f := range strings.Fields(line) {
		n, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %s answered %q", p.name, command, line)
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
}

// faults is how many pages the kernel has mapped into the process so far, 0 if it does not say.
func (p *process) faults() int {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid))
	_, fields, _ := strings.Cut(string(text), ") ") // state ppid pgrp session tty tpgid flags minflt
	n, _ := strconv.Atoi(append(strings.Fields(fields), "", "", "", "", "", "", "", "")[7])
	return n
}
