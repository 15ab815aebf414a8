package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/cgo_test/child"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

const (
	layers       = 2
	blockBytes   = 8192
	maxBlocks    = 6 // of a request
	publishers   = 8 // of an owner, at once
	fetchTimeout = 6 * time.Second
	readTimeout  = 4 * time.Second
)

// config is a run's command line.
type config struct {
	duration time.Duration
	seed     uint64
	tls      string
	lease    time.Duration
	blocks   int
	verify   bool
}

// message is a line between the parent and a child.
type message struct {
	Kind   string        `json:"kind"` // to a child: fetch, drain; from one: ready, published, freed, done, final
	ID     string        `json:"id,omitempty"`
	Engine string        `json:"engine,omitempty"`
	Port   int           `json:"port,omitempty"`
	Params *lease.Params `json:"params,omitempty"`
	Tag    uint64        `json:"tag,omitempty"`
	Blocks int           `json:"blocks,omitempty"`
	Queue  time.Duration `json:"queue,omitempty"` // how long the reader holds the request before it fetches
	Stall  time.Duration `json:"stall,omitempty"` // how long it stalls between the block READ and the check
	Result string        `json:"result,omitempty"`
	Error  string        `json:"error,omitempty"`
	Wrong  int           `json:"wrong,omitempty"`  // bytes
	Leaked int           `json:"leaked,omitempty"` // blocks
	Double int           `json:"double,omitempty"` // blocks freed twice
	Live   int64         `json:"live,omitempty"`   // leases or pulls that are left
}

// worker is an owner or a reader process.
type worker struct {
	cfg  config
	node *nixlgo.Node

	mu     sync.Mutex
	free   []int
	double int
	next   uint64
	stall  atomic.Int64
}

// identity is given to a restarted owner in the environment: a new life at the old address, or another engine.
const identityVar = "CHAOS_IDENTITY"

type identity struct {
	Engine string
	Port   int
	Salt   uint64 // of the tags
}

