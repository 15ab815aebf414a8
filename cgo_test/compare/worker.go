package main

// static void nothing(void) {}
import "C"

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nixlgo/nixlgo/nixl"
)

// worker is the Go side of the comparison; peer/peer.c describes the commands.
type worker struct {
	owner, reader  *nixl.Agent
	source, target *nixl.Buffer
	inbox          []nixl.Notification
	message        []byte
}

const region = 64 << 20

func work(path string, cpu int, in io.Reader, out io.Writer) error {
	if _, err := nixl.Load(path); err != nil {
		return err
	}
	var w worker
	var err error
	if w.owner, w.source, err = newAgent("owner"); err != nil {
		return err
	}
	if w.reader, w.target, err = newAgent("reader"); err != nil {
		return err
	}
	for from, to := range map[*nixl.Agent]*nixl.Agent{w.owner: w.reader, w.reader: w.owner} {
		blob, err := from.LocalMetadata()
		if err != nil {
			return err
		}
		if _, err := to.LoadRemote(blob); err != nil {
			return err
		}
	}
	w.message = make([]byte, 1<<16)
	runtime.LockOSThread()
	var cpus unix.CPUSet
	cpus.Set(cpu)
	if err := unix.SchedSetaffinity(0, &cpus); err != nil { // this thread; others run where they like
		return err
	}
	fmt.Fprintln(out, "ready")
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		what, rest, _ := strings.Cut(lines.Text(), " ")
		var args [3]int
		for i, s := range strings.Fields(rest) {
			if i < len(args) {
				if args[i], err = strconv.Atoi(s); err != nil {
					return err
				}
			}
		}
		times, err := w.answer(what, args[0], args[1], args[2])
		if err != nil {
			return fmt.Errorf("%s: %w", lines.Text(), err)
		}
		fmt.Fprintln(out, strings.Trim(fmt.Sprint(times), "[]"))
	}
	return lines.Err()
}

func newAgent(name string) (*nixl.Agent, *nixl.Buffer, error) {
	a, err := nixl.NewAgent(name, nixl.Config{})
	if err != nil {
		return nil, nil, err
	}
	// Shared memory has no other mode of error handling.
	if _, err := a.CreateBackend("UCX", map[string]string{"ucx_error_handling_mode": "none"}); err != nil {
		return nil, nil, err
	}
	b, err := nixl.AllocBuffer(region)
	if err != nil {
		return nil, nil, err
	}
	bytes := b.Bytes()
	for i := range bytes {
		bytes[i] = 1
	}
	_, err = a.Register(b)
	return a, b, err
}

var epoch = time.Now()

// now reads one clock, as the other programs do; time.Now reads two.
func now() float64 { return float64(time.Since(epoch)) }

func (w *worker) answer(what string, a, b, rounds int) ([]float64, error) {
	switch what {
	case "lists":
		return w.lists(a, b, rounds)
	case "cycle":
		return w.cycle(a, b, rounds)
	case "start":
		return w.start(a, b, rounds)
	case "build":
		return w.build(a, b, rounds)
	case "repost":
		return w.repost(a, b)
	case "notify":
		start := now()
		if err := w.send(a, b); err != nil {
			return nil, err
		}
		err := w.collect(b)
		return []float64{(now() - start) / float64(b)}, err
	case "latency":
		return least(b, 1, func() error {
			if err := w.send(a, 1); err != nil {
				return err
			}
			return w.collect(1)
		})
	case "drain":
		return w.drainOnce(a)
	case "empty":
		return least(a, 100, func() error {
			_, err := w.drain()
			return err
		})
	case "nothing":
		return least(a, 100, func() error {
			C.nothing()
			return nil
		})
	}
	return nil, errors.New("unknown command")
}

// least is the least time of one call, of rounds batches of some calls each.
func least(rounds, batch int, call func() error) ([]float64, error) {
	best := math.Inf(1)
	for range rounds {
		start := now()
		for range batch {
			if err := call(); err != nil {
				return nil, err
			}
		}
		best = min(best, now()-start)
	}
	return []float64{best / float64(batch)}, nil
}

func blocks(count, size int) []int {
	bs := make([]int, count)
	for i := range bs {
		bs[i] = i % (region / size)
	}
	return bs
}

func descriptors(b *nixl.Buffer, blocks []int, size int) []nixl.Desc {
	base := b.Addr()
	ds := make([]nixl.Desc, len(blocks))
	for i, block := range blocks {
		ds[i] = nixl.Desc{Addr: base + uint64(block)*uint64(size), Len: uint64(size)}
	}
	return ds
}

func shuffled(count int) []int32 {
	is := make([]int32, count)
	for i := range is {
		is[i] = int32(i * 7919 % count)
	}
	return is
}

// pair is the prepared lists of one READ.
type pair struct{ local, remote *nixl.List }

func (w *worker) prepare(ours, theirs []nixl.Desc) (l pair, err error) {
	if l.local, err = w.reader.PrepareLocal(nixl.DRAM, ours); err != nil {
		return l, err
	}
	l.remote, err = w.reader.PrepareRemote("owner", nixl.DRAM, theirs)
	return l, err
}

func (l pair) close() error { return errors.Join(l.local.Close(), l.remote.Close()) }

func complete(t *nixl.Transfer, s nixl.State) (err error) {
	for s == nixl.Active {
		if s, err = t.Poll(); err != nil {
			return err
		}
	}
	if s != nixl.Done {
		return t.Err()
	}
	return nil
}

