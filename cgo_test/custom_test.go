package cgotest

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/nixl"
)

// customChild makes a transfer with a parameter of its own, and one without.
func customChild() int {
	a, err := nixl.NewAgent("", nixl.Config{})
	if err != nil {
		return fail(err)
	}
	if _, err := a.CreateBackend("UCX", nil); err != nil {
		return fail(err)
	}
	b, err := nixl.AllocBuffer(8192)
	if err != nil {
		return fail(err)
	}
	if _, err := a.Register(b); err != nil {
		return fail(err)
	}
	for _, custom := range [][]byte{nil, {1, 0, 2, 0, 3}} {
		_, err := a.CreateTransfer(nixl.Read, nixl.DRAM, []nixl.Desc{{Addr: b.Addr(), Len: 8}}, a.Name(), nixl.DRAM, []nixl.Desc{{Addr: b.Addr() + 4096, Len: 8}},
			nixl.TransferOptions{Custom: custom, Notify: true})
		if err != nil {
			return fail(err)
		}
	}
	if err := a.Close(); err != nil {
		return fail(err)
	}
	return 0
}

// peer-tests B16: a custom parameter keeps its zero bytes. Between this package and the real library lies one that asks
// the library what it was given.
func TestCustomParametersKeepZeroBytes(t *testing.T) {
	_, libs := wheel(t)
	dir := t.TempDir()
	compile(t, dir, "libnixl_capi.so", `
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
int nixl_capi_opt_args_get_custom_param(void *, void **, size_t *);
int nixl_capi_opt_args_set_custom_param(void *args, const void *data, size_t len) {
    int (*set)(void *, const void *, size_t) = dlsym(RTLD_NEXT, "nixl_capi_opt_args_set_custom_param");
    int s = set(args, data, len);
    unsigned char *got = NULL;
    size_t n = 0;
    nixl_capi_opt_args_get_custom_param(args, (void **)&got, &n);
    fprintf(stderr, "custom of %zu:", n);
    for (size_t i = 0; i < n; i++)
        fprintf(stderr, " %02x", got[i]);
    fputs("\n", stderr);
    free(got);
    return s;
}
`, "-Wl,--no-as-needed", "-Wl,-rpath,"+libs, libs+"/libnixl_capi.so")
	p := start(t, "custom", "NIXLGO_LIBRARY="+dir, "UCX_LOG_LEVEL=fatal")
	_, err := p.wait()
	require.NoError(t, err, &p.stderr)
	require.Contains(t, p.stderr.String(), "custom of 5: 01 00 02 00 03\n")
	require.NotContains(t, p.stderr.String(), "custom of 0", "none is set where none is given")
}
