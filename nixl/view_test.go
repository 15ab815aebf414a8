package nixl

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// peer-tests B57: what is refused before the library. Without a GPU, the library
// refuses the rest, by an error and not a crash.
func TestViewsAreChecked(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	a, owner := l.reader, l.owner.Name()
	theirs := RemoteDesc{Desc: blocks(l.src, 4096)[0], Agent: owner}
	local := func(descs ...Desc) error { _, err := a.ViewLocal(DRAM, descs, TransferOptions{}); return err }
	remote := func(descs ...RemoteDesc) error { _, err := a.ViewRemote(DRAM, descs, TransferOptions{}); return err }
	require.ErrorIs(t, local(), ErrInvalid)
	require.ErrorIs(t, local(Desc{Addr: 0xdeadbeef, Len: 8}), ErrInvalid)
	require.ErrorIs(t, remote(), ErrInvalid)
	require.ErrorIs(t, remote(RemoteDesc{}), ErrInvalid, "only a placeholder")
	require.ErrorIs(t, remote(RemoteDesc{Desc: theirs.Desc, Agent: "nobody"}), ErrNotFound)
	require.ErrorIs(t, remote(RemoteDesc{Desc: Desc{Addr: 0xdeadbeef, Len: 8}, Agent: owner}), ErrInvalid)
	require.ErrorIs(t, remote(RemoteDesc{Desc: theirs.Desc, Agent: "a\x00b"}), ErrInvalid)
	_, err := a.ViewLocal(DRAM, blocks(l.dst, 4096), TransferOptions{Backend: l.owner.s.backends[0]})
	require.ErrorIs(t, err, ErrInvalid)
	if lacks(t, "nixl_capi_prep_mem_view_local") {
		requireLacks(t, local(blocks(l.dst, 4096)...), "nixl_capi_prep_mem_view_local", "1.5.0")
		requireLacks(t, remote(theirs), "nixl_capi_prep_mem_view_remote", "1.5.0")
	} else if !hasGPU() {
		require.ErrorIs(t, local(blocks(l.dst, 4096)...), ErrBackend)
		require.ErrorIs(t, remote(theirs, RemoteDesc{}), ErrBackend)
	}
	require.NoError(t, a.Close())
	require.ErrorIs(t, local(blocks(l.dst, 4096)...), ErrClosed)
	require.ErrorIs(t, remote(theirs), ErrClosed)
}
