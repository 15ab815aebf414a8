package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/cgo_test/ports"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/lease/hold"
)

// holdDaemon is a built daemon that runs until the test ends.
type holdDaemon struct {
	*hold.Client
	ready holdReady
	cmd   *exec.Cmd
}

func startHold(t *testing.T, exe string, args ...string) *holdDaemon {
	t.Helper()
	d := &holdDaemon{cmd: exec.Command(exe, append([]string{"hold", "--json"}, args...)...)}
	var stderr bytes.Buffer
	d.cmd.Stderr = &stderr
	stdout, err := d.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, d.cmd.Start())
	t.Cleanup(func() {
		_ = d.cmd.Process.Signal(syscall.SIGTERM)
		_ = d.cmd.Wait()
		if t.Failed() {
			t.Logf("standard error of the daemon:\n%s", stderr.String())
		}
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err, "%s", &stderr)
	require.NoError(t, json.Unmarshal([]byte(line), &d.ready), line)
	require.Equal(t, "ready", d.ready.Event)
	d.Client, err = hold.New(d.ready.Address)
	require.NoError(t, err)
	t.Cleanup(func() { _ = d.Client.Close() })
	return d
}

// socketArgs puts a daemon into a directory of the test's.
func socketArgs(t *testing.T) []string {
	t.Helper()
	dir, err := os.MkdirTemp("", "hold") // a socket's path is short
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return []string{"--listen", "unix:" + filepath.Join(dir, "s"), "--state", filepath.Join(dir, "state")}
}

// holdLease sets the lease of owner and daemon. The daemon's steps may be late by half a lease on a busy machine.
func holdLease(d time.Duration) func(*nixlgo.Config) {
	return func(c *nixlgo.Config) { c.Lease.Duration = d }
}

func publish(t *testing.T, n *nixlgo.Node, id string, blocks ...int) *nixlgo.Publication {
	t.Helper()
	pub, err := n.Publish(t.Context(), id, blocks, 16*len(blocks))
	require.NoError(t, err)
	return pub
}

func rawParams(t *testing.T, p *nixlgo.Publication) []byte {
	t.Helper()
	text, err := json.Marshal(p.Params())
	require.NoError(t, err)
	return text
}

func holdOf(t *testing.T, d *holdDaemon, p *nixlgo.Publication, ttl time.Duration) hold.Hold {
	t.Helper()
	h, err := d.Hold(t.Context(), rawParams(t, p), ttl)
	require.NoError(t, err)
	return h
}

// requireHeld requires that none of the leases ends for d.
func requireHeld(t *testing.T, d time.Duration, pubs ...*nixlgo.Publication) {
	t.Helper()
	for until := time.Now().Add(d); time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
		for i, p := range pubs {
			require.Zero(t, p.Reason(), "lease %d ended", i)
		}
	}
}

func requireEnds(t *testing.T, p *nixlgo.Publication, want lease.Reason) {
	t.Helper()
	select {
	case <-p.Done():
		require.Equal(t, want, p.Reason())
	case <-time.After(30 * time.Second):
		t.Fatal("the lease did not end")
	}
}

// The daemon has no KV cache of the owner's shape, and needs none.
func TestHoldRenewsUntilTheHoldEnds(t *testing.T) {
	t.Parallel() // it waits, mostly
	const duration = 3 * time.Second
	exe := program(t)
	owner := startNode(t, holdLease(duration))
	d := startHold(t, exe, append(socketArgs(t), "--lease", duration.String(), "--max-ttl", "1h")...)

	released, left, expired := publish(t, owner, "released", 1, 2), publish(t, owner, "left", 3), publish(t, owner, "expired", 4)
	a, b, c := holdOf(t, d, released, 0), holdOf(t, d, left, time.Hour), holdOf(t, d, expired, 3*duration)
	require.Equal(t, []string{owner.Engine(), "released"}, []string{a.Engine, a.Request})
	requireHeld(t, 5*duration/2, released, left, expired)
	renewed := owner.Stats().Worker.Leases
	require.Zero(t, renewed.StaleRenewals+renewed.UnknownRenewals)
	require.Greater(t, renewed.Renewals, int64(3*5), "three leases, five times")
	all, err := d.List(t.Context())
	require.NoError(t, err)
	require.ElementsMatch(t, []hold.Hold{a, b, c}, all)

	require.NoError(t, d.Release(t.Context(), a.ID))
	requireEnds(t, released, lease.ReasonRead)
	require.NoError(t, d.Leave(t.Context(), b.ID))
	requireEnds(t, left, lease.ReasonExpired)
	requireEnds(t, expired, lease.ReasonExpired)
	for _, h := range []hold.Hold{a, b, c} {
		_, err := d.Get(t.Context(), h.ID)
		require.ErrorIs(t, err, lease.ErrUnknown)
		require.ErrorIs(t, d.Release(t.Context(), h.ID), lease.ErrUnknown)
	}
	left2, err := os.ReadDir(d.ready.State)
	require.NoError(t, err)
	require.Len(t, left2, 1, "only the lock stays")
	require.EqualValues(t, 1, owner.Stats().Worker.Leases.ReadCompletes, "nobody but the released one was given back")
}

