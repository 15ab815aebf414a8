package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/cgo_test/ports"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma/zmtp"
)

// TestMain leaves by the system call: the exit of libc runs a destructor of the wheel's libnl that crashes under -race.
func TestMain(m *testing.M) {
	code := m.Run()
	if programDir != "" {
		os.RemoveAll(programDir)
	}
	syscall.Exit(code)
}

var (
	programOnce sync.Once
	programDir  string
	programErr  error
)

// program builds the command once for all tests that do not change it.
func program(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("not with -short, which is for the race detector: the program is built without it")
	}
	programOnce.Do(func() {
		if programDir, programErr = os.MkdirTemp("", "nixlgo"); programErr == nil {
			var out []byte
			if out, programErr = exec.Command("go", "build", "-o", programDir, ".").CombinedOutput(); programErr != nil {
				programErr = fmt.Errorf("%w: %s", programErr, out)
			}
		}
	})
	require.NoError(t, programErr)
	return filepath.Join(programDir, "nixlgo")
}

// startNode runs a Node of two layers of 8 blocks of 4096 bytes until the test ends.
func startNode(t *testing.T, change ...func(*nixlgo.Config)) *nixlgo.Node {
	t.Helper()
	cfg := nixlgo.Config{Layers: 2, Blocks: 8, BlockBytes: 4096, Lease: lease.DefaultConfig()}
	for _, f := range change {
		f(&cfg)
	}
	n, err := nixlgo.New(cfg)
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- n.Run(context.Background()) }()
	t.Cleanup(func() {
		require.NoError(t, n.Close())
		require.NoError(t, <-ended)
	})
	return n
}

func sideChannel(port int) string { return fmt.Sprintf("tcp://127.0.0.1:%d", port) }

func probeJSON(t *testing.T, stdout string) probeReport {
	t.Helper()
	require.Equal(t, 1, strings.Count(stdout, "\n"), stdout)
	var r probeReport
	require.NoError(t, json.Unmarshal([]byte(stdout), &r), stdout)
	require.Equal(t, "probe", r.Event)
	return r
}

func TestProbeDescribesANode(t *testing.T) {
	exe := program(t)
	n := startNode(t, func(c *nixlgo.Config) { c.Compatibility = "feed" })
	code, stdout, stderr := run(t, exe, "probe", "--json", "--read", "--bytes", "20000", "--hash", "feed", "--engine", n.Engine(), sideChannel(n.Port()))
	require.Zero(t, code, stderr)
	r := probeJSON(t, stdout)
	require.True(t, r.OK)
	require.Equal(t, []any{n.Engine(), "feed", "LBHNC", "CPU_ATTN", 16, 1}, []any{r.Engine, r.Hash, r.Layout, r.Backend, r.Tokens, r.Physical})
	require.Len(t, r.Ranks, 1)
	k := r.Ranks[0]
	require.Equal(t, []any{2, 8, []int{4096, 4096}, 65536, []string{"DRAM"}}, []any{k.Regions, k.Blocks, k.BlockBytes, k.KVBytes, k.MemoryTypes})
	require.Equal(t, 8+256, k.LeaseSlots, "blocks and max_num_seqs")
	require.True(t, k.SlotHeartbeats)
	require.NotEmpty(t, k.Agent)
	require.Positive(t, k.RTTSeconds)
	require.LessOrEqual(t, max(k.ClockOffsetSeconds, -k.ClockOffsetSeconds), k.ClockBoundSeconds, "one machine has one clock")
	require.NotNil(t, k.Read)
	require.Equal(t, 4*4096, k.Read.Bytes)
	require.Equal(t, "UCX", k.Read.Backend)
	require.Contains(t, k.Read.Transport, "-node ", "UCX's words")
	require.Positive(t, k.Read.GBs)
	require.GreaterOrEqual(t, k.Read.FirstSeconds, k.Read.Seconds)

	code, stdout, stderr = run(t, exe, "probe", sideChannel(n.Port()))
	require.Zero(t, code, stderr)
	for _, text := range []string{"engine         " + n.Engine(), "hash           feed", "LBHNC", "lease slots", "264, heartbeats by slot", "round trip", "clock", "DRAM"} {
		require.Contains(t, stdout, text)
	}
	require.NotContains(t, stdout, "read ")

	// It took no lease and ended none.
	require.Zero(t, n.Stats().Worker.Leases.Admitted)
	require.Zero(t, n.Stats().SideChannel.Bad)
}

// serveRaw answers every connection with f.
func serveRaw(t *testing.T, f func(net.Conn)) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				f(c)
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

// serveZMQ answers every ZeroMQ request with reply, or not at all when reply is nil.
func serveZMQ(t *testing.T, reply [][]byte) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	s := &zmtp.Server{Handler: func(ctx context.Context, _ [][]byte) ([][]byte, error) {
		if reply == nil {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return reply, nil
	}}
	go func() { served <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		<-served
	})
	return l.Addr().(*net.TCPAddr).Port
}

