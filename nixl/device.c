//go:build cgo

#include "shim.h"

#include <dlfcn.h>

/* The part of the CUDA driver API that is needed; its numbers are ABI. */
enum { MEMORY_TYPE = 2, DEVICE_ORDINAL = 9, RANGE_START = 11, RANGE_SIZE = 12 };
enum { TYPE_DEVICE = 2 };

int nixlgo_device(uint64_t addr, nixlgo_pointer *out) {
    static int (*init)(unsigned int);
    static int (*query)(unsigned int, int *, void **, uint64_t);
    *out = (nixlgo_pointer){0};
    /* The caller holds a lock. A driver that is loaded stays. */
    if (!query) {
        void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!cuda)
            return NIXLGO_NO_DRIVER;
        *(void **)&init = dlsym(cuda, "cuInit");
        *(void **)&query = dlsym(cuda, "cuPointerGetAttributes");
        if (!init || !query) {
            query = NULL;
            dlclose(cuda);
            return NIXLGO_NO_DRIVER;
        }
    }
    out->call = "cuInit";
    int code = init(0);
    if (code)
        return code;
    unsigned int type = 0;
    int ordinal = -1;
    uint64_t start = 0;
    size_t size = 0;
    int names[] = {MEMORY_TYPE, DEVICE_ORDINAL, RANGE_START, RANGE_SIZE};
    void *values[] = {&type, &ordinal, &start, &size};
    out->call = "cuPointerGetAttributes";
    code = query(sizeof names / sizeof *names, names, values, addr);
    out->device = type == TYPE_DEVICE;
    out->ordinal = ordinal;
    out->start = start;
    out->size = size;
    return code;
}
