package nixl

import (
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/cuda"
)

func hasGPU() bool {
	_, err := os.Stat("/dev/nvidia0")
	return err == nil
}

// Registering an address that is not device memory makes the library crash, so
// the driver is asked first.
func TestDeviceAddressesAreChecked(t *testing.T) {
	for _, c := range [][2]uint64{{0, 1}, {4096, 0}, {^uint64(0), 2}} {
		_, err := Device(c[0], c[1], 0)
		require.ErrorIs(t, err, ErrInvalid)
	}
	_, err := Device(4096, 1, -1)
	require.ErrorIs(t, err, ErrInvalid)
	host := mustBuffer(t, 4096)
	_, err = Device(host.Addr(), 4096, 0)
	if hasGPU() {
		require.ErrorIs(t, err, ErrInvalid, "that is host memory")
		return
	}
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, "CUDA driver")
}

// peer-tests B27: memory of a GPU moves as host memory does. Needs a GPU: the one
// test that may be skipped.
func TestDeviceMemoryMoves(t *testing.T) {
	if !hasGPU() {
		t.Skip("NOT TESTED: VRAM. There is no GPU here (/dev/nvidia0); run this test where there is one")
	}
	const size = 1 << 20
	gpu, err := cuda.Alloc(size)
	require.NoError(t, err)
	whole, err := Device(gpu, size, 0)
	require.NoError(t, err)
	_, err = Device(gpu, 1<<40, 0)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = Device(gpu, size, 1)
	require.ErrorIs(t, err, ErrInvalid)
	a := newUCX(t, Config{})
	_, err = a.Register(whole)
	require.NoError(t, err)
	host := registered(t, a, 2*size)
	fill(host.Bytes()[:size], 0xa5)
	d, err := whole.Desc(0, size)
	require.NoError(t, err)
	_, err = whole.Desc(1, size)
	require.ErrorIs(t, err, ErrInvalid)
	for k, op := range []Op{Write, Read} {
		x, err := a.CreateTransfer(op, DRAM, []Desc{{host.Addr() + uint64(k*size), size, 0}}, a.Name(), VRAM, []Desc{d}, TransferOptions{})
		require.NoError(t, err)
		finish(t, x)
		require.NoError(t, x.Close())
	}
	require.Equal(t, host.Bytes()[:size], host.Bytes()[size:])
}
