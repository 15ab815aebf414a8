package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// fullTable returns a table with a row for every known id; the rows of change replace those with their id.
func fullTable(change ...string) string {
	replace := make(map[string]string)
	for _, line := range change {
		id, _, _ := strings.Cut(line, "\t")
		replace[id] = line
	}
	lines := []string{header}
	for _, s := range sections {
		for _, id := range s.ids {
			line := strings.Join([]string{id, s.kind(), "does a thing", "-", "later"}, "\t")
			if r, ok := replace[id]; ok {
				line = r
			}
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "\n") + "\n"
}

func TestTableFaultsAreNamed(t *testing.T) {
	for _, c := range []struct {
		name, table, want string
	}{
		{"no header", strings.TrimPrefix(fullTable(), header+"\n"), "the first line is not"},
		{"field missing", fullTable("A1.1\tpeer\tdoes\tlease.TestX"), "4 tab-separated fields, not 5"},
		{"unknown id", fullTable() + "A1.14\tpeer\tdoes\t-\tlater\n", `unknown id "A1.14"`},
		{"case that was never listed", fullTable() + "17\tcase\tdoes\t-\tlater\n", `unknown id "17"`},
		{"duplicate id", fullTable() + "B7\tpeer\tdoes\t-\tlater\n", "B7 is already on line"},
		{"row missing", strings.Replace(fullTable(), "C4\tpeer\tdoes a thing\t-\tlater\n", "", 1), "no row for C4"},
		{"neither test nor reason", fullTable("D2\tpeer\tdoes\t-\t-"), "D2 has neither a test nor a reason"},
		{"no behaviour", fullTable("D2\tpeer\t\t-\tlater"), "D2 says no behaviour"},
		{"wrong kind", fullTable("D2\tcase\tdoes\t-\tlater"), `D2 is of kind "peer"`},
		{"empty file", "", "no row for 1, 2, 3"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := readTable(strings.NewReader(c.table))
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestTableListsEveryFault(t *testing.T) {
	_, err := readTable(strings.NewReader(fullTable("A1.1\tpeer\tdoes\t-\t", "A1.2\tpeer\tdoes\t-\t")))
	require.ErrorContains(t, err, "A1.1 has neither")
	require.ErrorContains(t, err, "A1.2 has neither")
}

func TestEveryIDIsInTheSectionThatPrintsIt(t *testing.T) {
	rows, err := readTable(strings.NewReader(fullTable()))
	require.NoError(t, err)
	i := 0
	for _, s := range sections {
		for range s.ids {
			require.Equal(t, s.name, rows[i].section(), rows[i].id)
			i++
		}
	}
	require.Len(t, rows, i)
}

const testFile = `//go:build never

package p

import "testing"

func TestPlain(t *testing.T) {
	for _, name := range []string{"two words", "a/b"} {
		t.Run(name, func(t *testing.T) {})
	}
}

func TestSkips(t *testing.T) {
	t.Run("x", func(t *testing.T) { t.Skip("no device") })
}

func FuzzPlain(f *testing.F) {}

type T struct{}

func (T) TestMethod(t *testing.T) {}
`

// module makes a tree with a table and one package of tests, both in folder p and in the root.
func module(t *testing.T, table string) string {
	root := t.TempDir()
	for name, text := range map[string]string{
		"testdata/parity.tsv": table,
		"p/q/p_test.go":       testFile,
		"root_test.go":        testFile,
		"p/q/p.go":            "package p\n\nfunc TestNotInATestFile() {}\n",
	} {
		path := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	return root
}

func TestTestsMustBeInTheTree(t *testing.T) {
	for ref, want := range map[string]string{
		"p/q.TestPlain":                "",
		"p/q.TestPlain/two_words":      "",
		"p/q.TestPlain/two words":      "",
		"p/q.TestPlain/a/b":            "",
		"p/q.FuzzPlain, p/q.TestPlain": "",
		"nixlgo.TestPlain":             "",
		"p/q.TestPlain/three":          `no subtest name "three"`,
		"p/q.TestGone":                 "no test function TestGone",
		"p/q.TestPlain, p/q.TestGone":  "no test function TestGone",
		"p/q.TestNotInATestFile":       "no test function",
		"p/q.TestMethod":               "no test function",
		"p/q.TestSkips":                "can skip",
		"gone.TestPlain":               "no test function TestPlain in gone",
		"TestPlain":                    "not of the form",
		"p/q.helper":                   "not of the form",
	} {
		t.Run(ref, func(t *testing.T) {
			err := run(module(t, fullTable("A1.1\tpeer\tdoes\t"+ref+"\t-")), &bytes.Buffer{})
			if want == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, "A1.1: ")
			require.ErrorContains(t, err, want)
		})
	}
}

func TestTestsMustParse(t *testing.T) {
	root := module(t, fullTable("A1.1\tpeer\tdoes\tp/q.TestPlain\t-"))
	require.NoError(t, os.WriteFile(filepath.Join(root, "p/q/broken_test.go"), []byte("package p\nfunc {"), 0o644))
	require.ErrorContains(t, run(root, &bytes.Buffer{}), "broken_test.go")
}

func TestOutputNamesTestsAndReasonsAndCounts(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, run(module(t, fullTable(
		"1\tcase\tlate read is refused\tp/q.TestPlain, nixlgo.FuzzPlain\t-",
		"A1.1\tpeer\tone entry per engine\tp/q.TestPlain\tpartly: no second engine",
	)), &out))
	lines := strings.Split(out.String(), "\n")
	require.Equal(t, "Public bug reports", lines[0])
	require.Contains(t, out.String(), "  1      late read is refused\n         tested: p/q.TestPlain, nixlgo.FuzzPlain\n")
	require.Contains(t, out.String(), "vLLM: heartbeats\n  A1.1   one entry per engine\n         tested: p/q.TestPlain\n         reason: partly: no second engine\n")
	require.Contains(t, out.String(), "  A1.2   does a thing\n         reason: later\n")
	require.Equal(t, "parity: 341 behaviours, 2 tested, 339 with a reason", lines[len(lines)-2])
}
