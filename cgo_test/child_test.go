package cgotest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	childVariable = "NIXLGO_TEST_CHILD"
	patience      = 30 * time.Second
)

// children are the programs that this binary can be; each returns its exit code.
var children = map[string]func() int{
	"owner":     ownerChild,
	"signals":   signalsChild,
	"load":      loadChild,
	"backend":   backendChild,
	"missing":   missingChild,
	"planned":   plannedChild,
	"custom":    customChild,
	"device":    deviceChild,
	"flips":     flipsChild,
	"collector": collectorChild,
}

// Library code of C runs in libc's exit, and crashes there; hence the direct system call.
func TestMain(m *testing.M) {
	if name := os.Getenv(childVariable); name != "" {
		syscall.Exit(children[name]())
	}
	if os.Getenv("UCX_TLS") == "" {
		os.Setenv("UCX_TLS", "tcp,self")
	}
	syscall.Exit(m.Run())
}

// process is a running child.
type process struct {
	t      testing.TB
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	stderr tail
	waited bool
}

// start runs a child with more environment.
func start(t testing.TB, name string, env ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(append(os.Environ(), childVariable+"="+name), env...)
	p.cmd.Stderr = &p.stderr
	var err error
	p.in, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	p.out = bufio.NewReaderSize(out, 1<<20)
	require.NoError(t, p.cmd.Start())
	t.Cleanup(func() {
		if !p.waited {
			p.signal(syscall.SIGKILL)
			p.cmd.Wait()
		}
	})
	return p
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(s))
	if s == syscall.SIGSTOP { // it takes a moment
		require.Eventually(p.t, func() bool {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
			return err == nil && bytes.Contains(stat, []byte(") T "))
		}, patience, time.Millisecond)
	}
}

// ask sends a command to the child and decodes its answer.
func (p *process) ask(command string, answer any) {
	p.t.Helper()
	_, err := fmt.Fprintln(p.in, command)
	require.NoError(p.t, err, "stderr: %s", &p.stderr)
	p.read(answer)
}

func (p *process) read(answer any) {
	p.t.Helper()
	line, err := p.out.ReadBytes('\n')
	require.NoError(p.t, err, "the child ended; stderr: %s", &p.stderr)
	require.NoError(p.t, json.Unmarshal(line, answer), "%s", line)
}

// wait returns everything that the child still prints, and how it ended.
func (p *process) wait() (stdout string, err error) {
	p.t.Helper()
	p.in.Close()
	timer := time.AfterFunc(2*patience, func() { p.cmd.Process.Kill() })
	defer timer.Stop()
	rest, readErr := io.ReadAll(p.out)
	require.NoError(p.t, readErr)
	p.waited = true
	err = p.cmd.Wait()
	return string(rest), err
}

// tail keeps the end of what a child prints on standard error.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (w *tail) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.b = append(w.b, p...)
	if const64K := 1 << 16; len(w.b) > const64K {
		w.b = bytes.Clone(w.b[len(w.b)-const64K:])
	}
	return len(p), nil
}

func (w *tail) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(w.b)
}

// without returns the environment less some variables.
func without(names ...string) []string {
	var env []string
	for _, e := range os.Environ() {
		name, _, _ := strings.Cut(e, "=")
		keep := true
		for _, n := range names {
			keep = keep && name != n
		}
		if keep {
			env = append(env, e)
		}
	}
	return env
}
