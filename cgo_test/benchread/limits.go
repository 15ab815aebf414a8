package main

import (
	"context"
	"io"
	"net"
	"time"
)

// limits measures what the machine can do at best.
type limits struct {
	from, to []byte // larger than the caches
	conn     net.Conn
}

const limitBytes = 64 << 20

func newLimits() (*limits, error) {
	l := &limits{from: make([]byte, limitBytes), to: make([]byte, limitBytes)}
	for i := range l.from {
		l.from[i] = byte(i)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	if l.conn, err = net.Dial("tcp", listener.Addr().String()); err != nil {
		return nil, err
	}
	peer, err := listener.Accept()
	if err != nil {
		return nil, err
	}
	go func() { // sends the bytes for each one that it gets; ends with the connection
		defer peer.Close()
		for one := make([]byte, 1); ; {
			if _, err := io.ReadFull(peer, one); err != nil {
				return
			}
			if _, err := peer.Write(l.from); err != nil {
				return
			}
		}
	}()
	return l, nil
}

func (l *limits) memcpy(context.Context) (time.Duration, error) {
	start := time.Now()
	copy(l.to, l.from)
	return time.Since(start), nil
}

// loopback moves the bytes over a TCP connection within this machine, both ends with a core each.
func (l *limits) loopback(context.Context) (time.Duration, error) {
	if err := l.conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return 0, err
	}
	start := time.Now()
	if _, err := l.conn.Write([]byte{1}); err != nil {
		return 0, err
	}
	_, err := io.ReadFull(l.conn, l.to)
	return time.Since(start), err
}
