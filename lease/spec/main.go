// Command spec checks the Promela models of the leases with SPIN: that they have
// no violation as package lease implements them, and that every broken rule
// shows in the property that it breaks.
//
//	go run ./lease/spec [-j 2] [-run M5] [-long]
//
// It needs spin and gcc (apt-get install spin gcc), takes a few minutes, with
// -long ten, and ends with status 1 if anything is not as expected.
//
// The states are stored whole, none as a hash (COLLAPSE). The partial order
// reduction of SPIN leaves out orders of statements that no other process can
// see; what is checked are assertions about what all can see, and states in which
// nothing can happen, and both are kept. With -long everything is checked once
// more without it.
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

// lease.pml: one owner with several ranks. sharing.pml: who may end a lease.
var (
	//go:embed lease.pml
	leaseModel []byte
	//go:embed sharing.pml
	sharingModel []byte
)

// run is one verification. Its name is that of the rule that is broken, or
//
//	base   no rule is broken
//	reach  a state that has to be possible, so that base is not about nothing
//	limit  what no implementation can promise on this wire; see lease.pml
type run struct {
	name    string
	defines string // of the model, without -D
	want    string // "clean", "reached", or the property that must be violated: P1 … P8
	what    string
}

// mutant says that a rule is broken.
func (r run) mutant() bool { return r.name != "base" && r.name != "reach" && r.name != "limit" }

// suite are the runs of one model.
type suite struct {
	model []byte
	runs  []run
}

// short is what is run without -long.
var short = []suite{{leaseModel, leaseRuns}, {sharingModel, sharingRuns}}

// long are the runs that take too long for every day.
var long = []suite{{leaseModel, longLeaseRuns}, {sharingModel, longSharingRuns}}

const everything = "ABORTS PREEMPTS REVOKES"