func TestProbeExplainsEachFailure(t *testing.T) {
	exe := program(t)
	n := startNode(t)
	silent := func(c net.Conn) { io.Copy(io.Discard, c) }
	web := func(c net.Conn) {
		io.WriteString(c, "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"+strings.Repeat(" ", 64))
	}
	refused, err := ports.Free()
	require.NoError(t, err)
	clock := binary.BigEndian.AppendUint64([]byte{0xcb}, 0)
	for _, c := range []struct {
		name, address string
		args          []string
		word, says    string
	}{
		{"nobody listens", sideChannel(refused), nil, "refused", "nobody listens"},
		{"no such host", "tcp://no-such-host.invalid:5600", nil, "address", "does not resolve"},
		{"a service that says nothing", sideChannel(serveRaw(t, silent)), nil, "timeout", "no ZeroMQ greeting"},
		{"a web server", sideChannel(serveRaw(t, web)), nil, "protocol", "no side channel of a NixlConnector"},
		{"a ZeroMQ service that does not answer", sideChannel(serveZMQ(t, nil)), nil, "timeout", "another ZeroMQ service"},
		{"another ZeroMQ service", sideChannel(serveZMQ(t, [][]byte{[]byte("pong")})), nil, "handshake", "does not answer as a NixlConnector"},
		{"no map in the reply", sideChannel(serveZMQ(t, [][]byte{{0xc0}, clock})), nil, "handshake", "does not answer as a NixlConnector"},
		{"no such rank", sideChannel(n.Port()), []string{"--tp", "2"}, "rank", "no pp rank 0, tp rank 1"},
		{"another hash", sideChannel(n.Port()), []string{"--hash", "beef"}, "hash", "not beef"},
		{"another engine", sideChannel(n.Port()), []string{"--engine", "x"}, "engine", `not "x"`},
		{"no library", sideChannel(n.Port()), []string{"--read", "--library", "/nowhere/libnixl_capi.so"}, "read", "/nowhere/libnixl_capi.so"},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, stdout, stderr := run(t, exe, append([]string{"probe", "--json", "--timeout", "700ms", c.address}, c.args...)...)
			require.Equal(t, exitFailed, code, stderr)
			r := probeJSON(t, stdout)
			require.False(t, r.OK)
			require.Equal(t, c.word, r.Failure, stderr)
			require.Contains(t, r.Error, c.says)
			require.Contains(t, stderr, c.says)
			require.Contains(t, stderr, c.address)
		})
	}
}

func TestProbeNamesAStoppedInstance(t *testing.T) {
	exe := program(t)
	c, node := startRelay(t, exe, "--layers", "1", "--block-bytes", "64", "--block-tokens", "16")
	require.NoError(t, c.Process.Signal(syscall.SIGSTOP))
	defer func() { require.NoError(t, c.Process.Signal(syscall.SIGCONT)) }()
	code, stdout, stderr := run(t, exe, "probe", "--json", "--timeout", "500ms", node.SideChannel)
	require.Equal(t, exitFailed, code)
	require.Equal(t, "timeout", probeJSON(t, stdout).Failure)
	require.Contains(t, stderr, "its process is stopped")
}

func TestProbeRefusesAWrongCommandLine(t *testing.T) {
	exe := program(t)
	for _, args := range [][]string{
		{}, {"127.0.0.1:5600"}, {"http://127.0.0.1:5600"}, {"tcp://127.0.0.1"}, {"tcp://:5600"}, {"tcp://h:0"}, {"tcp://h:70000"}, {"tcp://h:1/x"},
		{"tcp://h:1", "--tp", "0"}, {"tcp://h:1", "--count", "0"}, {"tcp://h:1", "--timeout", "0s"}, {"tcp://h:1", "--bytes", "0"}, {"tcp://h:1", "--nonsense"},
		{"tcp://h:1", "tcp://h:2"},
	} {
		code, stdout, stderr := run(t, exe, append([]string{"probe"}, args...)...)
		require.Equal(t, exitUsage, code, "%v", args)
		require.Empty(t, stdout)
		require.NotEmpty(t, stderr)
	}
}

func TestTransportIsWhatUCXSays(t *testing.T) {
	const log = `[1796021081.239770] [vm:11423:0]  ucp_worker.c:1997 UCX  INFO    217c self cfg#0 rma_am(tcp/lo)  am(tcp/lo)
[1796021082.026027] [vm:11423:1]  ucp_worker.c:1997 UCX  INFO    217c intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo tcp/eth0)  ka(tcp/lo)
`
	require.Equal(t, "intra-node rma_am(tcp/lo) am(tcp/lo tcp/eth0) ka(tcp/lo) (emulated: the owner's CPU copies)", transport(log))
	require.Equal(t, "inter-node rma(rc_mlx5/mlx5_0:1)", transport("[1] [h:1:0] x.c:1 UCX  INFO    a inter-node cfg#3 rma(rc_mlx5/mlx5_0:1)\n"))
	require.Contains(t, transport("nothing"), "unknown")
}

func deadline(t *testing.T, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !done(); time.Sleep(5 * time.Millisecond) {
		require.True(t, time.Now().Before(end), "waited for %s", what)
	}
}
