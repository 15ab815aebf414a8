package nixl

import (
	"errors"
	"slices"
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

// requireLacks checks the error of a call that needs a function which is not there.
func requireLacks(t testing.TB, err error, function, version string) {
	t.Helper()
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, function+" is not in the loaded library")
	require.ErrorContains(t, err, "the first with it is NIXL "+version)
}
