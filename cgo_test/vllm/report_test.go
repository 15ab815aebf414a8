//go:build interop_vllm

package vllm

import (
	"fmt"
	"testing"
	"time"
)

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
