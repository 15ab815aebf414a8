package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
)

// fileServer publishes the parts of one file.
type fileServer struct {
	servedFile
	node   *nixlgo.Node
	blocks *blockPool
	log    *fileLog

	next       atomic.Uint64
	passed     atomic.Int64 // bytes that were read
	draining   atomic.Bool
	background sync.WaitGroup

	mu      sync.Mutex
	readers map[string]string // of requests that are published
}

// publish makes a request of part n for reader. It waits while all blocks are leased.
func (s *fileServer) publish(ctx context.Context, n int, reader string) (*nixlgo.Publication, *lease.Params, error) {
	_, size, count := s.offer.part(n)
	blocks, err := s.blocks.take(ctx, count)
	if err != nil {
		return nil, nil, err
	}
	slices.Sort(blocks) // neighbours are read as one
	if err := s.servedFile.read(n, func(i int) []byte { return s.node.Block(0, blocks[i]) }); err != nil {
		s.blocks.give(blocks)
		return nil, nil, err
	}
	id := fmt.Sprintf("part%d~%d", n, s.next.Add(1))
	// Publishing takes a step, and a Publish that was given up would leave the blocks in use for another.
	p, err := s.node.Publish(context.WithoutCancel(ctx), id, blocks, count)
	if err != nil {
		s.blocks.give(blocks)
		return nil, nil, err
	}
	s.mu.Lock()
	s.readers[id] = reader
	s.mu.Unlock()
	s.log.say(fileEvent{Event: "granted", Request: id, Part: &n, Reader: reader, Blocks: count, Bytes: size}, "%s to %s: %s, %s", id, reader, many(count, "block"), byteSize(size))
	s.background.Go(func() { s.await(p, id, n, size, blocks) })
	params := p.Params()
	about, _ := json.Marshal(filePart{s.offer, n}) // strings and numbers always marshal
	params.Extra = map[string]json.RawMessage{fileKey: about}
	return p, params, nil
}

// await waits for the end of a lease.
func (s *fileServer) await(p *nixlgo.Publication, id string, n int, size int64, blocks []int) {
	start := time.Now()
	<-p.Done()
	took := time.Since(start)
	s.mu.Lock()
	reader := s.readers[id]
	delete(s.readers, id)
	s.mu.Unlock()
	e := fileEvent{Event: p.Reason().String(), Request: id, Part: &n, Reader: reader, Blocks: len(blocks), Bytes: size, Seconds: round(took.Seconds())}
	text := fmt.Sprintf("%s by %s after %.3f s", id, reader, took.Seconds())
	if p.Reason() == lease.ReasonRead {
		s.passed.Add(size)
		e.GBs = gbs(size, took)
		text += fmt.Sprintf(", %.2f GB/s", e.GBs)
	}
	s.log.say(e, "%s", text)
	s.blocks.give(blocks)
}

// watch prints once a second what readers do between grant and end.
func (s *fileServer) watch(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var renewals, read int64
	last := s.log.start
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := time.Now()
		stats := s.node.Stats().Worker.Leases
		if n := stats.Renewals - renewals; n > 0 {
			s.log.say(fileEvent{Event: "renewed", Renewals: n, Leases: int(stats.Live)}, "%s, %s live", many(n, "time"), many(stats.Live, "lease"))
		}
		if n := s.passed.Load() - read; n > 0 {
			rate := gbs(n, now.Sub(last))
			s.log.say(fileEvent{Event: "rate", Bytes: n, GBs: rate}, "%.2f GB/s read, %s", rate, byteSize(n))
		}
		renewals, read, last = stats.Renewals, s.passed.Load(), now
	}
}

// republish prints the kv_transfer_params of every part, and again when all of those were read or ran out.
func (s *fileServer) republish(ctx context.Context) {
	for {
		var all []*nixlgo.Publication
		for n := range s.offer.Parts {
			p, params, err := s.publish(ctx, n, "whoever has its params")
			if err != nil {
				if ctx.Err() == nil && !errors.Is(err, nixlgo.ErrDraining) {
					s.log.say(fileEvent{Event: "failed", Part: &n, Error: err.Error()}, "part %d: %v", n, err)
				}
				return
			}
			all = append(all, p)
			s.log.params(params)
		}
		for _, p := range all {
			select {
			case <-p.Done():
			case <-ctx.Done():
				return
			}
		}
		if s.draining.Load() {
			return
		}
	}
}

// params prints what nixlgo fetch takes as an argument.
func (l *fileLog) params(p *lease.Params) {
	text, err := json.Marshal(p)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil && l.format == formatJSON {
		_, err = fmt.Fprintf(l.out, `{"event":"params","kv_transfer_params":%s}`+"\n", text)
	} else if err == nil {
		_, err = fmt.Fprintf(l.out, "%s\n", text)
	}
	if l.err == nil {
		l.err = err
	}
}

// serveReady is printed when requests are served.
type serveReady struct {
	Event string `json:"event"` // ready
	fileOffer
	Engine      string `json:"engine"`
	SideChannel string `json:"side_channel"`
	URL         string `json:"url"`   // for readers
	Fetch       string `json:"fetch"` // the line for the other machine
}

func (s *fileServer) ready(c *serveConfig, l net.Listener) error {
	host, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return err
	}
	if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
		host = c.node.Host
	}
	r := serveReady{Event: "ready", fileOffer: s.offer, Engine: s.node.Engine(), URL: "http://" + net.JoinHostPort(host, port)}
	r.SideChannel = "tcp://" + net.JoinHostPort(c.node.Host, strconv.Itoa(s.node.Port()))
	r.Fetch = "nixlgo fetch " + r.URL
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	return say(s.log.out, c.format, r, "%s: %s in %s, SHA-256 %s\nside channel %s\non the other machine: %s", r.Name, byteSize(r.Bytes), many(r.Parts, "request"), r.SHA256,
		r.SideChannel, r.Fetch)
}

// drain publishes nothing more and waits for readers; it says who holds what, first and at the end.
func (s *fileServer) drain(patience time.Duration) error {
	s.draining.Store(true)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	leases := s.node.Leases()
	s.log.say(fileEvent{Event: "draining", Leases: len(leases), Seconds: patience.Seconds()}, "up to %v for %s; nothing is published any more", patience, many(len(leases), "lease"))
	s.sayLeft("waiting", leases)
	left, err := s.node.Drain(ctx)
	if err == nil {
		s.log.say(fileEvent{Event: "drained", Bytes: s.passed.Load()}, "no lease is left; %s were read", byteSize(s.passed.Load()))
		return nil
	}
	leases = s.node.Leases()
	s.sayLeft("left", leases)
	return fmt.Errorf("%s neither read nor expired after %v, and revoked now: %w", many(len(left), "request"), patience, err)
}

// sayLeft names holders, the first hundred of them.
func (s *fileServer) sayLeft(event string, leases []nixlgo.Lease) {
	slices.SortFunc(leases, func(a, b nixlgo.Lease) int { return int(b.Age - a.Age) })
	for i, l := range leases {
		if i == 100 {
			s.log.say(fileEvent{Event: event, Leases: len(leases) - i}, "and %d more", len(leases)-i)
			return
		}
		reader := s.reader(l.Request)
		s.log.say(fileEvent{Event: event, Request: l.Request, Reader: reader, Blocks: l.Blocks, Seconds: round(l.Age.Seconds()), LeftS: round(l.Left.Seconds())},
			"%s is held by %s for %.1f s, and runs out in %.1f s unless it is renewed", l.Request, reader, l.Age.Seconds(), l.Left.Seconds())
	}
}

func (s *fileServer) reader(request string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.readers[request]
}
