//go:build pynixl

package pynixl

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/child"
	"github.com/nixlgo/nixlgo/nixl"
)

const (
	patience = time.Minute
	size     = 1 << 20 // bytes of each side's buffer
)

func root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..")
}

// startChild starts a process that has to end well with the test.
func startChild(t *testing.T, name string, cmd *exec.Cmd) *child.Process {
	t.Helper()
	p, err := child.Start(name, cmd, patience)
	require.NoError(t, err)
	t.Cleanup(func() {
		err := p.End()
		if t.Failed() {
			t.Logf("standard error of %s: %s", name, p.Stderr())
		}
		require.NoError(t, err)
	})
	return p
}

// python is one agent of NIXL's Python API.
type python struct {
	t       *testing.T
	process *child.Process
	Name    string
	Blob    []byte
	Addr    uint64
}

func startPython(t *testing.T, name string) *python {
	t.Helper()
	packages := filepath.Join(root(), ".nixl-python")
	require.DirExists(t, filepath.Join(packages, "nixl_cu12"), "NIXL's Python API is not installed: run `make test-pynixl`")
	program := os.Getenv("NIXLGO_PYTHON")
	if program == "" {
		program = "python3"
	}
	c := exec.Command(program, filepath.Join(root(), "cgo_test", "pynixl", "peer.py"), name, "1048576")
	c.Env = append(os.Environ(), "PYTHONPATH="+packages, "UCX_TLS=tcp")
	p := &python{t: t, process: startChild(t, name, c)}
	var ready struct {
		Name, Metadata string
		Addr           uint64
	}
	require.NoError(t, p.process.Receive(t.Context(), &ready))
	p.Name, p.Blob, p.Addr = ready.Name, unhex(t, ready.Metadata), ready.Addr
	return p
}

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	require.NoError(t, err)
	return b
}

// do sends one command and decodes its answer into v.
func (p *python) do(command map[string]any, v any) {
	p.t.Helper()
	require.NoError(p.t, p.process.Call(p.t.Context(), command, v))
}

type nothing struct{}

func (p *python) load(blob []byte) string {
	p.t.Helper()
	var a struct{ Name string }
	p.do(map[string]any{"cmd": "load", "metadata": hex.EncodeToString(blob)}, &a)
	return a.Name
}

func (p *python) sha256() string {
	p.t.Helper()
	var a struct{ SHA256 string }
	p.do(map[string]any{"cmd": "sha256"}, &a)
	return a.SHA256
}

// notifications waits for n notifications and returns their payloads in order.
func (p *python) notifications(from string, n int) (payloads [][]byte) {
	p.t.Helper()
	for end := time.Now().Add(patience); len(payloads) < n; {
		require.True(p.t, time.Now().Before(end), "%d of %d notifications", len(payloads), n)
		var a struct{ Notifications map[string][]string }
		p.do(map[string]any{"cmd": "notifications"}, &a)
		for sender, all := range a.Notifications {
			require.Equal(p.t, from, sender)
			for _, text := range all {
				payloads = append(payloads, unhex(p.t, text))
			}
		}
	}
	return payloads
}

// pattern is what peer.py's fill writes.
func pattern(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i/256 + seed)
	}
	return b
}

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

// goAgent is our side: an agent with one registered buffer.
type goAgent struct {
	*nixl.Agent
	t   testing.TB
	buf *nixl.Buffer
}

func newAgent(t testing.TB, name string) *goAgent {
	t.Helper()
	a, err := nixl.NewAgent(name, nixl.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	_, err = a.CreateBackend("UCX", nil)
	require.NoError(t, err)
	buf, err := nixl.AllocBuffer(size)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, buf.Close()) })
	_, err = a.Register(buf)
	require.NoError(t, err)
	return &goAgent{a, t, buf}
}

func (a *goAgent) blob() []byte {
	a.t.Helper()
	b, err := a.LocalMetadata()
	require.NoError(a.t, err)
	return b
}

