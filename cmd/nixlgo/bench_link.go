package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/nixlgo/nixlgo/lease"
)

// benchProtocol is the version of what the two sides of a bench say to each other.
const benchProtocol = 1

// benchCall is what the initiator asks of the target: one JSON line, answered by one.
type benchCall struct {
	Op string `json:"op"`

	// open
	Protocol int           `json:"protocol,omitempty"`
	Backend  string        `json:"backend,omitempty"`
	Devices  string        `json:"devices,omitempty"`
	Bytes    int           `json:"bytes,omitempty"` // of the buffer
	Lease    time.Duration `json:"lease,omitempty"`
	Wait     time.Duration `json:"wait,omitempty"` // how long the target waits for the initiator, and it for the target

	Count  int           `json:"count,omitempty"`  // notified: how many transfers have been done
	Fill   byte          `json:"fill,omitempty"`   // fill, check: the byte
	Ranges []benchRange  `json:"ranges,omitempty"` // check
	Shape  transferShape `json:"shape,omitzero"`   // node: its memory
	ID     string        `json:"id,omitempty"`     // publish
	Batch  int           `json:"batch,omitempty"`  // publish: blocks of each layer
}

// benchRange is a part of the buffer.
type benchRange struct {
	Offset int `json:"offset"`
	Bytes  int `json:"bytes"`
}

// benchAnswer is what the target says.
type benchAnswer struct {
	Error string `json:"error,omitempty"`

	// open
	Metadata []byte `json:"metadata,omitempty"`
	Addr     uint64 `json:"addr,omitempty"`
	Host     string `json:"host,omitempty"` // the target's facts for people
	Library  string `json:"library,omitempty"`

	Wrong  int           `json:"wrong,omitempty"` // check: bytes that are not the asked one
	Params *lease.Params `json:"params,omitempty"`
	Left   time.Duration `json:"left,omitempty"` // freed: what the lease had left when the read-complete came
}

const (
	opOpen     = "open"
	opFill     = "fill"
	opCheck    = "check"
	opNotified = "notified"
	opNode     = "node"
	opPublish  = "publish"
	opFreed    = "freed"
	opDone     = "done"
	opAlive    = "alive" // not answered
)

// link is the connection between the two sides of a bench. Every wait for the other side has a deadline, and the error
// says whom it was for.
type link struct {
	peer  string // the other side, for people
	conn  net.Conn
	wait  time.Duration
	lines *bufio.Reader

	mu   sync.Mutex // of writing
	stop func() bool
}

const maxBenchLine = 64 << 20 // bytes; the params of a batch of a few million blocks

// newLink takes conn over. The link is closed when ctx ends.
func newLink(ctx context.Context, peer string, conn net.Conn, wait time.Duration) *link {
	l := &link{peer: peer, conn: conn, wait: wait, lines: bufio.NewReader(conn)}
	l.stop = context.AfterFunc(ctx, func() { conn.Close() })
	return l
}

func (l *link) close() {
	l.stop()
	l.conn.Close()
}

func (l *link) send(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.conn.SetWriteDeadline(time.Now().Add(l.wait)); err != nil {
		return l.explain(err, "take a message")
	}
	if _, err := l.conn.Write(append(b, '\n')); err != nil {
		return l.explain(err, "take a message")
	}
	return nil
}

// receive waits for one line; what says what the other side is to do.
func (l *link) receive(v any, what string) error {
	if err := l.conn.SetReadDeadline(time.Now().Add(l.wait)); err != nil {
		return l.explain(err, what)
	}
	var line []byte
	for {
		part, err := l.lines.ReadSlice('\n')
		line = append(line, part...)
		if errors.Is(err, bufio.ErrBufferFull) && len(line) < maxBenchLine {
			continue
		}
		if err != nil {
			return l.explain(err, what)
		}
		break
	}
	if err := json.Unmarshal(line, v); err != nil {
		return fmt.Errorf("%s does not speak as nixlgo bench does: %.60q", l.peer, line)
	}
	return nil
}

// errPeerEnded: the other side closed the connection.
var errPeerEnded = errors.New("its own output says why")

// explain says whom a failed read or write was for.
func (l *link) explain(err error, what string) error {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("waited %s in vain for %s to %s (--timeout)", l.wait, l.peer, what)
	case errors.Is(err, io.EOF):
		return fmt.Errorf("%s ended while it was to %s; %w", l.peer, what, errPeerEnded)
	}
	return fmt.Errorf("%s, which was to %s: %w", l.peer, what, err)
}

// call asks the target for something.
func (l *link) call(c benchCall, what string) (benchAnswer, error) {
	var a benchAnswer
	if err := l.send(c); err != nil {
		return a, err
	}
	if err := l.receive(&a, what); err != nil {
		return a, err
	}
	if a.Error != "" {
		return a, fmt.Errorf("%s could not %s: %s", l.peer, what, a.Error)
	}
	return a, nil
}

// keepAlive tells the target during long measurements that this side lives, until ctx ends.
func (l *link) keepAlive(ctx context.Context) {
	for sleep(ctx, l.wait/4) == nil {
		if l.send(benchCall{Op: opAlive}) != nil {
			return // the next call says so
		}
	}
}
