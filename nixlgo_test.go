package nixlgo_test

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

// TestMain leaves by the system call: the exit of libc runs a destructor of the wheel's libnl that crashes under -race.
func TestMain(m *testing.M) { syscall.Exit(m.Run()) }

func open(t *testing.T, change ...func(*nixlgo.Config)) *nixlgo.Node {
	t.Helper()
	cfg := nixlgo.Config{Layers: 2, Blocks: 8, BlockBytes: 4096}
	for _, f := range change {
		f(&cfg)
	}
	n, err := nixlgo.New(cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
		require.NoError(t, n.Close())
	})
	return n
}

func deadline(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func fill(n *nixlgo.Node, v byte, blocks ...int) {
	for _, b := range blocks {
		for l := range 2 {
			copy(n.Block(l, b), bytes.Repeat([]byte{v}, 4096))
		}
	}
}

func requireFilled(t *testing.T, n *nixlgo.Node, v byte, blocks ...int) {
	t.Helper()
	for _, b := range blocks {
		for l := range 2 {
			require.Equal(t, bytes.Repeat([]byte{v}, 4096), n.Block(l, b))
		}
	}
}

func requireDone(t *testing.T, p *nixlgo.Publication, want lease.Reason) {
	t.Helper()
	select {
	case <-p.Done():
		require.Equal(t, want, p.Reason())
	case <-deadline(t).Done():
		t.Fatal("the publication did not end")
	}
}

func TestFetchDeliversTheBytesAndFreesTheOwner(t *testing.T) {
	owner, reader := open(t), open(t)
	fill(owner, 0xA1, 1, 2)
	p, err := owner.Publish(deadline(t), "req", []int{1, 2}, 32)
	require.NoError(t, err)
	require.NoError(t, reader.Fetch(deadline(t), p.Params(), []int{5, 6}))
	requireFilled(t, reader, 0xA1, 5, 6)
	requireDone(t, p, lease.ReasonRead)
	// Both sides' blocks are free again.
	_, err = owner.Publish(deadline(t), "req", []int{1, 2}, 32)
	require.NoError(t, err)
	_, err = reader.Publish(deadline(t), "req", []int{5, 6}, 32)
	require.NoError(t, err)
}

func TestBothSidesInOneNode(t *testing.T) {
	a, b := open(t), open(t)
	fill(a, 1, 0)
	fill(b, 2, 0)
	pa, err := a.Publish(deadline(t), "a", []int{0}, 16)
	require.NoError(t, err)
	pb, err := b.Publish(deadline(t), "b", []int{0}, 16)
	require.NoError(t, err)
	require.NoError(t, b.Fetch(deadline(t), pa.Params(), []int{1}))
	require.NoError(t, a.Fetch(deadline(t), pb.Params(), []int{1}))
	requireFilled(t, b, 1, 1)
	requireFilled(t, a, 2, 1)
}

// A revoked lease shows 0 in its slot although the blocks are as they were.
func TestFetchOfARevokedLeaseLapsesAndLeavesNoByte(t *testing.T) {
	owner, reader := open(t), open(t)
	fill(owner, 0xA1, 1)
	p, err := owner.Publish(deadline(t), "req", []int{1}, 16)
	require.NoError(t, err)
	params := p.Params()
	require.NoError(t, p.Revoke())
	requireDone(t, p, lease.ReasonAborted)
	err = reader.Fetch(deadline(t), params, []int{5})
	require.ErrorIs(t, err, lease.ErrLapsed)
	require.NotErrorIs(t, err, nixlgo.ErrQuarantined)
	require.ErrorContains(t, err, `"req"`)
	requireFilled(t, reader, 0, 5)
	require.NoError(t, reader.Fetch(deadline(t), republish(t, owner, 1), []int{5}), "the blocks are free for another try")
}

func republish(t *testing.T, n *nixlgo.Node, block int) *lease.Params {
	t.Helper()
	p, err := n.Publish(deadline(t), "again", []int{block}, 16)
	require.NoError(t, err)
	return p.Params()
}

func TestReleaseFreesTheOwnerWithoutARead(t *testing.T) {
	owner, router := open(t), open(t)
	p, err := owner.Publish(deadline(t), "req", []int{1}, 16)
	require.NoError(t, err)
	require.NoError(t, router.Release(deadline(t), p.Params()))
	requireDone(t, p, lease.ReasonRead)
	require.Zero(t, router.Stats().Worker.Reads)
}

// A refused Fetch has done nothing: the same hold fetches into other blocks.
func TestHoldOutlivesARefusedFetch(t *testing.T) {
	owner, reader := open(t), open(t)
	fill(owner, 0xA1, 1)
	p, err := owner.Publish(deadline(t), "req", []int{1}, 16)
	require.NoError(t, err)
	_, err = reader.Publish(deadline(t), "mine", []int{5}, 16)
	require.NoError(t, err)
	h, err := reader.Hold(p.Params())
	require.NoError(t, err)
	require.ErrorIs(t, h.Fetch(deadline(t), []int{5}), nixlgo.ErrBusy)
	require.NoError(t, h.Fetch(deadline(t), []int{6}))
	requireFilled(t, reader, 0xA1, 6)
	requireDone(t, p, lease.ReasonRead)
	require.ErrorIs(t, h.Fetch(deadline(t), []int{6}), lease.ErrInvalid, "once")
	require.ErrorIs(t, h.Release(deadline(t)), lease.ErrInvalid)
	require.NoError(t, h.Close())
	require.Zero(t, reader.Stats().Scheduler.Tracked)
}

// Two holders renew one lease; the one that lets go does not end it for the other.
func TestClosedHoldLeavesTheLeaseToOthers(t *testing.T) {
	owner, router, reader := open(t), open(t), open(t)
	fill(owner, 0xA1, 1)
	p, err := owner.Publish(deadline(t), "req", []int{1}, 16)
	require.NoError(t, err)
	h, err := router.Hold(p.Params())
	require.NoError(t, err)
	require.Eventually(t, func() bool { return owner.Stats().Worker.Leases.Renewals > 0 }, 20*time.Second, time.Millisecond)
	require.NoError(t, h.Close())
	require.NoError(t, h.Close())
	require.Zero(t, router.Stats().Scheduler.Tracked)
	require.NoError(t, reader.Fetch(deadline(t), p.Params(), []int{2}))
	requireDone(t, p, lease.ReasonRead)
}

func TestBlocksInUseAreRefused(t *testing.T) {
	owner := open(t)
	_, err := owner.Publish(deadline(t), "req", []int{1, 2}, 32)
	require.NoError(t, err)
	_, err = owner.Publish(deadline(t), "other", []int{0, 2}, 16)
	require.ErrorIs(t, err, nixlgo.ErrBusy)
	require.ErrorContains(t, err, `block 2 is held by request "req"`)
	_, err = owner.Publish(deadline(t), "third", []int{0}, 16)
	require.NoError(t, err, "the refused call claimed nothing")
}

func TestBadArgumentsAreNamedAndChangeNothing(t *testing.T) {
	n := open(t)
	for want, publish := range map[string]func() error{
		"block id 8":    func() error { _, err := n.Publish(deadline(t), "a", []int{8}, 1); return err },
		"block id -1":   func() error { _, err := n.Publish(deadline(t), "a", []int{-1}, 1); return err },
		"block 3 twice": func() error { _, err := n.Publish(deadline(t), "a", []int{3, 3}, 1); return err },
		`"a,b"`:         func() error { _, err := n.Publish(deadline(t), "a,b", []int{3}, 1); return err },
		`"HB:x"`:        func() error { _, err := n.Publish(deadline(t), "HB:x", []int{3}, 1); return err },
	} {
		err := publish()
		require.ErrorIs(t, err, lease.ErrInvalid, want)
		require.ErrorContains(t, err, want)
	}
	p, err := n.Publish(deadline(t), "a", []int{3}, 16)
	require.NoError(t, err)
	_, err = n.Publish(deadline(t), "a", []int{4}, 16)
	require.ErrorIs(t, err, lease.ErrInvalid, "the id is in use")
	require.Nil(t, n.Block(2, 0))
	require.Nil(t, n.Block(0, 8))
	require.Nil(t, n.Block(-1, 0))
	require.Zero(t, p.Reason())
	require.NoError(t, p.Revoke())
	requireDone(t, p, lease.ReasonAborted)
}

func TestUnusableConfigIsNamed(t *testing.T) {
	for want, cfg := range map[string]nixlgo.Config{
		"0 layers":                              {Blocks: 1, BlockBytes: 1},
		"-1 blocks":                             {Layers: 1, Blocks: -1, BlockBytes: 1},
		"1 layers × 9223372036854775807 blocks": {Layers: 1, Blocks: 1<<63 - 1, BlockBytes: 4096},
		"port 70000":                            {Layers: 1, Blocks: 1, BlockBytes: 64, Port: 70000},
		"NOSUCH":                                {Layers: 1, Blocks: 1, BlockBytes: 64, Backend: "NOSUCH"},
		"/nonexistent":                          {Layers: 1, Blocks: 1, BlockBytes: 64, Library: "/nonexistent/libnixl_capi.so"},
	} {
		_, err := nixlgo.New(cfg)
		require.ErrorContains(t, err, want)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	_, err = nixlgo.New(nixlgo.Config{Layers: 1, Blocks: 1, BlockBytes: 64, Port: l.Addr().(*net.TCPAddr).Port})
	require.ErrorIs(t, err, syscall.EADDRINUSE)
}

// nixl#2047, cases.md 4: a peer that does not answer ends with the context, not with a hang.
func TestFetchEndsWithItsContext(t *testing.T) {
	reader := open(t)
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer mute.Close()
	p := &lease.Params{DoRemotePrefill: true, RemoteBlockIDs: [][]int{{0}}, RemoteEngineID: "mute", RemoteRequestID: "req", RemoteHost: "127.0.0.1",
		RemotePort: mute.Addr().(*net.TCPAddr).Port, TPSize: 1, Lease: &lease.SlotRef{Slot: 0, Nonce: 1}}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err = reader.Fetch(ctx, p, []int{1})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Eventually(t, func() bool { // the blocks come back
		_, err := reader.Publish(deadline(t), "mine", []int{1}, 16)
		return err == nil
	}, 20*time.Second, time.Millisecond)
}

func TestEveryCallAfterCloseSaysSo(t *testing.T) {
	var log strings.Builder
	n, err := nixlgo.New(nixlgo.Config{Layers: 1, Blocks: 2, BlockBytes: 64, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	require.NoError(t, n.Close())
	require.NoError(t, n.Close())
	require.NoError(t, n.Run(t.Context()))
	require.NotContains(t, log.String(), "level=ERROR")
	_, err = n.Publish(deadline(t), "req", []int{0}, 16)
	require.ErrorIs(t, err, nixlgo.ErrClosed)
	require.ErrorIs(t, err, net.ErrClosed)
	_, err = n.Hold(&lease.Params{})
	require.ErrorIs(t, err, nixlgo.ErrClosed)
	require.Nil(t, n.Block(0, 0))
	n.Stats()
}

func TestCloseEndsRunAndWaiters(t *testing.T) {
	n, err := nixlgo.New(nixlgo.Config{Layers: 1, Blocks: 2, BlockBytes: 64})
	require.NoError(t, err)
	ended := make(chan error, 2)
	go func() { ended <- n.Run(context.Background()) }()
	p, err := n.Publish(deadline(t), "req", []int{0}, 16)
	require.NoError(t, err)
	require.ErrorContains(t, n.Run(t.Context()), "running already")
	require.NoError(t, n.Close())
	require.NoError(t, <-ended)
	requireDone(t, p, lease.ReasonAborted)
	require.ErrorIs(t, p.Revoke(), nixlgo.ErrClosed)
}

func TestLeaseConfigIsChecked(t *testing.T) {
	_, err := nixlgo.New(nixlgo.Config{Layers: 1, Blocks: 1, BlockBytes: 64, Lease: lease.Config{Duration: -time.Second}})
	require.ErrorIs(t, err, rdma.ErrConfig)
}

// The README's code is code that runs: each block of it stands in example_test.go, word for word.
func TestReadmeShowsTheExamples(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	example, err := os.ReadFile("example_test.go")
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(readme), -1)
	require.GreaterOrEqual(t, len(blocks), 2)
	for _, b := range blocks {
		require.Contains(t, string(example), strings.TrimSpace(b[1]))
	}
}

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
	require.ErrorContains(t, err, "requests left: 3")
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
