package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// build compiles the command as a user gets it; a demo process is another run of it.
func build(t *testing.T) string {
	t.Helper()
	exe := filepath.Join(t.TempDir(), "nixlgo")
	out, err := exec.Command("go", "build", "-o", exe, ".").CombinedOutput()
	require.NoError(t, err, string(out))
	return exe
}

// run runs the command and returns its exit code, stdout and stderr.
func run(t *testing.T, exe string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(t.Context(), exe, args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if cmd.ProcessState == nil {
		require.NoError(t, err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

func TestDemoShowsEveryScene(t *testing.T) {
	t.Parallel() // it waits, mostly
	exe := program(t)
	for _, tls := range []string{"tcp", "tcp,shm,cma,self"} {
		t.Run(tls, func(t *testing.T) {
			t.Parallel()
			page := filepath.Join(t.TempDir(), "demo.html")
			code, stdout, stderr := run(t, exe, "demo", "--json", "--tls", tls, "--requests", "9", "--blocks", "3", "--layers", "3", "--block-bytes", "5000", "--report", page)
			require.Zero(t, code, stderr)
			lines := strings.Split(strings.TrimSpace(stdout), "\n")
			require.Equal(t, 9+1, strings.Count(stdout, `"event":"verified"`), "each read of scene 1, and that of scene 2")
			requireNamed(t, stderr)
			var scenes []int
			for _, l := range lines[:len(lines)-1] {
				var e struct {
					Event string
					T     *float64
					Scene int
				}
				require.NoError(t, json.Unmarshal([]byte(l), &e), l)
				require.NotEmpty(t, e.Event)
				require.NotNil(t, e.T)
				if e.Event == "scene" {
					scenes = append(scenes, e.Scene)
				}
			}
			require.Equal(t, []int{1, 2, 3, 4, 5}, scenes)
			var s demoSummary
			require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &s))
			require.Equal(t, "summary", s.Event)
			require.Equal(t, tls, s.TLS)
			require.FileExists(t, s.Library)
			require.Equal(t, []int{9, 9, 0, 1, 1, 1}, []int{s.Requests, s.Verified, s.WrongBytes, s.QueuedOK, s.LapsedRefused, s.UnverifiableRefused})
			require.Positive(t, s.Renewals)
			require.Positive(t, s.ReaderKilledFreedS)
			require.Equal(t, 3.0, s.LeaseS)
			for _, key := range []string{"event", "tls", "library", "requests", "verified", "wrong_bytes", "renewals", "queued_ok", "lapsed_refused",
				"unverifiable_refused", "reader_killed_freed_s", "lease_s", "seconds"} {
				require.Contains(t, lines[len(lines)-1], `"`+key+`":`)
			}
			requireDemoReport(t, page)
		})
	}
}

// requireNamed requires that each line of standard error says which process it is of.
func requireNamed(t *testing.T, stderr string) {
	t.Helper()
	for line := range strings.Lines(stderr) {
		require.Regexp(t, "^(prefill|decode): ", line)
	}
}

// A person is not shown all of what is much the same, and is told which complaints are part of the play.
func TestDemoIsShortForPeople(t *testing.T) {
	t.Parallel() // it waits, mostly
	code, stdout, stderr := run(t, program(t), "demo", "--requests", "9", "--lease", "1500ms")
	require.Zero(t, code, stderr)
	require.Equal(t, linesOfReads, strings.Count(stdout, "SHA-256 equal"))
	require.Contains(t, stdout, "decode   … 5 more\n")
	require.Contains(t, stdout, "9 of 9 reads verified, 0 wrong bytes")
	require.Equal(t, 1, strings.Count(stdout, "what UCX now says of it on standard error is expected"))
	requireNamed(t, stderr)
}

func TestLinesOfAProcessAreNamed(t *testing.T) {
	var b strings.Builder
	passOn(&b, strings.NewReader("one\n\n"+strings.Repeat("x", 100_000)+"\nno end"), "decode")
	require.Equal(t, "decode: one\ndecode: \ndecode: "+strings.Repeat("x", 100_000)+"\ndecode: no end\n", b.String())
}

// requireDemoReport checks the page of a demo of 9 requests.
func requireDemoReport(t *testing.T, path string) {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	page := string(b)
	requireSelfContained(t, page)
	leases := []string{"queued", "lapsing", "reusing", "unleased"}
	for i := range 9 {
		leases = append(leases, fmt.Sprintf("req-%02d", i+1))
	}
	for i := range heldByKilled {
		leases = append(leases, fmt.Sprintf("orphan-%d", i+1))
	}
	for _, id := range leases {
		require.True(t, strings.Contains(page, ">"+id+"</text>"), "%s is not in a picture", id)
		require.True(t, strings.Contains(page, ">"+id+"</td>"), "%s is not in the table", id)
	}
	for _, text := range []string{"renewed by a heartbeat", "the reader is killed", "refused: the lease had lapsed", "refused: no lease to check", ">expired<", "verified"} {
		require.True(t, strings.Contains(page, text), text)
	}
}

// dynamo#13547, nixl#1561, cases.md 34: what is wrong is named, with its value.
func TestDemoNamesWhatIsWrong(t *testing.T) {
	exe := program(t)
	small := filepath.Join(t.TempDir(), "small.kv")
	require.NoError(t, os.WriteFile(small, []byte("ten bytes."), 0o600))
	for _, c := range []struct {
		args []string
		code int
		says []string
	}{
		{[]string{"--kv", "/nonexistent.kv"}, exitFailed, []string{"--kv", "/nonexistent.kv"}},
		{[]string{"--kv", small}, exitFailed, []string{small, "10 bytes", "16384"}},
		{[]string{"--kv", t.TempDir()}, exitFailed, []string{"is a directory"}},
		{[]string{"--tls", "tpc"}, exitUsage, []string{"--tls", `"tpc" (tcp?)`}},
		{[]string{"--tls", ""}, exitUsage, []string{"--tls"}},
		{[]string{"--library", "/nonexistent/libnixl_capi.so"}, exitFailed, []string{"/nonexistent/libnixl_capi.so", "exit status 1"}},
		{[]string{"--requests", "0"}, exitUsage, []string{"--requests 0"}},
		{[]string{"--requests", "65536", "--block-bytes", "1048576"}, exitUsage, []string{"GiB"}},
		{[]string{"--blocks", "-1"}, exitUsage, []string{"--blocks -1"}},
		{[]string{"--layers", "x"}, exitUsage, []string{"--layers"}},
		{[]string{"--lease", "1ms"}, exitUsage, []string{"--lease 1ms"}},
		{[]string{"--nosuch"}, exitUsage, []string{"--nosuch", "--help"}},
		{[]string{"--report", "/nonexistent/x.html"}, exitFailed, []string{"--report", "/nonexistent/x.html"}},
		{[]string{"--report", small}, exitFailed, []string{small, "not a report"}},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) {
			code, stdout, stderr := run(t, exe, append([]string{"demo", "--json"}, c.args...)...)
			require.Equal(t, c.code, code, stderr)
			require.Empty(t, stdout)
			for _, s := range c.says {
				require.Contains(t, stderr, s)
			}
		})
	}
}

func TestFillTilesAndRotates(t *testing.T) {
	dst := make([]byte, 7)
	fill(dst, []byte("abc"), 4)
	require.Equal(t, "bcabcab", string(dst))
}
