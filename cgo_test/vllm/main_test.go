package vllm

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
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
