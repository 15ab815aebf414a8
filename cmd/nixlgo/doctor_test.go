package main

import (
	"bufio"
	"bytes"
	"debug/elf"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/nixl/diagnose"
)

// doctorRun is what one run of `nixlgo doctor --json` said.
type doctorRun struct {
	code    int
	found   map[string][]diagnose.Finding // by name; a variable that nixlgo replaces has two
	summary doctorSummary
	stderr  string
}

func (r doctorRun) failed(t *testing.T, name string) diagnose.Finding {
	t.Helper()
	require.Equal(t, 1, r.code, r.stderr)
	require.Contains(t, r.summary.Failed, name, r.stderr)
	require.False(t, r.summary.OK)
	f := r.found[name][len(r.found[name])-1]
	require.Equal(t, diagnose.Fail, f.Status)
	require.NotEmpty(t, f.Cause)
	require.NotEmpty(t, f.Remedy)
	require.Contains(t, r.stderr, name, "standard error names what failed")
	return f
}

// doctorBench runs the built program.
type doctorBench struct {
	program string
	library string // the released libnixl_capi.so
	dir     string // working directory, without .nixl in it or above
}

func newDoctorBench(t *testing.T) *doctorBench {
	t.Helper()
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	found, err := filepath.Glob(filepath.Join(root, ".nixl/.nixl_cu*.mesonpy.libs/libnixl_capi.so"))
	require.NoError(t, err)
	require.NotEmpty(t, found, "the NIXL library is not installed: run `make setup`")
	return &doctorBench{program: build(t), library: found[0], dir: t.TempDir()}
}

// command prepares a run in an environment without variables of NIXL and UCX beside those of env.
func (b *doctorBench) command(env []string, args ...string) *exec.Cmd {
	c := exec.Command(b.program, append([]string{"doctor"}, args...)...)
	c.Dir = b.dir
	for _, kv := range os.Environ() {
		if !slices.ContainsFunc([]string{"NIXL", "UCX_", "PCIDEVICE_", "LD_", "VIRTUAL_ENV=", "VLLM_"}, func(p string) bool { return strings.HasPrefix(kv, p) }) {
			c.Env = append(c.Env, kv)
		}
	}
	c.Env = append(append(c.Env, "NIXLGO_LIBRARY="+b.library), env...)
	return c
}

// run requires that standard output is nothing but the lines of --json.
func (b *doctorBench) run(t *testing.T, env []string, args ...string) doctorRun {
	t.Helper()
	c := b.command(env, append([]string{"--json", "--timeout", "60s"}, args...)...)
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	err := c.Run()
	r := doctorRun{code: c.ProcessState.ExitCode(), found: map[string][]diagnose.Finding{}, stderr: stderr.String()}
	if r.code == 0 {
		require.NoError(t, err)
	}
	lines := strings.Split(strings.TrimSuffix(stdout.String(), "\n"), "\n")
	for i, line := range lines {
		var check doctorCheck
		strict := json.NewDecoder(strings.NewReader(line))
		strict.DisallowUnknownFields()
		if i == len(lines)-1 {
			require.NoError(t, strict.Decode(&r.summary), "%q\n%s", line, r.stderr)
			require.Equal(t, "summary", r.summary.Event)
			break
		}
		require.NoError(t, strict.Decode(&check), "%q\n%s", line, r.stderr)
		require.Equal(t, "check", check.Event)
		require.Contains(t, []diagnose.Status{diagnose.OK, diagnose.Warn, diagnose.Fail}, check.Status)
		r.found[check.Name] = append(r.found[check.Name], check.Finding)
	}
	return r
}