func TestHoldGoesOnAfterItWasKilled(t *testing.T) {
	t.Parallel()                     // it waits, mostly
	const duration = 9 * time.Second // renewed to 6 s every second: the restart has 5
	exe, args := program(t), append(socketArgs(t), "--lease", duration.String())
	owner := startNode(t, holdLease(duration))
	d := startHold(t, exe, args...)
	require.Zero(t, d.ready.Holds)
	held, short, ended := publish(t, owner, "held", 1), publish(t, owner, "short", 2), publish(t, owner, "ended", 3)
	h, s, e := holdOf(t, d, held, 10*time.Minute), holdOf(t, d, short, time.Second), holdOf(t, d, ended, 0)
	require.NoError(t, d.Leave(t.Context(), e.ID))
	require.Eventually(t, func() bool { return owner.Stats().Worker.Leases.Renewals > 2 }, 20*time.Second, time.Millisecond)

	require.NoError(t, d.cmd.Process.Kill())
	require.Error(t, d.cmd.Wait())
	killed := time.Now()
	before := owner.Stats().Worker.Leases
	require.Zero(t, before.ReadCompletes)
	require.Eventually(t, func() bool { return time.Now().After(s.Expires) }, 5*time.Second, time.Millisecond)
	d = startHold(t, exe, args...) // in the place of the socket that was left behind
	require.Equal(t, 1, d.ready.Holds, "neither one that expired meanwhile nor one that ended")
	again, err := d.Get(t.Context(), h.ID)
	require.NoError(t, err)
	require.True(t, h.Expires.Equal(again.Expires))

	requireHeld(t, time.Until(killed.Add(duration+time.Second)), held)
	requireEnds(t, short, lease.ReasonExpired)
	requireEnds(t, ended, lease.ReasonExpired)
	after := owner.Stats().Worker.Leases
	require.Greater(t, after.Renewals, before.Renewals)
	require.Zero(t, after.ReadCompletes, "a daemon releases nothing on its own")
	require.NoError(t, d.Release(t.Context(), h.ID))
	requireEnds(t, held, lease.ReasonRead)
}

// Killed at any moment: what was promised is held by the next run, and what was ended is not.
func TestHoldKeepsItsPromisesWhenItIsKilledAtAnyMoment(t *testing.T) {
	exe, args := program(t), socketArgs(t)
	held, ended := map[string]bool{}, map[string]bool{}
	for round := range 4 {
		d := startHold(t, exe, args...)
		all, err := d.List(t.Context())
		require.NoError(t, err)
		found := map[string]bool{}
		for _, h := range all {
			found[h.ID] = true
			require.False(t, ended[h.ID], "round %d: %s was ended", round, h.Request)
		}
		for id := range held {
			require.True(t, found[id], "round %d: %s was promised", round, id)
		}
		var mu sync.Mutex
		var clients sync.WaitGroup
		promised := 0
		for client := range 4 {
			clients.Go(func() {
				for n := 0; ; n++ {
					h, err := d.Hold(t.Context(), nowhere(fmt.Sprint(round, "-", client, "-", n)), time.Minute)
					if err != nil {
						return // killed; nothing was promised
					}
					mu.Lock()
					held[h.ID] = true
					promised++
					mu.Unlock()
					if n%2 == 0 {
						continue
					}
					mu.Lock()
					delete(held, h.ID) // from here on it may be either
					mu.Unlock()
					if d.Leave(t.Context(), h.ID) != nil {
						return
					}
					mu.Lock()
					ended[h.ID] = true
					mu.Unlock()
				}
			})
		}
		require.Eventually(t, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return promised >= 10*(round+1)
		}, 20*time.Second, time.Millisecond)
		require.NoError(t, d.cmd.Process.Kill())
		clients.Wait()
		require.Error(t, d.cmd.Wait())
	}
	require.NotEmpty(t, held)
	require.NotEmpty(t, ended)
}

