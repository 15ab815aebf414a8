package measure

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestInterleaveRotatesAndKeepsEveryRepeat(t *testing.T) {
	var order string
	alternative := func(name string, times ...time.Duration) Alternative {
		return Alternative{name, func(context.Context) (time.Duration, error) {
			order += name
			took := times[0]
			times = times[1:]
			return took, nil
		}}
	}
	samples, err := Interleave(t.Context(), 3, alternative("a", 30, 20, 50), alternative("b", 1, 1, 1))
	require.NoError(t, err)
	require.Equal(t, "abbaab", order)
	require.Equal(t, []Sample{{"a", []time.Duration{30, 20, 50}}, {"b", []time.Duration{1, 1, 1}}}, samples)
	require.Equal(t, time.Duration(20), samples[0].Min())
	require.Equal(t, 1.5, samples[0].Spread())
	require.Equal(t, time.Duration(30), samples[0].Median())
	require.Zero(t, samples[1].Spread())
	require.Equal(t, 5.0, samples[0].GBs(100))
}

func TestInterleaveRefusesWhatIsNoMeasurement(t *testing.T) {
	broken := errors.New("broken")
	ran := func(took time.Duration, err error) Alternative {
		return Alternative{"x", func(context.Context) (time.Duration, error) { return took, err }}
	}
	_, err := Interleave(t.Context(), 2, ran(1, broken))
	require.ErrorIs(t, err, broken)
	require.ErrorContains(t, err, "x, repeat 1")
	_, err = Interleave(t.Context(), 1, ran(0, nil))
	require.ErrorContains(t, err, "no time")
	_, err = Interleave(t.Context(), 0, ran(1, nil))
	require.Error(t, err)
	_, err = Interleave(t.Context(), 1)
	require.Error(t, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(broken)
	_, err = Interleave(ctx, 1, ran(1, nil))
	require.ErrorIs(t, err, broken)
}

// module makes the working directory a folder of an empty module and returns the module's root.
func module(t *testing.T) string {
	root, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(root, "go.mod"), []byte("module x\n"), 0o600))
	inner := filepath.Join(root, "a", "b")
	require.NoError(t, os.MkdirAll(inner, 0o755))
	t.Chdir(inner)
	return root
}

func TestWriteReportsAtTheModuleRoot(t *testing.T) {
	root := module(t)
	r := NewReport("bench-x")
	r.Add(Row{Name: "read", Unit: "GB/s", Ours: 3, Peer: 2, Repeats: 5, Spread: 0.25, Extra: map[string]float64{"memcpy": 9}})
	r.Add(Row{Name: "alone", Unit: "ns", Ours: 1234.5, Repeats: 1})
	path, err := r.Write()
	require.NoError(t, err)
	require.Equal(t, filepath.Join(root, "out", "bench-x.json"), path)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Contains(t, string(b), "\n  \"target\": \"bench-x\",\n")
	var back Report
	require.NoError(t, json.Unmarshal(b, &back))
	require.Equal(t, *r, back)
	require.Equal(t, 1.5, back.Rows[0].Ratio)
	require.NotEmpty(t, back.Machine.Kernel)
	require.Positive(t, back.Machine.CPUs)
	_, err = r.Write() // replaces
	require.NoError(t, err)
}

func TestWriteRefusesWhatItCannotWrite(t *testing.T) {
	module(t)
	for _, target := range []string{"", ".", "..", "../x", "a/b"} {
		_, err := NewReport(target).Write()
		require.Error(t, err, target)
	}
	r := NewReport("x")
	r.Add(Row{Name: "no number", Ours: math.NaN()})
	_, err := r.Write()
	require.ErrorContains(t, err, "NaN")
	require.NoDirExists(t, "../../out")
}

func TestPrintAlignsTheTable(t *testing.T) {
	r := NewReport("x")
	reached := Row{Name: "tcp", Unit: "GB/s", Ours: 1.23456, Peer: 0.5, Repeats: 7, Spread: 0.126}
	reached.Aim("≥ 2", true)
	r.Add(reached)
	missed := Row{Name: "longer name", Unit: "ns", Ours: 123456, Repeats: 10}
	missed.Aim("≤ 9 ns", false)
	r.Add(missed)
	r.Add(Row{Name: "free", Unit: "ns", Ours: 1, Repeats: 1})
	var b bytes.Buffer
	require.NoError(t, r.Print(&b))
	require.Equal(t, ""+
		"name         unit  ours    peer  ratio  repeats  spread  target\n"+
		"tcp          GB/s  1.23    0.5   2.47   7        13 %    ≥ 2: met\n"+
		"longer name  ns    123456  -     -      10       0 %     ≤ 9 ns: MISSED\n"+
		"free         ns    1       -     -      1        0 %     -\n", b.String())
}
