package nixl

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// newPOSIX returns an agent with UCX and POSIX, a registered buffer, and a file
// of that size, registered as a whole.
func newPOSIX(t *testing.T, size int) (*Agent, *Buffer, *FileRange, string) {
	a := newUCX(t, Config{})
	_, err := a.CreateBackend("POSIX", nil)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "kv")
	f, err := os.Create(path)
	require.NoError(t, err)
	require.NoError(t, f.Truncate(int64(size)))
	r, err := NewFileRange(f, 0, int64(size))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	require.NoError(t, f.Close(), "the range has a descriptor of its own")
	_, err = a.Register(r)
	require.NoError(t, err)
	return a, registered(t, a, size), r, path
}

// peer-tests B27: files are remote memory of the agent itself.
func TestFilesAreWrittenAndRead(t *testing.T) {
	const block, n = 4096, 16
	a, b, r, path := newPOSIX(t, block*n)
	var file []Desc
	for i := range n {
		d, err := r.Desc(int64(i*block), block)
		require.NoError(t, err)
		file = append(file, d)
		fill(b.Bytes()[i*block:(i+1)*block], byte(i+1))
	}
	local, err := a.PrepareLocal(DRAM, blocks(b, block))
	require.NoError(t, err)
	store, err := a.PrepareRemote(a.Name(), File, file)
	require.NoError(t, err)

	backwards := make([]int32, n) // the file gets the blocks in reverse
	forwards := make([]int32, n)
	for i := range int32(n) {
		forwards[i], backwards[i] = i, n-1-i
	}
	w, err := a.NewTransfer(Write, local, forwards, store, backwards, TransferOptions{})
	require.NoError(t, err)
	finish(t, w)
	backend, err := w.Backend()
	require.NoError(t, err)
	require.Equal(t, "POSIX", backend.Name())
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Len(t, data, block*n)
	for i := range n {
		require.EqualValues(t, n-i, data[i*block], "block %d of the file", i)
		require.EqualValues(t, n-i, data[(i+1)*block-1])
	}

	fill(b.Bytes(), 0xee)
	x, err := a.NewTransfer(Read, local, nil, store, nil, TransferOptions{})
	require.NoError(t, err)
	finish(t, x)
	require.Equal(t, data, b.Bytes())
	finish(t, x) // and again
	require.NoError(t, x.Close())
	require.NoError(t, w.Close())
}

// A READ beyond the end of the file is refused: natively, libraries before 1.5.0
// call it a success. The transfer can be posted once the file is long enough.
func TestReadBeyondTheEndOfAFileFails(t *testing.T) {
	a, b, r, path := newPOSIX(t, 8192)
	require.NoError(t, os.Truncate(path, 4096))
	var file []Desc
	for _, at := range []int64{0, 4096} {
		d, err := r.Desc(at, 4096)
		require.NoError(t, err)
		file = append(file, d)
	}
	local, err := a.PrepareLocal(DRAM, blocks(b, 4096))
	require.NoError(t, err)
	store, err := a.PrepareRemote(a.Name(), File, file)
	require.NoError(t, err)
	created, err := a.CreateTransfer(Read, DRAM, blocks(b, 4096)[1:], a.Name(), File, file[1:], TransferOptions{})
	require.NoError(t, err)
	made, err := a.NewTransfer(Read, local, []int32{1}, store, []int32{1}, TransferOptions{})
	require.NoError(t, err)
	for _, x := range []*Transfer{created, made} {
		state, err := x.Post()
		require.ErrorIs(t, err, ErrState)
		require.ErrorContains(t, err, "has 4096 bytes, and the READ goes to 8192")
		require.Equal(t, Idle, state)
	}
	x, err := a.NewTransfer(Read, local, []int32{1}, store, []int32{0}, TransferOptions{})
	require.NoError(t, err)
	finish(t, x)
	require.NoError(t, os.Truncate(path, 8192))
	finish(t, created)
	finish(t, made)
}

func TestWriteToAFileThatIsReadOnlyFails(t *testing.T) {
	a, b, _, path := newPOSIX(t, 4096)
	f, err := os.Open(path)
	require.NoError(t, err)
	r, err := NewFileRange(f, 0, 4096)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	_, err = a.Register(r)
	require.NoError(t, err)
	d, err := r.Desc(0, 4096)
	require.NoError(t, err)
	x, err := a.CreateTransfer(Write, DRAM, blocks(b, 4096), a.Name(), File, []Desc{d}, TransferOptions{})
	require.NoError(t, err)
	_, err = x.Post()
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		err = x.Wait(ctx)
	}
	require.ErrorIs(t, err, ErrBackend)
}

// A closed file descriptor would be the number of the next file that is opened.
func TestFileStaysOpenUntilItsAgentsEnd(t *testing.T) {
	a, _, r, _ := newPOSIX(t, 4096)
	open := func() bool {
		_, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(r.fd))
		return err == nil
	}
	require.NoError(t, r.Close())
	require.NoError(t, r.Close(), "a second Close")
	require.True(t, open())
	_, err := r.Desc(0, 8)
	require.ErrorIs(t, err, ErrClosed)
	_, err = a.Register(r)
	require.ErrorIs(t, err, ErrClosed)
	require.NoError(t, a.Close())
	require.False(t, open())
}

func TestFileRangesAreChecked(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	require.NoError(t, err)
	for _, c := range [][2]int64{{-1, 8}, {0, 0}, {0, -1}, {1, math.MaxInt64}} {
		_, err := NewFileRange(f, c[0], c[1])
		require.ErrorIs(t, err, ErrInvalid, c)
	}
	_, err = NewFileRange(nil, 0, 8)
	require.ErrorIs(t, err, ErrInvalid)
	r, err := NewFileRange(f, 4096, 8192)
	require.NoError(t, err)
	d, err := r.Desc(4096, 4096)
	require.NoError(t, err)
	require.Equal(t, Desc{8192, 4096, uint64(r.fd)}, d)
	for _, c := range [][2]int64{{-1, 8}, {0, 8193}, {8192, 1}, {0, 0}, {1, math.MaxInt64}} {
		_, err := r.Desc(c[0], c[1])
		require.ErrorIs(t, err, ErrInvalid, c)
	}
	a := newUCX(t, Config{})
	_, err = a.Register(r)
	require.ErrorIs(t, err, ErrNotFound, "UCX serves no files")
	require.NoError(t, f.Close())
	_, err = NewFileRange(f, 0, 8)
	require.Error(t, err, "the file is closed")
	require.NoError(t, r.Close())
}

// POSIX carries no notifications.
func TestFileTransfersDoNotNotify(t *testing.T) {
	a, b, r, _ := newPOSIX(t, 4096)
	d, err := r.Desc(0, 4096)
	require.NoError(t, err)
	_, err = a.CreateTransfer(Read, DRAM, blocks(b, 4096), a.Name(), File, []Desc{d}, TransferOptions{Notify: true})
	require.ErrorIs(t, err, ErrBackend)
	require.NotErrorIs(t, err, ErrPeer)
	posix := a.s.backends[1]
	require.ErrorIs(t, posix.Notify(a.Name(), nil), ErrBackend)
	_, err = posix.Notifications(nil)
	require.ErrorIs(t, err, ErrBackend)
	require.ErrorIs(t, posix.Notify("nobody", nil), ErrNotFound)
	require.ErrorIs(t, posix.Connect("nobody"), ErrNotFound)
}
