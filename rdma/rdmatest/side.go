package rdmatest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Listen opens a side channel on the network, for rdma.NewSideChannel. Connections to it are made by Dial, and no time passes
// in them: in a bubble of testing/synctest engines shake hands in virtual time. The address is any that is not in use.
func (n *Network) Listen(address string) (net.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.sides[address] != nil {
		return nil, &net.OpError{Op: "listen", Net: "rdmatest", Addr: sideAddr(address), Err: syscall.EADDRINUSE}
	}
	l := &sideListener{n: n, address: address, conns: make(chan net.Conn), closed: make(chan struct{})}
	n.sides[address] = l
	return l, nil
}

// Dial connects to a side channel of the network, for rdma.WorkerConfig.Dial. Where nobody listens it is refused at once.
func (n *Network) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	fail := func(err error) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: network, Addr: sideAddr(address), Err: err}
	}
	l, hole := n.side(address)
	for ; hole; l, hole = n.side(address) {
		select {
		case <-time.After(time.Second): // as a SYN is sent again
		case <-ctx.Done():
			return fail(ctx.Err())
		}
	}
	if l == nil {
		return fail(syscall.ECONNREFUSED)
	}
	if n.isMute(address) {
		here, there := net.Pipe()
		n.mu.Lock()
		defer n.mu.Unlock()
		n.muted = append(n.muted, there) // it is open, and nobody reads it
		return buffered(here), nil
	}
	near, far := net.Pipe()
	here, there := buffered(near), buffered(far)
	select {
	case l.conns <- there:
		return here, nil
	case <-l.closed:
		return fail(errors.Join(syscall.ECONNREFUSED, here.Close(), there.Close()))
	case <-ctx.Done():
		return fail(errors.Join(ctx.Err(), here.Close(), there.Close()))
	}
}

func (n *Network) side(address string) (l *sideListener, hole bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.sides[address], n.holes[address]
}

// Swallow makes an address one whose packets get lost, or ends that: a Dial hangs meanwhile.
func (n *Network) Swallow(address string, on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.holes[address] = on
}

// Mute makes a side channel one whose process is stopped, or ends that: connections are made, and never say a word, not even
// later.
func (n *Network) Mute(address string, on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mute[address] = on
}

func (n *Network) isMute(address string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mute[address]
}

// bufferedConn is one end of a net.Pipe whose writes do not wait for the other end to read, as those of a socket do not.
type bufferedConn struct {
	net.Conn
	mu     sync.Mutex
	closed bool
	out    chan []byte
}

func buffered(c net.Conn) net.Conn {
	b := &bufferedConn{Conn: c, out: make(chan []byte, 1<<10)}
	go func() {
		for p := range b.out {
			if _, err := c.Write(p); err != nil {
				return // the pipe is closed
			}
		}
	}()
	return b
}

func (b *bufferedConn) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return 0, net.ErrClosed
	}
	select {
	case b.out <- slices.Clone(p):
		return len(p), nil
	default:
		return 0, errors.New("rdmatest: the buffer of a connection is full")
	}
}

func (b *bufferedConn) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed {
		b.closed = true
		close(b.out)
	}
	return b.Conn.Close()
}

type sideAddr string

func (sideAddr) Network() string  { return "rdmatest" }
func (a sideAddr) String() string { return string(a) }

type sideListener struct {
	n       *Network
	address string
	conns   chan net.Conn
	closing sync.Once
	closed  chan struct{}
}

func (l *sideListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, fmt.Errorf("rdmatest: %s: %w", l.address, net.ErrClosed)
	}
}

func (l *sideListener) Addr() net.Addr { return sideAddr(l.address) }

func (l *sideListener) Close() error {
	err := errors.New("rdmatest: closed before")
	l.closing.Do(func() {
		close(l.closed)
		l.n.mu.Lock()
		defer l.n.mu.Unlock()
		delete(l.n.sides, l.address)
		err = nil
	})
	return err
}
