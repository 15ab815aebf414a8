package zmtp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"runtime/debug"
	"sync"
	"syscall"
	"time"
)

// Server answers requests as a ZeroMQ ROUTER to REQ and DEALER peers. Its fields are read when Serve
// starts; a zero limit stands for its default, a negative one is an error. Every limit is per call of Serve
// and per connection, as named.
type Server struct {
	// Handler answers one request: the frames behind the empty delimiter, at least one. It owns them. The
	// reply is one frame or more; it is only read, so replies may share frames. The context ends when the
	// connection is evicted or Serve ends. Handlers of different connections run at the same time.
	//
	// An error means that nothing is sent and that the connection stays: the peer runs into its own
	// timeout, as with vLLM. A panic is reported and ends the connection.
	Handler func(ctx context.Context, request [][]byte) (reply [][]byte, err error)

	// MaxConns is the number of connections held at once, 256. It is lowered to half of the process's limit
	// of open files. When all are taken, a new one replaces the least recently active.
	MaxConns int
	// MaxRequest is the size of a request in bytes, 4096: all frames with their envelope, plus 64 per
	// frame. A request has at most 8 frames.
	MaxRequest int

	HandshakeTimeout time.Duration // from accepting to READY, 2 s
	RequestTimeout   time.Duration // from the first to the last byte of a request, 2 s
	WriteTimeout     time.Duration // for sending one whole reply, 2 s
	IdleTimeout      time.Duration // without a request, heartbeats or not, 30 s

	// OnError, if not nil, is told of every failed handshake, dropped request, broken or evicted connection
	// and failed accept (then remote is nil). It is not told when a peer leaves, or is let go, between two
	// requests. It is called by several goroutines at the same time and should not block.
	OnError func(remote net.Addr, err error)
}

// Serve answers requests on l until ctx ends, then returns nil. It closes l and its connections, and waits
// for its goroutines before it returns, so for running handlers too. It returns an error only for unusable
// settings and when l is closed by someone else; failed accepts are reported and tried again.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	defer l.Close()
	srv, err := newServing(s)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	srv.wg.Go(func() {
		<-ctx.Done()
		l.Close()
	})
	defer srv.wg.Wait()
	defer srv.closeAll()
	defer cancel()

	const firstPause, lastPause = 5 * time.Millisecond, time.Second
	for pause := firstPause; ; {
		nc, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				nc.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("zmtp: accept: %w", err)
		case err != nil:
			srv.report(nil, fmt.Errorf("zmtp: accept: %w", err))
			srv.evict(1) // the usual cause is that the process has no file descriptor left
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
			pause = min(2*pause, lastPause)
		default:
			pause = firstPause
			srv.start(ctx, nc)
		}
	}
}

// serving is one call of Serve.
type serving struct {
	Server // with defaults filled in
	wg     sync.WaitGroup

	mu    sync.Mutex
	peers map[*peer]struct{}
}

type peer struct {
	*conn
	cancel context.CancelFunc
	active time.Time // last step forward: accepted, ready, request read, reply sent; guarded by serving.mu
}

func newServing(s *Server) (*serving, error) {
	if s.Handler == nil {
		return nil, errors.New("zmtp: the server has no Handler")
	}
	if s.MaxConns < 0 || s.MaxRequest < 0 || min(s.HandshakeTimeout, s.RequestTimeout, s.WriteTimeout, s.IdleTimeout) < 0 {
		return nil, errors.New("zmtp: a limit of the server is negative")
	}
	srv := &serving{Server: *s, peers: make(map[*peer]struct{})}
	srv.MaxConns = cmp.Or(s.MaxConns, 256)
	srv.MaxRequest = cmp.Or(s.MaxRequest, 4096)
	srv.HandshakeTimeout = cmp.Or(s.HandshakeTimeout, 2*time.Second)
	srv.RequestTimeout = cmp.Or(s.RequestTimeout, 2*time.Second)
	srv.WriteTimeout = cmp.Or(s.WriteTimeout, 2*time.Second)
	srv.IdleTimeout = cmp.Or(s.IdleTimeout, 30*time.Second)
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err == nil && files.Cur/2 < uint64(srv.MaxConns) {
		srv.MaxConns = max(1, int(files.Cur/2))
	}
	return srv, nil
}

