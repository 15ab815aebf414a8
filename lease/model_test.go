package lease

import (
	"fmt"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

type drawn struct{ *rapid.T }

func (d drawn) choose(n int, what string) int { return rapid.IntRange(0, n-1).Draw(d.T, what) }

// `make soak-lease` runs the tests with Model in their name for longer.

// The properties of protocol-check.md hold in any order of events. D6; cases.md 1, 7, 8, 12.
func TestModelKeepsItsPropertiesInAnyOrder(t *testing.T) {
	steps := 0
	rapid.Check(t, func(t *rapid.T) {
		w, v := play(drawn{t}, 1500, "")
		if v != nil {
			t.Fatal(v)
		}
		steps += w.steps
	})
	t.Logf("%d steps", steps)
}

// The same with seeds, longer, and with proof that the runs are not vacuous: over
// a million steps that did something, and enough of each kind.
func TestModelKeepsItsPropertiesInLongRuns(t *testing.T) {
	worlds, atLeast, each := 4000, 2_000_000, 200
	if testing.Short() {
		worlds, atLeast, each = worlds/16, atLeast/16, 1
	}
	steps := 0
	seen := map[string]int{}
	for seed := range uint64(worlds) {
		w, v := play(seeded{rand.New(rand.NewPCG(seed, 0))}, 3000, "")
		require.Nil(t, v, "seed %d", seed)
		steps += w.steps
		for k, n := range w.seen {
			seen[k] += n
		}
	}
	t.Logf("%d steps, %v", steps, seen)
	require.Greater(t, steps, atLeast)
	for _, k := range []string{"received", "failed lapsed", "failed unverifiable", "failed transfer", "failed timeout", "exported", "preempted", "revoked",
		"refused", "elsewhere", "ended read", "ended expired", "ended aborted", "full hits", "owner restarts", "reader restarts"} {
		require.Greater(t, seen[k], each, k)
	}
}

// naiveTable is the owner's side of a rank without slots, indices or a heap.
type naiveTable struct {
	chooser
	r    *rank
	t    failer
	now  time.Time
	list []*naiveLife
	next int64
	turn int
}

type failer interface {
	Fatalf(string, ...any)
	Helper()
}

type naiveLife struct {
	Key
	slot     int
	granted  bool
	turn     int       // how many were granted before
	since    time.Time // of its grant
	fixed    bool
	deadline time.Time
	limit    time.Time
	ended    Reason
}

func (n *naiveTable) pick() *naiveLife {
	if len(n.list) == 0 {
		return nil
	}
	return n.list[max(0, len(n.list)-1-n.choose(8, "life"))]
}

func (n *naiveTable) renew(l *naiveLife) {
	if l.ended == 0 && l.granted && !l.fixed {
		d := n.now.Add(20 * time.Second)
		if d.After(l.limit) {
			d = l.limit
		}
		if d.After(l.deadline) {
			l.deadline = d
		}
	}
}

func (n *naiveTable) act() {
	switch n.choose(9, "action") {
	case 0, 1:
		slot := n.choose(4, "slot") - 1
		for _, l := range n.list {
			if l.ended == 0 && l.slot == slot {
				slot = NoSlot
			}
		}
		n.next++
		l := &naiveLife{Key: Key{fmt.Sprint("r", n.choose(3, "id")), n.next + 5000}, slot: slot}
		n.must(n.r.Admit(n.now, Admission{l.Request, l.Nonce, slot}))
		n.list = append(n.list, l)
	case 2, 3:
		if l := n.pick(); l != nil && l.ended == 0 && !l.granted {
			ttl := time.Duration(1+n.choose(60, "ttl")) * time.Second
			l.granted, l.fixed = true, n.choose(5, "fixed") == 0
			n.turn++
			l.since, l.turn = n.now, n.turn
			l.deadline, l.limit = n.now.Add(ttl), n.now.Add(50*time.Second)
			if l.deadline.After(l.limit) {
				l.deadline = l.limit
			}
			n.must(n.r.Grant(n.now, Grant{l.Request, l.Nonce, ttl, true, l.fixed}))
		}
	case 4:
		if l := n.pick(); l != nil {
			n.must(n.r.Abort(n.now, l.Key))
			if l.ended == 0 {
				l.ended = ReasonAborted
			}
		}
	case 5:
		if p := n.pick(); p != nil {
			n.must(n.r.Notify(n.now, "D", []byte("HB:x,"+p.Request)))
			for _, l := range n.list {
				if l.Request == p.Request {
					n.renew(l)
				}
			}
		}
	case 6:
		if l := n.pick(); l != nil && l.slot != NoSlot {
			msg, _, err := AppendSlotHeartbeat(nil, []Target{{l.Request, l.slot, l.Nonce}}, 0)
			n.must(err)
			n.must(n.r.Notify(n.now, "D", msg))
			n.renew(l)
		}
	case 7:
		if l := n.pick(); l != nil {
			n.must(n.r.Notify(n.now, "D", AppendReadComplete(nil, l.Request, 1, l.Nonce)))
			if l.ended == 0 {
				l.ended = ReasonRead
			}
		}
	case 8:
		n.now = n.now.Add(time.Duration(n.choose(12, "seconds")-1) * time.Second)
		n.r.Reap(n.now)
		for _, l := range n.list {
			if l.ended == 0 && l.granted && !l.deadline.After(n.now) {
				l.ended = ReasonExpired
			}
		}
	}
}

func (n *naiveTable) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatalf("%v", err)
	}
}

