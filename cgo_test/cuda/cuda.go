// Package cuda allocates memory of a GPU for tests, through the CUDA driver that
// it loads at run time.
package cuda

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdint.h>
#include <stddef.h>

// Returns the driver's error code, -1 without a driver.
static int cuda_alloc(size_t size, uint64_t *addr) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!cuda)
        return -1;
    int (*init)(unsigned int) = (int (*)(unsigned int))dlsym(cuda, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(cuda, "cuDevicePrimaryCtxRetain");
    int (*current)(void *) = (int (*)(void *))dlsym(cuda, "cuCtxSetCurrent");
    int (*alloc)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))dlsym(cuda, "cuMemAlloc_v2");
    void *context = NULL;
    if (!init || !retain || !current || !alloc)
        return -1;
    int code = init(0);
    if (!code)
        code = retain(&context, 0);
    if (!code)
        code = current(context);
    return code ? code : alloc(addr, size);
}
*/
import "C"

import (
	"fmt"
	"runtime"
)

// Alloc returns the address of size bytes on device 0. They are never freed: the
// process ends soon. The calling goroutine keeps its thread, which has the context.
func Alloc(size int) (uint64, error) {
	runtime.LockOSThread()
	var addr C.uint64_t
	if code := C.cuda_alloc(C.size_t(size), &addr); code != 0 {
		return 0, fmt.Errorf("cuda: allocating %d bytes: error %d of the driver", size, code)
	}
	return uint64(addr), nil
}
