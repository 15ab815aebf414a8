//go:build etcd

package nixl

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// startEtcd runs an etcd server of the PATH, and names it in the environment.
func startEtcd(t *testing.T) {
	var ports []int
	for range 2 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
		require.NoError(t, l.Close())
	}
	client, peer := fmt.Sprintf("http://127.0.0.1:%d", ports[0]), fmt.Sprintf("http://127.0.0.1:%d", ports[1])
	c := exec.Command("etcd", "--data-dir", t.TempDir(), "--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer)
	require.NoError(t, c.Start(), "this test needs etcd in the PATH (Debian: apt-get install etcd-server)")
	t.Cleanup(func() {
		c.Process.Kill()
		c.Wait()
	})
	require.Eventually(t, func() bool {
		r, err := http.Get(client + "/health")
		if err == nil {
			r.Body.Close()
		}
		return err == nil && r.StatusCode == http.StatusOK
	}, patience, 20*time.Millisecond)
	t.Setenv("NIXL_ETCD_ENDPOINTS", client)
}

// peer-tests B21: go test -tags etcd ./nixl
func TestMetadataThroughEtcd(t *testing.T) {
	startEtcd(t)
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
