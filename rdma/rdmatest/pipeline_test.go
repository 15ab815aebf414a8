package rdmatest_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// reading lists the block READs that a network holds, each by its first local block, in the order posted.
func reading(e *engine) (first []int) {
	for _, r := range e.net.Reads() {
		if r.Bytes()%blockLen == 0 {
			first = append(first, firstBlock(e, r))
		}
	}
	return first
}

func firstBlock(e *engine, r *rdmatest.Read) int {
	local, _ := r.Descs()
	return int(local[0].Addr-e.ranks[0].mem.Addr()) / blockLen
}

// deliver ends the block READ into a local block.
func deliver(t *testing.T, e *engine, block int) {
	t.Helper()
	for _, r := range e.net.Reads() {
		if r.Bytes()%blockLen == 0 && firstBlock(e, r) == block {
			require.True(t, r.Deliver())
			return
		}
	}
	t.Fatalf("no READ into block %d", block)
}

// deliverChecks ends every slot READ.
func deliverChecks(t *testing.T, e *engine) {
	t.Helper()
	for _, r := range e.net.Reads() {
		if r.Bytes()%blockLen != 0 {
			require.True(t, r.Deliver())
		}
	}
}

func caps(reads int, bytes int64) setting {
	return func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) {
		w.MaxReadsPerPeer, w.MaxBytesPerPeer = reads, bytes
	}
}

const requestLen = layers * blockLen // bytes of a request of one block

// All pulls arrive at once, and never more than the cap are read, in order of arrival.
func TestReadsOfOnePeerStartInOrderOfArrivalUpToTheCap(t *testing.T) {
	d := newDuo(t, caps(3, 0))
	d.net.HoldReads(true)
	for i := range 10 {
		id := fmt.Sprint("req-", i)
		d.reader.pull(id, d.owner.publish(id, uint64(i+10), i), i)
	}
	d.reader.step()
	require.Equal(t, []int{0, 1, 2}, reading(d.reader))
	require.Equal(t, 7, d.reader.ranks[0].w.Stats().Waiting)
	require.Equal(t, 10, d.reader.ranks[0].w.Stats().Pulls)
	busy, moved := d.reader.ranks[0].w.Busy()
	require.True(t, busy)
	require.Equal(t, *d.now, moved)
	started := 3
	for ended, next := range []struct {
		end  int
		then []int
	}{
		{1, []int{0, 2, 3}}, // not the first one: each end makes room for one
		{3, []int{0, 2, 4}},
		{0, []int{2, 4, 5}},
		{2, []int{4, 5, 6}},
		{6, []int{4, 5, 7}},
		{4, []int{5, 7, 8}},
		{5, []int{7, 8, 9}},
		{7, []int{8, 9}},
		{8, []int{9}},
		{9, nil},
	} {
		deliver(t, d.reader, next.end)
		d.reader.step()
		require.Equal(t, next.then, reading(d.reader), "after block %d", next.end)
		started = min(started+1, 10)
		require.EqualValues(t, 1+started, d.reader.ranks[0].w.Stats().Reads)
		d.reader.step()
		require.Equal(t, next.then, reading(d.reader), "one end, one start")
		deliverChecks(t, d.reader)
		d.reader.step()
		require.True(t, d.reader.ran[fmt.Sprint("req-", next.end)])
		require.Zero(t, d.reader.wrong(uint64(next.end+10), next.end))
		require.Len(t, d.reader.ran, ended+1)
	}
	require.Empty(t, d.reader.failed)
	for i := range 10 {
		d.reader.over(fmt.Sprint("req-", i))
	}
	d.reader.step()
	d.owner.step()
	clean(t, d.owner, d.reader)
}

