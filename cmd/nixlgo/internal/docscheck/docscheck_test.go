package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// small is a tree with one of everything that documents name.
func small(t *testing.T) *tree {
	t.Helper()
	root := t.TempDir()
	for name, text := range map[string]string{
		"Makefile":                   "build: setup ## build it\nsetup:\nVARIABLE := x\n",
		"lib.go":                     "package nixlgo\n\nimport \"os\"\n\nvar ErrOne, errTwo error\n\n// Config configures.\ntype Config struct {\n\tHost string // empty: loopback\n\tport int\n}\n\n// More configures more.\ntype More struct{ Host, Rank int }\n\nfunc (c *Config) Check() { os.Getenv(\"UCX_TLS\") }\n",
		"lib_test.go":                "package nixlgo\n\nfunc TestItWorks(t *testing.T) {}\n",
		"example_test.go":            "package nixlgo_test\n\nfunc Example() {\n\tif err := f(); err != nil {\n\t\treturn\n\t}\n}\n",
		"lease/lease.go":             "package lease\n\nconst keyDuration = \"kv_lease_duration\"\n\nvar configKeys = []string{keyDuration}\n",
		"other/doc.go":               "package other\n",
		"cmd/x/deploy/alerts.yaml":   "- alert: Fire\n  expr: nixlgo_reads_total{result=\"no\"} > 0\n    runbook: OPERATIONS.md#gone\n          args: [serve, --nothing=x]\n",
		"cmd/x/deploy/OPERATIONS.md": "# Here\n",
	} {
		file := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
	}
	tree, err := readTree(root)
	require.NoError(t, err)
	tree.commands = map[string]map[string]bool{"": {"help": true}, "serve": {"http": true}, "help": {}}
	tree.series = map[string]map[string]labels{"nixlgo_reads_total": {"result": {"ok": true, "lapsed": true}}}
	return tree
}

func problemsIn(tree *tree, text string) (out []string) {
	for _, p := range tree.checkDocument(parse("DOC.md", text)) {
		out = append(out, p.text)
	}
	return out
}

func TestWhatIsSoIsNoProblem(t *testing.T) {
	tree := small(t)
	for _, text := range []string{
		"`make build` and `make setup VARIABLE=y`", "`nixlgo serve --http :80`, `nixlgo COMMAND`, `--http`", "`nixlgo.Config`, `Config.Check`, `Config.Host`",
		"`nixlgo.ErrOne`, other words, `fmt.Println`, `http.Get`", "`lib.go`, `other/doc.go`, [doc](other/doc.go), [web](https://example.org/x), `out/x/y.json`",
		"# A heading, `code`\n[up](#a-heading-code)", "TestItWorks, `nixlgo.TestItWorks`", "UCX_TLS, `kv_lease_duration`",
		"nixlgo_reads_total, `nixlgo_reads_total{result}`, nixlgo_reads_total{result=~\"ok|lapsed\",job=\"x\"}",
		"```go\nif err := f(); err != nil {\n\treturn\n}\n```", "```sh\ngo test ./other ./... && make build | nixlgo serve --http=:1 # --not-a-flag\n```",
		"```console\n$ nixlgo serve\nnixlgo nothing --else\n```",
		"<!-- docs-check: commands -->\n| command | |\n| --- | --- |\n| `nixlgo serve` | |\n",
		"<!-- docs-check: targets -->\n| target | |\n| --- | --- |\n| `make build` | |\n",
		"<!-- docs-check: errors nixlgo lease -->\n| error | |\n| --- | --- |\n| `nixlgo.ErrOne` | |\n",
		"<!-- docs-check: fields nixlgo.Config -->\n| field | default |\n| --- | --- |\n| `Host` | `loopback` |\n",
		"<!-- docs-check: fields nixlgo.More without nixlgo.Config -->\n| field | default |\n| --- | --- |\n| `Rank` | |\n",
		"<!-- docs-check: packages -->\n| package |\n| --- |\n| `nixlgo`, [`lease`](lease/lease.go) |\n| `other` |\n",
	} {
		require.Empty(t, problemsIn(tree, text), text)
	}
}

