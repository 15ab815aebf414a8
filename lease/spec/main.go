// Command spec checks the Promela model of lease verification with SPIN: that it
// has no violation as package lease implements it, and that every broken rule
// shows in the property that it breaks.
//
//	go run ./lease/spec [-j 2] [-run M5]
//
// It needs spin and gcc (apt-get install spin gcc), takes a minute or two, and
// ends with status 1 if anything is not as expected.
package main

import (
	"bytes"
	_ "embed"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
)

//go:embed lease.pml
var model []byte

// run is one verification.
type run struct {
	name    string
	defines string // of the model, without -D
	want    string // "clean", or the property that must be violated: P1 … P7
	what    string
}

const everything = "ABORTS PREEMPTS REVOKES"

var runs = []run{
	{"base", "GEO=0 " + everything, "clean", "each reader reads both ranks; abort, preemption, revocation"},
	{"base", "GEO=1 " + everything, "clean", "each reader reads one rank"},
	{"base", "GEO=2 " + everything, "clean", "one reader reads both ranks, one the second"},
	{"base", "TORN", "clean", "a READ sees a block at two moments"},
	{"base", "NB=2 NS=2 GEO=1 ABORTS REVOKES", "clean", "two blocks and slots"},
	{"base", "NB=2 NS=1", "clean", "two blocks, one slot: some lives have none"},
	{"base", "NQ=3 GEO=1 ABORTS REVOKES", "clean", "three lives"},
	{"reach", "REACH=1", "reached", "a request is received: the proofs above are not about nothing"},
	{"reach", "REACH=2", "reached", "a check fails"},

	{"M1", "", "P1", "the slot is zeroed after the blocks were freed"},
	{"M1", "", "P6", ""},
	{"M2", "GEO=1", "P1", "the slot is read beside the blocks"},
	{"M3", "", "P1", "a slot keeps its nonce over lives"},
	{"M5", "", "P2", "blocks are freed at the first report"},
	{"M5", "", "P6", ""},
	{"M5", "GEO=1", "P1", "… which a reader of one rank cannot see"},
	{"M8", "", "P1", "a renewal revives an ended lease and rewrites the slot"},
	{"M8", "", "P2", ""},
	{"M8", "", "P4", ""},
	{"XEXP1", "", "P1", "params leave when one rank has finished its prefill"},
	{"XEARLY", "PREEMPTS NB=2", "P1", "params are built at the first scheduling"},
	{"XFORCE", "", "P1", "the engine frees leased blocks without revoking"},
	{"XZOMBIE", "", "P1", "a reader pulls again over its own active READ"},
	{"XNZ", "", "P1", "slot ≠ 0 is taken for slot = nonce"},
	{"M4 M5", "", "P1", "one rank's slot is checked, and blocks are freed at the first report"},
	{"M2B M5", "", "P1", "each slot is read after its own rank's blocks, and blocks are freed at the first report"},
	{"M6", "", "P7", "a read-complete without nonce ends any life of the id"},
	{"M7", "", "P5", "the read-complete goes with the READ"},
	{"M10", "", "P5", "N = 1 with two readers"},
	{"XCNT", "", "P5", "messages are counted, not senders"},
	{"M9B", "NB=2", "P3", "the slot is lent again at the first report"},
	{"XABSLOT", "ABORTS NB=2", "P3", "an abort returns the slot at once"},
	{"XGRANT", "", "P4", "a grant revives a life that a read-complete ended"},

	{"M4", "", "clean", "one rank's slot is checked: harmless while blocks wait for all ranks"},
	{"M4", "NB=2", "clean", ""},
	{"M9", "ABORTS", "clean", "the slot is returned before the blocks: harmless while both wait for all ranks"},
	{"M2B", "", "clean", "each slot is read after its own rank's blocks: harmless likewise"},
}

// outcome is what pan said.
type outcome struct {
	states string
	errors bool
	err    error
}

var (
	statesLine = regexp.MustCompile(`(\d+) states, stored`)
	errorsLine = regexp.MustCompile(`errors: (\d+)`)
)

