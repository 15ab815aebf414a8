// Compare measures package nixl beside C and NIXL's own Python API, all on the
// library of one wheel, over shared memory, in processes of their own that take
// turns.
//
//	go run ./cgo_test/compare [-repeats 100] [-passes 5] [-only REGEXP] [-quick]
//
// It prints a table and writes out/bench-binding.json. It needs a C compiler and
// the folder .nixl-python (make setup-test). Targets are reported, not enforced.
//
// # How it measures
//
// Figures of a shared machine are good for ratios only. Each is the least of all
// repeats, in several passes with new processes: which pages a process gets makes
// its copies up to twice as fast. An answer takes a few ms and the languages take
// turns, as the processor has moments in which all is a fifth faster: with few and
// long repeats one language alone gets them. Paired is the median of Go over C,
// repeat by repeat, which such a moment does not move. Spread is (max-min)/min of
// Go. The thread that measures stays on one processor. Short READs are timed
// sixteen at once, since reading a clock takes 20 to 40 ns. malloc keeps its memory
// in all processes: otherwise the first large list decides whether later ones fault
// their pages in. UCX's requests still do so once in each process (20,000 pages in
// the first READ of 100,000 descriptors, a tenth of its time), so what has a target
// is repeated at least six times.
//
// Prepare is two lists of descriptors that exist before. "Describe and prepare"
// begins with block numbers, which is where an engine begins: Python makes tuples
// of them, Go a []Desc, C calls the library for each. "Make to complete" is
// Agent.Start in Go.
//
// # What bounds it
//
// Profiles by perf on two virtual cores of an AMD EPYC, NIXL 1.5.1:
//
//   - An empty call of C from Go takes 26 ns. The drain of nothing is that, 20 ns
//     in the library, and 7 ns for the lock and the rest: 53 ns.
//   - A READ over shared memory is a system call that copies (process_vm_readv),
//     1.7 of 2 µs. Afterwards nothing of the caller is in the processor's caches
//     and predictors. A loop in C inside the Go process takes as long as in the C
//     process; from Go, Start takes 0.3 µs more. Two thirds of that are the way
//     through cgo (cgocall, asmcgocall, exitsyscall), the rest the new Transfer
//     and the lock.
//   - The C API adds one descriptor per call, 7.6 ns each (nixlDescList::addDesc
//     and the call), and prepares at 2.5 ns. Python hands its whole list over in
//     one call, at 4 ns with numpy and 45 ns with tuples. The latter is 4 times
//     what plain C takes, so being 10 times faster takes counting the tuples, too.
//     Package nixl has the list reserve its room, which C does not by itself: if
//     malloc gives memory back in between, growing to 100,000 descriptors costs C
//     another 12 ns each.
//   - Make and long READs take as long as in C, with Go's check of the indices:
//     paired 1.01 to 1.04. Which of the two has the least of a few dozen repeats is
//     luck, and worth up to 12 %; in a single pass the pages are, too, and worth 20 %
//     (Go and Python alike).
//   - Of a drain of 10,000 messages of 64 bytes in 1.8 ms, the library takes 1.0 to
//     1.4 to hand its list over, 0.2 to name each message and 0.25 to free them;
//     Go's copy takes 0.2. Python's module asks the C++ library and names no message.
//   - Drained messages get new memory in Go and Python, where the program in C
//     frees each copy at once: to fault 64 KiB in takes 20 µs.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nixlgo/nixlgo/cgo_test/measure"
)

// Of repeats of one task in one pass. A task with a target is measured longer, and at least some times: the first
// READ of 100,000 descriptors has UCX fault its memory in.
const (
	enough           = 250 * time.Millisecond
	enoughToJudge    = time.Second
	leastWithATarget = 6
)

