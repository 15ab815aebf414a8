// Matrix runs the tests of package nixl, on loopback, with every release of the
// NIXL library side by side.
//
//	go run ./cgo_test/matrix [-only 1.4.1] [-run regexp]
//
// It installs the wheels into .nixl-matrix, prints a line for each release and
// writes out/matrix.json. It fails if a test fails or is skipped for another
// reason than that there is no GPU, or if a release runs fewer tests than another.
package main

import (
	"bytes"
	"context"
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
	"time"

	"github.com/nixlgo/nixlgo/cgo_test/measure"
	"github.com/nixlgo/nixlgo/nixl"
)

// patience bounds the tests of one release.
const patience = 10 * time.Minute

type release struct {
	version string
	sha256  map[string]string // of the wheel, by GOARCH
}

func main() {
	only := flag.String("only", "", "the one release to test")
	pattern := flag.String("run", "", "only tests whose names match, as with go test; writes no report")
	describe := flag.Bool("describe", false, "print what the library of "+nixl.LibraryVariable+" lacks (for the program's own use)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	if *describe {
		err = printMissing(os.Stdout)
	} else {
		err = run(ctx, os.Stdout, *only, *pattern)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "matrix:", err)
		os.Exit(1)
	}
}

// printMissing is the child that loads one library.
func printMissing(out io.Writer) error {
	l, err := nixl.Load("")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, l.Path, strings.Join(l.Missing(), " "))
	return err
}

func run(ctx context.Context, out io.Writer, only, pattern string) error {
	root, err := measure.Root()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "matrix")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	binary := filepath.Join(dir, "nixl.test")
	build := exec.CommandContext(ctx, "go", "test", "-c", "-o", binary, "./nixl")
	build.Dir = root
	if text, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build the tests: %w\n%s", err, text)
	}
	report := measure.NewReport("matrix")
	var wrong []error
	most := 0
	for _, r := range releases {
		if only != "" && r.version != only {
			continue
		}
		libs, err := r.install(ctx, root)
		if err != nil {
			return err
		}
		missing, err := r.missing(ctx, libs)
		if err != nil {
			return err
		}
		start := time.Now()
		res, err := r.test(ctx, binary, filepath.Join(root, "nixl"), libs, pattern)
		verdict := "ok"
		if err != nil {
			verdict = "FAIL"
			wrong = append(wrong, fmt.Errorf("NIXL %s: %w", r.version, err))
		}
		most = max(most, res.passed)
		fmt.Fprintf(out, "NIXL %-7s %-4s  %3d tests passed, %d failed, %d skipped, %d functions missing, %.1f s\n",
			r.version, verdict, res.passed, res.failed, res.skipped, len(missing), time.Since(start).Seconds())
		report.Add(measure.Row{Name: r.version, Unit: "tests", Ours: float64(res.passed), Repeats: 1, Extra: map[string]float64{
			"failed": float64(res.failed), "skipped": float64(res.skipped), "missing_functions": float64(len(missing))}})
	}
	if len(report.Rows) == 0 {
		return fmt.Errorf("there is no release %q", only)
	}
	for _, row := range report.Rows {
		if int(row.Ours+row.Extra["failed"]) < most {
			wrong = append(wrong, fmt.Errorf("NIXL %s: only %.0f of %d tests ran", row.Name, row.Ours+row.Extra["failed"], most))
		}
	}
	if only == "" && pattern == "" {
		path, err := report.Write()
		if err != nil {
			return err
		}
		fmt.Fprintln(out, "matrix:", path)
	}
	if len(wrong) == 0 {
		fmt.Fprintf(out, "matrix: %d releases, all tests pass with each\n", len(report.Rows))
	}
	return errors.Join(wrong...)
}