// cc compiles a shared library.
func (b *doctorBench) cc(t *testing.T, name, source string, args ...string) string {
	t.Helper()
	dir := t.TempDir()
	file, lib := filepath.Join(dir, "source.c"), filepath.Join(dir, name)
	require.NoError(t, os.WriteFile(file, []byte(source), 0o600))
	out, err := exec.Command("cc", append([]string{"-shared", "-fPIC", "-o", lib, file}, args...)...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return lib
}

// fakeLibrary has every function of the released library, and the given nixl_capi_is_stub.
func (b *doctorBench) fakeLibrary(t *testing.T, isStub string) string {
	t.Helper()
	real, err := elf.Open(b.library)
	require.NoError(t, err)
	defer real.Close()
	symbols, err := real.DynamicSymbols()
	require.NoError(t, err)
	var source strings.Builder
	source.WriteString("#include <signal.h>\n#include <stdio.h>\n#include <unistd.h>\n_Bool nixl_capi_is_stub(void) { " + isStub + " }\n")
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF && strings.HasPrefix(s.Name, "nixl_capi_") && s.Name != "nixl_capi_is_stub" {
			fmt.Fprintf(&source, "int %s(void) { return -2; }\n", s.Name)
		}
	}
	return b.cc(t, "libnixl_capi.so", source.String())
}

