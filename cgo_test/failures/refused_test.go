package failures

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
)

// A reader that does not fit its owner is refused in the handshake, before any READ, and leaves the lease to one that does.
func TestReadersThatDoNotFitAreRefused(t *testing.T) {
	none := uint64(0)
	owner := launch(t, "owner", setup{Memlock: &none}, where{})
	third := launch(t, "third", setup{Memlock: &none}, where{})
	reader := launch(t, "reader", setup{}, where{})
	hash := launch(t, "hash", setup{Compatibility: "another model"}, where{})
	geometry := launch(t, "geometry", setup{BlockBytes: blockBytes / 2}, where{})
	for _, p := range []*process{owner, third, reader, hash, geometry} {
		p.started()
	}
	third.mustExchange(owner)
	before := owner.level()
	stop := third.traffic(owner)
	x := owner.mustPublish(small)
	for _, c := range []struct {
		reader *process
		change func(*command)
		cause  string
		text   string
	}{
		{hash, func(*command) {}, "handshake", "compatibility hash"},
		{geometry, func(*command) {}, "handshake", "32768"},
		{reader, func(c *command) { c.Params.RemoteEngineID += "x" }, "handshake", "serves engine"},
		{reader, func(c *command) { c.Params.RemoteEngineID, c.Params.RemotePort = "nobody", 1 }, "handshake", "refused"},
		{reader, func(c *command) { c.Params.Lease.Slot = 1 << 20 }, "unverifiable", "remote_lease_slot"},
		{reader, func(c *command) { c.Params.Lease = nil }, "unverifiable", "no remote_lease_slot"},
		{reader, func(c *command) { c.Params.RemoteBlockIDs = [][]int{{0, 1, 2, blocks}} }, "invalid", ""},
	} {
		f := c.reader.fetch(x, func(cmd *command) {
			p, l := *cmd.Params, *cmd.Params.Lease
			p.Lease = &l
			cmd.Params, cmd.Blocks = &p, some(0, small)
			c.change(cmd)
		})
		a := f.ended(c.cause)
		require.Contains(t, a.Error, c.text)
		f.settled(a)
	}
	f := third.fetch(x) // none of them has taken the lease from a reader that fits
	f.settled(f.ended(""))
	x.freed(lease.ReasonRead)
	stop()
	for _, r := range []*process{hash, geometry, reader} {
		require.Zero(t, r.stats().Stats.Worker.Reads)
		r.idle()
	}
	third.idle()
	owner.flat(before, 8) // the connections of three more readers, two of which can only tell it things
}
