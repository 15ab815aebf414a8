package hold_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/lease/hold"
)

// The daemon itself is tested with this client in cmd/nixlgo, over NIXL.

func serve(t *testing.T, h http.HandlerFunc) *hold.Client {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return connect(t, s.URL)
}

func connect(t *testing.T, address string) *hold.Client {
	t.Helper()
	c, err := hold.New(address)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func TestRequestsHaveTheirExactForm(t *testing.T) {
	var got []string
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		got = append(got, fmt.Sprint(r.Method, " ", r.URL, " ", string(body), " ", r.Header.Get("Content-Type"), err))
		io.WriteString(w, "{}")
	})
	_, err := c.Hold(t.Context(), []byte(`{"remote_port": 5600.0}`), 90*time.Second)
	require.NoError(t, err)
	_, err = c.Hold(t.Context(), []byte(`{}`), 0)
	require.NoError(t, err)
	_, err = c.Get(t.Context(), "ABC234")
	require.NoError(t, err)
	_, err = c.List(t.Context())
	require.NoError(t, err)
	require.NoError(t, c.Release(t.Context(), "ABC234"))
	require.NoError(t, c.Leave(t.Context(), "ABC234"))
	_, err = c.Health(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{
		`POST /v1/holds {"kv_transfer_params":{"remote_port":5600.0},"ttl":"1m30s"} application/json<nil>`,
		`POST /v1/holds {"kv_transfer_params":{}} application/json<nil>`,
		`GET /v1/holds/ABC234  <nil>`,
		`GET /v1/holds  <nil>`,
		`DELETE /v1/holds/ABC234?release=true  <nil>`,
		`DELETE /v1/holds/ABC234?release=false  <nil>`,
		`GET /healthz  <nil>`,
	}, got)
}

func TestAnErrorOfTheDaemonMatchesItsCondition(t *testing.T) {
	for code, want := range map[hold.Code]error{
		hold.CodeInvalid: lease.ErrInvalid, hold.CodeForbidden: lease.ErrInvalid, hold.CodeNoResource: lease.ErrInvalid,
		hold.CodeTooLarge: lease.ErrInvalid, hold.CodeMediaType: lease.ErrInvalid, hold.CodeUnknown: lease.ErrUnknown,
		hold.CodeFull: hold.ErrFull, hold.CodeUnavailable: hold.ErrUnavailable, "of a later version": hold.ErrUnavailable,
	} {
		c := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(418)
			json.NewEncoder(w).Encode(hold.Error{Code: code, Message: "because"})
		})
		_, err := c.Get(t.Context(), "A")
		require.ErrorIs(t, err, want)
		for _, other := range []error{lease.ErrInvalid, lease.ErrUnknown, hold.ErrFull, hold.ErrUnavailable} {
			require.Equal(t, other == want, errors.Is(err, other), "%s %v", code, other)
		}
		e, ok := errors.AsType[*hold.Error](err)
		require.True(t, ok)
		require.Equal(t, hold.Error{Op: "get", Status: 418, Code: code, Message: "because"}, *e)
		require.ErrorContains(t, err, "because")
	}
}

func TestAnAnswerThatIsNotTheDaemonsIsUnavailable(t *testing.T) {
	for _, h := range []http.HandlerFunc{
		func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "proxy", http.StatusBadGateway) },
		func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "<html>") },
		func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/elsewhere", http.StatusFound) },
		func(w http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) },
	} {
		_, err := serve(t, h).List(t.Context())
		require.ErrorIs(t, err, hold.ErrUnavailable)
	}
	_, err := connect(t, "unix:"+filepath.Join(t.TempDir(), "nobody")).Health(t.Context())
	require.ErrorIs(t, err, hold.ErrUnavailable)
}

func TestTheContextEndsARequest(t *testing.T) {
	entered := make(chan struct{})
	c := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		close(entered)
		<-r.Context().Done()
	})
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("the client left")
	go func() {
		<-entered
		cancel(why)
	}()
	_, err := c.List(ctx)
	require.ErrorIs(t, err, why)
}

func TestWrongArgumentsAreRefusedHere(t *testing.T) {
	for _, address := range []string{"", "unix:", "/run/x.sock", "http://host", "https://host:1", "http://host:1/path", "host:1", "http://u:p@host:1", "http://host:1?q"} {
		_, err := hold.New(address)
		require.ErrorIs(t, err, lease.ErrInvalid, address)
	}
	c := serve(t, func(http.ResponseWriter, *http.Request) { t.Error("asked") })
	for _, id := range []string{"", "..", "a/b", "A?release=true", "A b"} {
		_, err := c.Get(t.Context(), id)
		require.ErrorIs(t, err, lease.ErrInvalid, id)
		require.ErrorIs(t, c.Release(t.Context(), id), lease.ErrInvalid, id)
		require.ErrorIs(t, c.Leave(t.Context(), id), lease.ErrInvalid, id)
	}
	_, err := c.Hold(t.Context(), []byte(`{"torn`), 0)
	require.ErrorIs(t, err, lease.ErrInvalid)
}

func TestASocketIsAnAddress(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, `{"holds":2,"max_holds":3,"later":true}`)
	}))
	s.Listener.Close()
	s.Listener = l
	s.Start()
	t.Cleanup(s.Close)
	h, err := connect(t, "unix:"+path).Health(t.Context())
	require.NoError(t, err)
	require.Equal(t, hold.Health{Holds: 2, Max: 3}, h)
}
