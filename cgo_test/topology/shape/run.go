package shape

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

// Ranker is a rank, here or in another process.
type Ranker interface {
	Step(lease.Plan) (lease.Result, error)
	Fill(salt int) error
	Check(salt int) (read int, err error)
	Stats() (rdma.WorkerStats, error)
	Close() error
}

// engine is all ranks of one side with their scheduler.
type engine struct {
	ranks []Ranker
	sched *lease.Scheduler

	freed  map[string]lease.Reason
	ran    map[string]bool
	failed map[string]error
}

func newEngine(s *Shape, owner bool, port int, ranks []Ranker) (*engine, error) {
	e := &engine{ranks: ranks, freed: map[string]lease.Reason{}, ran: map[string]bool{}, failed: map[string]error{}}
	side := s.Reader
	if owner {
		side = s.Owner
	}
	lc := lease.DefaultConfig()
	if side.VerifyNothing {
		lc.Verification = lease.VerifyNone
	}
	var err error
	e.sched, err = lease.NewScheduler(lease.SchedulerConfig{Config: lc, Engine: s.engine(owner), Host: "127.0.0.1", Port: port,
		TPSize: len(ranks), Ranks: len(ranks), Blocks: side.Blocks, MaxSeqs: 8})
	return e, err
}

func (e *engine) step() error {
	plan := e.sched.BuildPlan(time.Now())
	var results []lease.Result
	for i, r := range e.ranks {
		res, err := r.Step(plan)
		if err != nil {
			return fmt.Errorf("rank %d: %w", i, err)
		}
		results = append(results, res)
	}
	out := e.sched.OnResults(time.Now(), results)
	for _, f := range out.Free {
		e.freed[f.Request] = f.Reason
	}
	for _, id := range out.Run {
		e.ran[id] = true
	}
	for _, f := range out.Fail {
		e.failed[f.Request] = f.Err
	}
	return nil
}

// Outcome is what a shape's run amounted to.
type Outcome struct {
	Bytes int           // checked on all reader ranks, of those that the request put there
	Took  time.Duration // of the READ, from the request's blocks to its verdict
}

// Run passes two requests over a shape: the first is read, checked byte by byte on every rank, and must end on every owner
// rank because all of its readers said so; the second is given up unread, which must end it as well. On the way every owner
// rank must be renewed by every reader rank that has to do with it.
func Run(ctx context.Context, s *Shape, port int, owners, readers []Ranker) (out Outcome, err error) {
	owner, err := newEngine(s, true, port, owners)
	if err != nil {
		return out, err
	}
	reader, err := newEngine(s, false, 1, readers)
	if err != nil {
		return out, err
	}
	until := func(what string, done func() bool, engines ...*engine) error {
		for !done() {
			for _, e := range engines {
				if err := errors.Join(context.Cause(ctx), e.step()); err != nil {
					return fmt.Errorf("%s: %w", what, err)
				}
				for id, err := range e.failed {
					return fmt.Errorf("%s: %s failed: %w", what, id, err)
				}
			}
			time.Sleep(200 * time.Microsecond)
		}
		return nil
	}
	for i, id := range []string{"prefill-req:read", "prefill-req:given-up"} {
		params, err := owner.publish(s, id, i+1)
		if err != nil {
			return out, err
		}
		local := fmt.Sprint("decode-req-", i)
		if err := reader.sched.OnNewRequest(time.Now(), local, params); err != nil {
			return out, err
		}
		if i == 0 {
			if err := renewed(until, s, owner, reader); err != nil {
				return out, err
			}
			start := time.Now()
			if err := reader.sched.OnBlocksAllocated(time.Now(), local, params, s.ReaderBlocks()); err != nil {
				return out, err
			}
			if err := until("the read", func() bool { return reader.ran[local] }, reader); err != nil {
				return out, err
			}
			out.Took = time.Since(start)
			for d, r := range readers {
				n, err := r.Check(i + 1)
				if err != nil {
					return out, err
				}
				if n == 0 {
					return out, fmt.Errorf("reader rank %d has nothing to read", d)
				}
				out.Bytes += n
				st, err := r.Stats()
				if err != nil {
					return out, err
				}
				if want := int64(s.Sources(d)); st.Reads != want || !s.Reader.VerifyNothing && (st.Checks != want || st.Verified != 1) || st.BytesRead != int64(n) {
					return out, fmt.Errorf("reader rank %d: %d bytes in %d READs, %d slot READs, %d verified; want %d bytes from %d owner ranks",
						d, st.BytesRead, st.Reads, st.Checks, st.Verified, n, want)
				}
			}
			if owner.freed[id] != 0 {
				return out, fmt.Errorf("%s ended as %v before the owner took a step", id, owner.freed[id])
			}
		} else if _, _, err := reader.sched.RequestFinished(time.Now(), local, lease.StatusAborted, nil, 0); err != nil {
			return out, err
		}
		if err := until("the release on every owner rank", func() bool { return owner.freed[id] != 0 }, reader, owner); err != nil {
			return out, err
		}
		if owner.freed[id] != lease.ReasonRead {
			return out, fmt.Errorf("%s ended as %v", id, owner.freed[id])
		}
	}
	return out, nil
}

// renewed waits until the first heartbeat of every reader rank was counted on every owner rank that it has to do with.
func renewed(until func(string, func() bool, ...*engine) error, s *Shape, owner, reader *engine) (err error) {
	done := func() bool {
		for _, r := range owner.ranks {
			st, e := r.Stats()
			if err = e; e != nil {
				return true
			}
			if st.Leases.Renewals < int64(max(1, s.Reader.TP/s.Owner.TP)) {
				return false
			}
		}
		return true
	}
	return errors.Join(until("a heartbeat of every reader rank at every owner rank", done, reader, owner), err)
}

// publish prefills a request and returns its params as a router carries them.
func (e *engine) publish(s *Shape, id string, salt int) (*lease.Params, error) {
	if err := e.sched.OnBlocksAllocated(time.Now(), id, &lease.Params{DoRemoteDecode: true}, s.OwnerBlocks()); err != nil {
		return nil, err
	}
	if err := e.step(); err != nil {
		return nil, err
	}
	for _, r := range e.ranks {
		if err := r.Fill(salt); err != nil {
			return nil, err
		}
	}
	p, _, err := e.sched.RequestFinished(time.Now(), id, lease.StatusLengthCapped, s.OwnerBlocks(), s.Tokens)
	if err != nil {
		return nil, err
	}
	if err := e.step(); err != nil {
		return nil, err
	}
	b, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	out := new(lease.Params)
	return out, json.Unmarshal(b, out)
}
