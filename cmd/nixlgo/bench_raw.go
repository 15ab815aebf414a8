package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/nixlgo/nixlgo/nixl"
)

// What nixlbench fills the buffers with, so that a consistency check tells them apart.
const (
	initiatorByte = 0xbb
	targetByte    = 0xaa
)

// endpoint is one side's agent with the buffer that transfers go from and to.
type endpoint struct {
	agent  *nixl.Agent
	buffer *nixl.Buffer
}

func openEndpoint(backend string, size int, fill byte) (*endpoint, error) {
	e := &endpoint{}
	err := e.open(backend, size)
	if err != nil {
		return nil, errors.Join(err, e.close())
	}
	e.fill(fill)
	return e, nil
}

func (e *endpoint) open(backend string, size int) (err error) {
	if e.agent, err = nixl.NewAgent("", nixl.Config{}); err != nil {
		return err
	}
	if _, err = e.agent.CreateBackend(backend, nil); err != nil {
		return err
	}
	if e.buffer, err = nixl.AllocBuffer(size); err != nil {
		return err
	}
	_, err = e.agent.Register(e.buffer)
	return err
}

func (e *endpoint) fill(b byte) {
	all := e.buffer.Bytes()
	for i := range all {
		all[i] = b
	}
}

// wrong counts the bytes of r that are not b.
func (e *endpoint) wrong(r benchRange, b byte) int {
	part := e.buffer.Bytes()[r.Offset : r.Offset+r.Bytes]
	return len(part) - bytes.Count(part, []byte{b})
}

func (e *endpoint) close() error {
	var err error
	if e.agent != nil {
		err = e.agent.Close()
	}
	if e.buffer != nil {
		err = errors.Join(err, e.buffer.Close())
	}
	return err
}

// rawBench runs transfers of NIXL alone, as nixlbench's worker does: a batch of blocks that lie one behind the other, in a
// part of the buffer for each thread.
type rawBench struct {
	local      *endpoint
	remote     string // the target's agent
	remoteAddr uint64
	op         nixl.Op
	threads    int
	depth      int // transfers in flight; each has its share of the batch
	prepared   bool
	recreate   bool
	wait       time.Duration // longest for one transfer
}

// samples are durations in microseconds.
type samples []float64

func (s *samples) add(d time.Duration) { *s = append(*s, float64(d)/1e3) }

func (s samples) sum() (sum float64) {
	for _, v := range s {
		sum += v
	}
	return sum
}

func (s samples) mean() float64 {
	if len(s) == 0 {
		return 0
	}
	return s.sum() / float64(len(s))
}

// at is the sample that a share of the others lies below, counted as nixlbench counts.
func (s samples) at(share float64) float64 {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(int(float64(len(s))*share), len(s)-1)]
}

// rawStats are nixlbench's: prep is making the requests, post is posting one, tx is from the end of that to its completion.
type rawStats struct {
	prep, post, tx samples
	xfer           samples       // post and tx of each transfer together
	total          time.Duration // of all threads together
}

// ranges are the parts of the buffers that a run of that shape uses.
func (r *rawBench) ranges(s transferShape) []benchRange {
	out := make([]benchRange, r.threads)
	part := r.local.buffer.Len() / r.threads
	for i := range out {
		out[i] = benchRange{i * part, s.bytes()}
	}
	return out
}

// run does so many transfers of that shape, shared out among the threads.
func (r *rawBench) run(ctx context.Context, s transferShape, transfers int) (rawStats, error) {
	var all rawStats
	var mu sync.Mutex
	var work sync.WaitGroup
	var failed error
	start := time.Now()
	for _, part := range r.ranges(s) {
		work.Go(func() {
			one, err := r.thread(ctx, part, s, transfers/r.threads)
			mu.Lock()
			defer mu.Unlock()
			failed = errors.Join(failed, err)
			all.prep, all.post = append(all.prep, one.prep...), append(all.post, one.post...)
			all.tx, all.xfer = append(all.tx, one.tx...), append(all.xfer, one.xfer...)
		})
	}
	work.Wait()
	all.total = time.Since(start)
	return all, failed
}

