package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/measure"
)

func TestQuantileIsTheNearestRank(t *testing.T) {
	ds := []time.Duration{50, 10, 40, 20, 30}
	for q, want := range map[float64]time.Duration{0: 10, 0.2: 10, 0.21: 20, 0.5: 30, 0.8: 40, 0.99: 50, 1: 50} {
		require.Equal(t, want, quantile(ds, q), "%v", q)
	}
	require.Zero(t, quantile(nil, 0.5))
}

func TestSpread(t *testing.T) {
	require.Zero(t, spread(nil))
	require.Zero(t, spread([]float64{3, 3}))
	require.Equal(t, 0.5, spread([]float64{3, 2, 2.5}))
}

// Every lease is renewed exactly once per interval, in messages of all leases of a reader.
func TestSimulatedFleetCountsEveryRenewal(t *testing.T) {
	with, without, err := simulated(t.Context(), size{20, 30}, 3)
	require.NoError(t, err)
	require.EqualValues(t, 20*30*3, with.Renewals)
	require.EqualValues(t, 20*3, with.Messages)
	require.EqualValues(t, 20*30, with.Live)
	require.Equal(t, 3000, with.Steps)
	require.Equal(t, 2000, without.Steps)
	require.Zero(t, without.Messages)
	require.Positive(t, with.CPU)
	require.LessOrEqual(t, with.P50, with.P99)
	require.LessOrEqual(t, with.P99, with.Max)

	r := measure.NewReport("x")
	require.NoError(t, simulate(t.Context(), size{2, 3}, 2, r))
	require.Len(t, r.Rows, 2)
	require.Equal(t, 3.0, r.Rows[0].Extra["leases_per_message"])
}

func TestSimulatedReaderHeartbeatsEveryOwner(t *testing.T) {
	p, err := simulatedReader(t.Context(), 5, 4, 6)
	require.NoError(t, err)
	require.InDelta(t, 5*6, p.Messages, 5)
	require.Equal(t, 6000, p.Steps)
}

// A child answers each command, an error included, and is told of the end.
func TestServeAnswersUntilTheEnd(t *testing.T) {
	var in, out bytes.Buffer
	e := json.NewEncoder(&in)
	require.NoError(t, e.Encode(command{Cmd: "hold", Port: 7, Leases: []ticket{{1, 2, 3}}}))
	require.NoError(t, e.Encode(command{Cmd: "bad"}))
	var told []string
	require.NoError(t, serve(&in, &out, func(c command) (answer, error) {
		told = append(told, c.Cmd)
		if c.Cmd == "bad" {
			return answer{}, errors.New("told so")
		}
		return answer{Port: c.Port, Leases: c.Leases}, nil
	}))
	require.Equal(t, []string{"hold", "bad", "end"}, told)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Len(t, lines, 2)
	require.JSONEq(t, `{"Port":7,"Leases":[{"i":1,"s":2,"n":3}]}`, lines[0])
	require.JSONEq(t, `{"Error":"told so"}`, lines[1])
	require.ErrorContains(t, serve(strings.NewReader("{"), &out, nil), "unexpected EOF")
}
