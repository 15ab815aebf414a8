package zmtp

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Both roles against libzmq itself, through pyzmq.

var payloadSizes = []int{0, 1, 254, 255, 256, 65535, 65536, 1 << 20, 64 << 20}

func TestLibzmqREQReceivesEverySize(t *testing.T) {
	s := startServer(t, Server{WriteTimeout: patience}, "127.0.0.1:0")
	libzmq(t, command{Op: "ask", Addr: s.addr, Sizes: payloadSizes})
	require.EqualValues(t, 1, s.listener.accepted.Load(), "libzmq had to reconnect")
	require.Empty(t, s.all())
}

func TestLibzmqREQAThousandTimes(t *testing.T) {
	needPython(t)
	base := measure(t)
	s := startServer(t, Server{}, "127.0.0.1:0")
	libzmq(t, command{Op: "ask", Addr: s.addr, Sizes: slices.Repeat([]int{1000}, 1000), Fresh: true})
	require.EqualValues(t, 1000, s.listener.accepted.Load())
	libzmq(t, command{Op: "ask", Addr: s.addr, Sizes: slices.Repeat([]int{1000}, 1000)})
	require.EqualValues(t, 1001, s.listener.accepted.Load())
	s.stop()
	require.Empty(t, s.all())
	base.requireGivenBack(t)
}

func TestLibzmqREQHundredAtOnce(t *testing.T) {
	s := startServer(t, Server{}, "127.0.0.1:0")
	libzmq(t, command{Op: "crowd", Addr: s.addr, Sizes: slices.Repeat([]int{100_000}, 100)})
	require.Empty(t, s.all())
}

func TestLibzmqDEALER(t *testing.T) {
	s := startServer(t, Server{}, "127.0.0.1:0")
	libzmq(t, command{Op: "ask", Addr: s.addr, Sizes: []int{0, 10, 1000}, Dealer: 1})
	require.Empty(t, s.all())

	libzmq(t, command{Op: "undelimited", Addr: s.addr})
	require.Len(t, s.all(), 1, "a message without delimiter is dropped and reported")
	require.ErrorIs(t, s.all()[0], ErrProtocol)
	require.EqualValues(t, 2, s.listener.accepted.Load(), "it must not cost the connection")
}

func TestLibzmqClientsOfOneIdentityAreBothServed(t *testing.T) {
	s := startServer(t, Server{}, "127.0.0.1:0")
	libzmq(t, command{Op: "crowd", Addr: s.addr, Sizes: []int{10, 20}, Identity: "same"})
	require.Empty(t, s.all())
}

func TestLibzmqREQHeartbeatsAreAnswered(t *testing.T) {
	s := startServer(t, Server{}, "127.0.0.1:0")
	libzmq(t, command{Op: "ask", Addr: s.addr, Sizes: []int{1}, Keep: "heart", Heartbeat: 20})
	// One heartbeat each 20 ms; libzmq gives up after 200 ms without an answer.
	enough := s.listener.read.Load() + 40*int64(len(frame(flagCommand, "\x04PING\x00\x00")))
	require.Eventually(t, func() bool { return s.listener.read.Load() >= enough }, patience, time.Millisecond)
	libzmq(t, command{Op: "ask", Addr: s.addr, Sizes: []int{2}, Keep: "heart"})
	libzmq(t, command{Op: "close", Keep: "heart"})
	require.EqualValues(t, 1, s.listener.accepted.Load(), "libzmq gave the connection up")
	require.Empty(t, s.all())
}

func TestLibzmqREQReconnectsAfterIdleTimeout(t *testing.T) {
	s := startServer(t, Server{IdleTimeout: 50 * time.Millisecond}, "127.0.0.1:0")
	libzmq(t, command{Op: "ask", Addr: s.addr, Sizes: []int{1}, Keep: "idle"})
	require.Eventually(t, func() bool { return s.listener.open.Load() == 0 }, patience, time.Millisecond)
	libzmq(t, command{Op: "ask", Addr: s.addr, Sizes: []int{2}, Keep: "idle"})
	libzmq(t, command{Op: "close", Keep: "idle"})
	require.Empty(t, s.all(), "an idle peer that is let go is not an error")
}

func TestLibzmqOverIPv6(t *testing.T) {
	s := startServer(t, Server{}, "[::1]:0")
	libzmq(t, command{Op: "ask", Addr: s.addr, Sizes: []int{1000}, IPv6: true})
	valid(t, s.addr)
	require.Empty(t, s.all())
}

func TestClientReceivesEverySizeFromLibzmq(t *testing.T) {
	router := libzmq(t, command{Op: "router"})
	c, err := Dial(t.Context(), router.Addr, 65<<20)
	require.NoError(t, err)
	defer c.Close()
	for _, size := range payloadSizes {
		ask(t, c, size)
	}
}

func TestClientAThousandTimesToLibzmq(t *testing.T) {
	router := libzmq(t, command{Op: "router"})
	base := measure(t)
	for range 1000 {
		valid(t, router.Addr)
	}
	c, err := Dial(t.Context(), router.Addr, 0)
	require.NoError(t, err)
	for range 1000 {
		ask(t, c, 1000)
	}
	require.NoError(t, c.Close())
	base.requireGivenBack(t)
}

func TestClientHundredAtOnceToLibzmq(t *testing.T) {
	router := libzmq(t, command{Op: "router"})
	base := measure(t)
	var wg sync.WaitGroup
	errs := make(chan error, 100)
	for range cap(errs) {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			c, err := Dial(ctx, router.Addr, 0)
			if err == nil {
				_, err = c.Request(ctx, [][]byte{[]byte("100000")})
				c.Close()
			}
			errs <- err
		})
	}
	wg.Wait()
	for range cap(errs) {
		require.NoError(t, <-errs)
	}
	base.requireGivenBack(t)
}

func TestClientGivesUpOnAMuteLibzmqRouter(t *testing.T) {
	router := libzmq(t, command{Op: "router", Mute: true})
	base := measure(t)
	for range 10 {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		c, err := Dial(t.Context(), router.Addr, 0)
		require.NoError(t, err)
		_, err = c.Request(ctx, [][]byte{[]byte("1")})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		cancel()
	}
	base.requireGivenBack(t)
}

// The router drops a peer that leaves its heartbeats unanswered for 200 ms, and takes 500 ms to reply.
func TestClientAnswersHeartbeatsOfLibzmq(t *testing.T) {
	router := libzmq(t, command{Op: "router", Heartbeat: 20, Delay: 500})
	valid(t, router.Addr)
}
