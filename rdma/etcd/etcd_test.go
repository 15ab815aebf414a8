//go:build etcd

package etcd

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/nixlgo/nixlgo/cgo_test/etcdserver"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

const patience = 60 * time.Second // for what must happen at some time; nothing is measured against it

// log is a logger that tests can read.
type log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *log) has(s string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text.String(), s)
}

// open opens a directory with keys that etcd forgets as soon as it can.
func open(t *testing.T, s *etcdserver.Server) (*Directory, *log) {
	t.Helper()
	l := &log{}
	c := Config{TTL: 2 * time.Second, Logger: slog.New(slog.NewTextHandler(l, nil))}
	c.Client.Endpoints = []string{s.URL}
	d, err := Open(c)
	require.NoError(t, err)
	t.Cleanup(func() { d.Close() })
	return d, l
}

func deadline(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// client is etcd's own, for what others do there.
func client(t *testing.T, s *etcdserver.Server) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.URL}})
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// lasting is longer than a lease lasts, by etcd's real time, that nobody keeps.
const lasting = 4 * time.Second

// says waits until a directory answers with reply for a rank.
func says(t *testing.T, d rdma.Directory, rank int, reply string) {
	t.Helper()
	var got [][]byte
	var err error
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		got, _, err = d.Lookup(ctx, "engine", []int{rank})
		return err == nil && string(got[0]) == reply
	}, patience, 20*time.Millisecond, "%q is not what rank %d says", reply, rank)
}

func lacks(t *testing.T, d rdma.Directory, rank int) {
	t.Helper()
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, _, err := d.Lookup(ctx, "engine", []int{rank})
		return err != nil && strings.Contains(err.Error(), rdma.ErrNotListed.Error())
	}, patience, 20*time.Millisecond, "rank %d does not go away", rank)
}

func TestDirectoryThroughEtcd(t *testing.T) {
	s := etcdserver.Start(t)
	rdmatest.TestDirectory(t, func(t *testing.T) (rdma.Directory, rdma.Directory) {
		a, _ := open(t, s)
		b, _ := open(t, s)
		return a, b
	})
}

// dynamo#3493, neighbours.md 3: an etcd that was away loses the lease, and nothing recovers. Here everything does, by itself,
// whatever etcd has lost.
func TestOwnerOutlivesABlipOfEtcd(t *testing.T) {
	for name, blip := range map[string]func(*testing.T, *etcdserver.Server, *Directory){
		"killed and restarted": func(t *testing.T, s *etcdserver.Server, _ *Directory) {
			s.Kill()
			s.Restart()
		},
		"killed for longer than the lease lasts": func(t *testing.T, s *etcdserver.Server, _ *Directory) {
			s.Kill()
			time.Sleep(lasting)
			s.Restart()
		},
		"restarted without its data": func(t *testing.T, s *etcdserver.Server, _ *Directory) {
			s.Kill()
			s.Empty()
			s.Restart()
		},
		"lease revoked": func(t *testing.T, s *etcdserver.Server, d *Directory) {
			c := client(t, s)
			ls, err := c.Leases(deadline(t))
			require.NoError(t, err)
			require.Len(t, ls.Leases, 1)
			_, err = c.Revoke(deadline(t), ls.Leases[0].ID)
			require.NoError(t, err)
		},
		"keys deleted": func(t *testing.T, s *etcdserver.Server, d *Directory) {
			c := client(t, s)
			r, err := c.Delete(deadline(t), "/nixlgo/", clientv3.WithPrefix())
			require.NoError(t, err)
			require.EqualValues(t, 2, r.Deleted)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := etcdserver.Start(t)
			owner, l := open(t, s)
			reader, _ := open(t, s)
			require.NoError(t, owner.Publish(deadline(t), "engine", 0, []byte("zero")))
			require.NoError(t, owner.Publish(deadline(t), "engine", 1, []byte("one")))
			blip(t, s, owner)
			says(t, reader, 0, "zero")
			says(t, reader, 1, "one")
			// It is kept from now on as before, and new ranks are taken.
			require.NoError(t, owner.Publish(deadline(t), "engine", 2, []byte("two")))
			replies, revision, err := reader.Lookup(deadline(t), "engine", []int{0, 1, 2})
			require.NoError(t, err)
			require.Equal(t, [][]byte{[]byte("zero"), []byte("one"), []byte("two")}, replies)
			short, cancel := context.WithTimeout(t.Context(), lasting)
			defer cancel()
			if err := reader.Changed(short, "engine", revision); err == nil {
				require.True(t, l.has("session was lost"), "keys went away without a reason") // such as a machine too busy for a lease of 2 s
			} else {
				require.ErrorIs(t, err, context.DeadlineExceeded)
			}
			if err := owner.Close(); err != nil {
				require.ErrorContains(t, err, "go away after 2s")
			}
			lacks(t, reader, 0)
			lacks(t, reader, 2)
		})
	}
}

