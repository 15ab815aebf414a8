// Command nixlgo shows, tests and diagnoses leased KV-cache transfers over NIXL.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Exit codes of every subcommand.
const (
	exitFailed     = 1 // the command ran and something is wrong; it said what
	exitUsage      = 2 // the command line or a variable is wrong
	exitRecomputed = 3 // check: the decode side computed the prompt itself
	exitWrong      = 4 // check: the decode side did not get what the prefill side has
)

// usageError marks a wrong command line or variable.
type usageError struct{ error }

// verdictError has an exit code of its own.
type verdictError struct {
	error
	code int
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "nixlgo",
		Short: "Leased, verified KV-cache transfers over NIXL",
		Long: "nixlgo passes KV-cache blocks between inference processes over NIXL, under renewable leases and with proof\n" +
			"that the lease was held throughout each read.\n\n" +
			"Start with `nixlgo demo`. When something is wrong on your machine, `nixlgo doctor` says what. Flags may be written\n" +
			"with _ for -, so that a line for nixlbench or vLLM can be pasted. --json prints one object a line.\n\n" +
			"Exit codes:\n" +
			"  0  all is well (check: the KV cache was transferred)\n" +
			"  1  something is wrong, and standard error says what\n" +
			"  2  the command line or an environment variable is wrong\n" +
			"  3  check: the decode side computed the prompt itself\n" +
			"  4  check: the decode side did not get what the prefill side has",
		Example: "  nixlgo demo                                     # two processes, five scenes, real NIXL\n" +
			"  nixlgo doctor                                   # what is wrong on this machine\n" +
			"  nixlgo serve model.gguf --host 10.0.0.7         # and on another machine, the fetch line that it prints\n" +
			"  nixlgo probe tcp://10.0.0.6:5600                # what a running vLLM offers\n" +
			"  nixlgo check http://p:8000 http://d:8000        # does the KV cache really move?\n" +
			"  nixlgo completion bash >/etc/bash_completion.d/nixlgo",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noArgs,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			for c := cmd; c != nil; c = c.Parent() {
				if c.Name() == "doctor" { // which reports them
					return nil
				}
			}
			return checkEnv()
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cmd.Help()
		},
	}
	root.SetGlobalNormalizationFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
	})
	root.SetFlagErrorFunc(flagError)
	root.AddCommand(newBench(), newBenchTarget(), newCheck(), newDemo(), newDemoNode(), newDoctor(), newHold(), newProbe(), newFetch(), newRelay(), newServe())
	root.InitDefaultCompletionCmd()
	completion, _, _ := root.Find([]string{"completion"})
	completion.Args, completion.RunE = noArgs, func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	for _, shell := range completion.Commands() {
		shell.Args = noArgs
	}
	return root
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := newRoot().ExecuteContext(ctx)
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "nixlgo:", err)
	code := exitFailed
	if v, ok := errors.AsType[verdictError](err); ok {
		code = v.code
	} else if _, ok := errors.AsType[usageError](err); ok {
		code = exitUsage
	}
	os.Exit(code)
}

// noArgs refuses arguments beside flags, and names commands that do not exist.
func noArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		return usageError{fmt.Errorf("%w (see %s --help)", err, cmd.CommandPath())}
	}
	return nil
}
