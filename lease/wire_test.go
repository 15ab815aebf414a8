package lease

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The exact bytes of vllm-wire.md 4 and of design.md, "Wire additions".
func TestMessagesHaveTheirExactBytes(t *testing.T) {
	targets := []Target{{"cmpl-a", 1, 2}, {"cmpl-b", 0x01020304, MaxNonce}}
	hb, rest, err := AppendHeartbeat(nil, targets, 0)
	require.NoError(t, err)
	require.Empty(t, rest)
	require.Equal(t, "HB:cmpl-a,cmpl-b", string(hb))

	hb2, rest, err := AppendSlotHeartbeat(nil, targets, 0)
	require.NoError(t, err)
	require.Empty(t, rest)
	require.Equal(t, "HB2:"+
		"\x01\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00"+
		"\x04\x03\x02\x01\xff\xff\xff\xff\xff\xff\x1f\x00", string(hb2))

	require.Equal(t, "cmpl-a:2", string(AppendReadComplete(nil, "cmpl-a", 2, 0)))
	require.Equal(t, "cmpl-a:2:9007199254740991", string(AppendReadComplete(nil, "cmpl-a", 2, MaxNonce)))
	require.Equal(t, "kept,x:1", string(AppendReadComplete([]byte("kept,"), "x", 1, 0)))
}

// cases.md 24: ids may hold colons; the last ones separate.
func TestReadCompleteIsSplitFromTheEnd(t *testing.T) {
	for _, tt := range []struct {
		in      string
		request string
		readers int
		nonce   int64
	}{
		{"a:1", "a", 1, 0},
		{"a:1:5", "a", 1, 5},
		{"a:b:c:4", "a:b:c", 4, 0},
		{"a:b:2:9007199254740991", "a:b", 2, MaxNonce},
		{"x y é:1", "x y é", 1, 0},
		{"a,b:1", "a,b", 1, 0},
		{"a:x:1", "a:x", 1, 0},
		{"a:0:1", "a:0", 1, 0},
		{"1:2", "1", 2, 0},
		{"a:4096", "a", MaxReaders, 0},
	} {
		rc, err := ParseReadComplete([]byte(tt.in))
		require.NoError(t, err, tt.in)
		require.Equal(t, ReadComplete{[]byte(tt.request), tt.readers, tt.nonce}, rc, tt.in)
	}
}

// cases.md 25; vllm-wire.md 9.2.
func TestMalformedReadCompletesAreRefused(t *testing.T) {
	for _, in := range []string{"", "\xff", "x", ":", ":1", "x:", "x:0", "x:-1", "x:+1", "x:01", "x: 1", "x:1 ", "x:4097",
		"x:9999999999", "x:99999999999999999999", "x:1.0", "\xff:1", "x:9007199254740992", "x:5000:9007199254740992", "PUSH_REG:\x81"} {
		_, err := ParseReadComplete([]byte(in))
		requireRefused(t, err, ErrMalformed)
		require.ErrorIs(t, err, ErrInvalid)
	}
}

// uccl#1015, cases.md 13: some backends drop what exceeds their cap.
func TestHeartbeatsAreSplitAtTheCap(t *testing.T) {
	const cap = 256
	var targets []Target
	for i := range 1000 {
		targets = append(targets, Target{fmt.Sprintf("%064d", i), i, int64(i + 1)})
	}
	type appender func([]byte, []Target, int) ([]byte, []Target, error)
	for name, appendTo := range map[string]appender{"HB": AppendHeartbeat, "HB2": AppendSlotHeartbeat} {
		t.Run(name, func(t *testing.T) {
			r := newRank(t, 1000)
			for _, tg := range targets {
				r.admit(tg.Request, tg.Nonce, tg.Slot)
				r.grant(t0, tg.Request, tg.Nonce, 30)
			}
			var msg []byte
			var err error
			for rest, messages := targets, 0; len(rest) > 0; messages++ {
				msg, rest, err = appendTo(msg[:0], rest, cap)
				require.NoError(t, err)
				require.LessOrEqual(t, len(msg), cap)
				r.notify(at(25), "D", string(msg))
			}
			require.Equal(t, at(45), r.deadline(), "every one of 1,000 leases is renewed")
			require.EqualValues(t, 1000, r.Stats().Renewals)
		})
	}
}

