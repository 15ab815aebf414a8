package cgotest

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/nixl"
)

// signalsChild uses signals the way Go programs do, with a UCX backend alive.
func signalsChild() int {
	caught := make(chan os.Signal, 8)
	signals := []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGINT, syscall.SIGALRM}
	for _, s := range signals {
		signal.Notify(caught, s)
	}
	a, err := nixl.NewAgent("", nixl.Config{})
	if err != nil {
		return fail(err)
	}
	if _, err := a.CreateBackend("UCX", nil); err != nil {
		return fail(err)
	}
	fmt.Println(recovers(func() { var p *int; *p = 1 }))
	for _, s := range signals {
		syscall.Kill(os.Getpid(), s)
		select {
		case got := <-caught:
			fmt.Println(got == s)
		case <-time.After(patience):
			fmt.Println("lost", s)
		}
	}
	var profile bytes.Buffer
	if err := pprof.StartCPUProfile(&profile); err != nil { // SIGPROF
		return fail(err)
	}
	for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); {
		a.Notifications(nil)
	}
	pprof.StopCPUProfile()
	fmt.Println(sampled(&profile, "cgo_test.signalsChild"))
	fmt.Println(a.Close() == nil)
	return 0
}

// sampled reports whether a profile has samples of a function: its string table has no other function names.
func sampled(profile io.Reader, function string) bool {
	z, err := gzip.NewReader(profile)
	if err != nil {
		return false
	}
	text, err := io.ReadAll(z)
	return err == nil && bytes.Contains(text, []byte(function))
}

func recovers(f func()) (ok bool) {
	defer func() { ok = recover() != nil }()
	f()
	return false
}

// UCX takes SIGSEGV if the environment asks for it, and SIGHUP by default.
// openucx/ucx#4870, openucx/ucx#3337, chdb-go#37, cases.md 33
func TestGoKeepsItsSignals(t *testing.T) {
	for _, preset := range []string{"", "UCX_HANDLE_ERRORS=bt", "UCX_HANDLE_ERRORS=bt,freeze,debug"} {
		p := start(t, "signals", strings.Fields(preset)...)
		out, err := p.wait()
		require.NoError(t, err, "%s: %s", preset, &p.stderr)
		require.Equal(t, strings.Repeat("true\n", 8), out, preset)
	}
}

// loadChild loads the library and says what happened.
func loadChild() int {
	l, err := nixl.Load(os.Getenv("LOAD_PATH"))
	if err != nil {
		fmt.Printf("stub=%v library=%v\n%v\n", errors.Is(err, nixl.ErrStub), errors.Is(err, nixl.ErrLibrary), err)
		if _, err := nixl.NewAgent("", nixl.Config{}); err == nil {
			return fail(errors.New("an agent without a library"))
		}
		return 3
	}
	fmt.Println(l.Path)
	for _, d := range nixl.EnvDefaults() {
		fmt.Println(d.Name + "=" + os.Getenv(d.Name))
	}
	return 0
}

// bare is a directory without a library around, and the environment to match.
func bare(t *testing.T) (dir string, env []string) {
	t.Helper()
	dir = t.TempDir()
	exe := filepath.Join(dir, "child")
	require.NoError(t, copyFile(os.Args[0], exe))
	return dir, append(without("NIXLGO_LIBRARY", "NIXL_PREFIX", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PATH"),
		"PATH="+dir, childVariable+"=load")
}

func copyFile(from, to string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o755)
}

func runIn(dir string, env []string, more ...string) (string, error) {
	cmd := exec.Command(filepath.Join(dir, "child"))
	cmd.Dir, cmd.Env = dir, append(env, more...)
	out, err := cmd.Output()
	return string(out), err
}

// wheel is the unpacked wheel of this checkout.
func wheel(t *testing.T) (root, libs string) {
	t.Helper()
	_, file, _, _ := runtime.Caller(0)
	root = filepath.Join(filepath.Dir(file), "..", ".nixl")
	found, err := filepath.Glob(filepath.Join(root, ".nixl_cu*.mesonpy.libs"))
	require.NoError(t, err)
	require.Len(t, found, 1, "make deps unpacks the library into .nixl")
	root, err = filepath.EvalSymlinks(root)
	require.NoError(t, err)
	return root, filepath.Join(root, filepath.Base(found[0]))
}