func main() {
	repeats := flag.Int("repeats", 100, "how often each language measures each row in one pass, in turn; fewer where that takes long")
	passes := flag.Int("passes", 5, "how often the processes are started")
	only := flag.String("only", "", "measure the tasks with a row that this regular expression matches, and write no file")
	quick := flag.Bool("quick", false, "a few small rows, to see that it works")
	library := flag.String("worker", "", "be the Go process on this library (for the program's own use)")
	cpu := flag.Int("cpu", 0, "the processor for the thread of -worker that measures")
	flag.Parse()
	if *library != "" {
		err := work(*library, *cpu, os.Stdin, os.Stdout)
		if err != nil {
			fmt.Fprintln(os.Stderr, "compare: Go:", err)
		}
		syscall.Exit(map[bool]int{true: 0, false: 1}[err == nil])
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, *repeats, *passes, *only, *quick); err != nil {
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
	Paired       float64 `json:"go_over_c_paired"` // the median of Go over C, repeat by repeat
	Faults       []int   `json:"faults"`           // of C, Go and Python: the most pages that the kernel mapped during one repeat
	Target       string  `json:"target,omitempty"`
	Met          *bool   `json:"met,omitempty"`
	Bound        string  `json:"bound,omitempty"` // what keeps a target from being met
}

// task is one command, and the rows that its answer's numbers give.
type task struct {
	command string
	python  string        // the command for Python where it has more words; "" is the same
	rows    []string      // name of each number, "" to leave it out
	samples [][][]float64 // process, repeat, number
	faults  [][]int       // process, repeat: pages that the kernel mapped in meanwhile
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
			// A few ms an answer, by what the commands cost at least: the machine's fast moments are short, and each language
			// needs some of each.
			list := fmt.Sprintf(" %d %d %d", n, size, max(1, min(300, 50_000/n)))
			read := fmt.Sprintf(" %d %d %d", n, size, max(1, min(100, 8<<20/(n*size))))
			name := func(phase string) string { return fmt.Sprintf("%s, %d × %d KiB", phase, n, size>>10) }
			ts = append(ts,
				task{command: "lists" + list, rows: []string{name("prepare"), name("make")}},
				task{command: "cycle" + read, rows: []string{name("post"), name("complete"), name("release")}},
				task{command: "start" + read, rows: []string{name("make to complete")}})
			if size == sizes[0] {
				ts = append(ts, task{command: "build" + list, python: "build" + list + " tuples",
					rows: []string{name("describe and prepare, Python by tuples"), name("prepare, Python from tuples")}})
			}
		}
	}
	ts = append(ts, task{command: "repost 4096 500", rows: []string{"READ again, 1 × 4 KiB"}})
	for _, n := range notifications {
		ts = append(ts,
			task{command: fmt.Sprintf("notify %d %d", n, min(2000, 16<<20/n)), rows: []string{fmt.Sprintf("notification of %d bytes, of many", n)}},
			task{command: fmt.Sprintf("latency %d 400", n), rows: []string{fmt.Sprintf("notification of %d bytes, one way", n)}})
	}
	return append(ts,
		task{command: fmt.Sprintf("drain %d", drained), rows: []string{fmt.Sprintf("drain of %d notifications", drained)}},
		task{command: "empty 50", rows: []string{"drain of nothing"}},
		task{command: "nothing 50", rows: []string{"call of nothing"}})
}

// judge says what the project wants to reach, and whether it is.
func (r *row) judge() {
	phase, rest, _ := strings.Cut(r.Name, ", ")
	var n int
	if i := strings.Index(rest, " ×"); i >= 0 {
		n, _ = strconv.Atoi(rest[strings.LastIndex(rest[:i], " ")+1 : i])
	}
	met, bound := true, "noise: repeat by repeat Go takes as long as C (paired)"
	if r.Paired > 1.05 {
		bound = "the machine was busy, or the process got slow pages"
	}
	goal := func(text string, reached bool) {
		if r.Target += ", " + text; !reached {
			met = false
		}
	}
	over := func(most float64) { goal(fmt.Sprintf("go/c ≤ %v", most), r.GoOverC <= most) }
	python := func(least float64) { goal(fmt.Sprintf("python/go ≥ %v", least), r.PythonOverGo >= least) }
	switch {
	case phase == "make to complete" && n >= 1000:
		over(1.05)
	case phase == "make" && n >= 1000:
		over(1.05)
		python(1)
	case r.Name == "READ again, 1 × 4 KiB" || r.Name == "make to complete, 1 × 4 KiB":
		over(1.15)
		bound = "one call through cgo, cold behind the system call that copies"
	case phase == "describe and prepare" && n == 10_000:
		python(10)
		bound = "the C API takes one descriptor a call, 7.6 ns each"
	case phase == "prepare" && n == 10_000 && !strings.Contains(rest, "tuples"):
		over(1.3)
	case phase == "drain of nothing":
		over(3)
		python(6)
		bound = "one call through cgo, see: call of nothing"
	case phase == "drain of 10000 notifications":
		python(1)
		bound = "the library's lists, two thirds of it, and new memory for the payloads"
	}
	if r.Target != "" {
		r.Target, r.Met = strings.TrimPrefix(r.Target, ", "), &met
	}
	if !met {
		r.Bound = bound
	}
}

// language is one that takes part; args is the command of its process.
type language struct {
	name string
	args []string
}