// check builds and runs the verifier of one run.
func (r run) check(dir string) outcome {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return outcome{err: err}
	}
	if err := os.WriteFile(filepath.Join(dir, "lease.pml"), model, 0o600); err != nil {
		return outcome{err: err}
	}
	args := []string{"-a"}
	if r.name != "base" && r.name != "reach" {
		for _, m := range strings.Fields(r.name) {
			args = append(args, "-D"+m)
		}
	}
	for _, d := range strings.Fields(r.defines) {
		args = append(args, "-D"+d)
	}
	// A mutant is caught by the property asked for, and by no other.
	if strings.HasPrefix(r.want, "P") {
		args = append(args, fmt.Sprintf("-DPROPS=%d", 1<<(r.want[1]-'0')))
	} else if r.want == "reached" {
		args = append(args, "-DPROPS=0")
	}
	pan := []string{"-m1000000"}
	if r.want != "clean" && r.want != "P4" {
		pan = append(pan, "-E") // something stuck is P4
	}
	for _, cmd := range []*exec.Cmd{
		exec.Command("spin", append(args, "lease.pml")...),
		exec.Command("gcc", "-O1", "-w", "-DSAFETY", "-DCOLLAPSE", "-DNOCLAIM", "-o", "pan", "pan.c"),
	} {
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil || bytes.Contains(out, []byte("Error:")) {
			return outcome{err: fmt.Errorf("%s: %w\n%s", cmd, err, out)}
		}
	}
	cmd := exec.Command("./pan", pan...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	states, errors := statesLine.FindSubmatch(out), errorsLine.FindSubmatch(out)
	if states == nil || errors == nil || bytes.Contains(out, []byte("max search depth too small")) || bytes.Contains(out, []byte("Search not completed")) && string(errors[1]) == "0" {
		return outcome{err: fmt.Errorf("pan: %w\n%s", err, out)}
	}
	return outcome{states: string(states[1]), errors: string(errors[1]) != "0"}
}

// line says what came out, and whether that is as expected.
func (r run) line(o outcome) (string, bool) {
	if o.err != nil {
		return fmt.Sprintf("%s %s: %v", r.name, r.defines, o.err), false
	}
	var b strings.Builder
	kind := "mutant " + strings.ReplaceAll(r.name, " ", "+")
	if r.name == "base" || r.name == "reach" {
		kind = r.name
	}
	fmt.Fprintf(&b, "%s ", kind)
	ok := o.errors == (r.want != "clean")
	switch {
	case !ok && r.want == "clean":
		b.WriteString("VIOLATED, want no violation; ")
	case !ok:
		fmt.Fprintf(&b, "%s NOT CAUGHT; ", r.want)
	case r.want == "reached":
		b.WriteString("reached ")
	case r.want != "clean":
		fmt.Fprintf(&b, "%s caught ", r.want)
	case r.name != "base":
		b.WriteString("harmless ")
	}
	if r.want == "clean" {
		n := 0
		if o.errors {
			n = 1
		}
		fmt.Fprintf(&b, "errors: %d ", n)
	}
	fmt.Fprintf(&b, "states: %s", o.states)
	if r.defines != "" {
		fmt.Fprintf(&b, " [%s]", r.defines)
	}
	if r.what != "" {
		fmt.Fprintf(&b, " %s", r.what)
	}
	return b.String(), ok
}

func main() {
	parallel := flag.Int("j", runtime.NumCPU(), "verifications at a time")
	only := flag.String("run", "", "only runs whose name and defines contain this")
	flag.Parse()
	for _, tool := range []string{"spin", "gcc"} {
		if _, err := exec.LookPath(tool); err != nil {
			fmt.Fprintf(os.Stderr, "spec: %v; apt-get install spin gcc\n", err)
			os.Exit(2)
		}
	}
	bad, err := checkAll(*parallel, *only)
	if err != nil {
		fmt.Fprintln(os.Stderr, "spec:", err)
		os.Exit(2)
	}
	if bad > 0 {
		fmt.Printf("%d runs are not as expected\n", bad)
		os.Exit(1)
	}
}

// checkAll prints a line for each run, in their order, and counts the bad ones.
func checkAll(parallel int, only string) (bad int, err error) {
	tmp, err := os.MkdirTemp("", "lease-spec-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(tmp)
	type result struct {
		line string
		ok   bool
	}
	results := make([]chan result, len(runs))
	todo := make(chan int, len(runs))
	for i, r := range runs {
		if strings.Contains(r.name+" "+r.defines, only) {
			results[i] = make(chan result, 1)
			todo <- i
		}
	}
	close(todo)
	var workers sync.WaitGroup
	defer workers.Wait()
	for range max(parallel, 1) {
		workers.Go(func() {
			for i := range todo {
				line, ok := runs[i].line(runs[i].check(filepath.Join(tmp, fmt.Sprint(i))))
				results[i] <- result{line, ok}
			}
		})
	}
	for _, c := range results {
		if c == nil {
			continue
		}
		res := <-c
		fmt.Println(res.line)
		if !res.ok {
			bad++
		}
	}
	return bad, nil
}
