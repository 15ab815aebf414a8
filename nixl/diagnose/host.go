package diagnose

import (
	"fmt"
	"io/fs"
	"math"
	"net"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Host is what the checks look at. Sizes are in bytes.
type Host struct {
	FS        fs.FS // the root directory
	Env       map[string]string
	MemLock   uint64 // soft RLIMIT_MEMLOCK; unix.RLIM_INFINITY: unlimited
	OpenFiles uint64 // soft RLIMIT_NOFILE; Go raises it to the hard limit at start
	ShmSize   uint64 // of /dev/shm
	ShmFree   uint64
	ShmErr    error
	CopyErr   error // what process_vm_readv on this very process answers
	// Bind says why a TCP socket cannot listen on host and port, nil when it can. Empty and 0 mean any.
	Bind func(host string, port int) error
}

// ThisHost looks at the machine and at the process that it runs in.
func ThisHost() *Host {
	h := &Host{FS: os.DirFS("/"), Env: map[string]string{}}
	for _, kv := range os.Environ() {
		k, v, _ := strings.Cut(kv, "=")
		h.Env[k] = v
	}
	h.MemLock = softLimit(unix.RLIMIT_MEMLOCK)
	h.OpenFiles = softLimit(unix.RLIMIT_NOFILE)
	var st unix.Statfs_t
	if h.ShmErr = unix.Statfs("/dev/shm", &st); h.ShmErr == nil {
		h.ShmSize, h.ShmFree = st.Blocks*uint64(st.Bsize), st.Bavail*uint64(st.Bsize)
	}
	h.CopyErr = tryCopy()
	h.Bind = bind
	return h
}

func bind(host string, port int) error {
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return err
	}
	return l.Close()
}

func softLimit(resource int) uint64 {
	var l unix.Rlimit
	if unix.Getrlimit(resource, &l) != nil {
		return unix.RLIM_INFINITY // cannot fail for a known resource
	}
	return l.Cur
}

// tryCopy reads from this very process. A stale address of from would be read, never written.
func tryCopy() error {
	var from, to [8]byte
	local := []unix.Iovec{{Base: &to[0], Len: uint64(len(to))}}
	remote := []unix.RemoteIovec{{Base: uintptr(unsafe.Pointer(&from[0])), Len: len(from)}}
	_, err := unix.ProcessVMReadv(os.Getpid(), local, remote, 0)
	return err
}

// capability reports whether the process holds capability number n (linux/capability.h).
func (h *Host) capability(n int) bool {
	status, err := fs.ReadFile(h.FS, "proc/self/status")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "CapEff:"); ok {
			bits, err := strconv.ParseUint(strings.TrimSpace(v), 16, 64)
			return err == nil && bits>>n&1 != 0
		}
	}
	return false
}

const (
	capIPCLock   = 14
	capSysPtrace = 19
)

// checkMemLock: RDMA devices pin what is registered; TCP and shared memory pin nothing.
func (h *Host) checkMemLock(rdma bool) Finding {
	f := Finding{Name: "memlock limit", Status: OK, Value: limit(h.MemLock)}
	switch {
	case h.MemLock == unix.RLIM_INFINITY:
	case h.capability(capIPCLock):
		f.Cause = "CAP_IPC_LOCK is held, so the limit does not apply"
	case !rdma:
		f.Cause = "without an RDMA device nothing is pinned"
	default:
		f.Status = Warn
		f.Cause = "RDMA pins registered memory: a KV cache larger than this cannot be registered"
		f.Remedy = "set `ulimit -l unlimited`, LimitMEMLOCK=infinity, or give the container the capability IPC_LOCK"
	}
	return f
}

const fewFiles = 4096

var raiseFiles = fmt.Sprintf("raise the hard limit of open files: `ulimit -Hn %d`, LimitNOFILE=%d or the container's ulimits", fewFiles, fewFiles)

