package nixl

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDefaultsOfTransportsThatAreLeftOutAreNotSet(t *testing.T) {
	for tls, want := range map[string][2]bool{ // tcp, cma
		"":             {true, true},
		"all":          {true, true},
		"tcp":          {true, false},
		"tcp,shm,self": {true, true},
		"rc,sm":        {false, true},
		"rc,cma":       {false, true},
		"rc":           {false, false},
		`\cma,tcp`:     {true, true},
		"^tcp":         {false, true},
		"^sm":          {true, false},
		"^rc,ud":       {true, true},
		"^all":         {false, false},
	} {
		require.Equal(t, want, [2]bool{uses(tls, "tcp"), uses(tls, "cma")}, "UCX_TLS=%s", tls)
		require.True(t, uses(tls, ""), "UCX_TLS=%s", tls)
	}
}
