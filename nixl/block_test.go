package nixl

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// newGUSLI returns an agent with block devices 11 and 12, which are files here, and their paths; nil if the library has
// no plugin for them.
func newGUSLI(t *testing.T, size int64) (*Agent, *Backend, map[uint64]string) {
	a := newUCX(t, Config{})
	plugins, err := a.Plugins()
	require.NoError(t, err)
	if !slices.Contains(plugins, "GUSLI") {
		require.True(t, libraryBefore(t, "0.11"), "every library since has it")
		return nil, nil, nil
	}
	devices := map[uint64]string{}
	config := "# Config file\nversion=1\n"
	for _, n := range []uint64{11, 12} {
		path := filepath.Join(t.TempDir(), "device")
		require.NoError(t, os.WriteFile(path, nil, 0o600))
		require.NoError(t, os.Truncate(path, size))
		devices[n] = path
		config += fmt.Sprintf("%d F W N %s sec=0x3\n", n, path)
	}
	b, err := a.CreateBackend("GUSLI", map[string]string{"client_name": "nixlgo", "config_file": config})
	require.NoError(t, err)
	return a, b, devices
}

// peer-tests B27: block devices are remote memory of the agent itself.
func TestBlockDevicesAreWrittenAndRead(t *testing.T) {
	const size = 1 << 20
	a, gusli, devices := newGUSLI(t, size)
	if a == nil {
		return
	}
	_, mems, err := gusli.Params()
	require.NoError(t, err)
	require.Contains(t, mems, Block)
	b := mustBuffer(t, 1<<16)
	var ours, theirs []Desc
	for n := range devices {
		_, err := a.Register(b.ForDevice(n))
		require.NoError(t, err)
		d, err := NewBlockRange(n, 4096, size-4096)
		require.NoError(t, err)
		_, err = a.Register(d)
		require.NoError(t, err)
		local, err := b.Desc(4096*int(n), 4096)
		require.NoError(t, err)
		local.Dev = n
		remote, err := d.Desc(8192, 4096)
		require.NoError(t, err)
		ours, theirs = append(ours, local), append(theirs, remote)
		fill(b.Bytes()[4096*n:][:4096], byte(n))
	}
	_, err = a.Register(b)
	require.NoError(t, err, "for UCX")
	once := func(op Op) *Transfer {
		x, err := a.CreateTransfer(op, DRAM, ours, a.Name(), Block, theirs, TransferOptions{})
		require.NoError(t, err)
		finish(t, x)
		backend, err := x.Backend()
		require.NoError(t, err)
		require.Same(t, gusli, backend)
		return x
	}
	x := once(Write)
	for n, path := range devices {
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		want := make([]byte, size)
		fill(want[4096+8192:][:4096], byte(n))
		require.Equal(t, want, data)
	}
	state, err := x.Post()
	require.ErrorIs(t, err, ErrState, "the plugin ends the process natively")
	require.Equal(t, Done, state)
	require.NoError(t, x.Close())

	fill(b.Bytes(), 0xee)
	require.NoError(t, once(Read).Close())
	for n := range devices {
		require.EqualValues(t, n, b.Bytes()[4096*n])
		require.EqualValues(t, n, b.Bytes()[4096*n+4095])
	}

	_, err = a.CreateTransfer(Read, DRAM, ours, a.Name(), Block, theirs, TransferOptions{Notify: true})
	require.ErrorIs(t, err, ErrBackend, "it carries no notifications")
	require.NotErrorIs(t, err, ErrPeer)
	beyond, err := NewBlockRange(11, size, 4096)
	require.NoError(t, err)
	_, err = a.Register(beyond)
	require.NoError(t, err)
	x, err = a.CreateTransfer(Read, DRAM, []Desc{{b.Addr(), 4096, 11}}, a.Name(), Block, []Desc{beyond.desc}, TransferOptions{})
	require.NoError(t, err)
	_, err = x.Post()
	if err == nil {
		err = x.Wait(context.Background())
	}
	require.ErrorIs(t, err, ErrBackend, "the device ends there")
	require.NotErrorIs(t, err, ErrPeer)
}

func TestBlockRangesAreChecked(t *testing.T) {
	for _, c := range [][2]int64{{-1, 8}, {0, 0}, {0, -1}, {1, math.MaxInt64}} {
		_, err := NewBlockRange(1, c[0], c[1])
		require.ErrorIs(t, err, ErrInvalid, c)
	}
	r, err := NewBlockRange(7, 4096, 8192)
	require.NoError(t, err)
	d, err := r.Desc(4096, 4096)
	require.NoError(t, err)
	require.Equal(t, Desc{8192, 4096, 7}, d)
	for _, c := range [][2]int64{{-1, 8}, {0, 8193}, {8192, 1}, {0, 0}, {1, math.MaxInt64}} {
		_, err := r.Desc(c[0], c[1])
		require.ErrorIs(t, err, ErrInvalid, c)
	}
	_, err = newUCX(t, Config{}).Register(r)
	require.ErrorIs(t, err, ErrNotFound, "UCX serves no block devices")
	require.ErrorContains(t, err, "no backend serves the type")
}

// A buffer of several devices is one mapping.
func TestBufferOfSeveralDevicesIsUnmappedOnce(t *testing.T) {
	a := newUCX(t, Config{})
	b := mustBuffer(t, 4096)
	unmapped := 0
	b.free = func() error {
		unmapped++
		return b.unmap()
	}
	_, err := a.Register(b)
	require.NoError(t, err)
	a.Register(b.ForDevice(11)) // whether UCX takes it or not, the agent holds it
	require.NoError(t, b.Close())
	require.Zero(t, unmapped)
	require.NoError(t, a.Close())
	require.Equal(t, 1, unmapped)
}
