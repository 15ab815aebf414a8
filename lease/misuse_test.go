package lease

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// answer is "ok" or the sentinel that an error matches.
func answer(t *testing.T, err error) string {
	t.Helper()
	if err == nil {
		return "ok"
	}
	_, typed := errors.AsType[*Error](err)
	require.True(t, typed, "%v is no *Error", err)
	for name, s := range map[string]error{"unknown": ErrUnknown, "busy": ErrBusy, "invalid": ErrInvalid, "unverifiable": ErrUnverifiable} {
		if errors.Is(err, s) {
			return name
		}
	}
	return err.Error()
}

// misuse calls every method twice in every state and compares the answers, as in
// "ok/busy", with a table that has a line for each state. After an error before
// must return what it did.
func misuse[S any](t *testing.T, columns []string, states []string, table string, start func(t *testing.T, state string) S, call func(s S, method string) error, before func(S) string) {
	t.Helper()
	var got strings.Builder
	fmt.Fprintf(&got, "\n%-14s", "")
	for _, c := range columns {
		fmt.Fprintf(&got, " %-16s", c)
	}
	for _, state := range states {
		fmt.Fprintf(&got, "\n%-14s", state)
		for _, method := range columns {
			s := start(t, state)
			var answers []string
			for range 2 {
				was := before(s)
				a := answer(t, call(s, method))
				if a != "ok" {
					require.Equal(t, was, before(s), "%s in state %s is refused and changes something", method, state)
				}
				answers = append(answers, a)
			}
			fmt.Fprintf(&got, " %-16s", strings.Join(answers, "/"))
		}
	}
	trim := func(s string) (lines []string) {
		for line := range strings.Lines(strings.TrimSpace(s)) {
			lines = append(lines, strings.Join(strings.Fields(line), " "))
		}
		return lines
	}
	require.Equal(t, trim(table), trim(got.String()), got.String())
}

func TestEveryCallInEveryStateOfALife(t *testing.T) {
	type state struct{ *rank }
	misuse(t, []string{"Admit", "Grant", "Abort", "Notify", "Reap"}, []string{"none", "admitted", "granted", "read early", "ended"}, `
               Admit            Grant            Abort   Notify  Reap
none           ok/invalid       unknown/unknown  ok/ok   ok/ok   ok/ok
admitted       invalid/invalid  ok/invalid       ok/ok   ok/ok   ok/ok
granted        invalid/invalid  invalid/invalid  ok/ok   ok/ok   ok/ok
read early     invalid/invalid  ok/unknown       ok/ok   ok/ok   ok/ok
ended          ok/invalid       unknown/unknown  ok/ok   ok/ok   ok/ok
`, func(t *testing.T, name string) state {
		r := newRank(t, 1)
		if name != "none" {
			r.admit("a", 11, 0)
		}
		if name == "granted" || name == "ended" {
			r.grant(t0, "a", 11, 30)
		}
		if name == "read early" || name == "ended" {
			r.notify(t0, "D", "a:1:11")
		}
		return state{r}
	}, func(s state, method string) error {
		switch method {
		case "Admit":
			return s.Admit(t0, Admission{"a", 11, 0})
		case "Grant":
			return s.Grant(t0, Grant{Request: "a", Nonce: 11, TTL: time.Minute})
		case "Abort":
			return s.Abort(t0, Key{"a", 11})
		case "Notify":
			return s.Notify(t0, "D", []byte("a:1:11"))
		default:
			s.Reap(t0)
			return nil
		}
	}, func(s state) string { return fmt.Sprint(s.Stats(), s.cells, s.Len()) })
}

