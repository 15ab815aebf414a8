package hold_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/lease/hold"
	"github.com/nixlgo/nixlgo/lease/kvparams"
)

// router has a prompt prefilled, holds the prefill's lease until a decoder has room, and lets that one decode. It needs
// neither NIXL nor cgo.
type router struct {
	prefill  string      // URL
	decoders chan string // URLs of those that have room
	holds    *hold.Client
}

func (rt *router) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	answer, err := rt.complete(w, r)
	switch {
	case errors.Is(err, context.Canceled): // nobody listens any more
	case err != nil:
		http.Error(w, err.Error(), http.StatusBadGateway)
	default:
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(answer)
	}
}

func (rt *router) complete(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 64<<20))
	if err != nil {
		return nil, err
	}
	leg, err := kvparams.Prefill(body, kvparams.Completions, kvparams.Handoff{})
	if err != nil {
		return nil, err
	}
	answer, err := post(r.Context(), rt.prefill+r.URL.Path, leg)
	if err != nil {
		return nil, err
	}
	handoff, err := kvparams.FromResponse(answer)
	if err != nil {
		return nil, err // kvparams.ErrNoHandoff: nothing was leased; see the router of package kvparams
	}
	decoder, err := rt.choose(r.Context(), handoff)
	if err != nil {
		return nil, err
	}
	if leg, err = kvparams.Decode(body, handoff, kvparams.DecodeOptions{}); err != nil {
		return nil, err
	}
	return post(r.Context(), decoder+r.URL.Path, leg)
}

// choose waits for a decoder with room, and keeps the lease alive meanwhile.
func (rt *router) choose(ctx context.Context, handoff kvparams.Handoff) (string, error) {
	short := func() (context.Context, context.CancelFunc) { // a client that leaves must not cut off a word to the daemon
		return context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	}
	holding, cancel := short()
	held, err := rt.holds.Hold(holding, handoff.Raw(), time.Minute)
	cancel()
	if err != nil {
		log.Print(err) // not held: if the lease runs out before the decoder reads, the decoder finds out
	}
	end := func(how func(context.Context, string) error) {
		if held.ID == "" {
			return
		}
		ending, cancel := short()
		defer cancel()
		if err := how(ending, held.ID); err != nil && !errors.Is(err, lease.ErrUnknown) { // unknown: it ended by itself
			log.Print(err)
		}
	}
	select {
	case decoder := <-rt.decoders:
		end(rt.holds.Leave) // the decoder gets the params, and renews the lease from its queue
		return decoder, nil
	case <-ctx.Done():
		end(rt.holds.Release) // nobody has the params, and nobody will: the owner's blocks are free at once
		return "", context.Cause(ctx)
	}
}

func post(ctx context.Context, url string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, res.Status, answer)
	}
	return answer, err
}

// Two requests: one finds a decoder, the client of the other leaves before there is one.
func Example_router() {
	events := make(chan string, 8)
	stub := func(name, answer string) *httptest.Server { // stands for an instance, or for `nixlgo hold`
		return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			events <- name + ": " + r.Method + " " + r.URL.RequestURI()
			_, _ = io.WriteString(w, answer)
		}))
	}
	p := stub("P", `{"choices":[],"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[5,6]],`+
		`"remote_engine_id":"P","remote_request_id":"cmpl-1","remote_host":"10.0.0.1","remote_port":5600}}`)
	defer p.Close()
	d := stub("D", `{"choices":[{"text":" there"}]}`)
	defer d.Close()
	daemon := stub("hold", `{"id":"ABC234","engine":"P","request":"cmpl-1"}`)
	defer daemon.Close()
	holds, err := hold.New(daemon.URL) // unix:/run/nixlgo/hold.sock, in earnest
	if err != nil {
		log.Fatal(err)
	}
	defer holds.Close()
	rt := &router{p.URL, make(chan string, 1), holds}
	front := httptest.NewServer(rt)
	defer front.Close()

	rt.decoders <- d.URL
	answer, err := post(context.Background(), front.URL+"/v1/completions", []byte(`{"prompt": "hello", "max_tokens": 16}`))
	fmt.Println(string(answer), err)
	for range 4 {
		fmt.Println(<-events)
	}

	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	left := make(chan error, 1)
	go func() {
		_, err := post(ctx, front.URL+"/v1/completions", []byte(`{"prompt": "hello", "max_tokens": 16}`))
		left <- err
	}()
	for event := range events {
		fmt.Println(event)
		if strings.HasPrefix(event, "hold: POST") {
			leave()
			fmt.Println("the client leaves:", errors.Is(<-left, context.Canceled))
		}
		if strings.HasPrefix(event, "hold: DELETE") {
			break
		}
	}
	// Output:
	// {"choices":[{"text":" there"}]} <nil>
	// P: POST /v1/completions
	// hold: POST /v1/holds
	// hold: DELETE /v1/holds/ABC234?release=false
	// D: POST /v1/completions
	// P: POST /v1/completions
	// hold: POST /v1/holds
	// the client leaves: true
	// hold: DELETE /v1/holds/ABC234?release=true
}
