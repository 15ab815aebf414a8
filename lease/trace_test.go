package lease

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// recorder notes every call of a trace.
type recorder struct{ calls []string }

func (c *recorder) add(format string, args ...any) {
	c.calls = append(c.calls, fmt.Sprintf(format, args...))
}

// take returns and forgets what was noted.
func (c *recorder) take() []string {
	calls := c.calls
	c.calls = nil
	return calls
}

func (c *recorder) table() TableTrace {
	return TableTrace{
		Granted:   func(g Grant) { c.add("granted %s %d for %v", g.Request, g.Nonce, g.TTL) },
		Heartbeat: func(sender string, renewed, missed int) { c.add("heartbeat %s %d+%d", sender, renewed, missed) },
		Ended: func(e Ended, age, left time.Duration) {
			c.add("ended %s %d %v after %v, %v left", e.Request, e.Nonce, e.Reason, age, left)
		},
		StaleReadComplete: func(sender string, k Key) { c.add("stale %s %s %d", sender, k.Request, k.Nonce) },
		LateReadComplete:  func(k Key, senders int) { c.add("late %s %d of %d", k.Request, k.Nonce, senders) },
	}
}

func (c *recorder) scheduler() SchedulerTrace {
	return SchedulerTrace{
		Exported:     func(request string, nonce int64, ttl time.Duration) { c.add("exported %s for %v", request, ttl) },
		Ended:        func(e Ended) { c.add("ended %s %v", e.Request, e.Reason) },
		FetchStarted: func(p Pull) { c.add("fetch %s of %s", p.Request, p.RemoteRequest) },
		FetchEnded: func(request string, cause Cause, err error) {
			c.add("fetched %s: %v, %v", request, cause, CauseOf(err))
		},
	}
}

func TestATraceIsToldOfEveryLease(t *testing.T) {
	var c recorder
	r := newRank(t, 3, func(tc *TableConfig) { tc.Trace = c.table() })
	r.admit("a", 11, 0)
	r.admit("b", 12, 1)
	r.admit("c", 13, 2)
	require.Empty(t, c.take(), "an admission has no deadline")
	r.grant(t0, "a", 11, 30)
	r.grant(t0, "b", 12, 30)
	require.Equal(t, []string{"granted a 11 for 30s", "granted b 12 for 30s"}, c.take())

	r.notify(at(15), "D", "HB:a,x,y")
	msg, _, err := AppendSlotHeartbeat(nil, []Target{{"a", 0, 11}, {"b", 1, 99}}, 0)
	require.NoError(t, err)
	r.notify(at(15), "E", string(msg))
	require.Error(t, r.Notify(at(15), "D", []byte("HB:")))
	require.Equal(t, []string{"heartbeat D 1+2", "heartbeat E 1+1"}, c.take(), "one call for a message that was understood")

	r.notify(at(16), "D", "a:1:11")
	require.Equal(t, []string{"ended a 11 read after 16s, 19s left"}, c.take())
	require.Equal(t, 1, r.Reap(at(33)))
	require.NoError(t, r.Abort(at(33), Key{"c", 13}))
	require.Equal(t, []string{"ended b 12 expired after 33s, -3s left", "ended c 13 aborted after 0s, 0s left"}, c.take())
	require.Len(t, r.ends(), 3)

	r.admit("a", 21, 0)
	r.notify(at(34), "D", "a:1:11")
	require.Equal(t, []string{"stale D a 11"}, c.take())
	r.notify(at(34), "D", "b:2:12")
	r.notify(at(35), "E", "b:2:12")
	require.Empty(t, c.take(), "a lease could still come")
	r.Reap(at(96))
	require.Equal(t, []string{"late b 12 of 2"}, c.take())
	require.EqualValues(t, 1, r.Stats().StaleReadCompletes)
}

