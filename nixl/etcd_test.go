//go:build etcd

package nixl

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/etcdserver"
)

// peer-tests B21: go test -tags etcd ./nixl
func TestMetadataThroughEtcd(t *testing.T) {
	t.Setenv("NIXL_ETCD_ENDPOINTS", etcdserver.Start(t).URL)
	owner, reader := newUCX(t, Config{}), newUCX(t, Config{})
	src, dst := registered(t, owner, 1<<16), registered(t, reader, 1<<16)
	fill(src.Bytes(), 3)
	store := netip.AddrPort{}
	require.NoError(t, owner.SendMetadata(store))
	known := func() error { return reader.CheckRemote(owner.Name(), DRAM, nil) }
	eventually(t, nil, func() error { // what is not there yet when it is fetched is fetched again
		require.NoError(t, reader.FetchRemote(owner.Name(), store))
		time.Sleep(100 * time.Millisecond)
		return known()
	})
	remote, err := reader.PrepareRemote(owner.Name(), DRAM, blocks(src, 4096))
	require.NoError(t, err)
	local, err := reader.PrepareLocal(DRAM, blocks(dst, 4096))
	require.NoError(t, err)
	x, err := reader.NewTransfer(Read, local, nil, remote, nil, TransferOptions{})
	require.NoError(t, err)
	finish(t, x)
	require.Equal(t, src.Bytes(), dst.Bytes())
	require.NoError(t, owner.InvalidateLocal(store))
	eventually(t, ErrNotFound, known)
	_, err = x.Post()
	require.ErrorIs(t, err, ErrStale)
	require.ErrorIs(t, owner.SendPartialMetadata(store), ErrInvalid)
}