// A library that is not found is an error at once that lists every place.
// dynamo#13547, dynamo#13649, nixl#1358, cases.md 34
func TestMissingLibraryListsEveryPlace(t *testing.T) {
	dir, env := bare(t)
	out, err := runIn(dir, env)
	require.Error(t, err)
	require.Contains(t, out, "stub=false library=true")
	for _, place := range []string{
		".nixl in the working directory or above: " + dir,
		".nixl in the executable's directory or above: " + dir,
		"the wheel of python3",
		"NIXL_PREFIX: not set",
		"the system's loader: libnixl_capi.so.0: ",
		"the system's loader: libnixl_capi.so: ",
		"set NIXLGO_LIBRARY",
	} {
		require.Contains(t, out, place)
	}
	for variable, reason := range map[string]string{
		"NIXLGO_LIBRARY=/nonexistent.so": "NIXLGO_LIBRARY: /nonexistent.so: ",
		"NIXLGO_LIBRARY=":                "the path is empty",
		"NIXLGO_LIBRARY=" + dir:          "neither libnixl_capi.so.0 nor libnixl_capi.so is there",
		"LOAD_PATH=/nonexistent.so":      "the given path: /nonexistent.so: ",
		"LOAD_PATH=" + dir + "/child":    "the given path: " + dir + "/child: ",
		"VIRTUAL_ENV=" + dir:             "the wheel in VIRTUAL_ENV: " + dir,
		"NIXL_PREFIX=" + dir:             "NIXL_PREFIX: " + dir + "/lib: neither",
	} {
		out, err := runIn(dir, env, variable)
		require.Error(t, err, variable)
		require.Contains(t, out, reason, variable)
	}
}

func TestLibraryIsFoundInEveryPlace(t *testing.T) {
	root, libs := wheel(t)
	for name, place := range map[string]func(dir string) (variable, want string){
		"working directory": func(dir string) (string, string) {
			require.NoError(t, os.Symlink(root, filepath.Join(dir, ".nixl")))
			return "X=", filepath.Join(dir, ".nixl", filepath.Base(libs), "libnixl_capi.so")
		},
		"variable, file": func(string) (string, string) {
			return "NIXLGO_LIBRARY=" + libs + "/libnixl_capi.so", libs + "/libnixl_capi.so"
		},
		"variable, directory": func(string) (string, string) {
			return "NIXLGO_LIBRARY=" + libs, libs + "/libnixl_capi.so"
		},
		"variable, unpacked wheel": func(string) (string, string) {
			return "NIXLGO_LIBRARY=" + root, libs + "/libnixl_capi.so"
		},
		"path, unpacked wheel, in a directory of odd name": func(dir string) (string, string) {
			odd := filepath.Join(dir, "[a]*")
			require.NoError(t, os.Symlink(root, odd))
			return "LOAD_PATH=" + odd, filepath.Join(odd, filepath.Base(libs), "libnixl_capi.so")
		},
		"variable, Python environment": func(dir string) (string, string) {
			lib := filepath.Join(dir, "venv", "lib", "python3.99")
			require.NoError(t, os.MkdirAll(lib, 0o755))
			require.NoError(t, os.Symlink(root, filepath.Join(lib, "site-packages")))
			return "NIXLGO_LIBRARY=" + filepath.Join(dir, "venv"), filepath.Join(lib, "site-packages", filepath.Base(libs), "libnixl_capi.so")
		},
		"path": func(string) (string, string) {
			return "LOAD_PATH=" + libs, libs + "/libnixl_capi.so"
		},
		"virtual environment": func(dir string) (string, string) {
			lib := filepath.Join(dir, "venv", "lib", "python3.99")
			require.NoError(t, os.MkdirAll(lib, 0o755))
			require.NoError(t, os.Symlink(root, filepath.Join(lib, "site-packages")))
			return "VIRTUAL_ENV=" + filepath.Join(dir, "venv"), filepath.Join(lib, "site-packages", filepath.Base(libs), "libnixl_capi.so")
		},
		"python3": func(dir string) (string, string) {
			site := filepath.Join(dir, "site-packages")
			require.NoError(t, os.Symlink(root, site))
			script := "#!/bin/sh\necho /usr/lib/python3\necho " + site + "\n"
			require.NoError(t, os.WriteFile(filepath.Join(dir, "python3"), []byte(script), 0o755))
			return "X=", filepath.Join(site, filepath.Base(libs), "libnixl_capi.so")
		},
		"prefix, versioned name": func(dir string) (string, string) {
			lib := filepath.Join(dir, "prefix", "lib64")
			require.NoError(t, os.MkdirAll(lib, 0o755))
			require.NoError(t, os.Symlink(libs+"/libnixl_capi.so", lib+"/libnixl_capi.so.0"))
			return "NIXL_PREFIX=" + filepath.Join(dir, "prefix"), lib + "/libnixl_capi.so.0"
		},
		"system": func(string) (string, string) {
			return "LD_LIBRARY_PATH=" + libs, "libnixl_capi.so"
		},
	} {
		dir, env := bare(t)
		variable, want := place(dir)
		out, err := runIn(dir, env, variable)
		require.NoError(t, err, "%s: %s", name, out)
		first, _, _ := strings.Cut(out, "\n")
		require.Equal(t, want, first, name)
	}
}

