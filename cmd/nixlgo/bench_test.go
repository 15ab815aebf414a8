package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

// The header that xferBenchUtils::printStatsHeader prints for two processes, and a row of printStats with
// std::fixed, setprecision(6) for the bandwidth and 1 for the times: benchmark/nixlbench/src/utils/utils.cpp in
// ai-dynamo/nixl. nixl#2170: nobody says what the columns mean; the help does.
const (
	nixlbenchHeader = "Block Size (B)      Batch Size     B/W (GB/Sec)   Avg Lat. (us)  Avg Prep (us)  P99 Prep (us)  Avg Post (us)  P99 Post (us)  " +
		"Avg Tx (us)    P99 Tx (us)    "
	nixlbenchRow = "4096                2              0.081920       50.0           7.0            7.0            1.5            2.0            " +
		"97.3           99.0           "
)

func TestBenchColumnsAreNixlbenchs(t *testing.T) {
	r := benchRow{shape: transferShape{1, 2, 4096}, transfers: 10, perThread: 10,
		raw: rawStats{prep: samples{7}, post: samples{1, 2}, tx: samples{96.04, 98.96}, xfer: samples{5}, total: time.Millisecond}}
	var out bytes.Buffer
	c := benchConfig{}
	rows := newTable(&out, formatText, c.columns())
	rows.row(r.values()...)
	require.NoError(t, rows.end())
	header, row, _ := strings.Cut(out.String(), "\n")
	require.True(t, strings.HasPrefix(header, nixlbenchHeader), header)
	require.Equal(t, "P50 Post (us)  P50 Tx (us)    P50 Xfer (us)  P99 Xfer (us)", strings.TrimPrefix(header, nixlbenchHeader))
	require.Equal(t, strings.Replace(nixlbenchRow, "97.3 ", "97.5 ", 1), row[:len(nixlbenchRow)])

	keys := "block_size batch_size bw_gb_sec avg_lat avg_prep_us p99_prep_us avg_post_us p99_post_us avg_tx_us p99_tx_us"
	for i, key := range strings.Fields(keys) {
		require.Equal(t, key, c.columns()[i].Key)
	}
	help := newBench().Long
	for _, word := range []string{"B/W", "Avg Lat.", "Prep", "Post", "Tx", "Xfer", "Fetch", "Verify", "Margin"} {
		require.Contains(t, help, "\n  "+word+" ")
	}
}

// xferMetricStats::p99 of nixlbench takes the sorted sample at index size × 0.99, and the last one at most.
func TestPercentilesAreNixlbenchs(t *testing.T) {
	var s samples
	require.Zero(t, s.at(0.99))
	require.Zero(t, s.mean())
	for i := 1000; i > 0; i-- {
		s.add(time.Duration(i) * time.Microsecond)
	}
	require.Equal(t, 991.0, s.at(0.99))
	require.Equal(t, 501.0, s.at(0.5))
	require.Equal(t, 1000.0, s.at(1))
	require.Equal(t, 500.5, s.mean())
	require.Equal(t, 100.0, s[900:].at(0.99), "of 100 or less it is the longest")
}

func TestBenchCountsAreNixlbenchs(t *testing.T) {
	c := benchConfig{iterations: 1000, warmup: 100, leaseIterations: 100, largeFactor: 16, threads: 1}
	counts := func(block int) []int { a, b, d := c.counts(block); return []int{a, b, d} }
	require.Equal(t, []int{1000, 100, 100}, counts(1<<20))
	require.Equal(t, []int{62, 6, 10}, counts(1<<20+1))
	c.threads, c.leaseIterations = 3, 5
	require.Equal(t, []int{1002, 102, 5}, counts(4096))
	c.iterations, c.warmup = 1, 0
	require.Equal(t, []int{3, 0, 5}, counts(1<<21))
}

