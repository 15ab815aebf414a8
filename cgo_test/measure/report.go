package measure

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// Row is one result. Zero Peer and Ratio: there is nothing to compare with.
type Row struct {
	Name    string             `json:"name"`
	Unit    string             `json:"unit"` // of Ours and Peer
	Ours    float64            `json:"ours"`
	Peer    float64            `json:"peer,omitempty"`
	Ratio   float64            `json:"ratio,omitempty"` // Ours ÷ Peer
	Repeats int                `json:"repeats"`
	Spread  float64            `json:"spread"`           // of Ours: (max-min)/min over the repeats
	Target  string             `json:"target,omitempty"` // what is to be reached; empty: nothing is
	Met     *bool              `json:"met,omitempty"`    // whether it was; set with Target
	Extra   map[string]float64 `json:"extra,omitempty"`
}

// Aim gives the row a target, which is reported and not enforced.
func (r *Row) Aim(target string, met bool) { r.Target, r.Met = target, &met }

// outcome is the target with what became of it.
func (r *Row) outcome() string {
	switch {
	case r.Met == nil:
		return "-"
	case *r.Met:
		return r.Target + ": met"
	}
	return r.Target + ": MISSED"
}

// Report is the outcome of one make target.
type Report struct {
	Target  string    `json:"target"`
	Machine Machine   `json:"machine"`
	Time    time.Time `json:"time"` // when the measurement began, UTC
	Rows    []Row     `json:"rows"`
}

// Machine says where the figures come from.
type Machine struct {
	Go     string `json:"go"`
	OS     string `json:"os"`
	Arch   string `json:"arch"`
	CPUs   int    `json:"cpus"` // usable by this process
	Kernel string `json:"kernel"`
}

// NewReport begins the report of a make target on this machine.
func NewReport(target string) *Report {
	kernel, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		kernel = []byte("unknown")
	}
	return &Report{Target: target, Time: time.Now().UTC().Truncate(time.Second), Machine: Machine{Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH,
		CPUs: runtime.NumCPU(), Kernel: strings.TrimSpace(string(kernel))}}
}

// Add appends a row. A Ratio of 0 becomes Ours ÷ Peer.
func (r *Report) Add(row Row) {
	if row.Ratio == 0 && row.Peer != 0 {
		row.Ratio = row.Ours / row.Peer
	}
	r.Rows = append(r.Rows, row)
}

// Print writes the rows as an aligned table.
func (r *Report) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "name\tunit\tours\tpeer\tratio\trepeats\tspread\ttarget")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t%.0f %%\t%s\n", row.Name, row.Unit, number(row.Ours), number(row.Peer), number(row.Ratio), row.Repeats,
			100*row.Spread, row.outcome())
	}
	return t.Flush()
}

// Finish prints the table and, below it, the extra values of each row, and writes the file.
func (r *Report) Finish(w io.Writer) error {
	if err := r.Print(w); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for _, row := range r.Rows {
		if len(row.Extra) == 0 {
			continue
		}
		fmt.Fprintf(w, "%s:", row.Name)
		for _, k := range slices.Sorted(maps.Keys(row.Extra)) {
			fmt.Fprintf(w, " %s %.3g", k, row.Extra[k])
		}
		fmt.Fprintln(w)
	}
	path, err := r.Write()
	if err == nil {
		fmt.Fprintln(w, "written to", path)
	}
	return err
}

// number shows three digits, and a dash for what is not there.
func number(v float64) string {
	switch {
	case v == 0:
		return "-"
	case v >= 100 || v <= -100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

// Write writes out/<target>.json at the root of the module that the working directory is in, and returns its path.
func (r *Report) Write() (string, error) {
	if r.Target == "" || r.Target != filepath.Base(r.Target) || r.Target[0] == '.' {
		return "", fmt.Errorf("measure: the target %q is no file name", r.Target)
	}
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return "", fmt.Errorf("measure: report of %s: %w", r.Target, err)
	}
	root, err := Root()
	if err != nil {
		return "", err
	}
	path := filepath.Join(root, "out", r.Target+".json")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", fmt.Errorf("measure: %w", err)
	}
	if err := os.WriteFile(path, append(b, '\n'), 0o644); err != nil {
		return "", fmt.Errorf("measure: %w", err)
	}
	return path, nil
}

// Root is the folder of the go.mod above the working directory.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("measure: %w", err)
	}
	for at := dir; ; at = filepath.Dir(at) {
		switch _, err := os.Stat(filepath.Join(at, "go.mod")); {
		case err == nil:
			return at, nil
		case !errors.Is(err, fs.ErrNotExist):
			return "", fmt.Errorf("measure: %w", err)
		case at == filepath.Dir(at):
			return "", fmt.Errorf("measure: no go.mod in or above %s", dir)
		}
	}
}