func TestEveryCallInEveryStateOfAPull(t *testing.T) {
	type state struct {
		*Pulls
		batch CheckBatch
	}
	misuse(t, []string{"Start", "BlocksRead", "Checked", "Cancel", "Fail"}, []string{"none", "reading", "due", "checking", "cancelled", "failed", "finished"}, `
               Start      BlocksRead       Checked          Cancel           Fail
none           ok/busy    unknown/unknown  unknown/unknown  unknown/unknown  unknown/unknown
reading        busy/busy  ok/unknown       unknown/unknown  ok/ok            ok/ok
due            busy/busy  unknown/unknown  unknown/unknown  ok/unknown       ok/unknown
checking       busy/busy  unknown/unknown  ok/unknown       ok/unknown       ok/unknown
cancelled      busy/busy  ok/unknown       unknown/unknown  ok/ok            ok/ok
failed         busy/busy  ok/unknown       unknown/unknown  ok/ok            ok/ok
finished       ok/busy    unknown/unknown  unknown/unknown  unknown/unknown  unknown/unknown
`, func(t *testing.T, name string) state {
		s := state{Pulls: NewPulls()}
		if name == "none" {
			return s
		}
		start(t, s.Pulls, pullOf("a", 0, 11), 0)
		switch name {
		case "cancelled":
			require.NoError(t, s.Cancel("a"))
		case "failed":
			require.NoError(t, s.Fail("a", ErrTimeout))
		case "due", "checking", "finished":
			readAll(t, s.Pulls, "a", 0)
		}
		if name == "checking" || name == "finished" {
			s.batch = s.NextChecks()[0]
		}
		if name == "finished" {
			require.NoError(t, s.Checked(s.batch, []int64{11}, nil))
		}
		return s
	}, func(s state, method string) error {
		switch method {
		case "Start":
			return s.Start(pullOf("a", 0, 11), []int{0})
		case "BlocksRead":
			return s.BlocksRead("a", 0, nil)
		case "Checked":
			return s.Checked(s.batch, []int64{11}, nil)
		case "Cancel":
			return s.Cancel("a")
		default:
			return s.Fail("a", ErrTimeout)
		}
	}, func(s state) string { return fmt.Sprint(s.Len(), len(s.due), len(s.posted), len(s.finished)) })
}

