package main

import (
	"bufio"
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
	task := task{command: "x", rows: []string{"a", "", "c"}}
	processes := []*process{
		scripted(t, "C", "10 1 2", "20 1 2"), scripted(t, "Go", "30 2 4", "15 2 4"), scripted(t, "Python", "150 4 8", "300 4 8"),
	}
	for r := range 2 {
		require.NoError(t, task.measure(t.Context(), processes, r))
	}
	require.Equal(t, []row{
		{Name: "a", Unit: "ns", C: 10, Go: 15, Python: 150, GoOverC: 1.5, PythonOverGo: 10, Repeats: 2, Spread: 1, Paired: 3, Faults: []int{0, 0, 0}},
		{Name: "c", Unit: "ns", C: 2, Go: 4, Python: 8, GoOverC: 2, PythonOverGo: 2, Repeats: 2, Paired: 2, Faults: []int{0, 0, 0}},
	}, task.report())
}

func TestWrongAnswersAreErrors(t *testing.T) {
	for name, answer := range map[string]string{"no number": "x", "too many": "1 2", "none": ""} {
		require.Error(t, (&task{command: "x", rows: []string{"a"}}).measure(t.Context(), []*process{scripted(t, "C", answer)}, 0), name)
	}
	require.Error(t, (&task{command: "x", rows: []string{"a"}}).measure(t.Context(), []*process{scripted(t, "C")}, 0), "the process ended")
}

// Each target can be missed, and each is one of the rows.
func TestTargets(t *testing.T) {
	for name, ratio := range map[string][2]row{
		"make to complete, 1000 × 4 KiB":                        {{GoOverC: 1.05}, {GoOverC: 1.06}},
		"make, 100000 × 64 KiB":                                 {{GoOverC: 1.05, PythonOverGo: 1}, {GoOverC: 1.06, PythonOverGo: 1}},
		"make, 1000 × 4 KiB":                                    {{GoOverC: 1.05, PythonOverGo: 1}, {GoOverC: 1.05, PythonOverGo: 0.99}},
		"make to complete, 1 × 4 KiB":                           {{GoOverC: 1.15}, {GoOverC: 1.16}},
		"READ again, 1 × 4 KiB":                                 {{GoOverC: 1.15}, {GoOverC: 1.16}},
		"prepare, 10000 × 4 KiB":                                {{GoOverC: 1.3}, {GoOverC: 1.31}},
		"describe and prepare, Python by tuples, 10000 × 4 KiB": {{PythonOverGo: 10}, {PythonOverGo: 9.9}},
		"drain of nothing":                                      {{GoOverC: 3, PythonOverGo: 6}, {GoOverC: 3.1, PythonOverGo: 6}},
		"drain of 10000 notifications":                          {{PythonOverGo: 1}, {PythonOverGo: 0.9}},
	} {
		for k, r := range ratio {
			r.Name = name
			r.judge()
			require.NotNil(t, r.Met, name)
			require.Equal(t, k == 0, *r.Met, "%s: %+v", name, r)
			require.Equal(t, k == 0, r.Bound == "", "%s: %+v", name, r)
		}
		var names []string
		for _, task := range tasks(false) {
			names = append(names, task.rows...)
		}
		require.Contains(t, names, name)
	}
	for _, name := range []string{"release, 1 × 4 KiB", "make, 32 × 4 KiB", "prepare, Python from tuples, 10000 × 4 KiB", "post, 10000 × 4 KiB", "call of nothing"} {
		untargeted := row{Name: name}
		untargeted.judge()
		require.Nil(t, untargeted.Met, name)
	}
}

// The list: five phases of five counts of two sizes.
func TestEveryPhaseIsARow(t *testing.T) {
	names := map[string]int{}
	for _, task := range tasks(false) {
		for _, name := range task.rows {
			names[name]++
		}
	}
	for _, phase := range []string{"prepare", "make", "post", "complete", "release", "make to complete"} {
		for _, n := range []string{"1", "32", "1000", "10000", "100000"} {
			for _, size := range []string{"4", "64"} {
				require.Equal(t, 1, names[phase+", "+n+" × "+size+" KiB"])
			}
		}
	}
}

func TestTasksAreUnderstood(t *testing.T) {
	var w worker
	for _, task := range tasks(false) {
		what, _, _ := strings.Cut(task.command, " ")
		require.Contains(t, []string{"lists", "cycle", "start", "build", "repost", "notify", "latency", "drain", "empty", "nothing"}, what)
	}
	_, err := w.answer("dance", 0, 0, 0)
	require.EqualError(t, err, "unknown command")
}
