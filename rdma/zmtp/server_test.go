package zmtp

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestServerRefusesUnusableSettings(t *testing.T) {
	for name, s := range map[string]*Server{
		"no handler":            {},
		"negative connections":  {Handler: bySize, MaxConns: -1},
		"negative request size": {Handler: bySize, MaxRequest: -1},
		"negative timeout":      {Handler: bySize, WriteTimeout: -1},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			require.Error(t, s.Serve(t.Context(), l))
			_, err = l.Accept()
			require.ErrorIs(t, err, net.ErrClosed)
		})
	}
}

func TestServeReturnsAnErrorWhenItsListenerIsClosed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	l.Close()
	require.ErrorIs(t, (&Server{Handler: bySize}).Serve(t.Context(), l), net.ErrClosed)
}

func TestServeEndsWithItsContext(t *testing.T) {
	base := measure(t)
	inHandler := make(chan struct{})
	s := startServer(t, Server{Handler: func(ctx context.Context, _ [][]byte) ([][]byte, error) {
		close(inHandler)
		<-ctx.Done()
		return nil, ctx.Err()
	}}, "127.0.0.1:0")
	silent, idle, busy := dialRaw(t, s.addr), dialRaw(t, s.addr), dialRaw(t, s.addr)
	helloRaw(t, idle)
	helloRaw(t, busy)
	_, err := busy.Write(asked("1"))
	require.NoError(t, err)
	<-inHandler
	s.stop()
	for _, c := range []net.Conn{silent, idle, busy} {
		requireDropped(t, c)
		c.Close()
	}
	require.Empty(t, s.all(), "peers of a server that is stopped are not to blame")
	base.requireGivenBack(t)
	_, err = net.Dial("tcp", s.addr)
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
}

// A panic costs its own connection and is reported with its stack; the others go on.
func TestPanickingHandlerCostsOneConnection(t *testing.T) {
	base := measure(t)
	s := startServer(t, Server{Handler: func(ctx context.Context, request [][]byte) ([][]byte, error) {
		switch string(request[0]) {
		case "panic":
			var blocks []int
			_ = blocks[len(request)]
		case "goexit":
			runtime.Goexit()
		case "nothing":
			return nil, nil
		case "error":
			return nil, io.ErrNoProgress
		}
		return bySize(ctx, request)
	}}, "127.0.0.1:0")
	other := dialRaw(t, s.addr)
	helloRaw(t, other)

	c := dialRaw(t, s.addr)
	helloRaw(t, c)
	_, err := c.Write(join(asked("error"), asked("nothing"), asked("panic")))
	require.NoError(t, err)
	requireDropped(t, c)
	require.Eventually(t, func() bool { return len(s.of(c)) == 3 }, patience, time.Millisecond)
	require.ErrorIs(t, s.of(c)[0], io.ErrNoProgress)
	require.ErrorContains(t, s.of(c)[1], "no frame")
	require.ErrorContains(t, s.of(c)[2], "index out of range")
	require.ErrorContains(t, s.of(c)[2], "server_test.go")

	gone := dialRaw(t, s.addr)
	helloRaw(t, gone)
	_, err = gone.Write(asked("goexit"))
	require.NoError(t, err)
	requireDropped(t, gone)

	_, err = other.Write(asked("1"))
	require.NoError(t, err)
	_, err = io.ReadFull(other, make([]byte, len(join(frame(1, ""), frame(1, "1"), frame(0, string(clock))))))
	require.NoError(t, err)
	for _, c := range []net.Conn{c, gone, other} {
		c.Close()
	}
	s.stop()
	base.requireGivenBack(t)
}

// pipes is a listener of in-memory connections, for tests in virtual time.
type pipes struct {
	conns chan net.Conn
	errs  chan error
	done  chan struct{}
	once  sync.Once
	calls int
}

func newPipes() *pipes {
	return &pipes{conns: make(chan net.Conn), errs: make(chan error, 1000), done: make(chan struct{})}
}

func (l *pipes) Accept() (net.Conn, error) {
	l.calls++
	select {
	case err := <-l.errs:
		return nil, err
	default:
	}
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipes) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *pipes) Addr() net.Addr { return &net.TCPAddr{} }

