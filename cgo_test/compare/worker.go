package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

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

func work(path string, in io.Reader, out io.Writer) error {
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
	fmt.Fprintln(out, "ready")
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		what, rest, _ := strings.Cut(lines.Text(), " ")
		var args [4]int
		for i, s := range strings.Fields(rest) {
			if i < len(args) {
				if args[i], err = strconv.Atoi(s); err != nil {
					return err
				}
			}
		}
		times, err := w.answer(what, args)
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
	for i := range b.Bytes() {
		b.Bytes()[i] = 1
	}
	_, err = a.Register(b)
	return a, b, err
}

func (w *worker) answer(what string, args [4]int) ([]float64, error) {
	switch what {
	case "cycle":
		return w.cycle(args[0], args[1], args[2], args[3] != 0)
	case "repost":
		return w.repost(args[0], args[1])
	case "notify":
		start := time.Now()
		if err := w.send(args[0], args[1]); err != nil {
			return nil, err
		}
		err := w.collect(args[1])
		return []float64{float64(time.Since(start)) / float64(args[1])}, err
	case "latency":
		best := time.Hour
		for range args[1] {
			start := time.Now()
			if err := w.send(args[0], 1); err != nil {
				return nil, err
			}
			if err := w.collect(1); err != nil {
				return nil, err
			}
			best = min(best, time.Since(start))
		}
		return []float64{float64(best)}, nil
	case "drain":
		if err := w.send(64, args[0]); err != nil {
			return nil, err
		}
		time.Sleep(500 * time.Millisecond) // all have arrived; the count is checked below
		start := time.Now()
		got, err := w.drain()
		took := time.Since(start)
		if err == nil && got != args[0] {
			err = fmt.Errorf("%d of %d messages had arrived", got, args[0])
		}
		return []float64{float64(took)}, err
	case "empty":
		start := time.Now()
		for range args[0] {
			if _, err := w.drain(); err != nil {
				return nil, err
			}
		}
		return []float64{float64(time.Since(start)) / float64(args[0])}, nil
	}
	return nil, errors.New("unknown command")
}

func descriptors(b *nixl.Buffer, count, size int) []nixl.Desc {
	ds := make([]nixl.Desc, count)
	for i := range ds {
		ds[i] = nixl.Desc{Addr: b.Addr() + uint64(i%(region/size)*size), Len: uint64(size)}
	}
	return ds
}

func (w *worker) prepare(ours, theirs []nixl.Desc) (local, remote *nixl.List, err error) {
	if local, err = w.reader.PrepareLocal(nixl.DRAM, ours); err != nil {
		return nil, nil, err
	}
	remote, err = w.reader.PrepareRemote("owner", nixl.DRAM, theirs)
	return local, remote, err
}

func complete(t *nixl.Transfer, s nixl.State) (err error) {
	for s == nixl.Active {
		if s, err = t.Poll(); err != nil {
			return err
		}
	}
	return nil
}

func (w *worker) cycle(count, size, rounds int, move bool) ([]float64, error) {
	indices := make([]int32, count)
	for i := range indices {
		indices[i] = int32(i * 7919 % count)
	}
	ours, theirs := descriptors(w.target, count, size), descriptors(w.source, count, size)
	best := []float64{1e18, 1e18, 1e18, 1e18, 1e18}
	for range rounds {
		var at [6]time.Time
		at[0] = time.Now()
		local, remote, err := w.prepare(ours, theirs)
		if err != nil {
			return nil, err
		}
		at[1] = time.Now()
		t, err := w.reader.NewTransfer(nixl.Read, local, indices, remote, indices, nixl.TransferOptions{})
		if err != nil {
			return nil, err
		}
		at[2] = time.Now()
		at[3], at[4] = at[2], at[2]
		if move {
			state, err := t.Post()
			if err != nil {
				return nil, err
			}
			at[3] = time.Now()
			if err := complete(t, state); err != nil {
				return nil, err
			}
			at[4] = time.Now()
		}
		if err := errors.Join(t.Close(), local.Close(), remote.Close()); err != nil {
			return nil, err
		}
		at[5] = time.Now()
		for k := range best {
			best[k] = min(best[k], float64(at[k+1].Sub(at[k])))
		}
	}
	return best, nil
}

func (w *worker) repost(size, rounds int) ([]float64, error) {
	local, remote, err := w.prepare(descriptors(w.target, 1, size), descriptors(w.source, 1, size))
	if err != nil {
		return nil, err
	}
	t, err := w.reader.NewTransfer(nixl.Read, local, nil, remote, nil, nixl.TransferOptions{})
	if err != nil {
		return nil, err
	}
	best := time.Hour
	for range rounds {
		start := time.Now()
		state, err := t.Post()
		if err != nil {
			return nil, err
		}
		if err := complete(t, state); err != nil {
			return nil, err
		}
		best = min(best, time.Since(start))
	}
	return []float64{float64(best)}, errors.Join(t.Close(), local.Close(), remote.Close())
}

func (w *worker) drain() (got int, err error) {
	clear(w.inbox)
	w.inbox, err = w.owner.Notifications(w.inbox[:0])
	return len(w.inbox), err
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