func TestBenchFlagsThatCannotBeServedAreRefused(t *testing.T) {
	parse := func(args ...string) error {
		cmd := newBench()
		cmd.Flags().SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
			return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
		})
		cmd.SetArgs(args)
		cmd.SetOut(io.Discard)
		cmd.SetErr(io.Discard)
		cmd.SilenceUsage, cmd.SilenceErrors = true, true
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // what is accepted does not run
		return cmd.ExecuteContext(ctx)
	}
	for _, c := range []struct{ args, want string }{
		{"--op-type COPY", `"COPY"`},
		{"--backend posix", "storage"},
		{"--initiator_seg_type VRAM", "--initiator-seg-type VRAM: only DRAM"},
		{"--target_seg_type VRAM", "--target-seg-type VRAM: only DRAM"},
		{"--etcd_endpoints http://localhost:2379", "--listen and --connect"},
		{"--scheme tp", "pairs"},
		{"--num_initiator_dev 2", "--device-list"},
		{"--worker_type nvshmem", "only NIXL"},
		{"--enable_pt=false", "always on"},
		{"--device-list=", "--device-list is empty"},
		{"--device-list lo,nope0", `--device-list lo,nope0: there is no device "nope0"; there are: `},
		{"--device_list lo --backend LIBFABRIC", "--device-list is of UCX alone"},
		{"--listen :0 --connect :1", "contradict"},
		{"--listen :0 --op-type READ", "--op-type with --listen"},
		{"--timeout 1ms", "--timeout 1ms"},
		{"--start-block-size 0", "--start-block-size 0"},
		{"--start-block-size 8192 --max-block-size 4096", "--max-block-size 4096"},
		{"--num-iter 0", "--num-iter 0"},
		{"--num-threads 0", "--num-threads 0"},
		{"--pipeline-depth 2", "--pipeline-depth 2"},
		{"--max-batch-size 1024", "--total-buffer-size"},
		{"--total-buffer-size 1000 --max-block-size 4096", "1000 B"},
		{"--lease 1ms", "--lease 1ms"},
		{"--tp 2", "--model"},
		{"--model llama-3.1-8b --max-block-size 4096", "--max-block-size contradicts --model"},
		{"--model gpt-2", "gpt-oss-120b"},
		{"--format xml", "want text, json or csv"},
		{"--json --format csv", "contradicts --json"},
	} {
		err := parse(strings.Fields(c.args)...)
		require.ErrorContains(t, err, c.want, c.args)
	}
}

// A line for nixlbench runs as it is, and every byte is checked on the way. nixl#1332, nixl#1544: which side is which is said.
func TestBenchMeasuresOverRealNIXL(t *testing.T) {
	exe := program(t)
	page := filepath.Join(t.TempDir(), "bench.html")
	code, stdout, stderr := run(t, exe, strings.Fields("bench --backend UCX --op_type READ --start_block_size 4096 --max_block_size 8192 --start_batch_size 2 --max_batch_size 4 "+
		"--num_iter 20 --warmup_iter 4 --num_threads 2 --check_consistency --enable_pt --lease-iter 3 --json --report "+page)...)
	require.Zero(t, code, stderr)
	var sizes [][2]int
	for _, line := range strings.Split(strings.TrimSpace(stdout), "\n") {
		var r map[string]float64
		require.NoError(t, json.Unmarshal([]byte(line), &r), line)
		sizes = append(sizes, [2]int{int(r["block_size"]), int(r["batch_size"])})
		for _, key := range []string{"bw_gb_sec", "avg_lat", "avg_prep_us", "p99_prep_us", "avg_post_us", "p99_post_us", "avg_tx_us", "p99_tx_us", "p50_post_us", "p50_tx_us",
			"p50_xfer_us", "p99_xfer_us", "fetch_gb_sec", "p50_fetch_us", "p99_fetch_us", "verify_us", "verify_percent", "margin_s"} {
			require.Positive(t, r[key], "%s in %s", key, line)
		}
		require.Less(t, r["verify_percent"], 100.0)
		require.LessOrEqual(t, r["margin_s"], 30.0)
		require.GreaterOrEqual(t, r["p99_xfer_us"], r["p50_xfer_us"])
	}
	require.Equal(t, [][2]int{{4096, 2}, {4096, 4}, {8192, 2}, {8192, 4}}, sizes)
	b, err := os.ReadFile(page)
	require.NoError(t, err)
	requireSelfContained(t, string(b))
	for _, text := range []string{"batch of 4", "8 KiB", "read blocks from the memory of a target", "Distribution"} {
		require.Contains(t, string(b), text)
	}

	code, stdout, stderr = run(t, exe, strings.Fields("bench --max-block-size 4096 --num-iter 4 --warmup-iter 0 --start-batch-size 4 --max-batch-size 4 --pipeline-depth 2 "+
		"--prepared-xfer --recreate-xfer --check-consistency --lease-iter 0 --format csv")...)
	require.Zero(t, code, stderr)
	rows, err := csv.NewReader(strings.NewReader(stdout)).ReadAll()
	require.NoError(t, err)
	require.Len(t, rows, 2)
	require.Equal(t, "block_size,batch_size,bw_gb_sec,avg_lat", strings.Join(rows[0][:4], ","))
	require.Equal(t, []string{"4096", "4"}, rows[1][:2])

	model := filepath.Join(t.TempDir(), "config.json")
	require.NoError(t, os.WriteFile(model, []byte(`{"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8}`), 0o600))
	code, stdout, stderr = run(t, exe, strings.Fields("bench --isl 64 --op-type WRITE --check-consistency --model-file "+model)...)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, nixlbenchHeader)
	require.Contains(t, stdout, "\n1024                12 ", "2 heads × 8 × 2 × 2 bytes × 16 tokens, 3 layers × 4 pages")
	require.Contains(t, stdout, "WRITE over UCX; initiator: ")
}