func TestEveryCallInEveryStateOfARequest(t *testing.T) {
	own, from := &Params{DoRemoteDecode: true}, offer("r", 7)
	blocks := [][]int{{1}}
	misuse(t, []string{"OnNewRequest", "OnBlocks", "OnBlocks own", "Preempted", "Finished", "Revoke", "Hold", "Unhold", "Group"},
		[]string{"none", "running", "pinned", "revoked", "aborted", "queued", "allocated", "reading", "received", "given up", "held"}, `
               OnNewRequest  OnBlocks   OnBlocks own  Preempted  Finished  Revoke           Hold       Unhold           Group
none           ok/ok         ok/ok      ok/ok         ok/ok      ok/ok     unknown/unknown  ok/busy    unknown/unknown  unknown/unknown
running        ok/ok         ok/ok      ok/ok         ok/ok      ok/ok     busy/busy        ok/busy    unknown/unknown  ok/invalid
pinned         ok/ok         ok/ok      ok/ok         ok/ok      ok/ok     ok/ok            ok/busy    unknown/unknown  ok/invalid
revoked        ok/ok         ok/ok      ok/ok         ok/ok      ok/ok     ok/ok            ok/busy    unknown/unknown  ok/invalid
aborted        ok/ok         ok/ok      ok/ok         ok/ok      ok/ok     ok/ok            ok/busy    unknown/unknown  ok/invalid
queued         ok/ok         ok/ok      ok/ok         ok/ok      ok/ok     unknown/unknown  busy/busy  unknown/unknown  unknown/unknown
allocated      busy/busy     ok/ok      ok/ok         ok/ok      ok/ok     unknown/unknown  busy/busy  unknown/unknown  unknown/unknown
reading        busy/busy     busy/busy  ok/ok         busy/busy  ok/ok     unknown/unknown  busy/busy  unknown/unknown  unknown/unknown
received       busy/busy     ok/ok      ok/ok         ok/ok      ok/ok     unknown/unknown  busy/busy  unknown/unknown  unknown/unknown
given up       busy/busy     busy/busy  ok/ok         busy/busy  ok/ok     unknown/unknown  busy/busy  unknown/unknown  unknown/unknown
held           busy/busy     busy/busy  ok/ok         ok/ok      ok/ok     unknown/unknown  busy/busy  ok/unknown       unknown/unknown
`, func(t *testing.T, name string) *Scheduler {
			s := newReader(t, 1)
			do := func(err error) { require.NoError(t, err) }
			finish := func(st Status) {
				_, _, err := s.RequestFinished(t0, "q", st, blocks, 16)
				do(err)
			}
			switch name {
			case "running", "pinned", "revoked", "aborted":
				do(s.OnBlocksAllocated(t0, "q", own, blocks))
				s.BuildPlan(t0)
				switch name {
				case "pinned":
					finish(StatusLengthCapped)
				case "revoked":
					finish(StatusLengthCapped)
					do(s.Revoke(t0, "q"))
				case "aborted":
					finish(StatusAborted)
				}
			case "queued", "allocated", "reading", "received", "given up":
				do(s.OnNewRequest(t0, "q", from))
				if name != "queued" {
					do(s.OnBlocksAllocated(t0, "q", from, blocks))
				}
				if name == "reading" || name == "received" || name == "given up" {
					s.BuildPlan(t0)
				}
				if name == "received" {
					s.OnResults(t0, []Result{{Received: []string{"q"}}})
				}
				if name == "given up" {
					finish(StatusAborted)
				}
			case "held":
				do(s.Hold(t0, "q", from))
			}
			return s
		}, func(s *Scheduler, method string) error {
			switch method {
			case "OnNewRequest":
				return s.OnNewRequest(t0, "q", from)
			case "OnBlocks":
				return s.OnBlocksAllocated(t0, "q", from, blocks)
			case "OnBlocks own":
				return s.OnBlocksAllocated(t0, "q", own, blocks)
			case "Preempted":
				return s.Preempted(t0, "q")
			case "Finished":
				_, _, err := s.RequestFinished(t0, "q", StatusAborted, blocks, 16)
				return err
			case "Revoke":
				return s.Revoke(t0, "q")
			case "Hold":
				return s.Hold(t0, "q", from)
			case "Unhold":
				return s.Unhold(t0, "q", true)
			default:
				return s.Group(t0, "q")
			}
		}, func(s *Scheduler) string {
			return fmt.Sprint(s.Stats(), len(s.lives), len(s.fetches), len(s.queue.admit), len(s.queue.grant), len(s.queue.abort), len(s.queue.read), len(s.queue.release), len(s.queue.cancel))
		})
}

