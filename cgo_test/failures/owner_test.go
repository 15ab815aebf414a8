package failures

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
)

// stages are readers of one owner, each at another stage of its fetch, while the owner stands still: before the handshake,
// in it, in the block READ, between block and slot READ, and in the slot READ.
type stages struct {
	readers []*process
	xs      []*publication
	fs      []*call
	gate    *gate
}

// reach brings the readers to their stages and stops the owner there.
func reach(t *testing.T, owner *process, readers []*process) *stages {
	t.Helper()
	s := &stages{readers: readers, xs: make([]*publication, len(readers)), fs: make([]*call, len(readers)), gate: newGate(t, owner)}
	for _, i := range []int{0, 1, 3, 4} {
		s.xs[i] = owner.mustPublish(small)
	}
	s.fs[1] = readers[1].fetch(s.xs[1], through(s.gate))
	s.gate.reached(t)
	for _, i := range []int{3, 4} {
		s.fs[i] = readers[i].fetch(s.xs[i], halt)
		s.fs[i].want("checking")
	}
	for {
		s.xs[2] = owner.mustPublish(big)
		s.fs[2] = readers[2].fetch(s.xs[2], kill(owner.Cmd.Process.Pid, syscall.SIGSTOP))
		owner.stopped()
		if readers[2].stats().Stats.Worker.BytesRead == 0 {
			break
		}
		owner.signal(syscall.SIGCONT) // the READ was faster than the signal
		s.fs[2].ended("")
		s.xs[2].freed(lease.ReasonRead)
		readers[2].killed()
		readers[2] = start(t, "reader-read")[0]
	}
	readers[4].ok(command{Do: "go"})
	slotReadPosted(readers[4])
	return s
}

// release lets the readers go on that were held: the handshake, and the one that has to check.
func (s *stages) release() {
	close(s.gate.open)
	s.readers[3].ok(command{Do: "go"})
	s.fs[0] = s.readers[0].fetch(s.xs[0])
}

var names = []string{"owner", "third", "reader-before", "reader-handshake", "reader-read", "reader-check", "reader-complete"}

// An owner that dies fails every fetch once, and one that comes back under its old engine id and address, with other memory,
// serves every reader without a restart of theirs. Params of its first life are refused.
// smg#2382, wtdcode/vllm-backport#33, cases.md 14, 15
func TestReadersOutliveTheirOwner(t *testing.T) {
	p := start(t, names...)
	owner, others, readers := p[0], p[1:], p[2:]
	others[0].mustExchange(owner)
	before := others[0].level()
	s := reach(t, owner, readers)
	owner.killed()
	s.release()
	for i, causes := range [][]string{
		{"handshake"},
		{"handshake"},
		{"peer lost", "transfer"},
		{"unverifiable"},
		{"unverifiable"},
	} {
		s.fs[i].settled(s.fs[i].ended(causes...))
	}
	owner = owner.again()
	for _, r := range others {
		r.recovers(owner)
	}
	old := readers[3].fetch(s.xs[3])
	old.settled(old.ended("lapsed", "expired"))
	level := owner.level()
	for _, r := range others {
		r.mustExchange(owner)
		r.idle()
	}
	owner.flat(level, 0)
	others[0].flat(before, 8) // its connection
}

// An owner that stands still, as one does that is swapped out or debugged, fails fetches by their deadlines. It goes on
// where it was: its readers too, with the blocks that were in quarantine meanwhile.
// nixl#2047, vllm#49238, cases.md 4
func TestReadersOutliveAStoppedOwner(t *testing.T) {
	p := start(t, names...)
	owner, others, readers := p[0], p[1:], p[2:]
	others[0].mustExchange(owner)
	before := owner.level()
	s := reach(t, owner, readers)
	s.release()
	done := make([]answer, len(readers))
	for i, causes := range [][]string{
		{"handshake"},
		{"handshake"},
		{"timeout"},
		{"timeout", "unverifiable"},
		{"timeout", "unverifiable"},
	} {
		done[i] = s.fs[i].ended(causes...)
	}
	require.True(t, done[2].Quarantined, "its READ goes on when the owner does")
	owner.signal(syscall.SIGCONT)
	for i, f := range s.fs {
		f.settled(done[i])
		s.xs[i].freed(lease.ReasonRead, lease.ReasonExpired)
	}
	for _, r := range others {
		r.recovers(owner)
		r.idle()
	}
	owner.flat(before, 8*len(readers)) // their connections
}

// The messages of a reader that is gone reach an owner that was stopped meanwhile, or are lost; the blocks come back either
// way.
func TestReadCompleteToAStoppedOwner(t *testing.T) {
	p := start(t, "owner", "third", "router")
	owner, third, router := p[0], p[1], p[2]
	router.mustExchange(owner)
	third.mustExchange(owner)
	before := owner.level()
	x, y := owner.mustPublish(small), owner.mustPublish(small)
	owner.stop()
	router.ok(command{Do: "release", Params: x.params})
	router.killed()
	owner.signal(syscall.SIGCONT)
	x.freed(lease.ReasonRead, lease.ReasonExpired)
	y.freed(lease.ReasonExpired)
	third.mustExchange(owner)
	owner.flat(before, 0)
}

// Two owners under one engine id are a mistake that the reader cannot see. It fails fetches then, but accepts no byte of the
// wrong one.
// smg#2503, cases.md 15
func TestTwoOwnersOfOneEngineIDNeverMixTheirBytes(t *testing.T) {
	p := start(t, "owner", "reader", "third")
	a, reader, third := p[0], p[1], p[2]
	b := launch(t, "twin", setup{Engine: a.setup.Engine}, where{}).started()
	b.tag = 100 // never the tag of the other
	reader.mustExchange(a)
	before := reader.level()
	verified := 0
	for range 10 {
		xa, xb := a.mustPublish(small), b.mustPublish(small)
		xb.cmd.Blocks = some(blocks-small, small) // of the reader
		q := *xb.params
		fa, fb := reader.fetch(xa), reader.fetch(xb, func(c *command) { c.Params = &q })
		for _, f := range []*call{fa, fb} {
			v := f.ended("", "peer lost", "transfer", "unverifiable", "handshake", "lapsed", "expired")
			if v.Cause == "" {
				verified++
			}
			f.settled(v)
		}
	}
	t.Logf("%d of 20 fetches at once were verified", verified)
	// One after the other works, and params with the address of the other do not.
	for range 3 {
		reader.recovers(a)
		reader.recovers(b)
	}
	x := a.mustPublish(small)
	f := reader.fetch(x, func(c *command) {
		q := *c.Params
		q.RemotePort = b.setup.Port
		c.Params = &q
	})
	f.settled(f.ended("lapsed"))
	for _, q := range []*process{a, b} {
		third.recovers(q)
		q.idle()
	}
	reader.flat(before, 40) // one for each change of the address, package nixl's leak
}
