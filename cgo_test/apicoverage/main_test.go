package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// The library must not be left through libc: see package nixl.
func TestMain(m *testing.M) { syscall.Exit(m.Run()) }

func TestEveryFunctionIsCovered(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(&out))
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Equal(t, "api-coverage: 104/104", lines[len(lines)-1])
}

// Each way of not being covered is found.
func TestGapsAreFound(t *testing.T) {
	for name, c := range map[string][4]string{ // file, from, to, complaint
		"not called":              {"shim.c", "api.query_mem(", "other(", "nixl_capi_query_mem is neither reached nor listed"},
		"only checked for":        {"shim.c", "api.opt_args_set_port(", "other(", "nixl_capi_opt_args_set_port is neither reached nor listed"},
		"not reached from Go":     {"telemetry.go", "rawTelemetry(", "other(", "nixl_capi_get_xfer_telemetry is neither reached nor listed"},
		"not exported":            {"exchange.go", "func (a *Agent) PartialMetadata", "func (a *Agent) partialMetadata", "nixl_capi_get_local_partial_md is neither reached nor listed"},
		"not folded":              {"doc.go", "//\tnixl_capi_create_agent ", "//\t ", "nixl_capi_create_agent is neither reached nor listed"},
		"folded without a reason": {"doc.go", "[]Desc: slices.Delete", "[]Desc:", "nixl_capi_xfer_dlist_rem_desc is neither reached nor listed"},
		"folded and called":       {"doc.go", "//\tnixl_capi_create_agent ", "//\tnixl_capi_query_mem  x: y\n//\tnixl_capi_create_agent ", "nixl_capi_query_mem is listed as folded, but Backend.Query reaches it"},
		"folded and unknown":      {"doc.go", "//\tnixl_capi_create_agent ", "//\tnixl_capi_nothing  x: y\n//\tnixl_capi_create_agent ", "nixl_capi_nothing is listed as folded, but not in the header"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			require.NoError(t, os.CopyFS(dir, os.DirFS("../../nixl")))
			text, err := os.ReadFile(filepath.Join(dir, c[0]))
			require.NoError(t, err)
			require.Contains(t, string(text), c[1])
			require.NoError(t, os.WriteFile(filepath.Join(dir, c[0]), []byte(strings.Replace(string(text), c[1], c[2], 1)), 0o600))
			p, err := readPackage(dir)
			require.NoError(t, err)
			require.ErrorContains(t, cover(io.Discard, all(), all(), p), c[3])
		})
	}
	p, err := readPackage("../../nixl")
	require.NoError(t, err)
	functions := all()
	require.NoError(t, cover(io.Discard, functions, functions, p))
	require.ErrorContains(t, cover(io.Discard, append(functions, "nixl_capi_new"), functions, p), "nixl_capi_new is neither reached")
	require.ErrorContains(t, cover(io.Discard, functions, functions[1:], p), "is in the header, but not in the library")
	require.ErrorContains(t, cover(io.Discard, functions, append(functions, "nixl_capi_new"), p), "nixl_capi_new is in the library, but not in the header")
}

// all is the header's list, as capi.h has it.
func all() []string {
	text, err := os.ReadFile("../../nixl/capi.h")
	if err != nil {
		panic(err)
	}
	var names []string
	for line := range strings.SplitSeq(string(text), "\n") {
		line = strings.TrimSpace(line)
		for _, kind := range []string{"F(nx_status, ", "F(bool, "} {
			if rest, ok := strings.CutPrefix(line, kind); ok {
				name, _, _ := strings.Cut(rest, ",")
				names = append(names, "nixl_capi_"+name)
			}
		}
	}
	return names
}