func run(ctx context.Context, out io.Writer, repeats, passes int, only string, quick bool) error {
	if repeats < 1 || passes < 1 {
		return errors.New("no repeats")
	}
	wanted, err := regexp.Compile(only)
	if err != nil {
		return fmt.Errorf("-only: %w", err)
	}
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
	cpu, err := lastCPU()
	if err != nil {
		return err
	}
	languages := []language{
		{"C", []string{binary, libraries[0], cpu}},
		{"Go", []string{self, "-worker", libraries[0], "-cpu", cpu}},
		{"Python", []string{python, filepath.Join(here, "peer.py"), cpu}},
	}
	report := struct {
		*measure.Report
		Rows []row `json:"rows"`
	}{Report: measure.NewReport("bench-binding")}
	results := slices.DeleteFunc(tasks(quick), func(t task) bool { return !slices.ContainsFunc(t.rows, wanted.MatchString) })
	if len(results) == 0 {
		return fmt.Errorf("-only %s: no row matches", only)
	}
	if quick {
		passes = 1
	}
	for pass := range passes {
		if err := measurePass(ctx, languages, []string{"PYTHONPATH=" + packages}, results, pass, repeats); err != nil {
			return err
		}
	}
	for i := range results {
		report.Rows = append(report.Rows, results[i].report()...)
	}
	printTable(out, report.Rows)
	text, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(root, "out", "bench-binding.json")
	if quick || only != "" {
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

// lastCPU is the processor that measures: the first is the one that most
// machines handle their interrupts on.
func lastCPU() (string, error) {
	var cpus unix.CPUSet
	if err := unix.SchedGetaffinity(0, &cpus); err != nil {
		return "", fmt.Errorf("processors of this process: %w", err)
	}
	last := len(cpus)*64 - 1
	for ; last > 0 && !cpus.IsSet(last); last-- {
	}
	return strconv.Itoa(last), nil
}

// measurePass starts the processes, measures each task, and ends them. Which
// pages a process gets makes its copies up to twice as fast, hence several passes.
func measurePass(ctx context.Context, languages []language, env []string, ts []task, pass, repeats int) error {
	ctx, cancel := context.WithCancel(ctx)
	var processes []*process
	defer func() {
		cancel()
		for _, p := range processes {
			p.wait()
		}
	}()
	for _, l := range languages {
		p, err := start(ctx, l.name, env, l.args...)
		if err != nil {
			return err
		}
		processes = append(processes, p)
	}
	for i := range ts {
		begin, least, enough := time.Now(), 1, enough
		if ts[i].judged() {
			least, enough = leastWithATarget, enoughToJudge
		}
		for r := 0; r < repeats && (r < least || time.Since(begin) < enough); r++ {
			if err := ts[i].measure(ctx, processes, pass+r); err != nil {
				return err
			}
		}
	}
	return nil
}

// measure asks each process once, beginning with the given one.
func (t *task) measure(ctx context.Context, processes []*process, first int) error {
	if t.samples == nil {
		t.samples, t.faults = make([][][]float64, len(processes)), make([][]int, len(processes))
	}
	for k := range processes {
		if err := ctx.Err(); err != nil {
			return err
		}
		i := (first + k) % len(processes)
		command := t.command
		if processes[i].name == "Python" && t.python != "" {
			command = t.python
		}
		before := processes[i].faults()
		numbers, err := processes[i].ask(command)
		if err != nil {
			return err
		}
		t.faults[i] = append(t.faults[i], processes[i].faults()-before)
		if len(numbers) != len(t.rows) {
			return fmt.Errorf("%s answered %d numbers to %s, not %d", processes[i].name, len(numbers), command, len(t.rows))
		}
		t.samples[i] = append(t.samples[i], numbers)
	}
	return nil
}

// judged reports whether one of the rows has a target.
func (t *task) judged() bool {
	return slices.ContainsFunc(t.rows, func(name string) bool {
		r := row{Name: name}
		r.judge()
		return r.Target != ""
	})
}

// report gives the rows of C, Go and Python.
func (t *task) report() []row {
	var rows []row
	for k, name := range t.rows {
		if name == "" {
			continue
		}
		c, _ := extremes(t.samples[0], k)
		g, most := extremes(t.samples[1], k)
		p, _ := extremes(t.samples[2], k)
		r := row{Name: name, Unit: "ns", C: c, Go: g, Python: p, GoOverC: g / c, PythonOverGo: p / g, Repeats: len(t.samples[1]), Spread: (most - g) / g}
		r.Paired = paired(t.samples[0], t.samples[1], k)
		for _, f := range t.faults {
			r.Faults = append(r.Faults, slices.Max(f))
		}
		r.judge()
		rows = append(rows, r)
	}
	return rows
}

func extremes(samples [][]float64, k int) (least, most float64) {
	least = math.Inf(1)
	for _, numbers := range samples {
		least, most = min(least, numbers[k]), max(most, numbers[k])
	}
	return least, most
}

// paired is the median ratio of what was measured one after the other, which a lucky moment of one does not move.
func paired(c, g [][]float64, k int) float64 {
	ratios := make([]float64, len(g))
	for i := range g {
		ratios[i] = g[i][k] / c[i][k]
	}
	slices.Sort(ratios)
	return ratios[len(ratios)/2]
}

func printTable(out io.Writer, rows []row) {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "name\tunit\tC\tGo\tPython\tGo/C\tpaired\tPython/Go\trepeats\tspread\ttarget")
	for _, r := range rows {
		target := r.Target
		if r.Met != nil {
			target += map[bool]string{true: ": met", false: ": MISSED: " + r.Bound}[*r.Met]
		}
		fmt.Fprintf(t, "%s\t%s\t%.0f\t%.0f\t%.0f\t%.2f\t%.2f\t%.2f\t%d\t%.0f %%\t%s\n", r.Name, r.Unit, r.C, r.Go, r.Python, r.GoOverC, r.Paired, r.PythonOverGo, r.Repeats, 100*r.Spread, target)
	}
	t.Flush()
}