// bench --listen on one machine, --connect on the other.
func TestBenchBetweenTwoSidesThatAreStartedByHand(t *testing.T) {
	exe := program(t)
	target := exec.CommandContext(t.Context(), exe, "bench", "--listen", "127.0.0.1:0", "--timeout", "20s")
	errs, err := target.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, target.Start())
	lines := bufio.NewReader(errs)
	line, err := lines.ReadString('\n')
	require.NoError(t, err)
	fields := strings.Fields(line) // waiting at ADDR for …
	require.Greater(t, len(fields), 2, line)
	addr := fields[2]

	stranger, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	_, err = fmt.Fprintf(stranger, "GET / HTTP/1.1\r\n\r\n")
	require.NoError(t, err)
	line, err = lines.ReadString('\n')
	require.NoError(t, err)
	require.Contains(t, line, stranger.LocalAddr().String()+" does not speak as nixlgo bench does")
	stranger.Close()

	code, stdout, stderr := run(t, exe, "bench", "--connect", addr, "--max-block-size", "4096", "--num-iter", "4", "--warmup-iter", "0", "--lease-iter", "2", "--json")
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, `"margin_s":`)
	rest, err := io.ReadAll(lines)
	require.NoError(t, err)
	require.NoError(t, target.Wait(), string(rest))
}

// nixl#1999: a side that the other never answers hangs for ever there.
func TestBenchThatWaitsInVainSaysForWhom(t *testing.T) {
	exe := program(t)
	code, _, stderr := run(t, exe, "bench", "--listen", "127.0.0.1:0", "--timeout", "200ms")
	require.Equal(t, exitFailed, code)
	require.Contains(t, stderr, "waited 200ms in vain for an initiator to connect to 127.0.0.1:")

	mute, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer mute.Close()
	code, _, stderr = run(t, exe, "bench", "--connect", mute.Addr().String(), "--timeout", "300ms")
	require.Equal(t, exitFailed, code)
	require.Contains(t, stderr, "waited 300ms in vain for the target at "+mute.Addr().String()+" to open its agent")

	mute.Close()
	code, _, stderr = run(t, exe, "bench", "--connect", mute.Addr().String())
	require.Equal(t, exitFailed, code)
	require.Contains(t, stderr, "no target at "+mute.Addr().String())
	require.Contains(t, stderr, "nixlgo bench --listen")
}

// NIXL's own parameter makes lo:1 of lo, which UCX does not have.
func TestBenchUsesTheDevicesOfItsList(t *testing.T) {
	code, stdout, stderr := run(t, program(t), "bench", "--device-list", "lo", "--max-block-size", "4096", "--num-iter", "2", "--warmup-iter", "0", "--lease-iter", "1", "--json")
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, `"block_size":4096`)
	require.NotContains(t, stderr, "not available")
}

