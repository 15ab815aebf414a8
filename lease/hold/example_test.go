package hold_test

import (
	"context"
	"errors"
	"log"
	"time"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/lease/hold"
	"github.com/nixlgo/nixlgo/lease/kvparams"
)

// A router holds the prefill's lease while it looks for a decoder. When the client leaves before any decoder got the params,
// the owner's blocks are freed at once and not after a whole lease.
func ExampleClient() {
	daemon, err := hold.New("unix:/run/nixlgo/hold.sock")
	if err != nil {
		log.Fatal(err)
	}
	defer daemon.Close()

	route := func(ctx context.Context, handoff kvparams.Handoff, choose func(context.Context) (decoder string, err error)) (string, error) {
		h, err := daemon.Hold(ctx, handoff.Raw(), time.Minute)
		if err != nil {
			return choose(ctx) // no daemon, no renewal: the lease may run out before the decoder reads, and it will find out
		}
		decoder, err := choose(ctx)
		end := daemon.Leave // the decoder gets the params, and renews from its queue
		if err != nil {
			end = daemon.Release // nobody has the params, and nobody will
		}
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if err := end(ending, h.ID); err != nil && !errors.Is(err, lease.ErrUnknown) {
			log.Print(err)
		}
		return decoder, err
	}
	_ = route
}
