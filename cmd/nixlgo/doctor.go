package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nixlgo/nixlgo/cmd/nixlgo/internal/doctor"
	"github.com/nixlgo/nixlgo/nixl/diagnose"
)

// doctorConfig is the command line of doctor.
type doctorConfig struct {
	library string
	timeout time.Duration
	format  format
	fixEnv  bool
	peer    string // host:port
	answer  string // host:port
}

func newDoctor() *cobra.Command {
	var c doctorConfig
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what is wrong with NIXL on this machine, and what to set",
		Long: "doctor looks at the environment, the limits and the RDMA devices, loads the NIXL library in a process of its own,\n" +
			"and reads memory from one agent to another there, over the transports that this environment leads to.\n\n" +
			"With --peer it also shakes hands with the side channel of another machine: a running instance, or a doctor with\n" +
			"--answer, which calls back and so tells whether the two reach each other both ways. The own address for that is\n" +
			"$VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, else $POD_IP, else the one that this machine has to the peer.\n\n" +
			"--fix-env prints shell commands that put right what variables can put right, and nothing else.\n\n" +
			"Exit code 1 means that a check failed, or with --fix-env, that one did for which no variable helps; warnings do not\n" +
			"matter to it.",
		Example: "  nixlgo doctor\n" +
			"  eval \"$(nixlgo doctor --fix-env)\"                 # and set what was wrong\n" +
			"  nixlgo doctor --answer 10.0.0.7:5600              # on one machine, and on the other:\n" +
			"  nixlgo doctor --peer 10.0.0.7:5600",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.check(); err != nil {
				return usageError{fmt.Errorf("doctor: %w", err)}
			}
			run := c.run
			if c.answer != "" {
				run = c.runAnswer
			}
			if err := run(cmd); err != nil {
				return fmt.Errorf("doctor: %w", err)
			}
			return nil
		},
	}
	f := cmd.Flags()
	libraryFlag(f, &c.library)
	f.DurationVar(&c.timeout, "timeout", 10*time.Second, "longest wait for each step in the library, and for the peer")
	f.BoolVar(&c.fixEnv, "fix-env", false, "print shell commands that set what is wrong, for eval")
	f.StringVar(&c.peer, "peer", "", "side channel of another machine to reach, host:port")
	f.StringVar(&c.answer, "answer", "", "answer --peer of other machines on host:port, until interrupted")
	formatFlags(f, &c.format, true)
	cmd.AddCommand(newDoctorLoopback())
	return cmd
}

func (c *doctorConfig) check() error {
	if c.timeout <= 0 {
		return fmt.Errorf("--timeout %v is not positive", c.timeout)
	}
	if c.peer != "" {
		if err := checkConnect(c.peer); err != nil {
			return fmt.Errorf("--peer: %w", err)
		}
	}
	if c.answer != "" {
		if err := checkListen(c.answer); err != nil {
			return fmt.Errorf("--answer: %w", err)
		}
	}
	switch {
	case c.answer != "" && (c.peer != "" || c.fixEnv):
		return errors.New("--answer does nothing else: leave --peer and --fix-env out")
	case c.fixEnv && c.format != formatText:
		return errors.New("--fix-env prints commands for a shell: leave --json and --format out")
	}
	return nil
}

// runAnswer answers the doctors of other machines.
func (c *doctorConfig) runAnswer(cmd *cobra.Command) error {
	l, err := net.Listen("tcp", c.answer)
	if err != nil {
		return fmt.Errorf("listen (name an address of this machine and a free port): %w", err)
	}
	if err := say(cmd.OutOrStdout(), c.format, map[string]string{"event": "answering", "address": l.Addr().String()},
		"answering on %s; on the other machine: nixlgo doctor --peer %s", l.Addr(), l.Addr()); err != nil {
		return err
	}
	return doctor.Answer(cmd.Context(), l, c.timeout)
}

func (c *doctorConfig) run(cmd *cobra.Command) error {
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	host := diagnose.ThisHost()
	r := doctorReport{out: cmd.OutOrStdout(), format: c.format, silent: c.fixEnv}
	r.table = newTable(r.out, c.format, doctorColumns)
	skipped, err := doctor.Run(cmd.Context(), host, doctor.Options{
		Child:   []string{exe, cmd.Name(), loopbackName, "--library", c.library},
		Timeout: c.timeout,
		Stderr:  cmd.ErrOrStderr(),
	}, r.add)
	if err != nil {
		return err
	}
	if c.peer != "" {
		own := host.Env[envSideHost]
		if own == "" {
			own = host.Env[envPodIP]
		}
		for _, f := range doctor.CheckPeer(cmd.Context(), c.peer, own, host.Env[envSidePort], c.timeout) {
			r.add(f)
		}
	}
	if c.fixEnv {
		return r.fix()
	}
	return r.end(skipped)
}

