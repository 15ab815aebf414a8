package lease

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func pullOf(id string, slot int, nonce int64) Pull {
	return Pull{
		Request: id, Peer: Peer{"P-engine", "h", 1, 2, 1, 1}, RemoteRequest: "P-" + id, RemoteBlocks: [][]int{{1}}, LocalBlocks: [][]int{{2}},
		Lease: &SlotRef{slot, nonce}, Verify: true,
	}
}

func start(t *testing.T, p *Pulls, pl Pull, ranks ...int) {
	t.Helper()
	require.NoError(t, p.Start(pl, ranks))
}

func readAll(t *testing.T, p *Pulls, id string, ranks ...int) {
	t.Helper()
	for _, r := range ranks {
		require.NoError(t, p.BlocksRead(id, r, nil))
	}
}

// Specification: "Once all block READs of the request completed, D reads the
// request's lease slot on every remote rank it read from … Only if every slot
// still holds the nonce does D report the request as received … D then sends the
// read notification". cases.md 1 (a).
func TestAPullIsCheckedOnEveryRankAfterAllItsBlocks(t *testing.T) {
	p := NewPulls()
	pl := pullOf("a", 3, 11)
	start(t, p, pl, 0, 1)
	require.Empty(t, p.NextChecks())
	readAll(t, p, "a", 1)
	require.Empty(t, p.NextChecks(), "rank 0 still reads (M2)")
	readAll(t, p, "a", 0)
	batches := p.NextChecks()
	require.Len(t, batches, 2)
	require.Equal(t, []int{3}, batches[0].Slots)
	require.Equal(t, [2]int{0, 1}, [2]int{batches[0].Rank, batches[1].Rank})
	require.Empty(t, p.NextChecks(), "each check is posted once")

	require.NoError(t, p.Checked(batches[1], []int64{11}, nil))
	require.Empty(t, p.Finished(nil), "one rank proves nothing about the other (M4)")
	require.NoError(t, p.Checked(batches[0], []int64{11}, nil))
	require.Equal(t, []Finished{{Pull: pl, Ranks: []int{0, 1}}}, p.Finished(nil))
	require.Zero(t, p.Len())
}

// "the checks of all requests that complete in the same step share one READ per
// remote rank"; a request never joins a check already posted.
func TestChecksOfOneStepShareAReadAndLaterOnesDoNotJoin(t *testing.T) {
	p := NewPulls()
	for i := range 5 {
		pl := pullOf(fmt.Sprint("r", i), i, int64(i+11))
		if i == 4 {
			pl.Peer.Engine = "other"
		}
		start(t, p, pl, 0)
	}
	readAll(t, p, "r0", 0)
	readAll(t, p, "r2", 0)
	readAll(t, p, "r4", 0)
	first := p.NextChecks()
	require.Len(t, first, 2)
	require.Equal(t, []int{0, 2}, first[0].Slots)
	require.Equal(t, "other", first[1].Peer.Engine)

	readAll(t, p, "r1", 0)
	second := p.NextChecks()
	require.Len(t, second, 1)
	require.Equal(t, []int{1}, second[0].Slots, "r1 does not join the posted READ")

	require.NoError(t, p.Checked(first[0], []int64{11, 13}, nil))
	require.Len(t, p.Finished(nil), 2)
	require.NoError(t, p.Checked(second[0], []int64{12}, nil))
	require.Len(t, p.Finished(nil), 1)
	requireRefused(t, p.Checked(second[0], []int64{12}, nil), ErrUnknown)
	require.Equal(t, 2, p.Len())
}

// cases.md 1 (b), (c) and 10; XNZ: exact equality, whatever else the slot holds.
func TestAnyOtherValueThanTheNonceIsALapse(t *testing.T) {
	for _, cell := range []int64{0, 12, 10, -11, 11 + 1<<53, 11 << 8, 1} {
		p := NewPulls()
		start(t, p, pullOf("a", 3, 11), 0, 1)
		readAll(t, p, "a", 0, 1)
		b := p.NextChecks()
		require.NoError(t, p.Checked(b[0], []int64{cell}, nil))
		require.NoError(t, p.Checked(b[1], []int64{11}, nil))
		f := p.Finished(nil)
		require.Len(t, f, 1)
		require.Equal(t, CauseLapsed, f[0].Cause)
		require.ErrorIs(t, f[0].Err, ErrLapsed)
	}
}

