package main

import (
	"cmp"
	"regexp"
	"strings"
	"unicode"
)

// document is a Markdown file.
type document struct {
	name   string // from the root
	blocks []block
	prose  []line // what is in no block
	tables []table
	anchor map[string]bool // of headings, as GitHub makes them
}

type line struct {
	n    int // from 1
	text string
}

// block is fenced code.
type block struct {
	line  int      // of the first line inside
	info  []string // words behind the fence
	lines []string
}

func (b block) is(word string) bool {
	for _, w := range b.info {
		if w == word {
			return true
		}
	}
	return false
}

// table is a table that a comment asks to be checked.
type table struct {
	line int
	kind []string // words of the comment
	rows []row
}

type row struct {
	line  int
	cells []string
}

var (
	marker  = regexp.MustCompile(`^<!-- docs-check: (.+) -->$`)
	heading = regexp.MustCompile(`^#{1,6} (.+)$`)
	rule    = regexp.MustCompile(`^\|[-:| ]+\|$`)
	span    = regexp.MustCompile("`([^`]+)`")
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
)

func parse(name, text string) document {
	d := document{name: name, anchor: map[string]bool{}}
	var fence *block
	var open *table
	for i, s := range strings.Split(text, "\n") {
		n := i + 1
		trimmed := strings.TrimSpace(s)
		if fence != nil {
			if trimmed == "```" {
				d.blocks = append(d.blocks, *fence)
				fence = nil
			} else {
				fence.lines = append(fence.lines, s)
			}
			continue
		}
		if info, ok := strings.CutPrefix(trimmed, "```"); ok {
			fence = &block{line: n + 1, info: strings.Fields(info)}
			continue
		}
		if open != nil && strings.HasPrefix(trimmed, "|") {
			if !rule.MatchString(trimmed) {
				open.rows = append(open.rows, row{n, cells(trimmed)})
			}
		} else if open != nil && trimmed != "" && len(open.rows) > 0 {
			d.tables, open = append(d.tables, *open), nil
		}
		if m := marker.FindStringSubmatch(trimmed); m != nil {
			open = &table{line: n, kind: strings.Fields(m[1])}
		}
		if m := heading.FindStringSubmatch(trimmed); m != nil {
			d.anchor[slug(m[1])] = true
		}
		d.prose = append(d.prose, line{n, s})
	}
	if open != nil {
		d.tables = append(d.tables, *open)
	}
	return d
}

// cells are those of a table's row; \| is no border.
func cells(s string) (out []string) {
	s = strings.ReplaceAll(strings.Trim(s, "|"), `\|`, "\x00")
	for c := range strings.SplitSeq(s, "|") {
		out = append(out, strings.TrimSpace(strings.ReplaceAll(c, "\x00", "|")))
	}
	return out
}

// slug is the anchor of a heading.
func slug(heading string) string {
	var b strings.Builder
	for _, r := range strings.ToLower(heading) {
		switch {
		case r == ' ':
			b.WriteRune('-')
		case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
			b.WriteRune(r)
		}
	}
	return b.String()
}

// spans are the pieces of code in a line of prose.
func spans(s string) (out []string) {
	for _, m := range span.FindAllStringSubmatch(s, -1) {
		out = append(out, m[1])
	}
	return out
}

func cmpProblem(a, b problem) int {
	return cmp.Or(cmp.Compare(a.file, b.file), cmp.Compare(a.line, b.line), cmp.Compare(a.text, b.text))
}