func runChild(ctx context.Context, role string, cfg config) error {
	var id identity
	if err := json.Unmarshal([]byte(os.Getenv(identityVar)), &id); err != nil {
		return fmt.Errorf("%s: %w", identityVar, err)
	}
	c := &worker{cfg: cfg, next: id.Salt << 32}
	for b := range cfg.blocks {
		c.free = append(c.free, b)
	}
	lc := lease.DefaultConfig()
	lc.Duration = cfg.lease
	if !cfg.verify {
		lc.Verification = lease.VerifyNone
	}
	var err error
	c.node, err = nixlgo.New(nixlgo.Config{
		Engine: id.Engine, Port: id.Port, Layers: layers, Blocks: cfg.blocks, BlockBytes: blockBytes, Lease: lc,
		ReadTimeout: readTimeout, HandshakeTimeout: 2 * time.Second,
		Trace:  rdma.Trace{BeforeCheck: func(string, int, int) { time.Sleep(time.Duration(c.stall.Swap(0))) }},
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go c.node.Run(ctx)
	c.say(message{Kind: "ready", Engine: c.node.Engine(), Port: c.node.Port()})
	drain := make(chan struct{})
	var work sync.WaitGroup
	if role == "owner" {
		for range publishers {
			work.Go(func() { c.publish(ctx, drain) })
		}
	}
	for m, err := range child.Commands[message](os.Stdin) {
		if err != nil {
			return err
		}
		switch m.Kind {
		case "fetch":
			work.Go(func() { c.fetch(ctx, m) })
		case "drain":
			close(drain)
			work.Wait()
			c.say(c.final())
		}
	}
	cancel()
	return c.node.Close()
}

// publish owns one request after another, with blocks that were just freed.
func (c *worker) publish(ctx context.Context, drain <-chan struct{}) {
	for ctx.Err() == nil {
		select {
		case <-drain:
			return
		default:
		}
		blocks, tag := c.take()
		if blocks == nil {
			time.Sleep(time.Millisecond)
			continue
		}
		for i, b := range blocks {
			for l := range layers {
				write(c.node.Block(l, b), tag, i, l)
			}
		}
		id := fmt.Sprintf("req-%x", tag)
		p, err := c.node.Publish(ctx, id, blocks, 16*len(blocks))
		if err != nil {
			c.say(message{Kind: "freed", ID: id, Result: "publish failed", Error: err.Error()})
			c.give(blocks)
			continue
		}
		c.say(message{Kind: "published", ID: id, Params: p.Params(), Tag: tag, Blocks: len(blocks)})
		select {
		case <-p.Done():
			c.give(blocks)
			c.say(message{Kind: "freed", ID: id, Result: p.Reason().String()})
		case <-ctx.Done():
		}
	}
}

// fetch reads a request into blocks of its own and checks every byte.
func (c *worker) fetch(ctx context.Context, m message) {
	done := message{Kind: "done", ID: m.ID}
	h, err := c.node.Hold(m.Params)
	if err == nil {
		time.Sleep(m.Queue)
		c.stall.Store(int64(m.Stall))
		ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
		defer cancel()
		var blocks []int
		for blocks == nil && ctx.Err() == nil {
			blocks = c.some(m.Blocks)
			if blocks == nil {
				time.Sleep(time.Millisecond)
			}
		}
		if err = h.Fetch(ctx, blocks); err == nil {
			for i, b := range blocks {
				for l := range layers {
					done.Wrong += wrong(c.node.Block(l, b), m.Tag, i, l)
				}
			}
		}
		c.give(blocks)
	}
	done.Result = "verified"
	switch {
	case errors.Is(err, nixlgo.ErrQuarantined):
		done.Result = "quarantined"
	case errors.Is(err, nixlgo.ErrBusy): // blocks of an earlier fetch that are in quarantine; this one is given up
		done.Result = "busy"
		if err := h.Release(ctx); err != nil {
			done.Error = err.Error()
		}
	case errors.Is(err, context.DeadlineExceeded):
		done.Result = "deadline"
	case err != nil:
		done.Result = lease.CauseOf(err).String()
	}
	if err != nil {
		done.Error = err.Error()
	}
	c.say(done)
}

// take returns free blocks for a new request and its tag, nil when there are none.
func (c *worker) take() ([]int, uint64) {
	blocks := c.some(1 + rand.IntN(maxBlocks))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.next++
	return blocks, c.next
}

// some takes the n blocks that were freed last.
func (c *worker) some(n int) []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.free) < n {
		return nil
	}
	blocks := slices.Clone(c.free[len(c.free)-n:])
	c.free = c.free[:len(c.free)-n]
	return blocks
}

func (c *worker) give(blocks []int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, b := range blocks {
		if slices.Contains(c.free, b) {
			c.double++
			continue
		}
		c.free = append(c.free, b)
	}
}

// final says what is left when everything should have ended. A pull in quarantine ends with its READ, so it gets time.
func (c *worker) final() message {
	m := message{Kind: "final"}
	for until := time.Now().Add(2 * readTimeout); ; time.Sleep(10 * time.Millisecond) {
		s := c.node.Stats()
		m.Live = s.Worker.Leases.Live + int64(s.Worker.Pulls) + s.Scheduler.Pinned + s.Scheduler.Running
		if m.Live == 0 || time.Now().After(until) {
			break
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	m.Leaked, m.Double = c.cfg.blocks-len(c.free), c.double
	// The node must agree that every block is free.
	if _, err := c.node.Publish(context.Background(), "all", c.free, 0); err != nil {
		m.Leaked++
		m.Error = err.Error()
	}
	return m
}

func (c *worker) say(m message) {
	if err := child.Say(m); err != nil {
		fmt.Fprintln(os.Stderr, "chaos child:", err)
	}
}

// word is what word i of a block holds: no two requests share one.
func word(tag uint64, block, layer, i int) uint64 {
	h := (tag ^ uint64(block)<<52 ^ uint64(layer)<<44) * 0x9e3779b97f4a7c15
	return h ^ h>>29 ^ uint64(i)
}

func write(b []byte, tag uint64, block, layer int) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], word(tag, block, layer, i))
	}
}

func wrong(b []byte, tag uint64, block, layer int) (bytes int) {
	for i := 0; i+8 <= len(b); i += 8 {
		if binary.LittleEndian.Uint64(b[i:]) != word(tag, block, layer, i) {
			bytes += 8
		}
	}
	return bytes
}
