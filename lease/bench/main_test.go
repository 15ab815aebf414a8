package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The program runs, and its rows hold numbers: of a small table, without a peer.
func TestEveryRowHoldsANumber(t *testing.T) {
	rep := run(1000, "")
	require.Greater(t, len(rep.Rows), 10)
	for _, r := range rep.Rows {
		require.Positive(t, r.Ns+r.Bytes, r.Name)
		require.Positive(t, r.Leases, r.Name)
	}
}
