package nixl

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

// A map that is not cleared delivers twice natively. cases.md 38
func TestEachNotificationIsDeliveredOnce(t *testing.T) {
	l := newLink(t, 4096, 8)
	for _, m := range []string{"one", "two"} {
		require.NoError(t, l.owner.Notify(l.reader.Name(), []byte(m)))
		got := receive(t, l.reader, 1)
		require.Equal(t, []Notification{{From: l.owner.Name(), Payload: []byte(m)}}, got)
	}
	got, err := l.reader.Notifications(nil)
	require.NoError(t, err)
	require.Empty(t, got)
}

func TestNotificationsCarryAnyBytes(t *testing.T) {
	l := newLink(t, 4096, 8)
	var sent [][]byte
	for _, m := range [][]byte{nil, {}, {0}, {0, 0xff, 0}, bytes.Repeat([]byte{0xfe}, 305), make([]byte, 1<<20), []byte("end")} {
		require.NoError(t, l.owner.Notify(l.reader.Name(), m))
		sent = append(sent, append([]byte{}, m...))
	}
	got := receive(t, l.reader, len(sent))
	require.Len(t, got, len(sent))
	var payloads [][]byte
	for _, g := range got {
		require.Equal(t, l.owner.Name(), g.From)
		payloads = append(payloads, g.Payload)
	}
	require.ElementsMatch(t, sent, payloads)
	for _, g := range got { // a caller may append to what it got
		_ = append(g.Payload, "overwrite"...)
	}
	require.ElementsMatch(t, sent, payloads)
}

func TestNotificationsFromSeveralPeersAppend(t *testing.T) {
	hub := newUCX(t, Config{})
	want := map[string]int{}
	for range 5 {
		a := newUCX(t, Config{})
		introduce(t, hub, a)
		for range 20 {
			require.NoError(t, a.Notify(hub.Name(), []byte(a.Name())))
		}
		want[a.Name()] = 20
	}
	first := Notification{From: "before", Payload: []byte("kept")}
	got := []Notification{first}
	for len(got) < 101 {
		var err error
		got, err = hub.Notifications(got)
		require.NoError(t, err)
	}
	require.Equal(t, first, got[0])
	count := map[string]int{}
	for _, g := range got[1:] {
		require.Equal(t, g.From, string(g.Payload))
		count[g.From]++
	}
	require.Equal(t, want, count)
}

// An unknown agent is -6 natively, told apart from a dead one. nixl#2114, cases.md 28
func TestNotifyingAStrangerIsErrNotFound(t *testing.T) {
	a := newUCX(t, Config{})
	err := a.Notify("nobody", []byte("m"))
	require.ErrorIs(t, err, ErrNotFound)
	require.NotErrorIs(t, err, ErrPeer)
	require.ErrorIs(t, a.Connect("nobody"), ErrNotFound)
	require.ErrorIs(t, a.CheckRemote("nobody", DRAM, nil), ErrNotFound)
	require.ErrorIs(t, a.InvalidateRemote("nobody"), ErrNotFound)
}

func TestAgentNotifiesItself(t *testing.T) {
	a := newUCX(t, Config{})
	require.NoError(t, a.Notify(a.Name(), []byte("self")))
	require.Equal(t, "self", string(receive(t, a, 1)[0].Payload))
}

func TestAgentWithoutABackend(t *testing.T) {
	a, err := NewAgent("", Config{})
	require.NoError(t, err)
	defer func() { require.NoError(t, a.Close()) }()
	_, err = a.Notifications(nil)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = a.LocalMetadata()
	require.ErrorIs(t, err, ErrInvalid)
	require.Error(t, a.Notify("x", nil))
}
