package nixlgo

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// nixl#2047, cases.md 4: a READ from a stopped peer stays active for ever, and must not keep a core busy as long.
func TestPauseGrowsWithTheTimeThatNothingGotOn(t *testing.T) {
	for waited, want := range map[time.Duration]time.Duration{
		0:                       50 * time.Microsecond,
		3200 * time.Microsecond: 50 * time.Microsecond,
		6400 * time.Microsecond: 100 * time.Microsecond,
		640 * time.Millisecond:  10 * time.Millisecond,
	} {
		require.Equal(t, want, busyPause(waited), waited)
	}
}

func TestAStepOfAnIdleNodeAllocatesNothing(t *testing.T) {
	n, err := New(Config{Layers: 1, Blocks: 1, BlockBytes: 8, Fabric: rdmatest.NewNetwork().NewFabric("idle")})
	require.NoError(t, err)
	defer n.Close()
	require.Zero(t, testing.AllocsPerRun(50, func() { require.NoError(t, n.step(time.Now())) }))
}

// midStep calls f in the middle of each step.
type midStep struct {
	rdma.Fabric
	f func()
}

func (m midStep) Notifications(dst []nixl.Notification) ([]nixl.Notification, error) {
	m.f()
	return m.Fabric.Notifications(dst)
}

// Publish and others wait for a step that they are part of: the first one that begins afterwards.
func TestAWaitForAStepEndsWithTheFirstWholeOne(t *testing.T) {
	var n *Node
	var during <-chan struct{}
	next := func() <-chan struct{} {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.nextStep()
	}
	over := func(done <-chan struct{}) bool {
		select {
		case <-done:
			return true
		default:
			return false
		}
	}
	n, err := New(Config{Layers: 1, Blocks: 1, BlockBytes: 8, Fabric: midStep{rdmatest.NewNetwork().NewFabric("stepped"), func() { during = next() }}})
	require.NoError(t, err)
	defer n.Close()
	before := next()
	require.Equal(t, before, next())
	require.NoError(t, n.step(time.Now()))
	require.True(t, over(before))
	waited := during
	require.False(t, over(waited), "the step had begun before")
	require.NoError(t, n.step(time.Now()))
	require.True(t, over(waited))
}
