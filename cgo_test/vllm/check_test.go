//go:build interop_vllm

package vllm

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os/exec"
	"strconv"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// checkReport is what the tests look at in the output of `nixlgo check --json`.
type checkReport struct {
	Answer     string   `json:"answer"`
	Why        string   `json:"why"`
	Blocks     int      `json:"blocks"`
	Bytes      int      `json:"bytes"`
	LeaseLeft  float64  `json:"lease_left_s"`
	Equal      bool     `json:"answers_equal"`
	BlocksKept string   `json:"blocks_kept"`
	DBlocks    string   `json:"d_blocks"`
	Notes      []string `json:"notes"`
	D          struct {
		Computed float64 `json:"prompt_tokens_computed"`
		External float64 `json:"prompt_tokens_external"`
		Bytes    float64 `json:"nixl_bytes"`
		Failed   float64 `json:"nixl_failed"`
	} `json:"d_counted"`
}

// llm-d-router#2855, kserve#5987, vllm#52234: `nixlgo check` on real servers, one prefill server and decode servers that are
// right and wrong in their ways.
func TestInteropCheck(t *testing.T) {
	exe := program(t)
	p := StartServer(t, ServerOptions{Role: "kv_producer", EngineID: "check-p", Extra: map[string]any{"kv_lease_duration": peerLease}})
	// An engine takes half a minute of two cores to start, so each starts when it is needed.
	decoder := func(o ServerOptions) func() string {
		return sync.OnceValue(func() string {
			d := StartServer(t, o)
			d.Wait(t)
			return d.URL
		})
	}
	healthy := decoder(ServerOptions{Role: "kv_both", EngineID: "check-d", Extra: map[string]any{"kv_lease_duration": peerLease, "bidirectional_kv_xfer": true}})
	plain := decoder(ServerOptions{EngineID: "check-plain"})
	d64 := decoder(ServerOptions{Role: "kv_consumer", EngineID: "check-d64", Block: 64})
	other := decoder(ServerOptions{Role: "kv_consumer", EngineID: "check-other", Model: "other-llama"})
	router := func() string { return dropParams(t, healthy()) }
	p.Wait(t)
	for _, c := range []struct {
		name   string
		d      func() string
		args   func() []string
		code   int
		answer string
		see    func(t *testing.T, r checkReport)
	}{
		{"a healthy pair", healthy, nil, 0, "transferred", func(t *testing.T, r checkReport) {
			const blocks = 7 // of 32 tokens, two layers of 16384 bytes each
			require.Equal(t, []any{blocks, blocks * 2 * 16384, true, "yes", "equal"}, []any{r.Blocks, r.Bytes, r.Equal, r.BlocksKept, r.DBlocks})
			require.Equal(t, []float64{200, float64(r.Bytes), 0}, []float64{r.D.External, r.D.Bytes, r.D.Failed})
			require.Positive(t, r.LeaseLeft)
			require.Empty(t, r.Notes)
		}},
		{"a router that drops the params", router, func() []string { return []string{"--metrics-d", healthy() + "/metrics"} }, 3, "recomputed", func(t *testing.T, r checkReport) {
			require.Equal(t, []float64{200, 0, 0}, []float64{r.D.Computed, r.D.External, r.D.Bytes})
			require.Contains(t, r.Why, "took 0 of 200 prompt tokens from elsewhere")
		}},
		{"a decoder without the connector", plain, nil, 3, "recomputed", func(t *testing.T, r checkReport) {
			require.Contains(t, r.Why, "without the NixlConnector")
		}},
		{"a lease that ran out in the router", healthy, func() []string { return []string{"--pause", strconv.Itoa(peerLease+3) + "s"} }, 4, "wrong", func(t *testing.T, r checkReport) {
			require.Contains(t, r.Why, "the lease ran out before D had read")
			require.Negative(t, r.LeaseLeft)
			require.True(t, r.Equal, "by luck")
		}},
		{"a decoder with larger blocks", d64, nil, 4, "wrong", func(t *testing.T, r checkReport) {
			require.False(t, r.Equal)
			require.Equal(t, 200.0, r.D.External, "nothing failed, and HTTP is 200")
			require.Contains(t, r.Why, "although D took 200 prompt tokens from elsewhere")
		}},
		{"a decoder of another model", other, nil, 4, "wrong", func(t *testing.T, r checkReport) {
			require.Contains(t, r.Why, "D cannot use what P has")
			require.Positive(t, r.D.Failed)
		}},
	} {
		check(t, "check: "+c.name+" is "+c.answer, func(t *testing.T) {
			args := []string{"check", p.URL, c.d(), "--json", "--lease", strconv.Itoa(peerLease) + "s"}
			if c.args != nil {
				args = append(args, c.args()...)
			}
			cmd := exec.Command(exe, args...)
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			require.NotNil(t, cmd.ProcessState, "%v", err)
			var r checkReport
			require.NoError(t, json.Unmarshal(out, &r), "%s%s", out, &stderr)
			require.Equal(t, c.answer, r.Answer, string(out))
			require.Equal(t, c.code, cmd.ProcessState.ExitCode(), string(out))
			c.see(t, r)
		})
	}
}

// dropParams is a router in front of a server that loses kv_transfer_params.
func dropParams(t *testing.T, to string) string {
	target, err := url.Parse(to)
	require.NoError(t, err)
	proxy := httputil.NewSingleHostReverseProxy(target)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			var body map[string]json.RawMessage
			if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			delete(body, "kv_transfer_params")
			text, err := json.Marshal(body)
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return server.URL
}