func TestEachThingThatIsNotSoIsFound(t *testing.T) {
	tree := small(t)
	for text, want := range map[string]string{
		"`make nothing`":                          "make has no target nothing",
		"`make VARIABLE`":                         "make has no target VARIABLE",
		"`nixlgo nothing`":                        "no command nixlgo nothing",
		"`nixlgo serve --nothing`":                "nixlgo serve has no flag --nothing",
		"`--nothing`":                             "no command has a flag --nothing",
		"`nixlgo.Nothing`":                        "there is no nixlgo.Nothing",
		"`lease.Config`":                          "there is no lease.Config",
		"`Config.Nothing`":                        "no package has Config.Nothing",
		"`other/nothing.go`":                      "there is no file other/nothing.go",
		"[x](other/nothing.go)":                   "the link other/nothing.go leads nowhere",
		"[x](#nothing)":                           "no heading for #nothing",
		"[x](cmd/x/deploy/OPERATIONS.md#nothing)": "no heading for #nothing",
		"TestNothing":                             "there is no test TestNothing",
		"`other.TestItWorks`":                     "there is no test other.TestItWorks",
		"UCX_NOTHING":                             "nothing here knows the variable UCX_NOTHING",
		"`kv_lease_nothing`":                      "nothing here knows the key kv_lease_nothing",
		"nixlgo_nothing_total":                    "there is no series nixlgo_nothing_total",
		"nixlgo_reads_total{cause}":               "no label cause",
		"nixlgo_reads_total{result=\"no\"}":       "is never \"no\"",
		"```go\nreturn err\n```":                  "no file example",
		"```sh\nmake nothing\n```":                "no target nothing",
		"```sh\ngo run ./nothing\n```":            "there is no directory ./nothing",
		"```console\n$ X=1 nixlgo serve --http=:1 | nixlgo nothing\n```":                                     "no command nixlgo nothing",
		"<!-- docs-check: nothing -->\n| a |\n| --- |\n| b |\n":                                              "knows no table of nothing",
		"<!-- docs-check: commands -->\ntext\n":                                                              "no table after this comment",
		"<!-- docs-check: commands -->\n| a |\n| --- |\n| `nixlgo nothing` |\n":                              "the table has nothing, which the code does not have",
		"<!-- docs-check: targets -->\n| a |\n| --- |\n| text |\n":                                           "the table lacks build",
		"<!-- docs-check: packages -->\n| a |\n| --- |\n| `nixlgo` `lease` |\n":                              "the table lacks other",
		"<!-- docs-check: errors lease nothing -->\n| a |\n| --- |\n| text |\n":                              "there is no package nothing",
		"<!-- docs-check: errors nixlgo -->\n| a |\n| --- |\n| text |\n":                                     "the table lacks nixlgo.ErrOne",
		"<!-- docs-check: fields nixlgo.Nothing -->\n| a |\n| --- |\n| `Host` |\n":                           "there is no struct nixlgo.Nothing",
		"<!-- docs-check: fields nixlgo.More without nixlgo.Nothing -->\n| a |\n| --- |\n| `Host` |\n":       "there is no struct nixlgo.Nothing",
		"<!-- docs-check: fields nixlgo.More without nixlgo.Config -->\n| a | b |\n| --- | --- |\n| x | |\n": "the table lacks Rank",
		"<!-- docs-check: fields nixlgo.Config -->\n| a | b |\n| --- | --- |\n| `Host` | 127 |\n":            "does not say that its default is \"127\"",
		"<!-- docs-check: fields nixlgo.Config -->\n| a | b |\n| --- | --- |\n| `Host` | |\n| `Host` | |\n":  "is in line 4 already",
	} {
		found := problemsIn(tree, text)
		require.NotEmpty(t, found, text)
		require.Contains(t, strings.Join(found, "\n"), want, text)
	}
}

