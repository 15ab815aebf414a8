package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// command is one command of a block, and what it prints.
type command struct {
	line   int
	text   string
	output []string
}

// commandsOf are the commands of a ```console block; a line that ends with \ goes on.
func commandsOf(b block) (out []command) {
	goesOn := false
	for i, s := range b.lines {
		text, ok := strings.CutPrefix(strings.TrimSpace(s), "$ ")
		switch {
		case goesOn:
			out[len(out)-1].text += "\n" + s
		case ok:
			out = append(out, command{line: b.line + i, text: text})
		case len(out) > 0:
			out[len(out)-1].output = append(out[len(out)-1].output, strings.TrimRight(s, " "))
		}
		goesOn = (ok || goesOn) && strings.HasSuffix(s, `\`)
	}
	return out
}

// runBlocks executes the blocks that ask for it.
func runBlocks(ctx context.Context, root string, d document) (problems []problem) {
	for _, b := range d.blocks {
		if !b.is("console") || !b.is("run") {
			continue
		}
		for _, c := range commandsOf(b) {
			if err := c.run(ctx, root); err != nil {
				problems = append(problems, problem{d.name, c.line, err.Error()})
			}
		}
	}
	return problems
}

func (c command) run(ctx context.Context, root string) error {
	root, err := filepath.Abs(root)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	sh := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", c.text)
	sh.Dir = root
	sh.Env = append(os.Environ(), "PATH="+filepath.Join(root, "bin")+":"+os.Getenv("PATH"))
	sh.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // with all that it starts
	sh.Cancel = func() error { return syscall.Kill(-sh.Process.Pid, syscall.SIGKILL) }
	sh.WaitDelay = time.Second
	out, err := sh.CombinedOutput()
	_ = syscall.Kill(-sh.Process.Pid, syscall.SIGKILL) // what it left behind, if anything
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", c.text, err, out)
	}
	return c.compare(string(out))
}

// compare looks for the lines of the block in what was printed, in their order.
func (c command) compare(printed string) error {
	lines := strings.Split(printed, "\n")
	for _, want := range c.output {
		if strings.TrimSpace(want) == "" || strings.TrimSpace(want) == "…" {
			continue
		}
		pattern := regexp.MustCompile("^" + strings.ReplaceAll(regexp.QuoteMeta(want), "…", ".*") + `\s*$`)
		at := slices.IndexFunc(lines, pattern.MatchString)
		if at < 0 {
			return fmt.Errorf("%s: does not print %q, but\n%s", c.text, want, printed)
		}
		lines = lines[at+1:]
	}
	return nil
}