func TestATraceIsToldOfEveryExportAndEnd(t *testing.T) {
	var c recorder
	e := newEngine(t, 2, func(sc *SchedulerConfig) { sc.Trace = c.scheduler() })
	e.publish(t0, "a", 1, 2)
	require.Equal(t, []string{"exported a for 30s"}, c.take())
	require.EqualValues(t, 2, e.Stats().PinnedBlocks)
	require.EqualValues(t, 32, e.Stats().PinnedTokens)
	for _, r := range e.ranks[:1] {
		r.notify(at(1), "D", string(AppendReadComplete(nil, "a", 1, e.lives["a"].nonce)))
	}
	e.step(at(1))
	require.Empty(t, c.take(), "one of two ranks")
	e.step(at(30))
	require.Equal(t, []string{"ended a expired"}, c.take())
	require.Zero(t, e.Stats().PinnedBlocks)
	require.Zero(t, e.Stats().PinnedTokens)

	require.NoError(t, e.OnBlocksAllocated(at(31), "b", &Params{DoRemoteDecode: true}, [][]int{{3}}))
	e.step(at(31))
	_, delayed, err := e.RequestFinished(at(31), "b", StatusAborted, [][]int{{3}}, 16)
	require.NoError(t, err)
	require.True(t, delayed)
	require.EqualValues(t, 1, e.Stats().PinnedBlocks, "until every rank took the nonce back")
	require.Zero(t, e.Stats().PinnedTokens, "nobody reads them")
	e.step(at(31))
	require.Equal(t, []string{"ended b aborted"}, c.take())
	require.Zero(t, e.Stats().PinnedBlocks)
}

func TestAFetchThatStartedEndsOnceInTheTrace(t *testing.T) {
	blocks := [][]int{{1}}
	unverifiable := with(offer("r"), func(p *Params) { p.RemoteBlockIDs, p.Lease = [][]int{{7}}, nil })
	for name, tc := range map[string]struct {
		params *Params
		events func(t *testing.T, s *Scheduler)
		want   []string
	}{
		"received": {nil, func(t *testing.T, s *Scheduler) {
			s.BuildPlan(t0)
			s.OnResults(t0, []Result{{Received: []string{"q"}}})
			s.OnResults(t0, []Result{{Received: []string{"q"}}})
		}, []string{"fetched q: none, none"}},
		"failed": {nil, func(t *testing.T, s *Scheduler) {
			s.BuildPlan(t0)
			s.OnResults(t0, []Result{{Failed: []Failure{{Request: "q", Cause: CauseTimeout, Quarantined: true}}}})
			s.OnResults(t0, []Result{{Settled: []string{"q"}}})
		}, []string{"fetched q: timeout, timeout"}},
		"given up while reading": {nil, func(t *testing.T, s *Scheduler) {
			s.BuildPlan(t0)
			_, _, err := s.RequestFinished(t0, "q", StatusAborted, blocks, 0)
			require.NoError(t, err)
			s.OnResults(t0, []Result{{Settled: []string{"q"}}})
		}, []string{"fetched q: aborted, aborted"}},
		"given up before": {nil, func(t *testing.T, s *Scheduler) {
			_, _, err := s.RequestFinished(t0, "q", StatusAborted, blocks, 0)
			require.NoError(t, err)
		}, []string{"fetched q: aborted, aborted"}},
		"preempted": {nil, func(t *testing.T, s *Scheduler) {
			require.NoError(t, s.Preempted(t0, "q"))
			require.NoError(t, s.Preempted(t0, "q"))
		}, []string{"fetched q: aborted, aborted"}},
		"cannot be verified": {unverifiable, nil, []string{"fetched q: unverifiable, unverifiable"}},
	} {
		t.Run(name, func(t *testing.T) {
			var c recorder
			s := newReader(t, 1, func(sc *SchedulerConfig) { sc.Trace = c.scheduler() })
			p := tc.params
			if p == nil {
				p = offer("r", 7)
			}
			require.NoError(t, s.OnNewRequest(t0, "q", p))
			require.NoError(t, s.OnBlocksAllocated(t0, "q", p, blocks))
			if tc.events != nil {
				tc.events(t, s)
			}
			require.Equal(t, append([]string{"fetch q of r"}, tc.want...), c.take())
		})
	}
	t.Run("nothing to fill", func(t *testing.T) {
		var c recorder
		s := newReader(t, 1, func(sc *SchedulerConfig) { sc.Trace = c.scheduler() })
		require.NoError(t, s.OnBlocksAllocated(t0, "q", offer("r", 7), nil))
		require.Empty(t, c.take())
	})
}

