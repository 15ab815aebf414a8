package doctor

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/cgo_test/ports"
	"github.com/nixlgo/nixlgo/nixl/diagnose"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// TestMain leaves by the system call: the exit of libc runs a destructor of the wheel's libnl that crashes under -race.
func TestMain(m *testing.M) { syscall.Exit(m.Run()) }

// answer runs a doctor that answers, and returns its address.
func answer(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Answer(ctx, l, 5*time.Second) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return l.Addr().String()
}

func unused(t *testing.T) string {
	port, err := ports.Free()
	require.NoError(t, err)
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}

// neighbours.md 7: side-channel reachability both ways.
func TestTwoDoctorsFindOutWhetherTheyReachEachOther(t *testing.T) {
	there := answer(t)
	found := CheckPeer(t.Context(), there, "", "", 5*time.Second)
	require.Len(t, found, 2)
	require.Equal(t, diagnose.OK, found[0].Status)
	require.Contains(t, found[0].Value, "a doctor answers")
	require.Equal(t, diagnose.OK, found[1].Status, "%+v", found[1])
	require.Contains(t, found[1].Value, "it reaches 127.0.0.1:")

	_, port, err := net.SplitHostPort(answer(t))
	require.NoError(t, err)
	found = CheckPeer(t.Context(), there, "127.0.0.1", port, 5*time.Second)
	require.Equal(t, "it reaches 127.0.0.1:"+port, found[1].Value, "whoever listens there already")

	// 192.0.2.1 is of no machine: the address that this one would advertise is wrong.
	found = CheckPeer(t.Context(), there, "192.0.2.1", "", 5*time.Second)
	require.Equal(t, diagnose.OK, found[0].Status)
	require.Equal(t, diagnose.Fail, found[1].Status)
	require.Contains(t, found[1].Value, "does not reach 192.0.2.1")
	require.Contains(t, found[1].Remedy, "VLLM_NIXL_SIDE_CHANNEL_HOST")
}

// The doctor that answers cannot come back: something else listens at the address, and says nothing.
func TestACallBackThatIsNotAnsweredIsAFinding(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and is mute
	require.NoError(t, err)
	defer l.Close()
	var r struct {
		calledBack
		own string
	}
	there, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { _ = Answer(ctx, there, 50*time.Millisecond) }()
	r, err = askBack(t.Context(), there.Addr().String(), "127.0.0.1", fmt.Sprint(l.Addr().(*net.TCPAddr).Port), 5*time.Second)
	require.NoError(t, err)
	require.Contains(t, r.Error, "deadline exceeded")
}

func TestARunningInstanceIsReachedAndLeftAlone(t *testing.T) {
	n, err := nixlgo.New(nixlgo.Config{Engine: "P", Layers: 1, Blocks: 1, BlockBytes: 64, Fabric: rdmatest.NewNetwork().NewFabric("P")})
	require.NoError(t, err)
	defer n.Close()
	found := CheckPeer(t.Context(), fmt.Sprint("127.0.0.1:", n.Port()), "", "", 5*time.Second)
	require.Len(t, found, 2)
	require.Contains(t, found[0].Value, `engine "P" answers in `)
	require.Equal(t, diagnose.OK, found[0].Status)
	require.Equal(t, "not tested", found[1].Value)
	require.Contains(t, found[1].Cause, "doctor --answer")
	require.EqualValues(t, 1, n.Stats().SideChannel.Answered)
	require.Zero(t, n.Stats().SideChannel.Bad, "vllm#54757: what is no handshake would end vLLM's side channel")
}

// Who refuses the doctor for want of its key was reached.
func TestAnInstanceWithAKeyIsReached(t *testing.T) {
	n, err := nixlgo.New(nixlgo.Config{Layers: 1, Blocks: 1, BlockBytes: 64, Key: []byte("0123456789abcdef"), Fabric: rdmatest.NewNetwork().NewFabric("P")})
	require.NoError(t, err)
	defer n.Close()
	found := CheckPeer(t.Context(), fmt.Sprint("127.0.0.1:", n.Port()), "", "", 5*time.Second)
	require.Len(t, found, 2)
	require.Equal(t, []any{diagnose.OK, "an instance answers that has a shared key", "not tested"}, []any{found[0].Status, found[0].Value, found[1].Value})
	found = CheckPeer(t.Context(), answer(t), "127.0.0.1", strconv.Itoa(n.Port()), 5*time.Second)
	require.Equal(t, "it reaches 127.0.0.1:"+strconv.Itoa(n.Port()), found[1].Value)
}

func TestAPeerThatIsNotReachedIsAFailureWithARemedy(t *testing.T) {
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer mute.Close()
	for _, c := range []struct{ address, value, cause, remedy string }{
		{unused(t), "unreachable", "nobody listens there", "start the instance"},
		{mute.Addr().String(), "timeout", "stalled", "open the port"},
		{"no-such-host.invalid:5600", "unreachable", "does not resolve", "correct the address"},
		{"127.0.0.1:70000", "other", "not in 1…65535", "correct the address"},
		{"127.0.0.1", "unreachable", "missing port", "correct the address"},
	} {
		found := CheckPeer(t.Context(), c.address, "", "", 200*time.Millisecond)
		require.Len(t, found, 1, c.address)
		require.Equal(t, diagnose.Fail, found[0].Status)
		require.Equal(t, c.value, found[0].Value, "%+v", found[0])
		require.Contains(t, found[0].Cause, c.cause)
		require.Contains(t, found[0].Remedy, c.remedy)
	}
}