// Everything here runs the real program on the real library: cases.md 34 and 35 (dynamo#13547, #13649, #9911, #9952,
// #13309, #12819, #9925, nixl#1358; dynamo#9265, #9283).
func TestDoctor(t *testing.T) {
	t.Parallel() // it waits, mostly
	b := newDoctorBench(t)

	t.Run("a healthy machine reads and notifies over the real library", func(t *testing.T) {
		for _, env := range [][]string{{}, {"UCX_TLS=tcp"}} {
			r := b.run(t, env)
			require.Zero(t, r.code, r.stderr)
			require.True(t, r.summary.OK)
			require.Empty(t, r.summary.Failed)
			require.Empty(t, r.summary.Skipped)
			for _, name := range []string{"memlock limit", "open-file limit", "/dev/shm", "cross-process copy", "library", "plugins", "backend", "ucx", "read", "notification", "UCX_LOG_FILE"} {
				require.Len(t, r.found[name], 1, name)
			}
			require.Contains(t, r.found["library"][0].Value, b.library)
			require.Contains(t, r.found["library"][0].Value, "nixl_cu12-")
			require.Contains(t, r.found["library"][0].Cause, "not a stub")
			require.Contains(t, r.found["plugins"][0].Value, "UCX")
			require.Contains(t, r.found["backend"][0].Value, "ucx_error_handling_mode=peer")
			require.Contains(t, r.found["backend"][0].Value, "num_workers=")
			require.Contains(t, r.found["backend"][0].Value, "ucx_devices=")
			require.Regexp(t, `^1\.[0-9]+\.[0-9]+, /.*/libucp-`, r.found["ucx"][0].Value)
			require.Regexp(t, `^1 MiB in .*, bytes equal$`, r.found["read"][0].Value)
			require.Regexp(t, `^13 B in `, r.found["notification"][0].Value)
			require.Contains(t, r.found["UCX_LOG_FILE"][0].Cause, "set by nixlgo")
		}
	})

	t.Run("the table for people says the same", func(t *testing.T) {
		c := b.command([]string{"UCX_TLS=tpc"}, "--timeout", "60s")
		var stderr bytes.Buffer
		c.Stderr = &stderr
		out, err := c.Output()
		require.Error(t, err)
		require.Equal(t, 1, c.ProcessState.ExitCode())
		require.Regexp(t, `(?m)^ok +library +/.*libnixl_capi\.so`, string(out))
		require.Regexp(t, `(?m)^fail +UCX_TLS +tpc\n +cause UCX has no transport "tpc" \(tcp\?\)\n +remedy correct UCX_TLS`, string(out))
		require.Regexp(t, `(?m)^fail +backend +`, string(out))
		require.Contains(t, string(out), "2 failed")
		require.Contains(t, string(out), "not reached: ucx, read, notification, close\n")
		require.Contains(t, stderr.String(), "failed: UCX_TLS, backend")
	})

	t.Run("what the libraries print stays off standard output", func(t *testing.T) {
		// More than C buffers: what is left in its buffer at the end is never written.
		r := b.run(t, []string{"UCX_LOG_LEVEL=debug", "UCX_LOG_FILE=stdout"})
		require.Zero(t, r.code, r.stderr)
		require.Contains(t, r.stderr, "UCX  DEBUG", "UCX printed")
	})

	t.Run("no library: every place tried is named", func(t *testing.T) {
		f := b.run(t, []string{"NIXLGO_LIBRARY=/nonexistent"}).failed(t, "library")
		require.Contains(t, f.Cause, "NIXLGO_LIBRARY: /nonexistent")
		require.Contains(t, f.Remedy, "NIXLGO_LIBRARY")

		f = b.run(t, nil, "--library", "/nowhere/libnixl_capi.so").failed(t, "library")
		require.Contains(t, f.Cause, "/nowhere/libnixl_capi.so")

		c := b.command([]string{"PATH=", "NIXL_PREFIX=/no/prefix"}, "--json")
		c.Env = slices.DeleteFunc(c.Env, func(kv string) bool { return strings.HasPrefix(kv, "NIXLGO_LIBRARY=") })
		out, err := c.Output()
		require.Error(t, err)
		for _, place := range []string{filepath.Join(b.dir, ".nixl"), filepath.Join(filepath.Dir(b.program), ".nixl"), "python3", "/no/prefix", "libnixl_capi.so.0", "system's loader"} {
			require.Contains(t, string(out), place)
		}
	})

	t.Run("a stub library is refused", func(t *testing.T) {
		f := b.run(t, nil, "--library", b.fakeLibrary(t, "return 1;")).failed(t, "library")
		require.Contains(t, f.Value, "stub")
		require.Contains(t, f.Cause, "stub")
	})

	t.Run("a library of too few functions is refused", func(t *testing.T) {
		f := b.run(t, nil, "--library", b.cc(t, "libnixl_capi.so", "_Bool nixl_capi_is_stub(void) { return 0; }")).failed(t, "library")
		require.Contains(t, f.Cause, "nixl_capi_register_mem")
	})

	t.Run("a library that crashes is a finding", func(t *testing.T) {
		r := b.run(t, nil, "--library", b.fakeLibrary(t, "_exit(7);"))
		f := r.failed(t, "library")
		require.Equal(t, "exit status 7", f.Value)
		require.Contains(t, f.Cause, "while it waited for the NIXL library to load")
		require.Contains(t, r.summary.Skipped, "read")

		f = b.run(t, nil, "--library", b.fakeLibrary(t, "kill(getpid(), 9); for (;;) pause();")).failed(t, "library")
		require.Equal(t, "signal: killed", f.Value)
	})

	t.Run("a library that hangs is a finding, and its process ends", func(t *testing.T) {
		pidFile := filepath.Join(t.TempDir(), "pid")
		lib := b.fakeLibrary(t, hang(pidFile))
		f := b.run(t, nil, "--timeout", "3s", "--library", lib).failed(t, "library")
		require.Equal(t, "nothing within 3s", f.Value)
		require.Equal(t, "waited for the NIXL library to load", f.Cause)
		pid, err := os.ReadFile(pidFile)
		require.NoError(t, err)
		require.NoDirExists(t, filepath.Join("/proc", string(pid)))
	})

	for _, signal := range []os.Signal{os.Interrupt, os.Kill} {
		t.Run("doctor's own end ends the library's process: "+signal.String(), func(t *testing.T) {
			pidFile := filepath.Join(t.TempDir(), "pid")
			c := b.command(nil, "--timeout", "10m", "--library", b.fakeLibrary(t, hang(pidFile)))
			require.NoError(t, c.Start())
			var pid []byte
			require.Eventually(t, func() bool { pid, _ = os.ReadFile(pidFile); return len(pid) > 0 }, time.Minute, 10*time.Millisecond)
			require.NoError(t, c.Process.Signal(signal))
			require.Error(t, c.Wait())
			require.Eventually(t, func() bool { return ended(string(pid)) }, time.Minute, 10*time.Millisecond)
		})
	}

	for _, c := range []struct{ env, fails, cause string }{
		{"UCX_TLS=tpc", "backend", `no transport "tpc"`},
		{"UCX_TLS=rc", "backend", "RDMA"},
		{"UCX_TLS=self", "backend", "no transport that reaches other machines"},
		{"UCX_NET_DEVICES=nope0", "backend", `no device "nope0"`},
		{"NIXL_PLUGIN_DIR=/nonexistent", "plugins", "/nonexistent"},
	} {
		t.Run("a wrong variable is named: "+c.env, func(t *testing.T) {
			name, value, _ := strings.Cut(c.env, "=")
			r := b.run(t, []string{c.env})
			if r.code == 0 && value == "rc" && len(r.found["rdma"]) == 0 {
				require.Contains(t, r.found["read"][0].Value, "bytes equal") // this machine has RDMA
				return
			}
			f := r.failed(t, name)
			require.Equal(t, value, f.Value)
			require.Contains(t, f.Cause, c.cause)
			require.Contains(t, r.stderr, name+" ("+value+")")
			// The real library agrees, and its failure names the variable too.
			require.Contains(t, r.failed(t, c.fails).Remedy, c.env)
			require.Contains(t, r.summary.Skipped, "read")
		})
	}

	t.Run("a limit that is reached is named, and not the library", func(t *testing.T) {
		c := exec.Command("sh", "-c", `ulimit -n 24; exec "$0" doctor`, b.command(nil).Path)
		c.Env = b.command(nil).Env
		out, err := c.CombinedOutput()
		require.Error(t, err)
		require.Regexp(t, `(?m)^ +cause file descriptors, \d+ of 24 in use`, string(out))
		require.NotContains(t, string(out), "unset NIXLGO_LIBRARY")
	})

	t.Run("a second UCX in the process is found", func(t *testing.T) {
		other := b.cc(t, "libucp.so.0", "int nothing_of_ucx;", "-Wl,-soname,libucp.so.0")
		f := b.run(t, []string{"LD_PRELOAD=" + other}).failed(t, "ucx")
		require.Contains(t, f.Value, other)
		require.Contains(t, f.Value, "libucp-")
		require.Contains(t, f.Remedy, "LD_PRELOAD="+other)
	})

	t.Run("a variable that nixlgo must replace is shown with both values", func(t *testing.T) {
		r := b.run(t, []string{"UCX_HANDLE_ERRORS=bt"}) // cases.md 33
		require.Zero(t, r.code, r.stderr)
		require.Len(t, r.found["UCX_HANDLE_ERRORS"], 2)
		require.Equal(t, "bt", r.found["UCX_HANDLE_ERRORS"][0].Value)
		require.Equal(t, "none", r.found["UCX_HANDLE_ERRORS"][1].Value)
		require.Contains(t, r.found["UCX_HANDLE_ERRORS"][1].Cause, `in place of "bt"`)
	})

	t.Run("--fix-env puts right what variables can, and nothing else", func(t *testing.T) {
		for _, c := range []struct{ env, want []string }{
			{nil, nil}, // nothing is wrong
			{[]string{"UCX_TLS=self"}, []string{"export UCX_TLS='self,tcp'"}},
			{[]string{"UCX_TLS=tpc", "UCX_NET_DEVICES=lo,nope0", "NIXL_PLUGIN_DIR=/nonexistent", "NIXL_TELEMETRY_ENABLE=maybe",
				"VLLM_NIXL_SIDE_CHANNEL_HOST=192.0.2.1"},
				[]string{"unset NIXL_PLUGIN_DIR", "unset NIXL_TELEMETRY_ENABLE", "export UCX_NET_DEVICES='lo'", "export UCX_TLS='tcp'",
					"unset VLLM_NIXL_SIDE_CHANNEL_HOST"}},
		} {
			fix := b.command(c.env, "--fix-env", "--timeout", "60s")
			var stderr bytes.Buffer
			fix.Stderr = &stderr
			out, err := fix.Output()
			require.NoError(t, err, "%v: %s", c.env, &stderr)
			var commands []string
			for line := range strings.Lines(string(out)) {
				if !strings.HasPrefix(line, "# ") {
					commands = append(commands, strings.TrimSuffix(line, "\n"))
				}
			}
			require.Equal(t, c.want, commands)
			if c.want == nil {
				continue
			}
			again := b.command(c.env, "--json", "--timeout", "60s")
			again.Path, again.Args = "/bin/sh", append([]string{"sh", "-c", `eval "$0"; exec "$@"`, string(out)}, again.Args...)
			out, err = again.Output()
			require.NoError(t, err, "%v: %s", c.env, out)
			lines := strings.Split(strings.TrimSpace(string(out)), "\n")
			var summary doctorSummary
			require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &summary))
			require.True(t, summary.OK)
			require.Empty(t, summary.Warned)
		}
	})

	t.Run("--fix-env says what no variable puts right", func(t *testing.T) {
		c := b.command([]string{"NIXLGO_LIBRARY=" + b.fakeLibrary(t, "return 1;")}, "--fix-env")
		var stderr bytes.Buffer
		c.Stderr = &stderr
		out, err := c.Output()
		require.Error(t, err)
		require.Equal(t, 1, c.ProcessState.ExitCode())
		require.Empty(t, string(out))
		require.Contains(t, stderr.String(), "failed: library\n  library (a stub")
	})

	t.Run("two doctors try the side channel both ways", func(t *testing.T) {
		there := b.command(nil, "--answer", "127.0.0.1:0")
		stdout, err := there.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, there.Start())
		line, err := bufio.NewReader(stdout).ReadString('\n')
		require.NoError(t, err)
		_, address, found := strings.Cut(strings.TrimSpace(line), "--peer ")
		require.True(t, found, line)
		r := b.run(t, nil, "--peer", address)
		require.Zero(t, r.code, r.stderr)
		require.Contains(t, r.found["side channel to "+address][0].Value, "a doctor answers in ")
		require.Contains(t, r.found["side channel from "+address][0].Value, "it reaches 127.0.0.1:")
		require.Contains(t, b.run(t, []string{"POD_IP=192.0.2.1"}, "--peer", address).failed(t, "side channel from "+address).Value, "does not reach 192.0.2.1")
		require.NoError(t, there.Process.Signal(os.Interrupt))
		require.NoError(t, there.Wait(), "an interrupted answer is a success")
		require.Contains(t, b.run(t, nil, "--peer", address).failed(t, "side channel to "+address).Cause, "nobody listens there")
	})

	t.Run("the table is CSV, too", func(t *testing.T) {
		out, err := b.command(nil, "--format", "csv", "--timeout", "60s").Output()
		require.NoError(t, err)
		rows, err := csv.NewReader(bytes.NewReader(out)).ReadAll()
		require.NoError(t, err)
		require.Equal(t, []string{"status", "check", "found", "cause", "remedy"}, rows[0])
		require.Equal(t, "notification", rows[len(rows)-1][1])
	})

	t.Run("a wrong command line is exit code 2", func(t *testing.T) {
		for _, args := range [][]string{{"--timeout", "0s"}, {"--timeout", "soon"}, {"--nope"}, {"--peer", "here"}, {"--answer", "here:http"},
			{"--answer", "127.0.0.1:0", "--fix-env"}, {"--fix-env", "--json"}} {
			c := b.command(nil, args...)
			require.Error(t, c.Run())
			require.Equal(t, 2, c.ProcessState.ExitCode(), args)
		}
	})
}

// hang is C that writes the process id to a file and then never returns. The file appears whole.
func hang(pidFile string) string {
	return fmt.Sprintf(`FILE *f = fopen(%[1]q, "w"); fprintf(f, "%%d", getpid()); fclose(f); rename(%[1]q, %[2]q); for (;;) pause();`, pidFile+".new", pidFile)
}

// ended reports whether a process is gone or a zombie that nobody has waited for yet.
func ended(pid string) bool {
	stat, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
	if err != nil {
		return true
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(after, "Z")
}
