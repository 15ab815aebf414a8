package main

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/nixlgo/nixlgo/nixl"
)

// report is the page that `demo --report` and `bench --report` leave behind: one HTML file that needs nothing beside it,
// no script and no network, for light and dark screens of any width.
type report struct {
	Title    string
	Lead     string // what was done, in a sentence or two, for somebody who has never heard of it
	Figures  []figureOf
	Facts    []fact // versions, host and settings of the run
	Sections []section
}

// figureOf is one number that the page begins with.
type figureOf struct {
	Value, Name string
	Bad         bool // it says that something went wrong
}

// fact is a row of the table at the page's end.
type fact struct{ Name, Value string }

// section is a headline with any of a text, a chart and a table below it.
type section struct {
	Title, Text string
	Charts      []chart
	Table       *reportTable
}

// chart is a drawing, made once for a narrow and once for a wide screen, and the legend that explains its colours.
type chart struct {
	Title, Alt   string // Alt says in words what a reader who does not see it would miss
	Legend       []legendEntry
	Narrow, Wide template.HTML
}

type legendEntry struct {
	Sign template.HTML
	Text string
}

// reportTable is a table of a name and numbers; Folded hides it behind its caption until a click, for a long one.
type reportTable struct {
	Caption string
	Head    []string
	Texts   []int // columns that hold words
	Rows    [][]string
	Folded  bool
}

// Class is the CSS class of a column.
func (t *reportTable) Class(column int) string {
	if column == 0 || slices.Contains(t.Texts, column) {
		return "text"
	}
	return "number"
}

//go:embed report.html
var reportPage string

var reportTemplate = template.Must(template.New("report").Funcs(template.FuncMap{"styles": chartStyles}).Parse(reportPage))

// reportMark is in every page, so that a later run may replace it.
const reportMark = `<meta name="generator" content="nixlgo`

// reportFile is where a report goes. It is opened before the run, so that a run is not lost for want of a folder.
type reportFile struct {
	path string
	temp *os.File
}

// createReport begins a report at path. A file that is there is replaced when the report is done, but only if it is a
// report too.
func createReport(path string) (*reportFile, error) {
	fail := func(err error) (*reportFile, error) { return nil, fmt.Errorf("--report %s: %w", path, err) }
	switch old, err := os.ReadFile(path); {
	case err == nil && !bytes.Contains(old, []byte(reportMark)):
		return fail(errors.New("the file exists and is not a report of nixlgo; name another one, or remove it"))
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fail(err)
	}
	temp, err := os.CreateTemp(filepath.Dir(path), ".nixlgo-report-*")
	if err != nil {
		return fail(err)
	}
	return &reportFile{path, temp}, nil
}

// write fills the file and puts it in its place.
func (f *reportFile) write(r report) error {
	fail := func(err error) error { return fmt.Errorf("--report %s: %w", f.path, err) }
	if err := reportTemplate.Execute(f.temp, r); err != nil {
		return fail(err)
	}
	if err := errors.Join(f.temp.Chmod(0o644), f.temp.Close()); err != nil {
		return fail(err)
	}
	if err := os.Rename(f.temp.Name(), f.path); err != nil {
		return fail(err)
	}
	return nil
}

// discard removes what write has not put in its place, which is nothing after a write that succeeded.
func (f *reportFile) discard() {
	f.temp.Close()
	os.Remove(f.temp.Name())
}

// runFacts are what every report says of the program and the host that it ran on.
func runFacts(started time.Time) []fact {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	kernel, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		kernel = []byte("unknown kernel")
	}
	facts := []fact{
		{"Date", started.Format("2006-01-02 15:04:05 -07:00")},
		{"nixlgo", moduleVersion()},
		{"Go", fmt.Sprintf("%s %s/%s", runtime.Version(), runtime.GOOS, runtime.GOARCH)},
		{"Host", fmt.Sprintf("%s, %s, Linux %s", host, many(runtime.NumCPU(), "core"), strings.TrimSpace(string(kernel)))},
	}
	if l := nixl.Loaded(); l != nil {
		facts = append(facts, fact{"NIXL library", l.Path})
	}
	return facts
}

// moduleVersion is the version that this binary was built from, or its commit where it has none.
func moduleVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown version"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return "commit " + s.Value
		}
	}
	return "built from a working tree"
}
