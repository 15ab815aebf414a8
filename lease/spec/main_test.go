package main

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every mutant that a model knows is run, and every one that is run is known.
// That the runs come out as expected is for `make model-check`, which needs SPIN.
func TestEveryMutantOfTheModelIsRun(t *testing.T) {
	for _, s := range short {
		known := map[string]bool{}
		for _, m := range regexp.MustCompile(`(?:#ifn?def |defined\()(M\d+[A-Z]?|X[A-Z0-9]+)`).FindAllSubmatch(s.model, -1) {
			known[string(m[1])] = true
		}
		require.Greater(t, len(known), 13)
		ran := map[string]bool{}
		for _, r := range s.runs {
			if !r.mutant() {
				continue
			}
			for _, m := range strings.Fields(r.name) {
				require.True(t, known[m], m)
				ran[m] = true
			}
		}
		require.Equal(t, known, ran)
	}
}

// A define that the model does not know would make a run the same as another.
func TestEveryDefineOfARunIsKnown(t *testing.T) {
	for _, s := range append(slices.Clone(short), long...) {
		for _, r := range s.runs {
			for _, d := range strings.Fields(r.defines) {
				name, _, _ := strings.Cut(d, "=")
				require.Regexp(t, `(?:#ifn?def |defined\()`+name+`\b`, string(s.model), r.name+" "+r.defines)
			}
		}
	}
}

func TestLongRunsAreTheLongOnesAndTheBaseWithoutReduction(t *testing.T) {
	for _, j := range jobs(false, "") {
		require.Empty(t, j.flags)
	}
	reduced, whole := 0, 0
	for _, j := range jobs(true, "") {
		require.Equal(t, "base", j.name)
		if len(j.flags) == 0 {
			reduced++
		} else {
			whole++
		}
	}
	require.Equal(t, len(longLeaseRuns)+len(longSharingRuns), reduced)
	require.Greater(t, whole, 30)
	require.Len(t, jobs(false, "XKEEP UNCHECKED"), 1)
}

// The faults of the package's own models are those of this one, or its own.
func TestFaultsAreNamedAsInTheModel(t *testing.T) {
	src, err := os.ReadFile("../faults.go")
	require.NoError(t, err)
	ours := []string{"XJOIN", "XREAP", "XSHORT"}
	for _, m := range regexp.MustCompile(`fault((?:M|X)[A-Z0-9]+)`).FindAllSubmatch(src, -1) {
		name := string(m[1])
		require.True(t, slices.Contains(ours, name) || regexp.MustCompile(`\b`+name+`\b`).Match(slices.Concat(leaseModel, sharingModel)), name)
	}
}

func TestALineTellsWhetherARunIsAsExpected(t *testing.T) {
	for _, tt := range []struct {
		run  run
		out  outcome
		line string
		ok   bool
	}{
		{run{"base", "GEO=0", "clean", "x"}, outcome{states: "7"}, "base errors: 0 states: 7 [GEO=0] x", true},
		{run{"base", "", "clean", ""}, outcome{states: "7", errors: true}, "base VIOLATED, want no violation; errors: 1 states: 7", false},
		{run{"M4 M5", "", "P1", "y"}, outcome{states: "7", errors: true}, "mutant M4+M5 P1 caught states: 7 y", true},
		{run{"M1", "", "P1", ""}, outcome{states: "7"}, "mutant M1 P1 NOT CAUGHT; states: 7", false},
		{run{"limit", "LATE", "P1", "z"}, outcome{states: "7", took: "0.25", errors: true}, "limit P1 violated, as it must be; states: 7 in 0.25 s [LATE] z", true},
		{run{"limit", "LATE", "P1", "z"}, outcome{states: "7"}, "limit P1 NOT CAUGHT; states: 7 [LATE] z", false},
		{run{"M4", "", "clean", ""}, outcome{states: "7"}, "mutant M4 harmless errors: 0 states: 7", true},
		{run{"M4", "", "clean", ""}, outcome{states: "7", errors: true}, "mutant M4 VIOLATED, want no violation; errors: 1 states: 7", false},
		{run{"reach", "", "reached", ""}, outcome{states: "7", errors: true}, "reach reached states: 7", true},
		{run{"M1", "", "P1", ""}, outcome{err: os.ErrNotExist}, "M1 : file does not exist", false},
	} {
		line, ok := tt.run.line(tt.out)
		require.Equal(t, tt.line, line)
		require.Equal(t, tt.ok, ok)
	}
}
