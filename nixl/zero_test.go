package nixl

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// A value that no constructor made may panic, but never with a lock held: who recovers goes on with the agent.
func TestPanicOverAZeroValueLeavesTheAgentUsable(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	a := l.reader
	idle := l.read(t, TransferOptions{})
	started := l.read(t, TransferOptions{})
	_, err := started.Post()
	require.NoError(t, err)
	for name, call := range map[string]func(){
		"list":               func() { a.NewTransfer(Read, &List{}, nil, &List{}, nil, TransferOptions{}) },
		"remote list":        func() { a.Start(Read, l.local, nil, &List{}, nil, TransferOptions{}) },
		"backend":            func() { a.Start(Read, l.local, nil, l.remote, nil, TransferOptions{Backend: &Backend{}}) },
		"backend to be used": func() { a.Register(&HostRange{desc: Desc{Addr: 1 << 20, Len: 8}}, &Backend{}) },
		"registration":       func() { a.PartialMetadata(&Registration{}) },
		"transfer":           func() { PollAll([]*Transfer{idle, {}, idle}, make([]State, 3)) },
		"context":            func() { var none context.Context; started.Wait(none) },
		"Agent":              func() { (&Agent{}).Close() },
		"no Agent":           func() { (*Agent)(nil).Close() },
		"Buffer":             func() { (&Buffer{}).Close() },
	} {
		func() {
			defer func() { recover() }()
			call()
		}()
		require.True(t, a.s.mu.TryLock(), name)
		a.s.mu.Unlock()
	}
	b := &Buffer{}
	require.Panics(t, func() { b.Close() })
	require.True(t, b.mu.TryLock())
	b.mu.Unlock()
	require.NoError(t, idle.Close())
	finish(t, l.read(t, TransferOptions{}))
}
