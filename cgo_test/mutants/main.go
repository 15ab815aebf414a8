// Mutants breaks the source in one place at a time, and shows that a test fails for it.
//
//	go run ./cgo_test/mutants [-run NAME] [-j 2] [-all]
//
// A mutant is a file of testdata/mutants, see parse. The source stays as it is: go test builds the broken one by -overlay.
// Status 1: a test passes although what it is for is broken, fails without that, or a mutant fits the source no more.
package main

import (
	"bufio"
	"bytes"
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
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

func main() {
	only := flag.String("run", "", "mutants whose names match this expression")
	jobs := flag.Int("j", runtime.NumCPU(), "mutants at a time")
	all := flag.Bool("all", false, "every test of the packages, not only those that are named")
	out := flag.String("out", "out/mutants.json", "where to write the rows")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	_, self, _, _ := runtime.Caller(0)
	c := campaign{root: filepath.Join(filepath.Dir(self), "..", ".."), jobs: max(*jobs, 1), all: *all, out: os.Stdout}
	rows, err := c.run(ctx, *only)
	if len(rows) > 0 {
		err = errors.Join(err, write(*out, rows))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

// mutant is one way to break the source.
type mutant struct {
	name     string
	breaks   string   // what is wrong then
	packages []string // whose tests show it
	pattern  string   // of those tests, as for go test -run
	changes  []change
}

// change puts new in place of old, which is once in the file.
type change struct{ file, old, new string }

// parse reads a mutant:
//
//	breaks: what is wrong then
//	packages: ./lease
//	run: ^TestThatShowsIt$
//	--- old lease/table.go
//	text that is in this file exactly once
//	--- new
//	text in its place, none to leave it out
//
// There may be more pairs of old and new, also of one file. Lines before the first are the head; there, those that begin with # say nothing.
func parse(name, text string) (*mutant, error) {
	m := &mutant{name: name}
	var into *string
	for line := range strings.Lines(text) {
		bare := strings.TrimSuffix(line, "\n")
		file, isOld := strings.CutPrefix(bare, "--- old ")
		switch {
		case isOld:
			m.changes = append(m.changes, change{file: strings.TrimSpace(file)})
			into = &m.changes[len(m.changes)-1].old
		case bare == "--- new":
			if into == nil || into != &m.changes[len(m.changes)-1].old {
				return nil, fmt.Errorf("mutant %s: --- new without --- old", name)
			}
			into = &m.changes[len(m.changes)-1].new
		case into != nil:
			*into += line
		case bare == "" || bare[0] == '#':
		default:
			key, value, _ := strings.Cut(bare, ":")
			value = strings.TrimSpace(value)
			switch key {
			case "breaks":
				m.breaks = value
			case "packages":
				m.packages = strings.Fields(value)
			case "run":
				m.pattern = value
			default:
				return nil, fmt.Errorf("mutant %s: %q is no line of a head", name, bare)
			}
		}
	}
	if m.breaks == "" || len(m.packages) == 0 || m.pattern == "" || len(m.changes) == 0 {
		return nil, fmt.Errorf("mutant %s: breaks, packages, run or the change is missing", name)
	}
	if _, err := regexp.Compile(m.pattern); err != nil {
		return nil, fmt.Errorf("mutant %s: %w", name, err)
	}
	for _, c := range m.changes {
		if !filepath.IsLocal(c.file) || strings.TrimSpace(c.old) == "" || c.old == c.new {
			return nil, fmt.Errorf("mutant %s: the change of %s is none", name, c.file)
		}
	}
	return m, nil
}

// apply returns the changed files by name. read returns one as it is.
func (m *mutant) apply(read func(file string) (string, error)) (map[string]string, error) {
	files := map[string]string{}
	for _, c := range m.changes {
		text, changed := files[c.file]
		if !changed {
			var err error
			if text, err = read(c.file); err != nil {
				return nil, fmt.Errorf("mutant %s: %w", m.name, err)
			}
		}
		if n := strings.Count(text, c.old); n != 1 {
			return nil, fmt.Errorf("mutant %s: its old text is %d times in %s, want once", m.name, n, c.file)
		}
		files[c.file] = strings.Replace(text, c.old, c.new, 1)
	}
	return files, nil
}

// row is what became of a mutant.
type row struct {
	Name    string  `json:"name"`
	Breaks  string  `json:"breaks"`
	File    string  `json:"file"`
	Test    string  `json:"test"`   // the first that failed, or the pattern
	Result  string  `json:"result"` // caught, survived or error
	Seconds float64 `json:"seconds"`
	err     error
}

type campaign struct {
	root string
	jobs int
	all  bool
	out  io.Writer
}

// run breaks the source in every way whose name matches.
func (c *campaign) run(ctx context.Context, only string) ([]row, error) {
	match, err := regexp.Compile(only)
	if err != nil {
		return nil, err
	}
	mutants, err := load(filepath.Join(c.root, "testdata", "mutants"), match)
	if err != nil {
		return nil, err
	}
	if len(mutants) == 0 {
		return nil, fmt.Errorf("no mutant matches %q", only)
	}
	if err := c.unbroken(ctx, mutants); err != nil {
		return nil, err
	}
	rows := make([]row, len(mutants))
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		next = make(chan int)
	)
	for range c.jobs {
		wg.Go(func() {
			for i := range next {
				r := c.try(ctx, mutants[i])
				mu.Lock()
				rows[i] = r
				fmt.Fprintf(c.out, "%-8s %-44s %s (%.1f s)\n", r.Result, r.Name, r.Test, r.Seconds)
				mu.Unlock()
			}
		})
	}
	for i := range mutants {
		next <- i
	}
	close(next)
	wg.Wait()
	return rows, verdict(c.out, rows)
}

// verdict counts the rows and says what is wrong with them.
func verdict(out io.Writer, rows []row) error {
	count := map[string]int{}
	var errs []error
	for _, r := range rows {
		count[r.Result]++
		switch r.Result {
		case survived:
			errs = append(errs, fmt.Errorf("%s survived %s: %s, and no test fails", r.Name, r.Test, r.Breaks))
		case failed:
			errs = append(errs, r.err)
		}
	}
	fmt.Fprintf(out, "%d mutants: %d caught, %d survived, %d errors\n", len(rows), count[caught], count[survived], count[failed])
	return errors.Join(errs...)
}

// load reads the mutants of a folder, by name.
func load(folder string, match *regexp.Regexp) ([]*mutant, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*.mutant"))
	if err != nil {
		return nil, err
	}
	var mutants []*mutant
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), ".mutant")
		if !match.MatchString(name) {
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		m, err := parse(name, string(text))
		if err != nil {
			return nil, err
		}
		mutants = append(mutants, m)
	}
	return mutants, nil
}

