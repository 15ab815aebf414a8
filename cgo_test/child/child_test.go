package child

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	variable = "NIXLGO_CHILD_TEST" // makes the test binary a child
	patience = 30 * time.Second
	voices   = 10
)

type command struct {
	Do   string
	Text string
	N    int
}

type answer struct {
	N    int
	Text string
}

func TestMain(m *testing.M) {
	if os.Getenv(variable) != "" {
		Exit("child", run())
	}
	os.Exit(m.Run())
}

func run() error {
	for c, err := range Commands[command](os.Stdin) {
		switch c.Do {
		case "print":
			fmt.Println(c.Text)
		case "chorus": // long lines of several goroutines
			var all sync.WaitGroup
			for i := range voices {
				all.Go(func() { _ = Say(answer{i, strings.Repeat("x", c.N)}) })
			}
			all.Wait()
		case "fail": // and say more than is kept
			fmt.Fprint(os.Stderr, "first", strings.Repeat("x", tailSize))
			return errors.New(c.Text)
		case "hang": // deaf to the end of its standard input
			time.Sleep(time.Hour)
		case "parent": // has a stopped child of its own
			p, e := start(patience)
			if e != nil {
				return e
			}
			err = errors.Join(p.Cmd.Process.Signal(syscall.SIGSTOP), Say(answer{N: p.Cmd.Process.Pid}))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func start(patience time.Duration) (*Process, error) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), variable+"=1")
	return Start("worker", cmd, patience)
}

func begin(t *testing.T, patience time.Duration) *Process {
	t.Helper()
	p, err := start(patience)
	require.NoError(t, err)
	t.Cleanup(p.Kill)
	return p
}

func TestAnswers(t *testing.T) {
	p := begin(t, patience)
	for _, c := range []struct {
		says string
		n    int
		want string
	}{
		{`{"n":1}`, 1, ""},
		{`{"n":2,"error":""}`, 2, ""},
		{`{"error":"told so"}`, 0, "the worker process: told so"},
		{`mumble`, 0, "the worker process: it said \"mumble\\n\": invalid character 'm' looking for beginning of value"},
		{`{"n":3}`, 3, ""},
	} {
		var a answer
		if err := p.Call(t.Context(), command{Do: "print", Text: c.says}, &a); c.want == "" {
			require.NoError(t, err)
		} else {
			require.EqualError(t, err, c.want)
		}
		require.Equal(t, c.n, a.N)
	}
	require.NoError(t, p.End())
	require.ErrorContains(t, p.Send(command{}), "the worker process")
	require.EqualError(t, p.Receive(t.Context(), nil), "the worker process: it has ended: exit status 0")

	p = begin(t, time.Millisecond)
	require.EqualError(t, p.Call(t.Context(), command{Do: "hang"}, nil), "the worker process: no answer within 1ms")

	_, err := Start("lost", exec.Command("/nowhere/at/all"), patience)
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestLinesOfSeveralGoroutinesStayWhole(t *testing.T) {
	p := begin(t, patience)
	const long = 300_000
	require.NoError(t, p.Send(command{Do: "chorus", N: long}))
	seen := map[int]bool{}
	for range voices {
		var a answer
		require.NoError(t, p.Receive(t.Context(), &a))
		require.Len(t, a.Text, long)
		seen[a.N] = true
	}
	require.Len(t, seen, voices)
}

// A child that fails says why on standard error, of which the end is kept.
func TestChildThatFails(t *testing.T) {
	p := begin(t, patience)
	require.EqualError(t, p.Call(t.Context(), command{Do: "fail", Text: "so be it"}, nil), "the worker process: it has ended: exit status 1")
	require.EqualError(t, p.End(), "end of the worker process: exit status 1")
	const end = "child: so be it\n"
	require.Equal(t, strings.Repeat("x", tailSize-len(end))+end, p.Stderr())

	p = begin(t, patience)
	_, err := p.stdin.Write([]byte("{"))
	require.NoError(t, err)
	require.Error(t, p.End())
	require.Equal(t, "child: unexpected EOF\n", p.Stderr())
}

func TestStoppedChild(t *testing.T) {
	p := begin(t, patience)
	stop := func() {
		require.NoError(t, p.Cmd.Process.Signal(syscall.SIGSTOP))
		require.Eventually(t, p.Stopped, patience, time.Millisecond)
	}
	require.False(t, p.Stopped())
	stop()
	late := errors.New("too late")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(late)
	var a answer
	require.ErrorIs(t, p.Call(ctx, command{Do: "print", Text: `{"N":2}`}, &a), late)
	require.NoError(t, p.Cmd.Process.Signal(syscall.SIGCONT))
	require.NoError(t, p.Receive(t.Context(), &a), "it had heard")
	require.Equal(t, 2, a.N)
	stop()
	require.NoError(t, p.End(), "it is continued")
	require.False(t, p.Stopped())
}

func TestEndAndKill(t *testing.T) {
	end := (*Process).End
	kill := func(p *Process) error { p.Kill(); return p.End() }
	stopAndKill := func(p *Process) error { return errors.Join(p.Cmd.Process.Signal(syscall.SIGSTOP), kill(p)) }
	const killed = "end of the worker process: signal: killed"
	unheard := command{Do: "chorus", N: 50_000}
	for _, c := range []struct {
		name     string
		patience time.Duration
		cmd      command
		end      func(*Process) error
		want     string
	}{
		{"one that nobody has heard ends", patience, unheard, end, ""},
		{"a deaf one is killed", time.Millisecond, command{Do: "hang"}, end, "end of the worker process: it did not end within 1ms: signal: killed"},
		{"kill of a deaf one", patience, command{Do: "hang"}, kill, killed},
		{"kill of a stopped one that nobody has heard", patience, unheard, stopAndKill, killed},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := begin(t, c.patience)
			require.NoError(t, p.Send(c.cmd))
			if err := c.end(p); c.want == "" {
				require.NoError(t, err)
			} else {
				require.EqualError(t, err, c.want)
			}
			require.NotNil(t, p.Cmd.ProcessState)
		})
	}
}

// A child dies with its parent, also while it is stopped, and not with the thread of the goroutine that started it.
func TestChildDiesWithItsParentOnly(t *testing.T) {
	gone := func(stat string) func() bool {
		return func() bool {
			text, err := os.ReadFile(stat)
			return err != nil || bytes.Contains(text, []byte(") Z "))
		}
	}
	var p *Process
	var err error
	started := make(chan int)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends
		p, err = start(patience)
		started <- syscall.Gettid()
	}()
	thread := <-started
	require.NoError(t, err)
	t.Cleanup(p.Kill)
	if thread != os.Getpid() { // the first thread of a process stays
		require.Eventually(t, gone(fmt.Sprintf("/proc/self/task/%d/stat", thread)), patience, time.Millisecond)
	}
	var grandchild answer
	require.NoError(t, p.Call(t.Context(), command{Do: "parent"}, &grandchild))
	p.Kill()
	require.Eventually(t, gone(fmt.Sprintf("/proc/%d/stat", grandchild.N)), patience, time.Millisecond)
}