var leaseRuns = []run{
	{"base", "GEO=0 " + everything, "clean", "each reader reads both ranks; abort, preemption, revocation"},
	{"base", "GEO=1 " + everything, "clean", "each reader reads one rank"},
	{"base", "GEO=2 " + everything, "clean", "one reader reads both ranks, one the second"},
	{"base", "TORN", "clean", "a READ sees a block at two moments"},
	{"base", "NB=2 NS=2 GEO=1 ABORTS REVOKES", "clean", "two blocks and slots"},
	{"base", "NB=2 NS=1", "clean", "two blocks, one slot: some lives have none"},
	{"base", "NQ=3 GEO=1 ABORTS REVOKES", "clean", "three lives"},
	{"base", "GEO=3 SEVERAL GIVEUPS ABORTS REVOKES", "clean", "readers of two engines, which read one life after another or release it unread"},
	{"base", "GEO=0 GIVEUPS", "clean", "releases after failed reads and of requests that were given up"},
	{"base", "GEO=1 GIVEUPS RETRIES ABORTS REVOKES", "clean", "… and another read of what was left"},
	{"base", "GEO=1 REPEATS ABORTS", "clean", "a rank's report comes twice"},
	{"base", "GEO=0 REFUSES ABORTS", "clean", "a rank refuses an admission"},
	{"base", "GEO=1 REFUSES ABORTS PREEMPTS", "clean", ""},
	{"base", "READBACK GEO=0", "clean", "the owner read the blocks from another engine"},
	{"base", "READBACK GEO=1 REFUSES ABORTS", "clean", "… and may be refused, or give up, while that READ is active"},
	{"base", "RESTARTS GEO=0", "clean", "another scheduler takes over, whose ranks still have lives of the one before"},
	{"base", "RESTARTS NS=2 GEO=1 ABORTS", "clean", ""},
	{"base", "RESTARTS READBACK GEO=1 ABORTS", "clean", "… while READs of the one before are active"},
	{"base", "OFFERED NS=0 NQ=3 GEO=3 SEVERAL GIVEUPS", "clean", "lives without a slot, reports without a nonce"},
	{"base", "OFFERED NS=0 NQ=3 GEO=1 SEVERAL", "clean", ""},
	{"base", "OFFERED NS=0 GEO=1 GIVEUPS ABORTS REVOKES", "clean", ""},
	{"base", "OFFERED NB=2 GEO=3 SEVERAL", "clean", "lives with and without a slot"},
	{"base", "OFFERED NS=0 NQ=3 GEO=3 SEVERAL UNIQUE", "clean", "no id is used twice"},
	{"base", "OLD NQ=3 GEO=3 SEVERAL", "clean", "a reader that knows no slots beside one that checks"},
	{"base", "OLD GEO=0 ABORTS REVOKES", "clean", ""},
	{"base", "OLD NQ=3 GEO=3 SEVERAL LATE CHECKED PROPS=478", "clean", "checked reads get the right bytes (P1) even where a report is taken for another life's"},
	{"limit", "OFFERED NS=0 NQ=3 GEO=3 SEVERAL LATE", "P1", "a report without a nonce that comes when the next life of its id is exported is taken for that life's"},
	{"limit", "OLD GEO=3 SEVERAL LATE", "P5", "… which costs a reader that checks its lease, if that life has a slot"},
	{"reach", "REACH=1", "reached", "a request is received: the proofs above are not about nothing"},
	{"reach", "REACH=2", "reached", "a check fails"},
	{"reach", "REACH=1 READBACK ABORTS", "reached", ""},
	{"reach", "REACH=1 OFFERED NS=0", "reached", ""},
	{"reach", "REACH=1 RESTARTS", "reached", ""},

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
	{"XSEEN", "SEVERAL", "P5", "senders are kept per id, over lives"},
	{"XKEPT", "OFFERED NS=0 NQ=3 GEO=3 SEVERAL", "P1", "a report without a nonce that matches nothing is kept for a life without a slot"},
	{"XWAIT", "OFFERED NS=0 NQ=3 GEO=3 SEVERAL", "P1", "… counts for a life that is admitted and not granted"},
	{"XTWICE", "REPEATS", "P2", "reports are counted, not the ranks that reported"},
	{"XTWICE", "REPEATS GEO=1", "P1", ""},
	{"XREFUSE", "REFUSES", "P8", "a refused admission is not reported"},
	{"XPARAMS", "REFUSES", "P5", "params of a life that a rank refused leave all the same"},
	{"XPARAMS", "REFUSES OFFERED NS=0 GEO=1", "P1", ""},
	{"XLEAK", "ABORTS", "P8", "the ranks are not told of an abort before the export"},
	{"XBLIND", "REVOKES", "P1", "a rank that refuses a plan reports what it has to abort, and does not zero the slot"},
	{"XBLIND", "REVOKES", "P6", ""},
	{"XSETTLE", "READBACK ABORTS", "P1", "blocks are freed while a READ writes to them"},
	{"XRECOMPUTE", "READBACK", "P1", "… or computed anew"},
	{"XEXP1", "READBACK", "P1", "params leave when one rank has read its blocks"},
	{"XRESTART", "RESTARTS NS=2", "P1", "a rank keeps the lives of the scheduler before"},
	{"XRESTART", "RESTARTS NS=2", "P2", ""},
	{"XOLDREAD", "RESTARTS READBACK", "P1", "a rank admits lives while a READ of the scheduler before is active"},

	{"M4", "", "clean", "one rank's slot is checked: harmless while blocks wait for all ranks"},
	{"M4", "NB=2", "clean", ""},
	{"M9", "ABORTS", "clean", "the slot is returned before the blocks: harmless while both wait for all ranks"},
	{"M2B", "", "clean", "each slot is read after its own rank's blocks: harmless likewise"},
}

