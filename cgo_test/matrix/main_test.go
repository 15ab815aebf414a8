package main

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/measure"
)

// The library must not be left through libc: see package nixl.
func TestMain(m *testing.M) { syscall.Exit(m.Run()) }

// testBinary is a shell script that stands in for a test binary's output.
func testBinary(t *testing.T, output string, code int) string {
	path := filepath.Join(t.TempDir(), "test")
	script := "#!/bin/sh\ncat <<'EOF'\n" + output + "\nEOF\nexit " + string(rune('0'+code)) + "\n"
	require.NoError(t, os.WriteFile(path, []byte(script), 0o755))
	return path
}

// A matrix that cannot fail says nothing.
func TestVerdictOfARelease(t *testing.T) {
	const pass = "=== RUN   TestA\n--- PASS: TestA (0.00s)\n"
	const gpu = "=== RUN   TestG\n    device_test.go:1: NOT TESTED: there is no GPU here\n--- SKIP: TestG (0.00s)\n"
	for name, c := range map[string]struct {
		output string
		code   int
		want   result
		wrong  string
	}{
		"passes":            {pass, 0, result{passed: 1}, ""},
		"no GPU":            {pass + gpu, 0, result{passed: 1, skipped: 1}, ""},
		"skips otherwise":   {pass + gpu + "=== RUN   TestS\n    x_test.go:1: later\n--- SKIP: TestS (0.00s)\n", 0, result{passed: 1, skipped: 2}, "TestS was skipped"},
		"fails":             {pass + "=== RUN   TestF\n--- FAIL: TestF (0.00s)\n", 1, result{passed: 1, failed: 1}, "TestF"},
		"fails, but exit 0": {"--- FAIL: TestF (0.00s)\n", 0, result{failed: 1}, "TestF"},
		"crashes":           {pass + "=== RUN   TestC\nSIGSEGV\n", 2, result{passed: 1}, "exit status 2: ; the last test was TestC; its output is in "},
		"runs nothing":      {"PASS", 0, result{}, "no test ran"},
	} {
		res, err := release{version: "0"}.test(context.Background(), testBinary(t, c.output, c.code), t.TempDir(), t.TempDir(), "")
		require.Equal(t, c.want, res, name)
		if c.wrong == "" {
			require.NoError(t, err, name)
		} else {
			require.ErrorContains(t, err, c.wrong, name)
		}
	}
	root, err := measure.Root()
	require.NoError(t, err)
	require.NoError(t, os.Remove(filepath.Join(root, "out", "matrix-0.log")))
}

func TestReleasesAreInOrderAndPinned(t *testing.T) {
	require.Len(t, releases, 7)
	for _, r := range releases {
		for _, arch := range []string{"amd64", "arm64"} {
			require.Regexp(t, "^[0-9a-f]{64}$", r.sha256[arch], r.version)
		}
	}
	require.Equal(t, "0.10.1", releases[0].version)
	require.Equal(t, "1.5.1", releases[6].version)
}
