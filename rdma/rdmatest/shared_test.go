package rdmatest_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

// E6: a second request with the same params that comes while the first one reads is read as well.
func TestARequestThatComesWhileAnotherReadsItsLeaseIsRead(t *testing.T) {
	d := newDuo(t)
	d.net.HoldReads(true)
	p := d.owner.publish("req", 7, 3)
	d.reader.pull("a", p, 5)
	d.reader.step()
	d.reader.arrive("b", p)
	d.reader.step()
	d.held(0, false).Deliver()
	d.reader.step()
	d.held(0, true).Deliver()
	d.reader.step()
	d.owner.step()
	require.True(t, d.reader.ran["a"])
	require.NotContains(t, d.owner.freed, "req", "b needs it")
	d.net.HoldReads(false)
	d.pass(25)
	d.reader.step()
	d.owner.step()
	d.pass(15)
	d.owner.step()
	require.NotContains(t, d.owner.freed, "req", "and renews it")
	require.NoError(t, d.reader.sched.OnBlocksAllocated(*d.now, "b", p, [][]int{{6}}))
	until(t, "b", func() bool { return d.reader.ran["b"] || failure(d.reader, "b") != nil }, d.reader)
	require.NoError(t, failure(d.reader, "b"))
	require.Zero(t, d.reader.wrong(7, 6))
	d.owner.step()
	require.Equal(t, lease.ReasonRead, d.owner.freed["req"])
}

// E3: a read-complete without a nonce that comes late does not end the next life of its id before that is read, so that no
// reader gets another request's blocks, whether it verifies or not.
func TestALateReadCompleteWithoutANonceFreesNothing(t *testing.T) {
	for _, v := range []lease.Verification{lease.VerifyAll, lease.VerifyOffered, lease.VerifyNone} {
		t.Run(v.String(), func(t *testing.T) {
			slots := lease.NoSlot
			if v == lease.VerifyAll {
				slots = 4
			}
			d := newDuo(t, func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.Verification, s.Slots = v, slots })
			d.owner.publish("req", 7, 3)
			d.pass(31)
			d.owner.step()
			require.Equal(t, lease.ReasonExpired, d.owner.freed["req"])
			late := func() {
				r := d.reader.ranks[0].f
				require.NoError(t, r.Notify(d.owner.ranks[0].f.Name(), lease.AppendReadComplete(nil, "req", 1, 0)))
				d.owner.step()
			}
			late()
			require.NoError(t, d.owner.sched.OnBlocksAllocated(*d.now, "req", &lease.Params{DoRemoteDecode: true}, [][]int{{4}}))
			d.owner.step()
			late() // while it is prefilled
			d.owner.fill(8, 4)
			second, _, err := d.owner.sched.RequestFinished(*d.now, "req", lease.StatusLengthCapped, [][]int{{4}}, 16)
			require.NoError(t, err)
			delete(d.owner.freed, "req")
			d.owner.step()
			d.owner.step()
			require.NotContains(t, d.owner.freed, "req", "nobody has read it")
			d.reader.pull("local", second, 6)
			until(t, "the read", func() bool { return d.reader.ran["local"] || failure(d.reader, "local") != nil }, d.reader)
			require.NoError(t, failure(d.reader, "local"))
			require.Zero(t, d.reader.wrong(8, 6))
		})
	}
}

// G6: nothing is sent after a lapse, so an owner that hears of the end of a lease that was over has heard it of somebody else.
func TestNothingIsSentAfterALapse(t *testing.T) {
	d := newDuo(t)
	d.reader.step()
	d.owner.step()
	before := d.owner.ranks[0].w.Stats().Leases
	p := d.owner.publish("req", 7, 3)
	d.net.HoldNotifications(true)
	d.reader.pull("local", p, 5)
	d.lapse("req", 8, 3)
	until(t, "the verdict", func() bool { return failure(d.reader, "local") != nil }, d.reader)
	require.ErrorIs(t, failure(d.reader, "local"), lease.ErrLapsed)
	d.reader.over("local")
	d.reader.step()
	for _, m := range d.net.Messages() {
		m.Deliver()
	}
	d.owner.step()
	after := d.owner.ranks[0].w.Stats().Leases
	require.Equal(t, before.ReadCompletes, after.ReadCompletes)
	require.Equal(t, before.StaleReadCompletes+before.DroppedReadCompletes, after.StaleReadCompletes+after.DroppedReadCompletes)
}

// E11: a reader that cannot read an owner, for its hash, leaves the lease to another that can.
func TestAReaderThatIsRefusedLeavesTheLeaseToAnother(t *testing.T) {
	d := newDuo(t)
	stranger := newEngine(t, d.net, d.now, "stranger", func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) { w.Compatibility = "other" })
	p := d.owner.publish("req", 7, 3)
	stranger.pull("local", p, 5)
	until(t, "the refusal", func() bool { return failure(stranger, "local") != nil }, stranger)
	require.ErrorIs(t, failure(stranger, "local"), rdma.ErrCompatibility)
	_, _, err := stranger.sched.RequestFinished(*d.now, "local", lease.StatusError, nil, 0)
	require.NoError(t, err)
	stranger.step()
	stranger.step()
	d.owner.step()
	require.NotContains(t, d.owner.freed, "req")
	d.reader.pull("again", p, 5)
	until(t, "the read", func() bool { return d.reader.ran["again"] || failure(d.reader, "again") != nil }, d.reader)
	require.NoError(t, failure(d.reader, "again"))
	require.Zero(t, d.reader.wrong(7, 5))
}

// E8: a turn whose lease fields got lost is not read unverified from an owner that has slots, and is from one without.
func TestATurnWithoutItsLeaseIsReadFromOwnersWithoutSlotsAlone(t *testing.T) {
	for name, slots := range map[string]int{"with slots": 4, "without": lease.NoSlot} {
		t.Run(name, func(t *testing.T) {
			d := newDuo(t)
			decoder := newEngine(t, d.net, d.now, "decoder", func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.Slots = slots })
			reader := newEngine(t, d.net, d.now, "prefiller", func(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) {
				s.Bidirectional, s.Epoch = true, rdma.Epoch()
			})
			p := decoder.publish("turn", 7, 3)
			p.DoRemotePrefill, p.DoRemoteDecode, p.Lease = false, true, nil
			reader.pull("local", p, 5)
			until(t, "the verdict", func() bool { return reader.ran["local"] || failure(reader, "local") != nil }, reader)
			if slots == lease.NoSlot {
				require.NoError(t, failure(reader, "local"))
				require.Zero(t, reader.wrong(7, 5))
			} else {
				require.ErrorIs(t, failure(reader, "local"), lease.ErrUnverifiable)
			}
		})
	}
}