var sharingRuns = []run{
	{"base", "NK=3", "clean", "three requests of an engine share leases; a router holds and releases"},
	{"base", "NK=3 UNCHECKED", "clean", "… without slots and nonces"},
	{"base", "NK=3 WITHDRAWS", "clean", "… and a request takes back a release that has not left"},
	{"base", "NK=3 HEALTHY", "clean", "what is renewed does not run out, and nobody keeps a lease that is not needed"},
	{"base", "NK=3 HEALTHY UNCHECKED", "clean", ""},
	{"base", "NE=2 NK=2", "clean", "two engines, one after the other"},
	{"base", "NE=2 NK=1 HEALTHY", "clean", ""},
	{"base", "NO=2 NL=1", "clean", "two owners of one id"},
	{"base", "NO=2 NL=1 HEALTHY", "clean", ""},
	{"base", "NO=2 NL=2 UNCHECKED", "clean", ""},
	{"reach", "REACH=1", "reached", "a request is received"},
	{"reach", "REACH=1 HEALTHY UNCHECKED", "reached", ""},
	{"reach", "REACH=2", "reached", "a check fails"},

	{"XKEEP", "", "P5", "when the READ is posted it is decided whether its end ends the lease"},
	{"XKEEP", "UNCHECKED", "P1", ""},
	{"XEACH", "", "P5", "every request releases the lease when it ends"},
	{"XEACH", "UNCHECKED", "P1", ""},
	{"XNEXT", "", "P5", "a request that comes when the release was decided, and has not left, does not take it back"},
	{"XNEXT", "UNCHECKED", "P1", ""},
	{"XRELEASE", "", "P2", "the owner is released while a READ is active"},
	{"XFAILED", "NE=2 NK=1", "P5", "a reader that failed releases the owner, and the router tries the next"},
	{"XROUTE", "", "P5", "a router releases what it gave to a reader"},
	{"XROUTE", "UNCHECKED", "P1", ""},
	{"XBEAT", "HEALTHY", "P5", "the first of two requests to end stops the heartbeats of both"},
	{"XSTILL", "HEALTHY", "P8", "the heartbeats of a request outlive it"},
	{"XADDR", "NO=2 HEALTHY", "P5", "messages go to the address of the engine's first request"},
	{"XADDR", "NO=2 UNCHECKED", "P1", ""},
	{"XPEER", "NO=2 NL=1", "P5", "blocks and slots are read there"},
	{"XPEER XNONCE", "NO=2 NL=1", "P1", "… and two owners lend the same nonces"},
	{"XCHECK", "NO=2 NL=1", "P5", "slots are read there, and blocks where they are"},
	{"XCHECK XNONCE", "NO=2", "P1", "… and two owners lend the same nonces"},
	{"XBARE", "LATE", "P5", "a release does not carry the nonce of its lease"},
	{"XLAPSED XBARE", "LATE", "P5", "… and is sent after a lapse"},

	{"XLAPSED", "", "clean", "a release after a lapse: harmless with its nonce"},
	{"XNONCE", "NO=2 NL=1", "clean", "two owners lend the same nonces: harmless while leases are kept by address"},
}

var longLeaseRuns = []run{
	{"base", "GEO=0 GIVEUPS RETRIES ABORTS REVOKES", "clean", "releases, and reads of what was left, of both ranks"},
	{"base", "READBACK NB=2 GEO=1 ABORTS REVOKES", "clean", "two lives at a time whose blocks were read"},
	{"base", "RESTARTS NS=2 GEO=0", "clean", ""},
	{"base", "OFFERED NB=2 NQ=3 GEO=1", "clean", "lives with and without a slot"},
}

var longSharingRuns = []run{
	{"base", "NO=2 NL=2", "clean", "two owners of one id, two lives each"},
	{"base", "NO=2 NL=2 HEALTHY", "clean", ""},
	{"base", "NE=2 NK=2 HEALTHY", "clean", "two engines of two requests"},
}

// outcome is what pan said.
type outcome struct {
	states string
	took   string // seconds
	errors bool
	err    error
}

var (
	statesLine = regexp.MustCompile(`(\d+) states, stored`)
	timeLine   = regexp.MustCompile(`elapsed time ([0-9.]+) seconds`)
	errorsLine = regexp.MustCompile(`errors: (\d+)`)
)

