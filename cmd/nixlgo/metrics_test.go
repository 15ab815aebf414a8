package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/lease/hold"
)

// scrape returns a series of a daemon, whose address is a URL or unix:/path.
func scrape(t *testing.T, address, series string) float64 {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		address = "http://hold"
		client.Transport.(*http.Transport).DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
	}
	resp, err := client.Get(strings.TrimSuffix(address, "/") + metricsPath)
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode, string(text))
	found := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(series) + ` (\S+)$`).FindSubmatch(text)
	require.NotNil(t, found, "%s is not in\n%s", series, text)
	v, err := strconv.ParseFloat(string(found[1]), 64)
	require.NoError(t, err)
	return v
}

// An operator sees that the daemon renews, and when its heartbeats do not arrive any more.
func TestHoldShowsItsHeartbeats(t *testing.T) {
	exe := program(t)
	for name, args := range map[string][]string{"socket": socketArgs(t), "port": {"--listen", "127.0.0.1:0", "--state", t.TempDir() + "/state"}} {
		t.Run(name, func(t *testing.T) {
			owner := startNode(t, holdLease(3*time.Second))
			d := startHold(t, exe, append(args, "--lease", "3s")...)
			require.Zero(t, scrape(t, d.ready.Address, "nixlgo_heartbeat_sent_total"))
			require.Zero(t, scrape(t, d.ready.Address, "nixlgo_heartbeat_leases"))

			holdOf(t, d, publish(t, owner, "req", 1), 10*time.Minute)
			deadline(t, "heartbeats", func() bool { return scrape(t, d.ready.Address, "nixlgo_heartbeat_sent_total") > 2 })
			require.EqualValues(t, 1, scrape(t, d.ready.Address, "nixlgo_heartbeat_leases"))
			require.Zero(t, scrape(t, d.ready.Address, "nixlgo_heartbeat_failures_total"))

			require.NoError(t, owner.Close())
			deadline(t, "a failure", func() bool { return scrape(t, d.ready.Address, "nixlgo_heartbeat_failures_total") > 0 })
		})
	}
}

// Prometheus cannot scrape the socket, which is what a router has; and what scrapes need not be able to hold and release.
func TestHoldShowsItsMetricsAloneOnAPort(t *testing.T) {
	exe := program(t)
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	_, port, err := net.SplitHostPort(free.Addr().String())
	require.NoError(t, err)
	args := append(socketArgs(t), "--metrics-port", port)
	code, _, stderr := run(t, exe, append([]string{"hold"}, args...)...)
	require.Equal(t, exitFailed, code)
	require.Contains(t, stderr, "--metrics-port "+port+": ")
	require.Contains(t, stderr, "address already in use")
	require.NoError(t, free.Close())

	startHold(t, exe, args...)
	url := "http://127.0.0.1:" + port
	require.Zero(t, scrape(t, url, "nixlgo_heartbeat_failures_total"))
	for _, path := range []string{hold.HoldsPath, hold.HealthPath, "/"} {
		resp, err := http.Get(url + path)
		require.NoError(t, err)
		resp.Body.Close()
		require.Equal(t, http.StatusNotFound, resp.StatusCode, path)
	}
}

func TestRelayShowsItsNode(t *testing.T) {
	exe := program(t)
	owner := startNode(t)
	_, r := startRelay(t, exe, "--like", sideChannel(owner.Port()))
	require.Zero(t, scrape(t, r.URL, "nixlgo_lease_granted_total"))
	pub := publish(t, owner, "req", 1, 2)
	relayed(t, r, pub.Params())
	require.EqualValues(t, 1, scrape(t, r.URL, "nixlgo_load_received_total"))
	require.EqualValues(t, 1, scrape(t, r.URL, "nixlgo_lease_granted_total"))
	require.EqualValues(t, 2, scrape(t, r.URL, "nixlgo_lease_pinned_blocks"))
	requireEnds(t, pub, lease.ReasonRead)
}
