// Command nixlgo shows, tests and diagnoses leased KV-cache transfers over NIXL.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

// Exit codes of every subcommand.
const (
	exitFailed = 1 // the command ran and something is wrong; it said what
	exitUsage  = 2 // the command line is wrong
)

// usageError marks a wrong command line.
type usageError struct{ error }

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "nixlgo",
		Short: "Leased, verified KV-cache transfers over NIXL",
		Long: "nixlgo passes KV-cache blocks between inference processes over NIXL, under renewable leases and with proof\n" +
			"that the lease was held throughout each read.\n\n" +
			"Start with `nixlgo demo`. When something is wrong on your machine, `nixlgo doctor` says what.\n" +
			"Exit codes: 0 all is well, 1 something is wrong and was named, 2 wrong command line.",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cmd.Help()
		},
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w (see %s --help)", err, cmd.CommandPath())}
	})
	root.AddCommand(newDemo(), newDemoNode(), newDoctor(), newHold(), newProbe(), newRelay())
	return root
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := newRoot().ExecuteContext(ctx)
	switch {
	case err == nil:
	case errors.As(err, new(usageError)):
		fmt.Fprintln(os.Stderr, "nixlgo:", err)
		os.Exit(exitUsage)
	default:
		fmt.Fprintln(os.Stderr, "nixlgo:", err)
		os.Exit(exitFailed)
	}
}

// noArgs refuses arguments beside flags, and names commands that do not exist.
func noArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		return usageError{fmt.Errorf("%w (see %s --help)", err, cmd.CommandPath())}
	}
	return nil
}
