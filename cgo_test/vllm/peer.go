// Package vllm drives real vLLM engines (peer.py) for the interop tests. README.md says what has to be installed.
package vllm

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/child"
	"github.com/nixlgo/nixlgo/cgo_test/ports"
)

// Engines start in 15 to 45 s, and in minutes on a busy machine. Everything that is waited for has this long.
const patience = 5 * time.Minute

// Options of one engine. Zero values take peer.py's defaults.
type Options struct {
	Role     string         // kv_producer, kv_consumer or kv_both
	EngineID string         // must differ between the engines of a test
	Extra    map[string]any // kv_connector_extra_config
	Args     []string       // more arguments of peer.py, such as --prefix-caching or --wire
}

// A Peer is one engine in a process of its own. Its methods may be used from several goroutines; each fails the test
// when the engine has ended or does not answer in time.
type Peer struct {
	t testing.TB
	*peer
}

// peer is what all views of one engine share.
type peer struct {
	name    string
	process *child.Process
	port    int
	command sync.Mutex // one command and its answer at a time

	mu     sync.Mutex
	events []event
	closed bool          // no event will follow
	more   chan struct{} // closed and replaced with every event
}

type event struct {
	Event string `json:"event"`
	raw   json.RawMessage
}

// Ready is what an engine says of itself once it serves its side channel.
type Ready struct {
	VLLM              string          `json:"vllm"`
	EngineID          string          `json:"engine_id"`
	Agent             string          `json:"agent"` // NIXL agent name
	Host              string          `json:"host"`
	Port              int             `json:"port"`
	CompatibilityHash string          `json:"compatibility_hash"`
	HashInputs        json.RawMessage `json:"hash_inputs"`
	NumBlocks         int             `json:"num_blocks"`
	BlockSize         int             `json:"block_size"` // tokens
	Layout            string          `json:"kv_cache_layout"`
	BlockLens         []int           `json:"block_lens"` // bytes, per region
	RegionNames       []string        `json:"region_names"`
}

// Output is the end of a request.
type Output struct {
	ID           string          `json:"id"`
	InternalID   string          `json:"internal_id"` // empty when the engine knew it for one step only
	Tokens       []int           `json:"tokens"`
	FinishReason string          `json:"finish_reason"` // length, abort or error
	Params       json.RawMessage `json:"kv_transfer_params"`
	Blocks       []struct {
		ID     int      `json:"id"`
		SHA256 []string `json:"sha256"` // per region
	} `json:"blocks"`
}

// Status is what the engine's scheduler holds.
type Status struct {
	Requests   []string `json:"requests"` // internal ids: running, or finished and pinned by a lease
	FreeBlocks int      `json:"free_blocks"`
}

// Wire is one event of an engine started with --wire: a notification or a transfer.
type Wire struct {
	What          string              `json:"what"`
	State         string              `json:"state"`   // transfer ended
	To            string              `json:"to"`      // send notification
	Message       string              `json:"message"` // send notification, hex
	Notifications map[string][]string `json:"notifications"`
	Local         []int               `json:"local"`        // make transfer: descriptor indices
	Remote        []int               `json:"remote"`       // make transfer
	Notification  string              `json:"notification"` // make transfer, hex
}

// Start starts an engine and returns at once, so that several can start side by side; Ready waits for it. The engine ends
// with the test, which fails when vLLM is not installed.
func Start(t testing.TB, o Options) *Peer {
	t.Helper()
	folder, err := environment()
	require.NoError(t, err)
	extra, err := json.Marshal(o.Extra)
	require.NoError(t, err)
	if o.Extra == nil {
		extra = []byte("{}")
	}
	port, err := ports.Free() // vLLM does not say when its port is taken, it waits for ever
	require.NoError(t, err)
	args := append([]string{
		filepath.Join(here(), "peer.py"), "--role", o.Role, "--model", filepath.Join(folder, "tiny-llama"), "--engine-id", o.EngineID,
		"--port", strconv.Itoa(port), "--extra", string(extra),
	}, o.Args...)
	p := &Peer{t, &peer{name: o.EngineID, port: port, more: make(chan struct{})}}
	cmd := exec.Command(filepath.Join(folder, "venv", "bin", "python"), args...)
	cmd.Stderr = logFile(t, o.EngineID)
	p.process, err = child.Start(o.EngineID, cmd, time.Minute)
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.process.End() }) // a test may have killed it
	go p.read()
	return p
}

// logFile is for what an engine logs; the end of it is shown when the test fails.
func logFile(t testing.TB, engine string) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), engine+".log"))
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = f.Close()
		if t.Failed() {
			t.Logf("end of the log of %s:\n%s", engine, tail(f.Name(), 30))
		}
	})
	return f
}

// For returns the same engine for a subtest: what goes wrong fails t.
func (p *Peer) For(t testing.TB) *Peer { return &Peer{t, p.peer} }

// environment returns the folder that setup.sh made: NIXLGO_VLLM, or .vllm in the root of the module.
func environment() (string, error) {
	folder := os.Getenv("NIXLGO_VLLM")
	if folder == "" {
		folder = filepath.Join(here(), "..", "..", ".vllm")
	}
	if _, err := os.Stat(filepath.Join(folder, "stamp")); err != nil {
		return "", fmt.Errorf("no vLLM in %s: run `sh cgo_test/vllm/setup.sh .vllm` in the root of the module, or set NIXLGO_VLLM to its folder", folder)
	}
	return folder, nil
}

