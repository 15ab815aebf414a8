package failures

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
)

// The last stage of a fetch: the lease is verified, and the owner has not been told. What the reader has is proved, whatever
// becomes of either process; the owner has its blocks back by the lease's end.
// nixl#2047, vllm#48633, cases.md 4, 11
func TestEitherSideIsLostBeforeTheReadComplete(t *testing.T) {
	p := start(t, "owner", "third", "reader-lives", "reader-killed", "reader-stopped")
	owner, third, lives, killed, stopped := p[0], p[1], p[2], p[3], p[4]
	for _, r := range p[1:] {
		r.mustExchange(owner)
	}
	before, reader := owner.level(), lives.level()
	verified := func(r *process) (*publication, *call) {
		t.Helper()
		x := owner.mustPublish(small)
		f := r.fetch(x, haltLate)
		f.want("verified")
		return x, f
	}

	// The reader is killed, or stopped past its lease. What comes late says nothing of the lease that has the blocks by then.
	stop := third.traffic(owner)
	xk, fk := verified(killed)
	killed.killed()
	xs, fs := verified(stopped)
	stopped.stop()
	xk.freed(lease.ReasonExpired)
	xs.freed(lease.ReasonExpired)
	stop()
	fk.none()
	next := owner.mustPublish(small)
	for next.cmd.Blocks[0] != xs.cmd.Blocks[0] { // until the same blocks are another's
		next = owner.mustPublish(small)
	}
	h := third.fetch(next, haltLate)
	h.want("verified")
	stopped.signal(syscall.SIGCONT)
	stopped.ok(command{Do: "go"})
	fs.settled(fs.ended("")) // the owner held the lease when it was asked
	third.ok(command{Do: "go"})
	h.settled(h.ended(""))
	require.Equal(t, lease.ReasonRead, next.freed(lease.ReasonRead).Reason, "by its own reader")
	owner.flat(before, 0)

	// The owner is stopped: it hears of it when it goes on, or its lease is over by then.
	x, f := verified(lives)
	owner.stop()
	lives.ok(command{Do: "go"})
	f.settled(f.ended(""))
	owner.signal(syscall.SIGCONT)
	x.freed(lease.ReasonRead, lease.ReasonExpired)
	for _, r := range []*process{third, lives, stopped} {
		r.recovers(owner)
	}
	owner.flat(before, 4)

	// The owner is killed.
	_, f = verified(lives)
	owner.killed()
	lives.ok(command{Do: "go"})
	f.settled(f.ended(""))
	owner = owner.again()
	lives.recovers(owner)
	owner.idle()
	lives.flat(reader, 8) // its connections to the owner's second life
}