// The bytes are capped exactly; a request that does not fit waits and is not overtaken; one larger than the cap is read alone.
func TestReadsOfOnePeerAreCappedInBytes(t *testing.T) {
	d := newDuo(t, caps(0, 3*requestLen))
	d.net.HoldReads(true)
	at := 0
	for i, n := range []int{1, 1, 2, 1, 5, 1} { // first blocks 0, 1, 2, 4, 5, 10
		var ids []int
		for range n {
			ids = append(ids, at)
			at++
		}
		id := fmt.Sprint("req-", i)
		d.reader.pull(id, d.owner.publish(id, uint64(i+10), ids...), ids...)
	}
	d.reader.step()
	for _, step := range []struct {
		end  int
		then []int
	}{
		{-1, []int{0, 1}}, // two more blocks are one too many, and the one-block request behind them waits as well
		{1, []int{0, 2}},  // 1 + 2 blocks: the cap exactly
		{0, []int{2, 4}},  // 2 + 1
		{4, []int{2}},     // five blocks never fit
		{2, []int{5}},     // so they are read alone
		{5, []int{10}},    // and nothing beside them
		{10, nil},
	} {
		if step.end >= 0 {
			deliver(t, d.reader, step.end)
			d.reader.step()
			deliverChecks(t, d.reader)
			d.reader.step()
		}
		require.ElementsMatch(t, step.then, reading(d.reader), "after block %d", step.end)
	}
	require.Len(t, d.reader.ran, 6)
	require.Empty(t, d.reader.failed)
}

// vllm#48633, cases.md 46: an owner that does not deliver fills its own share only.
func TestFullPeerHoldsUpNoOther(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network := rdmatest.NewNetwork()
	slow, quick := newEngine(t, network, &start, "slow"), newEngine(t, network, &start, "quick")
	reader := newEngine(t, network, &start, "reader", caps(1, 0))
	for i := range 2 {
		id := fmt.Sprint("slow-", i)
		reader.pull(id, slow.publish(id, uint64(i+10), i), i)
	}
	reader.connected(1)
	until(t, "the first READ", func() bool { return reader.ran["slow-0"] && reader.ran["slow-1"] }, reader)
	slow.ranks[0].f.Stop()
	for i := 2; i < 6; i++ {
		id := fmt.Sprint("slow-", i)
		p := slow.params(id, i)
		reader.pull(id, p, i)
	}
	for i := range 4 {
		id := fmt.Sprint("quick-", i)
		reader.pull(id, quick.publish(id, uint64(i+20), i), i+8)
	}
	until(t, "the other's READs", func() bool { return len(reader.ran) == 6 }, reader)
	for i := range 4 {
		require.Zero(t, reader.wrong(uint64(i+20), i+8))
	}
	require.Equal(t, []int{2}, reading(reader))
	require.Equal(t, 3, reader.ranks[0].w.Stats().Waiting)
	slow.ranks[0].f.Continue()
	until(t, "all READs", func() bool { return len(reader.ran)+len(reader.failed) == 10 }, reader)
	require.Len(t, reader.failed, 4, "those leases never were: %v", reader.failed)
	require.ErrorIs(t, failure(reader, "slow-5"), lease.ErrLapsed)
}

// params are those of a lease that the engine never granted: it is stopped, and cannot publish.
func (e *engine) params(id string, block int) *lease.Params {
	c := e.sched.Config()
	return &lease.Params{DoRemotePrefill: true, RemoteBlockIDs: [][]int{{block}}, RemoteEngineID: e.name, RemoteRequestID: id, RemoteHost: c.Host,
		RemotePort: c.Port, TPSize: c.TPSize, Lease: &lease.SlotRef{Slot: block, Nonce: lease.MaxNonce}}
}