func TestAHeartbeatThatFitsNowhereIsAnError(t *testing.T) {
	long := Target{strings.Repeat("x", 300), NoSlot, 0}
	short := Target{"ok", NoSlot, 0}
	msg, rest, err := AppendHeartbeat([]byte("kept"), []Target{long, short}, 256)
	requireRefused(t, err, ErrInvalid)
	require.Equal(t, "kept", string(msg))
	require.Equal(t, []Target{short}, rest)
	msg, rest, err = AppendHeartbeat(nil, []Target{short, long}, 256)
	require.NoError(t, err)
	require.Equal(t, "HB:ok", string(msg))
	require.Equal(t, []Target{long}, rest)

	slot := Target{"ok", 1, 2}
	msg, rest, err = AppendSlotHeartbeat(nil, []Target{short, slot}, 256)
	requireRefused(t, err, ErrInvalid)
	require.Empty(t, msg)
	require.Equal(t, []Target{slot}, rest)
	msg, rest, err = AppendSlotHeartbeat(nil, []Target{slot, short}, 256)
	require.NoError(t, err)
	require.Len(t, msg, 4+12)
	require.Equal(t, []Target{short}, rest)
	_, _, err = AppendSlotHeartbeat(nil, []Target{slot}, 10)
	requireRefused(t, err, ErrInvalid)

	for _, f := range []func([]byte, []Target, int) ([]byte, []Target, error){AppendHeartbeat, AppendSlotHeartbeat} {
		msg, rest, err = f(nil, nil, 0)
		require.NoError(t, err)
		require.Empty(t, msg)
		require.Empty(t, rest)
	}
}

// cases.md 24, vllm-wire.md 9.18.
func TestIDsTheWireCannotCarryAreRefused(t *testing.T) {
	for _, id := range []string{"", "a,b", "HB:x", "HB2:x", "PUSH_REG:x", "\xff", strings.Repeat("x", DefaultMaxNotification)} {
		requireRefused(t, ValidateRequestID(id, 0), ErrInvalid)
	}
	requireRefused(t, ValidateRequestID(strings.Repeat("x", 240), 256), ErrInvalid)
	for _, id := range []string{"a:b", "a:1:5", "x HB:", " ", "é", strings.Repeat("x", 512), "HB"} {
		require.NoError(t, ValidateRequestID(id, 0), id)
	}
	longest := strings.Repeat("x", 256-readCompleteTail)
	require.NoError(t, ValidateRequestID(longest, 256))
	require.LessOrEqual(t, len(AppendReadComplete(nil, longest, MaxReaders, MaxNonce)), 256)
}

func FuzzReadComplete(f *testing.F) {
	for _, s := range []string{"a:1", "a:1:5", "a:b:2:9007199254740991", ":", "\xff:1", "a:00"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		rc, err := ParseReadComplete(data)
		if err != nil {
			require.ErrorIs(t, err, ErrMalformed)
			return
		}
		require.Equal(t, string(data), string(AppendReadComplete(nil, string(rc.Request), rc.Readers, rc.Nonce)))
	})
}

// fuzzNotify checks that a table takes anything, and that a refused message
// changes nothing.
func fuzzNotify(f *testing.F, prefix string, seeds ...string) {
	for _, s := range seeds {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := newRank(t, 4, func(c *TableConfig) { c.MaxEarly = 8 })
		r.admit("a", 11, 0)
		r.grant(t0, "a", 11, 30)
		r.admit("b", 12, 1)
		r.grant(t0, "b", 12, 30)
		r.admit("c", 13, NoSlot)
		before := r.Stats()
		err := r.Notify(at(15), "D", append([]byte(prefix), data...))
		if err != nil {
			require.ErrorIs(t, err, ErrMalformed)
			before.MalformedNotifications++
			before.OldestAge = 15 * time.Second // the message says what time it is
			require.Equal(t, before, r.Stats())
			require.Equal(t, at(30), r.deadline())
		}
		require.LessOrEqual(t, r.early.size, int64(8))
		require.Equal(t, 3-len(r.ends()), r.Len())
		if r.Len() > 0 && prefix != "" {
			require.False(t, r.deadline().After(at(35)))
		}
	})
}

func FuzzHeartbeat(f *testing.F) {
	fuzzNotify(f, heartbeatPrefix, "a", "a,b", "", ",", "a,,b", "zz,a", "\xff")
}

func FuzzSlotHeartbeat(f *testing.F) {
	fuzzNotify(f, slotHeartbeatPrefix, "\x00\x00\x00\x00\x0b\x00\x00\x00\x00\x00\x00\x00", "", "123456789012",
		"\x01\x00\x00\x00\x0c\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff\x0c\x00\x00\x00\x00\x00\x00\x00", strings.Repeat("\xff", 12))
}

func FuzzNotify(f *testing.F) {
	fuzzNotify(f, "", "a:1:11", "b:1", "c:1", "zz:2:9", "HB:a", "HB2:", "\x00", "a:4096")
}

func TestSlotNumbersOfAnySizeAreHarmless(t *testing.T) {
	r := newRank(t, 2)
	r.admit("a", 11, 0)
	r.grant(t0, "a", 11, 30)
	for _, slot := range []int{0, 1, 2, 1 << 30, math.MaxInt32} {
		msg, _, err := AppendSlotHeartbeat(nil, []Target{{"a", slot, 99}}, 0)
		require.NoError(t, err)
		r.notify(at(20), "D", string(msg))
	}
	require.EqualValues(t, 5, r.Stats().StaleRenewals)
	require.Equal(t, at(30), r.deadline())
}
