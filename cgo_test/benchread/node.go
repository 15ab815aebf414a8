package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/cgo_test/child"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

// command goes to a child, of this program or of peer.py.
type command struct {
	Cmd    string        `json:"cmd"` // ours: publish, fetch, freed; peer.py: fill, connect, read, complete
	Params *lease.Params `json:"params,omitempty"`
	Local  []int         `json:"local,omitempty"`
	Remote []int         `json:"remote,omitempty"`

	Metadata string `json:"metadata,omitempty"`
	Base     uint64 `json:"base,omitempty"`
}

type answer struct {
	Error    string        `json:"error,omitempty"`
	Params   *lease.Params `json:"params,omitempty"`
	Seconds  float64       `json:"seconds,omitempty"`
	Check    float64       `json:"check,omitempty"` // seconds of them from the end of the block READ
	Metadata string        `json:"metadata,omitempty"`
	Base     uint64        `json:"base,omitempty"`
}

// node is a child of ours: the owner, or a reader.
type node struct {
	shape
	*nixlgo.Node
	published *nixlgo.Publication
	requests  int
	check     atomic.Int64 // when the last lease check began, in Unix ns
}

// runNode serves commands until stdin ends.
func runNode(ctx context.Context, s shape, verify bool, params map[string]string) error {
	cfg := lease.DefaultConfig()
	if !verify {
		cfg.Verification = lease.VerifyNone
	}
	c := &node{shape: s}
	n, err := nixlgo.New(nixlgo.Config{Layers: s.Layers, Blocks: s.NodeBlocks, BlockBytes: s.BlockBytes, Lease: cfg, BackendParams: params,
		Trace:  rdma.Trace{BeforeCheck: func(string, int, int) { c.check.Store(time.Now().UnixNano()) }},
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	defer func() {
		cancel()
		<-done
		n.Close()
	}()
	c.Node = n
	c.fill()
	for cmd, err := range child.Commands[command](os.Stdin) {
		if err != nil {
			return err
		}
		a, err := c.do(ctx, cmd)
		if err != nil {
			a.Error = err.Error()
		}
		if err := child.Say(a); err != nil {
			return err
		}
	}
	return nil
}

func (n *node) do(ctx context.Context, c command) (a answer, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience*3/4)
	defer cancel()
	switch c.Cmd {
	case "publish":
		n.requests++
		if n.published, err = n.Publish(ctx, fmt.Sprint("request-", n.requests), c.Local, 0); err == nil {
			a.Params = n.published.Params()
		}
	case "freed":
		select {
		case <-n.published.Done():
			if r := n.published.Reason(); r != lease.ReasonRead {
				err = fmt.Errorf("the request was freed because it %s", r)
			}
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	case "fetch":
		a.Seconds, a.Check, err = n.fetch(ctx, c)
	default:
		err = fmt.Errorf("unknown command %q", c.Cmd)
	}
	return a, err
}

// fetch measures Held.Fetch, and checks every byte afterwards.
func (n *node) fetch(ctx context.Context, c command) (seconds, check float64, err error) {
	for l := range n.Layers {
		for _, b := range c.Local {
			clear(n.Block(l, b))
		}
	}
	h, err := n.Hold(c.Params)
	if err != nil {
		return 0, 0, err
	}
	start := time.Now()
	err = h.Fetch(ctx, c.Local)
	end := time.Now()
	if err != nil {
		return 0, 0, err
	}
	if at := time.Unix(0, n.check.Load()); at.After(start) {
		check = end.Sub(at).Seconds()
	}
	for l := range n.Layers {
		for i, b := range c.Local {
			want := word(l, c.Params.RemoteBlockIDs[0][i])
			for at, block := 0, n.Block(l, b); at < len(block); at += 8 {
				if got := binary.NativeEndian.Uint64(block[at:]); got != want {
					return 0, 0, fmt.Errorf("layer %d, block %d, byte %d: the READ brought %#x, not the owner's %#x", l, b, at, got, want)
				}
			}
		}
	}
	return end.Sub(start).Seconds(), check, nil
}

// word is what the blocks of an owner are filled with.
func word(layer, block int) uint64 { return uint64(layer)<<32 + uint64(block) + 1 }

func (n *node) fill() {
	for l := range n.Layers {
		for b := range n.NodeBlocks {
			for at, block := 0, n.Block(l, b); at < len(block); at += 8 {
				binary.NativeEndian.PutUint64(block[at:], word(l, b))
			}
		}
	}
}
