package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/metrics"
)

// tree is what documents can name.
type tree struct {
	root      string
	documents []document
	deploy    []document // other files that name series: one prose line for each of theirs

	targets  map[string]bool              // of the Makefile; true if `make` lists it
	packages map[string]*pkg              // by directory
	tests    map[string][]string          // directories of a test, example, benchmark or fuzz target
	examples []string                     // files of examples
	words    map[string]bool              // identifiers and words of all sources: variables and keys
	commands map[string]map[string]bool   // flags of each command; "" are those of nixlgo itself
	series   map[string]map[string]labels // labels of each series
}

type labels map[string]bool // values of a label

// pkg is a package that others can import.
type pkg struct {
	dir     string
	name    string
	names   map[string]bool              // exported: Ident, Type.Field, Type.Method
	errors  []string                     // variables Err…
	fields  map[string]map[string]string // comments of the exported fields of each exported struct
	configs map[string]string            // constants of strings
	keys    []string                     // package lease: configKeys
}

func readTree(root string) (*tree, error) {
	t := &tree{root: root, targets: map[string]bool{}, packages: map[string]*pkg{}, tests: map[string][]string{}, words: map[string]bool{}}
	err := filepath.WalkDir(root, func(p string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		if e.IsDir() {
			if name != "." && (strings.HasPrefix(e.Name(), ".") || e.Name() == "out" || e.Name() == "bin" || e.Name() == "target") {
				return fs.SkipDir
			}
			return nil
		}
		return t.readFile(filepath.ToSlash(name))
	})
	return t, err
}

var (
	targetLine = regexp.MustCompile(`(?m)^([a-z][a-z-]*):(?:[^=\n][^\n]*?)?(## .*)?$`)
	word       = regexp.MustCompile(`\w+`)
)

func (t *tree) readFile(name string) error {
	kind := path.Ext(name)
	if path.Base(name) == "Makefile" {
		kind = "Makefile"
	}
	inDeploy := strings.Contains(name, "/deploy/") && (kind == ".json" || kind == ".yaml")
	switch kind {
	case ".md", ".go", ".c", ".h", ".sh", ".py", "Makefile":
	default:
		if !inDeploy {
			return nil
		}
	}
	text, err := os.ReadFile(filepath.Join(t.root, name))
	if err != nil {
		return err
	}
	switch kind {
	case ".md":
		t.documents = append(t.documents, parse(name, string(text)))
		return nil
	case ".json", ".yaml":
		d := document{name: name}
		for i, s := range strings.Split(string(text), "\n") {
			d.prose = append(d.prose, line{i + 1, s})
		}
		t.deploy = append(t.deploy, d)
		return nil
	case "Makefile":
		for _, m := range targetLine.FindAllStringSubmatch(string(text), -1) {
			t.targets[m[1]] = t.targets[m[1]] || m[2] != ""
		}
	case ".go":
		if err := t.readGo(name, text); err != nil {
			return err
		}
	}
	for _, w := range word.FindAll(text, -1) {
		t.words[string(w)] = true
	}
	return nil
}

func (t *tree) readGo(name string, text []byte) error {
	f, err := parser.ParseFile(token.NewFileSet(), name, text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	dir := path.Dir(name)
	if strings.HasSuffix(name, "_test.go") {
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
				t.tests[fn.Name.Name] = append(t.tests[fn.Name.Name], dir)
			}
		}
		if strings.HasPrefix(path.Base(name), "example") {
			t.examples = append(t.examples, string(text))
		}
		return nil
	}
	if f.Name.Name == "main" || strings.Contains(dir, "internal") || strings.HasPrefix(dir, "cgo_test") || dir == "testdata" {
		return nil
	}
	p := t.packages[dir]
	if p == nil {
		p = &pkg{dir: dir, name: f.Name.Name, names: map[string]bool{}, fields: map[string]map[string]string{}, configs: map[string]string{}}
		t.packages[dir] = p
	}
	for _, d := range f.Decls {
		p.read(d)
	}
	return nil
}

func (p *pkg) read(d ast.Decl) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		name := d.Name.Name
		if d.Recv != nil {
			name = receiver(d.Recv.List[0].Type) + "." + name
		}
		p.names[name] = true
	case *ast.GenDecl:
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.ValueSpec:
				p.readValue(s)
			case *ast.TypeSpec:
				p.names[s.Name.Name] = true
				p.readType(s)
			}
		}
	}
}

