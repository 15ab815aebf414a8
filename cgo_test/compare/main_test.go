package main

import (
	"bufio"
	"context"
	"io"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// The library must not be left through libc: see package nixl.
func TestMain(m *testing.M) { syscall.Exit(m.Run()) }

// scripted is a process that gives the answers in turn.
func scripted(t *testing.T, name string, answers ...string) *process {
	in, out := io.Pipe()
	p := &process{name: name, stdin: out, answers: make(chan string)}
	go func() {
		defer close(p.answers)
		for lines := bufio.NewScanner(in); len(answers) > 0 && lines.Scan(); answers = answers[1:] {
			p.answers <- answers[0]
		}
		in.Close()
	}()
	t.Cleanup(func() { out.Close() })
	return p
}

func TestRowsCompareTheLeast(t *testing.T) {
	task := task{command: "x", rows: []string{"a", "", "c"}, sum: "b and c", sumFrom: 1, sumTo: 3}
	rows, err := task.measure(context.Background(), []*process{
		scripted(t, "C", "10 1 2", "20 1 2"), scripted(t, "Go", "30 2 4", "15 2 4"), scripted(t, "Python", "150 4 8", "300 4 8"),
	}, 2)
	require.NoError(t, err)
	require.Equal(t, []row{
		{Name: "a", Unit: "ns", C: 10, Go: 15, Python: 150, GoOverC: 1.5, PythonOverGo: 10, Repeats: 2, Spread: 1},
		{Name: "c", Unit: "ns", C: 2, Go: 4, Python: 8, GoOverC: 2, PythonOverGo: 2, Repeats: 2},
		{Name: "b and c", Unit: "ns", C: 3, Go: 6, Python: 12, GoOverC: 2, PythonOverGo: 2, Repeats: 2},
	}, rows)
}

func TestWrongAnswersAreErrors(t *testing.T) {
	for name, answer := range map[string]string{"no number": "x", "too many": "1 2", "none": ""} {
		_, err := task{command: "x", rows: []string{"a"}}.measure(context.Background(), []*process{scripted(t, "C", answer)}, 1)
		require.Error(t, err, name)
	}
	_, err := task{command: "x", rows: []string{"a"}}.measure(context.Background(), []*process{scripted(t, "C")}, 1)
	require.Error(t, err, "the process ended")
}

// Each target can be missed, and each is one of the rows.
func TestTargets(t *testing.T) {
	for name, ratio := range map[string][2]row{
		"make to complete, 1000 × 4 KiB":             {{GoOverC: 1.05}, {GoOverC: 1.06}},
		"make, 100000 × 64 KiB":                      {{GoOverC: 1.05}, {GoOverC: 1.06}},
		"make to complete, 1 × 4 KiB":                {{GoOverC: 1.15}, {GoOverC: 1.16}},
		"READ again, 1 × 4 KiB":                      {{GoOverC: 1.15}, {GoOverC: 1.16}},
		"prepare, 10000 × 4 KiB":                     {{GoOverC: 1.3}, {GoOverC: 1.31}},
		"prepare, Python from tuples, 10000 × 4 KiB": {{PythonOverGo: 10}, {PythonOverGo: 9.9}},
		"drain of nothing":                           {{GoOverC: 3}, {GoOverC: 3.1}},
		"drain of 10000 notifications":               {{PythonOverGo: 1.1}, {PythonOverGo: 0.9}},
	} {
		for k, r := range ratio {
			r.Name = name
			r.judge()
			require.NotNil(t, r.Met, name)
			require.Equal(t, k == 0, *r.Met, "%s: %+v", name, r)
		}
		var names []string
		for _, task := range tasks(false) {
			names = append(append(names, task.rows...), task.sum)
		}
		require.Contains(t, names, name)
	}
	var untargeted row
	untargeted.Name = "release, 1 × 4 KiB"
	untargeted.judge()
	require.Nil(t, untargeted.Met)
}

func TestTasksAreUnderstood(t *testing.T) {
	var w worker
	for _, task := range tasks(false) {
		what, _, _ := strings.Cut(task.command, " ")
		require.Contains(t, []string{"cycle", "repost", "notify", "latency", "drain", "empty"}, what)
	}
	_, err := w.answer("dance", [4]int{})
	require.EqualError(t, err, "unknown command")
}
