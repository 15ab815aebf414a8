package diagnose

import (
	"io/fs"
	"net"
	"strconv"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// fullHost has no limits and no capabilities.
func fullHost() *Host {
	return &Host{FS: fstest.MapFS{}, Env: map[string]string{}, MemLock: unix.RLIM_INFINITY, OpenFiles: 1 << 20, ShmSize: 8 << 30, ShmFree: 8 << 30}
}

func status(capEff string) fstest.MapFS {
	return fstest.MapFS{"proc/self/status": {Data: []byte("Name:\tnixlgo\nCapPrm:\tffffffffffffffff\nCapEff:\t" + capEff + "\n")}}
}

// ucx#7336, cudf-spark#7632 (neighbours.md 7): registration fails for want of locked memory.
func TestMemLockLimitMattersOnlyWithRDMAAndWithoutTheCapability(t *testing.T) {
	for _, c := range []struct {
		name    string
		memlock uint64
		fs      fs.FS
		rdma    bool
		want    Status
		value   string
	}{
		{"unlimited", unix.RLIM_INFINITY, fstest.MapFS{}, true, OK, "unlimited"},
		{"limited, TCP", 8 << 20, fstest.MapFS{}, false, OK, "8 MiB"},
		{"limited, RDMA", 8 << 20, status("0000000000000000"), true, Warn, "8 MiB"},
		{"limited, RDMA, every capability but IPC_LOCK", 65536, status("ffffffffffffbfff"), true, Warn, "64 KiB"},
		{"limited, RDMA, IPC_LOCK", 65536, status("0000000000004000"), true, OK, "64 KiB"},
		{"limited, RDMA, status unreadable", 65536, fstest.MapFS{}, true, Warn, "64 KiB"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := fullHost()
			h.MemLock, h.FS = c.memlock, c.fs
			f := h.checkMemLock(c.rdma)
			require.Equal(t, c.want, f.Status)
			require.Equal(t, c.value, f.Value)
			requireRemedy(t, f)
		})
	}
}

// requireRemedy: what is wrong comes with a cause and something to do, what is right with nothing to do.
func requireRemedy(t *testing.T, f Finding) {
	t.Helper()
	if f.Status == OK {
		require.Empty(t, f.Remedy, "%+v", f)
		return
	}
	require.NotEmpty(t, f.Cause, "%+v", f)
	require.NotEmpty(t, f.Remedy, "%+v", f)
}

func TestFewOpenFilesAreAWarning(t *testing.T) {
	for limit, want := range map[uint64]Status{1024: Warn, 4095: Warn, 4096: OK, unix.RLIM_INFINITY: OK} {
		h := fullHost()
		h.OpenFiles = limit
		require.Equal(t, want, h.checkOpenFiles().Status, limit)
		requireRemedy(t, h.checkOpenFiles())
	}
}

// files is a process with so many open files, without an RDMA device.
func files(n int) fstest.MapFS {
	m := fstest.MapFS{}
	for i := range n {
		m["proc/self/fd/"+strconv.Itoa(i)] = &fstest.MapFile{}
	}
	return m
}

func TestFewDescriptorsLeftAreAWarning(t *testing.T) {
	for _, c := range []struct {
		used  int
		limit uint64
		want  Status
		value string
	}{
		{9, 24, Warn, "9 of 24 in use"}, {9, 72, Warn, "9 of 72 in use"}, {9, 73, OK, "9 of 73 in use"}, {1000, 1024, Warn, "1000 of 1024 in use"},
		{9, unix.RLIM_INFINITY, OK, "9 in use"}, {0, 24, OK, "unknown"},
	} {
		h := fullHost()
		h.FS, h.OpenFiles = files(c.used), c.limit
		f := h.checkDescriptors()
		require.Equal(t, c.want, f.Status, "%+v", c)
		require.Equal(t, c.value, f.Value)
		requireRemedy(t, f)
	}
}

