package nixl

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// peer-tests B41, C15, B39
func TestTelemetryOfATransfer(t *testing.T) {
	a := newUCX(t, Config{Telemetry: true})
	b := registered(t, a, 1<<20)
	all := blocks(b, 4096)
	local, err := a.PrepareLocal(DRAM, all[:64])
	require.NoError(t, err)
	self, err := a.PrepareRemote(a.Name(), DRAM, all[64:128])
	require.NoError(t, err)
	for _, o := range []TransferOptions{{}, {SkipMerge: true}} {
		x, err := a.NewTransfer(Read, local, nil, self, nil, o)
		require.NoError(t, err)
		before := time.Now()
		finish(t, x)
		m, err := x.Telemetry()
		require.NoError(t, err)
		require.WithinRange(t, m.Start, before.Add(-time.Millisecond), time.Now())
		require.Positive(t, m.Post)
		require.GreaterOrEqual(t, m.Transfer, m.Post)
		require.Zero(t, m.Transfer%time.Microsecond)
		require.EqualValues(t, 64*4096, m.Bytes)
		require.InDelta(t, float64(m.Bytes)/m.Transfer.Seconds(), m.Rate(), 1)
		require.Positive(t, m.Rate())
		if o.SkipMerge {
			require.EqualValues(t, 64, m.Descriptors)
		} else {
			require.EqualValues(t, 1, m.Descriptors, "neighbours are joined")
		}
		backend, err := x.Backend()
		require.NoError(t, err)
		require.Same(t, a.s.backends[0], backend)
		require.NoError(t, x.Close())
		_, err = x.Telemetry()
		require.ErrorIs(t, err, ErrClosed)
		_, err = x.Backend()
		require.ErrorIs(t, err, ErrClosed)
	}
	require.Zero(t, Telemetry{Bytes: 1}.Rate())
}

// peer-tests B42, C15: absent telemetry is told apart from a failure.
func TestAbsentTelemetryIsErrNoTelemetry(t *testing.T) {
	check := func(cfg Config) {
		a := newUCX(t, cfg)
		b := registered(t, a, 8192)
		x, err := a.CreateTransfer(Read, DRAM, blocks(b, 4096)[:1], a.Name(), DRAM, blocks(b, 4096)[1:], TransferOptions{})
		require.NoError(t, err)
		finish(t, x)
		_, err = x.Telemetry()
		require.ErrorIs(t, err, ErrNoTelemetry)
		require.NotErrorIs(t, err, ErrBackend)
		require.ErrorContains(t, err, "Config.Telemetry")
	}
	check(Config{})
	t.Setenv("NIXL_TELEMETRY_ENABLE", "n")
	if libraryBefore(t, "1.4") {
		return // there, the configuration wins
	}
	check(Config{Telemetry: true})
}

// peer-tests B43
func TestTelemetryBeforeTheEndIsErrState(t *testing.T) {
	a := newUCX(t, Config{Telemetry: true})
	b := registered(t, a, 8192)
	x, err := a.CreateTransfer(Read, DRAM, blocks(b, 4096)[:1], a.Name(), DRAM, blocks(b, 4096)[1:], TransferOptions{})
	require.NoError(t, err)
	_, err = x.Telemetry()
	require.ErrorIs(t, err, ErrState)
	require.NotErrorIs(t, err, ErrNoTelemetry)
	finish(t, x)
	_, err = x.Telemetry()
	require.NoError(t, err)
}

func TestTelemetryStartsOnTheWallClock(t *testing.T) {
	at := time.Date(2026, 9, 1, 0, 0, 0, 0, time.UTC)
	require.True(t, at.Equal(wallClock(uint64(at.UnixMicro()))), "a library that counts from the epoch")
	require.WithinRange(t, wallClock(1), time.Unix(946_684_800, 0), time.Now())
}
