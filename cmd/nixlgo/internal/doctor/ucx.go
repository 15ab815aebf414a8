//go:build cgo

package doctor

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>

// The library is loaded already, as a dependency that only its own users see: RTLD_NOLOAD finds it again.
static const char *ucx_version(const char *path) {
	void *ucp = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
	if (!ucp)
		return "";
	const char *(*version)(void) = (const char *(*)(void))dlsym(ucp, "ucp_get_version_string");
	const char *text = version ? version() : "";
	dlclose(ucp);
	return text;
}
*/
import "C"

import "unsafe"

// ucxVersion asks a loaded libucp for its version; "" if it does not tell.
func ucxVersion(path string) string {
	c := C.CString(path)
	defer C.free(unsafe.Pointer(c))
	return C.GoString(C.ucx_version(c))
}
