package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const patience = 20 * time.Second // for what must happen at some time; nothing is measured against it

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		os.Exit(fewFilesChild())
	}
	code := m.Run()
	if python.cmd != nil {
		python.stdin.Close()
		if err := python.cmd.Wait(); err != nil && code == 0 {
			fmt.Fprintln(os.Stderr, "peer.py:", err)
			code = 1
		}
	}
	os.Exit(code)
}

var clock = []byte{0xcb, 0x40, 0x99, 0x2a, 0xf7, 0xbf, 0xc8, 0x35, 0x16} // msgpack float64, as vLLM replies

var pattern = func() (b []byte) {
	for i := range 251 {
		b = append(b, byte(i*7%251))
	}
	return b
}()

// payload is what testdata/peer.py calls the payload of a size.
func payload(size int) []byte {
	b := make([]byte, size)
	for rest := b; len(rest) > 0; {
		rest = rest[copy(rest, pattern):]
	}
	return b
}

func isPayload(b []byte) bool {
	for ; len(b) > len(pattern); b = b[len(pattern):] {
		if !bytes.HasPrefix(b, pattern) {
			return false
		}
	}
	return bytes.HasPrefix(pattern, b)
}

var mebibyte = payload(1 << 20)

// bySize answers a decimal size with that much payload and the clock.
func bySize(_ context.Context, request [][]byte) ([][]byte, error) {
	if len(request) != 1 {
		return nil, fmt.Errorf("%d frames", len(request))
	}
	size, err := strconv.Atoi(string(request[0]))
	if err != nil || size < 0 {
		return nil, errors.New("not a size")
	}
	if size <= len(mebibyte) {
		return [][]byte{mebibyte[:size], clock}, nil
	}
	return [][]byte{payload(size), clock}, nil
}

// testServer is a running Server with what it reported.
type testServer struct {
	addr     string
	stop     func() // ends the context and waits for Serve to return nil
	listener *countingListener

	mu      sync.Mutex
	reports map[string][]error // by remote address, "" for accept errors
}

func startServer(t *testing.T, s Server, addr string) *testServer {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	require.NoError(t, err)
	ts := &testServer{addr: l.Addr().String(), listener: &countingListener{Listener: l}, reports: map[string][]error{}}
	if s.Handler == nil {
		s.Handler = bySize
	}
	onError := s.OnError
	s.OnError = func(remote net.Addr, err error) {
		if onError != nil {
			onError(remote, err)
		}
		ts.mu.Lock()
		defer ts.mu.Unlock()
		key := ""
		if remote != nil {
			key = remote.String()
		}
		ts.reports[key] = append(ts.reports[key], err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, ts.listener) }()
	ts.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			require.NoError(t, err)
		case <-time.After(patience):
			require.Fail(t, "Serve does not end")
		}
	})
	t.Cleanup(ts.stop)
	return ts
}

// of returns what was reported of the peer whose connection has this local address.
func (ts *testServer) of(c net.Conn) []error {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	return ts.reports[c.LocalAddr().String()]
}

func (ts *testServer) all() (all []error) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	for _, errs := range ts.reports {
		all = append(all, errs...)
	}
	return all
}

// countingListener counts connections and bytes; its connections keep everything that *net.TCPConn has.
type countingListener struct {
	net.Listener
	accepted, open, peak, read atomic.Int64
}

type countedConn struct {
	*net.TCPConn
	l    *countingListener
	once sync.Once
}

func (l *countingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.accepted.Add(1)
	l.peak.Store(max(l.peak.Load(), l.open.Add(1))) // Accept is called by one goroutine
	return &countedConn{TCPConn: c.(*net.TCPConn), l: l}, nil
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.TCPConn.Read(p)
	c.l.read.Add(int64(n))
	return n, err
}

func (c *countedConn) Close() error {
	err := c.TCPConn.Close()
	c.once.Do(func() { c.l.open.Add(-1) })
	return err
}

// valid asserts that a new client of this package gets an answer.
func valid(t *testing.T, addr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := Dial(ctx, addr, 0)
	require.NoError(t, err)
	defer c.Close()
	ask(t, c, 1000)
}

func ask(t *testing.T, c *Client, size int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	reply, err := c.Request(ctx, [][]byte{[]byte(strconv.Itoa(size))})
	require.NoError(t, err)
	require.Len(t, reply, 2)
	require.Len(t, reply[0], size)
	require.True(t, isPayload(reply[0]))
	require.Equal(t, clock, reply[1])
}

// resources are what a test must give back.
type resources struct{ goroutines, files int }

func measure(t *testing.T) resources {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return resources{runtime.NumGoroutine(), len(entries)}
}

func (base resources) requireGivenBack(t *testing.T) {
	t.Helper()
	var now resources
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if now = measure(t); now.goroutines <= base.goroutines && now.files <= base.files {
			return
		}
	}
	stacks := make([]byte, 1<<20)
	require.Failf(t, "not given back", "before %+v, now %+v\n%s", base, now, stacks[:runtime.Stack(stacks, true)])
}

func allocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}

// dialRaw opens a connection that is reset when it is closed, so that thousands leave nothing behind.
func dialRaw(t *testing.T, addr string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	tcp := c.(*net.TCPConn)
	require.NoError(t, tcp.SetLinger(0))
	t.Cleanup(func() { tcp.Close() })
	return tcp
}

// What libzmq 4.3.5 puts on the wire, recorded from vLLM 0.32.0.
var (
	libzmqGreeting    = unhex("ff00000000000000017f" + "03" + "01" + "4e554c4c00000000000000000000000000000000" + "00" + "00000000000000000000000000000000000000000000000000000000000000")
	libzmqREQ         = unhex("04260552454144590b536f636b65742d5479706500000003524551084964656e7469747900000000")
	libzmqROUTER      = unhex("04290552454144590b536f636b65742d5479706500000006524f55544552084964656e7469747900000000")
	libzmqRequest     = unhex("0100" + "0011" + "93c40c6765745f6d6574615f6d73670000")
	libzmqREQHello    = append(bytes.Clone(libzmqGreeting), libzmqREQ...)
	libzmqROUTERHello = append(bytes.Clone(libzmqGreeting), libzmqROUTER...)
)

func unhex(s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		panic(err)
	}
	return b
}

// helloRaw completes the handshake with the recorded bytes of a libzmq REQ.
func helloRaw(t *testing.T, c net.Conn) {
	t.Helper()
	_, err := c.Write(libzmqREQHello)
	require.NoError(t, err)
	got := make([]byte, len(libzmqROUTERHello))
	_, err = io.ReadFull(c, got)
	require.NoError(t, err)
	require.Equal(t, libzmqROUTERHello, got)
}

// requireDropped waits until the server has closed the connection.
func requireDropped(t *testing.T, c net.Conn) {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	_, err := io.Copy(io.Discard, c)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the server keeps the connection")
}

// python is the libzmq peer, started by the first test that needs it and ended by TestMain.
var python struct {
	once   sync.Once
	err    error
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stdout *bufio.Reader
	mu     sync.Mutex
}

func startPython() error {
	const help = "; run `make setup-test` and set NIXLGO_PYTHON to a Python that has pyzmq"
	path := os.Getenv("NIXLGO_PYTHON")
	if path == "" {
		return errors.New("NIXLGO_PYTHON is not set" + help)
	}
	cmd := exec.Command(path, "testdata/peer.py")
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("%w%s", err, help)
	}
	python.cmd, python.stdin, python.stdout = cmd, stdin, bufio.NewReader(stdout)
	if line, err := python.stdout.ReadString('\n'); err != nil {
		return fmt.Errorf("%s says %q: %w%s", path, line, err, help)
	}
	return nil
}

type command struct {
	Op        string `json:"op"`
	Addr      string `json:"addr,omitempty"`
	Sizes     []int  `json:"sizes,omitempty"`
	Fresh     bool   `json:"fresh,omitempty"`
	Keep      string `json:"keep,omitempty"`
	Identity  string `json:"identity,omitempty"`
	Dealer    int    `json:"dealer,omitempty"`
	IPv6      bool   `json:"ipv6,omitempty"`
	Heartbeat int    `json:"heartbeat,omitempty"` // ms
	Delay     int    `json:"delay,omitempty"`     // ms
	Mute      bool   `json:"mute,omitempty"`
}

type answer struct {
	Error   string
	Addr    string
	Replies []struct {
		Frames, Size  int
		Clock, SHA256 string
	}
}

// needPython fails the test when there is no libzmq to test against.
func needPython(t *testing.T) {
	t.Helper()
	python.once.Do(func() { python.err = startPython() })
	require.NoError(t, python.err)
}

// libzmq runs one command of testdata/peer.py and checks the replies that it received.
func libzmq(t *testing.T, c command) answer {
	t.Helper()
	needPython(t)
	python.mu.Lock()
	defer python.mu.Unlock()
	line, err := json.Marshal(c)
	require.NoError(t, err)
	_, err = python.stdin.Write(append(line, '\n'))
	require.NoError(t, err)
	got, err := python.stdout.ReadBytes('\n')
	require.NoError(t, err)
	var a answer
	require.NoError(t, json.Unmarshal(got, &a))
	require.Empty(t, a.Error)
	if c.Op == "ask" || c.Op == "crowd" {
		require.Len(t, a.Replies, len(c.Sizes))
	}
	for i, r := range a.Replies {
		size := 10
		if c.Sizes != nil {
			size = c.Sizes[i]
		}
		sum := sha256.Sum256(payload(size))
		require.Equal(t, hex.EncodeToString(sum[:]), r.SHA256)
		require.Equal(t, 2, r.Frames)
		require.Equal(t, hex.EncodeToString(clock), r.Clock)
	}
	return a
}
