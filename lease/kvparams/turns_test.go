package kvparams

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func tokens(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = 7*i + 3
	}
	return all
}

func TestEveryTokenOfALongHistoryCounts(t *testing.T) {
	now := time.Unix(1000, 0)
	raw := strings.Replace(string(golden(t, "end of turn 1, owner D, bidirectional")), `"remote_num_tokens": 239`, `"remote_num_tokens": 2000`, 1)
	turns, err := NewTurns(time.Minute, 1)
	require.NoError(t, err)
	for _, i := range []int{-1, 0, 511, 512, 513, 1999} {
		require.NoError(t, turns.Keep(now, "s", tokens(2000), parsed(t, raw)))
		prompt := tokens(2100)
		if i >= 0 {
			prompt[i] ^= 1 << 20
		}
		require.Equal(t, i >= 0, turns.Take(now, "s", prompt).IsZero(), i)
	}
}

// A10.20: turn 2 extends turn 1 exactly -> stored params reused; rewritten
// history -> not; TTL 60 s.
func TestTurnsAreReusedOnlyWhenThePromptExtendsTheHistory(t *testing.T) {
	now := time.Unix(1000, 0)
	h := parsed(t, string(golden(t, "end of turn 1, owner D, bidirectional"))) // 239 tokens: the last of 240 was not computed
	history := tokens(240)
	rewritten := tokens(300)
	rewritten[100]++
	late := tokens(300)
	late[239]++ // beyond what D holds
	for _, tt := range []struct {
		name   string
		scope  string
		prompt []int
		after  time.Duration
		hit    bool
	}{
		{"extends", "s", tokens(300), 59 * time.Second, true},
		{"same tokens", "s", tokens(240), 0, true},
		{"token beyond the blocks differs", "s", late, 0, true},
		{"just all blocks", "s", tokens(239), 0, true},
		{"shorter", "s", tokens(238), 0, false},
		{"rewritten", "s", rewritten, 0, false},
		{"shifted", "s", append([]int{1}, tokens(300)...), 0, false},
		{"empty", "s", nil, 0, false},
		{"other scope", "t", tokens(300), 0, false},
		{"expired", "s", tokens(300), time.Minute, false},
	} {
		turns, err := NewTurns(time.Minute, 10)
		require.NoError(t, err)
		require.NoError(t, turns.Keep(now, "s", history, h))
		got := turns.Take(now.Add(tt.after), tt.scope, tt.prompt)
		require.Equal(t, tt.hit, !got.IsZero(), tt.name)
		if tt.hit {
			require.Equal(t, h, got)
			require.Zero(t, turns.Len())
			require.True(t, turns.Take(now, "s", tt.prompt).IsZero(), "given out twice")
		}
	}
}

func TestTurnsRefuseWhatProvesNothing(t *testing.T) {
	now := time.Unix(1000, 0)
	turns, err := NewTurns(time.Minute, 10)
	require.NoError(t, err)
	raw := string(golden(t, "end of turn 1, owner D, bidirectional"))
	requireKey(t, turns.Keep(now, "s", tokens(238), parsed(t, raw)), ErrUnusable, "remote_num_tokens")
	requireKey(t, turns.Keep(now, "s", tokens(240), parsed(t, strings.Replace(raw, `"remote_num_tokens": 239`, `"remote_num_tokens": 0`, 1))), ErrUnusable, "remote_num_tokens")
	requireKey(t, turns.Keep(now, "s", tokens(240), parsed(t, offer)), ErrUnusable, "do_remote_decode")
	require.ErrorIs(t, turns.Keep(now, "s", tokens(240), Handoff{}), ErrNoHandoff)
	require.Zero(t, turns.Len())
	for _, bad := range []struct {
		ttl   time.Duration
		limit int
	}{{0, 1}, {-1, 1}, {1, 0}} {
		_, err = NewTurns(bad.ttl, bad.limit)
		require.ErrorIs(t, err, ErrInvalid)
	}
}

func TestTurnsAreBoundedAndEndWithTheReadersDeadline(t *testing.T) {
	now := time.Unix(1000, 0)
	turns, err := NewTurns(time.Minute, 3)
	require.NoError(t, err)
	raw := string(golden(t, "end of turn 1, owner D, bidirectional"))
	for i := range 5 {
		require.NoError(t, turns.Keep(now, fmt.Sprint(i), tokens(240), parsed(t, raw)))
	}
	require.Equal(t, 3, turns.Len())
	require.True(t, turns.Take(now, "1", tokens(240)).IsZero(), "the oldest go first")
	require.False(t, turns.Take(now, "2", tokens(240)).IsZero())

	short := strings.TrimSuffix(raw, "}") + `,"remote_blocks_ttl":5}`
	require.NoError(t, turns.Keep(now, "4", tokens(240), parsed(t, short)))
	require.Equal(t, 2, turns.Len(), "a scope has one entry")
	require.True(t, turns.Take(now.Add(5*time.Second), "4", tokens(240)).IsZero())
	require.Equal(t, 1, turns.Len())
}

func TestATurnIsGivenOutOnceUnderContention(t *testing.T) {
	now := time.Unix(1000, 0)
	turns, err := NewTurns(time.Minute, 3)
	require.NoError(t, err)
	h := parsed(t, string(golden(t, "end of turn 1, owner D, bidirectional")))
	require.NoError(t, turns.Keep(now, "s", tokens(240), h))
	var hits atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if !turns.Take(now, "s", tokens(300)).IsZero() {
				hits.Add(1)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 1, hits.Load())
}
