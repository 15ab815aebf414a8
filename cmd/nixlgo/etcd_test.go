//go:build etcd

package main

import (
	"io"
	"net/http"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/etcdserver"
)

func TestFetchFindsServeThroughEtcd(t *testing.T) {
	exe := program(t)
	s := etcdserver.Start(t)
	path, _ := testFile(t, 100_000)
	key := keyFile(t, testKey)
	owner := startServe(t, exe, path, "--etcd", s.URL, "--key-file", key)
	to := filepath.Join(t.TempDir(), "copy")
	code, _, stderr := run(t, exe, "fetch", owner.ready.URL, "--etcd", s.URL, "--key-file", key, "--output", to)
	require.Zero(t, code, stderr)
	requireSameFile(t, path, to)
	resp, err := http.Get(owner.ready.URL + "/metrics")
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Regexp(t, `(?m)^nixlgo_handshake_answered_total 0$`, string(text), "the side channel was not asked")

	s.Kill()
	code, _, stderr = run(t, exe, "serve", path, "--etcd", s.URL)
	require.Equal(t, exitFailed, code)
	require.Contains(t, stderr, "etcd")
}
