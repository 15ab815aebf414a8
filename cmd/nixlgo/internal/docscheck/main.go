// Command docscheck finds what is wrong in the documents of this repository: code that is not that of a tested example, commands
// that fail or do not exist, and names of flags, targets, files, tests, series, keys, variables, errors and Go identifiers that
// the tree does not have. Tables that claim to be complete are compared with the code.
//
// A block ```console run is executed, command by command, from the repository's root, and has to print what the block shows;
// … stands for anything. A comment <!-- docs-check: KIND --> before a table says what its rows have to be: see tables.go.
//
// It needs bin/nixlgo, which it asks for the commands and their flags.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	problems, docs, err := check(ctx, ".")
	for _, p := range problems {
		fmt.Println(p)
	}
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "docs-check:", err)
		os.Exit(1)
	case len(problems) > 0:
		fmt.Fprintf(os.Stderr, "docs-check: %d of the things that the documents say are not so\n", len(problems))
		os.Exit(1)
	}
	fmt.Printf("docs-check: %d documents are right\n", docs)
}

// problem is something that a document says and that is not so.
type problem struct {
	file string
	line int
	text string
}

func (p problem) String() string { return fmt.Sprintf("%s:%d: %s", p.file, p.line, p.text) }

// check reads the tree at root and returns what is wrong in its documents, and how many there are.
func check(ctx context.Context, root string) ([]problem, int, error) {
	tree, err := readTree(root)
	if err != nil {
		return nil, 0, err
	}
	if tree.commands, err = readCommands(ctx, filepath.Join(root, "bin", "nixlgo")); err != nil {
		return nil, 0, err
	}
	if tree.series, err = readSeries(); err != nil {
		return nil, 0, err
	}
	var problems []problem
	for _, d := range tree.documents {
		problems = append(problems, tree.checkDocument(d)...)
		problems = append(problems, runBlocks(ctx, root, d)...)
	}
	for _, f := range tree.deploy {
		problems = append(problems, tree.checkDeployFile(f)...)
	}
	slices.SortStableFunc(problems, func(a, b problem) int { return cmpProblem(a, b) })
	return problems, len(tree.documents), nil
}
