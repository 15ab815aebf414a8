package failures

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
)

// A reader that dies costs its owner the lease's duration and nothing else.
// nixl#2047, vllm#48633, cases.md 4, 46
func TestOwnerHasItsBlocksBackWhenAReaderIsKilled(t *testing.T) {
	p := start(t, "owner", "third", "reader-before", "reader-handshake", "reader-check", "reader-complete")
	owner, third, before, handshake, check, complete := p[0], p[1], p[2], p[3], p[4], p[5]
	third.mustExchange(owner)
	level := owner.level()
	stop := third.traffic(owner)

	// Before the handshake.
	x0 := owner.mustPublish(small)
	before.killed()
	// During the handshake.
	x1 := owner.mustPublish(small)
	g := newGate(t, owner)
	handshake.fetch(x1, through(g))
	g.reached(t)
	handshake.killed()
	close(g.open)
	// Between block and slot READ.
	x3 := owner.mustPublish(small)
	check.fetch(x3, halt).want("checking")
	check.killed()
	for _, x := range []*publication{x0, x1, x3} {
		x.freed(lease.ReasonExpired)
	}
	stop()

	// The owner answers the slot READ, and nobody is there to complete the request.
	x4 := owner.mustPublish(small)
	f := complete.fetch(x4, halt)
	f.want("checking")
	owner.stop()
	complete.ok(command{Do: "go"})
	slotReadPosted(complete)
	complete.stop()
	owner.signal(syscall.SIGCONT)
	third.mustExchange(owner)
	complete.killed()
	x4.freed(lease.ReasonExpired)
	f.none()
	third.mustExchange(owner)
	owner.flat(level, 0)
	third.idle()
}

// slotReadPosted waits until the first slot READ is under way. It cannot end while the owner is stopped.
func slotReadPosted(reader *process) {
	reader.t.Helper()
	for reader.stats().Stats.Worker.Checks == 0 {
	}
}

// A reader that dies in the middle of a READ over TCP may take the owner along, inside UCX (package nixl, "Readers that die
// over TCP"). An owner that survives has its blocks back and serves on; a dead one is replaced, and its readers find the new
// one by themselves.
func TestReaderKilledInTheMiddleOfARead(t *testing.T) {
	p := start(t, "owner", "third")
	owner, third := p[0], p[1]
	third.mustExchange(owner)
	before := owner.level()
	var open []*publication
	killed, deaths := 0, 0
	for _, reader := range start(t, "reader", "reader", "reader", "reader") {
		x := owner.mustPublish(big)
		reader.fetch(x, kill(reader.Cmd.Process.Pid, syscall.SIGKILL))
		reader.died()
		open = append(open, x)
		err := third.exchange(owner, small)
		if err == nil {
			continue
		}
		require.Contains(t, []syscall.Signal{syscall.SIGSEGV, syscall.SIGABRT}, owner.died(), "%v", err)
		deaths++
		killed += len(open)
		owner, open = owner.again(), nil
		third.recovers(owner)
		before = owner.level()
	}
	for _, x := range open {
		if x.freed(lease.ReasonExpired, lease.ReasonRead).Reason == lease.ReasonExpired { // otherwise the READ was faster than the signal
			killed++
		}
	}
	third.mustExchange(owner)
	owner.flat(before, 0)
	t.Logf("%d readers were killed in their READ; %d took the owner along", killed, deaths)
	require.Positive(t, killed)
}

// A reader that stands still until its lease is over, and the blocks are another's, accepts no byte of them.
// cases.md 4
func TestReaderStoppedPastItsLeaseAcceptsNothing(t *testing.T) {
	p := make([]*process, len(names))
	for i, name := range names {
		p[i] = launch(t, name, setup{ReadTimeout: patience}, where{}) // the lease is to be the only bound
	}
	for _, q := range p {
		q.started()
	}
	owner, third, readers := p[0], p[1], p[2:]
	for _, r := range p[1:] {
		r.mustExchange(owner)
	}
	levels := []level{}
	for _, q := range p {
		levels = append(levels, q.level())
	}

	// In order of the stages: before and during the handshake, in the block READ, before and after the slot READ.
	xs, fs := make([]*publication, len(readers)), make([]*call, len(readers))
	fetch := func(i, n int, change ...func(*command)) {
		xs[i] = owner.mustPublish(n)
		fs[i] = readers[i].fetch(xs[i], change...)
	}
	g := newGate(t, owner)
	fetch(1, small, through(g))
	g.reached(t)
	readers[1].stop()
	fetch(2, big, halt, kill(readers[2].Cmd.Process.Pid, syscall.SIGSTOP))
	readers[2].stopped()
	fetch(3, small, halt)
	fs[3].want("checking")
	readers[3].stop()
	fetch(4, small, halt)
	fs[4].want("checking")
	owner.stop()
	readers[4].ok(command{Do: "go"})
	for readers[4].stats().Stats.Worker.Checks < 2 { // the exchange above had one
	}
	readers[4].stop()
	owner.signal(syscall.SIGCONT)
	readers[0].stop()
	fetch(0, small)

	stop := third.traffic(owner)
	for _, x := range xs {
		x.freed(lease.ReasonExpired)
	}
	stop()
	for _, x := range xs {
		owner.ok(command{Do: "spoil", Blocks: x.cmd.Blocks, Tag: 255})
	}
	close(g.open)
	for _, r := range readers {
		r.signal(syscall.SIGCONT)
	}
	fs[2].want("checking")
	for _, r := range readers[2:4] {
		r.ok(command{Do: "go"})
	}
	fs[0].settled(fs[0].ended("lapsed", "expired"))
	fs[1].settled(fs[1].ended("lapsed", "expired", "handshake")) // the handshake may have run out
	fs[2].settled(fs[2].ended("lapsed"))
	fs[3].settled(fs[3].ended("lapsed"))
	fs[4].settled(fs[4].ended("")) // the owner answered while it held the lease: the bytes are the request's
	for i, q := range p {
		if i > 0 {
			q.recovers(owner)
		}
		q.flat(levels[i], 8) // readers[1] was connected anew, package nixl's leak
	}
}