func (w *worker) lists(count, size, rounds int) ([]float64, error) {
	indices, bs := shuffled(count), blocks(count, size)
	ours, theirs := descriptors(w.target, bs, size), descriptors(w.source, bs, size)
	best := slices.Repeat([]float64{math.Inf(1)}, 2)
	for range rounds {
		var at [3]float64
		at[0] = now()
		l, err := w.prepare(ours, theirs)
		if err != nil {
			return nil, err
		}
		at[1] = now()
		t, err := w.reader.NewTransfer(nixl.Read, l.local, indices, l.remote, indices, nixl.TransferOptions{})
		if err != nil {
			return nil, err
		}
		at[2] = now()
		if err := errors.Join(t.Close(), l.close()); err != nil {
			return nil, err
		}
		for k := range best {
			best[k] = min(best[k], at[k+1]-at[k])
		}
	}
	return best, nil
}

func (w *worker) cycle(count, size, rounds int) ([]float64, error) {
	indices, bs := shuffled(count), blocks(count, size)
	ours, theirs := descriptors(w.target, bs, size), descriptors(w.source, bs, size)
	best := slices.Repeat([]float64{math.Inf(1)}, 3)
	for range rounds {
		var at [4]float64
		l, err := w.prepare(ours, theirs)
		if err != nil {
			return nil, err
		}
		t, err := w.reader.NewTransfer(nixl.Read, l.local, indices, l.remote, indices, nixl.TransferOptions{})
		if err != nil {
			return nil, err
		}
		at[0] = now()
		state, err := t.Post()
		if err != nil {
			return nil, err
		}
		at[1] = now()
		if err := complete(t, state); err != nil {
			return nil, err
		}
		at[2] = now()
		if err := errors.Join(t.Close(), l.close()); err != nil {
			return nil, err
		}
		at[3] = now()
		for k := range best {
			best[k] = min(best[k], at[k+1]-at[k])
		}
	}
	return best, nil
}

func (w *worker) start(count, size, rounds int) ([]float64, error) {
	indices, bs := shuffled(count), blocks(count, size)
	l, err := w.prepare(descriptors(w.target, bs, size), descriptors(w.source, bs, size))
	if err != nil {
		return nil, err
	}
	ts := make([]*nixl.Transfer, batch(count*size))
	best := math.Inf(1)
	for range rounds {
		start := now()
		for i := range ts {
			t, state, err := w.reader.Start(nixl.Read, l.local, indices, l.remote, indices, nixl.TransferOptions{})
			if err != nil {
				return nil, err
			}
			if err := complete(t, state); err != nil {
				return nil, err
			}
			ts[i] = t
		}
		best = min(best, (now()-start)/float64(len(ts)))
		for _, t := range ts {
			if err := t.Close(); err != nil {
				return nil, err
			}
		}
	}
	return []float64{best}, l.close()
}

// batch is how many short READs are timed at once: reading the clock takes long beside one.
func batch(bytes int) int { return max(1, 65536/bytes) }

func (w *worker) build(count, size, rounds int) ([]float64, error) {
	bs := blocks(count, size)
	best := slices.Repeat([]float64{math.Inf(1)}, 2)
	for range rounds {
		start := now()
		ours, theirs := descriptors(w.target, bs, size), descriptors(w.source, bs, size)
		described := now()
		l, err := w.prepare(ours, theirs)
		if err != nil {
			return nil, err
		}
		end := now()
		best[0], best[1] = min(best[0], end-start), min(best[1], end-described)
		if err := l.close(); err != nil {
			return nil, err
		}
	}
	return best, nil
}

func (w *worker) repost(size, rounds int) ([]float64, error) {
	l, err := w.prepare(descriptors(w.target, []int{0}, size), descriptors(w.source, []int{0}, size))
	if err != nil {
		return nil, err
	}
	t, err := w.reader.NewTransfer(nixl.Read, l.local, nil, l.remote, nil, nixl.TransferOptions{})
	if err != nil {
		return nil, err
	}
	best, err := least(rounds, batch(size), func() error {
		state, err := t.Post()
		if err != nil {
			return err
		}
		return complete(t, state)
	})
	return best, errors.Join(err, t.Close(), l.close())
}

func (w *worker) drain() (got int, err error) {
	w.inbox, err = w.owner.Notifications(w.inbox[:0])
	return len(w.inbox), err
}

// drainOnce times the drain of messages that have all arrived. Only the drain
// can tell that they have, so it is tried again with a longer wait if not.
func (w *worker) drainOnce(count int) ([]float64, error) {
	for wait := 20 * time.Millisecond; wait < 5*time.Second; wait *= 2 {
		if err := w.send(64, count); err != nil {
			return nil, err
		}
		time.Sleep(wait)
		start := now()
		got, err := w.drain()
		took := now() - start
		if err != nil || got == count {
			return []float64{took}, err
		}
		if err := w.collect(count - got); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("%d messages did not arrive", count)
}

func (w *worker) send(bytes, count int) error {
	for range count {
		if err := w.reader.Notify("owner", w.message[:bytes]); err != nil {
			return err
		}
	}
	return nil
}

func (w *worker) collect(count int) error {
	for got := 0; got < count; {
		n, err := w.drain()
		if err != nil {
			return err
		}
		got += n
	}
	return nil
}
