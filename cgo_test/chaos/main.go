// Command chaos passes leased blocks between two owner and two reader processes over real NIXL while it kills, stops and
// stalls them, drops and duplicates what a router carries, and attacks their ports. Every byte is tagged with its request.
// It fails if one wrong byte is delivered as verified, or one block is leaked or freed twice.
//
// With -verify=false it runs the same without verification, and fails unless wrong bytes do show: that is what the check
// is worth.
package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/nixlgo/nixlgo/cgo_test/child"
	"github.com/nixlgo/nixlgo/cgo_test/measure"
)

func main() {
	var c config
	role := flag.String("role", "", "internal: owner or reader")
	flag.DurationVar(&c.duration, "duration", time.Minute, "how long to make trouble")
	flag.Uint64Var(&c.seed, "seed", rand.Uint64(), "seed of the faults")
	flag.StringVar(&c.tls, "tls", "tcp", "UCX_TLS")
	flag.DurationVar(&c.lease, "lease", time.Second, "lease duration")
	flag.IntVar(&c.blocks, "blocks", 64, "blocks of each owner; few are reused sooner")
	flag.BoolVar(&c.verify, "verify", true, "verify leases")
	both := flag.Bool("both", false, "run with verification, then without for a quarter of the time, 10 s at least")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if *role != "" {
		child.Exit("chaos", runChild(ctx, *role, c))
	}
	c.verify = c.verify || *both
	err := report(ctx, c)
	if *both && err == nil {
		c.verify, c.duration = false, max(c.duration/4, 10*time.Second)
		err = report(ctx, c)
	}
	child.Exit("chaos", err)
}

// report runs the chaos, prints its result, and judges it.
func report(ctx context.Context, c config) error {
	t, err := run(ctx, c)
	if err != nil {
		return err
	}
	target := "chaos"
	if !c.verify {
		target = "chaos-unverified"
	}
	fmt.Printf("%s: seed %d, %s of UCX %s, leases of %s\n", target, c.seed, c.duration, c.tls, c.lease)
	out := measure.NewReport(target)
	for _, row := range t.rows() {
		out.Add(row)
	}
	if err := out.Print(os.Stdout); err != nil {
		return err
	}
	if _, err := out.Write(); err != nil {
		return err
	}
	switch {
	case t.verified == 0:
		return fmt.Errorf("no read was verified in %s", c.duration)
	case t.doubleFrees > 0 || t.leaked > 0 || len(t.stuck) > 0:
		return fmt.Errorf("%d blocks leaked, %d freed twice, %v", t.leaked, t.doubleFrees, t.stuck)
	case c.verify && t.wrongBytes > 0:
		return fmt.Errorf("%d wrong bytes were delivered as verified", t.wrongBytes)
	case !c.verify && t.wrongBytes == 0:
		return fmt.Errorf("without verification not one wrong byte showed in %s: the run is too gentle to prove anything", c.duration)
	}
	return nil
}
