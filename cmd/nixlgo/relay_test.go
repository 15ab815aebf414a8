package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
)

// startRelay runs the built relay until the test ends.
func startRelay(t *testing.T, exe string, args ...string) (*exec.Cmd, relayReady) {
	t.Helper()
	c := exec.Command(exe, append([]string{"relay", "--json", "--listen", "127.0.0.1:0", "--drain", "0s"}, args...)...)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	stdout, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		_ = c.Process.Signal(syscall.SIGTERM)
		_ = c.Wait()
		if t.Failed() {
			t.Logf("standard error of the relay:\n%s", stderr.String())
		}
	})
	var ready relayReady
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err, "%s", &stderr)
	require.NoError(t, json.Unmarshal([]byte(line), &ready), line)
	require.Equal(t, "ready", ready.Event)
	return c, ready
}

// post sends kv_transfer_params through the relay.
func post(t *testing.T, ctx context.Context, r relayReady, body string) (code int, answer []byte, err error) {
	t.Helper()
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, r.URL, strings.NewReader(body))
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(q)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	answer, err = io.ReadAll(resp.Body)
	return resp.StatusCode, answer, err
}

func relayed(t *testing.T, r relayReady, p *lease.Params) *lease.Params {
	t.Helper()
	text, err := json.Marshal(p)
	require.NoError(t, err)
	code, answer, err := post(t, t.Context(), r, string(text))
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, code, string(answer))
	out := new(lease.Params)
	require.NoError(t, json.Unmarshal(answer, out))
	return out
}

func relayState(t *testing.T, r relayReady) (s relayStats) {
	t.Helper()
	resp, err := http.Get(r.URL + "stats")
	require.NoError(t, err)
	defer resp.Body.Close()
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&s))
	return s
}

func freeBlocks(t *testing.T, r relayReady) int {
	t.Helper()
	return relayState(t, r).FreeBlocks
}

func fillNode(n *nixlgo.Node, v byte, blocks ...int) {
	for _, b := range blocks {
		for l := range 2 {
			for i := range n.Block(l, b) {
				n.Block(l, b)[i] = v + byte(l)
			}
		}
	}
}

func requireNode(t *testing.T, n *nixlgo.Node, v byte, blocks ...int) {
	t.Helper()
	for _, b := range blocks {
		for l := range 2 {
			require.Equal(t, bytes.Repeat([]byte{v + byte(l)}, 4096), n.Block(l, b))
		}
	}
}

func TestRelayPassesBlocksOnUnderItsOwnLease(t *testing.T) {
	exe := program(t)
	owner, reader := startNode(t), startNode(t)
	_, r := startRelay(t, exe, "--like", sideChannel(owner.Port()), "--verify", "--blocks", "5")
	require.Equal(t, []int{2, 4096, 16, 5}, []int{r.Layers, r.BlockBytes, r.BlockTokens, r.Blocks})
	for round := range 3 { // the blocks of the relay are used again
		id := fmt.Sprint("req", round)
		fillNode(owner, byte(10*round+1), 1, 2, 3)
		pub, err := owner.Publish(t.Context(), id, []int{1, 2, 3}, 40)
		require.NoError(t, err)
		in := pub.Params()
		in.Extra = map[string]json.RawMessage{"router": json.RawMessage(`"x"`), "remote_registration_generation": json.RawMessage("1")}
		out := relayed(t, r, in)
		<-pub.Done()
		require.Equal(t, lease.ReasonRead, pub.Reason(), "the owner is free before the decoder has read")
		fillNode(owner, 0xEE, 1, 2, 3)
		require.Equal(t, r.Engine, out.RemoteEngineID)
		require.Equal(t, 40, out.RemoteNumTokens)
		require.True(t, out.DoRemotePrefill)
		require.NotNil(t, out.Lease)
		require.Equal(t, map[string]json.RawMessage{"router": json.RawMessage(`"x"`)}, out.Extra)
		require.Equal(t, 2, freeBlocks(t, r))
		require.NoError(t, reader.Fetch(t.Context(), out, []int{5, 6, 7}))
		requireNode(t, reader, byte(10*round+1), 5, 6, 7)
		deadline(t, "the relay's blocks", func() bool { return freeBlocks(t, r) == 5 })
	}
}

// A relay that read without a check would give its decoder another request's blocks under a lease that proves nothing.
func TestRelayVerifiesWhatCanBeVerified(t *testing.T) {
	exe := program(t)
	owner, reader := startNode(t), startNode(t)
	plain := startNode(t, func(c *nixlgo.Config) { c.Lease.Slots = lease.NoSlot })
	_, r := startRelay(t, exe, "--like", sideChannel(owner.Port()), "--blocks", "5")
	fillNode(owner, 1, 1)
	pub, err := owner.Publish(t.Context(), "lapsed", []int{1}, 16)
	require.NoError(t, err)
	require.NoError(t, pub.Revoke())
	<-pub.Done()
	fillNode(owner, 2, 1) // another prompt's
	text, err := json.Marshal(pub.Params())
	require.NoError(t, err)
	code, answer, err := post(t, t.Context(), r, string(text))
	require.NoError(t, err)
	require.Equal(t, http.StatusConflict, code, string(answer))
	require.Equal(t, 5, freeBlocks(t, r))

	fillNode(plain, 3, 1)
	pub, err = plain.Publish(t.Context(), "without a lease", []int{1}, 16)
	require.NoError(t, err)
	require.Nil(t, pub.Params().Lease)
	require.NoError(t, reader.Fetch(t.Context(), relayed(t, r, pub.Params()), []int{5}))
	requireNode(t, reader, 3, 5)
}

