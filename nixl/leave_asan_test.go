//go:build asan

package nixl

import "os"

// os.Exit looks for leaks before it leaves (see make test-asan).
var leave = os.Exit
