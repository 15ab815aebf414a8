package lease

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A slot behind the last one comes from any remote. It renews nothing, not even the life without a slot that is kept there,
// and those beside it in the message are renewed.
func TestASlotHeartbeatBehindTheLastSlotRenewsNothing(t *testing.T) {
	for _, maxLife := range []time.Duration{0, time.Hour} { // each way has a loop of its own
		for _, n := range []int{1, 2, 8, 9, 16} { // eight are renewed at a time, then the rest
			for bad := range n {
				t.Run(fmt.Sprint(maxLife, n, bad), func(t *testing.T) {
					r := newRank(t, n, func(c *TableConfig) { c.MaxLife = maxLife })
					var targets []Target
					for i := range n {
						id := fmt.Sprint(i)
						r.admit(id, int64(i+100), i)
						r.grant(t0, id, int64(i+100), 30)
						targets = append(targets, Target{id, i, int64(i + 100)})
					}
					send := func() TableStats {
						msg, _, err := AppendSlotHeartbeat(nil, targets, 0)
						require.NoError(t, err)
						r.notify(at(20), "D", string(msg))
						return r.Stats()
					}
					targets[bad].Slot = n
					st := send()
					require.EqualValues(t, n-1, st.Renewals)
					require.EqualValues(t, 1, st.StaleRenewals)

					r.admit("slotless", 999, NoSlot)
					r.grant(t0, "slotless", 999, 30)
					targets[bad].Nonce = 999
					st = send()
					require.EqualValues(t, 2*(n-1), st.Renewals)
					require.EqualValues(t, 2, st.StaleRenewals)
					require.Equal(t, 2, r.Reap(at(30)))
				})
			}
		}
	}
}

// "Once all block READs of the request completed, D reads the request's lease slot on every remote rank": of any number of ranks,
// the last one's blocks make a check due, and the last one's slot the verdict.
func TestAPullOfManyRanksIsCheckedAfterTheLast(t *testing.T) {
	for _, n := range []int{3, 4, 7} {
		ranks := make([]int, n)
		for i := range ranks {
			ranks[i] = i
		}
		for first := range n {
			order := slices.Concat(ranks[first:], ranks[:first])
			t.Run(fmt.Sprint(order), func(t *testing.T) {
				p := NewPulls()
				pl := pullOf("a", 3, 11)
				unverified := pullOf("unverified", 3, 11)
				unverified.Verify = false
				for _, pl := range []Pull{pl, unverified, pullOf("cancelled", 4, 12), pullOf("failed", 5, 13)} {
					start(t, p, pl, ranks...)
				}
				require.NoError(t, p.Cancel("cancelled"))
				for i, r := range order {
					require.Empty(t, p.NextChecks(), "%d of %d ranks are read", i, n)
					require.Empty(t, p.Finished(nil), "%d of %d ranks are read", i, n)
					for _, id := range []string{"a", "unverified", "cancelled"} {
						require.NoError(t, p.BlocksRead(id, r, nil))
					}
					var err error
					if i == 0 {
						err = ErrPeerLost
					}
					require.NoError(t, p.BlocksRead("failed", r, err))
				}
				f := p.Finished(nil)
				require.Len(t, f, 3)
				require.Zero(t, f[0].Cause)
				require.True(t, f[1].Settled)
				require.Equal(t, CausePeerLost, f[2].Cause)
				batches := p.NextChecks()
				require.Len(t, batches, n)
				for i, r := range order {
					require.Empty(t, p.Finished(nil), "%d of %d slots are read", i, n)
					nonce := int64(11)
					if i == 1 {
						nonce = 0
					}
					require.NoError(t, p.Checked(batches[r], []int64{nonce}, nil))
				}
				f = p.Finished(nil)
				require.Len(t, f, 1)
				require.Equal(t, CauseLapsed, f[0].Cause)
			})
		}
	}
}

