package nixl

import (
	"syscall"
	"testing"
	"unsafe"
)

// mapped asks the kernel whether the buffer's pages exist.
func mapped(t testing.TB, b *Buffer) bool {
	t.Helper()
	var residency [1]byte
	_, _, errno := syscall.Syscall(syscall.SYS_MINCORE, uintptr(b.addr()), 4096, uintptr(unsafe.Pointer(&residency[0])))
	return errno == 0
}