// The keys of a process that dies go away; here one whose session nobody keeps any more.
func TestKeysOfADeadOwnerGoAway(t *testing.T) {
	t.Parallel()
	s := etcdserver.Start(t)
	owner, _ := open(t, s)
	reader, _ := open(t, s)
	require.NoError(t, owner.Publish(deadline(t), "engine", 0, []byte("zero")))
	revision := func() int64 {
		_, r, err := reader.Lookup(deadline(t), "engine", []int{0})
		require.NoError(t, err)
		return r
	}()
	owner.cancel()
	require.NoError(t, reader.Changed(deadline(t), "engine", revision))
	lacks(t, reader, 0)
}

// While etcd is away, what is withdrawn stays withdrawn, and a watch goes on afterwards.
func TestCallsThatEtcdMissedAreCaughtUpWith(t *testing.T) {
	t.Parallel()
	s := etcdserver.Start(t)
	owner, l := open(t, s)
	reader, _ := open(t, s)
	require.NoError(t, owner.Publish(deadline(t), "engine", 0, []byte("zero")))
	require.NoError(t, owner.Publish(deadline(t), "engine", 1, []byte("one")))
	_, revision, err := reader.Lookup(deadline(t), "engine", []int{0})
	require.NoError(t, err)
	changed := make(chan error, 1)
	ctx := deadline(t)
	go func() { changed <- reader.Changed(ctx, "engine", revision) }()
	s.Kill()
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.Error(t, owner.Withdraw(short, "engine", 1))
	require.Eventually(t, func() bool { return l.has("cannot be looked after") }, patience, 20*time.Millisecond)
	s.Restart()
	lacks(t, reader, 1)
	says(t, reader, 0, "zero")
	require.NoError(t, <-changed)
	require.Eventually(t, func() bool { return l.has("looked after again") }, patience, 20*time.Millisecond)
}

// A call without a deadline that hangs, for etcd does, holds up neither the session's care nor Close, and is done when etcd is
// there again: with the session as it was, or with another where that has ended.
func TestPublishThatHangsHoldsUpNothing(t *testing.T) {
	for name, c := range map[string]struct {
		long time.Duration
		says string
	}{
		"for a moment":                    {0, "looked after again"},
		"for longer than the lease lasts": {lasting, "the session was lost"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := etcdserver.Start(t)
			owner, l := open(t, s)
			reader, _ := open(t, s)
			require.NoError(t, owner.Publish(deadline(t), "engine", 0, []byte("zero")))
			s.Stop()
			published := make(chan error, 1)
			go func() { published <- owner.Publish(context.Background(), "engine", 1, []byte("one")) }()
			require.Eventually(t, func() bool { return l.has("cannot be looked after") }, patience, 20*time.Millisecond)
			require.Empty(t, published)
			time.Sleep(c.long)
			s.Continue()
			require.NoError(t, <-published)
			says(t, reader, 0, "zero")
			says(t, reader, 1, "one")
			require.Eventually(t, func() bool { return l.has(c.says) }, patience, 20*time.Millisecond)
		})
	}
	t.Run("until it is closed", func(t *testing.T) {
		t.Parallel()
		s := etcdserver.Start(t)
		owner, l := open(t, s)
		reader, _ := open(t, s)
		require.NoError(t, owner.Publish(deadline(t), "engine", 0, []byte("zero")))
		s.Stop()
		ended := make(chan error, 3)
		go func() { ended <- owner.Publish(context.Background(), "engine", 1, []byte("one")) }()
		go func() { ended <- owner.Withdraw(context.Background(), "engine", 0) }()
		go func() {
			_, _, err := owner.Lookup(context.Background(), "engine", []int{0})
			ended <- err
		}()
		require.Eventually(t, func() bool { return l.has("cannot be looked after") }, patience, 20*time.Millisecond)
		require.ErrorContains(t, owner.Close(), "go away after 2s", "etcd still hangs")
		for range 3 {
			require.ErrorIs(t, <-ended, ErrClosed)
		}
		s.Continue()
		lacks(t, reader, 0)
		lacks(t, reader, 1)
	})
}

