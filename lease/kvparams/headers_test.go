package kvparams

import (
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHostPortsAreReadFromHeaders(t *testing.T) {
	for _, tt := range []struct {
		values []string
		want   []string
	}{
		{nil, nil},
		{[]string{""}, nil},
		{[]string{" , ,"}, nil},
		{[]string{"10.0.0.1:8000"}, []string{"10.0.0.1:8000"}},
		{[]string{"a:1, b.svc.cluster.local:65535 ,\t[fd00::7]:8000"}, []string{"a:1", "b.svc.cluster.local:65535", "[fd00::7]:8000"}},
		{[]string{"a:1,b:2", "[::1]:3"}, []string{"a:1", "b:2", "[::1]:3"}},
		{[]string{"[fe80::1%eth0]:80"}, []string{"[fe80::1%eth0]:80"}},
	} {
		h := http.Header{http.CanonicalHeaderKey(HeaderPrefiller): tt.values}
		got, err := HostPorts(h.Values(HeaderPrefiller))
		require.NoError(t, err, tt.values)
		var s []string
		for _, hp := range got {
			s = append(s, hp.String())
			host, _, err := net.SplitHostPort(hp.String())
			require.NoError(t, err)
			require.Equal(t, host, hp.Host)
		}
		require.Equal(t, tt.want, s)
	}
}

func TestOtherAddressesAreRefusedWhole(t *testing.T) {
	for _, bad := range []string{"a", "a:", ":8000", "a:0", "a:65536", "a:-1", "a:+1", "a:http", "::1:8000", "fd00::7", "[::1]", "[]:1", "[a]:1", "[10.0.0.1]:1",
		"http://a:1", "a/b:1", "u@a:1", "a:1/x", "a:1?x", "a b:1", "é:1", "a\r\nx:1", strings.Repeat("a", 254) + ":1", "12345"} {
		got, err := HostPorts([]string{"good:1," + bad})
		require.ErrorIs(t, err, ErrInvalid, bad)
		require.Nil(t, got)
	}
	_, err := HostPorts([]string{"fd00::7:8000"})
	require.ErrorContains(t, err, "[IPv6]:port")
}
