package rdmatest_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// listed is an owner that is in a directory, and whose side channel nobody reaches.
func listed(t testing.TB, network *rdmatest.Network, now *time.Time, d rdma.Directory, name string, change ...setting) *engine {
	t.Helper()
	e := newEngine(t, network, now, name, append(change, unreachable)...)
	e.list(d)
	return e
}

// unreachable makes an engine without a side channel: nobody listens at the port in its params.
func unreachable(_ *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.Port = 1 }

func (e *engine) list(d rdma.Directory) {
	e.t.Helper()
	for i, r := range e.ranks {
		require.NoError(e.t, d.Publish(e.t.Context(), e.name, i, r.w.Reply()))
	}
}

func in(d rdma.Directory) setting {
	return func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) { w.Directory = d }
}

// read lets reader pull a request of owner's and returns how that ended.
func read(owner, reader *engine, id string, tag uint64) error {
	owner.t.Helper()
	reader.pull(id, owner.publish(id, tag, 3), 5)
	until(owner.t, "a verdict", func() bool { return reader.ran[id] || failure(reader, id) != nil }, reader)
	err := failure(reader, id)
	if err == nil {
		require.Zero(owner.t, reader.wrong(tag, 5))
	}
	reader.over(id)
	return err
}

// Issue: metadata through a directory as an alternative to the side channel.
func TestEnginesThatAreListedNeedNoSideChannel(t *testing.T) {
	for _, tp := range []int{1, 2} {
		t.Run(fmt.Sprint("tp ", tp), func(t *testing.T) {
			start := time.Unix(1_000_000, 0)
			network, d := rdmatest.NewNetwork(), rdmatest.NewDirectory()
			wide := func(w *rdma.WorkerConfig, s *lease.SchedulerConfig) { s.TPSize = tp; w.KV.Heads = tp }
			owner := listed(t, network, &start, d, "owner", wide)
			reader := newEngine(t, network, &start, "reader", wide, in(d.Session()))
			require.NoError(t, read(owner, reader, "req", 7))
			owner.step()
			require.Equal(t, lease.ReasonRead, owner.freed["req"])
		})
	}
}

// What is not listed is asked for at its side channel, and so is everybody while the directory is down.
func TestSideChannelIsAskedForWhatTheDirectoryDoesNotHave(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network, d := rdmatest.NewNetwork(), rdmatest.NewDirectory()
	quick := func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) { w.HandshakeTimeout = 300 * time.Millisecond }
	reader := newEngine(t, network, &start, "reader", in(d), quick)
	unlisted, other := newEngine(t, network, &start, "unlisted"), newEngine(t, network, &start, "other")
	require.NoError(t, read(unlisted, reader, "req-1", 7))
	require.EqualValues(t, 1, unlisted.side.Stats().Answered)
	d.Stop()
	require.NoError(t, read(other, reader, "req-2", 8))
	// With neither, the error says what was tried.
	lost := newEngine(t, network, &start, "lost", unreachable)
	err := read(lost, reader, "req-3", 9)
	require.ErrorIs(t, err, lease.ErrHandshake)
	require.ErrorContains(t, err, "refused")
	require.ErrorContains(t, err, "directory: engine \"lost\"")
	d.Continue()
}

