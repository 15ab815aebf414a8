//go:build interop_vllm

package vllm

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// item is one line of the report of `make interop-vllm`.
type item struct {
	Item    string  `json:"item"`
	Passed  bool    `json:"passed"`
	Seconds float64 `json:"seconds"`
}

var items []item

// TestMain leaves by the system call: the exit of libc runs a destructor of the wheel's libnl that crashes.
func TestMain(m *testing.M) {
	code := m.Run()
	if err := writeReport(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	syscall.Exit(code)
}

func writeReport() error {
	if len(items) == 0 {
		return nil
	}
	text, err := json.MarshalIndent(items, "", "  ")
	if err != nil {
		return err
	}
	out := filepath.Join(here(), "..", "..", "out")
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(out, "interop-vllm.json"), append(text, '\n'), 0o644)
}

// check runs one item of the report as a subtest.
func check(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	start := time.Now()
	passed := t.Run(name, f)
	i := item{name, passed, time.Since(start).Round(time.Millisecond).Seconds()}
	items = append(items, i)
	verdict := "ok"
	if !passed {
		verdict = "FAILED"
	}
	fmt.Printf("%-6s %6.1f s  %s\n", verdict, i.Seconds, name)
}
