package nixlgo

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// nixl#2047, cases.md 4: a READ from a stopped peer stays active for ever, and must not keep a core busy as long.
func TestPauseGrowsWithTheTimeThatNothingGotOn(t *testing.T) {
	for waited, want := range map[time.Duration]time.Duration{
		0:                       50 * time.Microsecond,
		3200 * time.Microsecond: 50 * time.Microsecond,
		6400 * time.Microsecond: 100 * time.Microsecond,
		640 * time.Millisecond:  10 * time.Millisecond,
	} {
		require.Equal(t, want, busyPause(waited), waited)
	}
}
