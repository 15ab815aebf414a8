package main

import (
	"bytes"
	"encoding/csv"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

// commands are all that a user is shown, and the root.
func commands(root *cobra.Command) (all []*cobra.Command) {
	for _, c := range append([]*cobra.Command{root}, root.Commands()...) {
		if !c.Hidden && c.Name() != "help" && c.Name() != "completion" {
			all = append(all, c)
		}
	}
	return all
}

func TestEveryCommandTeaches(t *testing.T) {
	exe := program(t)
	for _, c := range commands(newRoot()) {
		t.Run(c.Name(), func(t *testing.T) {
			path := strings.Fields(c.CommandPath())[1:]
			code, stdout, stderr := run(t, exe, append(path, "--help")...)
			require.Zero(t, code, stderr)
			require.Empty(t, stderr)
			require.Contains(t, stdout, "Examples:\n  nixlgo")
			require.NotEmpty(t, c.Short)
			require.Contains(t, stdout, c.Long)
			for line := range strings.Lines(stdout) {
				require.NotContains(t, line, "\t", "columns are spaces")
			}
			for line := range strings.Lines(c.Example) { // each is a line that can be pasted
				line, _, _ = strings.Cut(strings.TrimSpace(line), " #")
				for part := range strings.SplitSeq(line, "| ") {
					if args := strings.Fields(part); args[0] == "nixlgo" {
						found, rest, err := newRoot().Find(args[1:])
						require.NoError(t, err, line)
						for _, a := range rest {
							name, _, _ := strings.Cut(strings.TrimPrefix(a, "--"), "=")
							require.False(t, strings.HasPrefix(a, "--") && found.Flags().Lookup(name) == nil, "%s: %s", line, a)
						}
					}
				}
			}
			code, stdout, stderr = run(t, exe, append(path, "--no-such-flag")...)
			require.Equal(t, exitUsage, code, stderr)
			require.Empty(t, stdout)
			require.Contains(t, stderr, "unknown flag: --no-such-flag")
			require.Contains(t, stderr, "--help")
		})
	}
}

// nixlbench and vLLM write _ where this command writes -.
func TestFlagsAreKebabCaseAndTakeUnderscores(t *testing.T) {
	for _, c := range commands(newRoot()) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			require.Regexp(t, `^[a-z0-9]+(-[a-z0-9]+)*$`, f.Name, c.Name())
			require.True(t, f.Shorthand == "" || f.Name == "help", "%s --%s: long flags only", c.Name(), f.Name)
			require.NotEmpty(t, f.Usage, "%s --%s", c.Name(), f.Name)
			require.Equal(t, f, c.Flags().Lookup(strings.ReplaceAll(f.Name, "-", "_")))
		})
		if c.HasParent() {
			require.NotNil(t, c.Flags().Lookup("json"), c.Name())
		}
	}
}

func TestCompletionScriptsAreThere(t *testing.T) {
	exe := program(t)
	for _, shell := range []string{"bash", "zsh", "fish"} {
		code, stdout, stderr := run(t, exe, "completion", shell)
		require.Zero(t, code, stderr)
		require.Contains(t, stdout, "nixlgo")
	}
	code, stdout, _ := run(t, exe, "__complete", "serve", "--me")
	require.Zero(t, code)
	require.Contains(t, stdout, "--memory-mib")
	for _, args := range [][]string{{"completion", "tcsh"}, {"completion", "bash", "x"}} {
		code, _, stderr := run(t, exe, args...)
		require.Equal(t, exitUsage, code, "%v: %s", args, stderr)
	}
	code, _, stderr := run(t, exe, "nonsense")
	require.Equal(t, exitUsage, code)
	require.Contains(t, stderr, `unknown command "nonsense"`)
}

