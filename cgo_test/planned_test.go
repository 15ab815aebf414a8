package cgotest

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/nixl"
)

// plannedChild gets memory from the library twice: metadata and a name.
func plannedChild() int {
	l, err := nixl.Load("")
	if err != nil {
		return fail(err)
	}
	fmt.Println(l.Path, l.Missing())
	var blobs [][]byte
	var agents []*nixl.Agent
	for range 2 {
		a, err := nixl.NewAgent("", nixl.Config{})
		if err != nil {
			return fail(err)
		}
		if _, err := a.CreateBackend("UCX", nil); err != nil {
			return fail(err)
		}
		blob, err := a.LocalMetadata()
		if err != nil {
			return fail(err)
		}
		agents, blobs = append(agents, a), append(blobs, blob)
	}
	name, err := agents[0].LoadRemote(blobs[1])
	if err != nil {
		return fail(err)
	}
	fmt.Println(name == agents[1].Name())
	for _, a := range agents {
		if err := a.Close(); err != nil {
			return fail(err)
		}
	}
	return 0
}

// NIXL plans to ship libnixl_capi.so.0 with a function that frees what the library
// returned (nixl pull request 2180). Here a library of that name, which has the
// function and hands on all others to the released one.
func TestPlannedLibraryIsPreferredAndFreesWhatItReturned(t *testing.T) {
	_, libs := wheel(t)
	dir := t.TempDir()
	compile(t, dir, "libnixl_capi.so.0", `
#include <stdio.h>
#include <stdlib.h>
void nixl_capi_mem_free(void *p) { fputs("freed by the library\n", stderr); free(p); }
`, "-Wl,--no-as-needed", "-Wl,-rpath,"+libs, libs+"/libnixl_capi.so")
	p := start(t, "planned", "NIXLGO_LIBRARY="+dir)
	out, err := p.wait()
	require.NoError(t, err, &p.stderr)
	require.Contains(t, out, filepath.Join(dir, "libnixl_capi.so.0")+" []\ntrue\n")
	require.Equal(t, 3, strings.Count(p.stderr.String(), "freed by the library"), "two blobs and a name: %s", &p.stderr)

	p = start(t, "planned", "NIXLGO_LIBRARY="+libs) // the released library has no such function: free
	out, err = p.wait()
	require.NoError(t, err, &p.stderr)
	require.Contains(t, out, "[nixl_capi_mem_free]\ntrue\n")
}
