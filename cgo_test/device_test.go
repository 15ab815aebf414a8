package cgotest

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/nixl"
)

const allocation = 0x7f0000000000 // 1 MiB on device 3, of the driver below

// deviceChild describes memory of a GPU, and prints what becomes of it.
func deviceChild() int {
	for _, c := range []struct {
		addr, size uint64
		device     int
	}{
		{allocation, 1 << 20, 3},
		{allocation + 4096, 4096, 3},
		{allocation, 1<<20 + 1, 3},
		{allocation + 4096, 4096, 0},
		{0x1000, 4096, 0},
		{0x2000, 4096, 0},
	} {
		d, err := nixl.Device(c.addr, c.size, c.device)
		if err != nil {
			fmt.Println(errors.Is(err, nixl.ErrInvalid), errors.Is(err, errors.ErrUnsupported), err)
			continue
		}
		whole, err := d.Desc(0, c.size)
		fmt.Println(whole, err)
	}
	return 0
}

// The library crashes at an address that is no device memory, so the driver is asked. Here a driver that says what the
// real one says on a machine with four GPUs; nixl.TestDeviceMemoryMoves needs the real one.
func TestDeviceMemoryIsCheckedWithTheDriver(t *testing.T) {
	dir := t.TempDir()
	compile(t, dir, "libcuda.so.1", `
#include <stdint.h>
#include <stddef.h>
int cuInit(unsigned flags) { return flags; }
int cuPointerGetAttributes(unsigned n, int *names, void **values, uint64_t p) {
    if (p == 0x2000)
        return 1; /* CUDA_ERROR_INVALID_VALUE */
    int device = p >= 0x7f0000000000 && p < 0x7f0000100000;
    for (unsigned i = 0; i < n; i++)
        switch (names[i]) {
        case 2: *(unsigned *)values[i] = device ? 2 : 1; break;      /* MEMORY_TYPE: device or host */
        case 9: *(int *)values[i] = 3; break;                        /* DEVICE_ORDINAL */
        case 11: *(uint64_t *)values[i] = 0x7f0000000000; break;     /* RANGE_START_ADDR */
        case 12: *(size_t *)values[i] = 0x100000; break;             /* RANGE_SIZE */
        default: return 1;
        }
    return 0;
}
`)
	p := start(t, "device", "LD_LIBRARY_PATH="+dir)
	out, err := p.wait()
	require.NoError(t, err, &p.stderr)
	require.Equal(t, `[0x7f0000000000 +1048576 dev 3] <nil>
[0x7f0000001000 +4096 dev 3] <nil>
true false nixl: describe device memory: invalid argument: [0x7f0000000000 +1048577 dev 3] is outside of its allocation, [0x7f0000000000 +1048576 dev 3]
true false nixl: describe device memory: invalid argument: [0x7f0000001000 +4096 dev 0] is outside of its allocation, [0x7f0000000000 +1048576 dev 3]
true false nixl: describe device memory: invalid argument: 0x1000 is not the address of device memory
false true nixl: describe device memory: unsupported operation: the CUDA driver's cuPointerGetAttributes answered error 1: is there a GPU?
`, out)
}
