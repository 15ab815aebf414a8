package nixl

import (
	"sync"
	"time"
)

// activeList links the active transfers of an agent through themselves, so
// that posting allocates nothing.
type activeList struct{ head *transfer }

func (l *activeList) push(t *transfer) {
	t.prev, t.next = nil, l.head
	if l.head != nil {
		l.head.prev = t
	}
	l.head = t
}

func (l *activeList) remove(t *transfer) {
	if t.next != nil {
		t.next.prev = t.prev
	}
	if t.prev != nil {
		t.prev.next = t.next
	} else if l.head == t {
		l.head = t.next
	}
	t.prev, t.next = nil, nil
}

// sweeper polls the active transfers of an agent now and then, so that one
// which nobody polls still ends: its notification leaves only then. It starts
// with the first post and ends with the agent.
type sweeper struct {
	start sync.Once
	wake  chan struct{} // holds a token while there is something to watch
	stop  chan struct{}
	done  chan struct{}
}

const (
	sweepFirst = 2 * time.Millisecond
	sweepLast  = 50 * time.Millisecond
)

// watch makes sure that the sweeper runs. s.mu is held.
func (w *sweeper) watch(s *agent) {
	w.start.Do(func() {
		w.wake = make(chan struct{}, 1)
		w.stop = make(chan struct{})
		w.done = make(chan struct{})
		go w.run(s)
	})
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// end stops the sweeper. The agent is closed, so that nobody calls watch any more.
func (w *sweeper) end() {
	if w.stop != nil {
		close(w.stop)
		<-w.done
	}
}

func (w *sweeper) run(s *agent) {
	defer close(w.done)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-w.stop:
			return
		case <-w.wake:
		}
		for delay := sweepFirst; ; delay = min(2*delay, sweepLast) {
			timer.Reset(delay)
			select {
			case <-w.stop:
				return
			case <-timer.C:
			}
			if !s.pollActive() {
				break
			}
		}
	}
}

// pollActive polls all active transfers in one crossing, and reports whether some are left.
func (s *agent) pollActive() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.active.head == nil {
		return false
	}
	s.items = s.items[:0]
	for t := s.active.head; t != nil; t = t.next {
		s.items = append(s.items, pollItem{req: t.h})
	}
	rawPoll(s.h, s.items)
	t := s.active.head
	for i := range s.items {
		next := t.next
		t.settle("poll", Status(s.items[i].status))
		t = next
	}
	return s.active.head != nil
}
