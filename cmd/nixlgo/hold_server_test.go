package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/lease/hold"
)

// serveHolder runs a daemon's insides in this process, on a port of the loopback interface.
func serveHolder(t *testing.T, change ...func(*holdConfig)) (*holder, *hold.Client, string) {
	t.Helper()
	c := &holdConfig{ttl: time.Minute, maxTTL: 10 * time.Minute, maxHolds: 100, maxBody: 4096, state: filepath.Join(t.TempDir(), "state")}
	for _, f := range change {
		f(c)
	}
	state, err := openHoldState(c.state)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, state.Close()) })
	node := startNode(t, func(c *nixlgo.Config) { c.HoldOnly = true })
	h := newHolder(c, node, state, slog.New(slog.DiscardHandler))
	t.Cleanup(h.stop)
	_, err = h.resume()
	require.NoError(t, err)
	scraped, err := metricsOf(node)
	require.NoError(t, err)
	s := httptest.NewServer(h.handler(true, scraped))
	t.Cleanup(s.Close)
	client, err := hold.New(s.URL)
	require.NoError(t, err)
	t.Cleanup(func() { client.Close() })
	return h, client, s.URL
}

// nowhere are params of an owner that does not answer.
func nowhere(request string) []byte {
	return fmt.Appendf(nil, `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2]],"remote_engine_id":"gone",`+
		`"remote_request_id":%q,"remote_host":"127.0.0.1","remote_port":1,"remote_lease_slot":5,"remote_lease_nonce":77,"router_key":"x"}`, request)
}

func TestHoldRefusesBadRequestsInJSON(t *testing.T) {
	h, _, url := serveHolder(t)
	good := string(nowhere("req"))
	body := func(params string) string { return `{"kv_transfer_params":` + params + `}` }
	type request struct{ method, path, contentType, host, body string }
	for name, c := range map[string]struct {
		request
		status int
		code   hold.Code
		text   string
	}{
		"no JSON":         {request{"POST", "/v1/holds", "", "", "{"}, 400, hold.CodeInvalid, "want an object"},
		"an array":        {request{"POST", "/v1/holds", "", "", "[]"}, 400, hold.CodeInvalid, "want an object"},
		"no params":       {request{"POST", "/v1/holds", "", "", "{}"}, 400, hold.CodeInvalid, "no handoff"},
		"null params":     {request{"POST", "/v1/holds", "", "", body("null")}, 400, hold.CodeInvalid, "no handoff"},
		"a key twice":     {request{"POST", "/v1/holds", "", "", body(strings.Replace(good, "{", `{"remote_port":2,`, 1))}, 400, hold.CodeInvalid, "remote_port"},
		"no engine":       {request{"POST", "/v1/holds", "", "", body(strings.Replace(good, `"gone"`, `""`, 1))}, 400, hold.CodeInvalid, "remote_engine_id"},
		"a wild port":     {request{"POST", "/v1/holds", "", "", body(strings.Replace(good, `"remote_port":1`, `"remote_port":70000`, 1))}, 400, hold.CodeInvalid, "remote_port"},
		"not renewable":   {request{"POST", "/v1/holds", "", "", body(strings.Replace(good, `"do_remote_prefill":true`, `"do_remote_prefill":false`, 1))}, 400, hold.CodeInvalid, "do_remote_prefill"},
		"an id of commas": {request{"POST", "/v1/holds", "", "", body(strings.Replace(good, `"req"`, `"a,b"`, 1))}, 400, hold.CodeInvalid, "remote_request_id"},
		"no duration":     {request{"POST", "/v1/holds", "", "", `{"ttl":"60","kv_transfer_params":` + good + `}`}, 400, hold.CodeInvalid, "ttl"},
		"a number as ttl": {request{"POST", "/v1/holds", "", "", `{"ttl":60,"kv_transfer_params":` + good + `}`}, 400, hold.CodeInvalid, "ttl"},
		"no time":         {request{"POST", "/v1/holds", "", "", `{"ttl":"0s","kv_transfer_params":` + good + `}`}, 400, hold.CodeInvalid, "ttl"},
		"too long":        {request{"POST", "/v1/holds", "", "", `{"ttl":"10m1s","kv_transfer_params":` + good + `}`}, 400, hold.CodeInvalid, "10m0s"},
		"too large":       {request{"POST", "/v1/holds", "", "", body(strings.Replace(good, `"x"`, `"`+strings.Repeat("x", 4096)+`"`, 1))}, 413, hold.CodeTooLarge, "4096"},
		"a form":          {request{"POST", "/v1/holds", "text/plain", "", body(good)}, 415, hold.CodeMediaType, "application/json"},
		"another host":    {request{"POST", "/v1/holds", "", "evil.example:80", body(good)}, 403, hold.CodeForbidden, "evil.example"},
		"GET of a host":   {request{"GET", "/v1/holds", "", "evil.example:80", ""}, 403, hold.CodeForbidden, "evil.example"},
		"a scrape of it":  {request{"GET", "/metrics", "", "evil.example:80", ""}, 403, hold.CodeForbidden, "evil.example"},
		"unknown":         {request{"GET", "/v1/holds/ABC", "", "", ""}, 404, hold.CodeUnknown, "ABC"},
		"unknown release": {request{"DELETE", "/v1/holds/ABC?release=true", "", "", ""}, 404, hold.CodeUnknown, "ABC"},
		"release unsaid":  {request{"DELETE", "/v1/holds/ABC", "", "", ""}, 400, hold.CodeInvalid, "safe only while no decoder"},
		"release empty":   {request{"DELETE", "/v1/holds/ABC?release", "", "", ""}, 400, hold.CodeInvalid, "safe only while no decoder"},
		"release twice":   {request{"DELETE", "/v1/holds/ABC?release=true&release=false", "", "", ""}, 400, hold.CodeInvalid, "once"},
		"release 1":       {request{"DELETE", "/v1/holds/ABC?release=1", "", "", ""}, 400, hold.CodeInvalid, "release=true"},
		"no resource":     {request{"GET", "/v2/holds", "", "", ""}, 404, hold.CodeNoResource, "/v2/holds"},
		"no method":       {request{"PUT", "/v1/holds", "", "", ""}, 404, hold.CodeNoResource, "PUT"},
		"all at once":     {request{"DELETE", "/v1/holds?release=true", "", "", ""}, 404, hold.CodeNoResource, "DELETE"},
	} {
		t.Run(name, func(t *testing.T) {
			q, err := http.NewRequestWithContext(t.Context(), c.method, url+c.path, strings.NewReader(c.body))
			require.NoError(t, err)
			q.Header.Set("Content-Type", "application/json; charset=utf-8")
			if c.contentType != "" {
				q.Header.Set("Content-Type", c.contentType)
			}
			q.Host = c.host
			resp, err := http.DefaultClient.Do(q)
			require.NoError(t, err)
			defer resp.Body.Close()
			text, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.Equal(t, c.status, resp.StatusCode, string(text))
			require.Equal(t, "application/json", resp.Header.Get("Content-Type"))
			var e hold.Error
			require.NoError(t, json.Unmarshal(text, &e), string(text))
			require.Equal(t, c.code, e.Code)
			require.Contains(t, e.Message, c.text)
		})
	}
	require.Empty(t, h.holds)
	require.Zero(t, h.node.Stats().Scheduler.Tracked)
}