func (p *pkg) readValue(s *ast.ValueSpec) {
	for i, n := range s.Names {
		p.names[n.Name] = true
		if strings.HasPrefix(n.Name, "Err") {
			p.errors = append(p.errors, n.Name)
		}
		if i >= len(s.Values) {
			continue
		}
		switch v := s.Values[i].(type) {
		case *ast.BasicLit:
			p.configs[n.Name] = strings.Trim(v.Value, "`\"")
		case *ast.CompositeLit:
			if n.Name == "configKeys" {
				for _, e := range v.Elts {
					p.keys = append(p.keys, e.(*ast.Ident).Name)
				}
			}
		}
	}
}

func (p *pkg) readType(s *ast.TypeSpec) {
	var list *ast.FieldList
	switch t := s.Type.(type) {
	case *ast.StructType:
		list = t.Fields
		if s.Name.IsExported() {
			p.fields[s.Name.Name] = map[string]string{}
		}
	case *ast.InterfaceType:
		list = t.Methods
	default:
		return
	}
	for _, f := range list.List {
		for _, n := range f.Names {
			p.names[s.Name.Name+"."+n.Name] = true
			if n.IsExported() && p.fields[s.Name.Name] != nil {
				p.fields[s.Name.Name][n.Name] = strings.Join(strings.Fields(f.Doc.Text()+" "+f.Comment.Text()), " ")
			}
		}
	}
}

func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}

var (
	commandLine = regexp.MustCompile(`(?m)^  ([a-z]+) +\S`)
	flagLine    = regexp.MustCompile(`(?m)^ +(?:-\w, |    )--([a-z-]+)`)
)

// readCommands asks the command what it has.
func readCommands(ctx context.Context, binary string) (map[string]map[string]bool, error) {
	help := func(args ...string) (string, error) {
		out, err := exec.CommandContext(ctx, binary, append(args, "--help")...).Output()
		if err != nil {
			return "", fmt.Errorf("%s %s --help: %w", binary, strings.Join(args, " "), err)
		}
		return string(out), nil
	}
	flags := func(text string) map[string]bool {
		_, text, _ = strings.Cut(text, "\nFlags:\n")
		out := map[string]bool{}
		for _, m := range flagLine.FindAllStringSubmatch(text, -1) {
			out[m[1]] = true
		}
		return out
	}
	text, err := help()
	if err != nil {
		return nil, err
	}
	commands := map[string]map[string]bool{"": flags(text)}
	_, list, _ := strings.Cut(text, "Available Commands:\n")
	list, _, _ = strings.Cut(list, "\n\n")
	for _, m := range commandLine.FindAllStringSubmatch(list, -1) {
		text, err := help(m[1])
		if err != nil {
			return nil, err
		}
		commands[m[1]] = flags(text)
	}
	if len(commands) < 5 {
		return nil, errors.New("bin/nixlgo --help lists no commands")
	}
	return commands, nil
}

// readSeries asks the collector what it shows.
func readSeries() (map[string]map[string]labels, error) {
	reg := prometheus.NewRegistry()
	_, err := metrics.Register(reg, metrics.Sources{
		Worker: func() (s rdma.WorkerStats) { return s }, Scheduler: func() (s lease.SchedulerStats) { return s },
		SideChannel: func() (s rdma.SideChannelStats) { return s }, LongestStep: func() time.Duration { return 0 },
	})
	if err == nil {
		err = metrics.RegisterBuildInfo(reg)
	}
	if err != nil {
		return nil, err
	}
	families, err := reg.Gather()
	if err != nil {
		return nil, err
	}
	series := map[string]map[string]labels{}
	for _, f := range families {
		has := map[string]labels{}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if has[l.GetName()] == nil {
					has[l.GetName()] = labels{}
				}
				has[l.GetName()][l.GetValue()] = true
			}
		}
		if f.GetType() != dto.MetricType_HISTOGRAM {
			series[f.GetName()] = has
			continue
		}
		series[f.GetName()], series[f.GetName()+"_sum"], series[f.GetName()+"_count"] = has, has, has
		bucket := map[string]labels{"le": {}}
		for name, values := range has {
			bucket[name] = values
		}
		for _, b := range f.GetMetric()[0].GetHistogram().GetBucket() {
			bucket["le"][fmt.Sprint(b.GetUpperBound())] = true
		}
		series[f.GetName()+"_bucket"] = bucket
	}
	return series, nil
}

// exists reports whether there is a file or directory of this name.
func (t *tree) exists(name string) bool {
	_, err := os.Stat(filepath.Join(t.root, filepath.FromSlash(name)))
	return err == nil
}

// dedent takes the indentation off all lines.
func dedent(lines []string) string {
	var b bytes.Buffer
	for _, s := range lines {
		b.WriteString(strings.TrimSpace(s))
		b.WriteByte('\n')
	}
	return b.String()
}
