package nixl

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// peer-tests B31
func TestQueryOfFiles(t *testing.T) {
	a := newUCX(t, Config{})
	posix, err := a.CreateBackend("POSIX", nil)
	require.NoError(t, err)
	dir := t.TempDir()
	one, two, none := filepath.Join(dir, "one"), filepath.Join(dir, "two"), filepath.Join(dir, "none")
	require.NoError(t, os.WriteFile(one, make([]byte, 5), 0o600))
	require.NoError(t, os.WriteFile(two, make([]byte, 4096), 0o600))
	answers, err := posix.Query(File, []Query{{Name: one}, {Name: two}, {Name: none}})
	require.NoError(t, err)
	require.Len(t, answers, 3)
	require.Equal(t, "5", answers[0]["size"])
	require.Equal(t, "4096", answers[1]["size"])
	require.NotEmpty(t, answers[0]["mtime"])
	require.NotEmpty(t, answers[0]["mode"])
	require.Nil(t, answers[2])

	answers, err = posix.Query(File, nil)
	require.NoError(t, err)
	require.Empty(t, answers)
	_, err = posix.Query(9, []Query{{Name: one}})
	require.ErrorIs(t, err, ErrInvalid)
	_, err = posix.Query(VRAM, []Query{{Name: one}})
	require.ErrorIs(t, err, ErrInvalid)
	_, err = a.s.backends[0].Query(DRAM, []Query{{Desc: Desc{Addr: 4096, Len: 8}}})
	require.ErrorIs(t, err, ErrBackend, "UCX knows nothing of the kind")
	answers, err = posix.Query(File, []Query{{Name: "a\x00b"}, {}})
	require.NoError(t, err)
	require.Equal(t, []map[string]string{nil, nil}, answers)
	require.NoError(t, a.Close())
	_, err = posix.Query(File, []Query{{Name: one}})
	require.ErrorIs(t, err, ErrClosed)
}
