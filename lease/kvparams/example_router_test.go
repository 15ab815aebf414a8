package kvparams_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/nixlgo/nixlgo/lease/kvparams"
)

// router sends the prompt to p, and the request with p's params to d.
type router struct {
	p, d string // URLs
	log  *log.Logger
}

func (rt router) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	api, ok := kvparams.APIOf(r.URL.Path)
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 64<<20))
	if !ok || err != nil {
		http.Error(w, "want an inference API and a body below 64 MiB", http.StatusBadRequest)
		return
	}
	var handoff kvparams.Handoff
	leg, err := kvparams.Prefill(body, api, kvparams.Handoff{})
	if err == nil {
		answer, failed := post(r, rt.p, leg)
		if failed != nil || answer.StatusCode != http.StatusOK {
			relay(w, answer, failed) // an error never becomes a 200
			return
		}
		prefilled, _ := io.ReadAll(answer.Body) // what is cut off is no JSON object
		answer.Body.Close()
		handoff, err = kvparams.FromResponse(prefilled)
	}
	switch {
	case err == nil:
		leg, err = kvparams.Decode(body, handoff, kvparams.DecodeOptions{})
	case !errors.Is(err, kvparams.ErrMalformed): // d computes the prompt, and someone is told
		rt.log.Print(err)
		leg, err = kvparams.Strip(body)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	answer, err := post(r, rt.d, leg)
	relay(w, answer, err)
}

func post(r *http.Request, to string, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(r.Context(), http.MethodPost, to+r.URL.Path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(kvparams.HeaderRequestID, r.Header.Get(kvparams.HeaderRequestID))
	return http.DefaultClient.Do(req)
}

func relay(w http.ResponseWriter, answer *http.Response, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer answer.Body.Close()
	w.Header().Set("Content-Type", answer.Header.Get("Content-Type"))
	w.WriteHeader(answer.StatusCode)
	_, _ = io.Copy(w, answer.Body) // flush after each read to stream
}

// A router of one P and one D.
func Example_router() {
	p := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Printf("P: %s\n", body)
		_, _ = io.WriteString(w, `{"choices":[],"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[5,6]],`+
			`"remote_engine_id":"P","remote_request_id":"cmpl-1","remote_host":"10.0.0.1","remote_port":5600,"remote_lease_slot":3,"remote_lease_nonce":9007199254740991}}`)
	}))
	defer p.Close()
	d := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Printf("D: %s\n", body)
		_, _ = io.WriteString(w, `{"choices":[{"text":" there"}]}`)
	}))
	defer d.Close()
	front := httptest.NewServer(router{p.URL, d.URL, log.Default()})
	defer front.Close()

	res, err := http.Post(front.URL+"/v1/completions", "application/json", strings.NewReader(`{"prompt": "hello", "max_tokens": 16, "seed": 12345678901234567890}`))
	if err != nil {
		log.Fatal(err)
	}
	defer res.Body.Close()
	answer, _ := io.ReadAll(res.Body)
	fmt.Printf("client: %s\n", answer)
	// Output:
	// P: {"prompt": "hello", "max_tokens": 1, "seed": 12345678901234567890,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}
	// D: {"prompt": "hello", "max_tokens": 16, "seed": 12345678901234567890,"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[5,6]],"remote_engine_id":"P","remote_request_id":"cmpl-1","remote_host":"10.0.0.1","remote_port":5600,"remote_lease_slot":3,"remote_lease_nonce":9007199254740991}}
	// client: {"choices":[{"text":" there"}]}
}