func here() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(file)
}

// tail is the last n lines of a file.
func tail(file string, n int) string {
	text, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

func (p *peer) read() {
	for line := range p.process.Lines {
		e := event{raw: line}
		if err := json.Unmarshal(line, &e); err != nil {
			e = event{Event: "error", raw: json.RawMessage(strconv.Quote(string(line)))}
		}
		p.mu.Lock()
		p.events = append(p.events, e)
		close(p.more)
		p.more = make(chan struct{})
		p.mu.Unlock()
	}
	p.mu.Lock()
	p.closed = true
	close(p.more)
	p.mu.Unlock()
}

// await waits for an event, from index from on, that match takes.
func (p *Peer) await(what string, from int, match func(event) bool) {
	p.t.Helper()
	timeout := time.After(patience)
	for {
		p.mu.Lock()
		for ; from < len(p.events); from++ {
			e := p.events[from]
			if match(e) {
				p.mu.Unlock()
				return
			}
			if e.Event == "error" {
				p.mu.Unlock()
				p.t.Fatalf("%s, waiting for %s: %s", p.name, what, e.raw)
			}
		}
		more, closed := p.more, p.closed
		p.mu.Unlock()
		if closed {
			p.t.Fatalf("%s ended, waiting for %s", p.name, what)
		}
		select {
		case <-more:
		case <-timeout:
			p.t.Fatalf("%s: no %s in %v", p.name, what, patience)
		}
	}
}

// is returns a match for an event of one kind that decodes into v and then satisfies ok.
func is[T any](kind string, v *T, ok func(T) bool) func(event) bool {
	return func(e event) bool {
		if e.Event != kind {
			return false
		}
		var x T
		if json.Unmarshal(e.raw, &x) != nil || !ok(x) {
			return false
		}
		*v = x
		return true
	}
}

func always[T any](T) bool { return true }

// send writes one command and returns the index of the first event that can follow it.
func (p *Peer) send(command map[string]any) int {
	p.t.Helper()
	p.mu.Lock()
	from := len(p.events)
	p.mu.Unlock()
	require.NoError(p.t, p.process.Send(command))
	return from
}

// Ready waits until the engine serves.
func (p *Peer) Ready() Ready {
	p.t.Helper()
	var r Ready
	p.await("ready", 0, is("ready", &r, always))
	return r
}

// Port returns the engine's side-channel port on 127.0.0.1, also before it serves.
func (p *Peer) Port() int { return p.port }

// Generate starts a request. params is its kv_transfer_params, or nil.
func (p *Peer) Generate(id string, tokens []int, maxTokens int, params any) {
	p.t.Helper()
	p.command.Lock()
	defer p.command.Unlock()
	p.send(map[string]any{"cmd": "generate", "id": id, "tokens": tokens, "max_tokens": maxTokens, "kv_transfer_params": params})
}

// Output waits for the end of a request that Generate started. Ids are not to be used twice.
func (p *Peer) Output(id string) Output {
	p.t.Helper()
	var o Output
	p.await("output of "+id, 0, is("output", &o, func(o Output) bool { return o.ID == id }))
	return o
}

// Freed waits until the scheduler has let go of a request, by its internal id: remote_request_id in its params.
func (p *Peer) Freed(internalID string) {
	p.t.Helper()
	type freed struct {
		InternalID string `json:"internal_id"`
	}
	p.await("free of "+internalID, 0, is("freed", new(freed), func(f freed) bool { return f.InternalID == internalID }))
}

// Abort aborts a request by the id that Generate had.
func (p *Peer) Abort(id string) {
	p.t.Helper()
	p.command.Lock()
	defer p.command.Unlock()
	p.send(map[string]any{"cmd": "abort", "id": id})
}

// Blocks returns the bytes of blocks as they are in the engine's registered memory: for each block, per region.
func (p *Peer) Blocks(ids []int) [][][]byte {
	p.t.Helper()
	p.command.Lock()
	defer p.command.Unlock()
	from := p.send(map[string]any{"cmd": "blocks", "ids": ids})
	var answer struct {
		Blocks []struct {
			Regions []string `json:"regions"` // hex
		} `json:"blocks"`
	}
	p.await("blocks", from, is("blocks", &answer, always))
	var blocks [][][]byte
	for _, b := range answer.Blocks {
		var regions [][]byte
		for _, text := range b.Regions {
			bytes, err := hex.DecodeString(text)
			require.NoError(p.t, err)
			regions = append(regions, bytes)
		}
		blocks = append(blocks, regions)
	}
	return blocks
}

// Status asks the scheduler what it holds.
func (p *Peer) Status() Status {
	p.t.Helper()
	p.command.Lock()
	defer p.command.Unlock()
	from := p.send(map[string]any{"cmd": "status"})
	var s Status
	p.await("status", from, is("status", &s, always))
	return s
}

// Wire waits for a wire event that match takes.
func (p *Peer) Wire(what string, match func(Wire) bool) Wire {
	p.t.Helper()
	var w Wire
	p.await(what, 0, is("wire", &w, func(w Wire) bool { return w.What == what && match(w) }))
	return w
}

// Signal sends a signal to the engine's process: SIGSTOP and SIGCONT make it stall, SIGKILL lets it die.
func (p *Peer) Signal(s syscall.Signal) {
	p.t.Helper()
	require.NoError(p.t, p.process.Cmd.Process.Signal(s))
}
