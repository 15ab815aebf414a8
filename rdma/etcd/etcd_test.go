//go:build etcd

package etcd

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
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
			owner, _ := open(t, s)
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
			require.ErrorIs(t, reader.Changed(short, "engine", revision), context.DeadlineExceeded, "keys went away, if only for a moment")
			require.NoError(t, owner.Close())
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

// A value that nobody here would put there is an error, not an allocation of any size.
func TestValueBeyondTheBoundIsRefused(t *testing.T) {
	s := etcdserver.Start(t)
	reader, _ := open(t, s)
	c := client(t, s)
	_, err := c.Put(deadline(t), "/nixlgo/engine/0", string(slices.Repeat([]byte("x"), rdma.MaxReply+1)))
	require.NoError(t, err)
	_, _, err = reader.Lookup(deadline(t), "engine", []int{0})
	require.ErrorIs(t, err, rdma.ErrWire)
}
