package rdmatest

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/nixlgo/nixlgo/rdma"
)

// Directory is an rdma.Directory in memory, as one program uses it.
type Directory struct{ s *store }

var _ rdma.Directory = (*Directory)(nil)

// store is what the programs share.
type store struct {
	mu       sync.Mutex
	revision int64
	engines  map[string]*engine
	news     chan struct{} // closed by the next change
	stopped  bool
}

type engine struct {
	revision int64 // of its last change
	ranks    map[int]entry
}

type entry struct {
	by    *Directory
	reply []byte
}

// NewDirectory makes an empty directory.
func NewDirectory() *Directory {
	return &Directory{&store{engines: map[string]*engine{}, news: make(chan struct{})}}
}

// Session is the same directory as another program uses it.
func (d *Directory) Session() *Directory { return &Directory{d.s} }

// Stop lets nobody's calls through until Continue, as a server does that is down.
func (d *Directory) Stop() { d.s.stop(true) }

// Continue ends a Stop.
func (d *Directory) Continue() { d.s.stop(false) }

func (s *store) stop(stop bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = stop
	s.tell()
}

// tell wakes those that wait.
func (s *store) tell() {
	close(s.news)
	s.news = make(chan struct{})
}

// until calls f, with s locked, until it is done.
func (s *store) until(ctx context.Context, f func() bool) error {
	s.mu.Lock()
	for {
		if err := context.Cause(ctx); err != nil {
			s.mu.Unlock()
			return fmt.Errorf("rdmatest: directory: %w", err)
		}
		if !s.stopped && f() {
			s.mu.Unlock()
			return nil
		}
		news := s.news
		s.mu.Unlock()
		select {
		case <-news:
		case <-ctx.Done():
		}
		s.mu.Lock()
	}
}

// of is what is known of an engine.
func (s *store) of(name string) *engine {
	e := s.engines[name]
	if e == nil {
		e = &engine{ranks: map[int]entry{}}
		s.engines[name] = e
	}
	return e
}

func (s *store) change(e *engine) {
	s.revision++
	e.revision = s.revision
	s.tell()
}

// Publish implements rdma.Directory.
func (d *Directory) Publish(ctx context.Context, engine string, rank int, reply []byte) error {
	if engine == "" || rank < 0 || len(reply) == 0 || len(reply) > rdma.MaxReply {
		return fmt.Errorf("rdmatest: directory: %w: publish rank %d of engine %q in %d bytes", rdma.ErrConfig, rank, engine, len(reply))
	}
	return d.s.until(ctx, func() bool {
		e := d.s.of(engine)
		e.ranks[rank] = entry{d, bytes.Clone(reply)}
		d.s.change(e)
		return true
	})
}

// Withdraw implements rdma.Directory.
func (d *Directory) Withdraw(ctx context.Context, engine string, rank int) error {
	return d.s.until(ctx, func() bool {
		if e := d.s.of(engine); e.ranks[rank].by == d {
			delete(e.ranks, rank)
			d.s.change(e)
		}
		return true
	})
}

// Lookup implements rdma.Directory.
func (d *Directory) Lookup(ctx context.Context, engine string, ranks []int) (replies [][]byte, revision int64, err error) {
	err = d.s.until(ctx, func() bool {
		e := d.s.of(engine)
		revision = d.s.revision
		for _, r := range ranks {
			replies = append(replies, bytes.Clone(e.ranks[r].reply))
		}
		return true
	})
	if i := slices.IndexFunc(replies, func(b []byte) bool { return b == nil }); err == nil && i >= 0 {
		return nil, revision, fmt.Errorf("rdmatest: directory: rank %d of engine %q: %w", ranks[i], engine, rdma.ErrNotListed)
	}
	return replies, revision, err
}

// Changed implements rdma.Directory.
func (d *Directory) Changed(ctx context.Context, engine string, revision int64) error {
	return d.s.until(ctx, func() bool { return d.s.of(engine).revision > revision })
}