// A library that fails where a limit is reached says a bare -2: the limit comes first, and not a variable that is right.
func TestAFailureOfTheLibraryIsFirstOfAllThatOfALimit(t *testing.T) {
	h := fullHost()
	h.Env = map[string]string{libraryVariable: "/opt/libnixl_capi.so", "UCX_TLS": "tcp"}
	failed := Finding{Name: "backend", Status: Fail, Cause: "backend error (-2)"}
	require.Regexp(t, "^correct or unset UCX_TLS=tcp; see", h.Advise(failed).Remedy)
	require.Contains(t, h.Advise(Finding{Name: "library", Status: Fail}).Remedy, libraryVariable)

	h.FS, h.OpenFiles = files(9), 24
	f := h.Advise(failed)
	require.Regexp(t, `^file descriptors, 9 of 24 in use: .*; backend error \(-2\)$`, f.Cause)
	require.Regexp(t, "^raise the hard limit of open files: .*; if that is not it, correct or unset UCX_TLS", f.Remedy)
	require.NotContains(t, f.Remedy, libraryVariable)
	require.Regexp(t, "^raise the hard limit of open files: .*; if that is not it, install", h.Advise(Finding{Name: "library", Status: Fail, Remedy: "install"}).Remedy)
	require.Contains(t, h.Explain("rdma"), "file descriptors: 9 of 24 in use", "whatever the topic")

	m := newMachine()
	m.device("mlx5_0", "0000:3b:00.0", "uverbs0", true, "4: ACTIVE", "InfiniBand")
	m.gid("mlx5_0", "0", lidGID, "", "")
	h.FS, h.OpenFiles, h.MemLock = m, 4096, 64<<10
	f = h.Advise(failed)
	require.Contains(t, f.Cause, "memlock limit, 64 KiB: ")
	require.Regexp(t, "^set `ulimit -l unlimited`", f.Remedy)
}

func TestSharedMemoryThatIsMissingOrFullIsAWarning(t *testing.T) {
	for _, c := range []struct {
		name  string
		free  uint64
		err   error
		want  Status
		value string
	}{
		{"ample", 1 << 30, nil, OK, "1 GiB free of 8 GiB"},
		{"Docker's default", 64 << 20, nil, OK, "64 MiB free of 8 GiB"},
		{"nearly full", 1<<20 + 1<<19, nil, Warn, "1.5 MiB free of 8 GiB"},
		{"missing", 0, unix.ENOENT, Warn, "not there"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := fullHost()
			h.ShmFree, h.ShmErr = c.free, c.err
			f := h.checkShm()
			require.Equal(t, c.want, f.Status)
			require.Equal(t, c.value, f.Value)
			requireRemedy(t, f)
		})
	}
}

func TestCrossProcessCopyNeedsYamaAndSeccompToAllowIt(t *testing.T) {
	const none, ptrace = "0000000000000000", "0000000000080000"
	for _, c := range []struct {
		name, scope, caps string
		err               error
		want              Status
		value             string
	}{
		{"no Yama", "", none, nil, OK, "allowed, no Yama"},
		{"scope 0", "0", none, nil, OK, "allowed, ptrace_scope 0"},
		{"scope 1", "1", none, nil, OK, "allowed, ptrace_scope 1"},
		{"scope 2", "2", none, nil, Warn, "refused, ptrace_scope 2"},
		{"scope 2 with SYS_PTRACE", "2", ptrace, nil, OK, "allowed, ptrace_scope 2"},
		{"scope 3 with SYS_PTRACE", "3", ptrace, nil, Warn, "refused, ptrace_scope 3"},
		{"seccomp", "0", none, unix.EPERM, Warn, "refused"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h, root := fullHost(), status(c.caps)
			if c.scope != "" {
				root["proc/sys/kernel/yama/ptrace_scope"] = &fstest.MapFile{Data: []byte(c.scope + "\n")}
			}
			h.FS, h.CopyErr = root, c.err
			f := h.checkCopy()
			require.Equal(t, c.want, f.Status)
			require.Equal(t, c.value, f.Value)
			requireRemedy(t, f)
		})
	}
}

func TestThisHostSeesTheRunningProcess(t *testing.T) {
	t.Setenv("UCX_TLS", "tcp")
	h := ThisHost()
	require.Equal(t, "tcp", h.Env["UCX_TLS"])
	require.NotZero(t, h.OpenFiles)
	require.NoError(t, h.ShmErr)
	require.GreaterOrEqual(t, h.ShmSize, h.ShmFree)
	require.NotEmpty(t, text(h.FS, "proc/self/status"))

	var before unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_MEMLOCK, &before))
	t.Cleanup(func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &before)) })
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 4096, Max: before.Max}))
	require.EqualValues(t, 4096, ThisHost().MemLock)

	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	require.ErrorIs(t, h.Bind("127.0.0.1", l.Addr().(*net.TCPAddr).Port), unix.EADDRINUSE)
	require.ErrorIs(t, h.Bind("192.0.2.1", 0), unix.EADDRNOTAVAIL, "of no machine")
	require.NoError(t, h.Bind("", 0))
}

func TestBytesAreWrittenInTheLargestUnit(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 64 << 20: "64 MiB", 5 << 40: "5 TiB", 1 << 60: "1048576 TiB"} {
		require.Equal(t, want, bytes(n))
	}
}
