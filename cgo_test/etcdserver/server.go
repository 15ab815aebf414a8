// Package etcdserver runs an etcd of the PATH for tests, and takes it away from them.
package etcdserver

import (
	"bufio"
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/ports"
)

// Server is an etcd of one member on the loopback interface. Its methods are for one goroutine.
type Server struct {
	URL string // for clients

	t     testing.TB
	dir   string
	peer  string
	about string // where its health and metrics are, without TLS
	flags []string
	cmd   *exec.Cmd
	said  bytes.Buffer
}

// Start starts a server, which ends with the test. With --cert-file among more flags, clients need TLS.
func Start(t testing.TB, flags ...string) *Server {
	t.Helper()
	var urls [3]string
	for i := range urls {
		port, err := ports.Free()
		require.NoError(t, err)
		urls[i] = fmt.Sprintf("http://127.0.0.1:%d", port)
	}
	s := &Server{URL: urls[0], t: t, dir: t.TempDir(), peer: urls[1], about: urls[2], flags: flags}
	if slices.ContainsFunc(flags, func(f string) bool { return strings.HasPrefix(f, "--cert-file=") }) {
		s.URL = strings.Replace(s.URL, "http:", "https:", 1)
	}
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
	s.cmd = exec.Command("etcd", append([]string{"--data-dir", s.dir, "--listen-client-urls", s.URL, "--advertise-client-urls", s.URL,
		"--listen-peer-urls", s.peer, "--initial-advertise-peer-urls", s.peer, "--initial-cluster", "default=" + s.peer,
		"--listen-metrics-urls", s.about}, s.flags...)...)
	s.cmd.Stderr = &s.said
	require.NoError(s.t, s.cmd.Start(), "this test needs etcd in the PATH (Debian: apt-get install etcd-server)")
	require.Eventually(s.t, func() bool {
		r, err := http.Get(s.about + "/health")
		if err == nil {
			r.Body.Close()
		}
		return err == nil && r.StatusCode == http.StatusOK
	}, 30*time.Second, 20*time.Millisecond, "etcd does not get healthy")
}

// Stop stops the server, as one that hangs, until Continue. It answers nothing any more when Stop returns.
func (s *Server) Stop() {
	s.t.Helper()
	s.signal(syscall.SIGSTOP)
	var status syscall.WaitStatus
	_, err := syscall.Wait4(s.cmd.Process.Pid, &status, syscall.WUNTRACED, nil)
	require.NoError(s.t, err)
	require.True(s.t, status.Stopped())
}

// Continue ends a Stop.
func (s *Server) Continue() { s.signal(syscall.SIGCONT) }

func (s *Server) signal(sig syscall.Signal) {
	s.t.Helper()
	require.NoError(s.t, s.cmd.Process.Signal(sig))
}

// Metric is the value of a metric without labels.
func (s *Server) Metric(name string) (v float64) {
	s.t.Helper()
	r, err := http.Get(s.about + "/metrics")
	require.NoError(s.t, err)
	defer r.Body.Close()
	for lines := bufio.NewScanner(r.Body); lines.Scan(); {
		if value, found := strings.CutPrefix(lines.Text(), name+" "); found {
			v, err = strconv.ParseFloat(value, 64)
			require.NoError(s.t, err)
			return v
		}
	}
	require.Fail(s.t, "etcd has no such metric", name)
	return 0
}

// RSS is how much memory the server has, in bytes.
func (s *Server) RSS() int64 { return int64(s.Metric("process_resident_memory_bytes")) }

// CPU is how much time of a core the server has taken since its start.
func (s *Server) CPU() time.Duration {
	return time.Duration(s.Metric("process_cpu_seconds_total") * float64(time.Second))
}

// Empty takes a killed server's data.
func (s *Server) Empty() {
	s.t.Helper()
	require.NoError(s.t, os.RemoveAll(s.dir))
}