// Whoever can put .nixl into /tmp must not run code in the programs that are started below it: a library that nobody named is
// loaded only where nobody else can change it. Who names it decides himself.
func TestUnpackedLibraryThatOthersCanChangeIsNotLoaded(t *testing.T) {
	_, libs := wheel(t)
	const nobody = 65534
	own := os.Geteuid() == 0
	for name, c := range map[string]struct {
		change func(dotNixl, lib, file string) error
		says   string // of what is not trusted
		root   bool   // to give files away
	}{
		"nobody else's":          {func(_, _, _ string) error { return nil }, "", false},
		"another's .nixl":        {func(d, _, _ string) error { return os.Chown(d, nobody, nobody) }, ".nixl belongs to another user", true},
		"another's directory":    {func(_, l, _ string) error { return os.Chown(l, nobody, nobody) }, "lib belongs to another user", true},
		"another's file":         {func(_, _, f string) error { return os.Lchown(f, nobody, nobody) }, "libnixl_capi.so belongs to another user", true},
		"writable .nixl":         {func(d, _, _ string) error { return os.Chmod(d, 0o777|os.ModeSticky) }, "other users can write to", false},
		"a group's directory":    {func(_, l, _ string) error { return os.Chmod(l, 0o775) }, "other users can write to", false},
		"a link to a group's":    {func(_, l, f string) error { return relink(f, 0o664) }, "other users can write to", false},
		"another's link to mine": {func(d, _, _ string) error { return giveLink(d, nobody) }, ".nixl belongs to another user", true},
	} {
		t.Run(name, func(t *testing.T) {
			if c.root && !own {
				t.Skip("only root can give files away")
			}
			dir, env := bare(t)
			dotNixl := filepath.Join(dir, ".nixl")
			lib := filepath.Join(dotNixl, "lib")
			file := filepath.Join(lib, "libnixl_capi.so")
			require.NoError(t, os.Mkdir(dotNixl, 0o755))
			require.NoError(t, os.Mkdir(lib, 0o755))
			require.NoError(t, os.Symlink(libs+"/libnixl_capi.so", file))
			require.NoError(t, c.change(dotNixl, lib, file))
			out, err := runIn(dir, env)
			if c.says == "" {
				require.NoError(t, err, out)
				require.Contains(t, out, file+"\n")
				return
			}
			require.Error(t, err)
			require.Contains(t, out, "stub=false library=true")
			require.Contains(t, out, ".nixl in the working directory or above: "+dotNixl)
			require.Contains(t, out, "not trusted: ")
			require.Contains(t, out, c.says)
			require.Contains(t, out, "the system's loader", "the search goes on")
		})
	}
}

// relink makes the link one to a file of that mode.
func relink(link string, mode os.FileMode) error {
	file := filepath.Join(filepath.Dir(filepath.Dir(filepath.Dir(link))), "file")
	return errors.Join(os.WriteFile(file, nil, 0o600), os.Chmod(file, mode), os.Remove(link), os.Symlink(file, link))
}

// giveLink moves the directory away, and puts another user's link to it in its place.
func giveLink(dir string, user int) error {
	return errors.Join(os.Rename(dir, dir+"-moved"), os.Symlink(dir+"-moved", dir), os.Lchown(dir, user, user))
}

