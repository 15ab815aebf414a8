package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
)

const header = "id\tkind\tbehaviour\ttest\treason"

// A section is a group of behaviours with one source.
type section struct {
	name  string // of the ids: A1 has A1.1, A1.2, …; B has B1, B2, …; cases are plain numbers
	title string
	ids   []string
}

func (s section) kind() string {
	switch s.name {
	case "case":
		return "case"
	case "defects":
		return "defect"
	}
	return "peer"
}

// The sections and every id that the table must have, in the order in which they are printed.
var sections = []section{
	{"case", "Public bug reports", numbered("", 16, 18, 19, 20, 21, 22, 23, 24, 25, 26, 28, 29, 30, 32, 33, 34, 35, 36, 38, 39, 40, 43, 44, 46, 49)},
	{"A1", "vLLM: heartbeats", numbered("A1.", 13)},
	{"A2", "vLLM: notifications and empty steps", numbered("A2.", 9)},
	{"A3", "vLLM: connector", numbered("A3.", 46)},
	{"A4", "vLLM: bidirectional transfer", numbered("A4.", 30)},
	{"A5", "vLLM: life of a remote prefill and of a remote decode", numbered("A5.", 14)},
	{"A6", "vLLM: several cache groups", numbered("A6.", 23)},
	{"A7", "vLLM: descriptor geometry", numbered("A7.", 12)},
	{"A8", "vLLM: topology and aggregation", numbered("A8.", 13)},
	{"A9", "vLLM: failed loads", numbered("A9.", 15)},
	{"A10", "vLLM: live servers and proxies", numbered("A10.", 21)},
	{"B", "nixl-sys", numbered("B", 58)},
	{"C", "NIXL, C++ and Python", numbered("C", 19)},
	{"D", "What the peers' tests leave open", numbered("D", 7)},
	{"defects", "Defects that users, attackers and auditors measured", slices.Concat([]string{"defects.A3", "defects.A4", "defects.A7", "defects.B13"},
		numbered("defects.E", 12), []string{"defects.F1", "defects.G2", "defects.G6", "defects.G8", "defects.G17"})},
}

// numbered returns prefix+1 … prefix+n, then prefix and each of more.
func numbered(prefix string, n int, more ...int) []string {
	ids := make([]string, 0, n+len(more))
	for i := range n {
		ids = append(ids, prefix+strconv.Itoa(i+1))
	}
	for _, i := range more {
		ids = append(ids, prefix+strconv.Itoa(i))
	}
	return ids
}

// A row is one behaviour.
type row struct {
	line      int
	id        string
	kind      string // case, peer or defect
	behaviour string
	tests     []string // as written in the table: package.Test or package.Test/sub
	reason    string   // why there is no test, or what the tests do not cover
}

func (r row) section() string {
	if r.kind == "case" {
		return "case"
	}
	if group, _, ok := strings.Cut(r.id, "."); ok {
		return group
	}
	return r.id[:1]
}

// readTable reads the whole table and returns its rows in file order. The error lists every fault.
func readTable(r io.Reader) ([]row, error) {
	var faults []error
	fault := func(line int, format string, args ...any) {
		faults = append(faults, fmt.Errorf("line %d: %w", line, fmt.Errorf(format, args...)))
	}
	kinds := make(map[string]string)
	for _, s := range sections {
		for _, id := range s.ids {
			kinds[id] = s.kind()
		}
	}

	var rows []row
	seen := make(map[string]int)
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		text := lines.Text()
		if n == 1 {
			if text != header {
				fault(n, "the first line is not %q", header)
			}
			continue
		}
		fields := strings.Split(text, "\t")
		if len(fields) != 5 {
			fault(n, "%d tab-separated fields, not 5", len(fields))
			continue
		}
		for i := range fields {
			if fields[i] = strings.TrimSpace(fields[i]); fields[i] == "-" {
				fields[i] = ""
			}
		}
		w := row{line: n, id: fields[0], kind: fields[1], behaviour: fields[2], reason: fields[4]}
		for test := range strings.SplitSeq(fields[3], ",") {
			if test = strings.TrimSpace(test); test != "" {
				w.tests = append(w.tests, test)
			}
		}
		kind, ok := kinds[w.id]
		switch {
		case !ok:
			fault(n, "unknown id %q", w.id)
			continue
		case seen[w.id] != 0:
			fault(n, "%s is already on line %d", w.id, seen[w.id])
			continue
		case w.kind != kind:
			fault(n, "%s is of kind %q, not %q", w.id, kind, w.kind)
		case w.behaviour == "":
			fault(n, "%s says no behaviour", w.id)
		case len(w.tests) == 0 && w.reason == "":
			fault(n, "%s has neither a test nor a reason", w.id)
		}
		seen[w.id] = n
		rows = append(rows, w)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	var missing []string
	for _, s := range sections {
		missing = append(missing, slices.DeleteFunc(slices.Clone(s.ids), func(id string) bool { return seen[id] != 0 })...)
	}
	if len(missing) > 0 {
		faults = append(faults, fmt.Errorf("no row for %s", strings.Join(missing, ", ")))
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	return rows, nil
}
