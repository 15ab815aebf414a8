package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const good = `# why
breaks: it does not add
packages: ./a ./b
run: ^TestAdd$
--- old a/a.go
	return x + y
--- new
	return x - y
--- old a/a.go
// gone
--- new
`

func TestAMutantIsReadAndApplied(t *testing.T) {
	m, err := parse("add", good)
	require.NoError(t, err)
	require.Equal(t, &mutant{name: "add", breaks: "it does not add", packages: []string{"./a", "./b"}, pattern: "^TestAdd$", changes: []change{
		{"a/a.go", "\treturn x + y\n", "\treturn x - y\n"}, {"a/a.go", "// gone\n", ""}}}, m)
	source := func(text string) func(string) (string, error) {
		return func(string) (string, error) { return text, nil }
	}
	files, err := m.apply(source("a\n\treturn x + y\nb\n// gone\nc\n"))
	require.NoError(t, err)
	require.Equal(t, map[string]string{"a/a.go": "a\n\treturn x - y\nb\nc\n"}, files)
	for want, text := range map[string]string{
		"0 times in a/a.go": "a\n// gone\n",
		"2 times in a/a.go": "\treturn x + y\n\treturn x + y\n// gone\n",
	} {
		_, err = m.apply(source(text))
		require.ErrorContains(t, err, want)
	}
	_, err = m.apply(func(string) (string, error) { return "", os.ErrNotExist })
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestAMutantThatIsNoneIsRefused(t *testing.T) {
	for name, change := range map[string][2]string{
		"no line of a head":      {"breaks:", "braks:"},
		"is missing":             {"run: ^TestAdd$\n", ""},
		"without --- old":        {"--- old a/a.go\n\treturn x + y\n", ""},
		"missing closing":        {"TestAdd$", "TestAdd("},
		"the change of ../a.go":  {"--- old a/a.go\n//", "--- old ../a.go\n//"},
		"the change of a/a.go":   {"x - y", "x + y"},
		"the change of a/b.go ":  {"--- old a/a.go\n// gone\n", "--- old a/b.go\n\n"},
		"twice: --- new without": {"// gone\n--- new\n", "// gone\n--- new\n--- new\n"},
	} {
		text := strings.Replace(good, change[0], change[1], 1)
		require.NotEqual(t, good, text, name)
		_, err := parse("x", text)
		require.ErrorContains(t, err, strings.TrimPrefix(name, "twice: "))
	}
}

func TestTheFirstFailedTestIsNamed(t *testing.T) {
	for _, c := range []struct {
		events string
		want   outcome
		said   string
	}{
		{`{"Action":"run","Test":"TestA"}
{"Action":"pass","Test":"TestA"}
{"Action":"pass"}`, outcome{"", 1}, ""},
		{`{"Action":"run","Test":"TestA"}
{"Action":"run","Test":"TestA/sub"}
{"Action":"fail","Test":"TestA/sub"}
{"Action":"fail","Test":"TestA"}
{"Action":"run","Test":"TestB"}
{"Action":"fail","Test":"TestB"}
{"Action":"fail"}`, outcome{"TestA", 2}, ""},
		{`{"Action":"run","Test":"TestA"}
{"Action":"pass","Test":"TestA"}
{"Action":"run","Test":"TestB"}
{"Action":"output","Test":"TestB","Output":"panic"}
{"Action":"fail"}`, outcome{"TestB", 2}, ""},
		{`{"Action":"build-output","Output":"undefined: x"}
{"Action":"build-fail"}
{"Action":"fail","FailedBuild":"p"}
no JSON`, outcome{}, "undefined: xno JSON\n"},
	} {
		o, said := read(strings.NewReader(c.events))
		require.Equal(t, c.want, o)
		require.Equal(t, c.said, said)
	}
}

// A campaign against a module of its own: what is caught, what survives, and what is an error.
func TestACampaignTellsWhatBecameOfEachMutant(t *testing.T) {
	root := t.TempDir()
	put := func(name, text string) {
		path := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	put("go.mod", "module example.org/m\n\ngo 1.26\n")
	put("a.go", "package m\n\nfunc add(x, y int) int {\n\treturn x + y\n}\n")
	put("a_test.go", "package m\n\nimport \"testing\"\n\nfunc TestAdd(t *testing.T) {\n\tif add(1, 2) != 3 {\n\t\tt.Fail()\n\t}\n}\n\nfunc TestZero(t *testing.T) {\n\tadd(0, 0)\n}\n")
	mutate := func(name, test, text string) {
		put("testdata/mutants/"+name+".mutant", "breaks: it\npackages: .\nrun: "+test+"\n--- old a.go\n\treturn x + y\n--- new\n"+text+"\n")
	}
	mutate("caught", "^TestAdd$", "\treturn x - y")
	mutate("dies", "^TestAdd$", "\tpanic(x)")
	mutate("no-build", "^TestAdd$", "\treturn z")
	mutate("no-test", "^TestNone$", "\treturn x - y")
	mutate("survives", "^TestZero$", "\treturn x - y")
	put("testdata/mutants/moved.mutant", "breaks: it\npackages: .\nrun: ^TestAdd$\n--- old a.go\n\treturn y + x\n--- new\n")
	c := campaign{root: root, jobs: 2, out: io.Discard}
	rows, err := c.run(t.Context(), "")
	got := map[string][2]string{}
	for _, r := range rows {
		got[r.Name] = [2]string{r.Result, r.Test}
	}
	require.Equal(t, map[string][2]string{"caught": {caught, "TestAdd"}, "dies": {caught, "TestAdd"}, "no-build": {failed, "^TestAdd$"},
		"no-test": {failed, "^TestNone$"}, "survives": {survived, "^TestZero$"}, "moved": {failed, "^TestAdd$"}}, got)
	for _, want := range []string{"survives survived ^TestZero$", "undefined: z", "matches no test", "0 times in a.go"} {
		require.ErrorContains(t, err, want)
	}
	rows, err = c.run(t.Context(), "^(caught|dies)$")
	require.NoError(t, err)
	require.Len(t, rows, 2)
	c.all = true
	_, err = c.run(t.Context(), "^survives$")
	require.NoError(t, err, "another test sees it")
	_, err = c.run(t.Context(), "nobody")
	require.ErrorContains(t, err, "no mutant matches")
	require.NoError(t, write(filepath.Join(root, "out", "rows.json"), rows))

	put("a.go", "package m\n\nfunc add(x, y int) int {\n\treturn x * y\n}\n")
	_, err = c.run(t.Context(), "^caught$")
	require.ErrorContains(t, err, "TestAdd of . fails on the source as it is")
}

// The mutants of this project fit its source.
func TestEveryMutantAppliesToTheSource(t *testing.T) {
	root := filepath.Join("..", "..")
	mutants, err := load(filepath.Join(root, "testdata", "mutants"), regexp.MustCompile(""))
	require.NoError(t, err)
	for _, m := range mutants {
		_, e := m.apply(func(file string) (string, error) {
			b, err := os.ReadFile(filepath.Join(root, file))
			return string(b), err
		})
		err = errors.Join(err, e)
	}
	require.NoError(t, err)
}
