//go:build leasefaults

package lease

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// faultCases say which property each fault breaks; verdicts of
// protocol-check.md. Those of the table are seen by the naive table.
var faultCases = []struct {
	name       string
	fault      fault
	properties string // any of these
}{
	{"M1", faultM1, "P1 P6"},
	{"M2", faultM2, "P1"},
	{"M3", faultM3, "P1"},
	{"M5", faultM5, "P1 P2 P6"},
	{"M4+M5", faultM4 | faultM5, "P1 P2 P6"},
	{"M6", faultM6, "P7"},
	{"M8", faultM8, "P1 P2 P3 P4 P6"},
	{"M9B", faultM9B, "P3"},
	{"XNZ", faultXNZ, "P1"},
	{"XABSLOT", faultXABSLOT, "P3"},
	{"XGRANT", faultXGRANT, "P2 P3 P4 P6"},
	{"XCNT", faultXCNT, "P5"},
	{"XSEEN", faultXSEEN, "P5"},
	{"XEARLY", faultXEARLY, "P1 P2 P6"},
	{"XZOMBIE", faultXZOMBIE, "P1"},
	{"XJOIN", faultXJOIN, "P5"},
	{"XBEAT", faultXBEAT, "P5"},
	{"XRELEASE", faultXRELEASE, "P5"},
}

// TestFaultIsCaught plays worlds with one fault switched on until one of them
// violates a property that the fault breaks.
func TestFaultIsCaught(t *testing.T) {
	defer func() { injected = 0 }()
	for _, f := range faultCases {
		t.Run(f.name, func(t *testing.T) {
			injected = f.fault
			others := map[string]int{}
			for seed := range uint64(4000) {
				_, v := play(seeded{rand.New(rand.NewPCG(seed, 1))}, 1500, "")
				if v.is(f.properties) {
					fmt.Printf("caught %s after %d worlds: %s\n", f.name, seed+1, v)
					return
				}
				if v != nil {
					others[v.property]++
				}
			}
			require.Failf(t, "not caught", "%s; other violations: %v", strings.TrimSpace(f.name), others)
		})
	}
}

// The faults of the engine and of the transport around this package.
func TestFaultAroundUsIsCaught(t *testing.T) {
	for name, properties := range map[string]string{"M10": "P5", "XEXP1": "P1", "XFORCE": "P1 P2 P6"} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(4000) {
				if _, v := play(seeded{rand.New(rand.NewPCG(seed, 1))}, 1500, name); v.is(properties) {
					fmt.Printf("caught %s after %d worlds: %s\n", name, seed+1, v)
					return
				}
			}
			require.Fail(t, "not caught")
		})
	}
}

func TestFaultOfDeadlinesIsCaught(t *testing.T) {
	defer func() { injected = 0 }()
	for name, f := range map[string]fault{"XREAP": faultXREAP, "XSHORT": faultXSHORT} {
		t.Run(name, func(t *testing.T) {
			injected = f
			for seed := range uint64(1000) {
				if diff := compareTables(t, t, seeded{rand.New(rand.NewPCG(seed, 1))}, 300); diff != "" {
					fmt.Printf("caught %s after %d tables: %s\n", name, seed+1, diff)
					return
				}
			}
			require.Fail(t, "not caught")
		})
	}
}

// M4 alone is harmless, as blocks are freed only after every rank zeroed.
func TestHarmlessFaultStaysHarmless(t *testing.T) {
	defer func() { injected = 0 }()
	injected = faultM4
	for seed := range uint64(200) {
		_, v := play(seeded{rand.New(rand.NewPCG(seed, 2))}, 1500, "")
		require.Nil(t, v, "seed %d", seed)
	}
}

func (v *violation) is(properties string) bool {
	return v != nil && slices.Contains(strings.Fields(properties), v.property)
}