func TestALeaseHasOneHold(t *testing.T) {
	h, c, _ := serveHolder(t)
	first, err := c.Hold(t.Context(), nowhere("req"), time.Minute)
	require.NoError(t, err)
	again, err := c.Hold(t.Context(), nowhere("req"), time.Second)
	require.NoError(t, err)
	require.Equal(t, first, again, "a shorter one does not shorten it")
	longer, err := c.Hold(t.Context(), nowhere("req"), 2*time.Minute)
	require.NoError(t, err)
	require.Equal(t, first.ID, longer.ID)
	require.WithinRange(t, longer.Expires, first.Expires.Add(time.Minute), time.Now().Add(2*time.Minute))
	_, err = c.Hold(t.Context(), bytes.Replace(nowhere("req"), []byte("77"), []byte("78"), 1), 0)
	require.NoError(t, err, "a later lease of the same request id is another one")
	all, err := c.List(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 2)
	require.EqualValues(t, 2, h.node.Stats().Scheduler.Tracked)
	health, err := c.Health(t.Context())
	require.NoError(t, err)
	require.Equal(t, hold.Health{Holds: 2, Max: 100}, health)
}

func TestNoMoreThanTheMostAreHeld(t *testing.T) {
	_, c, _ := serveHolder(t, func(c *holdConfig) { c.maxHolds = 2 })
	a, err := c.Hold(t.Context(), nowhere("a"), 0)
	require.NoError(t, err)
	_, err = c.Hold(t.Context(), nowhere("b"), 0)
	require.NoError(t, err)
	_, err = c.Hold(t.Context(), nowhere("c"), 0)
	require.ErrorIs(t, err, hold.ErrFull)
	_, err = c.Hold(t.Context(), nowhere("b"), 0)
	require.NoError(t, err, "held already")
	require.NoError(t, c.Leave(t.Context(), a.ID))
	_, err = c.Hold(t.Context(), nowhere("c"), 0)
	require.NoError(t, err)
}

