// Api-coverage counts the functions of the NIXL C API that package nixl offers:
// those that an exported function of the package reaches through the shim, and
// those that nixl/doc.go lists as folded into another call, with the reason.
//
//	go run ./cgo_test/apicoverage
//
// The functions are those of the header of the crate nixl-sys (needs cargo), and
// the library must export them. It fails if one is neither reached nor folded.
package main

import (
	"debug/elf"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/nixlgo/nixlgo/cgo_test/crate"
	"github.com/nixlgo/nixlgo/nixl"
)

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "api-coverage:", err)
		os.Exit(1)
	}
}

func run(out io.Writer) error {
	path, version, err := crate.Header()
	if err != nil {
		return err
	}
	header, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	library, err := nixl.Load("")
	if err != nil {
		return err
	}
	exports, err := exported(library.Path)
	if err != nil {
		return err
	}
	_, self, _, _ := runtime.Caller(0)
	p, err := readPackage(filepath.Join(filepath.Dir(self), "..", "..", "nixl"))
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "header of nixl-sys %s, library %s\n\n", version, library.Path)
	return cover(out, crate.Functions(crate.Uncomment(string(header))), exports, p)
}

// exported lists the functions of the C API that a shared library defines.
func exported(path string) ([]string, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	var names []string
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF && strings.HasPrefix(s.Name, "nixl_capi_") {
			names = append(names, s.Name)
		}
	}
	return names, nil
}

// source is what the package says and does.
type source struct {
	reached map[string][]string // C function → exported Go names that reach it
	named   map[string][]string // of those, the ones whose comment names it
	folded  map[string]string   // C function → where its job is done and why
}

// cover compares, prints a row for each function and fails if one is not covered.
func cover(out io.Writer, functions, exports []string, p *source) error {
	var wrong []error
	complain := func(format string, args ...any) { wrong = append(wrong, fmt.Errorf(format, args...)) }
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	covered := 0
	for _, f := range slices.Sorted(slices.Values(functions)) {
		by, folded := p.reached[f], p.folded[f]
		how := "folded: " + folded
		switch {
		case len(by) > 0 && folded != "":
			complain("%s is listed as folded, but %s reaches it", f, by[0])
		case len(by) > 0:
			if named := p.named[f]; len(named) > 0 {
				by = named
			}
			slices.Sort(by)
			how = strings.Join(by[:min(len(by), 3)], ", ")
			if len(by) > 3 {
				how += ", …"
			}
		case folded == "":
			complain("%s is neither reached nor listed as folded in nixl/doc.go", f)
			how = "MISSING"
		}
		if how != "MISSING" {
			covered++
		}
		if !slices.Contains(exports, f) {
			complain("%s is in the header, but not in the library", f)
		}
		fmt.Fprintf(t, "%s\t%s\n", f, how)
	}
	for _, f := range slices.Sorted(maps.Keys(p.folded)) {
		if !slices.Contains(functions, f) {
			complain("%s is listed as folded, but not in the header", f)
		}
	}
	for _, f := range exports {
		if !slices.Contains(functions, f) && f != "nixl_capi_mem_free" {
			complain("%s is in the library, but not in the header", f)
		}
	}
	t.Flush()
	fmt.Fprintf(out, "\napi-coverage: %d/%d\n", covered, len(functions))
	return errors.Join(wrong...)
}

var foldedLine = regexp.MustCompile(`(?m)^//\t(nixl_capi_\w+) {2,}(\S+: \S.*)$`)

func readPackage(dir string) (*source, error) {
	doc, err := os.ReadFile(filepath.Join(dir, "doc.go"))
	if err != nil {
		return nil, err
	}
	p := &source{reached: map[string][]string{}, named: map[string][]string{}, folded: map[string]string{}}
	for _, m := range foldedLine.FindAllStringSubmatch(string(doc), -1) {
		p.folded[m[1]] = m[2]
	}
	uses := map[string][]string{} // top-level Go or C function → what its body names
	roots, err := goUses(dir, uses)
	if err != nil {
		return nil, err
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.c"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		cUses(string(text), uses)
	}
	for root, comment := range roots {
		for name := range reach(root, uses) {
			f, ok := strings.CutPrefix(name, "api.")
			if !ok {
				continue
			}
			f = "nixl_capi_" + f
			p.reached[f] = append(p.reached[f], root)
			if regexp.MustCompile(`\b` + f + `\b`).MatchString(comment) {
				p.named[f] = append(p.named[f], root)
			}
		}
	}
	return p, nil
}

// reach walks what a root names, directly or not. Exported names end the walk:
// they are roots themselves.
func reach(root string, uses map[string][]string) map[string]bool {
	seen, todo := map[string]bool{root: true}, []string{root}
	for len(todo) > 0 {
		at := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, next := range uses[at] {
			if !seen[next] && !ast.IsExported(strings.TrimPrefix(next, ".")) {
				seen[next] = true
				todo = append(todo, next)
			}
		}
	}
	return seen
}

// goUses reads the Go files and returns the exported functions with their
// comments. Exported methods are known as "Type.Name", others as ".name", which is
// what callers write.
func goUses(dir string, uses map[string][]string) (roots map[string]string, err error) {
	roots = map[string]string{}
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") || filepath.Base(file) == "nocgo.go" {
			continue
		}
		tree, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, d := range tree.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Body == nil {
				continue
			}
			name := f.Name.Name
			switch {
			case f.Name.IsExported():
				name = receiver(f) + name
				roots[name] = f.Doc.Text()
			case f.Recv != nil:
				name = "." + name
			}
			ast.Inspect(f.Body, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.SelectorExpr:
					if x, ok := n.X.(*ast.Ident); ok && x.Name == "C" {
						uses[name] = append(uses[name], n.Sel.Name)
					} else {
						uses[name] = append(uses[name], "."+n.Sel.Name)
					}
				case *ast.Ident:
					uses[name] = append(uses[name], n.Name)
				}
				return true
			})
		}
	}
	return roots, nil
}

func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	t := f.Recv.List[0].Type
	if star, ok := t.(*ast.StarExpr); ok {
		t = star.X
	}
	if id, ok := t.(*ast.Ident); ok {
		return id.Name + "."
	}
	return ""
}

var (
	cFunction = regexp.MustCompile(`(?m)^[\w ]+?[ *](\w+)\([^;{]*\)\s*\{\n((?:[^}\n].*\n|\n)*)\}`)
	cNeed     = regexp.MustCompile(`NEED\(\w+\)`)
	cName     = regexp.MustCompile(`\b(?:(?:api|found)\.(\w+)|(\w+)\()`)
)

// cUses reads the functions of the shim: which of the table they call or hand on
// ("api.name"), and which of ours. A check that a function is there is no call.
func cUses(text string, uses map[string][]string) {
	text = cNeed.ReplaceAllString(crate.Uncomment(text), "")
	for _, f := range cFunction.FindAllStringSubmatch(text, -1) {
		for _, m := range cName.FindAllStringSubmatch(f[2], -1) {
			if m[1] != "" {
				uses[f[1]] = append(uses[f[1]], "api."+m[1])
			} else {
				uses[f[1]] = append(uses[f[1]], m[2])
			}
		}
	}
}