// check builds and runs the verifier of one run.
func (r run) check(dir string, model []byte, flags ...string) outcome {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return outcome{err: err}
	}
	if err := os.WriteFile(filepath.Join(dir, "model.pml"), model, 0o600); err != nil {
		return outcome{err: err}
	}
	args := []string{"-a"}
	if r.mutant() {
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
	optimise := "-O0" // a mutant is caught sooner than optimised
	if r.want == "clean" {
		optimise = "-O1"
	}
	for _, cmd := range []*exec.Cmd{
		exec.Command("spin", append(args, "model.pml")...),
		exec.Command("gcc", append(flags, optimise, "-w", "-DSAFETY", "-DCOLLAPSE", "-DNOCLAIM", "-DMEMLIM=8000", "-o", "pan", "pan.c")...),
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
	o := outcome{states: string(states[1]), errors: string(errors[1]) != "0"}
	if took := timeLine.FindSubmatch(out); took != nil {
		o.took = string(took[1])
	}
	return o
}

// line says what came out, and whether that is as expected.
func (r run) line(o outcome) (string, bool) {
	if o.err != nil {
		return fmt.Sprintf("%s %s: %v", r.name, r.defines, o.err), false
	}
	var b strings.Builder
	kind := r.name
	if r.mutant() {
		kind = "mutant " + strings.ReplaceAll(r.name, " ", "+")
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
	case r.name == "limit":
		fmt.Fprintf(&b, "%s violated, as it must be; ", r.want)
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
	if o.took != "" {
		fmt.Fprintf(&b, " in %s s", o.took)
	}
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
	all := flag.Bool("long", false, "the runs that take long, and the base without partial order reduction, instead of the usual runs")
	flag.Parse()
	for _, tool := range []string{"spin", "gcc"} {
		if _, err := exec.LookPath(tool); err != nil {
			fmt.Fprintf(os.Stderr, "spec: %v; apt-get install spin gcc\n", err)
			os.Exit(2)
		}
	}
	bad, err := checkAll(jobs(*all, *only), *parallel)
	if err != nil {
		fmt.Fprintln(os.Stderr, "spec:", err)
		os.Exit(2)
	}
	if bad > 0 {
		fmt.Printf("%d runs are not as expected\n", bad)
		os.Exit(1)
	}
}

// job is a run of a model.
type job struct {
	run
	model []byte
	flags []string // of the compiler
}

// jobs are the runs whose name and defines contain only.
func jobs(all bool, only string) (js []job) {
	add := func(suites []suite, flags ...string) {
		for _, s := range suites {
			for _, r := range s.runs {
				if strings.Contains(r.name+" "+r.defines, only) && (len(flags) == 0 || r.name == "base") {
					js = append(js, job{r, s.model, flags})
				}
			}
		}
	}
	if !all {
		add(short)
		return js
	}
	add(long)
	add(short, "-DNOREDUCE")
	return js
}

// checkAll prints a line for each job, in their order, and counts the bad ones.
func checkAll(js []job, parallel int) (bad int, err error) {
	tmp, err := os.MkdirTemp("", "lease-spec-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(tmp)
	type result struct {
		line string
		ok   bool
	}
	results := make([]chan result, len(js))
	todo := make(chan int, len(js))
	for i := range js {
		results[i] = make(chan result, 1)
		todo <- i
	}
	close(todo)
	var workers sync.WaitGroup
	defer workers.Wait()
	for range max(parallel, 1) {
		workers.Go(func() {
			for i := range todo {
				j := js[i]
				line, ok := j.line(j.check(filepath.Join(tmp, fmt.Sprint(i)), j.model, j.flags...))
				results[i] <- result{strings.Join(append([]string{line}, j.flags...), " "), ok}
			}
		})
	}
	for _, c := range results {
		res := <-c
		fmt.Println(res.line)
		if !res.ok {
			bad++
		}
	}
	return bad, nil
}