func TestAHoldEndsByItself(t *testing.T) {
	h, c, _ := serveHolder(t)
	_, err := c.Hold(t.Context(), nowhere("a"), time.Millisecond)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.holds)+len(h.byLease) == 0
	}, 10*time.Second, time.Millisecond)
	require.Eventually(t, func() bool { return h.node.Stats().Scheduler.Tracked == 0 }, 10*time.Second, time.Millisecond)
	require.Zero(t, h.node.Stats().Scheduler.Released)
	_, err = os.Stat(filepath.Join(h.state.dir, "lock"))
	require.NoError(t, err)
	files, err := os.ReadDir(h.state.dir)
	require.NoError(t, err)
	require.Len(t, files, 1)
}

// What is not on disk is not promised, and what could not be taken from it is still held.
func TestADaemonThatCannotWriteItsStateSaysSo(t *testing.T) {
	h, c, _ := serveHolder(t)
	a, err := c.Hold(t.Context(), nowhere("a"), 0)
	require.NoError(t, err)
	moved := h.state.dir + ".moved"
	require.NoError(t, os.Rename(h.state.dir, moved))
	_, err = c.Hold(t.Context(), nowhere("b"), 0)
	require.ErrorIs(t, err, hold.ErrUnavailable)
	_, err = c.Hold(t.Context(), nowhere("a"), 5*time.Minute)
	require.ErrorIs(t, err, hold.ErrUnavailable)
	require.ErrorIs(t, c.Release(t.Context(), a.ID), hold.ErrUnavailable)
	require.NoError(t, os.Rename(moved, h.state.dir))
	all, err := c.List(t.Context())
	require.NoError(t, err)
	require.Equal(t, []hold.Hold{a}, all)
	require.EqualValues(t, 1, h.node.Stats().Scheduler.Tracked)
	require.NoError(t, c.Release(t.Context(), a.ID))
}

