package cgotest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/nixl"
)

// hello is what an owner says about itself.
type hello struct {
	Blob []byte
	Addr uint64
	Size int
}

// ownerChild owns memory that peers read, and does what its standard input says.
func ownerChild() int {
	size, err := strconv.Atoi(os.Getenv("OWNER_SIZE"))
	if err != nil {
		return fail(err)
	}
	a, err := nixl.NewAgent(os.Getenv("OWNER_NAME"), nixl.Config{})
	if err != nil {
		return fail(err)
	}
	if _, err := a.CreateBackend("UCX", nil); err != nil {
		return fail(err)
	}
	b, err := nixl.AllocBuffer(size)
	if err != nil {
		return fail(err)
	}
	r, err := a.Register(b)
	if err != nil {
		return fail(err)
	}
	blob, err := a.LocalMetadata()
	if err != nil {
		return fail(err)
	}
	memory := b.Bytes()
	say(hello{blob, b.Addr(), size})
	var inbox []nixl.Notification
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		verb, arg, _ := strings.Cut(in.Text(), " ")
		var err error
		switch verb {
		case "fill":
			v, _ := strconv.Atoi(arg)
			fill(memory, byte(v))
		case "deregister":
			err = r.Close()
		case "free":
			err = b.Close()
		case "close":
			err = a.Close()
		case "drain":
			inbox, err = a.Notifications(inbox)
		case "load":
			var h hello
			if err = json.Unmarshal([]byte(arg), &h); err == nil {
				_, err = a.LoadRemote(h.Blob)
			}
		case "quit":
			return 0
		}
		if err != nil {
			return fail(err)
		}
		say(len(inbox))
	}
	return 0
}

func say(v any) {
	line, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	fmt.Println(string(line))
}

func fail(err error) int {
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// owner is an owner process as a reader sees it.
type owner struct {
	*process
	hello
	name string
}

func startOwner(t testing.TB, name string, size int) *owner {
	t.Helper()
	o := &owner{process: start(t, "owner", "OWNER_NAME="+name, fmt.Sprint("OWNER_SIZE=", size))}
	o.read(&o.hello)
	return o
}

func (o *owner) do(command string) (inbox int) {
	o.t.Helper()
	o.ask(command, &inbox)
	return inbox
}

// reader is an agent with a buffer as large as the owner's.
type reader struct {
	t      testing.TB
	agent  *nixl.Agent
	buffer *nixl.Buffer
}

func newReader(t testing.TB, size int) *reader {
	t.Helper()
	a, err := nixl.NewAgent("", nixl.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	_, err = a.CreateBackend("UCX", nil)
	require.NoError(t, err)
	b, err := nixl.AllocBuffer(size)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	_, err = a.Register(b)
	require.NoError(t, err)
	return &reader{t, a, b}
}

// meet loads the owner's metadata.
func (r *reader) meet(o *owner) {
	r.t.Helper()
	name, err := r.agent.LoadRemote(o.Blob)
	require.NoError(r.t, err)
	o.name = name
}

// read makes a READ of the owner's whole memory in blocks.
func (r *reader) read(o *owner, block int, opts nixl.TransferOptions) *nixl.Transfer {
	r.t.Helper()
	var theirs, ours []nixl.Desc
	for off := 0; off+block <= o.Size; off += block {
		theirs = append(theirs, nixl.Desc{Addr: o.Addr + uint64(off), Len: uint64(block)})
		ours = append(ours, nixl.Desc{Addr: r.buffer.Addr() + uint64(off), Len: uint64(block)})
	}
	remote, err := r.agent.PrepareRemote(o.name, nixl.DRAM, theirs)
	require.NoError(r.t, err)
	local, err := r.agent.PrepareLocal(nixl.DRAM, ours)
	require.NoError(r.t, err)
	x, err := r.agent.NewTransfer(nixl.Read, local, nil, remote, nil, opts)
	require.NoError(r.t, err)
	require.NoError(r.t, local.Close())
	require.NoError(r.t, remote.Close())
	return x
}

// end polls until the transfer is no longer active.
func (r *reader) end(x *nixl.Transfer) (state nixl.State, err error) {
	r.t.Helper()
	require.Eventually(r.t, func() bool {
		state, err = x.Poll()
		return state != nixl.Active
	}, patience, time.Millisecond)
	return state, err
}

// all checks that the whole buffer has one value.
func (r *reader) all(value byte) {
	r.t.Helper()
	b := r.buffer.Bytes()
	require.Equal(r.t, len(b), bytes.Count(b, []byte{value}), "bytes of value %#x", value)
}

// fill is fast under the race detector, too.
func fill(b []byte, v byte) {
	b[0] = v
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}
