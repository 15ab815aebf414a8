package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// reference splits package.Test/sub. The package is its folder, relative to the module's root.
var reference = regexp.MustCompile(`^(.+?)\.((?:Test|Fuzz|Example)\w*)(?:/(.+))?$`)

// A test is one test function of the tree.
type test struct {
	skips    bool            // calls Skip, Skipf or SkipNow
	literals map[string]bool // string literals of its file, where the names of its subtests are
}

// checkTests reports every test of the rows that is not in the tree, and every one that can skip.
func checkTests(root string, rows []row) error {
	var faults []error
	packages := make(map[string]map[string]test)
	for _, r := range rows {
		for _, ref := range r.tests {
			if err := checkTest(root, ref, packages); err != nil {
				faults = append(faults, fmt.Errorf("line %d: %s: %w", r.line, r.id, err))
			}
		}
	}
	return errors.Join(faults...)
}

// checkTest checks one reference. packages holds what was parsed so far.
func checkTest(root, ref string, packages map[string]map[string]test) error {
	m := reference.FindStringSubmatch(ref)
	if m == nil {
		return fmt.Errorf("%q is not of the form package.Test or package.Test/sub", ref)
	}
	folder, name, sub := m[1], m[2], m[3]
	if folder == "nixlgo" {
		folder = "." // the root package has no folder to name it by
	}
	tests, ok := packages[folder]
	if !ok {
		var err error
		if tests, err = parseTests(filepath.Join(root, folder)); err != nil {
			return err
		}
		packages[folder] = tests
	}
	t, ok := tests[name]
	switch {
	case !ok:
		return fmt.Errorf("no test function %s in %s", name, folder)
	case t.skips:
		return fmt.Errorf("%s can skip, so it stands for nothing", ref)
	case sub != "" && !t.literals[sub] && !t.literals[strings.ReplaceAll(sub, "_", " ")]:
		return fmt.Errorf("the file of %s in %s has no subtest name %q", name, folder, sub)
	}
	return nil
}

// parseTests returns the test functions of the package in folder by name, whatever their build constraints.
func parseTests(folder string) (map[string]test, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
	if err != nil {
		return nil, err
	}
	tests := make(map[string]test)
	for _, file := range files {
		tree, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		literals := make(map[string]bool)
		ast.Inspect(tree, func(n ast.Node) bool {
			if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				if s, err := strconv.Unquote(lit.Value); err == nil {
					literals[s] = true
				}
			}
			return true
		})
		for _, d := range tree.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && f.Body != nil {
				tests[f.Name.Name] = test{skips: skips(f.Body), literals: literals}
			}
		}
	}
	return tests, nil
}

func skips(body *ast.BlockStmt) bool {
	found := false
	ast.Inspect(body, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok {
			if sel, ok := call.Fun.(*ast.SelectorExpr); ok {
				switch sel.Sel.Name {
				case "Skip", "Skipf", "SkipNow":
					found = true
				}
			}
		}
		return !found
	})
	return found
}
