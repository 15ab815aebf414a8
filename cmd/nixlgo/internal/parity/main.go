// Parity prints which test stands for which public bug report and for which behaviour that the peers' own test suites
// assert, from testdata/parity.tsv, and fails when the table and the tree disagree.
//
// Usage, in the root of the module:
//
//	go run ./cmd/nixlgo/internal/parity
package main

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	root := flag.String("root", ".", "root `directory` of the module")
	flag.Parse()
	if err := run(*root, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run checks the table of the module at root, then prints it. A table with a fault is not printed.
func run(root string, w io.Writer) error {
	f, err := os.Open(filepath.Join(root, "testdata", "parity.tsv"))
	if err != nil {
		return err
	}
	defer f.Close()
	rows, err := readTable(f)
	if err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	if err := checkTests(root, rows); err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	return printTable(w, rows)
}

func printTable(w io.Writer, rows []row) error {
	out := bufio.NewWriter(w)
	bySection := make(map[string][]row)
	tested := 0
	for _, r := range rows {
		bySection[r.section()] = append(bySection[r.section()], r)
		if len(r.tests) > 0 {
			tested++
		}
	}
	for _, s := range sections {
		fmt.Fprintf(out, "%s\n", s.title)
		for _, r := range bySection[s.name] {
			fmt.Fprintf(out, "  %-7s%s\n", r.id, r.behaviour)
			if len(r.tests) > 0 {
				fmt.Fprintf(out, "         tested: %s\n", strings.Join(r.tests, ", "))
			}
			if r.reason != "" {
				fmt.Fprintf(out, "         reason: %s\n", r.reason)
			}
		}
		fmt.Fprintln(out)
	}
	fmt.Fprintf(out, "parity: %d behaviours, %d tested, %d with a reason\n", len(rows), tested, len(rows)-tested)
	return out.Flush()
}
