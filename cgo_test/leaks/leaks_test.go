// Package leaks drives the C of package nixl on a library that fails wherever it can, and looks for what stays behind.
// The other half of the proof is make test-asan: the tests of package nixl on the real library, under the same sanitizers.
package leaks

import (
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each call into the library and each allocation fails once, in each function of the shim. None may leave an object or
// memory behind, end one twice, or hide the failure.
func TestNoPathThroughTheShimLeaks(t *testing.T) {
	harness := filepath.Join(t.TempDir(), "harness")
	out, err := exec.Command(cmp.Or(os.Getenv("CC"), "cc"), "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-rdynamic",
		"-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-o", harness, "harness/harness.c", "-ldl").CombinedOutput()
	require.NoError(t, err, "%s", out)
	run := exec.Command(harness)
	run.Env = append(os.Environ(), "ASAN_OPTIONS=detect_leaks=1")
	out, err = run.CombinedOutput()
	require.NoError(t, err, "%s", out)

	driven := map[string]bool{}
	for line := range strings.Lines(string(out)) {
		name, failures, _ := strings.Cut(strings.TrimSpace(line), " ")
		require.Regexp(t, `^\d+$`, failures, line)
		driven[name] = true
	}
	header, err := os.ReadFile("../../nixl/shim.h")
	require.NoError(t, err)
	var missing []string
	for _, f := range regexp.MustCompile(`\b(nixlgo_\w+)\(`).FindAllSubmatch(header, -1) {
		if name := string(f[1]); !driven[name] && name != "nixlgo_device" { // that one calls the CUDA driver, and makes nothing
			missing = append(missing, name)
		}
	}
	require.Empty(t, slices.Compact(missing), "functions of the shim that harness.c does not drive")
}
