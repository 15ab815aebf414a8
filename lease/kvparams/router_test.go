package kvparams_test

import (
	"bytes"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// instance answers with status and reply; got is the last body it was sent.
type instance struct {
	status int
	reply  string
	got    string
}

func (i *instance) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	i.got = string(body)
	w.WriteHeader(i.status)
	_, _ = io.WriteString(w, i.reply)
}

func route(t *testing.T, p, d *instance, path, body string) (status int, answer, logged string) {
	t.Helper()
	ps, ds := httptest.NewServer(p), httptest.NewServer(d)
	defer ps.Close()
	defer ds.Close()
	var out bytes.Buffer
	w := httptest.NewRecorder()
	router{ps.URL, ds.URL, log.New(&out, "", 0)}.ServeHTTP(w, httptest.NewRequest(http.MethodPost, path, strings.NewReader(body)))
	return w.Code, w.Body.String(), out.String()
}

const usable = `{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[5]],"remote_engine_id":"P","remote_request_id":"r","remote_host":"h","remote_port":1}}`

// A10.21: an upstream error reaches the client unchanged and never becomes a 200.
func TestErrorsOfBothInstancesReachTheClient(t *testing.T) {
	for _, status := range []int{400, 404, 429, 500, 502, 503, 504} {
		p, d := &instance{status: status, reply: "from P"}, &instance{status: 200, reply: "from D"}
		code, answer, _ := route(t, p, d, "/v1/chat/completions", `{"messages":[]}`)
		require.Equal(t, status, code)
		require.Equal(t, "from P", answer)
		require.Empty(t, d.got, "D was asked")

		p, d = &instance{status: 200, reply: usable}, &instance{status: status, reply: "from D"}
		code, answer, _ = route(t, p, d, "/v1/chat/completions", `{"messages":[]}`)
		require.Equal(t, status, code)
		require.Equal(t, "from D", answer)
	}
}

// llm-d-router#2855: without a handoff D computes the prompt, and it is said.
func TestNothingToMoveIsSaidAndDComputes(t *testing.T) {
	body := `{"prompt":"a","stream":true,"kv_transfer_params":{"remote_host":"evil"}}`
	for reply, text := range map[string]string{
		`{"choices":[]}`:                 "no handoff",
		`{"kv_transfer_params":null}`:    "no handoff",
		`{"kv_transfer_params":{"a":1}}`: "remote_engine_id",
		`<html>`:                         "want a JSON object",
	} {
		p, d := &instance{status: 200, reply: reply}, &instance{status: 200, reply: "ok"}
		code, answer, logged := route(t, p, d, "/v1/completions", body)
		require.Equal(t, 200, code, reply)
		require.Equal(t, "ok", answer)
		require.Equal(t, `{"prompt":"a","stream":true}`, d.got)
		require.Contains(t, logged, text)
	}
	p, d := &instance{status: 200, reply: usable}, &instance{status: 200, reply: "ok"}
	code, _, logged := route(t, p, d, "/v1/completions", `{"prompt":"a","n":2}`)
	require.Equal(t, 200, code)
	require.Empty(t, p.got, "P was asked for what cannot be split")
	require.Equal(t, `{"prompt":"a","n":2}`, d.got)
	require.Contains(t, logged, "cannot be split")
}

func TestAMalformedBodyReachesNobody(t *testing.T) {
	p, d := &instance{status: 200, reply: usable}, &instance{status: 200, reply: "ok"}
	code, answer, _ := route(t, p, d, "/v1/completions", `{"prompt":"a","prompt":"b"}`)
	require.Equal(t, 400, code)
	require.Contains(t, answer, `key "prompt" comes twice`)
	require.Empty(t, p.got+d.got)
}
