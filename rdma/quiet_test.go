package rdma

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/ports"
	"github.com/nixlgo/nixlgo/nixl"
)

// lines collects log records, each as its message and its attributes but the time.
type lines struct {
	mu  sync.Mutex
	out bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.out.Write(b)
}

func (l *lines) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == slog.LevelKey {
			return slog.Attr{}
		}
		return a
	}}))
}

// take returns and forgets what was written.
func (l *lines) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := strings.TrimSuffix(l.out.String(), "\n")
	l.out.Reset()
	if s == "" {
		return nil
	}
	return strings.Split(s, "\n")
}

// kept is how many lines are counted apart.
func kept(q *quiet) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.held)
}

func TestNamesThatPeersMakeUpFillNeitherLogNorMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log lines
		q := newQuiet(log.logger())
		for i := range 10_000 {
			q.Warn("refused", fmt.Sprint("stranger-", i), "cause", i)
		}
		require.Equal(t, maxHeld+1, kept(q))
		require.Len(t, log.take(), maxHeld+1)
		time.Sleep(logInterval + 1)
		synctest.Wait()
		require.Equal(t, []string{fmt.Sprintf("msg=refused cause=9999 suppressed=%d", 10_000-maxHeld-1)}, log.take())
		time.Sleep(2 * logInterval)
		synctest.Wait()
		require.Zero(t, kept(q))
		q.Warn("refused", "stranger-1")
		require.Equal(t, []string{"msg=refused peer=stranger-1"}, log.take(), "and starts anew")
		q.Close()
		q.Close()
		q.Warn("refused", "stranger-2")
		require.Empty(t, log.take())
	})
}

func TestAQuietLoggerCountsNothing(t *testing.T) {
	q := newQuiet(slog.New(slog.DiscardHandler))
	q.Warn("refused", "D")
	require.Zero(t, kept(q))
}

// vllm#54757: port scanners. Their lines are of one peer, whatever port they come from.
func TestGarbageOnTheSideChannelIsOneLineAnInterval(t *testing.T) {
	var log lines
	s, err := ListenSideChannel("127.0.0.1", 0, log.logger())
	require.NoError(t, err)
	const scans = 30
	for range scans {
		c, err := net.Dial("tcp", fmt.Sprint("127.0.0.1:", s.Port()))
		require.NoError(t, err)
		_, err = c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
		require.NoError(t, err)
		_, _ = c.Read(make([]byte, 1<<10)) // to the end of the greeting, or of the connection
		require.NoError(t, c.Close())
	}
	require.Eventually(t, func() bool { return s.Stats().Bad == scans }, 20*time.Second, time.Millisecond)
	require.NoError(t, s.Close())
	got := log.take()
	require.Len(t, got, 2)
	require.Contains(t, got[0], `msg="side channel: dropped a request" peer=127.0.0.1 error=`)
	require.Contains(t, got[1], fmt.Sprintf("suppressed=%d", scans-1))
}

func TestCausesOfFailedHandshakesAreToldApart(t *testing.T) {
	listen := func(serve func(net.Conn)) (port int) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { l.Close() })
		go func() {
			for c, err := l.Accept(); err == nil; c, err = l.Accept() {
				serve(c)
			}
		}()
		return l.Addr().(*net.TCPAddr).Port
	}
	closed := listen(func(c net.Conn) { c.Close() })
	mute := listen(func(net.Conn) {})
	web := listen(func(c net.Conn) {
		_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\nX: 0123456789012345678901234567890123456789\r\n\r\n"))
	})
	nobody, err := ports.Free()
	require.NoError(t, err)
	for _, c := range []struct {
		host string
		port int
		want HandshakeCause
		hint string
	}{
		{"127.0.0.1", nobody, HandshakeUnreachable, "VLLM_NIXL_SIDE_CHANNEL_PORT"},
		{"no-such-host.invalid", 1, HandshakeUnreachable, "remote_host"},
		{"127.0.0.1", closed, HandshakeProtocol, "not a NixlConnector side channel"},
		{"127.0.0.1", web, HandshakeProtocol, "not a NixlConnector side channel"},
		{"127.0.0.1", mute, HandshakeTimeout, "stalled"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		_, err := Probe(ctx, c.host, c.port, 0, 0)
		cancel()
		require.Error(t, err)
		require.Equal(t, c.want, HandshakeCauseOf(err), "%v", err)
		require.ErrorContains(t, err, c.hint)
	}
	for want, err := range map[HandshakeCause]error{
		HandshakeTransport:    fmt.Errorf("load: %w", &nixl.Error{Op: "load", Status: nixl.StatusBackend}),
		HandshakeIncompatible: fmt.Errorf("%w: x", errShape),
		HandshakeEngine:       fmt.Errorf("%w: x", errEngine),
		HandshakeKey:          fmt.Errorf("%w: x", ErrKey),
		HandshakeOther:        errors.New("x"),
	} {
		require.Equal(t, want, HandshakeCauseOf(err))
	}
	require.Equal(t, HandshakeIncompatible, HandshakeCauseOf(fmt.Errorf("%w: x", ErrCompatibility)))
	require.Equal(t, "other", HandshakeCause(99).String())
}
