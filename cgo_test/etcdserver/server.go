// Package etcdserver runs an etcd of the PATH for tests, and takes it away from them.
package etcdserver

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/ports"
)

// Server is an etcd of one member on the loopback interface. Its methods are for one goroutine.
type Server struct {
	URL string // for clients

	t    testing.TB
	dir  string
	peer string
	cmd  *exec.Cmd
	said bytes.Buffer
}

// Start starts a server, which ends with the test.
func Start(t testing.TB) *Server {
	t.Helper()
	var urls [2]string
	for i := range urls {
		port, err := ports.Free()
		require.NoError(t, err)
		urls[i] = fmt.Sprintf("http://127.0.0.1:%d", port)
	}
	s := &Server{URL: urls[0], t: t, dir: t.TempDir(), peer: urls[1]}
	t.Cleanup(func() {
		s.Kill()
		if t.Failed() {
			t.Logf("etcd said:\n%s", s.said.Bytes()[max(0, s.said.Len()-4000):])
		}
	})
	s.Restart()
	return s
}

// Kill ends the server by SIGKILL.
func (s *Server) Kill() {
	if s.cmd == nil {
		return
	}
	s.cmd.Process.Kill()
	s.cmd.Wait()
	s.cmd = nil
}

// Restart starts a killed server anew, on its address and with its data.
func (s *Server) Restart() {
	s.t.Helper()
	s.cmd = exec.Command("etcd", "--data-dir", s.dir, "--listen-client-urls", s.URL, "--advertise-client-urls", s.URL,
		"--listen-peer-urls", s.peer, "--initial-advertise-peer-urls", s.peer, "--initial-cluster", "default="+s.peer)
	s.cmd.Stderr = &s.said
	require.NoError(s.t, s.cmd.Start(), "this test needs etcd in the PATH (Debian: apt-get install etcd-server)")
	require.Eventually(s.t, func() bool {
		r, err := http.Get(s.URL + "/health")
		if err == nil {
			r.Body.Close()
		}
		return err == nil && r.StatusCode == http.StatusOK
	}, 30*time.Second, 20*time.Millisecond, "etcd does not get healthy")
}

// Empty takes a killed server's data.
func (s *Server) Empty() {
	s.t.Helper()
	require.NoError(s.t, os.RemoveAll(s.dir))
}
