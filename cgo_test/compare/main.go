// Compare measures package nixl beside C and NIXL's own Python API, all on the
// library of one wheel, over shared memory, in processes of their own that take
// turns.
//
//	go run ./cgo_test/compare [-repeats 5] [-quick]
//
// It prints a table and writes out/bench-binding.json. It needs a C compiler and
// the folder .nixl-python (make setup-test). Figures of a shared machine are good
// for ratios only: each is the least of all repeats, spread is (max-min)/min of Go.
// Targets are reported, not enforced.
package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/nixlgo/nixlgo/cgo_test/measure"
)

// patience bounds one answer of a process.
const patience = 2 * time.Minute

func main() {
	repeats := flag.Int("repeats", 5, "how often each language measures each row, in turn")
	quick := flag.Bool("quick", false, "a few small rows, to see that it works")
	library := flag.String("worker", "", "be the Go process on this library (for the program's own use)")
	flag.Parse()
	if *library != "" {
		err := work(*library, os.Stdin, os.Stdout)
		if err != nil {
			fmt.Fprintln(os.Stderr, "compare: Go:", err)
		}
		syscall.Exit(map[bool]int{true: 0, false: 1}[err == nil])
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, *repeats, *quick); err != nil {
		fmt.Fprintln(os.Stderr, "compare:", err)
		os.Exit(1)
	}
}

// row is one line of the report. A language that does not take part has 0.
type row struct {
	Name         string  `json:"name"`
	Unit         string  `json:"unit"`
	C            float64 `json:"c"`
	Go           float64 `json:"go"`
	Python       float64 `json:"python"`
	GoOverC      float64 `json:"go_over_c"`
	PythonOverGo float64 `json:"python_over_go"`
	Repeats      int     `json:"repeats"`
	Spread       float64 `json:"spread"`
	Target       string  `json:"target,omitempty"`
	Met          *bool   `json:"met,omitempty"`
}

// task is one command, and the rows that its answer's numbers give.
type task struct {
	command string
	python  string   // the command for Python where it has more words; "" is the same
	rows    []string // name of each number, "" to leave it out
	sum     string   // one more row, of the numbers from sumFrom on: "" for none
	sumFrom int
	sumTo   int
}

func tasks(quick bool) []task {
	counts, sizes, notifications := []int{1, 32, 1000, 10_000, 100_000}, []int{4 << 10, 64 << 10}, []int{64, 1 << 10, 64 << 10}
	drained := 10_000
	if quick {
		counts, sizes, notifications, drained = []int{1, 1000}, sizes[:1], notifications[:1], 100
	}
	var ts []task
	for _, size := range sizes {
		for _, n := range counts {
			const most = 1 << 30 // bytes that one READ moves
			move := 1
			if n*size > most {
				move = 0
			}
			name := func(phase string) string { return fmt.Sprintf("%s, %d × %d KiB", phase, n, size>>10) }
			t := task{
				command: fmt.Sprintf("cycle %d %d %d %d", n, size, min(200, max(2, 20_000/n)), move),
				rows:    []string{name("prepare"), name("make"), name("post"), name("complete"), name("release")},
			}
			if move == 1 {
				t.sum, t.sumFrom, t.sumTo = name("make to complete"), 1, 4
			} else {
				t.rows[2], t.rows[3] = "", ""
			}
			ts = append(ts, t)
			if size == sizes[0] {
				ts = append(ts, task{command: t.command, python: t.command + " tuples", rows: []string{name("prepare, Python from tuples"), "", "", "", ""}})
			}
		}
	}
	ts = append(ts, task{command: "repost 4096 2000", rows: []string{"READ again, 1 × 4 KiB"}})
	for _, n := range notifications {
		count := min(10_000, 64<<20/n)
		ts = append(ts,
			task{command: fmt.Sprintf("notify %d %d", n, count), rows: []string{fmt.Sprintf("notification of %d bytes", n)}},
			task{command: fmt.Sprintf("latency %d 500", n), rows: []string{fmt.Sprintf("notification of %d bytes, one way", n)}})
	}
	return append(ts,
		task{command: fmt.Sprintf("drain %d", drained), rows: []string{fmt.Sprintf("drain of %d notifications", drained)}},
		task{command: "empty 20000", rows: []string{"drain of nothing"}})
}

