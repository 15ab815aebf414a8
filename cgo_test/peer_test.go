package cgotest

import (
	"context"
	"fmt"
	"os"
	"runtime/pprof"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/nixl"
)

// Over TCP the owner's progress thread copies; memory that it unmapped kills
// it, and deregistration does not stop readers. openucx/ucx#9623, nixl#2048,
// nixl#380, sglang#6694, cases.md 2
func TestOwnerOutlivesReadsOfMemoryItClosed(t *testing.T) {
	const size = 1 << 20
	o, r := startOwner(t, "", size), newReader(t, size)
	r.meet(o)
	o.do("fill 1")
	x := r.read(o, 4096, nixl.TransferOptions{})
	for _, step := range []struct {
		command string
		value   byte
	}{{"fill 1", 1}, {"deregister", 1}, {"fill 99", 99}, {"free", 99}} {
		o.do(step.command)
		_, err := x.Post()
		require.NoError(t, err)
		state, err := r.end(x)
		require.NoError(t, err, step.command)
		require.Equal(t, nixl.Done, state)
		r.all(step.value)
	}
	o.do("close") // now the memory is gone
	_, err := x.Post()
	if err == nil {
		_, err = r.end(x)
	}
	require.ErrorIs(t, err, nixl.ErrPeer)
	require.ErrorContains(t, err, o.name)
	o.do("fill-nothing") // the process still answers
}