func TestRelayRefusesByStatus(t *testing.T) {
	exe := program(t)
	owner := startNode(t)
	_, r := startRelay(t, exe, "--like", sideChannel(owner.Port()), "--verify", "--blocks", "2")
	good := func(id string, blocks ...int) *lease.Params {
		pub, err := owner.Publish(t.Context(), id, blocks, 16*len(blocks))
		require.NoError(t, err)
		return pub.Params()
	}
	text := func(p *lease.Params) string {
		b, err := json.Marshal(p)
		require.NoError(t, err)
		return string(b)
	}
	lapsed := good("lapsed", 1)
	lapsed.Lease.Nonce++
	bare := good("bare", 2)
	bare.Lease = nil
	gone := good("gone", 3)
	gone.RemotePort, gone.RemoteEngineID = 1, "gone"
	push := good("push", 4)
	push.DoRemotePrefill = false
	for _, c := range []struct {
		name, body string
		code       int
		cause      string
	}{
		{"no JSON", "{", 400, "invalid"},
		{"no params", "{}", 400, "invalid"},
		{"a wrong type", `{"do_remote_prefill": true, "remote_block_ids": [[1]], "remote_port": "x"}`, 400, "invalid"},
		{"no address", `{"do_remote_prefill": true, "remote_block_ids": [[1]]}`, 400, "invalid"},
		{"two groups", `{"do_remote_prefill": true, "remote_block_ids": [[1],[2]]}`, 400, "invalid"},
		{"nothing to read", text(push), 400, "invalid"},
		{"another nonce", text(lapsed), 409, "lapsed"},
		{"no lease", text(bare), 409, "unverifiable"},
		{"an owner that is gone", text(gone), 502, "handshake"},
		{"more than fits", text(good("large", 5, 6, 7)), 413, "transfer"},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, answer, err := post(t, t.Context(), r, c.body)
			require.NoError(t, err)
			require.Equal(t, c.code, code, string(answer))
			var e relayError
			require.NoError(t, json.Unmarshal(answer, &e))
			require.NotEmpty(t, e.Error)
			require.Equal(t, c.cause, e.Cause, e.Error)
			deadline(t, "the blocks", func() bool { return freeBlocks(t, r) == 2 })
		})
	}
	relayed(t, r, good("still works", 0))
}

// A client that hangs up while its request waits for blocks lets the owner go.
func TestRelayReleasesTheOwnerWhenTheClientHangsUp(t *testing.T) {
	exe := program(t)
	owner := startNode(t)
	_, r := startRelay(t, exe, "--like", sideChannel(owner.Port()), "--blocks", "2")
	first, err := owner.Publish(t.Context(), "first", []int{0, 1}, 32)
	require.NoError(t, err)
	relayed(t, r, first.Params())
	second, err := owner.Publish(t.Context(), "second", []int{2, 3}, 32)
	require.NoError(t, err)
	text, err := json.Marshal(second.Params())
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	hungUp := make(chan error)
	go func() {
		_, _, err := post(t, ctx, r, string(text))
		hungUp <- err
	}()
	deadline(t, "the relay to renew the lease while it has no blocks", func() bool { return relayState(t, r).Node.Scheduler.Tracked == 1 })
	cancel()
	require.ErrorIs(t, <-hungUp, context.Canceled)
	<-second.Done()
	require.Equal(t, lease.ReasonRead, second.Reason())
}

func TestRelayDrainsBeforeItEnds(t *testing.T) {
	exe := program(t)
	owner, reader := startNode(t), startNode(t)
	c, r := startRelay(t, exe, "--like", sideChannel(owner.Port()), "--drain", "30s")
	fillNode(owner, 9, 1)
	pub, err := owner.Publish(t.Context(), "req", []int{1}, 16)
	require.NoError(t, err)
	out := relayed(t, r, pub.Params())
	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
	deadline(t, "HTTP to close", func() bool {
		_, _, err := post(t, t.Context(), r, "{}")
		return err != nil
	})
	require.NoError(t, reader.Fetch(t.Context(), out, []int{5}))
	requireNode(t, reader, 9, 5)
	require.NoError(t, c.Wait())
}

func TestRelayRefusesAWrongCommandLine(t *testing.T) {
	exe := program(t)
	for _, args := range [][]string{
		{}, {"--layers", "1"}, {"--like", "nonsense"}, {"--like", "tcp://h:1", "--layers", "1"}, {"--like", "tcp://h:1", "--blocks", "0"},
		{"--like", "tcp://h:1", "--lease", "0s"}, {"--like", "tcp://h:1", "--drain", "-1s"}, {"extra"},
	} {
		code, _, stderr := run(t, exe, append([]string{"relay"}, args...)...)
		require.Equal(t, exitUsage, code, "%v: %s", args, stderr)
	}
	code, _, stderr := run(t, exe, "relay", "--like", "tcp://127.0.0.1:1")
	require.Equal(t, exitFailed, code)
	require.Contains(t, stderr, "tcp://127.0.0.1:1")
}

func TestBlockPoolServesInOrder(t *testing.T) {
	p := newBlockPool(4)
	all, err := p.take(t.Context(), 4)
	require.NoError(t, err)
	require.ElementsMatch(t, []int{0, 1, 2, 3}, all)
	large := make(chan []int)
	go func() {
		b, _ := p.take(context.Background(), 3)
		large <- b
	}()
	deadline(t, "the large request to wait", func() bool { return len(p.turn) == 1 })
	p.give(all[:2])
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = p.take(ctx, 1) // there is one, but it is another's turn
	require.ErrorIs(t, err, context.DeadlineExceeded)
	p.give(all[2:])
	require.Len(t, <-large, 3)
	_, err = p.take(t.Context(), 5)
	require.ErrorIs(t, err, errTooLarge)
}
