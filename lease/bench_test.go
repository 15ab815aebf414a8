package lease

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// benchTable is a table of n granted leases whose targets come in random order.
func benchTable(b *testing.B, n int) (*Table, []Target) {
	t, err := NewTable(TableConfig{Extension: 20 * time.Second, Slots: NewSlots(make([]int64, n))})
	if err != nil {
		b.Fatal(err)
	}
	targets := make([]Target, n)
	for i := range targets {
		targets[i] = Target{fmt.Sprintf("cmpl-%032x-0-%08x", i, i), i, int64(i) + 1<<32}
		if t.Admit(t0, Admission{targets[i].Request, targets[i].Nonce, i}) != nil ||
			t.Grant(t0, Grant{Request: targets[i].Request, Nonce: targets[i].Nonce, TTL: 30 * time.Second, Exported: true}) != nil {
			b.Fatal("refused")
		}
	}
	rand.New(rand.NewPCG(1, 2)).Shuffle(n, func(i, j int) { targets[i], targets[j] = targets[j], targets[i] })
	return t, targets
}

var benchSizes = []int{1e3, 1e4, 1e5, 1e6}

type appendFunc func([]byte, []Target, int) ([]byte, []Target, error)

func benchRenewal(b *testing.B, add appendFunc) {
	for _, n := range benchSizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			t, targets := benchTable(b, n)
			var messages [][]byte
			for len(targets) > 0 {
				msg, rest, err := add(nil, targets, 0)
				if err != nil {
					b.Fatal(err)
				}
				messages, targets = append(messages, msg), rest
			}
			now := t0
			b.ReportAllocs()
			for b.Loop() {
				now = now.Add(time.Second)
				for _, m := range messages {
					if t.Notify(now, "D", m) != nil {
						b.Fatal("refused")
					}
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/lease")
		})
	}
}

func BenchmarkRenewByID(b *testing.B)   { benchRenewal(b, AppendHeartbeat) }
func BenchmarkRenewBySlot(b *testing.B) { benchRenewal(b, AppendSlotHeartbeat) }

func BenchmarkIdleReap(b *testing.B) {
	for _, n := range benchSizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			t, _ := benchTable(b, n)
			b.ReportAllocs()
			for b.Loop() {
				t.Reap(t0)
			}
		})
	}
}

// A life from admission to its read-complete, beside n others.
func BenchmarkLife(b *testing.B) {
	for _, n := range benchSizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			t, targets := benchTable(b, n)
			var msgs [][]byte
			for _, tg := range targets[:1000] {
				msgs = append(msgs, AppendReadComplete(nil, tg.Request, 1, tg.Nonce))
			}
			ended := make([]Ended, 0, 16)
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				k := i % 1000
				i++
				tg := targets[k]
				if t.Notify(t0, "D", msgs[k]) != nil || t.Admit(t0, Admission{tg.Request, tg.Nonce, tg.Slot}) != nil ||
					t.Grant(t0, Grant{Request: tg.Request, Nonce: tg.Nonce, TTL: 30 * time.Second, Exported: true}) != nil {
					b.Fatal("refused")
				}
				ended = t.Ended(ended[:0])
			}
		})
	}
}

func BenchmarkPlan(b *testing.B) {
	s, err := NewScheduler(SchedulerConfig{Config: DefaultConfig(), Engine: "D", Blocks: 1})
	if err != nil {
		b.Fatal(err)
	}
	for i := range 100_000 {
		p := &Params{DoRemotePrefill: true, RemoteEngineID: fmt.Sprint("P", i%1000), RemoteRequestID: fmt.Sprintf("cmpl-%032x", i), RemoteHost: "h", RemotePort: 1,
			Lease: &SlotRef{i, int64(i) + 1}}
		if err := s.OnNewRequest(t0, fmt.Sprint(i), p); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("due", func(b *testing.B) {
		now := t0
		b.ReportAllocs()
		for b.Loop() {
			now = now.Add(5 * time.Second)
			s.BuildPlan(now)
		}
	})
	b.Run("idle", func(b *testing.B) {
		s.BuildPlan(t0)
		b.ReportAllocs()
		for b.Loop() {
			s.BuildPlan(t0)
		}
	})
}