// "same checks": what a directory answers is refused as what a side channel answers would be, and nothing is loaded. The side
// channel is not asked then.
func TestListingsAreCheckedLikeAnswers(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network, d := rdmatest.NewNetwork(), rdmatest.NewDirectory()
	strict := func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) { w.Compatibility = "ours" }
	same := newEngine(t, network, &start, "owner", strict)
	theirs := newEngine(t, network, &start, "theirs", func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) { w.Compatibility = "theirs" })
	shape := newEngine(t, network, &start, "shape", strict, func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) { w.KV.Attention = "FLASH_ATTN" })
	good := same.ranks[0].w.Reply()
	cut := good[:len(good)-10]
	for name, c := range map[string]struct {
		reply []byte
		want  string
	}{
		"another engine":  {newEngine(t, network, &start, "another", strict).ranks[0].w.Reply(), `serves engine "another", not "owner"`},
		"another hash":    {theirs.ranks[0].w.Reply(), "compatibility hash of the owner is theirs, ours is ours"},
		"another shape":   {[]byte(strings.ReplaceAll(string(shape.ranks[0].w.Reply()), "shape", "owner")), "attn_backend_name is FLASH_ATTN there and CPU_ATTN here"},
		"garbage":         {[]byte("garbage"), "malformed handshake"},
		"cut off":         {cut, "malformed handshake"},
		"with more to it": {append(append([]byte(nil), good...), 0), "malformed handshake"},
		"damaged blob":    {[]byte(strings.Replace(string(good), "rdmatest/1", "rdmatest/9", 1)), "metadata"},
	} {
		t.Run(name, func(t *testing.T) {
			reader := newEngine(t, network, &start, "reader", strict, in(d.Session()))
			require.NoError(t, d.Publish(t.Context(), "owner", 0, c.reply))
			err := read(same, reader, "req-"+name, 7)
			require.ErrorIs(t, err, lease.ErrHandshake)
			require.ErrorContains(t, err, c.want)
			require.Zero(t, reader.ranks[0].w.Stats().Peers)
			require.Zero(t, same.side.Stats().Answered)
			// Once it is right, it works.
			same.list(d)
			start = start.Add(time.Minute)
			require.NoError(t, read(same, reader, "again-"+name, 8))
		})
	}
}

// Issue: metadata is re-read when its revision changes without a delete. An owner that was started anew puts its new metadata over
// the old, and its readers are connected to it before they use it again.
func TestMetadataThatWasPutOverIsReadAgain(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network, d := rdmatest.NewNetwork(), rdmatest.NewDirectory()
	reader := newEngine(t, network, &start, "reader", in(d.Session()))
	for life := range 5 {
		owner := listed(t, network, &start, d, "owner")
		if life > 0 {
			until(t, "the change", func() bool { return reader.ranks[0].w.Stats().Peers == 0 }, reader)
		}
		require.NoError(t, read(owner, reader, fmt.Sprint("life-", life), uint64(life+7)), "no READ is spent on finding out")
		// The same once more changes nothing: an owner that came back to its etcd.
		owner.list(d)
		require.NoError(t, read(owner, reader, fmt.Sprint("again-", life), uint64(life+70)))
		require.Equal(t, 1, reader.ranks[0].w.Stats().Peers)
		owner.ranks[0].f.Kill()
	}
	require.Zero(t, reader.ranks[0].w.Stats().ReadsLost)
	require.Zero(t, failed(reader))
}

func failed(e *engine) (n int64) {
	for _, r := range e.ranks {
		for _, c := range r.w.Stats().HandshakesFailed {
			n += c
		}
	}
	return n
}

// READs under way are not cut off by a change, and heartbeats and releases find the new connection.
func TestChangeDuringAReadWaitsForIt(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network, d := rdmatest.NewNetwork(), rdmatest.NewDirectory()
	owner := listed(t, network, &start, d, "owner")
	reader := newEngine(t, network, &start, "reader", in(d.Session()))
	network.HoldReads(true)
	reader.pull("slow", owner.publish("slow", 7, 3), 5)
	until(t, "the READ", func() bool { return len(network.Reads()) == 1 }, reader)
	next := listed(t, network, &start, d, "owner")
	until(t, "the change", func() bool { return reader.ranks[0].w.Stats().PeersBroken == 1 }, reader)
	require.True(t, network.Reads()[0].Deliver())
	network.HoldReads(false)
	until(t, "the verdict", func() bool { return failure(reader, "slow") != nil }, reader)
	require.ErrorIs(t, failure(reader, "slow"), lease.ErrUnverifiable, "its owner is another by now")
	reader.over("slow")
	require.NoError(t, read(next, reader, "next", 8))
}

// asked is a directory that counts what it is asked.
type asked struct {
	rdma.Directory
	changed atomic.Int64
}

func (d *asked) Changed(ctx context.Context, engine string, revision int64) error {
	d.changed.Add(1)
	return d.Directory.Changed(ctx, engine, revision)
}