// "A pull that cannot be verified fails the KV load as well: the lease fields are
// missing … or the slot READ fails."
func TestWhatCannotBeVerifiedFails(t *testing.T) {
	p := NewPulls()
	for _, l := range []*SlotRef{nil, {-1, 5}, {1, 0}, {1, MaxNonce + 1}} {
		pl := pullOf("a", 0, 1)
		pl.Lease = l
		requireRefused(t, p.Start(pl, []int{0}), ErrUnverifiable)
		require.Zero(t, p.Len(), "nothing is posted for it")
	}
	start(t, p, pullOf("a", 0, 11), 0, 1)
	readAll(t, p, "a", 0, 1)
	b := p.NextChecks()
	require.NoError(t, p.Checked(b[0], nil, fmt.Errorf("post: %w", ErrPeerLost)))
	require.NoError(t, p.Checked(b[1], []int64{11}, nil))
	f := p.Finished(nil)
	require.Equal(t, CauseUnverifiable, f[0].Cause)
	require.ErrorIs(t, f[0].Err, ErrUnverifiable)
	require.ErrorIs(t, f[0].Err, ErrPeerLost)

	// A lapse that is known counts more than a check that failed.
	start(t, p, pullOf("a", 0, 11), 0, 1)
	readAll(t, p, "a", 0, 1)
	b = p.NextChecks()
	require.NoError(t, p.Checked(b[0], nil, ErrTransfer))
	require.NoError(t, p.Checked(b[1], []int64{0}, nil))
	require.Equal(t, CauseLapsed, p.Finished(nil)[0].Cause)
}

// "false pulls without verification."
func TestWithoutVerificationThePullIsDoneWithItsBlocks(t *testing.T) {
	p := NewPulls()
	pl := pullOf("a", 0, 11)
	pl.Verify, pl.Lease = false, nil
	start(t, p, pl, 0, 1)
	readAll(t, p, "a", 0, 1)
	require.Empty(t, p.NextChecks())
	require.Equal(t, []Finished{{Pull: pl, Ranks: []int{0, 1}}}, p.Finished(nil))
}

// A failed block READ fails the pull once the others have ended as well.
func TestAFailedBlockReadWaitsForTheOthers(t *testing.T) {
	p := NewPulls()
	start(t, p, pullOf("a", 0, 11), 0, 1)
	require.NoError(t, p.BlocksRead("a", 0, ErrPeerLost))
	require.Empty(t, p.Finished(nil), "rank 1 may still write")
	readAll(t, p, "a", 1)
	f := p.Finished(nil)
	require.Equal(t, CausePeerLost, f[0].Cause)
	require.Empty(t, p.NextChecks())
}

// nixl#2044, cases.md 3 and 4: a pull that is given up keeps its buffers until
// its READs have ended, and is not started again before (XZOMBIE).
func TestAGivenUpPullIsSettledOnlyWhenNothingWrites(t *testing.T) {
	t.Run("cancel while reading", func(t *testing.T) {
		p := NewPulls()
		start(t, p, pullOf("a", 0, 11), 0, 1)
		readAll(t, p, "a", 0)
		require.NoError(t, p.Cancel("a"))
		require.Empty(t, p.Finished(nil))
		requireRefused(t, p.Start(pullOf("a", 0, 11), []int{0}), ErrBusy)
		require.NoError(t, p.BlocksRead("a", 1, ErrTransfer))
		f := p.Finished(nil)
		require.Len(t, f, 1)
		require.True(t, f[0].Settled)
		require.Zero(t, f[0].Cause)
		start(t, p, pullOf("a", 0, 11), 0)
	})
	t.Run("cancel before or during the check", func(t *testing.T) {
		p := NewPulls()
		start(t, p, pullOf("a", 0, 11), 0)
		start(t, p, pullOf("b", 1, 12), 0)
		start(t, p, pullOf("c", 2, 13), 0)
		for _, id := range []string{"a", "b", "c"} {
			readAll(t, p, id, 0)
		}
		require.NoError(t, p.Cancel("a"))
		b := p.NextChecks()
		require.Equal(t, []int{1, 2}, b[0].Slots)
		require.NoError(t, p.Cancel("b"))
		start(t, p, pullOf("b", 1, 99), 0) // a new pull of b is not the one in the batch
		require.NoError(t, p.Checked(b[0], []int64{99, 13}, nil))
		f := p.Finished(nil)
		require.Len(t, f, 3)
		require.True(t, f[0].Settled && f[1].Settled)
		require.Zero(t, f[2].Cause)
		require.False(t, f[2].Settled)
		require.Equal(t, 1, p.Len())
	})
	t.Run("timeout", func(t *testing.T) {
		p := NewPulls()
		start(t, p, pullOf("a", 0, 11), 0, 1)
		require.NoError(t, p.Fail("a", ErrTimeout))
		require.NoError(t, p.Fail("a", ErrTimeout))
		f := p.Finished(nil)
		require.Len(t, f, 1)
		require.Equal(t, CauseTimeout, f[0].Cause)
		require.True(t, f[0].Quarantined)
		readAll(t, p, "a", 0, 1)
		require.Empty(t, p.NextChecks(), "a failed pull is not received late")
		f = p.Finished(nil)
		require.Len(t, f, 1)
		require.True(t, f[0].Settled)
	})
	t.Run("failure when nothing is active", func(t *testing.T) {
		p := NewPulls()
		start(t, p, pullOf("a", 0, 11), 0)
		readAll(t, p, "a", 0)
		require.NoError(t, p.Fail("a", ErrHandshake))
		f := p.Finished(nil)
		require.Equal(t, CauseHandshake, f[0].Cause)
		require.False(t, f[0].Quarantined)
		require.Empty(t, p.NextChecks())
	})
}

