package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/nixlgo/nixlgo/nixl"
)

// benchTarget is the passive side of a bench.
type benchTarget struct {
	host string // that the initiator reaches this side at
	cfg  benchCall
	end  *endpoint
	node *benchNode

	notified atomic.Int64 // transfers whose notification has come
}

// listenForBench is `bench --listen`: it serves one initiator and returns. listening is called with the address, refused with
// what is wrong with others that connect before.
func listenForBench(ctx context.Context, addr string, wait time.Duration, listening func(net.Addr), refused func(error)) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("--listen %s: %w", addr, err)
	}
	defer l.Close()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	listening(l.Addr())
	deadline := time.Now().Add(wait)
	for {
		if err := l.(*net.TCPListener).SetDeadline(deadline); err != nil {
			return err
		}
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("waited %s in vain for an initiator to connect to %s (--timeout)", wait, l.Addr())
		}
		if err != nil {
			return fmt.Errorf("--listen %s: %w", addr, err)
		}
		t, served, err := acceptBench(ctx, conn, wait)
		if err != nil {
			refused(err) // the initiator is still to come
			continue
		}
		return errors.Join(t.serve(ctx, served), t.close())
	}
}

// acceptBench takes a connection over and reads the first call.
func acceptBench(ctx context.Context, conn net.Conn, wait time.Duration) (*benchTarget, *link, error) {
	l := newLink(ctx, "the initiator at "+conn.RemoteAddr().String(), conn, min(wait, 10*time.Second))
	t := &benchTarget{}
	t.host, _, _ = net.SplitHostPort(conn.LocalAddr().String())
	err := l.receive(&t.cfg, "say what to measure")
	if err == nil && t.cfg.Op != opOpen {
		err = fmt.Errorf("%s does not speak as nixlgo bench does", l.peer)
	}
	if err == nil && t.cfg.Protocol != benchProtocol {
		err = fmt.Errorf("%s speaks version %d of the bench's protocol, this side %d: use the same nixlgo on both", l.peer, t.cfg.Protocol, benchProtocol)
		_ = l.send(benchAnswer{Error: err.Error()}) // it has gone, maybe
	}
	if err != nil {
		l.close()
		return nil, nil, err
	}
	l.wait = t.cfg.Wait
	return t, l, nil
}

// serve answers calls until the initiator closes the connection.
func (t *benchTarget) serve(ctx context.Context, l *link) error {
	defer l.close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for c := t.cfg; ; {
		a, err := t.do(ctx, c)
		if err != nil {
			a.Error = err.Error()
		}
		if err := l.send(a); err != nil {
			return err
		}
		if c.Op == opDone {
			return nil
		}
		for c = (benchCall{Op: opAlive}); c.Op == opAlive; {
			c = benchCall{}
			if err := l.receive(&c, "say what comes next"); err != nil {
				return err
			}
		}
	}
}

func (t *benchTarget) do(ctx context.Context, c benchCall) (a benchAnswer, err error) {
	limit, cancel := context.WithTimeout(ctx, t.cfg.Wait*3/4) // the error is on its way before the initiator gives up
	defer cancel()
	if c.Op != opOpen && t.end == nil {
		return a, errors.New("open has failed")
	}
	switch c.Op {
	case opOpen:
		return t.open(ctx)
	case opFill:
		t.end.fill(c.Fill)
	case opCheck:
		for _, r := range c.Ranges {
			if r.Offset < 0 || r.Bytes < 0 || r.Offset > t.end.buffer.Len()-r.Bytes {
				return a, fmt.Errorf("the range %+v is not in the buffer", r)
			}
			a.Wrong += t.end.wrong(r, c.Fill)
		}
	case opNotified:
		for t.notified.Load() < int64(c.Count) {
			if sleep(limit, time.Millisecond) != nil {
				return a, fmt.Errorf("%d of %s of transfers came", t.notified.Load(), many(c.Count, "notification"))
			}
		}
	case opNode:
		if err := t.node.close(); err != nil {
			return a, err
		}
		t.node, err = openBenchNode(ctx, t.host, t.cfg.Backend, c.Shape, t.cfg.Lease, t.cfg.Wait)
		if err == nil {
			t.node.fill(targetByte)
		}
	case opPublish:
		return t.node.publish(limit, c)
	case opFreed:
		return t.node.freed(limit)
	case opDone:
	default:
		err = fmt.Errorf("unknown call %q", c.Op)
	}
	return a, err
}

func (t *benchTarget) open(ctx context.Context) (a benchAnswer, err error) {
	const most = 1 << 42
	if t.end != nil || t.cfg.Bytes < 1 || t.cfg.Bytes > most || t.cfg.Wait <= 0 {
		return a, fmt.Errorf("a buffer of %d bytes, and waits of %s", t.cfg.Bytes, t.cfg.Wait)
	}
	if err := useDevices(t.cfg.Devices); err != nil {
		return a, err
	}
	if t.end, err = openEndpoint(t.cfg.Backend, t.cfg.Bytes, targetByte); err != nil {
		return a, err
	}
	go t.drain(ctx)
	a = benchAnswer{Addr: t.end.buffer.Addr(), Host: hostFacts(), Library: nixl.Loaded().Path}
	a.Metadata, err = t.end.agent.LocalMetadata()
	return a, err
}

// drain counts notifications, which the library would keep otherwise, until ctx ends or the agent is closed.
func (t *benchTarget) drain(ctx context.Context) {
	var got []nixl.Notification
	for sleep(ctx, time.Millisecond) == nil {
		var err error
		got, err = t.end.agent.Notifications(got[:0])
		if errors.Is(err, nixl.ErrClosed) {
			return
		}
		t.notified.Add(int64(len(got)))
		clear(got)
	}
}

func (t *benchTarget) close() error {
	err := t.node.close()
	if t.end != nil {
		err = errors.Join(err, t.end.close())
	}
	return err
}

// hostFacts is this host, for people.
func hostFacts() string {
	name, err := os.Hostname()
	if err != nil {
		name = "a host"
	}
	return name + ", " + many(runtime.NumCPU(), "core")
}
