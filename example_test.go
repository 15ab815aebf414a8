package nixlgo_test

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
)

// prefill owns KV blocks: it publishes a request and waits until its blocks are free again.
func prefill(ctx context.Context, toRouter chan<- []byte) error {
	node, err := nixlgo.New(nixlgo.Config{Layers: 2, Blocks: 64, BlockBytes: 16384})
	if err != nil {
		return err // says which library, variable or device is wrong
	}
	defer node.Close()
	go node.Run(context.Background()) // until Close

	blocks := []int{3, 4, 5} // your allocator's
	for _, b := range blocks {
		for layer := range 2 {
			copy(node.Block(layer, b), "keys and values") // your prefill
		}
	}
	pub, err := node.Publish(ctx, "request-1", blocks, 48)
	if err != nil {
		return err
	}
	params, err := json.Marshal(pub.Params()) // kv_transfer_params
	if err != nil {
		return err
	}
	toRouter <- params
	select {
	case <-pub.Done(): // read, expired or revoked: the blocks are yours again
		fmt.Println("prefill: the lease ended:", pub.Reason())
		return nil
	case <-ctx.Done(): // Close revokes the lease; Drain, before it, lets it end
		return context.Cause(ctx)
	}
}

// decode reads the blocks of a request whose kv_transfer_params a router brought.
func decode(ctx context.Context, fromRouter <-chan []byte) error {
	node, err := nixlgo.New(nixlgo.Config{Layers: 2, Blocks: 64, BlockBytes: 16384})
	if err != nil {
		return err
	}
	defer node.Close()
	go node.Run(context.Background())

	var params lease.Params
	if err := json.Unmarshal(<-fromRouter, &params); err != nil {
		return err
	}
	held, err := node.Hold(&params) // the request queues; heartbeats renew its lease
	if err != nil {
		return err
	}
	blocks := []int{7, 8, 9} // your allocator's, when the request is scheduled
	if err := held.Fetch(ctx, blocks); err != nil {
		return err // errors.Is(err, lease.ErrLapsed), …: recompute or fail the request
	}
	fmt.Printf("decode: verified %q\n", node.Block(0, 7)[:15])
	return nil
}

func Example() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	router := make(chan []byte, 1)
	done := make(chan error, 1)
	go func() { done <- prefill(ctx, router) }()
	if err := decode(ctx, router); err != nil {
		fmt.Println(err)
	}
	if err := <-done; err != nil {
		fmt.Println(err)
	}
	// Unordered output:
	// decode: verified "keys and values"
	// prefill: the lease ended: read
}