// A stub must never look like a library. cases.md 34
func TestStubIsRefused(t *testing.T) {
	_, libs := wheel(t)
	names, err := exec.Command("nm", "-D", "--defined-only", libs+"/libnixl_capi.so").Output()
	require.NoError(t, err)
	var source strings.Builder
	for line := range strings.Lines(string(names)) {
		if f := strings.Fields(line); len(f) == 3 && strings.HasPrefix(f[2], "nixl_capi_") {
			fmt.Fprintf(&source, "int %s(void) { return %d; }\n", f[2], map[bool]int{true: 1, false: -2}[f[2] == "nixl_capi_is_stub"])
		}
	}
	dir, env := bare(t)
	stub := compile(t, dir, "libnixl_capi.so", source.String())
	out, err := runIn(dir, env, "NIXLGO_LIBRARY="+stub)
	require.Error(t, err)
	require.Contains(t, out, "stub=true library=true")
	require.Contains(t, out, stub)

	few := compile(t, dir, "few.so", "int nixl_capi_is_stub(void) { return 0; }\nint nixl_capi_get_notifs(void) { return 0; }\n")
	out, err = runIn(dir, env, "NIXLGO_LIBRARY="+few)
	require.Error(t, err)
	require.Contains(t, out, "functions are missing: nixl_capi_create_configured_agent, nixl_capi_destroy_agent")
	require.NotContains(t, out, "nixl_capi_get_notifs,")
	require.NotContains(t, out, "mem_view", "optional functions may be missing")
}

func compile(t *testing.T, dir, name, source string, linked ...string) string {
	t.Helper()
	file := filepath.Join(dir, name+".c")
	require.NoError(t, os.WriteFile(file, []byte(source), 0o644))
	args := append([]string{"-shared", "-fPIC", "-o", filepath.Join(dir, name), file}, linked...)
	out, err := exec.Command("cc", args...).CombinedOutput()
	require.NoError(t, err, string(out))
	return filepath.Join(dir, name)
}

func TestUserSetEnvironmentStays(t *testing.T) {
	_, libs := wheel(t)
	dir, env := bare(t)
	out, err := runIn(dir, env, "LOAD_PATH="+libs, "UCX_TLS=tcp,sm", "UCX_LOG_FILE=/dev/null", "UCX_TCP_USER_TIMEOUT=3s", "UCX_HANDLE_ERRORS=bt")
	require.NoError(t, err)
	require.Contains(t, out, "UCX_LOG_FILE=/dev/null\n")
	require.Contains(t, out, "UCX_TCP_USER_TIMEOUT=3s\n")
	require.Contains(t, out, "UCX_HANDLE_ERRORS=none\n", "the one that is replaced")
	require.Contains(t, out, "UCX_TCP_CONN_NB=y\n")
	require.Contains(t, out, "UCX_TCP_TX_SEG_SIZE=64K\n")
	require.Contains(t, out, "UCX_CMA_TX_QUOTA=16\n")
	require.Contains(t, out, "UCX_RCACHE_MAX_UNRELEASED=1024\n")
}

// backendChild creates a UCX backend, and prints the error.
func backendChild() int {
	a, err := nixl.NewAgent("", nixl.Config{})
	if err != nil {
		return fail(err)
	}
	if _, err := a.CreateBackend("UCX", nil); err != nil {
		fmt.Println(err)
	}
	if _, err := a.CreateBackend("NOPE", nil); err == nil {
		return fail(errors.New("a backend that does not exist"))
	}
	a.Notify("nobody", nil)
	if err := a.Close(); err != nil {
		return fail(err)
	}
	return 0
}

// The C API says -2, whatever is wrong. dynamo#9911, dynamo#13309, cases.md 34
func TestWrongEnvironmentIsNamed(t *testing.T) {
	for variable, cause := range map[string]string{
		"UCX_TLS=rc":                   "no usable RDMA device is here",
		"UCX_TLS=tpc":                  `UCX has no transport "tpc" (tcp?)`,
		"UCX_TLS=self":                 "no transport that reaches other machines",
		"UCX_NET_DEVICES=nope0":        `there is no device "nope0"; there are: `,
		"NIXL_PLUGIN_DIR=/nonexistent": "NIXL looks for its plugins there alone",
	} {
		p := start(t, "backend", variable)
		out, err := p.wait()
		require.NoError(t, err, "%s: %s", variable, &p.stderr)
		name, value, _ := strings.Cut(variable, "=")
		require.Contains(t, out, fmt.Sprintf("%s=%q", name, value))
		require.Contains(t, out, cause)
	}
}

