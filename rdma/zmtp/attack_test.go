package zmtp

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// long is the header of a frame that announces a size with eight bytes.
func long(flags byte, size uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte{flags | flagLong}, size)
}

func frame(flags byte, body string) []byte {
	return append(appendHeader(nil, flags, len(body)), body...)
}

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// asked is a whole request for that many bytes, decimal.
func asked(size string) []byte { return join(frame(flagMore, ""), frame(0, size)) }

// flood writes a block again and again until the server refuses it or n bytes are gone.
func flood(c net.Conn, block []byte, n int) {
	for ; n > 0; n -= len(block) {
		if _, err := c.Write(block); err != nil {
			return
		}
	}
}

// trickle writes one byte after another until the server refuses them.
func trickle(c net.Conn, data []byte) {
	for _, b := range data {
		if _, err := c.Write([]byte{b}); err != nil {
			return
		}
		time.Sleep(20 * time.Millisecond) // the attack, not a wait
	}
}

// Every attack is made against one server, and every attacker stays connected while a valid client of this
// package and one of libzmq are served. In the end every attacker must have been dropped and reported, and
// nothing may be left of it.
//
// vllm#54757, vllm#44486, cases.md 18: one malformed packet kills the listener for the life of the process.
func TestServerOutlivesAttacks(t *testing.T) {
	needPython(t)
	noise := make([]byte, 64<<10)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(noise)
	noise[0] = 'n' // not 0xff, which the row "greeting + garbage" has

	write := func(data ...[]byte) func(*testing.T, net.Conn) {
		return func(_ *testing.T, c net.Conn) { _, _ = c.Write(join(data...)) }
	}
	ready := func(data ...[]byte) func(*testing.T, net.Conn) {
		return func(t *testing.T, c net.Conn) {
			helloRaw(t, c)
			_, _ = c.Write(join(data...))
		}
	}
	timeout, ended := os.ErrDeadlineExceeded, io.ErrUnexpectedEOF

	rows := []struct {
		name   string
		conns  int
		attack func(*testing.T, net.Conn)
		want   error // that is reported; nil: nothing is
	}{
		{"connect, send nothing", 20, write(), timeout},
		{"connect, send one byte", 20, write([]byte{0xff}), timeout},
		{"connect, send the greeting only", 20, write(libzmqGreeting), timeout},
		{"HTTP GET, kept open", 1, write([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")), ErrProtocol},
		{"HTTP GET, then close", 1, func(_ *testing.T, c net.Conn) {
			_, _ = c.Write([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
			_ = c.(*net.TCPConn).CloseWrite()
		}, ErrProtocol},
		{"ZMTP 2 greeting, kept open", 1, write(unhex("ff00000000000000017f" + "01" + "03" + "0000")), ErrProtocol},
		{"ZMTP 1 greeting, kept open", 1, write(unhex("0100")), ErrProtocol},
		{"TLS hello", 1, write(unhex("16030100a5010000a10303"), noise[:158]), ErrProtocol},
		{"64 KiB of noise", 1, write(noise), ErrProtocol},
		{"bad signature end", 1, write(unhex("ff000000000000000100")), ErrProtocol},
		{"mechanism PLAIN", 1, write(unhex("ff00000000000000017f0301504c41494e"), make([]byte, 47)), ErrProtocol},
		{"slow peer, a byte at a time, greeting", 1, func(_ *testing.T, c net.Conn) { go trickle(c, libzmqREQHello) }, timeout},
		{"slow peer, a byte at a time, request", 1, func(t *testing.T, c net.Conn) {
			helloRaw(t, c)
			go trickle(c, frame(flagMore, strings.Repeat("x", 200)))
		}, timeout},
		{"slow peer, a byte at a time, heartbeat", 1, func(t *testing.T, c net.Conn) {
			helloRaw(t, c)
			go trickle(c, bytes.Repeat(frame(flagCommand, "\x04PING\x00\x01"+strings.Repeat("c", 16)), 10))
		}, nil},
		{"greeting + garbage", 1, write(libzmqGreeting, noise), ErrProtocol},
		{"greeting + READY + garbage", 1, ready(noise), ErrProtocol},
		{"message before READY", 1, write(libzmqGreeting, asked("1")), ErrProtocol},
		{"PING before READY", 1, write(libzmqGreeting, frame(flagCommand, "\x04PING\x00\x01")), ErrProtocol},
		{"READY with truncated metadata", 1, write(libzmqGreeting, frame(flagCommand, "\x05READY\x0bSocket-Ty")), ErrProtocol},
		{"READY with a value length of 2^31", 1, write(libzmqGreeting, frame(flagCommand, "\x05READY\x0bSocket-Type\x80\x00\x00\x00REQ")), ErrProtocol},
		{"READY without Socket-Type", 1, write(libzmqGreeting, frame(flagCommand, "\x05READY")), ErrProtocol},
		{"READY of a PUB", 1, write(libzmqGreeting, frame(flagCommand, "\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB")), ErrProtocol},
		{"empty command as READY", 1, write(libzmqGreeting, frame(flagCommand, "")), ErrProtocol},
		{"READY of length 2^62", 1, write(libzmqGreeting, long(flagCommand, 1<<62)), ErrTooLarge},
		{"READY of length 2^63-1", 1, write(libzmqGreeting, long(flagCommand, 1<<63-1)), ErrTooLarge},
		{"READY of length 2^63", 1, write(libzmqGreeting, long(flagCommand, 1<<63)), ErrTooLarge},
		{"READY of length 2^31 and 256 MiB", 1, func(_ *testing.T, c net.Conn) {
			_, _ = c.Write(join(libzmqGreeting, long(flagCommand, 1<<31)))
			flood(c, mebibyte, 256<<20)
		}, ErrTooLarge},
		{"length 2^31 without body", 4, ready(long(0, 1<<31)), ErrTooLarge},
		{"length 2^31 and 256 MiB", 1, func(t *testing.T, c net.Conn) {
			ready(long(0, 1<<31))(t, c)
			flood(c, mebibyte, 256<<20)
		}, ErrTooLarge},
		{"length 2^40", 1, ready(long(0, 1<<40)), ErrTooLarge},
		{"length 2^62", 1, ready(long(0, 1<<62)), ErrTooLarge},
		{"length 2^63-1", 1, ready(long(0, 1<<63-1)), ErrTooLarge},
		{"length 2^63", 1, ready(long(0, 1<<63)), ErrTooLarge},
		{"length 2^64-1", 1, ready(long(0, 1<<64-1)), ErrTooLarge},
		{"command of length 2^40", 1, ready(long(flagCommand, 1<<40)), ErrTooLarge},
		{"endless MORE frames, 200 MiB", 1, func(t *testing.T, c net.Conn) {
			helloRaw(t, c)
			flood(c, bytes.Repeat(frame(flagMore, strings.Repeat("m", 100)), 1000), 200<<20)
		}, ErrTooLarge},
		{"endless large MORE frames, 200 MiB", 1, func(t *testing.T, c net.Conn) {
			helloRaw(t, c)
			flood(c, bytes.Repeat(frame(flagMore, strings.Repeat("m", 4000)), 100), 200<<20)
		}, ErrTooLarge},
		{"endless empty MORE frames, 20 MiB", 1, func(t *testing.T, c net.Conn) {
			helloRaw(t, c)
			flood(c, bytes.Repeat(frame(flagMore, ""), 50_000), 20<<20)
		}, ErrTooLarge},
		{"nine frames", 1, ready(bytes.Repeat(frame(flagMore, ""), 8), frame(0, "1")), ErrTooLarge},
		{"reserved flag bits", 1, ready([]byte{8, 0}), ErrProtocol},
		{"command with MORE", 1, ready(frame(flagCommand|flagMore, "\x04PING\x00\x01")), ErrProtocol},
		{"unknown command", 1, ready(frame(flagCommand, "\x09SUBSCRIBE")), ErrProtocol},
		{"second READY", 1, ready(libzmqREQ), ErrProtocol},
		{"command whose name is cut", 1, ready(frame(flagCommand, "\x09PING")), ErrProtocol},
		{"PING without a time to live", 1, ready(frame(flagCommand, "\x04PING\x00")), ErrProtocol},
		{"PING with 17 bytes of context", 1, ready(frame(flagCommand, "\x04PING\x00\x01"+strings.Repeat("c", 17))), ErrProtocol},
		{"ERROR command", 1, ready(frame(flagCommand, "\x05ERROR\x04hmpf")), ErrRefused},
		{"ERROR command without a reason", 1, ready(frame(flagCommand, "\x05ERROR\xff")), ErrProtocol},
		{"READY, then silence", 3, ready(), nil},
		{"half a request, held", 3, ready(frame(flagMore, ""), []byte{0, 10}, []byte("12")), timeout},
		{"half a request, then FIN", 1, func(t *testing.T, c net.Conn) {
			ready(frame(flagMore, ""), []byte{0, 10}, []byte("12"))(t, c)
			_ = c.(*net.TCPConn).CloseWrite()
		}, ended},
	}

	base, heap := measure(t), allocated()
	s := startServer(t, Server{
		HandshakeTimeout: time.Second, RequestTimeout: time.Second, WriteTimeout: time.Second, IdleTimeout: 2 * time.Second,
	}, "127.0.0.1:0")
	attackers := make([][]net.Conn, len(rows))
	for i, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			for range row.conns {
				c, err := net.Dial("tcp", s.addr)
				require.NoError(t, err)
				require.NoError(t, c.(*net.TCPConn).SetLinger(0))
				attackers[i] = append(attackers[i], c)
				row.attack(t, c)
			}
			valid(t, s.addr)
			libzmq(t, command{Op: "ask", Addr: s.addr, Sizes: []int{1000}})
		})
	}
	for i, row := range rows {
		t.Run(row.name+", after", func(t *testing.T) {
			for _, c := range attackers[i] {
				requireDropped(t, c)
				if row.want != nil {
					require.Eventually(t, func() bool { return len(s.of(c)) == 1 }, patience, time.Millisecond)
					require.ErrorIs(t, s.of(c)[0], row.want)
				}
			}
		})
	}
	require.Eventually(t, func() bool { return s.listener.open.Load() == 0 }, patience, time.Millisecond)
	for i, row := range rows {
		for _, c := range attackers[i] {
			if row.want == nil {
				require.Empty(t, s.of(c), row.name)
			}
			c.Close()
		}
	}
	valid(t, s.addr)
	// 256 MiB twice, 200 MiB twice, sizes up to 2^64 were sent; flood blocks and valid clients need some themselves.
	require.Less(t, allocated()-heap, uint64(32<<20), "bytes allocated during all attacks")
	s.stop()
	base.requireGivenBack(t)
}

// Heartbeats do not prolong the wait for a request, however many come.
func TestServerDropsPeerThatSendsOnlyHeartbeats(t *testing.T) {
	base := measure(t)
	s := startServer(t, Server{IdleTimeout: 200 * time.Millisecond}, "127.0.0.1:0")
	for _, answersAreRead := range []bool{true, false} {
		c := dialRaw(t, s.addr)
		helloRaw(t, c)
		if answersAreRead {
			go func() { _, _ = io.Copy(io.Discard, c) }()
		}
		go flood(c, bytes.Repeat(frame(flagCommand, "\x04PING\x00\x01"), 100), 1<<40)
		valid(t, s.addr)
		require.Eventually(t, func() bool { return s.listener.open.Load() == 0 }, patience, time.Millisecond)
		c.Close()
	}
	s.stop()
	base.requireGivenBack(t)
}

// A wrong request is dropped and reported, and the same connection is served on.
func TestServerKeepsConnectionAfterWrongRequest(t *testing.T) {
	base := measure(t)
	s := startServer(t, Server{}, "127.0.0.1:0")
	c := dialRaw(t, s.addr)
	helloRaw(t, c)
	wrong := [][]byte{
		frame(0, "1"),                      // no delimiter
		frame(0, ""),                       // a delimiter alone
		join(frame(1, "id"), frame(0, "")), // an envelope alone
		join(frame(1, "a"), frame(1, "b"), frame(0, "c")),          // no delimiter
		join(frame(1, ""), frame(0, "")),                           // empty body
		join(frame(1, ""), frame(1, "1"), frame(0, "2")),           // a frame too many for the handler
		join(frame(1, ""), frame(0, "no number")),                  // refused by the handler
		join(frame(1, ""), frame(0, "\x93\xc4\x0cget_meta_msg??")), // refused by the handler
	}
	for i, request := range wrong {
		_, err := c.Write(join(request, asked("3")))
		require.NoError(t, err)
		want := join(frame(1, ""), frame(1, string(payload(3))), frame(0, string(clock)))
		got := make([]byte, len(want))
		_, err = io.ReadFull(c, got)
		require.NoError(t, err)
		require.Equal(t, want, got)
		require.Len(t, s.of(c), i+1)
	}
	require.EqualValues(t, 1, s.listener.accepted.Load())
	c.Close()
	s.stop()
	base.requireGivenBack(t)
}

// The envelope comes back unchanged, up to and with the first empty frame.
func TestServerEchoesEnvelope(t *testing.T) {
	s := startServer(t, Server{Handler: func(_ context.Context, request [][]byte) ([][]byte, error) {
		return append(request, []byte("end")), nil
	}}, "127.0.0.1:0")
	c := dialRaw(t, s.addr)
	helloRaw(t, c)
	envelope := join(frame(1, "hop"), frame(1, "hop 2"), frame(1, ""))
	for _, exchange := range [][2][]byte{
		{join(envelope, frame(1, "a"), frame(1, ""), frame(0, "b")), join(envelope, frame(1, "a"), frame(1, ""), frame(1, "b"), frame(0, "end"))},
		// A heartbeat may come between two frames of a message.
		{join(frame(1, ""), frame(4, "\x04PING\x00\x01ctx"), frame(0, "x")), join(frame(4, "\x04PONGctx"), frame(1, ""), frame(1, "x"), frame(0, "end"))},
		{join(frame(4, "\x04PONG"), long(1, 0), long(0, 1), []byte("y")), join(frame(1, ""), frame(1, "y"), frame(0, "end"))},
	} {
		_, err := c.Write(exchange[0])
		require.NoError(t, err)
		got := make([]byte, len(exchange[1]))
		_, err = io.ReadFull(c, got)
		require.NoError(t, err)
		require.Equal(t, exchange[1], got)
	}
	require.Empty(t, s.all())
}

// The largest request that is allowed is answered, one byte more ends the connection.
func TestServerCountsBytesOfWholeRequest(t *testing.T) {
	s := startServer(t, Server{Handler: func(_ context.Context, request [][]byte) ([][]byte, error) {
		return [][]byte{{byte(len(request))}}, nil
	}}, "127.0.0.1:0")
	request := func(last int) []byte {
		return join(frame(1, ""), frame(1, strings.Repeat("a", 2000)), frame(0, strings.Repeat("b", last)))
	}
	const rest = 4096 - 3*64 - 2000
	c := dialRaw(t, s.addr)
	helloRaw(t, c)
	_, err := c.Write(request(rest))
	require.NoError(t, err)
	got := make([]byte, 5)
	_, err = io.ReadFull(c, got)
	require.NoError(t, err)
	require.Equal(t, join(frame(1, ""), frame(0, "\x02")), got)

	_, err = c.Write(request(rest + 1))
	require.NoError(t, err)
	requireDropped(t, c)
	require.ErrorIs(t, s.of(c)[0], ErrTooLarge)
}

func TestServerTellsPeerWhyItsREADYIsRefused(t *testing.T) {
	s := startServer(t, Server{}, "127.0.0.1:0")
	c := dialRaw(t, s.addr)
	_, err := c.Write(join(libzmqGreeting, frame(flagCommand, "\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB")))
	require.NoError(t, err)
	got := make([]byte, len(libzmqROUTERHello))
	_, err = io.ReadFull(c, got)
	require.NoError(t, err)
	got, _ = io.ReadAll(c)
	require.Equal(t, frame(flagCommand, "\x05ERROR\x0dInvalid READY"), got)
}

// A peer that asks again and again and reads no reply blocks only itself, and nothing is queued for it.
func TestServerDropsPeerThatReadsNoReply(t *testing.T) {
	needPython(t)
	base, heap := measure(t), allocated()
	s := startServer(t, Server{WriteTimeout: 500 * time.Millisecond}, "127.0.0.1:0")
	for _, requests := range []int{200, 1500} {
		c := dialRaw(t, s.addr)
		helloRaw(t, c)
		go flood(c, asked("1048576"), requests*len(asked("1048576")))
		valid(t, s.addr)
		libzmq(t, command{Op: "ask", Addr: s.addr, Sizes: []int{1000}})
		require.Eventually(t, func() bool { return len(s.of(c)) == 1 }, patience, time.Millisecond)
		require.ErrorIs(t, s.of(c)[0], os.ErrDeadlineExceeded)
		c.Close()
	}
	require.Less(t, allocated()-heap, uint64(16<<20), "1700 replies of 1 MiB were asked for")
	s.stop()
	base.requireGivenBack(t)
}

func TestServerAnswersHalfOpenPeer(t *testing.T) {
	base := measure(t)
	s := startServer(t, Server{}, "127.0.0.1:0")
	c := dialRaw(t, s.addr)
	helloRaw(t, c)
	_, err := c.Write(asked("70000"))
	require.NoError(t, err)
	require.NoError(t, c.CloseWrite())
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	require.Equal(t, join(frame(1, ""), long(1, 70000), payload(70000), frame(0, string(clock))), got)
	require.Empty(t, s.all())
	c.Close()
	s.stop()
	base.requireGivenBack(t)
}

func TestServerOutlivesResetInMidReply(t *testing.T) {
	base := measure(t)
	large := make([]byte, 32<<20) // more than the socket buffers hold
	s := startServer(t, Server{WriteTimeout: patience, Handler: func(ctx context.Context, request [][]byte) ([][]byte, error) {
		if string(request[0]) == "large" {
			return [][]byte{large, clock}, nil
		}
		return bySize(ctx, request)
	}}, "127.0.0.1:0")
	for range 20 {
		c := dialRaw(t, s.addr)
		helloRaw(t, c)
		_, err := c.Write(asked("large"))
		require.NoError(t, err)
		_, err = io.ReadFull(c, make([]byte, 100_000))
		require.NoError(t, err)
		require.NoError(t, c.Close())
	}
	require.Eventually(t, func() bool { return len(s.all()) == 20 }, patience, time.Millisecond)
	for _, err := range s.all() {
		require.ErrorContains(t, err, "reply")
	}
	valid(t, s.addr)
	s.stop()
	base.requireGivenBack(t)
}

// 400 peers that completed the handshake and keep silent hold 256 connections and keep nobody out.
func TestServerEvictsLeastRecentlyActive(t *testing.T) {
	needPython(t)
	base := measure(t)
	s := startServer(t, Server{}, "127.0.0.1:0")
	var peers []net.Conn
	connect := func() {
		c := dialRaw(t, s.addr)
		helloRaw(t, c)
		_, err := c.Write(frame(flagCommand, "\x04PING\x00\x01"))
		require.NoError(t, err)
		_, err = io.ReadFull(c, make([]byte, len("\x04\x05\x04PONG"))) // the server counts it as ready by now
		require.NoError(t, err)
		peers = append(peers, c)
	}
	for range 256 {
		connect()
	}
	require.Empty(t, s.all())
	// The first becomes the most recently active.
	_, err := peers[0].Write(asked("0"))
	require.NoError(t, err)
	_, err = io.ReadFull(peers[0], make([]byte, len(join(frame(1, ""), frame(1, ""), frame(0, string(clock))))))
	require.NoError(t, err)
	for range 144 {
		connect()
	}
	valid(t, s.addr)
	libzmq(t, command{Op: "ask", Addr: s.addr, Sizes: []int{1000}})

	for _, c := range peers[1:145] {
		requireDropped(t, c)
		require.Len(t, s.of(c), 1)
		require.ErrorIs(t, s.of(c)[0], ErrEvicted)
	}
	require.Empty(t, s.of(peers[0]), "the first was active after the others")
	for _, c := range peers[147:] {
		require.Empty(t, s.of(c))
	}
	require.LessOrEqual(t, s.listener.peak.Load(), int64(256+1)) // the newest is accepted before one is closed
	for _, c := range peers {
		c.Close()
	}
	s.stop()
	base.requireGivenBack(t)
}

// vllm#51504, cases.md 19: unbounded peer sessions exhaust sockets.
func TestServerHoldsAtMostMaxConnsOfTenThousand(t *testing.T) {
	base := measure(t)
	s := startServer(t, Server{}, "127.0.0.1:0")
	var files syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files))
	held := make([]net.Conn, 0, 10_000)
	for i := range cap(held) {
		if len(held) == int(min(files.Cur/2, uint64(cap(held)))) {
			held[0].Close()
			held = held[1:]
		}
		held = append(held, dialRaw(t, s.addr))
		if i%2000 == 1999 {
			valid(t, s.addr)
		}
	}
	valid(t, s.addr)
	require.LessOrEqual(t, s.listener.peak.Load(), int64(256+1))
	require.Eventually(t, func() bool { return s.listener.open.Load() == 0 }, patience, time.Millisecond, "silent peers stay connected")
	valid(t, s.addr)
	for _, c := range held {
		c.Close()
	}
	s.stop()
	base.requireGivenBack(t)
}