// flight is a request that is posted again and again.
type flight struct {
	transfer *nixl.Transfer
	posting  time.Time // begin of the post
	posted   time.Time // its end; zero: not in flight
}

// thread keeps depth transfers in flight until all are done.
func (r *rawBench) thread(ctx context.Context, part benchRange, s transferShape, transfers int) (st rawStats, err error) {
	depth := min(r.depth, transfers)
	flights := make([]flight, depth)
	defer func() {
		for i := range flights {
			if t := flights[i].transfer; t != nil {
				if cerr := t.Close(); err == nil { // after a failure the transfer may be active, and the agent's Close ends it
					err = cerr
				}
			}
		}
	}()
	issue := func(i int) error {
		f := &flights[i]
		if f.transfer == nil || r.recreate {
			if f.transfer != nil {
				if err := f.transfer.Close(); err != nil {
					return err
				}
			}
			start := time.Now()
			share := s.Batch / depth
			var err error
			if f.transfer, err = r.prepare(part.Offset+i*share*s.BlockBytes, share, s.BlockBytes); err != nil {
				return err
			}
			st.prep.add(time.Since(start))
		}
		f.posting = time.Now()
		if _, err := f.transfer.Post(); err != nil {
			return err
		}
		f.posted = time.Now()
		st.post.add(f.posted.Sub(f.posting))
		return nil
	}
	issued, done := 0, 0
	for ; issued < depth; issued++ {
		if err := issue(issued); err != nil {
			return st, err
		}
	}
	for last := time.Now(); done < transfers; {
		moved := false
		for i := range flights {
			f := &flights[i]
			if f.posted.IsZero() {
				continue
			}
			state, err := f.transfer.Poll()
			if err != nil {
				return st, err
			}
			if state == nixl.Active {
				continue
			}
			now := time.Now()
			st.tx.add(now.Sub(f.posted))
			st.xfer.add(now.Sub(f.posting))
			f.posted = time.Time{}
			done++
			moved, last = true, now
			if issued < transfers {
				if err := issue(i); err != nil {
					return st, err
				}
				issued++
			}
		}
		if moved {
			continue
		}
		if ctx.Err() != nil {
			return st, context.Cause(ctx)
		}
		waited := time.Since(last)
		if waited > r.wait {
			return st, fmt.Errorf("waited %s in vain for a %s of %d bytes to end (--timeout)", r.wait, r.op, s.bytes()/depth)
		}
		pollPause(waited)
	}
	return st, nil
}

// pollPause leaves the core to the transfer between two polls, but for no longer than a sixty-fourth of the time that it
// has taken: what is measured stays that exact.
func pollPause(waited time.Duration) {
	if pause := waited / 64; pause >= 50*time.Microsecond {
		syscall.Nanosleep(&syscall.Timespec{Nsec: int64(min(pause, 10*time.Millisecond))}, nil)
	} else {
		runtime.Gosched()
	}
}

// prepare makes a request for count blocks at an offset of both buffers.
func (r *rawBench) prepare(offset, count, size int) (*nixl.Transfer, error) {
	local, remote := make([]nixl.Desc, count), make([]nixl.Desc, count)
	for i := range local {
		at := uint64(offset + i*size)
		local[i] = nixl.Desc{Addr: r.local.buffer.Addr() + at, Len: uint64(size)}
		remote[i] = nixl.Desc{Addr: r.remoteAddr + at, Len: uint64(size)}
	}
	// nixlbench notifies the target of every transfer.
	options := nixl.TransferOptions{Notification: []byte("0xBEEF"), Notify: true}
	if !r.prepared {
		return r.local.agent.CreateTransfer(r.op, nixl.DRAM, local, r.remote, nixl.DRAM, remote, options)
	}
	ll, err := r.local.agent.PrepareLocal(nixl.DRAM, local)
	if err != nil {
		return nil, err
	}
	defer ll.Close()
	rl, err := r.local.agent.PrepareRemote(r.remote, nixl.DRAM, remote)
	if err != nil {
		return nil, err
	}
	defer rl.Close()
	return r.local.agent.NewTransfer(r.op, ll, nil, rl, nil, options)
}
