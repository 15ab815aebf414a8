package failures

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
)

// listeners counts the TCP sockets on which the child listens: its side channel, and UCX's.
func (p *process) listeners() (n int) {
	p.t.Helper()
	proc := "/proc/" + strconv.Itoa(p.Cmd.Process.Pid)
	table, err := os.ReadFile(proc + "/net/tcp")
	require.NoError(p.t, err)
	listening := map[string]bool{}
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 9 && f[3] == "0A" {
			listening["socket:["+f[9]+"]"] = true
		}
	}
	fds, err := filepath.Glob(proc + "/fd/*")
	require.NoError(p.t, err)
	for _, fd := range fds {
		if name, err := os.Readlink(fd); err == nil && listening[name] {
			n++
		}
	}
	return n
}

// starved is a child that was without file descriptors and has some again, once reader fetches from owner, one of which it is.
// An agent in whose UCX the limit was met may be lost for good: UCX closes its listener when accept meets it. Such a child is
// started anew. One that met it elsewhere has to go on.
func (p *process) starved(inUCX bool, listeners int, reader, owner *process) *process {
	p.t.Helper()
	if !inUCX {
		reader.recovers(owner)
		return p
	}
	if p.listeners() == listeners {
		for range 4 {
			if reader.exchange(owner, small) == nil {
				return p
			}
		}
	}
	p.t.Logf("UCX does not connect the %s any more: %d of %d listeners are left", p.Name, p.listeners(), listeners)
	p.killed()
	return p.again()
}

// anyFailure are the causes of a connection that could not be made, wherever it failed.
var anyFailure = []string{"", "handshake", "peer lost", "transfer", "unverifiable", "timeout", "lapsed", "expired"}

// A reader without file descriptors fails its fetches, and has them again when there are some, whatever step of connecting
// met the limit. Nobody else is disturbed.
func TestReaderAtItsFileLimit(t *testing.T) {
	p := start(t, "owner", "third", "reader", "reader", "reader")
	owner, third, readers := p[0], p[1], p[2:]
	third.mustExchange(owner)
	stop := third.traffic(owner)
	for left, reader := range readers {
		t.Run(fmt.Sprintf("%d left", left), func(t *testing.T) {
			before, listeners := reader.level(), reader.listeners()
			reader.ok(command{Do: "exhaust", Left: left})
			causes := anyFailure
			if left == 0 {
				causes = []string{"handshake"}
			}
			x := owner.mustPublish(small)
			f := reader.fetch(x)
			a := f.ended(causes...)
			t.Logf("%q %s", a.Cause, a.Error)
			reader.ok(command{Do: "relax"})
			x.freed(lease.ReasonRead, lease.ReasonExpired)
			if q := reader.starved(left > 0, listeners, reader, owner); q != reader {
				q.recovers(owner)
				return
			}
			f.settled(a)
			reader.flat(before, 16)
		})
	}
	stop()
}

// An owner without file descriptors takes no new reader, serves those it has, and takes new ones when it has some again.
func TestOwnerAtItsFileLimit(t *testing.T) {
	for _, left := range []int{0, 2} {
		t.Run(fmt.Sprintf("%d left", left), func(t *testing.T) {
			p := start(t, "owner", "third", "reader")
			owner, third, reader := p[0], p[1], p[2]
			third.mustExchange(owner)
			before, listeners := owner.level(), owner.listeners()
			stop := third.traffic(owner)
			owner.ok(command{Do: "exhaust", Left: left})
			causes := anyFailure
			if left == 0 {
				causes = []string{"handshake"}
			}
			x := owner.mustPublish(small)
			a := reader.fetch(x).ended(causes...)
			t.Logf("%q %s", a.Cause, a.Error)
			x.freed(lease.ReasonRead, lease.ReasonExpired)
			stop()
			owner.ok(command{Do: "relax"})
			if q := owner.starved(left > 0, listeners, reader, owner); q != owner {
				owner, before = q, level{1 << 20, 1 << 20}
			}
			third.recovers(owner)
			reader.recovers(owner)
			owner.flat(before, 16)
			reader.idle()
		})
	}
}