// An etcd that lost its data counts its revisions anew, and tells nothing to those who watch for later ones.
func TestReadersHearOfAnEtcdThatLostItsData(t *testing.T) {
	t.Parallel()
	s := etcdserver.Start(t)
	owner, _ := open(t, s)
	reader, l := open(t, s)
	for range 3 {
		require.NoError(t, owner.Publish(deadline(t), "engine", 0, []byte("zero")))
	}
	require.NoError(t, owner.Close())
	_, revision, err := reader.Lookup(deadline(t), "engine", []int{0})
	require.ErrorIs(t, err, rdma.ErrNotListed)
	changed := make(chan error, 1)
	ctx := deadline(t)
	go func() { changed <- reader.Changed(ctx, "engine", revision) }()
	require.Eventually(t, func() bool {
		reader.mu.Lock()
		defer reader.mu.Unlock()
		return reader.revision == revision
	}, patience, 20*time.Millisecond, "no look")
	require.Empty(t, changed)
	s.Kill()
	s.Empty()
	s.Restart()
	require.NoError(t, <-changed)
	require.True(t, l.has("lost its data"))
	// Who still asks for the old revision is told again, and nobody else.
	_, now, err := reader.Lookup(deadline(t), "engine", []int{0})
	require.ErrorIs(t, err, rdma.ErrNotListed)
	require.Less(t, now, revision)
	quiet, cancel := context.WithCancel(deadline(t))
	defer cancel()
	go func() { changed <- reader.Changed(quiet, "engine", now) }()
	require.NoError(t, reader.Changed(deadline(t), "engine", revision))
	require.NoError(t, reader.Changed(deadline(t), "engine", revision))
	require.Empty(t, changed)
	cancel()
	require.ErrorIs(t, <-changed, context.Canceled)
}

// A reader of a thousand engines has one stream at etcd, not a thousand; also after a restart.
func TestWatchesOfAReaderShareAStream(t *testing.T) {
	t.Parallel()
	s := etcdserver.Start(t)
	reader, _ := open(t, s)
	owner, _ := open(t, s)
	_, revision, _ := reader.Lookup(deadline(t), "engine", []int{0})
	const watches = 200
	changed := make(chan error, watches)
	for i := range watches {
		ctx := deadline(t)
		go func() { changed <- reader.Changed(ctx, fmt.Sprint("engine-", i), revision) }()
	}
	all := func() bool { return s.Metric("etcd_debugging_mvcc_watcher_total") == watches }
	require.Eventually(t, all, patience, 20*time.Millisecond)
	require.EqualValues(t, 1, s.Metric("etcd_debugging_mvcc_watch_stream_total"))
	s.Kill()
	s.Restart()
	require.Eventually(t, all, patience, 20*time.Millisecond)
	require.EqualValues(t, 1, s.Metric("etcd_debugging_mvcc_watch_stream_total"))
	require.Empty(t, changed)
	for i := range watches {
		require.NoError(t, owner.Publish(deadline(t), fmt.Sprint("engine-", i), 0, []byte("x")))
	}
	for range watches {
		require.NoError(t, <-changed)
	}
}

// A rank that is published while etcd restarts is there when the call returns, if it has the time; so is one whose request
// was under way when etcd died.
func TestPublishOutlastsARestart(t *testing.T) {
	t.Parallel()
	s := etcdserver.Start(t)
	owner, _ := open(t, s)
	ctx, restarted, ended := deadline(t), make(chan struct{}), make(chan error, 1)
	var published atomic.Int64
	go func() {
		for {
			if err := owner.Publish(ctx, "engine", int(published.Load()), []byte("reply")); err != nil {
				ended <- err
				return
			}
			published.Add(1)
			select {
			case <-restarted:
				ended <- nil
				return
			default:
			}
		}
	}()
	require.Eventually(t, func() bool { return published.Load() > 0 }, patience, time.Millisecond)
	s.Kill()
	s.Restart()
	close(restarted)
	require.NoError(t, <-ended)
	for rank := range published.Load() {
		says(t, owner, int(rank), "reply")
	}
}

// smg#2503, cases.md 15: two owners of one engine id do not put over each other for ever. The last one stays, the other says so, and
// has its place back when that one goes.
func TestTwoOwnersOfOneEngineDoNotFight(t *testing.T) {
	t.Parallel()
	s := etcdserver.Start(t)
	first, l := open(t, s)
	second, other := open(t, s)
	require.NoError(t, first.Publish(deadline(t), "engine", 0, []byte("first")))
	require.NoError(t, second.Publish(deadline(t), "engine", 0, []byte("second")))
	require.Eventually(t, func() bool { return l.has("two engines have one id") }, patience, 20*time.Millisecond)
	says(t, first, 0, "second")
	require.NoError(t, second.Close())
	says(t, first, 0, "first")
	require.False(t, other.has("two engines"))
	l.mu.Lock()
	defer l.mu.Unlock()
	require.Equal(t, 1, strings.Count(l.text.String(), "two engines have one id"), "once, not at every look")
}
