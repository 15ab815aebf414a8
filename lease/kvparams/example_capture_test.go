package kvparams_test

import (
	"fmt"
	"io"
	"log"
	"strings"

	"github.com/nixlgo/nixlgo/lease/kvparams"
)

// The offer of a finished turn, read from a stream while it passes.
func ExampleCapture() {
	stream := "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\n" +
		"data: {\"choices\":[],\"kv_transfer_params\":{\"do_remote_decode\":true,\"remote_block_ids\":[[7]],\"remote_engine_id\":\"D\"," +
		"\"remote_request_id\":\"cmpl-2\",\"remote_host\":\"10.0.0.2\",\"remote_port\":5600,\"remote_num_tokens\":12}}\n\ndata: [DONE]\n\n"
	capture := kvparams.NewCapture("text/event-stream")
	body := capture.Body(io.NopCloser(strings.NewReader(stream)))
	if _, err := io.Copy(io.Discard, body); err != nil { // to the client
		log.Fatal(err)
	}
	offer, err := capture.Handoff()
	fmt.Println(offer.Params().RemoteEngineID, offer.Params().RemoteNumTokens, err)
	// Output: D 12 <nil>
}
