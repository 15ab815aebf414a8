package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

// wrongValues are what no flag of a type takes.
var wrongValues = map[string][]string{
	"int": {"x", "1.5", "", "-2", "99999999999999999999"}, "int64": {"x", "-2", "99999999999999999999"}, "uint64": {"x", "-2"},
	"float64": {"x", "NaN", "-2", "Inf"}, "duration": {"x", "5", "-2s", ""}, "bool": {"maybe", ""}, "boolfunc": {"maybe"},
}

// TestAWrongValueOfAnyFlagIsAUsageError: exit code 2, before anything is started, and the error names the flag and says what it
// takes. A new flag has to be added here: with the values of its type alone, or with more that it does not take, or as one
// that takes any text.
func TestAWrongValueOfAnyFlagIsAUsageError(t *testing.T) {
	// What gets past the checks ends at once, with another error.
	t.Setenv("NIXLGO_LIBRARY", "/nowhere/libnixl_capi.so")
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	short := filepath.Join(t.TempDir(), "short.key")
	require.NoError(t, os.WriteFile(short, []byte("fifteen bytes !"), 0o600))
	listen := []string{"foo", "10.0.0.7", ":x", ":-1", ":70000", "10.0.0.300:80", "a b:80", "http://10.0.0.7:80", "1:2:3"}
	connect := append([]string{":80", "10.0.0.7:0"}, listen...)
	port := []string{"65536"}
	host := []string{"", "a b", "10.0.0.300", "10.0.0.7:80", "0.0.0.0", "::", "[::1]", "-x"}
	url := []string{"foo", "10.0.0.7:8000", "ftp://p:8000", "http://", "http://:8000", "http://p:", "http://p:0", "http://p:70000", "http://a b"}
	tcp := []string{"foo", "10.0.0.7:5600", "tcp://10.0.0.7", "tcp://10.0.0.7:0", "tcp://10.0.0.7:x", "tcp://10.0.0.7:70000", "tcp://:5600", "http://h:5600", "tcp://h:5600/x"}
	key := []string{"/nowhere", short, "."}
	etcd := []string{"foo", "10.0.0.7:2379,foo", "ftp://e:2379", ",", ":2379"}
	format, zero := []string{"yaml", ""}, []string{"0"}
	none := []string{"0", "0s"}
	const any = "any text"

	seen := map[string]bool{}
	type flags map[string][]string
	for _, c := range []struct {
		command string
		args    []string // with which it would run
		flags   flags
		given   []string // wrong arguments
	}{
		{"bench", nil, flags{"listen": listen, "connect": connect, "timeout": none, "library": {any}, "report": {any}, "backend": {"POSIX"}, "device-list": {"", "nope0"},
			"op-type": {"COPY", ""}, "initiator-seg-type": {"VRAM", ""}, "target-seg-type": {"VRAM", ""}, "start-block-size": zero, "max-block-size": zero,
			"start-batch-size": zero, "max-batch-size": zero, "num-iter": zero, "warmup-iter": nil, "large-blk-iter-ftr": zero, "num-threads": zero,
			"pipeline-depth": zero, "total-buffer-size": zero, "check-consistency": nil, "prepared-xfer": nil, "recreate-xfer": nil, "lease-iter": nil,
			"lease": {"0s", "2h"}, "seed": nil, "format": format, "json": nil, "model": {"gpt-2"}, "model-file": {"/nowhere"}}, []string{"x"}},
		{"bench", []string{"--model", "llama-3.1-8b"}, flags{"tp": {"0", "3"}, "pp": {"0", "33"}, "isl": zero, "num-requests": zero, "page-size": zero,
			"access-pattern": {"x", ""}, "kvcache-quant-mode": {"fp64", ""}}, nil},
		{"check", []string{"http://p:8000", "http://d:8000"}, flags{"model": {any}, "api": {"responses", ""}, "metrics-p": url, "metrics-d": url, "prompt-tokens": {"1", "1048577"}, "max-tokens": zero,
			"logprobs": nil, "tolerance": nil, "pause": nil, "lease": none, "read": nil, "key-file": key, "library": {any}, "timeout": none, "json": nil}, url},
		{"demo", []string{"--kv", "/nowhere"}, flags{"tls": {"", "tpc", "tcp,nope"}, "library": {any}, "requests": zero, "kv": {any}, "block-bytes": zero, "blocks": zero, "layers": zero,
			"lease": {"0s", "1h"}, "json": nil, "report": {any}}, []string{"x"}},
		{"doctor", nil, flags{"library": {any}, "timeout": none, "fix-env": nil, "peer": connect, "answer": listen, "json": nil, "format": format}, []string{"x"}},
		{"fetch", []string{"http://10.0.0.7:8300"}, flags{"output": {"-"}, "overwrite": nil, "parallel": zero, "memory-mib": zero, "attempts": zero, "timeout": none,
			"library": {any}, "json": nil, "key-file": key, "etcd": etcd}, url},
		{"hold", nil, flags{"listen": append([]string{"unix:", "unix:/" + strings.Repeat("x", 200), "10.0.0.7:80", ":80"}, listen...), "allow-remote": nil, "state": {any},
			"lease": none, "ttl": none, "max-ttl": none, "max-holds": zero, "max-body": zero, "metrics-port": port, "library": {any}, "json": nil, "key-file": key, "etcd": etcd}, []string{"x"}},
		{"probe", []string{"tcp://10.0.0.7:5600"}, flags{"tp": zero, "pp": zero, "count": zero, "hash": {any}, "engine": {any}, "read": nil, "bytes": zero, "library": {any},
			"key-file": key, "backend": {any}, "timeout": none, "json": nil}, tcp},
		{"relay", []string{"--listen", "127.0.0.1:0", "--layers", "1", "--block-bytes", "1", "--block-tokens", "1"}, flags{"listen": listen, "engine": {any}, "host": host, "port": port,
			"layers": nil, "block-bytes": nil, "block-tokens": nil, "compatibility": {any}, "any-compatibility": nil, "blocks": zero, "lease": none, "verify": nil,
			"timeout": none, "drain": nil, "library": {any}, "json": nil, "key-file": key, "etcd": etcd}, []string{"x"}},
		{"relay", []string{"--like", "tcp://127.0.0.1:1"}, flags{"like": tcp}, nil},
		{"serve", []string{"main.go"}, flags{"http": listen, "params": nil, "host": host, "port": port, "request-mib": zero, "memory-mib": zero, "block-bytes": zero,
			"lease": nil, "drain": nil, "library": {any}, "json": nil, "key-file": key, "etcd": etcd}, nil},
	} {
		t.Run(c.command, func(t *testing.T) {
			require.NotErrorAs(t, execute(t, c.command, c.args...), new(usageError), "what is right is no usage error")
			for name, more := range c.flags {
				seen[c.command+" "+name] = true
				flag := commandOf(t, c.command).Flags().Lookup(name)
				require.NotNil(t, flag, "--%s", name)
				if slices.Equal(more, []string{any}) {
					continue
				}
				values := append(slices.Clone(wrongValues[flag.Value.Type()]), more...)
				require.NotEmpty(t, values, "--%s is a %s", name, flag.Value.Type())
				for _, v := range values {
					err := execute(t, c.command, append(slices.Clone(c.args), "--"+name+"="+v)...)
					require.ErrorAs(t, err, new(usageError), "--%s=%s: %v", name, v, err)
					require.ErrorContains(t, err, "--"+name, v)
					require.Regexp(t, `want|is not in|positive|negative|less than|there is no|only|empty|no such file|is a directory|not measured|divide|more than|reach`, err.Error(), "--%s=%s", name, v)
					require.NotContains(t, err.Error(), "strconv", "Go's own words")
				}
			}
			for _, a := range c.given {
				args := []string{a}
				if c.command == "check" {
					args = []string{a, "http://d:8000"}
				}
				err := execute(t, c.command, args...)
				require.ErrorAs(t, err, new(usageError), "%s: %v", a, err)
			}
		})
	}
	for _, c := range commands(newRoot()) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			_, refused := unservedFlags[f.Name]
			require.True(t, seen[c.Name()+" "+f.Name] || f.Name == "help" || refused, "%s --%s is not in the table", c.Name(), f.Name)
		})
	}
}

// execute runs a command in this process and returns its error. Nothing is printed before one about its flags.
func execute(t *testing.T, name string, args ...string) error {
	t.Helper()
	root := newRoot()
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetErr(&out)
	root.SetArgs(append([]string{name}, args...))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := root.ExecuteContext(ctx)
	if _, usage := errors.AsType[usageError](err); usage {
		require.Empty(t, out.String(), "%s %v", name, args)
	}
	return err
}

func commandOf(t *testing.T, name string) *cobra.Command {
	t.Helper()
	c, _, err := newRoot().Find([]string{name})
	require.NoError(t, err)
	return c
}
