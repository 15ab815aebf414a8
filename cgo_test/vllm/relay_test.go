//go:build interop_vllm

package vllm

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

// program builds the command as a user gets it.
func program(t *testing.T) string {
	t.Helper()
	exe := filepath.Join(t.TempDir(), "nixlgo")
	build := exec.Command("go", "build", "-o", exe, "./cmd/nixlgo")
	build.Dir = filepath.Join(here(), "..", "..")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	return exe
}

func sideChannel(port int) string { return fmt.Sprintf("tcp://127.0.0.1:%d", port) }

// startRelay runs `nixlgo relay` until the test ends, and returns its engine id and URL.
func startRelay(t *testing.T, args ...string) (engine, url string) {
	t.Helper()
	c := exec.Command(program(t), append([]string{"relay", "--json", "--listen", "127.0.0.1:0", "--drain", "0s"}, args...)...)
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
	var ready struct{ Engine, URL string }
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err, "%s", &stderr)
	require.NoError(t, json.Unmarshal([]byte(line), &ready), line)
	return ready.Engine, ready.URL
}

// The way of a request: prefill at p, relay, decode at d. The relay learns geometry and hash from the decode instance.
func (v pair) relay(t *testing.T) {
	p, d := v.p.For(t), v.d.For(t)
	engine, url := startRelay(t, "--like", sideChannel(d.Port()), "--blocks", "100")
	type request struct {
		tokens, answer []int
		in, out        *lease.Params
		bytes          [][][]byte
	}
	requests := make([]request, 0, 8)
	for i, length := range []int{1, 17, 31, 32, 33, 64, 150, 200, 256} {
		r := request{tokens: prompt(length)}
		p.Generate(fmt.Sprint("relay-alone", i), r.tokens, 16, nil)
		r.answer = p.Output(fmt.Sprint("relay-alone", i)).Tokens
		requests = append(requests, r)
	}
	var ins []*lease.Params
	for i := range requests {
		r := &requests[i]
		r.in, _ = prefill(t, p, fmt.Sprint("relay-prefill", i), r.tokens)
		r.bytes = p.Blocks(r.in.RemoteBlockIDs[0])
		ins = append(ins, r.in)
	}
	v.keep(t, ins...)
	var all sync.WaitGroup
	for i := range requests {
		r := &requests[i]
		all.Go(func() {
			text, err := json.Marshal(r.in)
			if err != nil {
				t.Error(err)
				return
			}
			resp, err := http.Post(url, "application/json", bytes.NewReader(text))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			answer, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != http.StatusOK {
				t.Errorf("request %d: %s %s %v", i, resp.Status, answer, err)
				return
			}
			r.out = new(lease.Params)
			if err := json.Unmarshal(answer, r.out); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	require.False(t, t.Failed())
	for i, r := range requests {
		p.Freed(r.in.RemoteRequestID) // before the decoder has read anything
		require.Equal(t, engine, r.out.RemoteEngineID)
		require.Equal(t, len(r.tokens), r.out.RemoteNumTokens)
		d.Generate(fmt.Sprint("relay", i), r.tokens, 16, r.out)
	}
	for i, r := range requests {
		s := served{tokens: r.tokens, answer: r.answer, bytes: r.bytes}
		s.hasRead(t, d, d.Output(fmt.Sprint("relay", i)))
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		resp, err := http.Get(url + "stats")
		require.NoError(t, err)
		var s struct {
			Passed     int `json:"passed"`
			FreeBlocks int `json:"free_blocks"`
		}
		require.NoError(t, json.NewDecoder(resp.Body).Decode(&s))
		resp.Body.Close()
		require.Equal(t, len(requests), s.Passed)
		if s.FreeBlocks == 100 { // the decoder's notifications freed them
			return
		}
		require.True(t, time.Now().Before(deadline), "%d blocks are free", s.FreeBlocks)
	}
}

// probe runs `nixlgo probe --json` and decodes what it prints.
func probe(t *testing.T, exe string, args ...string) (code int, r probeReport) {
	t.Helper()
	c := exec.Command(exe, append([]string{"probe", "--json"}, args...)...)
	out, err := c.Output()
	require.NotNil(t, c.ProcessState, "%v", err)
	require.NoError(t, json.Unmarshal(out, &r), string(out))
	return c.ProcessState.ExitCode(), r
}

// probeReport is what the tests look at in the output of `nixlgo probe --json`.
type probeReport struct {
	OK      bool   `json:"ok"`
	Failure string `json:"failure"`
	Error   string `json:"error"`
	Engine  string `json:"engine"`
	Hash    string `json:"compatibility_hash"`
	Layout  string `json:"kv_cache_layout"`
	Tokens  int    `json:"block_tokens"`
	Ranks   []struct {
		Agent       string   `json:"agent"`
		Regions     int      `json:"regions"`
		Blocks      int      `json:"blocks"`
		BlockBytes  []int    `json:"block_bytes"`
		MemoryTypes []string `json:"memory_types"`
		LeaseSlots  int      `json:"lease_slots"`
		RTT         float64  `json:"rtt_s"`
		ClockOffset float64  `json:"clock_offset_s"`
		ClockBound  float64  `json:"clock_bound_s"`
		Read        *struct {
			Bytes     int     `json:"bytes"`
			GBs       float64 `json:"gb_s"`
			Transport string  `json:"transport"`
		} `json:"read"`
	} `json:"ranks"`
}

func (v pair) probe(t *testing.T) {
	exe := program(t)
	for _, peer := range []*Peer{v.p.For(t), v.d.For(t)} {
		ready := peer.Ready()
		code, r := probe(t, exe, "--read", "--bytes", "1000000", "--hash", ready.CompatibilityHash, "--engine", ready.EngineID, sideChannel(peer.Port()))
		require.Zero(t, code, r.Error)
		require.True(t, r.OK)
		require.Equal(t, []any{ready.EngineID, ready.CompatibilityHash, ready.Layout, ready.BlockSize}, []any{r.Engine, r.Hash, r.Layout, r.Tokens})
		require.Len(t, r.Ranks, 1)
		k := r.Ranks[0]
		require.Equal(t, []any{ready.Agent, 2, ready.NumBlocks, ready.BlockLens, []string{"DRAM"}, 0},
			[]any{k.Agent, k.Regions, k.Blocks, k.BlockBytes, k.MemoryTypes, k.LeaseSlots})
		require.Positive(t, k.RTT)
		require.LessOrEqual(t, max(k.ClockOffset, -k.ClockOffset), k.ClockBound+0.001, "Python's perf_counter is our clock")
		require.NotNil(t, k.Read)
		require.Equal(t, 1000000/16384*16384, k.Read.Bytes)
		require.Contains(t, k.Read.Transport, "tcp/")
		require.Positive(t, k.Read.GBs)
	}
	code, r := probe(t, exe, "--hash", "0123", sideChannel(v.p.Port()))
	require.Equal(t, []any{1, "hash"}, []any{code, r.Failure})
}

// learned is the hash as a running instance tells it.
func (v pair) learned(t *testing.T) {
	for _, peer := range []*Peer{v.p.For(t), v.d.For(t)} {
		reply, err := rdma.Probe(t.Context(), "127.0.0.1", peer.Port(), 0, 0)
		require.NoError(t, err)
		ready := peer.Ready()
		require.Equal(t, ready.CompatibilityHash, reply.Hash)
		m := reply.Metadata
		require.Equal(t, []any{ready.EngineID, ready.NumBlocks, ready.BlockLens, ready.Layout, ready.BlockSize, ready.RegionNames, "CPU_ATTN"},
			[]any{m.Engine, m.NumBlocks, m.BlockLens, m.Layout, m.BlockSize, m.RegionNames, m.Attention})
	}
}

// A request for a rank that vLLM 0.32 does not have ends its side channel: nothing else may follow.
func (v pair) unknownRank(t *testing.T) {
	exe := program(t)
	code, r := probe(t, exe, "--timeout", "2s", "--tp", "2", "--count", "1", sideChannel(v.p.Port()))
	require.Equal(t, []any{1, "rank"}, []any{code, r.Failure})
	require.Contains(t, r.Error, "ends the side channel of vLLM up to 0.33")
	code, r = probe(t, exe, "--timeout", "2s", sideChannel(v.p.Port()))
	require.Equal(t, 1, code)
	require.Equal(t, "refused", r.Failure)
	require.Contains(t, r.Error, "restart it")
}
