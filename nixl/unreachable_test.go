package nixl

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// silentPort is a TCP port that answers no connection: its queue of connections
// that nobody accepts is full, and the kernel drops what comes.
func silentPort(t *testing.T) uint16 {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { syscall.Close(fd) })
	require.NoError(t, syscall.Bind(fd, &syscall.SockaddrInet4{}))
	require.NoError(t, syscall.Listen(fd, 0))
	at, err := syscall.Getsockname(fd)
	require.NoError(t, err)
	port := at.(*syscall.SockaddrInet4).Port
	for i := 0; ; i++ {
		c, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", port), patience/60)
		if err != nil {
			require.True(t, os.IsTimeout(err), "%v, after %d connections", err, i)
			return uint16(port)
		}
		t.Cleanup(func() { c.Close() })
	}
}

// listening returns the TCP ports on which this process listens.
func listening(t *testing.T) map[uint16]bool {
	table, err := os.ReadFile("/proc/self/net/tcp")
	require.NoError(t, err)
	ports := map[string]uint16{}
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line)
		if len(f) > 9 && f[3] == "0A" {
			_, port, _ := strings.Cut(f[1], ":")
			n, err := strconv.ParseUint(port, 16, 16)
			require.NoError(t, err)
			ports["socket:["+f[9]+"]"] = uint16(n)
		}
	}
	files, err := filepath.Glob("/proc/self/fd/*")
	require.NoError(t, err)
	ours := map[uint16]bool{}
	for _, f := range files {
		if name, err := os.Readlink(f); err == nil && ports[name] != 0 {
			ours[ports[name]] = true
		}
	}
	return ours
}

// silentPeer returns the metadata of a peer that answers no connection, and its memory.
func silentPeer(t *testing.T) ([]byte, *Buffer) {
	silent := binary.BigEndian.AppendUint16(nil, silentPort(t))
	for { // until each port is in the metadata once, so that it is the port
		before := listening(t)
		a := newUCX(t, Config{})
		src := registered(t, a, 4096)
		blob, err := a.LocalMetadata()
		require.NoError(t, err)
		once := true
		for port := range listening(t) { // UCX listens on each network device
			if !before[port] {
				own := binary.BigEndian.AppendUint16(nil, port)
				once = once && bytes.Count(blob, own) == 1
				blob = bytes.ReplaceAll(blob, own, silent)
			}
		}
		if once {
			return blob, src
		}
	}
}

// readFromSilence posts a READ that stays active for UCX_TCP_USER_TIMEOUT.
func (l *link) readFromSilence(t *testing.T) (x *Transfer, peer string) {
	blob, src := silentPeer(t)
	peer, err := l.reader.LoadRemote(blob)
	require.NoError(t, err, "by default, an error when UCX has waited long enough")
	remote, err := l.reader.PrepareRemote(peer, DRAM, blocks(src, src.Len()))
	require.NoError(t, err)
	local, err := l.reader.PrepareLocal(DRAM, blocks(l.dst, src.Len())[:1])
	require.NoError(t, err)
	x, err = l.reader.NewTransfer(Read, local, nil, remote, nil, TransferOptions{})
	require.NoError(t, err)
	state, err := x.Post()
	require.NoError(t, err)
	require.Equal(t, Active, state)
	return x, peer
}

// UCX connects when metadata is loaded, and waits for that by default: for ten
// seconds, in which the agent serves nobody. vllm#48633, cases.md 46
func TestPeerThatDoesNotAnswerHoldsUpNobody(t *testing.T) {
	l := newLink(t, 4096, 4096)
	x, _ := l.readFromSilence(t)
	finish(t, l.read(t, TransferOptions{Notification: []byte("others go on")}))
	receive(t, l.owner, 1)
	state, err := x.Poll()
	require.NoError(t, err)
	require.Equal(t, Active, state, "still connecting")
}
