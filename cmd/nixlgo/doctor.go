package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nixlgo/nixlgo/cmd/nixlgo/internal/doctor"
)

func newDoctor() *cobra.Command {
	var library string
	var timeout time.Duration
	var asJSON bool
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Say what is wrong with NIXL on this machine, and what to set",
		Long: "doctor looks at the environment, the limits and the RDMA devices, loads the NIXL library in a process of its own,\n" +
			"and reads memory from one agent to another there, over the transports that this environment leads to.\n\n" +
			"Exit code 1 means that a check failed; warnings do not matter to it.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if timeout <= 0 {
				return usageError{fmt.Errorf("--timeout %v is not positive", timeout)}
			}
			exe, err := os.Executable()
			if err != nil {
				return fmt.Errorf("doctor: find this program: %w", err)
			}
			r := doctorReport{out: cmd.OutOrStdout(), json: asJSON}
			skipped, err := doctor.Run(cmd.Context(), doctor.ThisHost(), doctor.Options{
				Child:   []string{exe, cmd.Name(), loopbackName, "--library", library},
				Timeout: timeout,
				Stderr:  cmd.ErrOrStderr(),
			}, r.add)
			if err != nil {
				return fmt.Errorf("doctor: %w", err)
			}
			return r.end(skipped)
		},
	}
	c.Flags().StringVar(&library, "library", "", "path of libnixl_capi.so, or of its directory (default: searched)")
	c.Flags().DurationVar(&timeout, "timeout", 10*time.Second, "longest wait for each step in the library")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object per line")
	c.AddCommand(newDoctorLoopback())
	return c
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
	json   bool
	count  int
	failed []doctor.Finding
	warned []string
	err    error // the first of writing
}

// doctorCheck and doctorSummary are the lines of --json.
type doctorCheck struct {
	Event string `json:"event"` // check
	doctor.Finding
}

type doctorSummary struct {
	Event   string   `json:"event"` // summary
	OK      bool     `json:"ok"`
	Failed  []string `json:"failed"`
	Warned  []string `json:"warned"`
	Skipped []string `json:"skipped"` // not reached, because one before them failed
}

func (r *doctorReport) add(f doctor.Finding) {
	if r.count++; r.count == 1 && !r.json {
		r.printf("%-5s %-28s %s\n", "", "CHECK", "FOUND")
	}
	switch f.Status {
	case doctor.Fail:
		r.failed = append(r.failed, f)
	case doctor.Warn:
		r.warned = append(r.warned, f.Name)
	}
	if r.json {
		r.encode(doctorCheck{"check", f})
		return
	}
	r.printf("%-5s %-28s %s\n", f.Status, f.Name, f.Value)
	for _, line := range []struct{ label, text string }{{"cause", f.Cause}, {"remedy", f.Remedy}} {
		if line.text == "" {
			continue
		}
		if f.Status == doctor.OK {
			line.label = "note"
		}
		r.printf("%-5s %28s %s\n", "", line.label, strings.ReplaceAll(line.text, "\n", "\n"+strings.Repeat(" ", 35)))
	}
}

// end prints the summary. The error names what failed and what to do.
func (r *doctorReport) end(skipped []string) error {
	s := doctorSummary{Event: "summary", OK: len(r.failed) == 0, Failed: []string{}, Warned: append([]string{}, r.warned...), Skipped: append([]string{}, skipped...)}
	var remedies strings.Builder
	for _, f := range r.failed {
		s.Failed = append(s.Failed, f.Name)
		fmt.Fprintf(&remedies, "\n  %s (%s): %s", f.Name, f.Value, f.Remedy)
	}
	if r.json {
		r.encode(s)
	} else {
		r.printf("\n%d checks, %d failed, %d warned\n", r.count, len(s.Failed), len(s.Warned))
		if len(s.Skipped) > 0 {
			r.printf("not reached: %s\n", strings.Join(s.Skipped, ", "))
		}
	}
	if r.err != nil {
		return fmt.Errorf("doctor: print the report: %w", r.err)
	}
	if !s.OK {
		return errors.New("doctor: failed: " + strings.Join(s.Failed, ", ") + remedies.String())
	}
	return nil
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