func TestHoldReleasesNothingWhenItIsStopped(t *testing.T) {
	exe := program(t)
	owner := startNode(t, holdLease(2*time.Second))
	d := startHold(t, exe, append(socketArgs(t), "--lease", "2s")...)
	pub := publish(t, owner, "req", 1)
	holdOf(t, d, pub, 0)
	require.Eventually(t, func() bool { return owner.Stats().Worker.Leases.Renewals > 0 }, 20*time.Second, time.Millisecond)
	require.NoError(t, d.cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, d.cmd.Wait())
	requireEnds(t, pub, lease.ReasonExpired)
	require.Zero(t, owner.Stats().Worker.Leases.ReadCompletes)
}

// Why release is an argument without a default (vllm#52234: the previous prompt's answer, HTTP 200, 0 failed transfers): a
// decoder that still has the params of a released lease reads the next prompt's bytes. One that verifies finds out.
func TestAReleaseWhileADecoderHasTheParamsIsOnlySafeIfItVerifies(t *testing.T) {
	exe := program(t)
	owner := startNode(t)
	verifying := startNode(t)
	trusting := startNode(t, func(c *nixlgo.Config) { c.Lease.Verification = lease.VerifyNone })
	d := startHold(t, exe, socketArgs(t)...)

	fillNode(owner, 0x11, 1, 2)
	pub := publish(t, owner, "first prompt", 1, 2)
	params := pub.Params() // a decoder has them now
	h := holdOf(t, d, pub, 0)
	require.NoError(t, d.Release(t.Context(), h.ID)) // and the router is mistaken about that
	requireEnds(t, pub, lease.ReasonRead)
	fillNode(owner, 0x55, 1, 2) // the next prompt, in the same blocks
	next := publish(t, owner, "second prompt", 1, 2)

	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	require.ErrorIs(t, verifying.Fetch(ctx, params, []int{3, 4}), lease.ErrLapsed)
	for l := range 2 {
		require.Empty(t, bytes.Trim(verifying.Block(l, 3), "\x00"), "nothing of it stays")
	}
	require.NoError(t, trusting.Fetch(ctx, params, []int{3, 4}))
	requireNode(t, trusting, 0x55, 3, 4)
	require.Zero(t, next.Reason(), "the second prompt is still held")
}

// B13: a hold whose owner has moved, or never was at its address, is renewed there in vain. The others of that engine are renewed
// and released as if it were not.
func TestHoldServesTheOthersBesideABadOne(t *testing.T) {
	t.Parallel() // it waits, mostly
	const duration = 3 * time.Second
	exe := program(t)
	owner := startNode(t, holdLease(duration))
	d := startHold(t, exe, append(socketArgs(t), "--lease", duration.String())...)
	bad, good := publish(t, owner, "bad", 1), publish(t, owner, "good", 2)
	moved := bad.Params()
	var err error
	moved.RemotePort, err = ports.Free()
	require.NoError(t, err)
	text, err := json.Marshal(moved)
	require.NoError(t, err)
	_, err = d.Hold(t.Context(), text, time.Minute)
	require.NoError(t, err)
	h := holdOf(t, d, good, time.Minute)
	requireHeld(t, 5*duration/2, good)
	requireEnds(t, bad, lease.ReasonExpired)
	require.NoError(t, d.Release(t.Context(), h.ID))
	requireEnds(t, good, lease.ReasonRead)
}