// The keys and their defaults are those of package lease.
func TestDefaultsOfKeysAreCompared(t *testing.T) {
	tree := small(t)
	table := func(first string) string {
		text := "<!-- docs-check: keys -->\n| key | default |\n| --- | --- |\n" + first
		for k, v := range keyDefaults() {
			if k != "kv_lease_duration" {
				tree.words[k] = true
				text += "| `" + k + "` | " + v + " |\n"
			}
		}
		return text
	}
	require.Empty(t, problemsIn(tree, table("| `kv_lease_duration` | 30 s |\n")))
	require.Equal(t, []string{`the default of kv_lease_duration is "30 s", not "60 s"`}, problemsIn(tree, table("| `kv_lease_duration` | 60 s |\n")))
	require.Equal(t, []string{"the table lacks kv_lease_duration"}, problemsIn(tree, table("")))
	tree.packages["lease"].configs["keyDuration"] = "kv_lease_new"
	require.Contains(t, problemsIn(tree, table("| `kv_lease_duration` | 30 s |\n")), "tables.go does not know the default of the key kv_lease_new")
}

func TestDeployFilesAreChecked(t *testing.T) {
	tree := small(t)
	var found []string
	for _, d := range tree.deploy {
		for _, p := range tree.checkDeployFile(d) {
			found = append(found, p.String())
		}
	}
	require.Equal(t, []string{
		"cmd/x/deploy/alerts.yaml:1: OPERATIONS.md does not name the alert Fire",
		`cmd/x/deploy/alerts.yaml:2: label result of series nixlgo_reads_total is never "no"`,
		"cmd/x/deploy/alerts.yaml:3: cmd/x/deploy/OPERATIONS.md has no heading for #gone",
		"cmd/x/deploy/alerts.yaml:4: nixlgo serve has no flag --nothing",
	}, found)
}

// Dashboard and alerts name series that the collector has, with labels and values that it has.
func TestSeriesOfDashboardAndAlertsExist(t *testing.T) {
	tree := &tree{}
	var err error
	tree.series, err = readSeries()
	require.NoError(t, err)
	for _, name := range []string{"dashboard.json", "alerts.yaml", "alerts_test.yaml"} {
		text, err := os.ReadFile(filepath.Join("..", "..", "deploy", name))
		require.NoError(t, err)
		named := seriesName.FindAllString(string(text), -1)
		require.Greater(t, len(named), 14, name)
		for _, s := range named {
			require.Empty(t, tree.wrongSeries(s), "%s: %s", name, s)
		}
	}
}

func TestBlocksAreRunAndCompared(t *testing.T) {
	root := t.TempDir()
	for text, want := range map[string]string{
		"```console run\n$ echo one; echo two; echo three\none\nthree\n```": "",
		"```console run\n$ echo took 17 ms\ntook … ms\n```":                 "",
		"```console run\n$ echo a \\\n    b\na b\n$ test -d \"$PWD\"\n```":  "",
		"```console\n$ false\n```":                                          "",
		"```console run\n$ false\n```":                                      "exit status 1",
		"```console run\n$ false | true\n```":                               "exit status 1",
		"```console run\n$ echo two; echo one\none\ntwo\n```":               `does not print "two"`,
		"```console run\n$ echo one more\none\n```":                         `does not print "one"`,
	} {
		problems := runBlocks(t.Context(), root, parse("DOC.md", text))
		if want == "" {
			require.Empty(t, problems, text)
			continue
		}
		require.Len(t, problems, 1, text)
		require.Contains(t, problems[0].text, want)
	}
}

func TestHelpIsRead(t *testing.T) {
	script := filepath.Join(t.TempDir(), "nixlgo")
	require.NoError(t, os.WriteFile(script, []byte(`#!/bin/sh
if [ "$1" = --help ]; then
printf 'Available Commands:\n  a    does --this\n  b    x\n  c    x\n  d    x\n  e    x\n\nFlags:\n  -h, --help   help\n'
else
printf 'text about --that\n\nFlags:\n  -h, --help=[true]   help for --those\n      --in-%s string   what --that is\n' "$1"
fi
`), 0o755))
	commands, err := readCommands(t.Context(), script)
	require.NoError(t, err)
	require.Equal(t, map[string]bool{"help": true}, commands[""])
	require.Equal(t, map[string]bool{"help": true, "in-a": true}, commands["a"])
	require.Len(t, commands, 6)
	_, err = readCommands(t.Context(), filepath.Join(t.TempDir(), "nothing"))
	require.Error(t, err)
}