func TestBadCallsOfPullsChangeNothing(t *testing.T) {
	p := NewPulls()
	requireRefused(t, p.Start(pullOf("", 0, 1), []int{0}), ErrInvalid)
	requireRefused(t, p.Start(pullOf("a", 0, 1), nil), ErrInvalid)
	requireRefused(t, p.Start(pullOf("a", 0, 1), []int{0, 0}), ErrInvalid)
	requireRefused(t, p.Start(pullOf("a", 0, 1), []int{-1}), ErrInvalid)
	require.Zero(t, p.Len())
	requireRefused(t, p.BlocksRead("a", 0, nil), ErrUnknown)
	requireRefused(t, p.Cancel("a"), ErrUnknown)
	requireRefused(t, p.Fail("a", ErrTimeout), ErrUnknown)
	requireRefused(t, p.Checked(CheckBatch{}, nil, nil), ErrUnknown)

	start(t, p, pullOf("a", 0, 11), 0, 1)
	requireRefused(t, p.BlocksRead("a", 2, nil), ErrUnknown)
	requireRefused(t, p.Fail("a", nil), ErrInvalid)
	readAll(t, p, "a", 0)
	requireRefused(t, p.BlocksRead("a", 0, nil), ErrUnknown)
	readAll(t, p, "a", 1)
	b := p.NextChecks()
	requireRefused(t, p.Checked(b[0], []int64{11, 11}, nil), ErrInvalid)
	requireRefused(t, p.Checked(b[0], nil, nil), ErrInvalid)
	require.NoError(t, p.Checked(b[0], []int64{11}, nil), "a refused call loses nothing")
	require.NoError(t, p.Checked(b[1], []int64{11}, nil))
	require.Len(t, p.Finished(nil), 1)
	require.Empty(t, p.posted)
}

func TestCausesAndErrorsMatch(t *testing.T) {
	require.Zero(t, CauseOf(nil))
	require.Equal(t, CauseTransfer, CauseOf(fmt.Errorf("boom")))
	require.NoError(t, Cause(0).Err())
	require.ErrorIs(t, Cause(200).Err(), ErrTransfer)
	for c := CauseLapsed; c < causeEnd; c++ {
		require.Equal(t, c, CauseOf(fmt.Errorf("x: %w", c.Err())))
		require.Equal(t, c, viaJSON(t, c))
	}
	require.Equal(t, CauseInvalid, CauseOf(ErrMalformed))
	for _, r := range []Reason{ReasonRead, ReasonExpired, ReasonAborted} {
		require.Equal(t, r, viaJSON(t, r))
	}
	var c Cause
	requireRefused(t, c.UnmarshalText([]byte("x")), ErrInvalid)
	var r Reason
	requireRefused(t, r.UnmarshalText([]byte("x")), ErrInvalid)
	require.Equal(t, "77", Cause(77).String())
	require.Equal(t, `lease: admit "r": why: invalid`, (&Error{"admit", "r", "why", ErrInvalid}).Error())
}