// dial returns the client's side of a new connection whose input is read all the time, and counted.
func (l *pipes) dial() net.Conn {
	client, server := net.Pipe()
	l.conns <- server
	return client
}

// The documented defaults, in virtual time.
func TestServerDefaultTimeouts(t *testing.T) {
	hello := libzmqREQHello
	for name, row := range map[string]struct {
		send  []byte
		read  bool // whether the peer reads what the server sends after the handshake
		after time.Duration
		want  error
	}{
		"nothing":                 {nil, true, 2 * time.Second, os.ErrDeadlineExceeded},
		"greeting":                {libzmqGreeting, true, 2 * time.Second, os.ErrDeadlineExceeded},
		"half a request":          {join(hello, frame(1, "")), true, 2 * time.Second, os.ErrDeadlineExceeded},
		"reply is not read":       {join(hello, asked("1000")), false, 2 * time.Second, os.ErrDeadlineExceeded},
		"idle":                    {hello, true, 30 * time.Second, nil},
		"idle after a request":    {join(hello, asked("10")), true, 30 * time.Second, nil},
		"idle with heartbeats":    {join(hello, frame(4, "\x04PING\x00\x01"), frame(4, "\x04PONG")), true, 30 * time.Second, nil},
		"heartbeat is cut":        {join(hello, frame(4, "\x04PING\x00\x01")[:3]), true, 2 * time.Second, os.ErrDeadlineExceeded},
		"request after heartbeat": {join(hello, frame(4, "\x04PING\x00\x01"), asked("10")), true, 30 * time.Second, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newPipes()
				var reports []error
				s := &Server{Handler: bySize, OnError: func(_ net.Addr, err error) { reports = append(reports, err) }}
				ctx, cancel := context.WithCancel(t.Context())
				served := make(chan error)
				go func() { served <- s.Serve(ctx, l) }()
				c := l.dial()
				start := time.Now()
				go func() { _, _ = c.Write(row.send) }()
				_, _ = io.ReadFull(c, make([]byte, len(libzmqROUTERHello)))
				if row.read {
					_, _ = io.Copy(io.Discard, c)
				} else {
					time.Sleep(row.after)
					synctest.Wait()
					_, err := c.Write([]byte{0})
					require.ErrorIs(t, err, io.ErrClosedPipe)
				}
				require.Equal(t, row.after, time.Since(start))
				synctest.Wait()
				if row.want == nil {
					require.Empty(t, reports)
				} else {
					require.Len(t, reports, 1)
					require.ErrorIs(t, reports[0], row.want)
				}
				cancel()
				require.NoError(t, <-served)
			})
		})
	}
}

// Failed accepts are reported and tried again with growing pauses: 5 ms, 10 ms, ... 1 s.
func TestServerBacksOffWhenAcceptFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newPipes()
		for range cap(l.errs) {
			l.errs <- syscall.EMFILE
		}
		var reports []error
		s := &Server{Handler: bySize, OnError: func(remote net.Addr, err error) {
			if remote == nil {
				reports = append(reports, err)
			}
		}}
		ctx, cancel := context.WithCancel(t.Context())
		served := make(chan error)
		go func() { served <- s.Serve(ctx, l) }()

		time.Sleep(time.Minute)
		synctest.Wait()
		require.Len(t, reports, 8+59, "8 pauses make 1.275 s, then one accept a second")
		for _, err := range reports {
			require.ErrorIs(t, err, syscall.EMFILE)
		}
		for len(l.errs) > 0 {
			<-l.errs
		}
		time.Sleep(time.Second)
		c := l.dial() // the server recovers
		go func() { _, _ = c.Write(libzmqREQHello) }()
		_, err := io.ReadFull(c, make([]byte, len(libzmqROUTERHello)))
		require.NoError(t, err)

		cancel()
		require.NoError(t, <-served)
	})
}

func TestErrorsNameWhatThePeerSaid(t *testing.T) {
	require.EqualError(t, peerError([]byte("\x04full")), `refused by the peer: "full"`)
	long := peerError([]byte("\xc8" + strings.Repeat("\n", 200)))
	require.ErrorIs(t, long, ErrRefused)
	require.NotContains(t, long.Error(), "\n")
	require.ErrorContains(t, long, "(cut)")
	require.True(t, errors.Is(peerError(nil), ErrProtocol))
}
