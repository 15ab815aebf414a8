package doctor

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// cases.md 35: two UCX copies in one process.
func TestMappedFilesAreCountedOnceEach(t *testing.T) {
	const maps = `7f0000000000-7f0000001000 r--p 00000000 08:01 1 /w/libs/libucp-b39b3ed9.so.0.0.0
7f0000001000-7f0000002000 r-xp 00001000 08:01 1                          /w/libs/libucp-b39b3ed9.so.0.0.0
7f0000002000-7f0000003000 r--p 00000000 08:01 2 /usr/lib/libucp.so.0
7f0000003000-7f0000004000 r--p 00000000 08:01 3 /usr/lib/libucphelper.so
7f0000004000-7f0000005000 rw-p 00000000 00:00 0
7ffd00000000-7ffd00001000 rw-p 00000000 00:00 0 [stack]
`
	require.Equal(t, []string{"/w/libs/libucp-b39b3ed9.so.0.0.0", "/usr/lib/libucp.so.0"}, mappedFiles(maps, "libucp"))
	require.Empty(t, mappedFiles(maps, "libnixl_capi"))
}