// install unpacks the wheel unless it is there, and returns the directory of the
// library.
func (r release) install(ctx context.Context, root string) (string, error) {
	target := filepath.Join(root, ".nixl-matrix", r.version)
	if _, err := os.Stat(target); err != nil {
		machine := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH]
		if machine == "" || runtime.GOOS != "linux" {
			return "", fmt.Errorf("there is no wheel of NIXL for %s/%s", runtime.GOOS, runtime.GOARCH)
		}
		unfinished := target + ".tmp"
		if err := os.RemoveAll(unfinished); err != nil {
			return "", err
		}
		if err := os.MkdirAll(unfinished, 0o755); err != nil {
			return "", err
		}
		pinned := filepath.Join(unfinished, "requirements.txt")
		line := fmt.Sprintf("nixl-cu12==%s --hash=sha256:%s\n", r.version, r.sha256[runtime.GOARCH])
		if err := os.WriteFile(pinned, []byte(line), 0o644); err != nil {
			return "", err
		}
		fmt.Fprintf(os.Stderr, "matrix: installing NIXL %s into %s\n", r.version, target)
		pip := exec.CommandContext(ctx, "python3", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-warn-conflicts",
			"--root-user-action=ignore", "--no-deps", "--require-hashes", "--only-binary=:all:", "--implementation", "cp", "--python-version", "3.12",
			"--abi", "cp312", "--platform", "manylinux_2_28_"+machine, "--target", filepath.Join(unfinished, "wheel"), "-r", pinned)
		if text, err := pip.CombinedOutput(); err != nil {
			return "", fmt.Errorf("install NIXL %s: %w\n%s", r.version, err, text)
		}
		if err := os.Rename(filepath.Join(unfinished, "wheel"), target); err != nil {
			return "", err
		}
		if err := os.RemoveAll(unfinished); err != nil {
			return "", err
		}
	}
	libs, err := filepath.Glob(filepath.Join(target, ".nixl_cu*.mesonpy.libs"))
	if err != nil || len(libs) != 1 {
		return "", fmt.Errorf("%s holds %d libraries; remove it and run again", target, len(libs))
	}
	return libs[0], nil
}

// environment has one library of the machine, that of the release.
func environment(libs string) []string {
	var env []string
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); name != nixl.LibraryVariable && name != "NIXL_PLUGIN_DIR" && name != "LD_LIBRARY_PATH" {
			env = append(env, v)
		}
	}
	return append(env, nixl.LibraryVariable+"="+libs)
}

// missing asks a process of its own what the library lacks of the C API.
func (r release) missing(ctx context.Context, libs string) ([]string, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := exec.CommandContext(ctx, self, "-describe")
	c.Env = environment(libs)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	text, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("load NIXL %s: %w\n%s", r.version, err, &stderr)
	}
	fields := strings.Fields(string(text))
	if len(fields) == 0 || filepath.Dir(fields[0]) != libs {
		return nil, fmt.Errorf("NIXL %s: loaded %q instead of the library in %s", r.version, text, libs)
	}
	return slices.DeleteFunc(fields[1:], func(f string) bool { return f == "nixl_capi_mem_free" }), nil // planned, in no release
}

// keepLog writes what a release that failed printed to out, and says where.
func (r release) keepLog(stdout, stderr string) string {
	root, err := measure.Root()
	if err != nil {
		return ""
	}
	path := filepath.Join(root, "out", "matrix-"+r.version+".log")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return ""
	}
	if err := os.WriteFile(path, []byte(stdout+"\n=== standard error\n"+stderr), 0o644); err != nil {
		return ""
	}
	return "; its output is in " + path
}

type result struct{ passed, failed, skipped int }

var outcome = regexp.MustCompile(`(?m)^--- (PASS|FAIL|SKIP): (\w+)`)

// test runs the test binary in the package's directory.
func (r release) test(ctx context.Context, binary, dir, libs, pattern string) (result, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c := exec.CommandContext(ctx, binary, "-test.v", "-test.short", "-test.count=1", "-test.run="+pattern)
	c.Dir, c.Env = dir, environment(libs)
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	err := c.Run()
	text := stdout.String()
	var res result
	var wrong []string
	for _, m := range outcome.FindAllStringSubmatchIndex(text, -1) {
		kind, name := text[m[2]:m[3]], text[m[4]:m[5]]
		switch kind {
		case "PASS":
			res.passed++
		case "FAIL":
			res.failed++
			wrong = append(wrong, name)
		case "SKIP":
			res.skipped++
			if own := text[strings.LastIndex(text[:m[0]], "=== RUN"):m[0]]; !strings.Contains(own, "no GPU") {
				wrong = append(wrong, name+" was skipped: "+strings.TrimSpace(own))
			}
		}
	}
	switch {
	case err != nil:
		_, last, _ := strings.Cut(text[max(0, strings.LastIndex(text, "=== RUN")):], "=== RUN")
		last, _, _ = strings.Cut(strings.TrimSpace(last), "\n")
		return res, fmt.Errorf("%w: %s; the last test was %s%s", err, strings.Join(wrong, ", "), last, r.keepLog(text, stderr.String()))
	case len(wrong) > 0:
		return res, errors.New(strings.Join(wrong, ", "))
	case res.passed == 0:
		return res, errors.New("no test ran")
	}
	return res, nil
}