// nixl#2047, cases.md 4: the time of a pull runs from its arrival, also while it waits behind others.
func TestDeadlineOfAPullCountsFromItsArrival(t *testing.T) {
	d := newDuo(t, caps(1, 0))
	d.net.HoldReads(true)
	publish := func(id string, block int) {
		d.reader.pull(id, d.owner.publish(id, uint64(block+10), block), block)
		d.reader.step()
	}
	publish("a", 1)
	d.pass(20)
	publish("b", 2)
	d.pass(20)
	publish("c", 3)
	require.Equal(t, []int{1}, reading(d.reader))
	d.pass(20)
	d.owner.step()
	d.reader.step()
	require.ErrorIs(t, failure(d.reader, "a"), lease.ErrTimeout)
	require.True(t, d.reader.failed["a"].Quarantined)
	require.Len(t, d.reader.failed, 1)
	require.Equal(t, []int{1}, reading(d.reader), "a READ that cannot be stopped still fills the share")
	d.pass(19)
	d.owner.step()
	d.reader.step()
	require.Len(t, d.reader.failed, 1)
	d.pass(1)
	d.owner.step()
	d.reader.step()
	require.ErrorIs(t, failure(d.reader, "b"), lease.ErrTimeout)
	require.False(t, d.reader.failed["b"].Quarantined, "nothing was posted")
	deliver(t, d.reader, 1)
	d.reader.step()
	require.True(t, d.reader.settled["a"])
	require.Equal(t, []int{3}, reading(d.reader))
	deliver(t, d.reader, 3)
	d.reader.step()
	deliverChecks(t, d.reader)
	d.reader.step()
	require.True(t, d.reader.ran["c"])
	require.Zero(t, d.reader.wrong(13, 3))
	for _, id := range []string{"a", "b", "c"} {
		d.reader.over(id)
	}
	d.reader.step()
	d.owner.step()
	clean(t, d.owner, d.reader)
}

// vllm#19223, cases.md 11: a pull that is given up while it waits is never read, its blocks are free at once, and the owner is
// told.
func TestPullThatWaitsCanBeGivenUp(t *testing.T) {
	d := newDuo(t, caps(1, 0))
	d.net.HoldReads(true)
	for i, id := range []string{"a", "b", "c"} {
		d.reader.pull(id, d.owner.publish(id, uint64(i+10), i), i)
	}
	d.reader.step()
	require.True(t, d.reader.over("b"), "its blocks are not free before the worker says so")
	d.reader.step()
	require.True(t, d.reader.settled["b"])
	require.Equal(t, 1, d.reader.ranks[0].w.Stats().Waiting)
	d.reader.step()
	d.owner.step()
	require.Equal(t, lease.ReasonRead, d.owner.freed["b"])
	deliver(t, d.reader, 0)
	d.reader.step()
	require.Equal(t, []int{2}, reading(d.reader))
	deliver(t, d.reader, 2)
	d.reader.step()
	deliverChecks(t, d.reader)
	d.reader.step()
	require.Equal(t, map[string]bool{"a": true, "c": true}, d.reader.ran)
	require.Empty(t, d.reader.failed)
	d.reader.over("a")
	d.reader.over("c")
	d.reader.step()
	d.owner.step()
	clean(t, d.owner, d.reader)
}

// vllm#49238, nixl#1986, cases.md 14: the connection breaks under a full queue. What was under way fails; the rest is read over
// the new connection, with its descriptors.
func TestQueueOutlivesTheConnection(t *testing.T) {
	d := newDuo(t, caps(2, 0))
	d.net.HoldReads(true)
	for i := range 6 {
		id := fmt.Sprint("req-", i)
		d.reader.pull(id, d.owner.publish(id, uint64(i+10), i), i)
	}
	d.reader.step()
	require.Equal(t, []int{0, 1}, reading(d.reader))
	d.net.Break(d.owner.ranks[0].f, d.reader.ranks[0].f)
	d.net.HoldReads(false)
	until(t, "all verdicts", func() bool { return len(d.reader.ran)+len(d.reader.failed) == 6 }, d.reader)
	require.Len(t, d.reader.failed, 2)
	for i := range 6 {
		id := fmt.Sprint("req-", i)
		if i < 2 {
			require.ErrorIs(t, failure(d.reader, id), lease.ErrPeerLost)
		} else {
			require.Zero(t, d.reader.wrong(uint64(i+10), i))
		}
	}
}