// goals are what the project wants to reach; "" where nothing is asked.
func (r *row) judge() {
	goal := func(what string, met bool) { r.Target, r.Met = what, &met }
	name := r.Name
	counts := name[strings.LastIndex(name, ", ")+1:]
	n, _ := strconv.Atoi(strings.SplitN(strings.TrimSpace(counts), " ", 2)[0])
	switch {
	case strings.HasPrefix(name, "make to complete") && n >= 1000:
		goal("go/c ≤ 1.05", r.GoOverC <= 1.05)
	case strings.HasPrefix(name, "make,") && n >= 1000:
		goal("go/c ≤ 1.05", r.GoOverC <= 1.05)
	case name == "READ again, 1 × 4 KiB" || name == "make to complete, 1 × 4 KiB":
		goal("go/c ≤ 1.15", r.GoOverC <= 1.15)
	case strings.HasPrefix(name, "prepare, Python from tuples") && n == 10_000:
		goal("python/go ≥ 10", r.PythonOverGo >= 10)
	case strings.HasPrefix(name, "prepare, 10000 "):
		goal("go/c ≤ 1.3", r.GoOverC <= 1.3)
	case name == "drain of nothing":
		goal("go/c ≤ 3", r.GoOverC <= 3)
	case strings.HasPrefix(name, "drain of"):
		goal("python/go > 1", r.PythonOverGo > 1)
	}
}

// process is one language's.
type process struct {
	name    string
	stdin   io.Writer
	answers chan string // closed when the process ended
}

func start(ctx context.Context, name string, env []string, args ...string) (*process, error) {
	c := exec.CommandContext(ctx, args[0], args[1:]...)
	c.Env = append(os.Environ(), append(env, "UCX_TLS=shm,self", "UCX_LOG_FILE=stderr", "UCX_HANDLE_ERRORS=none", "UCX_USE_MT_MUTEX=y",
		"UCX_RCACHE_MAX_UNRELEASED=1024", "UCX_LOG_LEVEL=error", "NIXL_LOG_LEVEL=ERROR")...)
	c.Stderr = os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := c.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &process{name: name, stdin: in, answers: make(chan string)}
	go func() { // ends with the process
		defer close(p.answers)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			p.answers <- lines.Text()
		}
		c.Wait()
	}()
	ready, err := p.answer()
	if err == nil && ready != "ready" {
		err = fmt.Errorf("%s said %q", name, ready)
	}
	return p, err
}

func (p *process) answer() (string, error) {
	select {
	case line, ok := <-p.answers:
		if !ok {
			return "", fmt.Errorf("the %s process ended", p.name)
		}
		return line, nil
	case <-time.After(patience):
		return "", fmt.Errorf("the %s process did not answer within %v", p.name, patience)
	}
}

func (p *process) ask(command string) ([]float64, error) {
	if _, err := fmt.Fprintln(p.stdin, command); err != nil {
		return nil, fmt.Errorf("%s: %s: %w", p.name, command, err)
	}
	line, err := p.answer()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", command, err)
	}
	var numbers []float64
	for _, f := range strings.Fields(line) {
		n, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %s answered %q", p.name, command, line)
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
}