// Standard output belongs to the program.
func TestNothingIsPrintedOnStandardOutput(t *testing.T) {
	p := start(t, "backend", "UCX_LOG_LEVEL=debug", "NIXL_LOG_LEVEL=DEBUG", "UCX_NO_SUCH_VARIABLE=1")
	out, err := p.wait()
	require.NoError(t, err, &p.stderr)
	require.Empty(t, out)
	require.Contains(t, p.stderr.String(), "UCX", "it does print somewhere")
}

// missingChild calls a function that its library lacks.
func missingChild() int {
	l, err := nixl.Load("")
	if err != nil {
		return fail(err)
	}
	fmt.Println(strings.Join(l.Missing(), " "))
	a, err := nixl.NewAgent("", nixl.Config{})
	if err != nil {
		return fail(err)
	}
	if _, err := a.CreateBackend("UCX", nil); err != nil {
		return fail(err)
	}
	b, err := nixl.AllocBuffer(4096)
	if err != nil {
		return fail(err)
	}
	if _, err := a.Register(b); err != nil {
		return fail(err)
	}
	local, err := a.PrepareLocal(nixl.DRAM, []nixl.Desc{{Addr: b.Addr(), Len: 8}})
	if err != nil {
		return fail(err)
	}
	self, err := a.PrepareRemote(a.Name(), nixl.DRAM, []nixl.Desc{{Addr: b.Addr() + 8, Len: 8}})
	if err != nil {
		return fail(err)
	}
	x, err := a.NewTransfer(nixl.Read, local, nil, self, nil, nixl.TransferOptions{})
	if err != nil {
		return fail(err)
	}
	_, err = x.EstimateCost()
	fmt.Println(errors.Is(err, errors.ErrUnsupported), err)
	if err := a.Close(); err != nil {
		return fail(err)
	}
	return 0
}

// A function that a library lacks is an error that names it. Here the real
// library, with a byte of one exported name changed so that nobody finds it.
// dynamo#9265, nixl#166, cases.md 35
func TestFunctionThatTheLibraryLacksIsNamed(t *testing.T) {
	root, libs := wheel(t)
	dir := filepath.Join(t.TempDir(), filepath.Base(libs))
	require.NoError(t, os.Mkdir(dir, 0o755))
	for from, to := range map[string]string{libs: dir, root: filepath.Dir(dir)} {
		files, err := os.ReadDir(from)
		require.NoError(t, err)
		for _, f := range files {
			if f.Name() != "libnixl_capi.so" && f.Name() != filepath.Base(libs) {
				require.NoError(t, os.Symlink(filepath.Join(from, f.Name()), filepath.Join(to, f.Name())))
			}
		}
	}
	image, err := os.ReadFile(libs + "/libnixl_capi.so")
	require.NoError(t, err)
	const name = "nixl_capi_estimate_xfer_cost"
	require.Contains(t, string(image), "\x00"+name+"\x00")
	image = bytes.ReplaceAll(image, []byte("\x00"+name+"\x00"), []byte("\x00"+strings.Replace(name, "xfer", "xxxx", 1)+"\x00"))
	require.NoError(t, os.WriteFile(dir+"/libnixl_capi.so", image, 0o755))

	p := start(t, "missing", "NIXLGO_LIBRARY="+dir)
	out, err := p.wait()
	require.NoError(t, err, &p.stderr)
	require.Contains(t, out, name+" nixl_capi_mem_free\n")
	require.Contains(t, out, "true nixl: estimate cost")
	require.Contains(t, out, name+" is not in the loaded library; the first with it is NIXL 0.10.1 or older")
}

