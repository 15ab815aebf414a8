package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nixlgo/nixlgo/lease"
)

// checkTable compares a table with the code. The comment before it names a kind:
//
//	fields PACKAGE.TYPE   the first column has every exported field, the second its default: a part of the field's comment;
//	                      behind it, without PACKAGE.TYPE leaves out the fields that another struct has as well
//	keys                  every key that lease.ParseConfig takes, and its default
//	errors PACKAGE…       every Err… of the packages, in any order
//	commands              every command of nixlgo
//	targets               every target that `make` lists
//	packages              every package that can be imported
//
// More than one name in a cell counts as so many rows.
func (t *tree) checkTable(table table, report func(int, string, ...any)) {
	if len(table.rows) < 2 {
		report(table.line, "there is no table after this comment")
		return
	}
	kind, args := table.kind[0], table.kind[1:]
	rows := table.rows[1:] // without the head
	switch kind {
	case "fields":
		t.checkFields(table, args, rows, report)
	case "keys":
		defaults := keyDefaults()
		for _, p := range t.packages {
			for _, c := range p.keys {
				if _, ok := defaults[p.configs[c]]; !ok {
					report(table.line, "tables.go does not know the default of the key %s", p.configs[c])
				}
			}
		}
		compare(table.line, rows, slices.Collect(maps.Keys(defaults)), "", report)
		for _, r := range rows {
			for _, k := range spans(r.cells[0]) {
				if want, ok := defaults[k]; ok && plain(r.cells[1]) != want {
					report(r.line, "the default of %s is %q, not %q", k, want, plain(r.cells[1]))
				}
			}
		}
	case "errors":
		var want []string
		for _, dir := range args {
			p := t.packages[t.dirOf(dir)]
			if p == nil {
				report(table.line, "there is no package %s", dir)
				continue
			}
			for _, e := range p.errors {
				want = append(want, p.name+"."+e)
			}
		}
		compare(table.line, rows, want, "", report)
	case "commands":
		want := slices.Collect(maps.Keys(t.commands))
		want = slices.DeleteFunc(want, func(c string) bool { return c == "" || c == "help" })
		compare(table.line, rows, want, "nixlgo ", report)
	case "targets":
		var want []string
		for name, listed := range t.targets {
			if listed {
				want = append(want, name)
			}
		}
		compare(table.line, rows, want, "make ", report)
	case "packages":
		var want []string
		for dir := range t.packages {
			if dir == "." {
				dir = "nixlgo"
			}
			want = append(want, dir)
		}
		compare(table.line, rows, want, "", report)
	default:
		report(table.line, "docs-check knows no table of %s", kind)
	}
}

// compare reports what the first column lacks, and what it has that is not so.
func compare(at int, rows []row, want []string, prefix string, report func(int, string, ...any)) {
	have := map[string]int{}
	for _, r := range rows {
		for _, s := range spans(r.cells[0]) {
			s = strings.TrimPrefix(s, prefix)
			if !slices.Contains(want, s) {
				report(r.line, "the table has %s, which the code does not have", s)
			}
			if have[s] > 0 {
				report(r.line, "%s is in line %d already", s, have[s])
			}
			have[s] = r.line
		}
	}
	slices.Sort(want)
	for _, w := range want {
		if have[w] == 0 {
			report(at, "the table lacks %s", w)
		}
	}
}

func (t *tree) checkFields(table table, args []string, rows []row, report func(int, string, ...any)) {
	if len(args) != 1 && (len(args) != 3 || args[1] != "without") {
		report(table.line, "want the name of a struct behind fields, and maybe another one behind without")
		return
	}
	for i := 0; i < len(args); i += 2 {
		if t.structOf(args[i]) == nil {
			report(table.line, "there is no struct %s", args[i])
			return
		}
	}
	fields := maps.Clone(t.structOf(args[0]))
	if len(args) == 3 {
		for f := range t.structOf(args[2]) {
			delete(fields, f)
		}
	}
	compare(table.line, rows, slices.Collect(maps.Keys(fields)), "", report)
	for _, r := range rows {
		for _, f := range spans(r.cells[0]) {
			comment, ok := fields[f]
			if value := plain(r.cells[1]); ok && value != "" && !strings.Contains(comment, value) {
				report(r.line, "the comment of %s.%s does not say that its default is %q: %q", args[0], f, value, comment)
			}
		}
	}
}

// structOf are the fields of a struct, with their comments; nil when there is none of that name.
func (t *tree) structOf(name string) map[string]string {
	pkg, typ, _ := strings.Cut(name, ".")
	for _, p := range t.packages {
		if p.name == pkg && p.fields[typ] != nil {
			return p.fields[typ]
		}
	}
	return nil
}

// plain is a cell without its marks.
func plain(cell string) string { return strings.ReplaceAll(cell, "`", "") }

// keyDefaults are the defaults of lease.ParseConfig, as documents write them.
func keyDefaults() map[string]string {
	c := lease.DefaultConfig()
	seconds := func(d time.Duration) string {
		if d == 0 {
			return "none"
		}
		return fmt.Sprintf("%g s", d.Seconds())
	}
	return map[string]string{
		"kv_lease_duration":         seconds(c.Duration),
		"decoder_kv_blocks_ttl":     seconds(c.DecoderTTL),
		"kv_lease_verification":     fmt.Sprint(c.Verification),
		"kv_lease_slots":            "KV blocks + max_num_seqs",
		"kv_lease_max_notification": fmt.Sprintf("%d bytes", c.MaxNotification),
		"kv_lease_max_life":         seconds(c.MaxLife),
		"kv_load_failure_policy":    c.FailurePolicy.String(),
		"bidirectional_kv_xfer":     fmt.Sprint(c.Bidirectional),
		"engine_ttl":                seconds(c.EngineTTL),
		"kv_recompute_threshold":    fmt.Sprintf("%d tokens", c.RecomputeThreshold),
	}
}