func run(ctx context.Context, out io.Writer, repeats int, quick bool) error {
	if repeats < 1 {
		return errors.New("no repeats")
	}
	ctx, cancel := context.WithCancel(ctx) // ends the processes
	defer cancel()
	root, err := measure.Root()
	if err != nil {
		return err
	}
	packages := filepath.Join(root, ".nixl-python")
	libraries, err := filepath.Glob(filepath.Join(packages, ".nixl_cu*.mesonpy.libs", "libnixl_capi.so"))
	if err != nil || len(libraries) != 1 {
		return fmt.Errorf("%s holds %d NIXL libraries: run `make setup-test`", packages, len(libraries))
	}
	dir, err := os.MkdirTemp("", "compare")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	cc, python := cmp.Or(os.Getenv("CC"), "cc"), cmp.Or(os.Getenv("NIXLGO_PYTHON"), "python3")
	here := filepath.Join(root, "cgo_test", "compare", "peer")
	binary := filepath.Join(dir, "peer")
	if text, err := exec.CommandContext(ctx, cc, "-O2", "-Wall", "-I", filepath.Join(root, "nixl"), "-o", binary, filepath.Join(here, "peer.c"), "-ldl").CombinedOutput(); err != nil {
		return fmt.Errorf("compile peer.c: %w\n%s", err, text)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var processes []*process
	for _, p := range []struct {
		name string
		args []string
	}{
		{"C", []string{binary, libraries[0]}},
		{"Go", []string{self, "-worker", libraries[0]}},
		{"Python", []string{python, filepath.Join(here, "peer.py")}},
	} {
		started, err := start(ctx, p.name, []string{"PYTHONPATH=" + packages}, p.args...)
		if err != nil {
			return err
		}
		processes = append(processes, started)
	}

	report := struct {
		*measure.Report
		Rows []row `json:"rows"`
	}{Report: measure.NewReport("bench-binding")}
	for _, t := range tasks(quick) {
		rows, err := t.measure(ctx, processes, repeats)
		if err != nil {
			return err
		}
		report.Rows = append(report.Rows, rows...)
	}
	printTable(out, report.Rows)
	text, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(root, "out", "bench-binding.json")
	if quick {
		path = filepath.Join(dir, "bench-binding.json")
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path, append(text, '\n'), 0o644); err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, "bench-binding:", path)
	return err
}

// measure asks the processes in turn, each repeat beginning with another one.
func (t task) measure(ctx context.Context, processes []*process, repeats int) ([]row, error) {
	samples := make([][][]float64, len(processes)) // process, number, repeat
	for r := range repeats {
		for k := range processes {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			i := (r + k) % len(processes)
			command := t.command
			if processes[i].name == "Python" && t.python != "" {
				command = t.python
			}
			numbers, err := processes[i].ask(command)
			if err != nil {
				return nil, err
			}
			if len(numbers) != len(t.rows) {
				return nil, fmt.Errorf("%s answered %d numbers to %s, not %d", processes[i].name, len(numbers), command, len(t.rows))
			}
			if t.sum != "" {
				total := 0.0
				for _, n := range numbers[t.sumFrom:t.sumTo] {
					total += n
				}
				numbers = append(numbers, total)
			}
			if samples[i] == nil {
				samples[i] = make([][]float64, len(numbers))
			}
			for k, n := range numbers {
				samples[i][k] = append(samples[i][k], n)
			}
		}
	}
	var rows []row
	for k, name := range append(slices.Clone(t.rows), t.sum) {
		if name == "" {
			continue
		}
		c, g, p := slices.Min(samples[0][k]), slices.Min(samples[1][k]), slices.Min(samples[2][k])
		r := row{Name: name, Unit: "ns", C: c, Go: g, Python: p, GoOverC: g / c, PythonOverGo: p / g, Repeats: repeats, Spread: (slices.Max(samples[1][k]) - g) / g}
		r.judge()
		rows = append(rows, r)
	}
	return rows, nil
}

func printTable(out io.Writer, rows []row) {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "name\tunit\tC\tGo\tPython\tGo/C\tPython/Go\tspread\ttarget")
	for _, r := range rows {
		target := r.Target
		if r.Met != nil {
			target += map[bool]string{true: ": met", false: ": MISSED"}[*r.Met]
		}
		fmt.Fprintf(t, "%s\t%s\t%.0f\t%.0f\t%.0f\t%.2f\t%.1f\t%.0f %%\t%s\n", r.Name, r.Unit, r.C, r.Go, r.Python, r.GoOverC, r.PythonOverGo, 100*r.Spread, target)
	}
	t.Flush()
}