// flipsChild loads metadata with each byte of its frame changed.
func flipsChild() int {
	a, err := nixl.NewAgent("", nixl.Config{})
	if err != nil {
		return fail(err)
	}
	b, err := nixl.NewAgent("", nixl.Config{})
	if err != nil {
		return fail(err)
	}
	for _, x := range []*nixl.Agent{a, b} {
		if _, err := x.CreateBackend("UCX", nil); err != nil {
			return fail(err)
		}
	}
	buffer, err := nixl.AllocBuffer(4096)
	if err != nil {
		return fail(err)
	}
	if _, err := a.Register(buffer); err != nil {
		return fail(err)
	}
	blob, err := a.LocalMetadata()
	if err != nil {
		return fail(err)
	}
	connection := bytes.Index(blob, []byte("|c")) + 1
	end := bytes.Index(blob, []byte("MemSection")) - 8
	key := 0
	for n := 3 * 8; key == 0; n++ { // the last field: length, address, length, device, key
		start := len(blob) - 1 - n
		if binary.NativeEndian.Uint64(blob[start-8:]) == uint64(n) {
			key = start + 3*8
		}
	}
	loaded := 0
	for i := range blob {
		if i > connection+8 && i < end-1 || i >= key {
			continue // opaque: a digest has to protect it
		}
		for _, flip := range []byte{1, 2, 4, 0x10, 0x80, 0xff} {
			changed := bytes.Clone(blob)
			changed[i] ^= flip
			name, err := b.LoadRemote(changed)
			if err != nil {
				continue
			}
			loaded++
			if err := b.InvalidateRemote(name); err != nil {
				return fail(err)
			}
		}
	}
	for n := range blob {
		if _, err := b.LoadRemote(blob[:n]); err == nil {
			return fail(fmt.Errorf("metadata cut at %d of %d bytes was accepted", n, len(blob)))
		}
	}
	if name, err := b.LoadRemote(blob); err != nil || name != a.Name() {
		return fail(fmt.Errorf("the good metadata no longer loads: %w", err))
	}
	fmt.Println("loaded", loaded > 0)
	return 0
}

// 11 of 1,910 changed blobs crashed the library, and a cut one poisoned the
// name. cases.md 21
func TestDamagedMetadataDoesNotReachTheLibrary(t *testing.T) {
	p := start(t, "flips")
	out, err := p.wait()
	require.NoError(t, err, &p.stderr)
	require.Equal(t, "loaded true\n", out) // a changed name or address is another peer's
}

// collectorChild makes, posts and closes while the collector runs.
func collectorChild() int {
	a, err := nixl.NewAgent("", nixl.Config{})
	if err != nil {
		return fail(err)
	}
	if _, err := a.CreateBackend("UCX", nil); err != nil {
		return fail(err)
	}
	b, err := nixl.AllocBuffer(1 << 16)
	if err != nil {
		return fail(err)
	}
	if _, err := a.Register(b); err != nil {
		return fail(err)
	}
	rounds, err := strconv.Atoi(os.Getenv("COLLECTOR_ROUNDS"))
	if err != nil {
		return fail(err)
	}
	for i := range rounds {
		local, err := a.PrepareLocal(nixl.DRAM, []nixl.Desc{{Addr: b.Addr(), Len: 8}})
		if err != nil {
			return fail(err)
		}
		self, err := a.PrepareRemote(a.Name(), nixl.DRAM, []nixl.Desc{{Addr: b.Addr() + 8, Len: 8}})
		if err != nil {
			return fail(err)
		}
		x, err := a.NewTransfer(nixl.Read, local, nil, self, nil, nixl.TransferOptions{})
		if err != nil {
			return fail(err)
		}
		if _, err := x.Post(); err != nil {
			return fail(err)
		}
		if i%50 == 0 {
			runtime.GC()
		}
		for state := nixl.Active; state == nixl.Active; {
			if state, err = x.Poll(); err != nil {
				return fail(err)
			}
		}
		if err := errors.Join(local.Close(), self.Close(), x.Close()); err != nil {
			return fail(err)
		}
		if i == rounds/10 {
			fmt.Println(residentPages(os.Getpid()))
		}
	}
	fmt.Println(residentPages(os.Getpid()))
	return 0
}

func residentPages(pid int) int {
	var size, resident int
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	fmt.Sscan(string(text), &size, &resident)
	return resident
}

// golang/go#13347, gotk3#192, go-yara#140, cases.md 36
func TestCollectorNeverFreesWhatACallUses(t *testing.T) {
	rounds := 100_000
	if testing.Short() {
		rounds = 10_000
	}
	p := start(t, "collector", "GODEBUG=clobberfree=1,cgocheck=1", fmt.Sprint("COLLECTOR_ROUNDS=", rounds))
	var early, late int
	p.read(&early)
	p.read(&late)
	_, err := p.wait()
	require.NoError(t, err, &p.stderr)
	t.Logf("%d pages, then %d", early, late)
	require.Less(t, late, early+early/20, "resident pages")
}