func TestHoldsOfManyClientsDoNotMix(t *testing.T) {
	h, c, _ := serveHolder(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for round := range 6 {
				x, err := c.Hold(t.Context(), nowhere(fmt.Sprint("own", i)), time.Duration(round+1)*time.Second)
				if err != nil || x.Request != fmt.Sprint("own", i) {
					t.Errorf("%v %v", x, err)
				}
				shared, err := c.Hold(t.Context(), nowhere("shared"), time.Minute)
				if err != nil {
					t.Error(err)
				}
				if err := c.Leave(t.Context(), x.ID); err != nil {
					t.Error(err)
				}
				if err := c.Leave(t.Context(), shared.ID); err != nil && !errors.Is(err, lease.ErrUnknown) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	all, err := c.List(t.Context())
	require.NoError(t, err)
	require.Empty(t, all)
	require.Empty(t, h.byLease)
	require.Zero(t, h.node.Stats().Scheduler.Tracked)
}

func TestARestartedDaemonTakesNothingOnTrust(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s, err := openHoldState(dir)
	require.NoError(t, err)
	_, err = openHoldState(dir)
	require.ErrorContains(t, err, "in use by another daemon")
	params := new(lease.Params)
	require.NoError(t, json.Unmarshal(nowhere("req"), params))
	now := time.Now()
	for id, expires := range map[string]time.Time{"GOOD": now.Add(time.Minute), "OLD": now.Add(-time.Second), "CLOCK": now.Add(1000 * time.Hour)} {
		p := *params
		p.RemoteRequestID = id
		require.NoError(t, s.put(&holdRecord{id, expires, p}))
	}
	own := *params
	own.RemotePort = 0
	require.NoError(t, s.put(&holdRecord{"UNUSABLE", now.Add(time.Minute), own}))
	for name, text := range map[string]string{"TORN.json": `{"id":"TORN","expi`, "OTHER.json": `{"id":"../x"}`, "HALF.json.new": `{`} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	require.NoError(t, s.Close())

	h, c, _ := serveHolder(t, func(c *holdConfig) { c.state = dir })
	all, err := c.List(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{"CLOCK", "GOOD"}, []string{all[0].ID, all[1].ID})
	require.Len(t, all, 2)
	require.WithinRange(t, all[0].Expires, now.Add(10*time.Minute), time.Now().Add(10*time.Minute))
	require.EqualValues(t, 2, h.node.Stats().Scheduler.Tracked)
	var names []string
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, f := range files {
		names = append(names, f.Name())
	}
	require.Equal(t, []string{"CLOCK.json", "GOOD.json", "OTHER.json", "TORN.json", "UNUSABLE.json", "lock"}, names)
}

func TestHoldKeepsOthersOut(t *testing.T) {
	exe := program(t)
	args := socketArgs(t)
	socket, state := strings.TrimPrefix(args[1], "unix:"), args[3]
	d := startHold(t, exe, args...)
	for path, mode := range map[string]os.FileMode{socket: 0o600, state: 0o700} {
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, mode, info.Mode().Perm(), path)
	}
	files, err := os.ReadDir(state)
	require.NoError(t, err)
	for _, f := range files {
		info, err := f.Info()
		require.NoError(t, err)
		require.EqualValues(t, 0o600, info.Mode().Perm(), f.Name())
	}
	wide, file := t.TempDir(), filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.Chmod(wide, 0o755))
	require.NoError(t, os.WriteFile(file, []byte("precious"), 0o600))
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(state, link))
	private := filepath.Join(t.TempDir(), "private")
	for name, c := range map[string]struct {
		code int
		text string
		args []string
	}{
		"state in use":   {exitFailed, "in use by another daemon", []string{"--state", state, "--listen", "127.0.0.1:0"}},
		"state of all":   {exitFailed, "mode 0700", []string{"--state", wide, "--listen", "127.0.0.1:0"}},
		"state a link":   {exitFailed, "mode 0700", []string{"--state", link, "--listen", "127.0.0.1:0"}},
		"socket in use":  {exitFailed, "another daemon listens there", []string{"--state", private, "--listen", "unix:" + socket}},
		"socket a file":  {exitFailed, "no socket", []string{"--state", private, "--listen", "unix:" + file}},
		"socket too far": {exitUsage, "bytes", []string{"--state", private, "--listen", "unix:/" + strings.Repeat("x", 108)}},
		"all interfaces": {exitUsage, "--allow-remote", []string{"--state", private, "--listen", ":8201"}},
		"another host":   {exitUsage, "--allow-remote", []string{"--state", private, "--listen", "192.0.2.1:8201"}},
		"a name":         {exitUsage, "--allow-remote", []string{"--state", private, "--listen", "example.com:8201"}},
		"no port":        {exitUsage, "want unix:", []string{"--state", private, "--listen", "localhost"}},
		"an argument":    {exitUsage, "unexpected argument", []string{"now"}},
		"ttl over cap":   {exitUsage, "--max-ttl", []string{"--ttl", "11m"}},
		"no holds":       {exitUsage, "--max-holds", []string{"--max-holds", "0"}},
		"no lease":       {exitUsage, "--lease", []string{"--lease", "0s"}},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := run(t, exe, append([]string{"hold"}, c.args...)...)
			require.Equal(t, c.code, code, stderr)
			require.Contains(t, stderr, c.text)
			require.Empty(t, stdout)
		})
	}
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "precious", string(text))
	_, err = d.Health(t.Context())
	require.NoError(t, err)
}

func TestHoldServesAPortOfTheLoopbackInterface(t *testing.T) {
	state := filepath.Join(t.TempDir(), "state")
	d := startHold(t, program(t), "--listen", "127.0.0.1:0", "--state", state, "--max-holds", "7")
	require.True(t, strings.HasPrefix(d.ready.Address, "http://127.0.0.1:"), d.ready.Address)
	health, err := d.Health(t.Context())
	require.NoError(t, err)
	require.Equal(t, hold.Health{Max: 7}, health)
	c, err := net.Dial("tcp", strings.TrimPrefix(d.ready.Address, "http://"))
	require.NoError(t, err)
	defer c.Close()
	_, err = io.WriteString(c, "GET /v1/holds HTTP/1.1\r\nHost: rebound.example\r\nConnection: close\r\n\r\n")
	require.NoError(t, err)
	answer, err := io.ReadAll(c)
	require.NoError(t, err)
	require.Contains(t, string(answer), "403")
}

func TestTheDefaultsAreInTheUsersRuntimeDirectory(t *testing.T) {
	dir, err := os.MkdirTemp("", "hold")
	require.NoError(t, err)
	defer os.RemoveAll(dir)
	t.Setenv("XDG_RUNTIME_DIR", dir)
	d := startHold(t, program(t))
	require.Equal(t, "unix:"+dir+"/nixlgo-hold.sock", d.ready.Address)
	require.Equal(t, dir+"/nixlgo-hold.state", d.ready.State)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, err = d.Health(ctx)
	require.NoError(t, err)
}