// linked is a link and the other end of its connection.
func linked(t *testing.T, wait time.Duration) (*link, net.Conn) {
	here, there := net.Pipe()
	return newLink(t.Context(), "the target at x", here, wait), there
}

func TestLinkSaysWhomItWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, there := linked(t, time.Minute)
		defer l.close()
		start := time.Now()
		err := l.receive(&benchAnswer{}, "fill its buffer")
		require.EqualError(t, err, "waited 1m0s in vain for the target at x to fill its buffer (--timeout)")
		require.Equal(t, time.Minute, time.Since(start))
		_, err = l.call(benchCall{Op: opFill}, "fill its buffer")
		require.EqualError(t, err, "waited 1m0s in vain for the target at x to take a message (--timeout)")

		go fmt.Fprintln(there, `{"error": "it has none"}`)
		go io.Copy(io.Discard, there)
		_, err = l.call(benchCall{Op: opFill}, "fill its buffer")
		require.EqualError(t, err, "the target at x could not fill its buffer: it has none")
	})
}

func TestLinkSaysWhoEnded(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	conn, err := net.Dial("tcp", listener.Addr().String())
	require.NoError(t, err)
	l := newLink(t.Context(), "the target at x", conn, time.Minute)
	defer l.close()
	there, err := listener.Accept()
	require.NoError(t, err)
	_, err = io.WriteString(there, "220 mail.example.org ESMTP\n")
	require.NoError(t, err)
	there.Close()
	require.ErrorContains(t, l.receive(&benchAnswer{}, "fill its buffer"), "the target at x does not speak as nixlgo bench does: \"220 mail")
	err = l.receive(&benchAnswer{}, "fill its buffer")
	require.ErrorIs(t, err, errPeerEnded)
	require.ErrorContains(t, err, "the target at x ended while it was to fill its buffer")
}

func TestTargetWaitsAsLongAsTheInitiatorLives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, there := linked(t, time.Minute)
		target := &benchTarget{cfg: benchCall{Op: opOpen}}
		ended := make(chan error, 1)
		other := newLink(t.Context(), "the initiator at y", there, time.Minute)
		go func() { ended <- target.serve(t.Context(), other) }() // answers an open that was refused
		var a benchAnswer
		require.NoError(t, l.receive(&a, "open"))
		require.Contains(t, a.Error, "a buffer of 0 bytes")
		ctx, cancel := context.WithCancel(t.Context())
		go l.keepAlive(ctx)
		time.Sleep(time.Hour)
		select {
		case err := <-ended:
			t.Fatal("the target gave up: ", err)
		default:
		}
		cancel()
		require.ErrorContains(t, <-ended, "waited 1m0s in vain for the initiator at y to say what comes next")
		l.close()
	})
}

func TestConsistencyCheckCountsWrongBytes(t *testing.T) {
	e, err := openEndpoint("UCX", 4096, targetByte)
	require.NoError(t, err)
	defer e.close()
	require.Zero(t, e.wrong(benchRange{0, 4096}, targetByte))
	e.buffer.Bytes()[100]++
	require.Equal(t, 1, e.wrong(benchRange{0, 4096}, targetByte))
	require.Zero(t, e.wrong(benchRange{101, 50}, targetByte))
	target := benchTarget{end: e, cfg: benchCall{Wait: time.Minute}}
	a, err := target.do(t.Context(), benchCall{Op: opCheck, Fill: targetByte, Ranges: []benchRange{{0, 101}, {90, 11}}})
	require.NoError(t, err)
	require.Equal(t, 2, a.Wrong)
	_, err = target.do(t.Context(), benchCall{Op: opCheck, Ranges: []benchRange{{4000, 97}}})
	require.ErrorContains(t, err, "not in the buffer")
	_, err = target.do(t.Context(), benchCall{Op: opPublish, Batch: 1})
	require.Error(t, err, "no node")
	_, err = target.do(t.Context(), benchCall{Op: "reboot"})
	require.ErrorContains(t, err, `"reboot"`)
}