// Ids of every kind that cannot be, at every method that takes one.
func TestBadIDsAreRefusedEverywhere(t *testing.T) {
	huge := strings.Repeat("x", 1<<20)
	own, from := &Params{DoRemoteDecode: true}, offer("r", 7)
	blocks := [][]int{{1}}
	for _, id := range []string{"", "no such", huge} {
		s, r, p := newReader(t, 1), newRank(t, 1), NewPulls()
		stats, leases := s.Stats(), r.Stats()
		for name, want := range map[string]struct {
			err  error
			want string // for "", for one that is not known, for an enormous one
		}{
			"Hold":              {s.Hold(t0, id, nil), "invalid invalid invalid"},
			"Unhold":            {s.Unhold(t0, id, true), "unknown unknown unknown"},
			"Revoke":            {s.Revoke(t0, id), "unknown unknown unknown"},
			"Group":             {s.Group(t0, "q", id), "unknown unknown unknown"},
			"Preempted":         {s.Preempted(t0, id), "ok ok ok"},
			"Grant":             {r.Grant(t0, Grant{Request: id, Nonce: 11, TTL: time.Second}), "unknown unknown unknown"},
			"Cancel":            {p.Cancel(id), "unknown unknown unknown"},
			"Fail":              {p.Fail(id, ErrTimeout), "unknown unknown unknown"},
			"BlocksRead":        {p.BlocksRead(id, 0, nil), "unknown unknown unknown"},
			"ValidateRequestID": {ValidateRequestID(id, 0), "invalid ok invalid"},
		} {
			require.Equal(t, strings.Fields(want.want)[map[string]int{"": 0, "no such": 1, huge: 2}[id]], answer(t, want.err), "%s(%.10q)", name, id)
			if want.err != nil {
				require.Less(t, len(want.err.Error()), 1<<20+1000, name)
			}
		}
		require.Equal(t, stats, s.Stats())
		require.Equal(t, leases, r.Stats())
		_, delayed, err := s.RequestFinished(t0, id, StatusAborted, nil, 0)
		require.NoError(t, err, "one that is not known needs nothing")
		require.False(t, delayed)
		if id == "no such" {
			continue
		}
		requireRefused(t, s.OnNewRequest(t0, id, own), ErrInvalid)
		requireRefused(t, s.OnBlocksAllocated(t0, id, own, blocks), ErrInvalid)
		requireRefused(t, s.OnBlocksAllocated(t0, "q", with(from, func(p *Params) { p.RemoteRequestID = id }), blocks), ErrInvalid)
		requireRefused(t, r.Admit(t0, Admission{id, 11, 0}), ErrInvalid)
		_, _, err = AppendHeartbeat(nil, []Target{{Request: huge}}, 0)
		requireRefused(t, err, ErrInvalid)
		require.Equal(t, stats, s.Stats())
	}
	r := newRank(t, 1)
	r.notify(t0, "D", "HB:"+huge)
	r.notify(t0, huge, huge+":1:5")
	require.EqualValues(t, 1, r.Stats().UnknownRenewals)
	require.EqualValues(t, 1, r.Stats().UnmatchedReadCompletes)
}

func TestBadDurationsAreRefused(t *testing.T) {
	r := newRank(t, 1)
	r.admit("a", 11, 0)
	for _, ttl := range []time.Duration{0, -1, -time.Minute, math.MinInt64, MaxTTL + 1, math.MaxInt64} {
		requireRefused(t, r.Grant(t0, Grant{Request: "a", Nonce: 11, TTL: ttl}), ErrInvalid)
		_, err := NewTable(TableConfig{Extension: ttl})
		requireRefused(t, err, ErrInvalid)
		c := DefaultConfig()
		c.Duration = ttl
		requireRefused(t, c.Validate(), ErrInvalid)
		c = DefaultConfig()
		c.DecoderTTL = ttl
		requireRefused(t, c.Validate(), ErrInvalid)
		_, err = NewScheduler(SchedulerConfig{Config: c, Engine: "P", Blocks: 1})
		requireRefused(t, err, ErrInvalid)
	}
	_, granted := r.NextDeadline()
	require.False(t, granted)
	r.grant(t0, "a", 11, MaxTTL.Seconds())
	require.Zero(t, Config{}.Interval())
	require.Zero(t, Config{}.Extension())
	require.Negative(t, Config{Duration: -time.Minute}.Extension(), "which no table takes")
}

// An extension that is shorter than the interval loses leases between two
// heartbeats, but shortens none. Config derives both from one duration, so only a
// TableConfig of its own can have it.
func TestAShortExtensionShortensNothing(t *testing.T) {
	r := newRank(t, 1, func(c *TableConfig) { c.Extension = time.Second })
	r.admit("a", 11, 0)
	r.grant(t0, "a", 11, 7)
	r.notify(at(5), "D", "HB:a")
	require.Equal(t, at(7), r.deadline())
	r.notify(at(6.5), "D", "HB:a")
	require.Equal(t, at(7.5), r.deadline())
	require.Equal(t, 1, r.Reap(at(10)))
	for d := time.Millisecond; d < MaxTTL; d = d*3/2 + 1 {
		c := Config{Duration: d}
		require.Less(t, c.Interval(), c.Extension(), d)
		require.Positive(t, c.Interval(), d)
	}
}

