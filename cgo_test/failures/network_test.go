package failures

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
)

// network is two network namespaces joined by a veth pair.
type network struct {
	t     testing.TB
	sides [2]side
	netem bool // or a rule of iptables, where the kernel has no netem
}

type side struct{ namespace, device, address string }

func newNetwork(t testing.TB) *network {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: network namespaces need root with CAP_NET_ADMIN and CAP_SYS_ADMIN")
	}
	need(t, "ip", "iproute2")
	n := &network{t: t}
	for i := range n.sides {
		n.sides[i] = side{fmt.Sprintf("nixlgo-%d-%d", os.Getpid(), i), fmt.Sprintf("nlg%d%c", os.Getpid()%100000, 'a'+i), fmt.Sprintf("10.201.7.%d", i+1)}
	}
	a, b := n.sides[0], n.sides[1]
	for _, s := range n.sides {
		if out, err := exec.Command("ip", "netns", "add", s.namespace).CombinedOutput(); err != nil {
			if strings.Contains(string(out), "not permitted") {
				t.Skipf("SKIPPED: ip netns add needs CAP_SYS_ADMIN: %s", out)
			}
			t.Fatalf("ip netns add: %v: %s", err, out)
		}
		t.Cleanup(func() { n.run("ip", "netns", "del", s.namespace) })
	}
	n.run("ip", "link", "add", a.device, "netns", a.namespace, "type", "veth", "peer", "name", b.device, "netns", b.namespace)
	for _, s := range n.sides {
		n.in(s, "ip", "addr", "add", s.address+"/24", "dev", s.device)
		n.in(s, "ip", "link", "set", "lo", "up")
		n.in(s, "ip", "link", "set", s.device, "up")
	}
	for _, s := range n.sides {
		require.Eventually(t, func() bool {
			out, err := exec.Command("ip", "-n", s.namespace, "link", "show", "dev", s.device).Output()
			return err == nil && strings.Contains(string(out), "state UP")
		}, patience, time.Millisecond)
	}
	out, err := exec.Command("ip", "netns", "exec", a.namespace, "tc", "qdisc", "add", "dev", a.device, "root", "netem", "loss", "0%").CombinedOutput()
	n.netem = err == nil
	if !n.netem {
		t.Logf("netem: %s; packets are dropped by iptables instead", strings.TrimSpace(string(out)))
		need(t, "iptables-legacy", "iptables")
	}
	return n
}

// need skips the test where a program is missing, but for CI, which installs it.
func need(t testing.TB, program, debianPackage string) {
	t.Helper()
	if _, err := exec.LookPath(program); err == nil {
		return
	}
	if os.Getenv("CI") != "" {
		t.Fatalf("%s is missing (Debian: apt-get install %s)", program, debianPackage)
	}
	t.Skipf("SKIPPED: %s is missing (Debian: apt-get install %s)", program, debianPackage)
}

func (n *network) run(name string, args ...string) {
	n.t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	require.NoError(n.t, err, "%s %s: %s", name, args, out)
}

func (n *network) in(s side, args ...string) {
	n.t.Helper()
	n.run("ip", append([]string{"netns", "exec", s.namespace}, args...)...)
}

// lose drops percent of the packets between the sides, both ways.
func (n *network) lose(percent int) {
	n.t.Helper()
	for _, s := range n.sides {
		if n.netem {
			n.in(s, "tc", "qdisc", "replace", "dev", s.device, "root", "netem", "loss", fmt.Sprintf("%d%%", percent))
			continue
		}
		n.in(s, "iptables-legacy", "-F", "INPUT")
		if percent > 0 {
			n.in(s, "iptables-legacy", "-A", "INPUT", "-i", s.device, "-m", "statistic", "--mode", "random",
				"--probability", fmt.Sprintf("%.2f", float64(percent)/100), "-j", "DROP")
		}
	}
}

func (n *network) launch(name string, i int, env ...string) *process {
	n.t.Helper()
	s := n.sides[i]
	return launch(n.t, name, setup{Host: s.address}, where{s.namespace, append(env, "UCX_NET_DEVICES="+s.device)})
}

// A cut of the network in the middle of a READ fails the fetch by its deadline, or as soon as the transport sees it. The
// owner has its blocks back, its neighbours notice nothing, and the same reader fetches again once the network is whole.
// nixl#2047, wtdcode/vllm-backport#33, cases.md 4, 14
func TestNetworkIsCutInTheMiddleOfAREAD(t *testing.T) {
	n := newNetwork(t)
	const early = "UCX_TCP_USER_TIMEOUT=1s" // instead of 10 s: the transport gives up while the network is cut
	owner, third, reader, queued := n.launch("owner", 0, early), n.launch("third", 0, early), n.launch("reader", 1, early), n.launch("queued", 1, early)
	for _, p := range []*process{owner, third, reader, queued} {
		p.started()
	}
	reader.mustExchange(owner)
	queued.mustExchange(owner)
	before := reader.stats().Stats.Worker.BytesRead
	stop := third.traffic(owner)

	x, y := owner.mustPublish(big), owner.mustPublish(small)
	fy := queued.fetch(y, halt)
	fy.want("checking")
	// The reader stops itself in its READ, so that the cut comes in the middle.
	f := reader.fetch(x, kill(reader.Cmd.Process.Pid, syscall.SIGSTOP))
	reader.stopped()
	n.lose(100)
	reader.signal(syscall.SIGCONT)
	queued.ok(command{Do: "go"})
	a := f.ended("timeout", "peer lost", "transfer")
	b := fy.ended("timeout", "unverifiable")
	t.Logf("in the block READ: %s (quarantined: %v), in the slot READ: %s", a.Cause, a.Quarantined, b.Cause)
	require.Equal(t, before, reader.stats().Stats.Worker.BytesRead)
	x.freed(lease.ReasonExpired)
	y.freed(lease.ReasonExpired)
	// No handshake gets through either.
	z := owner.mustPublish(small)
	fz := queued.fetch(z)
	fz.settled(fz.ended("handshake", "timeout", "peer lost", "transfer"))
	stop()

	n.lose(0)
	f.settled(a)
	fy.settled(b)
	z.freed(lease.ReasonExpired, lease.ReasonRead)
	for _, r := range []*process{reader, queued} {
		r.recovers(owner)
		r.idle()
	}
	owner.idle()
}

// With every third packet lost a fetch takes longer, or fails with a cause; what it accepts is right.
func TestNetworkLosesPackets(t *testing.T) {
	n := newNetwork(t)
	owner, third, reader := n.launch("owner", 0), n.launch("third", 0), n.launch("reader", 1)
	for _, p := range []*process{owner, third, reader} {
		p.started()
	}
	reader.mustExchange(owner)
	stop := third.traffic(owner)
	ends := map[string]int{}
	for range 2 {
		n.lose(30)
		x := owner.mustPublish(small)
		f := reader.fetch(x)
		a := f.ended("", "timeout", "peer lost", "transfer", "unverifiable", "lapsed", "expired", "handshake")
		if a.Cause == "" {
			a.Cause = "verified"
		}
		ends[a.Cause]++
		x.freed(lease.ReasonRead, lease.ReasonExpired)
		n.lose(0) // a READ that was given up may crawl on for as long as packets are lost
		f.settled(a)
	}
	t.Logf("fetches under loss: %v", ends)
	stop()
	reader.recovers(owner)
	reader.idle()
	owner.idle()
}