// transfer moves length bytes between offset here and addr at the remote agent, and attaches notify when it is not nil.
func (a *goAgent) transfer(op nixl.Op, remote string, addr uint64, offset, length int, notify []byte) {
	a.t.Helper()
	local, err := a.PrepareLocal(nixl.DRAM, []nixl.Desc{{Addr: a.buf.Addr() + uint64(offset), Len: uint64(length)}})
	require.NoError(a.t, err)
	defer local.Close()
	other, err := a.PrepareRemote(remote, nixl.DRAM, []nixl.Desc{{Addr: addr, Len: uint64(length)}})
	require.NoError(a.t, err)
	defer other.Close()
	t, err := a.NewTransfer(op, local, nil, other, nil, nixl.TransferOptions{Notification: notify, Notify: notify != nil})
	require.NoError(a.t, err)
	_, err = t.Post()
	require.NoError(a.t, err)
	require.NoError(a.t, t.Wait(a.t.Context()))
	require.NoError(a.t, t.Close())
}

func (a *goAgent) notifications(from string, n int) (payloads [][]byte) {
	a.t.Helper()
	var got []nixl.Notification
	for end := time.Now().Add(patience); len(got) < n; {
		require.True(a.t, time.Now().Before(end), "%d of %d notifications", len(got), n)
		var err error
		got, err = a.Notifications(got)
		require.NoError(a.t, err)
	}
	for _, x := range got {
		require.Equal(a.t, from, x.From)
		payloads = append(payloads, x.Payload)
	}
	return payloads
}

// meet exchanges metadata between a Go agent and a Python one.
func meet(t *testing.T, name string) (*goAgent, *python) {
	t.Helper()
	g, p := newAgent(t, name+"-go"), startPython(t, name+"-py")
	found, err := nixl.MetadataAgentName(p.Blob)
	require.NoError(t, err)
	require.Equal(t, p.Name, found)
	loaded, err := g.LoadRemote(p.Blob)
	require.NoError(t, err)
	require.Equal(t, p.Name, loaded)
	require.Equal(t, g.Name(), p.load(g.blob()))
	return g, p
}

func TestGoReadsAndWritesPythonsMemory(t *testing.T) {
	g, p := meet(t, "gorw")
	p.do(map[string]any{"cmd": "fill", "seed": 3}, &nothing{})
	want := pattern(size, 3)
	g.transfer(nixl.Read, p.Name, p.Addr, 0, size, nil)
	require.True(t, bytes.Equal(want, g.buf.Bytes()))
	clear(g.buf.Bytes())
	g.transfer(nixl.Read, p.Name, p.Addr+4099, 77, 12345, nil)
	require.True(t, bytes.Equal(want[4099:4099+12345], g.buf.Bytes()[77:77+12345]))
	require.True(t, bytes.Equal(make([]byte, 77), g.buf.Bytes()[:77]))
	require.True(t, bytes.Equal(make([]byte, size-77-12345), g.buf.Bytes()[77+12345:]), "no byte beyond")

	copy(g.buf.Bytes(), pattern(size, 9))
	g.transfer(nixl.Write, p.Name, p.Addr+101, 202, 300_000, nil)
	copy(want[101:], pattern(size, 9)[202:202+300_000])
	require.Equal(t, sum(want), p.sha256())
}

func TestPythonReadsAndWritesGosMemory(t *testing.T) {
	g, p := meet(t, "pyrw")
	copy(g.buf.Bytes(), pattern(size, 5))
	move := func(op string, remote, here, length int) {
		p.do(map[string]any{"cmd": "transfer", "op": op, "remote": g.Name(), "addr": g.buf.Addr() + uint64(remote), "offset": here, "length": length, "notify": ""}, &nothing{})
	}
	move("READ", 0, 0, size)
	require.Equal(t, sum(pattern(size, 5)), p.sha256())
	p.do(map[string]any{"cmd": "fill", "seed": 8}, &nothing{})
	move("WRITE", 33, 44, 250_001)
	want := pattern(size, 5)
	copy(want[33:], pattern(size, 8)[44:44+250_001])
	require.True(t, bytes.Equal(want, g.buf.Bytes()))
}

