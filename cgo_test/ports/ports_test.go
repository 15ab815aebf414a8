package ports

import (
	"fmt"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFreePortCanBeListenedOnAndIsNoClients(t *testing.T) {
	port, err := Free()
	require.NoError(t, err)
	_, err = net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	require.Error(t, err)
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	require.NoError(t, err)
	defer l.Close()
	for range 100 {
		c, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		defer c.Close()
		require.Greater(t, c.LocalAddr().(*net.TCPAddr).Port, port, "the kernel's ports lie above")
	}
}
