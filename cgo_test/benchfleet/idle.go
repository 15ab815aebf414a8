package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

// measuredNode is what a Node costs while nothing happens, and how long it takes from a notification's sending to what
// it means being done, in ms.
type measuredNode struct {
	Wall, CPU          time.Duration // of the idle process
	Steps              int64
	Reactions          int
	P50, P90, P99, Max float64
}

const idleTime = 5 * time.Second

// idle measures one Node in this process.
func idle(c command) (answer, error) {
	if c.Cmd != "measure" {
		return answer{}, nil
	}
	n, err := nixlgo.New(nixlgo.Config{Layers: 1, Blocks: 1, BlockBytes: blockLen})
	if err != nil {
		return answer{}, err
	}
	ran := make(chan error, 1)
	go func() { ran <- n.Run(context.Background()) }()
	m, err := measureNode(n)
	err = errors.Join(err, n.Close(), <-ran)
	return answer{Idle: m}, err
}

func measureNode(n *nixlgo.Node) (m measuredNode, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience-5*time.Second)
	defer cancel()
	if err := pause(ctx, time.Second); err != nil { // what opening started comes to rest
		return m, err
	}
	start, used, steps := time.Now(), cpu(unix.CLOCK_PROCESS_CPUTIME_ID), n.Stats().Worker.Steps
	if err := pause(ctx, idleTime); err != nil {
		return m, err
	}
	m.Wall, m.CPU, m.Steps = time.Since(start), cpu(unix.CLOCK_PROCESS_CPUTIME_ID)-used, n.Stats().Worker.Steps-steps

	peer, err := rdma.OpenNIXL(rdma.NIXLConfig{})
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, peer.Close()) }()
	reply, err := rdma.Probe(ctx, "127.0.0.1", n.Port(), 0, 0)
	if err != nil {
		return m, err
	}
	agent, err := peer.Load(reply.Metadata.Agent)
	if err != nil {
		return m, err
	}
	var took []time.Duration
	for i := range 300 {
		p, err := n.Publish(ctx, requestID(i), []int{0}, 1)
		if err != nil {
			return m, err
		}
		// Any moment of the node's cycle: a timer of Go's runtime would wake up with the node's.
		ts := unix.NsecToTimespec(int64(time.Millisecond) + rand.Int64N(int64(4*time.Millisecond)))
		if err := unix.Nanosleep(&ts, nil); err != nil && !errors.Is(err, unix.EINTR) {
			return m, err
		}
		sent := time.Now()
		if err := peer.Notify(agent, lease.AppendReadComplete(nil, requestID(i), 1, p.Params().Lease.Nonce)); err != nil {
			return m, err
		}
		select {
		case <-p.Done():
			took = append(took, time.Since(sent))
		case <-ctx.Done():
			return m, fmt.Errorf("notification %d: %w", i, context.Cause(ctx))
		}
		if p.Reason() != lease.ReasonRead {
			return m, fmt.Errorf("notification %d ended the lease as %v", i, p.Reason())
		}
	}
	took = took[1:] // the first one opened the connection
	m.Reactions = len(took)
	milli := func(q float64) float64 { return micro(quantile(took, q)) / 1e3 }
	m.P50, m.P90, m.P99, m.Max = milli(0.5), milli(0.9), milli(0.99), milli(1)
	return m, nil
}