// The owner's clock is known up to half the round trip, and less from day to day. A deadline that may have passed has.
func TestADeadlineWithinTheClocksErrorHasPassed(t *testing.T) {
	var c ClockOffset
	require.NoError(t, c.Add(t0, at(4), 1000)) // 1000 is 2 s, give or take 2 s
	require.GreaterOrEqual(t, c.Error(at(4)), 2*time.Second)
	require.Greater(t, c.Error(at(86400)), c.Error(at(4))+8*time.Second)
	for _, now := range []time.Time{at(4), at(60), at(86400)} {
		for past, want := range map[time.Duration]error{-time.Millisecond: ErrExpired, time.Millisecond: nil} {
			left := ExpiryMargin + c.Error(now) + past
			expiry := 1000 + (now.Add(left).Sub(at(2))).Seconds()
			err := c.Check(now, Pull{Request: "r", LocalBlocks: [][]int{{1}}, Expiry: &expiry})
			require.ErrorIs(t, err, want, "%v after the sample, %v left", now.Sub(t0), left)
		}
	}
}

// A router that holds a lease needs no block ids: it reads nothing.
func TestAHoldWithoutBlockIDsIsRenewed(t *testing.T) {
	for _, blocks := range [][][]int{nil, {}, {{}}, {{}, {}}} {
		s := newReader(t, 1)
		p := with(offer("A"), func(p *Params) { p.RemoteBlockIDs, p.RemoteNumTokens = blocks, 0 })
		require.NoError(t, s.Hold(t0, "held", p))
		for _, now := range []time.Time{t0, at(5), at(10)} {
			hb := s.BuildPlan(now).Heartbeat
			require.Len(t, hb, 1, "%v", blocks)
			require.Equal(t, []Target{{"A", 3, 7777}}, hb[0].Targets)
		}
		require.NoError(t, s.Unhold(at(11), "held", true))
		require.Len(t, s.BuildPlan(at(11)).Release, 1)
		requireIdle(t, s)
	}
}

// "A worker zeroes the slot before it reports the request": when the trace is told, and when Ended names the life, whatever ended it.
func TestASlotIsZeroBeforeItsLifeIsReported(t *testing.T) {
	key := Key{"a", 5000}
	admit := func(r *rank) { r.admit(key.Request, key.Nonce, 1) }
	leased := func(r *rank) {
		admit(r)
		r.grant(t0, key.Request, key.Nonce, 30)
	}
	done := string(AppendReadComplete(nil, key.Request, 1, key.Nonce))
	for name, c := range map[string]struct {
		before, end func(*rank)
		want        Reason
	}{
		"read":                  {leased, func(r *rank) { r.notify(t0, "D", done) }, ReasonRead},
		"read, without a nonce": {leased, func(r *rank) { r.notify(t0, "D", "a:1") }, ReasonRead},
		"read by two": {leased, func(r *rank) {
			r.notify(t0, "D1", string(AppendReadComplete(nil, key.Request, 2, key.Nonce)))
			require.Equal(t, key.Nonce, r.cells[1], "one of them reads")
			r.notify(t0, "D2", string(AppendReadComplete(nil, key.Request, 2, key.Nonce)))
		}, ReasonRead},
		"read before the grant":     {admit, func(r *rank) { r.notify(t0, "D", done) }, ReasonRead},
		"read before the admission": {func(r *rank) { r.notify(t0, "D", done) }, admit, ReasonRead},
		"expired":                   {leased, func(r *rank) { r.Reap(at(30)) }, ReasonExpired},
		"aborted before the grant":  {admit, func(r *rank) { require.NoError(t, r.Abort(t0, key)) }, ReasonAborted},
		"revoked":                   {leased, func(r *rank) { require.NoError(t, r.Abort(t0, key)) }, ReasonAborted},
	} {
		t.Run(name, func(t *testing.T) {
			var r *rank
			told := 0
			r = newRank(t, 3, func(tc *TableConfig) {
				tc.Trace.Ended = func(e Ended, _, _ time.Duration) {
					told++
					require.Equal(t, Ended{key.Request, key.Nonce, c.want}, e)
					require.Equal(t, []int64{0, 0, 0}, r.cells)
				}
			})
			c.before(r)
			require.Empty(t, r.ends())
			require.Zero(t, told)
			c.end(r)
			require.Equal(t, []int64{0, 0, 0}, r.cells)
			require.Equal(t, []Ended{{key.Request, key.Nonce, c.want}}, r.ends())
			require.Equal(t, 1, told)
		})
	}
}