func (s *serving) report(remote net.Addr, err error) {
	if s.OnError != nil {
		s.OnError(remote, err)
	}
}

func (s *serving) start(ctx context.Context, nc net.Conn) {
	s.mu.Lock()
	excess := len(s.peers) + 1 - s.MaxConns
	s.mu.Unlock()
	s.evict(excess)

	ctx, cancel := context.WithCancel(ctx)
	p := &peer{conn: newConn(nc, s.WriteTimeout), cancel: cancel, active: time.Now()}
	s.mu.Lock()
	s.peers[p] = struct{}{}
	s.mu.Unlock()
	s.wg.Go(func() {
		defer s.drop(p)
		if err := s.talk(ctx, p); err != nil && ctx.Err() == nil {
			s.report(p.RemoteAddr(), err)
		}
	})
}

// evict closes the n least recently active connections.
func (s *serving) evict(n int) {
	for range n {
		var oldest *peer
		s.mu.Lock()
		for p := range s.peers {
			if oldest == nil || p.active.Before(oldest.active) {
				oldest = p
			}
		}
		s.mu.Unlock()
		if oldest == nil {
			return
		}
		s.drop(oldest)
		s.report(oldest.RemoteAddr(), fmt.Errorf("zmtp: %w: too many connections or open files", ErrEvicted))
	}
}

func (s *serving) drop(p *peer) {
	p.cancel()
	p.Close()
	s.mu.Lock()
	delete(s.peers, p)
	s.mu.Unlock()
}

func (s *serving) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := range s.peers {
		p.cancel()
		p.Close()
	}
}

func (s *serving) touch(p *peer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.active = time.Now()
}

// talk serves one connection until it ends. A nil error means that it ended between two requests.
func (s *serving) talk(ctx context.Context, p *peer) error {
	if err := p.SetDeadline(time.Now().Add(s.HandshakeTimeout)); err != nil {
		return fmt.Errorf("zmtp: handshake: %w", err)
	}
	if err := p.handshake("ROUTER", "REQ", "DEALER"); err != nil {
		return fmt.Errorf("zmtp: handshake: %w", err)
	}
	for {
		s.touch(p)
		frames, err := p.readMessage(s.MaxRequest, s.IdleTimeout, s.RequestTimeout)
		switch {
		case errors.Is(err, errNoMessage):
			return nil
		case err != nil:
			return fmt.Errorf("zmtp: request: %w", err)
		}
		s.touch(p)
		envelope, body, err := splitEnvelope(frames)
		if err != nil {
			s.report(p.RemoteAddr(), fmt.Errorf("zmtp: request dropped: %w", err))
			continue
		}
		reply, err := s.call(ctx, body)
		switch {
		case errors.Is(err, errPanic):
			s.report(p.RemoteAddr(), err) // even when Serve is ending
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			s.report(p.RemoteAddr(), fmt.Errorf("zmtp: request dropped: %w", err))
			continue
		}
		if err := p.writeMessage(append(envelope[:len(envelope):len(envelope)], reply...)); err != nil {
			return fmt.Errorf("zmtp: reply: %w", err)
		}
	}
}

var errPanic = errors.New("handler panicked")

// call runs the handler. A panic must not end the engine because of what one peer sent.
func (s *serving) call(ctx context.Context, body [][]byte) (reply [][]byte, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("zmtp: %w: %v\n%s", errPanic, r, debug.Stack())
		}
	}()
	reply, err = s.Handler(ctx, body)
	if err == nil && len(reply) == 0 {
		err = errors.New("the handler returned no frame")
	}
	return reply, err
}