// unbroken runs the tests of all mutants on the source as it is: one that fails anyway catches nothing.
func (c *campaign) unbroken(ctx context.Context, mutants []*mutant) error {
	patterns := map[string][]string{}
	for _, m := range mutants {
		for _, p := range m.packages {
			if !slices.Contains(patterns[p], m.pattern) {
				patterns[p] = append(patterns[p], m.pattern)
			}
		}
	}
	for p, each := range patterns {
		r, err := c.test(ctx, []string{p}, strings.Join(each, "|"))
		switch {
		case err != nil:
			return err
		case r.test != "":
			return fmt.Errorf("%s of %s fails on the source as it is", r.test, p)
		}
	}
	return nil
}

const (
	caught   = "caught"
	survived = "survived"
	failed   = "error"
)

// try breaks the source and runs the tests that are to show it.
func (c *campaign) try(ctx context.Context, m *mutant) (r row) {
	r = row{Name: m.name, Breaks: m.breaks, File: m.changes[0].file, Test: m.pattern, Result: failed}
	start := time.Now()
	defer func() { r.Seconds = time.Since(start).Seconds() }()
	overlay, remove, err := c.overlay(m)
	defer remove()
	if err != nil {
		r.err = err
		return r
	}
	pattern := m.pattern
	if c.all {
		pattern = ""
	}
	t, err := c.test(ctx, m.packages, pattern, "-overlay="+overlay)
	switch {
	case err != nil:
		r.err = fmt.Errorf("mutant %s: %w", m.name, err)
	case t.ran == 0:
		r.err = fmt.Errorf("mutant %s: %s matches no test of %s", m.name, m.pattern, strings.Join(m.packages, " "))
	case t.test == "":
		r.Result = survived
	default:
		r.Result, r.Test = caught, t.test
	}
	return r
}

// overlay writes the changed files of m and the list of them that go build takes.
func (c *campaign) overlay(m *mutant) (list string, remove func(), err error) {
	files, err := m.apply(func(file string) (string, error) {
		b, err := os.ReadFile(filepath.Join(c.root, file))
		return string(b), err
	})
	if err != nil {
		return "", func() {}, err
	}
	dir, err := os.MkdirTemp("", "mutant-")
	if err != nil {
		return "", func() {}, err
	}
	remove = func() { os.RemoveAll(dir) }
	replace := map[string]string{}
	for file, text := range files {
		to := filepath.Join(dir, fmt.Sprintf("%d-%s", len(replace), filepath.Base(file)))
		if err := os.WriteFile(to, []byte(text), 0o644); err != nil {
			return "", remove, err
		}
		replace[filepath.Join(c.root, file)] = to
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", remove, err
	}
	list = filepath.Join(dir, "overlay.json")
	return list, remove, os.WriteFile(list, text, 0o644)
}

// outcome is what go test said.
type outcome struct {
	test string // the first that failed, "" if none did
	ran  int    // tests that were run
}

// test runs tests and reports the first that fails. The error says that they could not be built or run.
func (c *campaign) test(ctx context.Context, packages []string, pattern string, flags ...string) (outcome, error) {
	args := append([]string{"test", "-json", "-vet=off", "-count=1", "-p=1", "-failfast", "-timeout=4m", "-run", pattern}, flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, packages...)...)
	cmd.Dir = c.root
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	o, said := read(&stdout)
	if err != nil && o.test == "" {
		return o, fmt.Errorf("go %s: %w\n%s%s", strings.Join(cmd.Args[1:], " "), err, said, &stderr)
	}
	return o, nil
}

// read takes the events of go test -json, and what was said besides of tests that could not be built. A test that runs when its
// process ends has failed.
func read(events io.Reader) (o outcome, said string) {
	var open []string
	lines := bufio.NewScanner(events)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var e struct{ Action, Test, Output string }
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			said += lines.Text() + "\n"
			continue
		}
		name, sub, _ := strings.Cut(e.Test, "/")
		switch {
		case e.Action == "build-output":
			said += e.Output
		case e.Action == "fail" && name == "" && o.test == "" && len(open) > 0:
			o.test = open[0]
		case name == "" || sub != "":
		case e.Action == "run":
			o.ran++
			open = append(open, name)
		case e.Action == "fail" && o.test == "":
			o.test = name
			fallthrough
		case e.Action == "pass" || e.Action == "fail" || e.Action == "skip":
			open = slices.DeleteFunc(open, func(n string) bool { return n == name })
		}
	}
	return o, said
}

func write(path string, rows []row) error {
	text, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}
