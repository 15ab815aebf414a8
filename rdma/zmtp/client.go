package zmtp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"
)

// Client is a ZeroMQ REQ on one connection. Its methods may be called by several goroutines; requests are
// sent one after another. It answers heartbeats only while a request is under way, so keep one for the
// length of a job and not longer.
type Client struct {
	conn     *conn
	maxReply int
	busy     chan struct{} // holds one element while a request is under way
}

// Dial connects to a ROUTER (or REP) at addr, "host:port" with IPv6 literals in brackets, and completes the
// ZMTP handshake before ctx ends. maxReply is the size of a reply in bytes, plus 64 per frame; 0 stands for
// 64 MiB. A reply has at most 8 frames.
//
// When nobody listens it fails at once with an error that matches syscall.ECONNREFUSED; whether to try
// again is up to the caller.
func Dial(ctx context.Context, addr string, maxReply int) (*Client, error) {
	if maxReply < 0 {
		return nil, fmt.Errorf("zmtp: dial %s: negative reply limit", addr)
	}
	nc, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("zmtp: %w", err)
	}
	return NewClient(ctx, nc, maxReply)
}

// NewClient is Dial over a connection that is there. The client closes it, also when the handshake fails. maxReply is not negative.
func NewClient(ctx context.Context, nc net.Conn, maxReply int) (*Client, error) {
	addr := nc.RemoteAddr()
	c := &Client{conn: newConn(nc, 0), maxReply: cmp.Or(maxReply, 64<<20), busy: make(chan struct{}, 1)}
	err := c.conn.until(ctx, func() error { return c.conn.handshake("REQ", "ROUTER", "REP") })
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("zmtp: handshake with %s: %w", addr, err)
	}
	return c, nil
}

// Request sends the frames and returns those of the reply, without delimiters. It gives up when ctx ends,
// with an error that matches ctx.Err(); a reply that has arrived by then is still taken. After an error the
// connection is closed, because a late reply could be taken for the next one; only a request that was not
// sent (no frame, a context that had ended) leaves it open.
func (c *Client) Request(ctx context.Context, frames [][]byte) ([][]byte, error) {
	if len(frames) == 0 {
		return nil, errors.New("zmtp: a request needs a frame")
	}
	select {
	case c.busy <- struct{}{}:
		defer func() { <-c.busy }()
	case <-ctx.Done():
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("zmtp: request to %s not sent: %w", c.conn.RemoteAddr(), err)
	}
	var reply [][]byte
	err := c.conn.until(ctx, func() error {
		if err := c.conn.writeMessage(append([][]byte{nil}, frames...)); err != nil {
			return err
		}
		message, err := c.conn.readMessage(c.maxReply, 0, 0)
		if err != nil {
			return err
		}
		if len(message[0]) != 0 {
			return fmt.Errorf("%w: the reply does not start with an empty delimiter", ErrProtocol)
		}
		_, reply, err = splitEnvelope(message)
		return err
	})
	if err != nil {
		c.conn.Close()
		return nil, fmt.Errorf("zmtp: request to %s: %w", c.conn.RemoteAddr(), err)
	}
	return reply, nil
}

// Close closes the connection. A request under way fails with an error that matches net.ErrClosed, as do
// later ones. Close may be called more than once.
func (c *Client) Close() error {
	if err := c.conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("zmtp: close: %w", err)
	}
	return nil
}

// until runs f and stops its reads and writes when ctx ends.
func (c *conn) until(ctx context.Context, f func() error) error {
	stopped := make(chan struct{})
	cancel := context.AfterFunc(ctx, func() {
		defer close(stopped)
		_ = c.SetDeadline(past) // fails on a closed connection only, which has nothing left to stop
	})
	err := f()
	if !cancel() {
		<-stopped
		_ = c.SetDeadline(time.Time{}) // for the next request, if there is one
	}
	if errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() != nil {
		return fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return err
}
