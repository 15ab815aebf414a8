package main

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
)

var (
	seriesName  = regexp.MustCompile(`\bnixlgo_[a-z0-9_]+(\{[^{}]*\})?`)
	matcher     = regexp.MustCompile(`([a-z_]+)(?:(=~|!=|!~|=)\\?"([^"\\]*)\\?")?`)
	testName    = regexp.MustCompile(`(?:([\w/]+)\.)?\b((?:Test|Fuzz|Benchmark)[A-Z]\w*)`)
	variable    = regexp.MustCompile(`\b(?:NIXLGO|NIXL|UCX|VLLM|PCIDEVICE|OTEL|POD)_[A-Z0-9_]*[A-Z0-9]\b`)
	key         = regexp.MustCompile(`\b(?:(?:kv|remote|do_remote|decoder_kv|bidirectional)_[a-z_]+|engine_ttl)\b`)
	identifier  = regexp.MustCompile(`^([a-z]+)\.([A-Z]\w*(?:\.\w+)?)(?:\(.*\))?$`)
	member      = regexp.MustCompile(`^([A-Z]\w*\.[A-Z]\w*)(?:\(.*\))?$`)
	placeholder = regexp.MustCompile(`\b[A-Z]{2,}\b`)
	pathName    = regexp.MustCompile(`^[\w.-]+(/[\w.*-]+)+/?$`)
	runbookName = regexp.MustCompile(`runbook: (\S+\.md)#(\S+)`)
	alertName   = regexp.MustCompile(`alert: (\w+)`)
)

// outputs are folders that the targets make, and what is in them is not in the tree.
var outputs = []string{"out", "bin", ".nixl", ".vllm", ".deploy-tools"}

func (t *tree) checkDocument(d document) (problems []problem) {
	report := func(n int, format string, a ...any) {
		problems = append(problems, problem{d.name, n, fmt.Sprintf(format, a...)})
	}
	for _, l := range d.prose {
		t.checkLine(d, l, report)
		for _, m := range link.FindAllStringSubmatch(l.text, -1) {
			t.checkLink(d, l.n, m[1], report)
		}
		for _, s := range spans(l.text) {
			t.checkSpan(l.n, s, report)
		}
	}
	for _, b := range d.blocks {
		for i, s := range b.lines {
			t.checkLine(d, line{b.line + i, s}, report)
		}
		switch {
		case b.is("go"):
			if !t.isExample(b) {
				report(b.line, "this code is in no file example*_test.go of the tree, word for word")
			}
		case b.is("sh"):
			for i, s := range b.lines {
				t.checkCommand(b.line+i, s, report)
			}
		case b.is("console"):
			for _, c := range commandsOf(b) {
				t.checkCommand(c.line, strings.ReplaceAll(c.text, "\\\n", " "), report)
			}
		}
	}
	for _, table := range d.tables {
		t.checkTable(table, report)
	}
	return problems
}

// checkLine checks what is told apart by its own look, in prose and in code.
func (t *tree) checkLine(d document, l line, report func(int, string, ...any)) {
	for _, s := range seriesName.FindAllString(l.text, -1) {
		if problem := t.wrongSeries(s); problem != "" {
			report(l.n, "%s", problem)
		}
	}
	for _, m := range testName.FindAllStringSubmatch(l.text, -1) {
		dirs := t.tests[m[2]]
		if len(dirs) == 0 || m[1] != "" && !slices.Contains(dirs, t.dirOf(m[1])) {
			report(l.n, "there is no test %s", m[0])
		}
	}
	for _, v := range variable.FindAllString(l.text, -1) {
		if !t.words[v] {
			report(l.n, "nothing here knows the variable %s", v)
		}
	}
	for _, k := range key.FindAllString(l.text, -1) {
		if !t.words[k] {
			report(l.n, "nothing here knows the key %s", k)
		}
	}
}

// dirOf is the directory of a package as tests are named after it: nixlgo for the root.
func (t *tree) dirOf(p string) string {
	if p == "nixlgo" {
		return "."
	}
	return p
}

// wrongSeries says what is wrong with a series and the labels that are named with it, "" when nothing is.
func (t *tree) wrongSeries(s string) string {
	name, selector, _ := strings.Cut(s, "{")
	has, ok := t.series[name]
	if !ok {
		return fmt.Sprintf("there is no series %s", name)
	}
	for _, m := range matcher.FindAllStringSubmatch(strings.TrimSuffix(selector, "}"), -1) {
		label, op, value := m[1], m[2], m[3]
		if label == "job" || label == "instance" { // Prometheus adds them
			continue
		}
		values, ok := has[label]
		if !ok {
			return fmt.Sprintf("series %s has no label %s", name, label)
		}
		for v := range strings.SplitSeq(value, "|") {
			if op != "" && !values[v] && name != "nixlgo_build_info" {
				return fmt.Sprintf("label %s of series %s is never %q", label, name, v)
			}
		}
	}
	return ""
}

func (t *tree) checkLink(d document, n int, to string, report func(int, string, ...any)) {
	if strings.Contains(to, "://") || strings.HasPrefix(to, "mailto:") {
		return
	}
	file, anchor, _ := strings.Cut(to, "#")
	target := d.name
	if file != "" {
		target = path.Join(path.Dir(d.name), file)
		if !t.exists(target) {
			report(n, "the link %s leads nowhere", to)
			return
		}
	}
	if anchor == "" {
		return
	}
	i := slices.IndexFunc(t.documents, func(d document) bool { return d.name == target })
	if target == d.name && !d.anchor[anchor] || target != d.name && (i < 0 || !t.documents[i].anchor[anchor]) {
		report(n, "%s has no heading for #%s", target, anchor)
	}
}

