package zmtp

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/ports"
)

// rawServer accepts connections and gives each to f, in a goroutine of its own.
func rawServer(t *testing.T, f func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var open []net.Conn
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open = append(open, c)
			mu.Unlock()
			wg.Go(func() {
				defer c.Close()
				f(c)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for _, c := range open {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return l.Addr().String()
}

// reads consumes what the client sends: its hello, then its request for one byte.
func reads(c net.Conn) error {
	_, err := io.ReadFull(c, make([]byte, len(libzmqREQHello)+len(asked("1"))))
	return err
}

// answers is a server that completes the handshake, reads the request, writes data and keeps the connection.
func answers(data ...[]byte) func(net.Conn) {
	return func(c net.Conn) {
		_, _ = c.Write(libzmqROUTERHello)
		if reads(c) == nil {
			_, _ = c.Write(join(data...))
			_, _ = io.Copy(io.Discard, c)
		}
	}
}

// says is a server that writes data at once and keeps the connection.
func says(data ...[]byte) func(net.Conn) {
	return func(c net.Conn) {
		_, _ = c.Write(join(data...))
		_, _ = io.Copy(io.Discard, c)
	}
}

func exchange(ctx context.Context, addr string) ([][]byte, error) {
	c, err := Dial(ctx, addr, 0)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.Request(ctx, [][]byte{[]byte("1")})
}

// A server that does not go on: the client ends with its context and leaves nothing behind.
func TestClientEndsWithItsContext(t *testing.T) {
	for name, serve := range map[string]func(net.Conn){
		"accepts and says nothing":     says(),
		"greeting only":                says(libzmqGreeting),
		"half a greeting":              says(libzmqGreeting[:11]),
		"never answers":                answers(),
		"half a reply":                 answers(frame(1, ""), long(0, 1000), payload(500)),
		"one frame of two":             answers(frame(1, ""), frame(1, "payload")),
		"one byte at a time, greeting": func(c net.Conn) { trickle(c, libzmqROUTERHello) },
		"one byte at a time, reply": func(c net.Conn) {
			_, _ = c.Write(libzmqROUTERHello)
			if reads(c) == nil {
				trickle(c, join(frame(1, ""), frame(0, strings.Repeat("x", 200))))
			}
		},
		"heartbeats without end": func(c net.Conn) {
			_, _ = c.Write(libzmqROUTERHello)
			go func() { _, _ = io.Copy(io.Discard, c) }()
			flood(c, frame(flagCommand, "\x04PING\x00\x01"), 1<<40)
		},
	} {
		t.Run(name, func(t *testing.T) {
			addr := rawServer(t, serve)
			base := measure(t)
			for range 3 {
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				_, err := exchange(ctx, addr)
				cancel()
				require.ErrorIs(t, err, context.DeadlineExceeded)
			}
			ctx, cancel := context.WithCancel(t.Context())
			timer := time.AfterFunc(20*time.Millisecond, cancel)
			defer timer.Stop()
			_, err := exchange(ctx, addr)
			require.ErrorIs(t, err, context.Canceled)
			base.requireGivenBack(t)
		})
	}
}

func TestClientGivesUpSendingToAServerThatDoesNotRead(t *testing.T) {
	addr := rawServer(t, func(c net.Conn) {
		_, _ = c.Write(libzmqROUTERHello)
		<-t.Context().Done()
	})
	c, err := Dial(t.Context(), addr, 0)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = c.Request(ctx, [][]byte{make([]byte, 64<<20)})
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

// A server that breaks the rules: the client fails at once, with the reason, and allocates nothing for lengths
// that were only announced.
func TestClientRefusesWhatAServerMayNotSend(t *testing.T) {
	ready := func(properties string) []byte { return frame(flagCommand, "\x05READY"+properties) }
	for name, row := range map[string]struct {
		serve func(net.Conn)
		want  error
	}{
		"garbage":                      {says([]byte("SSH-2.0-OpenSSH_9.2\r\n")), ErrProtocol},
		"HTTP":                         {says([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")), ErrProtocol},
		"ZMTP 2":                       {says(unhex("ff00000000000000017f0106")), ErrProtocol},
		"mechanism CURVE":              {says(unhex("ff00000000000000017f03014355525645"), make([]byte, 47)), ErrProtocol},
		"greeting and garbage":         {says(libzmqGreeting, []byte("garbage garbage")), ErrProtocol},
		"a REQ":                        {says(libzmqREQHello), ErrProtocol},
		"READY with cut metadata":      {says(libzmqGreeting, ready("\x0bSocket-Ty")), ErrProtocol},
		"READY with a length of 2^31":  {says(libzmqGreeting, ready("\x0bSocket-Type\x80\x00\x00\x00ROUTER")), ErrProtocol},
		"READY of length 2^62":         {says(libzmqGreeting, long(flagCommand, 1<<62)), ErrTooLarge},
		"message before READY":         {says(libzmqGreeting, frame(0, "x")), ErrProtocol},
		"ERROR instead of READY":       {says(libzmqGreeting, frame(flagCommand, "\x05ERROR\x04full")), ErrRefused},
		"ERROR instead of a reply":     {answers(frame(flagCommand, "\x05ERROR\x04full")), ErrRefused},
		"garbage instead of a reply":   {answers([]byte("garbage garbage")), ErrProtocol},
		"length 2^31":                  {answers(frame(1, ""), long(0, 1<<31)), ErrTooLarge},
		"length 2^40":                  {answers(frame(1, ""), long(0, 1<<40)), ErrTooLarge},
		"length 2^62":                  {answers(frame(1, ""), long(0, 1<<62)), ErrTooLarge},
		"length 2^63":                  {answers(frame(1, ""), long(0, 1<<63)), ErrTooLarge},
		"length 2^64-1":                {answers(frame(1, ""), long(0, 1<<64-1)), ErrTooLarge},
		"length 64 MiB announced":      {func(c net.Conn) { answers(frame(1, ""), long(0, 63<<20))(shutAfterReply{c}) }, io.ErrUnexpectedEOF},
		"nine frames":                  {answers([]byte(strings.Repeat("\x01\x00", 8)), frame(0, "x")), ErrTooLarge},
		"reply without delimiter":      {answers(frame(0, "x")), ErrProtocol},
		"reply with an envelope":       {answers(frame(1, "x"), frame(1, ""), frame(0, "x")), ErrProtocol},
		"reply of a delimiter alone":   {answers(frame(0, "")), ErrProtocol},
		"closes at once":               {func(c net.Conn) { c.Close() }, nil},
		"closes before the reply":      {func(c net.Conn) { answers()(shutAfterReply{c}) }, io.EOF},
		"closes within the reply":      {func(c net.Conn) { answers(frame(1, ""), []byte{0})(shutAfterReply{c}) }, io.ErrUnexpectedEOF},
		"resets instead of a greeting": {func(c net.Conn) { _, _ = io.ReadFull(c, make([]byte, 64)); reset(c) }, syscall.ECONNRESET},
		"resets instead of a reply": {func(c net.Conn) {
			_, _ = c.Write(libzmqROUTERHello)
			_ = reads(c)
			reset(c)
		}, syscall.ECONNRESET},
	} {
		t.Run(name, func(t *testing.T) {
			addr := rawServer(t, row.serve)
			base, heap := measure(t), allocated()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			for range 3 {
				_, err := exchange(ctx, addr)
				require.Error(t, err)
				require.NotErrorIs(t, err, context.DeadlineExceeded, "it waited")
				if row.want != nil {
					require.ErrorIs(t, err, row.want)
				}
			}
			require.Less(t, allocated()-heap, uint64(2<<20))
			base.requireGivenBack(t)
		})
	}
}

// shutAfterReply ends the server's side once the reply is written.
type shutAfterReply struct{ net.Conn }

func (c shutAfterReply) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if len(p) != len(libzmqROUTERHello) {
		_ = c.Conn.(*net.TCPConn).CloseWrite()
	}
	return n, err
}

func reset(c net.Conn) {
	_ = c.(*net.TCPConn).SetLinger(0)
	c.Close()
}

func TestDialFailsAtOnceWhenNobodyListens(t *testing.T) {
	port, err := ports.Free()
	require.NoError(t, err)
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	base := measure(t)
	_, err = Dial(context.Background(), addr, 0)
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	require.ErrorContains(t, err, addr)
	_, err = Dial(context.Background(), "tcp://"+addr, 0)
	require.Error(t, err)
	_, err = Dial(context.Background(), addr, -1)
	require.ErrorContains(t, err, "negative")
	base.requireGivenBack(t)
}

func TestCloseEndsABlockedRequest(t *testing.T) {
	asked := make(chan struct{})
	addr := rawServer(t, func(c net.Conn) {
		_, _ = c.Write(libzmqROUTERHello)
		if reads(c) == nil {
			asked <- struct{}{}
		}
		_, _ = io.Copy(io.Discard, c)
	})
	base := measure(t)
	for range 20 {
		c, err := Dial(t.Context(), addr, 0)
		require.NoError(t, err)
		failed := make(chan error)
		go func() {
			_, err := c.Request(context.Background(), [][]byte{[]byte("1")})
			failed <- err
		}()
		<-asked
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() { _ = c.Close() })
		}
		require.ErrorIs(t, <-failed, net.ErrClosed)
		wg.Wait()
		require.NoError(t, c.Close())
		_, err = c.Request(t.Context(), [][]byte{[]byte("1")})
		require.ErrorIs(t, err, net.ErrClosed)
	}
	base.requireGivenBack(t)
}

func TestClientIsClosedAfterAnError(t *testing.T) {
	addr := rawServer(t, answers(frame(0, "no delimiter")))
	c, err := Dial(t.Context(), addr, 0)
	require.NoError(t, err)
	_, err = c.Request(t.Context(), [][]byte{[]byte("1")})
	require.ErrorIs(t, err, ErrProtocol)
	_, err = c.Request(t.Context(), [][]byte{[]byte("1")})
	require.ErrorIs(t, err, net.ErrClosed)
	require.NoError(t, c.Close())
}

func TestRequestThatIsNotSentKeepsTheConnection(t *testing.T) {
	s := startServer(t, Server{}, "127.0.0.1:0")
	c, err := Dial(t.Context(), s.addr, 0)
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Request(t.Context(), nil)
	require.ErrorContains(t, err, "needs a frame")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = c.Request(ctx, [][]byte{[]byte("1")})
	require.ErrorIs(t, err, context.Canceled)
	ask(t, c, 10)
	require.Empty(t, s.all())
}

// A context that ends just after a request must not spoil the next one.
func TestContextOfAnEarlierRequestDoesNotEndTheNext(t *testing.T) {
	s := startServer(t, Server{}, "127.0.0.1:0")
	c, err := Dial(t.Context(), s.addr, 0)
	require.NoError(t, err)
	defer func() { c.Close() }()
	for range 500 {
		ctx, cancel := context.WithCancel(t.Context())
		go cancel()
		if _, err := c.Request(ctx, [][]byte{[]byte("10")}); err == nil {
			ask(t, c, 10)
			continue
		} else if !errors.Is(err, context.Canceled) {
			require.NoError(t, err)
		}
		c.Close()
		c, err = Dial(t.Context(), s.addr, 0)
		require.NoError(t, err)
	}
}

func TestClientIsSharedByGoroutines(t *testing.T) {
	s := startServer(t, Server{}, "127.0.0.1:0")
	c, err := Dial(t.Context(), s.addr, 0)
	require.NoError(t, err)
	defer c.Close()
	var wg sync.WaitGroup
	sizes := make(chan [2]int, 100)
	for size := range cap(sizes) {
		wg.Go(func() {
			reply, err := c.Request(t.Context(), [][]byte{[]byte(strings.Repeat("0", 10) + string(rune('0'+size%10)))})
			if err != nil || len(reply) != 2 {
				sizes <- [2]int{size % 10, -1}
				return
			}
			sizes <- [2]int{size % 10, len(reply[0])}
		})
	}
	wg.Wait()
	for range cap(sizes) {
		got := <-sizes
		require.Equal(t, got[0], got[1])
	}
	require.EqualValues(t, 1, s.listener.accepted.Load())
}

func TestClientLimitsTheReply(t *testing.T) {
	s := startServer(t, Server{WriteTimeout: patience}, "127.0.0.1:0")
	const limit = 100_000
	largest := limit - 3*64 - len(clock)
	c, err := Dial(t.Context(), s.addr, limit)
	require.NoError(t, err)
	defer c.Close()
	ask(t, c, largest)
	_, err = c.Request(t.Context(), [][]byte{[]byte("99800")})
	require.ErrorIs(t, err, ErrTooLarge)

	c, err = Dial(t.Context(), s.addr, 0) // 64 MiB
	require.NoError(t, err)
	defer c.Close()
	ask(t, c, 64<<20-3*64-len(clock))
	_, err = c.Request(t.Context(), [][]byte{[]byte("67108864")})
	require.ErrorIs(t, err, ErrTooLarge)
}

// The bytes of this client are those of a libzmq REQ, from greeting to request.
func TestClientBytesEqualThoseOfLibzmq(t *testing.T) {
	got := make(chan []byte, 1)
	addr := rawServer(t, func(c net.Conn) {
		_, _ = c.Write(libzmqROUTERHello)
		b := make([]byte, len(libzmqREQHello)+len(libzmqRequest))
		_, _ = io.ReadFull(c, b)
		got <- b
		_, _ = c.Write(asked("1"))
	})
	c, err := Dial(t.Context(), addr, 0)
	require.NoError(t, err)
	defer c.Close()
	reply, err := c.Request(t.Context(), [][]byte{libzmqRequest[4:]})
	require.NoError(t, err)
	require.Equal(t, [][]byte{[]byte("1")}, reply)
	require.Equal(t, join(libzmqREQHello, libzmqRequest), <-got)
}

// libzmq drops a peer whose message arrives before libzmq has sent its own READY.
func TestClientWaitsForREADYBeforeItsRequest(t *testing.T) {
	early := make(chan int, 1)
	addr := rawServer(t, func(c net.Conn) {
		_, _ = c.Write(libzmqGreeting)
		_, _ = io.ReadFull(c, make([]byte, len(libzmqREQHello)))
		_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		n, _ := c.Read(make([]byte, 1))
		early <- n
		_ = c.SetReadDeadline(time.Time{})
		_, _ = c.Write(libzmqROUTER)
		_, _ = io.ReadFull(c, make([]byte, len(asked("1"))))
		_, _ = c.Write(asked("1"))
	})
	_, err := exchange(t.Context(), addr)
	require.NoError(t, err)
	require.Zero(t, <-early)
}

// lateConn delays each read until the deadline has passed, as a starved machine does.
type lateConn struct {
	*net.TCPConn
	late    bool
	expired chan struct{}
}

func (c *lateConn) SetDeadline(d time.Time) error {
	err := c.TCPConn.SetDeadline(d)
	if d.Equal(past) {
		close(c.expired)
	}
	return err
}

func (c *lateConn) Read(p []byte) (int, error) {
	if c.late {
		<-c.expired
	}
	return c.TCPConn.Read(p)
}

// vllm#51504, cases.md 19: an answer already buffered at the deadline is thrown away.
func TestReplyReadableAtTheDeadlineIsTaken(t *testing.T) {
	for name, row := range map[string]struct {
		reply []byte
		want  error
	}{
		"whole":        {join(frame(1, ""), long(0, 20_000), payload(20_000)), nil},
		"a byte short": {join(frame(1, ""), long(0, 20_000), payload(19_999)), context.DeadlineExceeded},
		"none":         {nil, context.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			replied := make(chan struct{})
			addr := rawServer(t, func(c net.Conn) {
				answers(row.reply)(writeSignal{c, replied})
			})
			base := measure(t)
			tcp, err := net.Dial("tcp", addr)
			require.NoError(t, err)
			late := &lateConn{TCPConn: tcp.(*net.TCPConn), expired: make(chan struct{})}
			c := &Client{conn: newConn(late, 0), maxReply: 1 << 20, busy: make(chan struct{}, 1)}
			require.NoError(t, c.conn.handshake("REQ", "ROUTER"))
			late.late = true

			ctx, expire := newDeadline(t.Context())
			go func() {
				<-replied
				for end := time.Now().Add(patience); readable(late.TCPConn) < len(row.reply) && time.Now().Before(end); {
					time.Sleep(time.Millisecond)
				}
				expire()
			}()
			reply, err := c.Request(ctx, [][]byte{[]byte("1")})
			require.Error(t, ctx.Err())
			if row.want == nil {
				require.NoError(t, err)
				require.Equal(t, [][]byte{payload(20_000)}, reply)
			} else {
				require.ErrorIs(t, err, row.want)
			}
			require.NoError(t, c.Close())
			base.requireGivenBack(t)
		})
	}
}

type writeSignal struct {
	net.Conn
	replied chan struct{}
}

func (c writeSignal) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if len(p) != len(libzmqROUTERHello) {
		close(c.replied)
	}
	return n, err
}

// readable is the number of bytes that a read would return now, up to 64 KiB.
func readable(c *net.TCPConn) (n int) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) {
		n, _, _ = syscall.Recvfrom(int(fd), make([]byte, 64<<10), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	})
	return max(n, 0)
}

// newDeadline is a context whose deadline passes when expire is called.
func newDeadline(parent context.Context) (ctx context.Context, expire func()) {
	d := &deadlineContext{Context: parent, done: make(chan struct{})}
	return d, func() { close(d.done) }
}

type deadlineContext struct {
	context.Context
	done chan struct{}
}

func (d *deadlineContext) Done() <-chan struct{} { return d.done }

func (d *deadlineContext) Err() error {
	select {
	case <-d.done:
		return context.DeadlineExceeded
	default:
		return nil
	}
}