// payloads hold every byte value, a NUL first and last, and text that is no UTF-8.
func payloads() [][]byte {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	return [][]byte{{0}, {0xff, 0xfe, 0}, all, pattern(4096, 1), pattern(65537, 2), pattern(1<<20, 3)}
}

func TestNotificationsWithBinaryPayloadsBothWays(t *testing.T) {
	g, p := meet(t, "notif")
	for _, want := range payloads() {
		p.do(map[string]any{"cmd": "notify", "to": g.Name(), "payload": hex.EncodeToString(want)}, &nothing{})
		require.True(t, bytes.Equal(want, g.notifications(p.Name, 1)[0]), "%d bytes to Go", len(want))
		require.NoError(t, g.Notify(p.Name, want))
		require.True(t, bytes.Equal(want, p.notifications(g.Name(), 1)[0]), "%d bytes to Python", len(want))
	}
	const many = 100
	for i := range many {
		require.NoError(t, g.Notify(p.Name, []byte{byte(i)}))
	}
	for i, got := range p.notifications(g.Name(), many) {
		require.Equal(t, []byte{byte(i)}, got, "in order, each once")
	}
}

func TestNotificationsThatTravelWithATransfer(t *testing.T) {
	g, p := meet(t, "ride")
	want := payloads()[2]
	g.transfer(nixl.Read, p.Name, p.Addr, 0, 4096, want)
	require.Equal(t, [][]byte{want}, p.notifications(g.Name(), 1))
	g.transfer(nixl.Write, p.Name, p.Addr, 0, 4096, want)
	require.Equal(t, [][]byte{want}, p.notifications(g.Name(), 1))
	for _, op := range []string{"READ", "WRITE"} {
		p.do(map[string]any{"cmd": "transfer", "op": op, "remote": g.Name(), "addr": g.buf.Addr(), "offset": 0, "length": 4096, "notify": hex.EncodeToString(want)}, &nothing{})
		require.Equal(t, [][]byte{want}, g.notifications(p.Name, 1), op)
	}
}

// Metadata that grew by a registration replaces the old one, on both sides.
func TestMetadataThatChanged(t *testing.T) {
	g, p := meet(t, "grow")
	var more struct {
		Addr     uint64
		Metadata string
	}
	p.do(map[string]any{"cmd": "register", "size": 8192}, &more)
	there := []nixl.Desc{{Addr: more.Addr, Len: 8192}}
	require.ErrorIs(t, g.CheckRemote(p.Name, nixl.DRAM, there), nixl.ErrNotFound)
	p.do(map[string]any{"cmd": "metadata"}, &more)
	name, err := g.LoadRemote(unhex(t, more.Metadata))
	require.NoError(t, err)
	require.Equal(t, p.Name, name)
	require.NoError(t, g.CheckRemote(p.Name, nixl.DRAM, there))
	g.transfer(nixl.Read, p.Name, more.Addr, 0, 8192, nil)

	extra, err := nixl.AllocBuffer(4096)
	require.NoError(t, err)
	defer extra.Close()
	reg, err := g.Register(extra)
	require.NoError(t, err)
	defer reg.Close()
	copy(extra.Bytes(), pattern(4096, 4))
	p.do(map[string]any{"cmd": "forget", "name": g.Name()}, &nothing{})
	require.Equal(t, g.Name(), p.load(g.blob()))
	p.do(map[string]any{"cmd": "transfer", "op": "READ", "remote": g.Name(), "addr": extra.Addr(), "offset": 0, "length": 4096, "notify": ""}, &nothing{})
	require.Equal(t, sum(append(pattern(4096, 4), make([]byte, size-4096)...)), p.sha256())
}