// checkSpan checks a piece of code in prose: a command, a flag, a file, or an identifier of Go.
func (t *tree) checkSpan(n int, s string, report func(int, string, ...any)) {
	words := strings.Fields(s)
	if len(words) == 0 {
		return
	}
	switch {
	case testName.MatchString(s): // checkLine does it
	case words[0] == "make" || words[0] == "nixlgo" || words[0] == "bin/nixlgo" || words[0] == "go" && len(words) > 2:
		t.checkCommand(n, s, report)
	case strings.HasPrefix(s, "--"):
		name, _, _ := strings.Cut(strings.TrimPrefix(words[0], "--"), "=")
		for _, flags := range t.commands {
			if flags[name] {
				return
			}
		}
		report(n, "no command has a flag --%s", name)
	case identifier.MatchString(s):
		m := identifier.FindStringSubmatch(s)
		for _, p := range t.packages {
			if p.name == m[1] && p.names[m[2]] {
				return
			}
		}
		if slices.ContainsFunc(t.packagesSorted(), func(p *pkg) bool { return p.name == m[1] }) {
			report(n, "there is no %s", s)
		}
	case member.MatchString(s):
		m := member.FindStringSubmatch(s)
		if !slices.ContainsFunc(t.packagesSorted(), func(p *pkg) bool { return p.names[m[1]] }) {
			report(n, "no package has %s", s)
		}
	case pathName.MatchString(s):
		first, _, _ := strings.Cut(s, "/")
		if !slices.Contains(outputs, first) && t.exists(first) && !strings.Contains(s, "*") && !placeholder.MatchString(s) && !t.exists(s) {
			report(n, "there is no file %s", s)
		}
	}
}

func (t *tree) packagesSorted() (out []*pkg) {
	for _, p := range t.packages {
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b *pkg) int { return strings.Compare(a.dir, b.dir) })
	return out
}

var (
	separator  = regexp.MustCompile(`\s*(?:\|\||&&|[|;&])\s*`)
	assignment = regexp.MustCompile(`^[A-Z_]+=`)
)

// checkCommand checks the parts of a shell command that belong to this repository.
func (t *tree) checkCommand(n int, command string, report func(int, string, ...any)) {
	command, _, _ = strings.Cut(command, " #")
	for _, part := range separator.Split(strings.TrimSpace(command), -1) {
		words := strings.Fields(part)
		for len(words) > 0 && assignment.MatchString(words[0]) {
			words = words[1:]
		}
		if len(words) == 0 {
			continue
		}
		switch words[0] {
		case "make":
			for _, w := range words[1:] {
				if _, ok := t.targets[w]; !ok && !strings.Contains(w, "=") && !strings.HasPrefix(w, "-") {
					report(n, "make has no target %s", w)
				}
			}
		case "nixlgo", "bin/nixlgo":
			t.checkNixlgo(n, words[1:], report)
		case "go":
			for _, w := range words {
				if p, ok := strings.CutPrefix(w, "./"); ok && !t.exists(strings.TrimSuffix(p, "/...")) && p != "..." {
					report(n, "there is no directory %s", w)
				}
			}
		}
	}
}

func (t *tree) checkNixlgo(n int, words []string, report func(int, string, ...any)) {
	name := ""
	if len(words) > 0 && !strings.HasPrefix(words[0], "-") {
		name = words[0]
	}
	if placeholder.MatchString(name) {
		return
	}
	flags, ok := t.commands[name]
	if !ok {
		report(n, "there is no command nixlgo %s", name)
		return
	}
	for _, w := range words {
		if f, ok := strings.CutPrefix(w, "--"); ok && f != "" {
			f, _, _ = strings.Cut(f, "=")
			if f = strings.Trim(f, ",.)"); !flags[f] {
				report(n, "nixlgo %s has no flag --%s", name, f)
			}
		}
	}
}

// isExample reports whether the lines of b follow each other in the file of an example, however far they are indented.
func (t *tree) isExample(b block) bool {
	code := dedent(b.lines)
	return slices.ContainsFunc(t.examples, func(file string) bool {
		return strings.Contains("\n"+dedent(strings.Split(file, "\n")), "\n"+code)
	})
}

// checkDeployFile checks dashboards, alerts and manifests: series, variables, and where alerts send their reader.
func (t *tree) checkDeployFile(d document) (problems []problem) {
	report := func(n int, format string, a ...any) {
		problems = append(problems, problem{d.name, n, fmt.Sprintf(format, a...)})
	}
	for _, l := range d.prose {
		t.checkLine(d, l, report)
		if m := runbookName.FindStringSubmatch(l.text); m != nil {
			t.checkLink(d, l.n, m[1]+"#"+m[2], report)
		}
		if m := alertName.FindStringSubmatch(l.text); m != nil && !t.mentioned(path.Join(path.Dir(d.name), "OPERATIONS.md"), m[1]) {
			report(l.n, "OPERATIONS.md does not name the alert %s", m[1])
		}
		if args, ok := strings.CutPrefix(strings.TrimSpace(l.text), "args: ["); ok {
			words := strings.Fields(strings.NewReplacer(",", " ", "]", " ").Replace(args))
			t.checkNixlgo(l.n, words, report)
		}
	}
	return problems
}

func (t *tree) mentioned(doc, name string) bool {
	return slices.ContainsFunc(t.documents, func(d document) bool {
		return d.name == doc && slices.ContainsFunc(d.prose, func(l line) bool { return strings.Contains(l.text, name) })
	})
}
