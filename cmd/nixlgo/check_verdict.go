package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// The answers of check.
const (
	checkTransferred = "transferred"
	checkRecomputed  = "recomputed"
	checkWrong       = "wrong"
	checkUnknown     = "unknown"
)

// checkFacts is what check has seen.
type checkFacts struct {
	promptTokens int
	noHandoff    error  // P's answer has nothing that D could read
	refused      error  // D answered no 200
	differs      string // how D's answer differs from P's; empty: it does not
	d, p         counters
	dMetrics     error         // why there are no counters of D
	leaseLeft    time.Duration // when D had answered, without heartbeats
	before       []string      // hashes of P's blocks before D was asked, and after; nil: not read
	after        []string
	own          []string // hashes of D's full blocks, when it says which they are
}

// judge says what happened, and why that is so.
func (f *checkFacts) judge() (answer, why string) {
	moved, evidence := f.moved()
	switch {
	case f.refused != nil:
		return checkWrong, fmt.Sprintf("D cannot use what P has: %v%s", f.refused, f.failures())
	case f.differs != "" && moved == checkTransferred:
		return checkWrong, f.differs + ", although " + evidence + ": the sides differ in model, dtype, block size or layout, or the blocks were overwritten before D had read them" + f.overwritten()
	case f.differs != "":
		return checkWrong, f.differs + ", and " + evidence + ": the sides differ in model, dtype or version"
	case f.noHandoff != nil:
		return checkRecomputed, fmt.Sprintf("P offers nothing to read: %v. It has no KV connector, or something on the way drops kv_transfer_params", f.noHandoff)
	case moved == checkTransferred && len(f.own) > 0 && !slices.Equal(f.own, f.before[:min(len(f.own), len(f.before))]):
		return checkWrong, "the full blocks that D holds are not P's, byte for byte"
	case moved == checkTransferred && f.expired():
		return checkWrong, fmt.Sprintf("the lease ran out before D had read, so D read blocks that P held for nobody; that they were still there is luck (%s)", evidence)
	case moved == checkRecomputed:
		return moved, evidence + f.failures()
	}
	return moved, evidence
}

// moved says whether D got the KV cache of the prompt, from what D counts. Others may have used D meanwhile.
func (f *checkFacts) moved() (answer, evidence string) {
	need := float64(max(f.promptTokens/2, 1))
	d := f.d
	switch {
	case f.dMetrics != nil:
		return checkUnknown, fmt.Sprintf("D's counters cannot be read (%v): give --metrics-d", f.dMetrics)
	case d.external >= 0 && d.external < need && d.bytes < 0:
		return checkRecomputed, "D has no series vllm:nixl_*: it runs without the NixlConnector"
	case d.external >= 0 && d.external < need:
		return checkRecomputed, fmt.Sprintf("D took %.0f of %d prompt tokens from elsewhere and computed %.0f", d.external, f.promptTokens, d.computed)
	case d.external >= 0 && (d.computed < 0 && d.requests <= 1 || d.computed >= 0 && d.computed < float64(f.promptTokens)):
		return checkTransferred, fmt.Sprintf("D took %.0f prompt tokens from elsewhere and computed %.0f", d.external, max(d.computed, 0))
	case d.external < 0 && d.bytes == 0:
		return checkRecomputed, "D read nothing over NIXL"
	case d.external < 0 && d.bytes > 0 && d.requests <= 1:
		return checkTransferred, fmt.Sprintf("D read %.0f bytes over NIXL", d.bytes)
	case d.external < 0 && d.bytes < 0:
		return checkUnknown, "D counts neither prompt tokens by source nor NIXL transfers"
	}
	return checkUnknown, fmt.Sprintf("D served %.0f requests meanwhile, which computed %.0f prompt tokens and took %.0f from elsewhere: repeat when it is quieter", d.requests, max(d.computed, 0), max(d.external, 0))
}

// expired reports whether P had let the blocks go before D was done.
func (f *checkFacts) expired() bool { return f.p.expired > 0 && f.leaseLeft < 0 }

// failures are what D counted as failed.
func (f *checkFacts) failures() string {
	var s []string
	if f.d.failed > 0 {
		s = append(s, fmt.Sprintf("D counts %.0f failed transfers or handshakes (its log names them; a compatibility hash that differs is one)", f.d.failed))
	}
	if f.expired() {
		s = append(s, fmt.Sprintf("P's lease ran out %.1f s before D answered", -f.leaseLeft.Seconds()))
	}
	if len(s) == 0 {
		return ""
	}
	return "; " + strings.Join(s, "; ")
}

func (f *checkFacts) overwritten() string {
	switch f.kept() {
	case "yes":
		return " (P's blocks are as they were)"
	case "no":
		return " (P's blocks have other bytes by now)"
	}
	return ""
}

// kept is yes, no or unknown: whether P's blocks were after D's answer as they were before.
func (f *checkFacts) kept() string {
	switch {
	case f.before == nil || f.after == nil:
		return "unknown"
	case slices.Equal(f.before, f.after):
		return "yes"
	}
	return "no"
}