// Numbers that JSON can hold and a lease cannot.
func TestNumbersThatOverflowAreRefused(t *testing.T) {
	for _, v := range []string{"NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9223372036854775808", "18446744073709551616", `"NaN"`, `"1e400"`, "9007199254740993"} {
		for _, key := range []string{pSlot, pNonce, pPort, pTPSize, pNumTokens, pTTL} {
			p := Params{RemoteHost: "kept"}
			err := p.UnmarshalJSON([]byte(`{"` + key + `":` + v + `}`))
			requireRefused(t, err, ErrInvalid)
			require.Equal(t, Params{RemoteHost: "kept"}, p)
		}
		for _, key := range configKeys {
			_, err := ParseConfig([]byte(`{"` + key + `":` + v + `}`))
			requireRefused(t, err, ErrInvalid)
		}
	}
	for _, f := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		_, err := Params{RemoteBlocksExpiry: &f}.MarshalJSON()
		requireRefused(t, err, ErrInvalid)
	}
	for _, nonce := range []string{"9007199254740992", "9007199254740993", "9223372036854775807", "99999999999999999999"} {
		r := newRank(t, 1)
		r.admit("a", 11, 0)
		_ = r.Notify(t0, "D", []byte("a:1:"+nonce)) // another message, or none
		require.Equal(t, 1, r.Len(), nonce)
	}
	_, _, err := AppendSlotHeartbeat(nil, []Target{{"a", 0, MaxNonce + 1}}, 0)
	requireRefused(t, err, ErrInvalid)
}

// A deadline that is no number has passed.
func TestAnExpiryThatIsNoNumberHasPassed(t *testing.T) {
	var c ClockOffset
	require.NoError(t, c.Add(t0, t0, 100))
	check := func(f float64) error {
		return c.Check(t0, Pull{Request: "q", LocalBlocks: [][]int{{1}}, Expiry: &f})
	}
	requireRefused(t, check(math.NaN()), ErrExpired)
	requireRefused(t, check(math.Inf(-1)), ErrExpired)
	require.NoError(t, check(math.Inf(1)))
	require.NoError(t, check(math.MaxFloat64))
}

// The eight targets that are renewed at once are renewed each by itself.
func TestASlotHeartbeatOfAnyLengthRenewsWhatItNames(t *testing.T) {
	const n = 40
	for length := 1; length <= 25; length++ {
		for bad := -1; bad < length; bad++ {
			for kind, spoil := range map[string]func(*Target){
				"nonce": func(tg *Target) { tg.Nonce++ }, "slot": func(tg *Target) { tg.Slot = n }, "far": func(tg *Target) { tg.Slot = math.MaxInt32 }, "free": func(tg *Target) { tg.Slot = n - 1 },
			} {
				r := newRank(t, n)
				var targets []Target
				for i := range length {
					id := fmt.Sprint(i)
					r.admit(id, int64(i+100), i)
					r.grant(t0, id, int64(i+100), 30)
					targets = append(targets, Target{id, i, int64(i + 100)})
				}
				stale := int64(0)
				if bad >= 0 {
					spoil(&targets[bad])
					stale = 1
				}
				msg, _, err := AppendSlotHeartbeat(nil, targets, 0)
				require.NoError(t, err)
				r.notify(at(20), "D", string(msg))
				st := r.Stats()
				if st.Renewals != int64(length)-stale || st.StaleRenewals != stale {
					require.Failf(t, "counts", "%d targets, %s of %d bad: %+v", length, kind, bad, st)
				}
				for i := range length {
					want := int64(40 * time.Second)
					if i == bad {
						want = int64(30 * time.Second)
					}
					if got := r.hot[i].deadline; got != want {
						require.Failf(t, "deadline", "%d targets, %s of %d bad: target %d has %d", length, kind, bad, i, got)
					}
				}
			}
		}
	}
}
