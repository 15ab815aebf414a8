package nixl

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	if os.Getenv("UCX_TLS") == "" {
		os.Setenv("UCX_TLS", "tcp,self")
	}
	if file := os.Getenv(sacrificeVariable); file != "" {
		leave(runSacrifice(file))
	}
	leave(m.Run())
}

// newUCX returns an agent with a UCX backend, closed at the end of the test.
func newUCX(t testing.TB, cfg Config) *Agent {
	t.Helper()
	a, err := NewAgent("", cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	_, err = a.CreateBackend("UCX", nil)
	require.NoError(t, err)
	return a
}

// registered returns a buffer that the agent registered.
func registered(t testing.TB, a *Agent, size int) *Buffer {
	t.Helper()
	b, err := AllocBuffer(size)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	_, err = a.Register(b)
	require.NoError(t, err)
	return b
}

// introduce loads the metadata of from into to.
func introduce(t testing.TB, from, to *Agent) {
	t.Helper()
	blob, err := from.LocalMetadata()
	require.NoError(t, err)
	name, err := to.LoadRemote(blob)
	require.NoError(t, err)
	require.Equal(t, from.Name(), name)
}

// blocks cuts a buffer into descriptors of one size.
func blocks(b *Buffer, size int) []Desc {
	var ds []Desc
	for off := 0; off+size <= b.Len(); off += size {
		ds = append(ds, Desc{Addr: b.Addr() + uint64(off), Len: uint64(size)})
	}
	return ds
}

// link is an owner and a reader of one buffer each, cut into blocks.
type link struct {
	owner, reader *Agent
	src, dst      *Buffer
	remote, local *List
}

func newLink(t testing.TB, size, block int) *link {
	t.Helper()
	l := &link{owner: newUCX(t, Config{}), reader: newUCX(t, Config{})}
	l.src, l.dst = registered(t, l.owner, size), registered(t, l.reader, size)
	introduce(t, l.owner, l.reader)
	introduce(t, l.reader, l.owner)
	l.prepare(t, block)
	return l
}

func (l *link) prepare(t testing.TB, block int) {
	t.Helper()
	var err error
	l.remote, err = l.reader.PrepareRemote(l.owner.Name(), DRAM, blocks(l.src, block))
	require.NoError(t, err)
	l.local, err = l.reader.PrepareLocal(DRAM, blocks(l.dst, block))
	require.NoError(t, err)
}

// read makes a READ of all blocks, or of those given.
func (l *link) read(t testing.TB, o TransferOptions, indices ...int32) *Transfer {
	t.Helper()
	x, err := l.reader.NewTransfer(Read, l.local, indices, l.remote, indices, o)
	require.NoError(t, err)
	return x
}

const patience = 30 * time.Second

// finish posts and waits.
func finish(t testing.TB, x *Transfer) {
	t.Helper()
	_, err := x.Post()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(t, x.Wait(ctx))
}

// receive drains an agent until n messages came.
func receive(t testing.TB, a *Agent, n int) []Notification {
	t.Helper()
	var got []Notification
	require.Eventually(t, func() bool {
		var err error
		got, err = a.Notifications(got)
		require.NoError(t, err)
		return len(got) >= n
	}, patience, time.Millisecond)
	return got
}

// fill is fast under the race detector, too.
func fill(b []byte, v byte) {
	b[0] = v
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}
