package nixl

import (
	"math"
	"reflect"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBufferIsPageAlignedAndZeroed(t *testing.T) {
	b := mustBuffer(t, 5000)
	require.Zero(t, b.Addr()%4096)
	require.Len(t, b.Bytes(), 5000)
	require.Equal(t, make([]byte, 5000), b.Bytes())
	d, err := b.Desc(4096, 904)
	require.NoError(t, err)
	require.Equal(t, Desc{Addr: b.Addr() + 4096, Len: 904}, d)
	for _, c := range [][2]int{{-1, 1}, {0, 0}, {0, 5001}, {4999, 2}, {5001, 1}, {1, math.MaxInt}} {
		_, err := b.Desc(c[0], c[1])
		require.ErrorIs(t, err, ErrInvalid, c)
	}
	for _, size := range []int{0, -1, math.MinInt, math.MaxInt} {
		_, err := AllocBuffer(size)
		require.ErrorIs(t, err, ErrInvalid, size)
	}
}

// Reading memory that the owner has unmapped kills the owner over TCP, so a
// registered buffer outlives its Close and even its deregistration.
// openucx/ucx#9623, nixl#2048, cases.md 2
func TestRegisteredBufferStaysMappedUntilItsAgentsEnd(t *testing.T) {
	a, c := newUCX(t, Config{}), newUCX(t, Config{})
	b := mustBuffer(t, 1<<16)
	bytes := b.Bytes()
	bytes[7] = 42
	ra, err := a.Register(b)
	require.NoError(t, err)
	_, err = c.Register(b)
	require.NoError(t, err)
	require.NoError(t, ra.Close())
	require.NoError(t, b.Close())
	require.Nil(t, b.Bytes())
	require.Zero(t, b.Addr())
	require.EqualValues(t, 42, bytes[7], "two agents live")
	require.NoError(t, a.Close())
	require.EqualValues(t, 42, bytes[7], "one agent lives")
	require.True(t, mapped(t, b))
	require.NoError(t, c.Close())
	require.False(t, mapped(t, b), "the last agent ended")
	_, err = a.Register(b)
	require.ErrorIs(t, err, ErrClosed)
}

func TestUnregisteredBufferIsUnmappedAtOnce(t *testing.T) {
	b := mustBuffer(t, 1<<16)
	require.True(t, mapped(t, b))
	require.NoError(t, b.Close())
	require.NoError(t, b.Close(), "a second Close")
	require.False(t, mapped(t, b))
}

func TestFailedRegistrationStillHoldsTheBuffer(t *testing.T) {
	a, err := NewAgent("", Config{})
	require.NoError(t, err)
	b := mustBuffer(t, 4096)
	_, err = a.Register(b)
	require.ErrorIs(t, err, ErrInvalid, "no backend yet")
	_, err = a.Register(nil)
	require.ErrorIs(t, err, ErrInvalid)
	require.NoError(t, a.Close())
}

func TestOverlappingRegistrationsAreRefused(t *testing.T) {
	a := newUCX(t, Config{})
	b := registered(t, a, 1<<16)
	_, err := a.Register(b)
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "registered already")
}

func TestBackendOfAnotherAgentIsRefused(t *testing.T) {
	a, other := newUCX(t, Config{}), newUCX(t, Config{})
	_, err := a.Register(mustBuffer(t, 4096), other.s.backends[0])
	require.ErrorIs(t, err, ErrInvalid)
	_, err = a.Register(mustBuffer(t, 4096), nil)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = a.Register(mustBuffer(t, 4096), a.s.backends[0])
	require.NoError(t, err)
}

// Natively a registered Go slice that is collected hands other data to peers.
// The type system refuses it: Memory is sealed, and nothing that implements it
// holds a slice of the Go heap. lmdb-go#28, cases.md 39
func TestGoMemoryCannotBeRegistered(t *testing.T) {
	iface := reflect.TypeFor[Memory]()
	sealed := false
	for i := range iface.NumMethod() {
		sealed = sealed || iface.Method(i).PkgPath != ""
	}
	require.True(t, sealed, "somebody else's type could be a Memory")
	require.False(t, reflect.TypeFor[[]byte]().Implements(iface))

	// What the package hands out is not on the heap of Go.
	a := newUCX(t, Config{})
	heap := func() uint64 {
		runtime.GC()
		var stats runtime.MemStats
		runtime.ReadMemStats(&stats)
		return stats.HeapAlloc
	}
	before := heap()
	b := registered(t, a, 64<<20)
	fill(b.Bytes(), 1)
	require.Less(t, heap(), before+32<<20)
	require.Equal(t, 64<<20, b.Len())
}

func TestRegistrationInUseCannotBeClosed(t *testing.T) {
	a := newUCX(t, Config{})
	b := mustBuffer(t, 1<<16)
	r, err := a.Register(b)
	require.NoError(t, err)
	local, err := a.PrepareLocal(DRAM, blocks(b, 4096)[:8])
	require.NoError(t, err)
	self, err := a.PrepareRemote(a.Name(), DRAM, blocks(b, 4096)[8:])
	require.NoError(t, err)
	require.ErrorIs(t, r.Close(), ErrActive)
	x, err := a.NewTransfer(Read, local, nil, self, nil, TransferOptions{})
	require.NoError(t, err)
	require.NoError(t, local.Close())
	require.NoError(t, self.Close())
	require.ErrorIs(t, r.Close(), ErrActive, "the transfer still needs it")
	finish(t, x)
	require.NoError(t, x.Close())
	require.NoError(t, r.Close())
	require.NoError(t, r.Close(), "a second Close")
	_, err = a.PrepareLocal(DRAM, blocks(b, 4096))
	require.ErrorIs(t, err, ErrInvalid)
}

func TestReregisteredMemoryServesLoopback(t *testing.T) {
	a := newUCX(t, Config{})
	dst := registered(t, a, 4096)
	src := mustBuffer(t, 4096)
	for i := range byte(10) {
		r, err := a.Register(src)
		require.NoError(t, err)
		src.Bytes()[0] = i + 1
		local, err := a.PrepareLocal(DRAM, blocks(dst, 4096))
		require.NoError(t, err)
		self, err := a.PrepareRemote(a.Name(), DRAM, blocks(src, 4096))
		require.NoError(t, err)
		x, err := a.NewTransfer(Read, local, nil, self, nil, TransferOptions{})
		require.NoError(t, err)
		finish(t, x)
		require.Equal(t, i+1, dst.Bytes()[0])
		require.NoError(t, x.Close())
		require.NoError(t, self.Close())
		require.NoError(t, local.Close())
		require.NoError(t, r.Close())
	}
}

func TestMemTypeNames(t *testing.T) {
	for m := range MemType(memTypes) {
		got, err := ParseMemType(m.String())
		require.NoError(t, err)
		require.Equal(t, m, got)
	}
	got, err := ParseMemType("dram")
	require.NoError(t, err)
	require.Equal(t, DRAM, got)
	_, err = ParseMemType("UNKNOWN")
	require.ErrorIs(t, err, ErrInvalid)
	require.Equal(t, "MemType(9)", MemType(9).String())
}
