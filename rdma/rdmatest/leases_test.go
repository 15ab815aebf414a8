package rdmatest_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// vllm#58004, dynamo#10136: what a stuck reader pins is seen on the owner, also when it is much.
func TestNodeListsItsLeases(t *testing.T) {
	const n = 5000 // more than the node looks at in one go
	owner, err := nixlgo.New(nixlgo.Config{Engine: "owner", Layers: 1, Blocks: n + 2, BlockBytes: 8, Fabric: rdmatest.NewNetwork().NewFabric("owner")})
	require.NoError(t, err)
	ran := make(chan error, 1)
	go func() { ran <- owner.Run(t.Context()) }()
	defer func() {
		require.NoError(t, owner.Close())
		require.NoError(t, <-ran)
	}()
	require.Empty(t, owner.Leases())
	pubs := make([]*nixlgo.Publication, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			var err error
			if pubs[i], err = owner.Publish(t.Context(), fmt.Sprint("req", i), []int{i}, 1); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	last, err := owner.Publish(t.Context(), "last", []int{n, n + 1}, 17)
	require.NoError(t, err)
	seen := map[string]nixlgo.Lease{}
	require.Eventually(t, func() bool {
		clear(seen)
		for _, l := range owner.Leases() {
			if !l.Granted {
				return false // the grant leaves with the next step
			}
			seen[l.Request] = l
		}
		return true
	}, 20*time.Second, time.Millisecond)
	require.Len(t, seen, n+1, "each once")
	l := seen["last"]
	require.Equal(t, 2, l.Blocks)
	require.Equal(t, 1, seen["req7"].Blocks)
	require.Equal(t, last.Params().Lease.Slot, l.Slot)
	require.Equal(t, last.Params().Lease.Nonce, l.Nonce)
	require.Positive(t, l.Left)
	require.LessOrEqual(t, l.Left+l.Age, lease.DefaultConfig().Duration)
	require.NoError(t, last.Revoke())
	<-last.Done()
	require.Len(t, owner.Leases(), n)
}

// Ids are as long as the configured notifications carry, on the ranks as in the scheduler.
func TestIDsAsLongAsTheConfiguredNotificationsAreServed(t *testing.T) {
	d := newDuo(t, func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.MaxNotification = 1 << 16 })
	id := strings.Repeat("x", 1<<16-100)
	d.reader.pull(id, d.owner.publish(id, 7, 3), 5)
	until(t, "the read", func() bool { return d.reader.ran[id] }, d.reader)
	d.owner.step()
	require.Equal(t, lease.ReasonRead, d.owner.freed[id])
}
