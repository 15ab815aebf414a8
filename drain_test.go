package nixlgo_test

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

type drained struct {
	left []nixlgo.Left
	err  error
}

// drain starts a Drain and waits until it has stopped admission.
func drain(t *testing.T, n *nixlgo.Node, ctx context.Context, probe *lease.Params) <-chan drained {
	t.Helper()
	out := make(chan drained, 1)
	go func() {
		left, err := n.Drain(ctx)
		out <- drained{left, err}
	}()
	require.Eventually(t, func() bool {
		h, err := n.Hold(probe)
		if err == nil {
			require.NoError(t, h.Close())
			return false
		}
		require.ErrorIs(t, err, nixlgo.ErrDraining)
		return true
	}, 20*time.Second, time.Millisecond)
	return out
}

// A drained owner's readers finish: what is published is still renewed and fetched, byte-exact and verified, and nothing new is
// taken.
func TestDrainLetsWhatIsPublishedBeRead(t *testing.T) {
	owner, reader, third := open(t), open(t), open(t)
	fill(owner, 0xA1, 1, 2)
	fill(owner, 0xB2, 3)
	a, err := owner.Publish(deadline(t), "a", []int{1, 2}, 32)
	require.NoError(t, err)
	b, err := owner.Publish(deadline(t), "b", []int{3}, 16)
	require.NoError(t, err)
	other, err := third.Publish(deadline(t), "other", []int{0}, 16)
	require.NoError(t, err)

	ended := drain(t, owner, deadline(t), other.Params())
	_, err = owner.Publish(deadline(t), "c", []int{4}, 16)
	require.ErrorIs(t, err, nixlgo.ErrDraining)
	require.ErrorContains(t, err, `"c"`)
	require.ErrorIs(t, owner.Fetch(deadline(t), other.Params(), []int{4}), nixlgo.ErrDraining)

	renewals := owner.Stats().Worker.Leases.Renewals
	h, err := reader.Hold(b.Params())
	require.NoError(t, err)
	require.Eventually(t, func() bool { return owner.Stats().Worker.Leases.Renewals > renewals }, 20*time.Second, time.Millisecond)
	require.NoError(t, reader.Fetch(deadline(t), a.Params(), []int{5, 6}))
	requireFilled(t, reader, 0xA1, 5, 6)
	requireDone(t, a, lease.ReasonRead)
	select {
	case d := <-ended:
		t.Fatalf("drained with a lease left: %+v", d)
	default:
	}
	require.NoError(t, h.Fetch(deadline(t), []int{7}))
	requireFilled(t, reader, 0xB2, 7)
	requireDone(t, b, lease.ReasonRead)
	require.Equal(t, drained{}, <-ended)
	left, err := owner.Drain(deadline(t))
	require.NoError(t, err, "again, with nothing left")
	require.Empty(t, left)
	require.NoError(t, owner.Release(deadline(t), other.Params()), "letting others go is no new request")
	requireDone(t, other, lease.ReasonRead)
}

// A drained reader finishes what it holds.
func TestDrainLetsWhatIsHeldBeFetched(t *testing.T) {
	owner, reader := open(t), open(t)
	fill(owner, 0xA1, 1)
	p, err := owner.Publish(deadline(t), "req", []int{1}, 16)
	require.NoError(t, err)
	h, err := reader.Hold(p.Params())
	require.NoError(t, err)
	ended := drain(t, reader, deadline(t), p.Params())
	require.NoError(t, h.Fetch(deadline(t), []int{5}))
	requireFilled(t, reader, 0xA1, 5)
	require.Equal(t, drained{}, <-ended)
	requireDone(t, p, lease.ReasonRead)
}

// A published request that nobody reads or renews ends the drain when its lease runs out.
func TestDrainEndsWithTheLeases(t *testing.T) {
	owner := open(t, func(c *nixlgo.Config) {
		c.Lease = lease.DefaultConfig()
		c.Lease.Duration = 60 * time.Millisecond
	})
	p, err := owner.Publish(deadline(t), "req", []int{1}, 16)
	require.NoError(t, err)
	left, err := owner.Drain(deadline(t))
	require.NoError(t, err)
	require.Empty(t, left)
	requireDone(t, p, lease.ReasonExpired)
}

