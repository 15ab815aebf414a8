package rdmatest_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
)

// A step in which nothing happens allocates nothing, whatever is held, under way, or waiting for room.
func TestAStepWithoutNewsAllocatesNothing(t *testing.T) {
	d := newDuo(t, caps(8, 0))
	step := func(e *engine) func() {
		w := e.ranks[0].w
		return func() {
			res, err := w.Step(*d.now, e.sched.BuildPlan(*d.now))
			require.NoError(t, err)
			e.sched.OnResults(*d.now, []lease.Result{res})
		}
	}
	measure := func(what string) {
		t.Helper()
		require.Zero(t, testing.AllocsPerRun(20, step(d.owner)), "%s: owner", what)
		require.Zero(t, testing.AllocsPerRun(20, step(d.reader)), "%s: reader", what)
	}
	measure("nothing there")
	d.net.HoldReads(true)
	for i := range 10 {
		id := fmt.Sprint("req-", i)
		d.reader.pull(id, d.owner.publish(id, uint64(i+10), i), i)
	}
	d.reader.step()
	require.Len(t, reading(d.reader), 8)
	d.reader.step()
	measure("READs under way")
}
