package nixl

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// peer-tests B19, C1: both directions, 256 bytes, one notification each.
func TestCreatedTransfersMoveBytesAndNotify(t *testing.T) {
	for _, op := range []Op{Read, Write} {
		l := newLink(t, 4096, 256)
		from, to := l.src, l.dst
		if op == Write {
			from, to = l.dst, l.src
		}
		fill(from.Bytes(), 0xbb)
		ours, theirs := []Desc{{l.dst.Addr() + 256, 256, 0}}, []Desc{{l.src.Addr() + 256, 256, 0}}
		x, err := l.reader.CreateTransfer(op, DRAM, ours, l.owner.Name(), DRAM, theirs, TransferOptions{Notification: []byte("n")})
		require.NoError(t, err)
		require.EqualValues(t, 256, x.Bytes())
		require.Equal(t, 1, x.Count())
		finish(t, x)
		require.Equal(t, from.Bytes()[256:512], to.Bytes()[256:512])
		require.Zero(t, to.Bytes()[0])
		require.Zero(t, to.Bytes()[512])
		require.Equal(t, []Notification{{l.reader.Name(), []byte("n")}}, receive(t, l.owner, 1))
		require.NoError(t, x.Close())
		require.NoError(t, x.Close(), "a second Close")
	}
}

// peer-tests B40
func TestWrongDescriptorsAreRefusedBeforeTheLibrary(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	ours, theirs := blocks(l.dst, 4096), blocks(l.src, 4096)
	owner := l.owner.Name()
	other := newUCX(t, Config{})
	for name, c := range map[string]struct {
		want error
		call func() (*Transfer, error)
	}{
		"operation": {ErrInvalid, func() (*Transfer, error) {
			return l.reader.CreateTransfer(7, DRAM, ours, owner, DRAM, theirs, TransferOptions{})
		}},
		"memory type": {ErrInvalid, func() (*Transfer, error) {
			return l.reader.CreateTransfer(Read, 9, ours, owner, DRAM, theirs, TransferOptions{})
		}},
		"no descriptors": {ErrInvalid, func() (*Transfer, error) {
			return l.reader.CreateTransfer(Read, DRAM, nil, owner, DRAM, nil, TransferOptions{})
		}},
		"counts": {ErrInvalid, func() (*Transfer, error) {
			return l.reader.CreateTransfer(Read, DRAM, ours, owner, DRAM, theirs[1:], TransferOptions{})
		}},
		"lengths": {ErrInvalid, func() (*Transfer, error) {
			return l.reader.CreateTransfer(Read, DRAM, ours[:1], owner, DRAM, []Desc{{l.src.Addr(), 8, 0}}, TransferOptions{})
		}},
		"wraps around": {ErrInvalid, func() (*Transfer, error) {
			return l.reader.CreateTransfer(Read, DRAM, ours[:1], owner, DRAM, []Desc{{^uint64(0) - 8, 4096, 0}}, TransferOptions{})
		}},
		"outside of the peer's": {ErrInvalid, func() (*Transfer, error) {
			return l.reader.CreateTransfer(Read, DRAM, ours[:1], owner, DRAM, []Desc{{0xdeadbeef, 4096, 0}}, TransferOptions{})
		}},
		"outside of ours": {ErrInvalid, func() (*Transfer, error) {
			return l.reader.CreateTransfer(Read, DRAM, []Desc{{0xdeadbeef, 4096, 0}}, owner, DRAM, theirs[:1], TransferOptions{})
		}},
		"unknown agent": {ErrNotFound, func() (*Transfer, error) {
			return l.reader.CreateTransfer(Read, DRAM, ours, "nobody", DRAM, theirs, TransferOptions{})
		}},
		"no agent": {ErrInvalid, func() (*Transfer, error) {
			return l.reader.CreateTransfer(Read, DRAM, ours, "", DRAM, theirs, TransferOptions{})
		}},
		"another agent's backend": {ErrInvalid, func() (*Transfer, error) {
			return l.reader.CreateTransfer(Read, DRAM, ours, owner, DRAM, theirs, TransferOptions{Backend: other.s.backends[0]})
		}},
	} {
		_, err := c.call()
		require.ErrorIs(t, err, c.want, name)
	}
}

func TestCreatedTransferHoldsItsRegistrations(t *testing.T) {
	a := newUCX(t, Config{})
	b := mustBuffer(t, 8192)
	r, err := a.Register(b)
	require.NoError(t, err)
	x, err := a.CreateTransfer(Read, DRAM, blocks(b, 4096)[:1], a.Name(), DRAM, blocks(b, 4096)[1:], TransferOptions{})
	require.NoError(t, err)
	require.ErrorIs(t, r.Close(), ErrActive)
	finish(t, x)
	require.NoError(t, x.Close())
	require.NoError(t, r.Close())
}

// peer-tests B39, C1: the backend and its own parameter travel in the options.
func TestTransferOptionsNameBackendAndWorker(t *testing.T) {
	a, err := NewAgent("", Config{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	forgetWorkers(t)
	ucx, err := a.CreateBackend("UCX", map[string]string{"num_workers": "2"})
	require.NoError(t, err)
	b := registered(t, a, 8192)
	fill(b.Bytes()[4096:], 7)
	custom := []byte("worker_id=1")
	if lacks(t, "nixl_capi_opt_args_set_custom_param") {
		_, err := a.CreateTransfer(Read, DRAM, blocks(b, 4096)[:1], a.Name(), DRAM, blocks(b, 4096)[1:], TransferOptions{Custom: custom})
		requireLacks(t, err, "nixl_capi_opt_args_set_custom_param", "1.5.0")
		custom = nil
	}
	for _, c := range [][]byte{custom, append([]byte("\x00\x01"), 0, 2)[:min(4, len(custom))]} {
		fill(b.Bytes()[:4096], 0)
		x, err := a.CreateTransfer(Read, DRAM, blocks(b, 4096)[:1], a.Name(), DRAM, blocks(b, 4096)[1:],
			TransferOptions{Backend: ucx, Custom: c, Notification: []byte("by a worker")})
		require.NoError(t, err)
		finish(t, x)
		require.Equal(t, b.Bytes()[4096:], b.Bytes()[:4096])
		require.Equal(t, []Notification{{a.Name(), []byte("by a worker")}}, receive(t, a, 1))
		got, err := x.Backend()
		require.NoError(t, err)
		require.Same(t, ucx, got)
		require.NoError(t, x.Close())
	}
}