func TestDrainReportsWhatIsLeftAndCloseRevokesIt(t *testing.T) {
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer mute.Close()
	other := open(t)
	held, err := other.Publish(deadline(t), "held", []int{0}, 16)
	require.NoError(t, err)
	n, err := nixlgo.New(nixlgo.Config{Layers: 2, Blocks: 8, BlockBytes: 4096})
	require.NoError(t, err)
	ran := make(chan error, 1)
	go func() { ran <- n.Run(context.Background()) }()
	fill(n, 0xA1, 1, 2)
	p, err := n.Publish(deadline(t), "published", []int{1, 2}, 32)
	require.NoError(t, err)
	_, err = n.Hold(held.Params())
	require.NoError(t, err)
	fetched := make(chan error, 1)
	h, err := n.Hold(&lease.Params{DoRemotePrefill: true, RemoteBlockIDs: [][]int{{0}}, RemoteEngineID: "mute", RemoteRequestID: "fetching",
		RemoteHost: "127.0.0.1", RemotePort: mute.Addr().(*net.TCPAddr).Port, TPSize: 1, Lease: &lease.SlotRef{Slot: 0, Nonce: 1}})
	require.NoError(t, err)
	go func() { fetched <- h.Fetch(deadline(t), []int{5}) }()
	require.Eventually(t, func() bool { return n.Stats().Worker.Waiting == 1 }, 20*time.Second, time.Millisecond)

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	left, err := n.Drain(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "3 requests are left")
	require.Equal(t, []nixlgo.Left{
		{Request: "fetching", Engine: "mute", Blocks: []int{5}, Reason: nixlgo.LeftFetching},
		{Request: "held", Engine: other.Engine(), Reason: nixlgo.LeftHeld},
		{Request: "published", Engine: n.Engine(), Blocks: []int{1, 2}, Reason: nixlgo.LeftPublished},
	}, left)

	reader := open(t)
	params := p.Params()
	waiting := make(chan drained, 1)
	go func() {
		left, err := n.Drain(context.Background())
		waiting <- drained{left, err}
	}()
	require.NoError(t, n.Close())
	require.NoError(t, <-ran)
	requireDone(t, p, lease.ReasonAborted)
	require.ErrorIs(t, <-fetched, nixlgo.ErrClosed)
	require.ErrorIs(t, (<-waiting).err, nixlgo.ErrClosed)
	_, err = n.Drain(deadline(t))
	require.ErrorIs(t, err, nixlgo.ErrClosed)
	_, err = n.Hold(held.Params())
	require.ErrorIs(t, err, nixlgo.ErrClosed)
	require.Error(t, reader.Fetch(deadline(t), params, []int{5}), "the lease is revoked")
	requireFilled(t, reader, 0, 5)
	require.NoError(t, held.Revoke())
}

// Eight fetches from one owner, two at a time: all of them are served.
func TestFetchesBeyondTheCapWaitTheirTurn(t *testing.T) {
	owner, reader := open(t), open(t, func(c *nixlgo.Config) { c.MaxReadsPerPeer = 2 })
	fetched := make(chan error, 8)
	for i := range 8 {
		fill(owner, byte(i+1), i)
		p, err := owner.Publish(deadline(t), string(rune('a'+i)), []int{i}, 16)
		require.NoError(t, err)
		ctx := deadline(t)
		go func() { fetched <- reader.Fetch(ctx, p.Params(), []int{i}) }()
	}
	for range 8 {
		require.NoError(t, <-fetched)
	}
	for i := range 8 {
		requireFilled(t, reader, byte(i+1), i)
	}
	_, err := nixlgo.New(nixlgo.Config{Layers: 1, Blocks: 1, BlockBytes: 64, MaxBytesPerPeer: -1})
	require.ErrorIs(t, err, rdma.ErrConfig)
}
