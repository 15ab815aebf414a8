package nixl

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// resources are what a process holds.
type resources struct {
	Agents   int // that came and went
	Resident int // KiB of memory
	Threads  int
	Files    int
}

func resourcesNow(t *testing.T, agents int) resources {
	debug.FreeOSMemory()
	r := resources{Agents: agents, Files: openFiles(t)}
	status, err := os.ReadFile("/proc/self/status")
	require.NoError(t, err)
	for line := range strings.Lines(string(status)) {
		for prefix, v := range map[string]*int{"VmRSS:": &r.Resident, "Threads:": &r.Threads} {
			if rest, ok := strings.CutPrefix(line, prefix); ok {
				_, err := fmt.Sscan(rest, v)
				require.NoError(t, err)
			}
		}
	}
	return r
}

const churnVariable = "NIXLGO_TEST_CHURN"

// Agents without a backend come and go, then readers of an owner that stays: each registers memory, reads, notifies,
// and is closed, every other one with all that it made still open. What the process holds after a third of them is
// all that it ever holds. The library itself leaves 0.3 KiB per reader, measured in C. ai-dynamo/modelexpress#555, cases.md 16
func TestThousandAgentsInTurn(t *testing.T) {
	n := 1000
	if testing.Short() {
		n = 100
	}
	file := os.Getenv(churnVariable)
	if file != "" { // the process of their own
		out, err := os.Create(file)
		require.NoError(t, err)
		defer out.Close()
		report := func(i int) {
			if i == n/3 || i == n {
				require.NoError(t, json.NewEncoder(out).Encode(resourcesNow(t, i)))
			}
		}
		for i := 1; i <= n; i++ {
			a, err := NewAgent("", Config{})
			require.NoError(t, err)
			require.NoError(t, a.Close())
			report(i)
		}
		owner := newUCX(t, Config{})
		src := registered(t, owner, 1<<16)
		for i := 1; i <= n; i++ {
			src.Bytes()[1<<15] = byte(i)
			t.Run(fmt.Sprint(i), func(t *testing.T) { shortLivedReader(t, owner, src, i%2 == 0) })
			report(i)
		}
		return
	}
	t.Parallel()
	file = filepath.Join(t.TempDir(), "resources")
	c := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.short="+fmt.Sprint(testing.Short()))
	c.Env = append(os.Environ(), churnVariable+"="+file)
	if !lacks(t, "nixl_capi_opt_args_set_custom_param") { // the UCX of NIXL 0.10 does not connect by lo alone
		c.Env = append(c.Env, "UCX_NET_DEVICES=lo") // a device more costs a backend 4 ms more
	}
	out, err := c.CombinedOutput()
	require.NoError(t, err, "%s", out)
	text, err := os.Open(file)
	require.NoError(t, err)
	defer text.Close()
	in := json.NewDecoder(text)
	for _, kind := range []string{"without a backend", "UCX"} {
		var early, late resources

		require.NoError(t, in.Decode(&early))
		require.NoError(t, in.Decode(&late))
		t.Logf("%s: %+v, %+v", kind, early, late)
		require.Equal(t, n, late.Agents)
		require.LessOrEqual(t, late.Files, early.Files, kind)
		require.LessOrEqual(t, late.Threads, early.Threads+4, "%s: Go may want one more now and then", kind)
		if !testing.Short() { // of a hundred agents the memory says little, and with the race detector nothing
			require.LessOrEqual(t, late.Resident, early.Resident+4<<10, "%s: an agent that stays takes 800 KiB", kind)
		}
	}
}

// shortLivedReader is an agent that reads what the owner has.
func shortLivedReader(t *testing.T, owner *Agent, src *Buffer, tidy bool) {
	l := &link{owner: owner, reader: newUCX(t, Config{}), src: src}
	dst, err := AllocBuffer(src.Len())
	require.NoError(t, err)
	l.dst = dst
	memory, err := l.reader.Register(dst)
	require.NoError(t, err)
	introduce(t, owner, l.reader)
	introduce(t, l.reader, owner)
	l.prepare(t, 4096)
	x := l.read(t, TransferOptions{Notification: []byte("read")})
	finish(t, x)
	require.Equal(t, src.Bytes(), dst.Bytes())
	require.Len(t, receive(t, owner, 1), 1)
	require.NoError(t, owner.Notify(l.reader.Name(), []byte("released")))
	receive(t, l.reader, 1)
	if tidy {
		require.NoError(t, x.Close())
		require.NoError(t, l.local.Close())
		require.NoError(t, l.remote.Close())
		require.NoError(t, memory.Close())
		require.NoError(t, l.reader.InvalidateRemote(owner.Name()))
	}
	require.NoError(t, l.reader.Close())
	require.NoError(t, dst.Close())
	require.NoError(t, owner.InvalidateRemote(l.reader.Name()))
}
