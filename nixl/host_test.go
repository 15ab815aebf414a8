package nixl

import (
	"math"
	"os"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func mmap(t *testing.T, size, access int) []byte {
	m, err := unix.Mmap(-1, 0, size, access, unix.MAP_ANON|unix.MAP_SHARED)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(m)) })
	return m
}

func addr(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// An engine's own arena, which it shares with another process for instance, is registered where it lies.
func TestMemoryOfTheCallersIsRead(t *testing.T) {
	arena := mmap(t, 1<<20, unix.PROT_READ|unix.PROT_WRITE)
	h, err := Host(addr(arena)+4096, 1<<19)
	require.NoError(t, err)
	a := newUCX(t, Config{})
	r, err := a.Register(h)
	require.NoError(t, err)
	from, err := h.Desc(0, 8192)
	require.NoError(t, err)
	to, err := h.Desc(1<<18, 8192)
	require.NoError(t, err)
	for i := range arena {
		arena[i] = byte(i >> 8)
	}
	local, err := a.PrepareLocal(DRAM, []Desc{to})
	require.NoError(t, err)
	self, err := a.PrepareRemote(a.Name(), DRAM, []Desc{from})
	require.NoError(t, err)
	x, err := a.NewTransfer(Read, local, nil, self, nil, TransferOptions{})
	require.NoError(t, err)
	finish(t, x)
	require.Equal(t, arena[4096:4096+8192], arena[4096+1<<18:][:8192])
	require.NoError(t, x.Close())
	require.NoError(t, local.Close())
	require.NoError(t, self.Close())
	require.NoError(t, r.Close())
	require.NoError(t, a.Close()) // before the arena is unmapped

	for _, c := range [][2]uint64{{0, 0}, {1 << 19, 1}, {0, 1<<19 + 1}, {1, 1 << 19}, {math.MaxUint64, 2}, {2, math.MaxUint64}} {
		_, err := h.Desc(c[0], c[1])
		require.ErrorIs(t, err, ErrInvalid)
	}
}

func TestHostMemoryIsMappedAndNotGos(t *testing.T) {
	page := os.Getpagesize()
	hole := mmap(t, 3*page, unix.PROT_READ|unix.PROT_WRITE)
	require.NoError(t, unix.Mprotect(hole[page:2*page], unix.PROT_NONE))
	fixed := mmap(t, page, unix.PROT_READ)
	small, large := make([]byte, 64), make([]byte, 64<<20)
	for name, c := range map[string]struct {
		addr, size uint64
		says       string
	}{
		"nothing":            {addr(hole), 0, "no range"},
		"no address":         {0, 1, "no range"},
		"past the end":       {math.MaxUint64, 2, "no range"},
		"a hole":             {addr(hole), uint64(3 * page), "not mapped"},
		"the hole":           {addr(hole) + uint64(page), 1, "not mapped"},
		"read only":          {addr(fixed), 1, "not mapped"},
		"the first page":     {8, 8, "not mapped"},
		"a small Go slice":   {addr(small), 64, "heap of Go"},
		"a large Go slice":   {addr(large), 64 << 20, "heap of Go"},
		"from before the Go": {addr(large) - 1<<30, 2 << 30, "heap of Go"},
	} {
		_, err := Host(c.addr, c.size)
		require.ErrorIs(t, err, ErrInvalid, name)
		require.ErrorContains(t, err, c.says, name)
	}
	_, err := Host(addr(hole), uint64(page))
	require.NoError(t, err)
	_, err = Host(addr(hole)+uint64(2*page), uint64(page))
	require.NoError(t, err)
	large[0], small[0] = 1, 1
}

func TestMemoryThatIsNoneOfThePackageIsRefused(t *testing.T) {
	a := newUCX(t, Config{})
	for name, m := range map[string]Memory{"nil": nil, "nil *Buffer": (*Buffer)(nil), "zero Buffer": &Buffer{}, "embedded nil": struct{ Memory }{},
		"embedded buffer": struct{ *Buffer }{mustBuffer(t, 4096)}, "nil *FileRange": (*FileRange)(nil), "nil *DeviceRange": (*DeviceRange)(nil),
		"nil *HostRange": (*HostRange)(nil), "zero HostRange": &HostRange{}, "nil Buffer for a device": (*Buffer)(nil).ForDevice(1)} {
		_, err := a.Register(m)
		require.ErrorIs(t, err, ErrInvalid, name)
	}
}
