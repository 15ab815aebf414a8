package rdma

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// quiet writes warnings that peers can cause as often as they like. The first of a kind and peer is written at once. Those
// that follow within logInterval are counted, and the last of them is written when it is over, with the count as "suppressed":
// so many lines did it hold back, that one included.
type quiet struct {
	log *slog.Logger

	mu     sync.Mutex
	closed bool
	held   map[heldKey]*heldLine
}

type heldKey struct{ msg, peer string }

type heldLine struct {
	timer *time.Timer
	count int
	args  []any // of the last one
}

const (
	logInterval = 10 * time.Second
	// maxHeld bounds the peers of which lines are counted apart. Names are the peers' own choice; further ones are counted
	// together, and their line is without a name.
	maxHeld = 64
)

func newQuiet(log *slog.Logger) *quiet { return &quiet{log: log, held: map[heldKey]*heldLine{}} }

// Warn writes or counts a line about peer, "" for none. After Close it does nothing.
func (q *quiet) Warn(msg, peer string, args ...any) {
	if !q.log.Enabled(context.Background(), slog.LevelWarn) {
		return
	}
	if q.count(msg, peer, args) {
		q.log.Warn(msg, about(peer, args)...)
	}
}

// about puts the peer before args, if there is one.
func about(peer string, args []any) []any {
	if peer == "" {
		return args
	}
	return append([]any{"peer", peer}, args...)
}

// count reports whether the line is to be written now.
func (q *quiet) count(msg, peer string, args []any) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	key := heldKey{msg, peer}
	if q.held[key] == nil && len(q.held) >= maxHeld {
		key.peer = ""
	}
	if h := q.held[key]; h != nil {
		h.count++
		h.args = args
		return false
	}
	h := &heldLine{}
	h.timer = time.AfterFunc(logInterval, func() { q.over(key, h) })
	q.held[key] = h
	return true
}

// over ends an interval. One in which something was held back is followed by another.
func (q *quiet) over(key heldKey, h *heldLine) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	if h.count == 0 {
		delete(q.held, key)
		return
	}
	q.write(key, h)
	h.timer.Reset(logInterval)
}

// write tells of what was held back, if anything was.
func (q *quiet) write(key heldKey, h *heldLine) {
	if h.count == 0 {
		return
	}
	q.log.Warn(key.msg, append(about(key.peer, h.args), "suppressed", h.count)...)
	h.count, h.args = 0, nil
}

// Close writes what is held back, and ends the timers.
func (q *quiet) Close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	q.closed = true
	for key, h := range q.held {
		h.timer.Stop()
		q.write(key, h)
	}
}