// nixl#2047, vllm#49238, cases.md 4
func TestStoppedPeerLeavesTheTransferActive(t *testing.T) {
	const size = 64 << 20
	o, r := startOwner(t, "", size), newReader(t, size)
	r.meet(o)
	o.do("fill 7")
	o.signal(syscall.SIGSTOP)
	x := r.read(o, size, nixl.TransferOptions{})
	_, err := x.Post()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err = x.Wait(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.False(t, x.Settled())
	require.ErrorIs(t, x.Close(), nixl.ErrActive)
	_, err = x.Post()
	require.ErrorIs(t, err, nixl.ErrActive, "older libraries delete a request that is posted twice")
	require.NoError(t, r.agent.Notify(o.name, []byte("looks alive")))
	require.ErrorIs(t, r.agent.InvalidateRemote(o.name), nixl.ErrActive)
	_, err = r.agent.LoadRemote(o.Blob)
	require.NoError(t, err, "unchanged metadata disturbs nothing")
	o.signal(syscall.SIGCONT)
	state, err := r.end(x)
	require.NoError(t, err)
	require.Equal(t, nixl.Done, state)
	r.all(7)
	require.NoError(t, x.Close())
	o.do("fill 8")
	y := r.read(o, 1<<16, nixl.TransferOptions{})
	_, err = y.Post()
	require.NoError(t, err)
	_, err = r.end(y)
	require.NoError(t, err)
	r.all(8)
}

// An agent can be closed although a stopped peer owes it a transfer.
// cases.md 40: close from any goroutine within a second, here unhurried.
func TestAgentClosesWhileItsPeerIsStopped(t *testing.T) {
	const size = 64 << 20
	o, r := startOwner(t, "", size), newReader(t, size)
	r.meet(o)
	o.signal(syscall.SIGSTOP)
	x := r.read(o, size, nixl.TransferOptions{})
	_, err := x.Post()
	require.NoError(t, err)
	closed := make(chan error)
	go func() { closed <- r.agent.Close() }()
	select {
	case err := <-closed:
		require.NoError(t, err)
	case <-time.After(patience):
		t.Fatal("Close hangs")
	}
	fill(r.buffer.Bytes(), 0x55)
	o.signal(syscall.SIGCONT)
	// The owner answers what it was asked for to a reader that is gone. UCX may
	// not survive that; it is enough that it ran.
	fmt.Fprintln(o.in, "fill 1")
	o.out.ReadBytes('\n')
	r.all(0x55)
}

// SIGKILL amid a READ. The status says so, the error tells a dead peer from a
// bad argument, nothing lands later, and the peer can come back under its name.
// nixl#2114, nixl#656, vllm-backport#33, cases.md 28 and 14
func TestKilledPeer(t *testing.T) {
	const size = 128 << 20
	r := newReader(t, size)
	failed := 0
	for round := range 4 {
		o := startOwner(t, "comes-back", size)
		r.meet(o)
		o.do("fill 3")
		x := r.read(o, 1<<16, nixl.TransferOptions{SkipMerge: true, Notification: []byte("never")})
		_, err := x.Post()
		require.NoError(t, err)
		time.Sleep(time.Duration(round) * 10 * time.Millisecond) // varies where in the READ it dies
		o.signal(syscall.SIGKILL)
		state, err := r.end(x)
		if state == nixl.Failed {
			failed++
			require.ErrorIs(t, err, nixl.ErrPeer)
			require.ErrorIs(t, err, nixl.ErrBackend)
			require.NotErrorIs(t, err, nixl.ErrInvalid)
			require.ErrorContains(t, err, "comes-back")
			require.Equal(t, err, x.Err())
			require.ErrorIs(t, x.Close(), nixl.ErrActive, "not settled at once")
			fill(r.buffer.Bytes(), 0x55)
			_, err = x.Post()
			require.ErrorIs(t, err, nixl.ErrState)
			require.Eventually(t, x.Settled, patience, 10*time.Millisecond)
			r.all(0x55)
		}
		require.NoError(t, x.Close())
		require.Eventually(t, func() bool { // the transport needs a moment to notice
			return r.agent.Notify("comes-back", []byte("m")) != nil
		}, patience, 10*time.Millisecond)
		require.ErrorIs(t, r.agent.Notify("comes-back", []byte("m")), nixl.ErrPeer)
		o.waited = true
		o.cmd.Wait()
	}
	require.Positive(t, failed, "no round died amid its READ")
	o := startOwner(t, "comes-back", size)
	r.meet(o)
	o.do("fill 4")
	x := r.read(o, 1<<20, nixl.TransferOptions{})
	_, err := x.Post()
	require.NoError(t, err)
	_, err = r.end(x)
	require.NoError(t, err)
	r.all(4)
}

// Threads are for running calls, not for waiting goroutines. milvus#19147,
// golang/go#49057, cases.md 40
func TestWaitingGoroutinesNeedNoThreads(t *testing.T) {
	const size, requests, waiters = 1 << 20, 1000, 10_000
	o, r := startOwner(t, "", size), newReader(t, size)
	r.meet(o)
	warm := r.read(o, 4096, nixl.TransferOptions{})
	_, err := warm.Post()
	require.NoError(t, err)
	_, err = r.end(warm)
	require.NoError(t, err)
	threads := func() int { return pprof.Lookup("threadcreate").Count() }
	before := threads()

	var wg sync.WaitGroup
	var done atomic.Int64
	for range 500 {
		wg.Go(func() {
			x := r.read(o, 1<<16, nixl.TransferOptions{})
			if _, err := x.Post(); err != nil {
				t.Error(err)
				return
			}
			if err := x.Wait(context.Background()); err != nil {
				t.Error(err)
				return
			}
			if err := x.Close(); err != nil {
				t.Error(err)
			}
			done.Add(1)
		})
	}
	wg.Wait()
	require.EqualValues(t, 500, done.Load())
	require.LessOrEqual(t, threads(), before+16, "500 READs")

	// A thousand requests to a peer that is stopped, ten goroutines each.
	o.signal(syscall.SIGSTOP)
	stalled := make([]*nixl.Transfer, requests)
	for i := range stalled {
		stalled[i] = r.read(o, 1<<16, nixl.TransferOptions{})
		_, err = stalled[i].Post()
		require.NoError(t, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var waiting atomic.Int64
	for i := range waiters {
		wg.Go(func() {
			waiting.Add(1)
			if err := stalled[i%requests].Wait(ctx); err == nil {
				t.Error("a stopped peer answered")
			}
		})
	}
	require.Eventually(t, func() bool { return waiting.Load() == waiters }, patience, time.Millisecond)
	states := make([]nixl.State, requests)
	require.NoError(t, nixl.PollAll(stalled, states))
	require.Equal(t, requests, count(states, nixl.Active))
	require.LessOrEqual(t, threads(), before+16, "10,000 waiting goroutines")
	cancel()
	wg.Wait()
	o.signal(syscall.SIGCONT)
	require.Eventually(t, func() bool {
		require.NoError(t, nixl.PollAll(stalled, states))
		return count(states, nixl.Done) == requests
	}, patience, time.Millisecond)
	require.LessOrEqual(t, threads(), before+16, "one poller of all")
}

func count(states []nixl.State, s nixl.State) (n int) {
	for _, have := range states {
		if have == s {
			n++
		}
	}
	return n
}

// Two UCX libraries in one process crash. nixl#386, cases.md 35
func TestOneCopyOfUCX(t *testing.T) {
	newReader(t, 4096)
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	files := map[string]bool{}
	for line := range strings.Lines(string(maps)) {
		if i := strings.Index(line, "/"); i >= 0 && strings.Contains(line[i:], "libucp") {
			files[strings.TrimSpace(line[i:])] = true
		}
	}
	require.Len(t, files, 1)
}

// Processes that start agents at the same time do not disturb each other: forty, eight at once. None takes memory for
// what it does not use. dynamo#9265, nixl#1668, cases.md 35
func TestAgentsStartTogether(t *testing.T) {
	const rounds, atOnce, most = 5, 8, 200 << 20
	for range rounds {
		var owners []*process
		for range atOnce {
			owners = append(owners, start(t, "owner", "OWNER_SIZE=4096"))
		}
		for _, o := range owners {
			var h hello
			o.read(&h)
		}
		for _, o := range owners {
			resident := residentPages(o.cmd.Process.Pid) * os.Getpagesize()
			require.Positive(t, resident)
			require.Less(t, resident, most)
			o.ask("drain", new(int))
			_, err := o.wait()
			require.NoError(t, err)
		}
	}
}