func TestServerAThousandConnectAndClose(t *testing.T) {
	base := measure(t)
	s := startServer(t, Server{}, "127.0.0.1:0")
	for i := range 1000 {
		c, err := net.Dial("tcp", s.addr)
		require.NoError(t, err)
		if i%2 == 0 {
			require.NoError(t, c.(*net.TCPConn).SetLinger(0))
		}
		c.Close()
	}
	valid(t, s.addr)
	require.Eventually(t, func() bool { return s.listener.open.Load() == 0 }, patience, time.Millisecond)
	s.stop()
	base.requireGivenBack(t)
}

const childEnv = "ZMTP_TEST_CHILD"

type childReport struct {
	Addr             string
	Cap              int // MaxConns that a server takes under the low limit
	Accept, Evicted  int
	OtherAcceptError string
}

// fewFilesChild is a server in a process that may open 40 files. The limit falls after Serve has read it,
// so MaxConns does not protect it.
func fewFilesChild() int {
	out := json.NewEncoder(os.Stdout)
	var report childReport
	var mu sync.Mutex
	server := &Server{Handler: bySize, OnError: func(remote net.Addr, err error) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case remote != nil && strings.Contains(err.Error(), ErrEvicted.Error()):
			report.Evicted++
		case remote == nil && strings.Contains(err.Error(), syscall.EMFILE.Error()):
			report.Accept++
		case remote == nil:
			report.OtherAcceptError = err.Error()
		}
	}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 2
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- server.Serve(ctx, l) }()
	c, err := Dial(ctx, l.Addr().String(), 0) // Serve has started
	if err != nil {
		return 3
	}
	c.Close()
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 40, Max: 40}); err != nil {
		return 4
	}
	lowered, err := newServing(server)
	if err != nil {
		return 5
	}
	_ = out.Encode(childReport{Addr: l.Addr().String(), Cap: lowered.MaxConns})
	_, _ = io.Copy(io.Discard, os.Stdin)
	cancel()
	if <-done != nil {
		return 6
	}
	_ = out.Encode(report)
	return 0
}

// 100 peers against a process that may open 40 files: a valid client is served between them, the accept loop
// does not spin, and nothing is printed.
func TestServerOutOfFileDescriptors(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"=1")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	defer cmd.Wait()
	defer stdin.Close()
	in := json.NewDecoder(stdout)
	var child childReport
	require.NoError(t, in.Decode(&child))
	require.Equal(t, 20, child.Cap, "half of the limit of open files")

	held := make([]net.Conn, 100)
	for i := range held {
		held[i] = dialRaw(t, child.Addr)
	}
	valid(t, child.Addr)
	for _, c := range slices.Backward(held) {
		c.Close()
	}
	valid(t, child.Addr)
	stdin.Close()
	require.NoError(t, in.Decode(&child))
	require.NoError(t, cmd.Wait())
	require.Empty(t, stderr.String(), "the package prints")
	require.Empty(t, child.OtherAcceptError)
	require.Positive(t, child.Accept, "the limit was never reached")
	require.Less(t, child.Accept, 200, "the accept loop spins")
	require.Positive(t, child.Evicted)
}