// A variable that means nothing is an error that names it, and never a default in silence.
func TestVariablesAreStrict(t *testing.T) {
	exe := program(t)
	for _, c := range []struct {
		set  string
		code int
	}{
		{"NIXL_TELEMETRY_ENABLE=maybe", exitUsage}, {"NIXL_TELEMETRY_ENABLE=YES", 0}, {"NIXL_UCX_DEEPBIND=2", exitUsage}, {"NIXL_UCX_DEEPBIND=n", 0},
		{"VLLM_NIXL_SIDE_CHANNEL_PORT=x", exitUsage}, {"VLLM_NIXL_SIDE_CHANNEL_PORT=70000", exitUsage}, {"NIXL_TELEMETRY_PROMETHEUS_PORT=0", exitUsage},
		{"NIXL_TELEMETRY_ENABLE=", 0},
	} {
		cmd := exec.Command(exe, "serve", "/nowhere", "--help")
		if c.code != 0 {
			cmd = exec.Command(exe, "serve", "/nowhere")
		}
		cmd.Env = append(os.Environ(), c.set)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		_ = cmd.Run()
		require.Equal(t, c.code, cmd.ProcessState.ExitCode(), "%s: %s", c.set, &stderr)
		if name, value, _ := strings.Cut(c.set, "="); c.code != 0 {
			require.Contains(t, stderr.String(), name)
			require.Contains(t, stderr.String(), value)
		}
	}
	t.Setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "")
	t.Setenv("POD_IP", "10.1.2.3")
	t.Setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5611")
	flag := func(name string) string { return newServe().Flags().Lookup(name).DefValue }
	require.Equal(t, []string{"10.1.2.3", "5611"}, []string{flag("host"), flag("port")})
	t.Setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.9.9.9")
	require.Equal(t, "10.9.9.9", flag("host"))
}

func TestFormatFlagsAgree(t *testing.T) {
	parse := func(table bool, args ...string) (format, error) {
		f := pflag.NewFlagSet("x", pflag.ContinueOnError)
		f.SetOutput(new(bytes.Buffer))
		var p format
		formatFlags(f, &p, table)
		err := f.Parse(args)
		return p, err
	}
	for _, c := range []struct {
		table bool
		args  []string
		want  format
		err   string
	}{
		{false, nil, formatText, ""}, {false, []string{"--json"}, formatJSON, ""}, {false, []string{"--json=false"}, formatText, ""},
		{false, []string{"--json=2"}, "", "true or false"}, {false, []string{"--format", "csv"}, "", "unknown flag"},
		{true, []string{"--format", "csv"}, formatCSV, ""}, {true, []string{"--format=json", "--json"}, formatJSON, ""},
		{true, []string{"--json", "--format", "csv"}, "", "contradicts --json"}, {true, []string{"--format", "text", "--json"}, "", "contradicts --format"},
		{true, []string{"--format", "yaml"}, "", "want text, json or csv"},
	} {
		got, err := parse(c.table, c.args...)
		if c.err != "" {
			require.ErrorContains(t, err, c.err, c.args)
			continue
		}
		require.NoError(t, err, c.args)
		require.Equal(t, c.want, got, c.args)
	}
}

func TestTableHasOneFormEach(t *testing.T) {
	columns := []column{{Key: "name", Head: "Name", Width: 8}, {Key: "gb_s", Head: "B/W", Width: 10, Verb: "%.6f"}, {Key: "n", Head: "N"}}
	draw := func(f format) string {
		var b bytes.Buffer
		table := newTable(&b, f, columns)
		table.row("a,b", 1.0/3, 2)
		table.row("c", 2.5, 10)
		require.NoError(t, table.end())
		return b.String()
	}
	require.Equal(t, "Name    B/W       N\na,b     0.333333  2\nc       2.500000  10\n", draw(formatText))
	require.Equal(t, `{"name":"a,b","gb_s":0.3333333333333333,"n":2}`+"\n"+`{"name":"c","gb_s":2.5,"n":10}`+"\n", draw(formatJSON))
	rows, err := csv.NewReader(strings.NewReader(draw(formatCSV))).ReadAll()
	require.NoError(t, err)
	require.Equal(t, [][]string{{"name", "gb_s", "n"}, {"a,b", "0.3333333333333333", "2"}, {"c", "2.5", "10"}}, rows)
	for _, f := range []format{formatText, formatJSON, formatCSV} {
		table := newTable(brokenWriter{}, f, columns)
		table.row("a", 1.0, 1)
		require.ErrorIs(t, table.end(), errBroken)
	}
}

var errBroken = errors.New("broken")

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errBroken }