func (h *Host) checkOpenFiles() Finding {
	f := Finding{Name: "open-file limit", Status: OK, Value: strconv.FormatUint(h.OpenFiles, 10)}
	if h.OpenFiles == unix.RLIM_INFINITY {
		f.Value = "unlimited"
	}
	if h.OpenFiles < fewFiles {
		f.Status = Warn
		f.Cause = "every peer takes sockets; an engine with many peers runs out of them"
		f.Remedy = raiseFiles
	}
	return f
}

const (
	descriptors = "file descriptors"
	// The command doctor, which opens two backends over TCP, fails with 44 in all and passes with 48. RDMA devices take more.
	backendFiles = 64
)

// checkDescriptors: a process that has none left fails at whatever comes next, and the library says only that it failed.
func (h *Host) checkDescriptors() Finding {
	f := Finding{Name: descriptors, Status: OK}
	entries, err := fs.ReadDir(h.FS, "proc/self/fd")
	if err != nil {
		f.Value = "unknown"
		return f
	}
	used := uint64(len(entries))
	if h.OpenFiles == unix.RLIM_INFINITY {
		f.Value = fmt.Sprintf("%d in use", used)
		return f
	}
	f.Value = fmt.Sprintf("%d of %d in use", used, h.OpenFiles)
	if used+backendFiles > h.OpenFiles {
		return f.warn(fmt.Sprintf("a NIXL backend takes about twenty, and more with each RDMA device: with fewer than %d left, what opens one may fail", backendFiles), raiseFiles)
	}
	return f
}

const littleShm = 64 << 20 // what Docker gives by default

func (h *Host) checkShm() Finding {
	f := Finding{Name: "/dev/shm", Status: OK, Remedy: "mount a larger /dev/shm: `docker run --shm-size=1g`, or in Kubernetes an emptyDir of medium Memory there"}
	switch {
	case h.ShmErr != nil:
		f.Status, f.Value, f.Cause = Warn, "not there", fmt.Sprintf("UCX's posix transport needs it: %v", h.ShmErr)
	case h.ShmFree < littleShm:
		f.Status, f.Cause = Warn, "UCX's posix transport keeps its queues there"
	default:
		f.Remedy = ""
	}
	if h.ShmErr == nil {
		f.Value = fmt.Sprintf("%s free of %s", bytes(h.ShmFree), bytes(h.ShmSize))
	}
	return f
}

// checkCopy: UCX's cma transport copies between processes of one machine with process_vm_readv.
func (h *Host) checkCopy() Finding {
	f := Finding{Name: "cross-process copy", Status: OK}
	scope := "no Yama"
	text, err := fs.ReadFile(h.FS, "proc/sys/kernel/yama/ptrace_scope")
	if err == nil {
		scope = strings.TrimSpace(string(text))
		f.Value = "allowed, ptrace_scope " + scope
	} else {
		f.Value = "allowed, no Yama"
	}
	switch {
	case h.CopyErr != nil:
		f.Value, f.Cause = "refused", fmt.Sprintf("process_vm_readv: %v; a seccomp profile does that", h.CopyErr)
		f.Remedy = "allow process_vm_readv and process_vm_writev in the container's seccomp profile, or add the capability SYS_PTRACE"
	case scope == "1":
		f.Cause = "UCX permits it for its own processes by prctl(PR_SET_PTRACER)"
		return f
	case scope == "2" && !h.capability(capSysPtrace), scope == "3":
		f.Value, f.Cause = "refused, ptrace_scope "+scope, "the Yama security module forbids it"
		f.Remedy = "set kernel.yama.ptrace_scope to 0 or 1, or for 2 add the capability SYS_PTRACE"
	default:
		return f
	}
	f.Status = Warn
	f.Cause += "; READs within this machine take a slower transport"
	return f
}

func limit(n uint64) string {
	if n == unix.RLIM_INFINITY {
		return "unlimited"
	}
	return bytes(n)
}

// bytes writes a size in the largest unit that leaves it at 1 or more.
func bytes(n uint64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	v, i := float64(n), 0
	for v >= 1024 && i < len(units)-1 {
		v, i = v/1024, i+1
	}
	return strconv.FormatFloat(math.Round(v*10)/10, 'f', -1, 64) + " " + units[i]
}