func TestTheOldestLeaseIsTheOneGrantedFirst(t *testing.T) {
	const n = 1000
	r := newRank(t, n)
	require.Zero(t, r.Stats().OldestAge)
	require.EqualValues(t, n, r.Stats().FreeSlots)
	for i := range n {
		id := fmt.Sprint(i)
		require.NoError(t, r.Admit(t0, Admission{id, int64(i + 1), i}))
		r.grant(at(float64(i)), id, int64(i+1), 1e5)
	}
	require.Equal(t, (n-1)*time.Second, r.Stats().OldestAge)
	require.Zero(t, r.Stats().FreeSlots)
	for i := n - 1; i > n/2; i-- { // the young ones end
		require.NoError(t, r.Abort(at(2*n), Key{fmt.Sprint(i), int64(i + 1)}))
	}
	require.Equal(t, 2*n*time.Second, r.Stats().OldestAge)
	for i := range n / 2 { // then the old ones
		require.NoError(t, r.Abort(at(2*n), Key{fmt.Sprint(i), int64(i + 1)}))
		require.Equal(t, time.Duration(2*n-i-1)*time.Second, r.Stats().OldestAge)
	}
	require.LessOrEqual(t, len(r.grants.list), 2+64)
	r.Reap(at(-5))
	require.Zero(t, r.Stats().OldestAge, "time went back before its grant")
	require.NoError(t, r.Abort(at(2*n), Key{fmt.Sprint(n / 2), n/2 + 1}))
	require.Zero(t, r.Stats().OldestAge)
	require.Empty(t, r.grants.list)
	require.EqualValues(t, n, r.Stats().FreeSlots)
}

// One life of "a", from admission to its read-complete, and a heartbeat.
func oneLife(r *Table, msgs [][]byte, ended []Ended) []Ended {
	if r.Admit(t0, Admission{"a", 11, 0}) != nil || r.Grant(t0, Grant{Request: "a", Nonce: 11, TTL: time.Minute, Exported: true}) != nil {
		panic("refused")
	}
	for _, m := range msgs {
		if r.Notify(t0, "D", m) != nil {
			panic("refused")
		}
	}
	r.Stats()
	return r.Ended(ended[:0])
}

func lifeMessages() [][]byte {
	return [][]byte{[]byte("HB:a"), []byte("HB2:\x00\x00\x00\x00\x0b\x00\x00\x00\x00\x00\x00\x00"), []byte("a:1:11")}
}

// A trace that is not there, or whose functions are nil, costs no allocation; one
// that is there costs none of its own.
func TestATraceDoesNotAllocate(t *testing.T) {
	allocs := func(trace TableTrace) float64 {
		r := newRank(t, 1, func(c *TableConfig) { c.Trace = trace })
		msgs, ended := lifeMessages(), make([]Ended, 0, 4)
		return testing.AllocsPerRun(1000, func() { ended = oneLife(r.Table, msgs, ended) })
	}
	calls := 0
	require.Zero(t, allocs(TableTrace{}))
	require.Zero(t, allocs(TableTrace{
		Granted: func(Grant) { calls++ }, Heartbeat: func(string, int, int) { calls++ }, Ended: func(Ended, time.Duration, time.Duration) { calls++ },
	}))
	require.Equal(t, 4*1001, calls)
}

// Compare the two: without a trace a life must cost what it did.
func BenchmarkTrace(b *testing.B) {
	for name, trace := range map[string]TableTrace{
		"none": {},
		"all":  {Granted: func(Grant) {}, Heartbeat: func(string, int, int) {}, Ended: func(Ended, time.Duration, time.Duration) {}},
	} {
		b.Run(name, func(b *testing.B) {
			r, err := NewTable(TableConfig{Extension: 20 * time.Second, Slots: NewSlots(make([]int64, 1)), Trace: trace})
			if err != nil {
				b.Fatal(err)
			}
			msgs, ended := lifeMessages(), make([]Ended, 0, 4)
			b.ReportAllocs()
			for b.Loop() {
				ended = oneLife(r, msgs, ended)
			}
		})
	}
}
