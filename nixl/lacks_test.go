package nixl

import (
	"errors"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// lacks reports whether the loaded library is too old for a function.
func lacks(t testing.TB, function string) bool {
	t.Helper()
	l, err := Load("")
	require.NoError(t, err)
	return slices.Contains(l.Missing(), function)
}

// libraryBefore compares the release of the loaded wheel, "1.5.1" for instance.
func libraryBefore(t testing.TB, version string) bool {
	t.Helper()
	l, err := Load("")
	require.NoError(t, err)
	found, err := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(l.Path)), "nixl_cu*.dist-info"))
	require.NoError(t, err)
	require.Len(t, found, 1, "the release of %s is not known", l.Path)
	_, release, _ := strings.Cut(strings.TrimSuffix(filepath.Base(found[0]), ".dist-info"), "-")
	return slices.Compare(numbers(t, release), numbers(t, version)) < 0
}

func numbers(t testing.TB, version string) []int {
	var ns []int
	for part := range strings.SplitSeq(version, ".") {
		n, err := strconv.Atoi(part)
		require.NoError(t, err)
		ns = append(ns, n)
	}
	return ns
}

// requireLacks checks the error of a call that needs a function which is not there.
func requireLacks(t testing.TB, err error, function, version string) {
	t.Helper()
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, function+" is not in the loaded library")
	require.ErrorContains(t, err, "the first with it is NIXL "+version)
}