// compare returns what differs, "" if nothing does.
func (n *naiveTable) compare() string {
	var want []Ended
	cells := make([]int64, len(n.r.cells))
	live := 0
	var first time.Time
	var oldest *naiveLife
	freeSlots := int64(len(cells))
	n.list = slices.DeleteFunc(n.list, func(l *naiveLife) bool {
		if l.ended != 0 {
			want = append(want, Ended{l.Request, l.Nonce, l.ended})
			return true
		}
		live++
		if l.slot != NoSlot {
			cells[l.slot] = l.Nonce
			freeSlots--
		}
		if l.granted && (oldest == nil || l.turn < oldest.turn) {
			oldest = l
		}
		if l.granted && (first.IsZero() || l.deadline.Before(first)) {
			first = l.deadline
		}
		return false
	})
	got := n.r.ends()
	byNonce := func(a, b Ended) int { return int(a.Nonce - b.Nonce) }
	slices.SortFunc(want, byNonce)
	slices.SortFunc(got, byNonce)
	due, _ := n.r.NextDeadline()
	age := time.Duration(0)
	if oldest != nil {
		age = max(n.now.Sub(oldest.since), 0)
	}
	st := n.r.Stats()
	switch {
	case !slices.Equal(want, got):
		return fmt.Sprintf("ended %v, want %v", got, want)
	case !slices.Equal(cells, n.r.cells):
		return fmt.Sprintf("slots %v, want %v", n.r.cells, cells)
	case live != n.r.Len():
		return fmt.Sprintf("%d lives, want %d", n.r.Len(), live)
	case !due.Equal(first):
		return fmt.Sprintf("next deadline %v, want %v", due, first)
	case st.OldestAge != age:
		return fmt.Sprintf("oldest age %v, want %v", st.OldestAge, age)
	case st.FreeSlots != freeSlots:
		return fmt.Sprintf("%d free slots, want %d", st.FreeSlots, freeSlots)
	}
	return ""
}

func compareTables(t testing.TB, f failer, c chooser, actions int) string {
	n := &naiveTable{chooser: c, t: f, now: t0, r: newRank(t, 3, func(c *TableConfig) { c.MaxLife = 50 * time.Second })}
	for range actions {
		n.act()
		if diff := n.compare(); diff != "" {
			return diff
		}
	}
	return ""
}

// The table agrees with a naive one after every event.
func TestModelOfATableAgreesWithIt(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		if diff := compareTables(t, rt, drawn{rt}, 300); diff != "" {
			rt.Fatal(diff)
		}
	})
}

// The models above are worth what they catch: in a build with the tag
// leasefaults each fault of faults.go must be caught, and by a property that it
// breaks.
func TestTheModelsCatchEveryFault(t *testing.T) {
	cmd := exec.Command("go", "test", "-tags", "leasefaults", "-count=1", "-v", "-run", "^TestFault|^TestHarmless", ".")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	var caught []string
	for line := range strings.Lines(string(out)) {
		if name, ok := strings.CutPrefix(line, "caught "); ok {
			caught = append(caught, strings.Fields(name)[0])
			t.Log(strings.TrimSpace(line))
		}
	}
	require.GreaterOrEqual(t, len(caught), 23)
}