// An owner that is withdrawn, or whose session was lost and is back with the same metadata, keeps its connections.
func TestWithdrawnOwnerIsReadOn(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network, d := rdmatest.NewNetwork(), rdmatest.NewDirectory()
	owner := listed(t, network, &start, d, "owner")
	a := &asked{Directory: d.Session()}
	reader := newEngine(t, network, &start, "reader", in(a))
	require.NoError(t, read(owner, reader, "req", 7))
	for i, change := range []func(){
		func() { require.NoError(t, d.Withdraw(t.Context(), "owner", 0)) },
		func() { owner.list(d) },
		func() { owner.list(d) },
	} {
		until(t, "the watch", func() bool { return a.changed.Load() == int64(i+1) }, reader)
		change()
		until(t, "the end of the look", func() bool { return a.changed.Load() == int64(i+2) }, reader)
		require.NoError(t, read(owner, reader, fmt.Sprint("req-", i), uint64(i)))
	}
	require.EqualValues(t, 1, reader.ranks[0].w.Stats().HandshakeTime.Count)
}

// dynamo#3493: a directory that does not answer holds up neither steps nor engines that are connected or can be reached
// otherwise.
func TestDirectoryThatHangsDelaysNobody(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network, d := rdmatest.NewNetwork(), rdmatest.NewDirectory()
	owner := listed(t, network, &start, d, "owner")
	reader := newEngine(t, network, &start, "reader", in(d.Session()))
	require.NoError(t, read(owner, reader, "req", 7))
	d.Stop()
	reader.pull("hung", owner.params("hung", 3), 9) // of an engine that the directory would have to name
	other := newEngine(t, network, &start, "other", unreachable)
	reader.pull("other", other.publish("other", 7, 1), 10)
	for i := range 10 {
		require.NoError(t, read(owner, reader, fmt.Sprint("req-", i), uint64(i)))
	}
	require.False(t, reader.ran["other"])
	require.Equal(t, 1, reader.ranks[0].w.Stats().PeersConnecting)
	d.Continue()
	until(t, "the end of it", func() bool { return failure(reader, "other") != nil }, reader)
}

// forgetful is a directory that tells of no change, as etcd does after it lost its data and counts its revisions anew.
type forgetful struct{ rdma.Directory }

func (forgetful) Changed(ctx context.Context, _ string, _ int64) error {
	<-ctx.Done()
	return ctx.Err()
}

// A change that was not told is found within the hour. In a bubble, where the directory's time is the test's.
func TestChangeThatWasNotToldIsFoundInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		network, d := rdmatest.NewNetwork(), rdmatest.NewDirectory()
		owner := listed(t, network, &start, d, "owner")
		reader := newEngine(t, network, &start, "reader", unreachable, in(forgetful{d.Session()}))
		require.NoError(t, read(owner, reader, "req", 7))
		listed(t, network, &start, d, "owner")
		for _, c := range []struct {
			after time.Duration
			peers int
		}{{29 * time.Minute, 1}, {31 * time.Minute, 0}} {
			time.Sleep(c.after)
			synctest.Wait()
			reader.step()
			require.Equal(t, c.peers, reader.ranks[0].w.Stats().Peers)
		}
	})
}

// Whoever can write to the directory, but has no key, sends no reader anywhere.
func TestListingsAreProvedByTheKey(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	network, d := rdmatest.NewNetwork(), rdmatest.NewDirectory()
	key := func(w *rdma.WorkerConfig, _ *lease.SchedulerConfig) { w.Key = []byte("sixteen bytes or more") }
	owner := listed(t, network, &start, d, "owner", key)
	reader := newEngine(t, network, &start, "reader", unreachable, key, in(d.Session()))
	require.NoError(t, read(owner, reader, "req", 7))
	forged := newEngine(t, network, &start, "owner", unreachable)
	forged.list(d)
	until(t, "the change", func() bool { return reader.ranks[0].w.Stats().Peers == 0 }, reader)
	err := read(owner, reader, "next", 8)
	require.ErrorIs(t, err, lease.ErrHandshake)
	require.ErrorContains(t, err, "shared key")
	owner.list(d)
	start = start.Add(time.Minute)
	require.NoError(t, read(owner, reader, "again", 9))
}