// vllm#49238, cases.md 14: with the owner dead, every pull in the queue comes to an end.
func TestQueueOfADeadOwnerFails(t *testing.T) {
	d := newDuo(t, caps(2, 0))
	d.net.HoldReads(true)
	for i := range 8 {
		id := fmt.Sprint("req-", i)
		d.reader.pull(id, d.owner.publish(id, uint64(i+10), i), i)
	}
	d.reader.step()
	require.NoError(t, d.owner.side.Close())
	d.owner.ranks[0].f.Kill()
	until(t, "all verdicts", func() bool { return len(d.reader.failed) == 8 }, d.reader)
	for i := range 8 {
		id := fmt.Sprint("req-", i)
		want := lease.ErrHandshake
		if i < 2 {
			want = lease.ErrPeerLost
		}
		require.ErrorIs(t, failure(d.reader, id), want, id)
		d.reader.over(id)
	}
	require.Zero(t, d.reader.ranks[0].w.Stats().Pulls)
	require.Zero(t, d.reader.ranks[0].w.Stats().Waiting)
}

// A request that cannot be read fails when it is the first in the queue, and those behind it are read.
func TestPullThatCannotBeReadDoesNotBlockTheQueue(t *testing.T) {
	d := newDuo(t, caps(1, 0))
	d.net.HoldReads(true)
	for i := range 4 {
		id := fmt.Sprint("req-", i)
		p := d.owner.publish(id, uint64(i+10), i)
		if i == 1 || i == 2 {
			p.RemoteBlockIDs = [][]int{{blocks}}
		}
		d.reader.pull(id, p, i)
	}
	d.reader.step()
	require.Len(t, d.reader.failed, 2)
	require.ErrorIs(t, failure(d.reader, "req-1"), lease.ErrMismatch)
	require.ErrorIs(t, failure(d.reader, "req-2"), lease.ErrMismatch)
	require.Equal(t, []int{0}, reading(d.reader))
	deliver(t, d.reader, 0)
	d.reader.step()
	require.Equal(t, []int{3}, reading(d.reader))
}

// vllm-wire.md 9.11, peer-tests A4.5: of an owner that offers more than the prompt holds, the prompt's own blocks are read, with and
// without a prefix hit. Paired from their ends, the two lists would give the prompt the blocks of what follows it.
func TestPromptThatEndsBeforeTheOffersEndGetsItsOwnBlocks(t *testing.T) {
	d := newDuo(t)
	p := d.owner.publish("req", 7, 0, 1, 2, 3, 4) // 80 tokens
	for name, c := range map[string]struct {
		tokens int
		local  []int
		first  int // place in the request of the first of them
	}{
		"three blocks of five":         {48, []int{5, 6, 7}, 0},
		"the last is not full":         {33, []int{5, 6, 7}, 0},
		"the first is here":            {40, []int{8, 9}, 1},
		"all that is offered":          {80, []int{5, 6, 7, 8, 9}, 0},
		"the end of what is offered":   {0, []int{5, 6}, 3},
		"one token of the first block": {1, []int{5}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			q := *p
			d.reader.arrive(name, &q)
			if c.tokens > 0 {
				require.NoError(t, d.reader.sched.ReadUpTo(name, c.tokens))
			}
			other := "other-" + name // keeps the lease for the next case
			require.NoError(t, d.reader.sched.Hold(*d.now, other, &q))
			require.NoError(t, d.reader.sched.OnBlocksAllocated(*d.now, name, &q, [][]int{c.local}))
			until(t, "the read", func() bool { return d.reader.ran[name] }, d.reader)
			for i, b := range c.local {
				require.Equal(t, d.owner.block(0, 1, c.first+i), d.reader.block(0, 1, b), "block %d", b)
			}
			d.reader.over(name)
			require.NoError(t, d.reader.sched.Unhold(*d.now, other, false))
		})
	}
}
