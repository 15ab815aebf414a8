package etcd

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nixlgo/nixlgo/cgo_test/ports"
	"github.com/nixlgo/nixlgo/rdma"
)

func TestConfigFromTheEnvironment(t *testing.T) {
	t.Setenv(envEndpoints, " http://a:2379, https://b:2379,c:2379 ,")
	t.Setenv(envNamespace, "/team-a/")
	c, err := ConfigFromEnv()
	require.NoError(t, err)
	require.Equal(t, []string{"http://a:2379", "https://b:2379", "c:2379"}, c.Client.Endpoints)
	d, err := Open(c)
	require.NoError(t, err)
	defer d.Close()
	key, err := d.key("a/b c", 3)
	require.NoError(t, err)
	require.Equal(t, "/team-a/nixlgo/a%2Fb%20c/3", key)

	for _, bad := range []string{"", " , ", "ftp://a:1", "http://", "http://[::1", "a:2379,://"} {
		t.Setenv(envEndpoints, bad)
		_, err := ConfigFromEnv()
		require.ErrorIs(t, err, rdma.ErrConfig, bad)
		require.ErrorContains(t, err, envEndpoints, bad)
	}
}

func TestUnusableConfigIsNamed(t *testing.T) {
	for want, change := range map[string]func(*Config){
		"no endpoints": func(c *Config) { c.Client.Endpoints = nil },
		"TTL is 1s":    func(c *Config) { c.TTL = time.Second },
		"TTL is 2.5s":  func(c *Config) { c.TTL = 2500 * time.Millisecond },
		"TTL is 2h":    func(c *Config) { c.TTL = 2 * time.Hour },
	} {
		c := Config{}
		c.Client.Endpoints = []string{"localhost:1"}
		change(&c)
		_, err := Open(c)
		require.ErrorIs(t, err, rdma.ErrConfig, want)
		require.ErrorContains(t, err, want)
	}
}

func TestWhatIsTriedAgain(t *testing.T) {
	for _, c := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{rpctypes.ErrNoLeader, true},
		{rpctypes.ErrTimeout, true},
		{fmt.Errorf("grant: %w", rpctypes.ErrLeaderChanged), true},
		{rpctypes.ErrCompacted, true},
		{status.Error(codes.Unavailable, "connection refused"), true},
		{status.Error(codes.DeadlineExceeded, "late"), true},
		{context.DeadlineExceeded, true},
		{context.Canceled, false},
		{rpctypes.ErrPermissionDenied, false},
		{rpctypes.ErrNoSpace, false},
		{rpctypes.ErrLeaseNotFound, false},
		{status.Error(codes.ResourceExhausted, "received message larger than max"), false},
		{rdma.ErrNotListed, false},
		{ErrClosed, false},
	} {
		require.Equal(t, c.want, passing(c.err), "%v", c.err)
	}
}

// A login that nobody answers ends, and is no fault of the config.
func TestLoginWithoutAnAnswerEnds(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	c := Config{}
	c.Client.Endpoints = []string{silent.Addr().String()}
	c.Client.Username, c.Client.Password = "node", "password"
	full, err := c.withDefaults()
	require.NoError(t, err)
	require.NotZero(t, full.Client.DialTimeout)
	c.Client.DialTimeout = 50 * time.Millisecond
	_, err = Open(c)
	require.ErrorContains(t, err, silent.Addr().String())
	require.NotErrorIs(t, err, rdma.ErrConfig)
}

// Where no etcd answers, calls end with their context, and Close does not wait for it.
func TestCallsEndWithTheirContextsWithoutAServer(t *testing.T) {
	port, err := ports.Free()
	require.NoError(t, err)
	nobody := fmt.Sprintf("127.0.0.1:%d", port)
	c := Config{}
	c.Client.Endpoints = []string{nobody}
	d, err := Open(c)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, _, err = d.Lookup(ctx, "engine", []int{0})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, nobody)
	require.NotErrorIs(t, err, rdma.ErrNotListed)
	require.ErrorIs(t, d.Changed(ctx, "engine", 0), context.DeadlineExceeded)
	require.ErrorIs(t, d.Publish(ctx, "engine", 0, []byte("x")), context.DeadlineExceeded)
	require.NoError(t, d.Close())
	require.NoError(t, d.Close())
	require.ErrorIs(t, d.Publish(t.Context(), "engine", 0, []byte("x")), ErrClosed)
	require.NoError(t, d.Withdraw(t.Context(), "engine", 0), "nothing is published any more")
	_, _, err = d.Lookup(t.Context(), "engine", []int{0})
	require.ErrorIs(t, err, ErrClosed)
	require.ErrorIs(t, err, net.ErrClosed)
	require.ErrorIs(t, d.Changed(t.Context(), "engine", 0), ErrClosed)
}
