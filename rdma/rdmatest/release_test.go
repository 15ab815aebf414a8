package rdmatest_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
)

// The release of a lease that will not be read names its nonce, too: one that comes late leaves the next life of the id alone.
// cases.md 8, 11
func TestLateReleaseLeavesTheNextLifeOfTheIDAlone(t *testing.T) {
	d := newDuo(t)
	d.net.HoldNotifications(true)
	p := d.owner.publish("req", 7, 3)
	d.reader.arrive("local", p)
	_, _, err := d.reader.sched.RequestFinished(*d.now, "local", lease.StatusAborted, nil, 0)
	require.NoError(t, err)
	d.reader.step()
	require.Len(t, d.net.Messages(), 1)
	require.Equal(t, fmt.Sprintf("req:1:%d", p.Lease.Nonce), string(d.net.Messages()[0].Payload()))
	d.pass(31)
	d.owner.step()
	require.Equal(t, lease.ReasonExpired, d.owner.freed["req"])
	d.owner.publish("req", 8, 3)
	d.net.HoldNotifications(false)
	d.owner.step()
	require.NotContains(t, d.owner.freed, "req")
	require.EqualValues(t, 1, d.owner.ranks[0].w.Stats().Leases.StaleReadCompletes)
}