const loopbackName = "loopback"

// newDoctorLoopback is the process of doctor that loads the library.
func newDoctorLoopback() *cobra.Command {
	var library string
	c := &cobra.Command{
		Use:    loopbackName,
		Hidden: true,
		Args:   noArgs,
		RunE: func(*cobra.Command, []string) error {
			return doctor.Loopback(library, os.NewFile(3, "report"))
		},
	}
	c.Flags().StringVar(&library, "library", "", "")
	return c
}

// doctorReport prints the findings as they come and keeps what the summary needs.
type doctorReport struct {
	out    io.Writer
	format format
	silent bool
	table  *table // of --format csv
	found  []diagnose.Finding
	failed []diagnose.Finding
	warned []string
	err    error // the first of writing
}

var doctorColumns = []column{{Key: "status"}, {Key: "check"}, {Key: "found"}, {Key: "cause"}, {Key: "remedy"}}

// doctorCheck and doctorSummary are the lines of --json.
type doctorCheck struct {
	Event string `json:"event"` // check
	diagnose.Finding
}

type doctorSummary struct {
	Event   string   `json:"event"` // summary
	OK      bool     `json:"ok"`
	Failed  []string `json:"failed"`
	Warned  []string `json:"warned"`
	Skipped []string `json:"skipped"` // not reached, because one before them failed
}

func (r *doctorReport) add(f diagnose.Finding) {
	r.found = append(r.found, f)
	switch f.Status {
	case diagnose.Fail:
		r.failed = append(r.failed, f)
	case diagnose.Warn:
		r.warned = append(r.warned, f.Name)
	}
	switch {
	case r.silent:
	case r.format == formatJSON:
		r.encode(doctorCheck{"check", f})
	case r.format == formatCSV:
		r.table.row(f.Status, f.Name, f.Value, f.Cause, f.Remedy)
	default:
		r.print(f)
	}
}

// print prints a finding for people.
func (r *doctorReport) print(f diagnose.Finding) {
	if len(r.found) == 1 {
		r.printf("%-5s %-28s %s\n", "", "CHECK", "FOUND")
	}
	r.printf("%-5s %-28s %s\n", f.Status, f.Name, f.Value)
	for _, line := range []struct{ label, text string }{{"cause", f.Cause}, {"remedy", f.Remedy}} {
		if line.text == "" {
			continue
		}
		if f.Status == diagnose.OK {
			line.label = "note"
		}
		r.printf("%-5s %28s %s\n", "", line.label, strings.ReplaceAll(line.text, "\n", "\n"+strings.Repeat(" ", 35)))
	}
}

// end prints the summary. The error names what failed and what to do.
func (r *doctorReport) end(skipped []string) error {
	s := doctorSummary{Event: "summary", OK: len(r.failed) == 0, Failed: []string{}, Warned: append([]string{}, r.warned...), Skipped: append([]string{}, skipped...)}
	for _, f := range r.failed {
		s.Failed = append(s.Failed, f.Name)
	}
	switch r.format {
	case formatJSON:
		r.encode(s)
	case formatCSV:
		r.err = r.table.end()
	default:
		r.printf("\n%s, %d failed, %d warned\n", many(len(r.found), "check"), len(s.Failed), len(s.Warned))
		if len(s.Skipped) > 0 {
			r.printf("not reached: %s\n", strings.Join(s.Skipped, ", "))
		}
	}
	if r.err != nil {
		return fmt.Errorf("print the report: %w", r.err)
	}
	return failures(r.failed)
}

// fix prints what sets the variables right. A failure of the library with a variable that is wrong is that variable's.
func (r *doctorReport) fix() error {
	var left []diagnose.Finding
	exports := diagnose.Exports(r.found)
	for _, f := range r.failed {
		if len(f.Fix) == 0 && (exports == "" || !doctor.InLibrary(f.Name)) {
			left = append(left, f)
		}
	}
	if r.printf("%s", exports); r.err != nil {
		return fmt.Errorf("print the commands: %w", r.err)
	}
	return failures(left)
}

// failures is an error that names the findings and what to do, nil for none.
func failures(failed []diagnose.Finding) error {
	if len(failed) == 0 {
		return nil
	}
	var names []string
	var remedies strings.Builder
	for _, f := range failed {
		names = append(names, f.Name)
		fmt.Fprintf(&remedies, "\n  %s (%s): %s", f.Name, f.Value, f.Remedy)
	}
	return errors.New("failed: " + strings.Join(names, ", ") + remedies.String())
}

func (r *doctorReport) encode(v any) {
	if err := json.NewEncoder(r.out).Encode(v); r.err == nil {
		r.err = err
	}
}

func (r *doctorReport) printf(format string, a ...any) {
	if _, err := fmt.Fprintf(r.out, format, a...); r.err == nil {
		r.err = err
	}
}
