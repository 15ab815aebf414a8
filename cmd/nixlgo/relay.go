package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

// relayConfig is the command line of relay.
type relayConfig struct {
	listen     string
	like       string
	node       nixlgo.Config
	handshakes handshakes
	verify     bool
	drain      time.Duration
	format     format
}

func newRelay() *cobra.Command {
	c := relayConfig{node: nixlgo.Config{Lease: lease.DefaultConfig()}}
	cmd := &cobra.Command{
		Use:   "relay",
		Short: "Pull KV blocks from an owner and republish them to a decoder",
		Long: "relay stands between a prefill and a decode instance, vLLM's or nixlgo's. It takes the kv_transfer_params of a prefill\n" +
			"as an HTTP POST, reads the blocks they name from their owner, which is then free to reuse them, holds the blocks under\n" +
			"a lease of its own, and answers the kv_transfer_params that the decoder is to get instead.\n\n" +
			"The geometry of the KV cache and the compatibility hash must be those of both instances: --like learns them from one\n" +
			"that runs, or give them with --layers, --block-bytes, --block-tokens and --compatibility.\n\n" +
			"  POST /       kv_transfer_params, alone or under that key   →  200 the new kv_transfer_params\n" +
			"               400 params that cannot be served   409 the owner's lease was lost or cannot be verified\n" +
			"               413 more blocks than the relay has 502 the owner failed   504 it did not deliver in time\n" +
			"  GET /stats   counters and free blocks\n" +
			"  GET /metrics for Prometheus\n\n" +
			"Leases are verified where the owner offers that. vLLM up to 0.33 does not, so its leases are renewed only; --verify\n" +
			"refuses them.\n" +
			"Nothing authenticates a client, and params name the host that the relay connects to: keep --listen and --host on a\n" +
			"private network. SIGTERM stops taking requests and waits up to --drain for the decoders to read what is published.",
		Example: "  nixlgo relay --like tcp://10.0.0.6:5600 --host 10.0.0.7 --blocks 4096\n" +
			"  curl -s http://127.0.0.1:8200/ -d @prefill-answer.json > decode-params.json",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("relay: unexpected argument %q", args[0])}
			}
			if err := c.check(cmd.Context()); err != nil {
				return err
			}
			return c.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Args = cobra.ArbitraryArgs // RunE says what is wrong with them
	f := cmd.Flags()
	f.StringVar(&c.listen, "listen", "127.0.0.1:8200", "address for HTTP")
	f.StringVar(&c.like, "like", "", "side channel (tcp://host:port) of a running instance to take geometry and hash from")
	f.StringVar(&c.node.Engine, "engine", "", "engine id (default: a random one)")
	sideChannelFlags(f, &c.node)
	f.IntVar(&c.node.Layers, "layers", 0, "regions of the KV cache, one a layer")
	f.IntVar(&c.node.BlockBytes, "block-bytes", 0, "bytes of a block of one layer")
	f.IntVar(&c.node.BlockTokens, "block-tokens", 0, "tokens of a block")
	f.StringVar(&c.node.Compatibility, "compatibility", "", "compatibility hash of the instances")
	f.BoolVar(&c.node.AnyCompatibility, "any-compatibility", false, "read from owners with another hash, too")
	f.IntVar(&c.node.Blocks, "blocks", 1024, "blocks that the relay holds at most")
	f.DurationVar(&c.node.Lease.Duration, "lease", c.node.Lease.Duration, "life of a lease that no decoder renews")
	f.BoolVar(&c.verify, "verify", false, "refuse blocks of owners that offer no verification")
	f.DurationVar(&c.node.ReadTimeout, "timeout", time.Minute, "longest wait for an owner")
	f.DurationVar(&c.drain, "drain", 30*time.Second, "longest wait for decoders at the end")
	c.handshakes.flags(f)
	libraryFlag(f, &c.node.Library)
	formatFlags(f, &c.format, false)
	return cmd
}

// check validates the command line and learns what --like offers.
func (c *relayConfig) check(ctx context.Context) error {
	bad := func(format string, a ...any) error { return usageError{fmt.Errorf("relay: "+format, a...)} }
	if !c.verify {
		c.node.Lease.Verification = lease.VerifyOffered
	}
	if err := checkLease(c.node.Lease.Duration); err != nil {
		return bad("%w", err)
	}
	if err := checkSideChannel(&c.node); err != nil {
		return bad("%w", err)
	}
	if err := c.handshakes.check(&c.node); err != nil {
		return bad("%w", err)
	}
	if err := checkListen(c.listen); err != nil {
		return bad("--listen: %w", err)
	}
	n := &c.node
	const most = math.MaxInt32
	if err := checkBounds(bound{"blocks", n.Blocks, 1, most}, bound{"layers", n.Layers, 0, most}, bound{"block-bytes", n.BlockBytes, 0, most},
		bound{"block-tokens", n.BlockTokens, 0, most}); err != nil {
		return bad("%w", err)
	}
	switch {
	case c.drain < 0:
		return bad("--drain %v is negative", c.drain)
	case n.ReadTimeout <= 0:
		return bad("--timeout %v is not positive", n.ReadTimeout)
	}
	if c.like == "" {
		if c.node.Layers < 1 || c.node.BlockBytes < 1 || c.node.BlockTokens < 1 {
			return bad("give --like, or all of --layers, --block-bytes and --block-tokens")
		}
		return nil
	}
	if c.node.Layers != 0 || c.node.BlockBytes != 0 || c.node.BlockTokens != 0 {
		return bad("--like learns the geometry: leave --layers, --block-bytes and --block-tokens out")
	}
	host, port, err := sideChannelAddress(c.like)
	if err != nil {
		return usageError{fmt.Errorf("relay: --like: %w", err)}
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	reply, err := rdma.ProbeWithKey(ctx, host, port, 0, 0, c.node.Key)
	if err != nil {
		return fmt.Errorf("relay: --like %s: %w", c.like, err)
	}
	if err := c.mirror(reply); err != nil {
		return fmt.Errorf("relay: --like %s: %w", c.like, err)
	}
	return nil
}

// mirror takes the geometry of an instance. A Node has regions of one size.
func (c *relayConfig) mirror(r *rdma.Reply) error {
	m := r.Metadata
	for _, n := range m.BlockLens {
		if n != m.BlockLens[0] {
			return fmt.Errorf("its layers have blocks of %v bytes, and a relay has one size", m.BlockLens)
		}
	}
	if m.PhysicalPerLogical != 1 {
		return fmt.Errorf("its blocks are %d kernel blocks each, and a relay's are one", m.PhysicalPerLogical)
	}
	c.node.Layers, c.node.BlockBytes, c.node.BlockTokens = len(m.BlockLens), m.BlockLens[0], m.BlockSize
	c.node.Layout, c.node.Attention = m.Layout, m.Attention
	if c.node.Compatibility == "" {
		c.node.Compatibility = r.Hash
	}
	return nil
}

// sideChannelAddress splits tcp://host:port.
func sideChannelAddress(s string) (host string, port int, err error) {
	address, ok := strings.CutPrefix(s, "tcp://")
	if !ok || checkConnect(address) != nil {
		return "", 0, fmt.Errorf("%q is no side-channel address: want tcp://host:port", s)
	}
	host, digits, _ := net.SplitHostPort(address)
	port, _ = strconv.Atoi(digits)
	return host, port, nil
}

// relay serves one Node over HTTP.
type relay struct {
	node   *nixlgo.Node
	blocks *blockPool
	log    *slog.Logger
	passed atomic.Uint64
	next   atomic.Uint64
}

// relayReady is printed when requests are served.
type relayReady struct {
	Event       string `json:"event"` // ready
	Engine      string `json:"engine"`
	SideChannel string `json:"side_channel"`
	URL         string `json:"url"`
	Layers      int    `json:"layers"`
	BlockBytes  int    `json:"block_bytes"`
	BlockTokens int    `json:"block_tokens"`
	Blocks      int    `json:"blocks"`
}

func (c *relayConfig) run(ctx context.Context, out, errs io.Writer) (err error) {
	log := slog.New(slog.NewTextHandler(errs, &slog.HandlerOptions{Level: slog.LevelWarn}))
	c.node.Logger = log
	warnOfPort(log, c.node.Port)
	l, err := net.Listen("tcp", c.listen)
	if err != nil {
		return fmt.Errorf("relay: --listen %s: %w", c.listen, err)
	}
	defer l.Close()
	node, end, err := c.handshakes.open(c.node)
	if err != nil {
		return fmt.Errorf("relay: %w", err)
	}
	defer func() { err = errors.Join(err, end()) }()
	scraped, err := metricsOf(node)
	if err != nil {
		return fmt.Errorf("relay: %w", err)
	}
	r := &relay{node: node, blocks: newBlockPool(c.node.Blocks), log: log}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /{$}", r.post)
	mux.HandleFunc("GET /stats", r.stats)
	mux.Handle("GET "+metricsPath, scraped)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second}
	ready := relayReady{"ready", node.Engine(), "tcp://" + net.JoinHostPort(c.node.Host, strconv.Itoa(node.Port())), "http://" + l.Addr().String() + "/",
		c.node.Layers, c.node.BlockBytes, c.node.BlockTokens, c.node.Blocks}
	err = serveNode(ctx, node, l, server, func() error {
		return say(out, c.format, ready, "relay: engine %s, side channel %s\nrelay: POST kv_transfer_params to %s", ready.Engine, ready.SideChannel, ready.URL)
	})
	if err != nil {
		return fmt.Errorf("relay: %w", err)
	}
	rest, cancel := context.WithTimeout(context.Background(), c.drain)
	defer cancel()
	err = server.Shutdown(rest)
	if err == nil {
		err = r.blocks.whole(rest)
	}
	if err != nil {
		return fmt.Errorf("relay: not all blocks were read after %s: %w", c.drain, err)
	}
	return nil
}

// errTooLarge refuses a request that no wait can make fit.
var errTooLarge = errors.New("more blocks than the relay has")

func (r *relay) post(w http.ResponseWriter, q *http.Request) {
	in, err := readParams(http.MaxBytesReader(w, q.Body, 16<<20))
	if err != nil {
		refuse(w, err)
		return
	}
	pub, err := r.pass(q.Context(), in)
	if err != nil {
		r.log.Warn("not relayed", "request", in.RemoteRequestID, "engine", in.RemoteEngineID, "error", err)
		refuse(w, err)
		return
	}
	params := pub.Params()
	// What the router or the owner added goes on, except what is about the owner's memory.
	params.Extra = maps.Clone(in.Extra)
	delete(params.Extra, "remote_registration_generation")
	if err := handOver(w, q, pub, params); err != nil {
		r.log.Warn("not handed over", "request", in.RemoteRequestID, "error", err)
	}
}

// readParams takes the object alone or in the answer of an OpenAI server.
func readParams(body io.Reader) (*lease.Params, error) {
	text, err := io.ReadAll(body)
	if err != nil {
		return nil, fmt.Errorf("%w: request body: %w", lease.ErrInvalid, err)
	}
	var outer struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	if json.Unmarshal(text, &outer) == nil && outer.Params != nil {
		text = outer.Params
	}
	p := new(lease.Params)
	if err := json.Unmarshal(text, p); err != nil {
		return nil, fmt.Errorf("%w: kv_transfer_params: %w", lease.ErrInvalid, err)
	}
	if !p.DoRemotePrefill || len(p.RemoteBlockIDs) != 1 || len(p.RemoteBlockIDs[0]) == 0 {
		return nil, fmt.Errorf("%w: kv_transfer_params with do_remote_prefill and the blocks of one group are wanted, got do_remote_prefill %t and %s",
			lease.ErrInvalid, p.DoRemotePrefill, many(len(p.RemoteBlockIDs), "group"))
	}
	return p, nil
}

// pass reads the blocks of in and publishes them anew. While it waits for free blocks the owner's lease is renewed; when
// ctx ends the owner is released.
func (r *relay) pass(ctx context.Context, in *lease.Params) (*nixlgo.Publication, error) {
	h, err := r.node.Hold(in)
	if err != nil {
		return nil, err
	}
	blocks, err := r.blocks.take(ctx, len(in.RemoteBlockIDs[0]))
	if err != nil {
		release, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		return nil, errors.Join(err, h.Release(release))
	}
	if err := h.Fetch(ctx, blocks); err != nil {
		if errors.Is(err, nixlgo.ErrQuarantined) {
			go func() {
				<-h.Settled()
				r.blocks.give(blocks)
			}()
		} else {
			r.blocks.give(blocks)
		}
		return nil, err
	}
	// Publishing takes a step, and a Publish that was given up would leave the blocks in use for another.
	pub, err := r.node.Publish(context.WithoutCancel(ctx), in.RemoteRequestID+"~"+strconv.FormatUint(r.next.Add(1), 10), blocks, in.RemoteNumTokens)
	if err != nil {
		r.blocks.give(blocks)
		return nil, err
	}
	r.passed.Add(1)
	go func() {
		<-pub.Done()
		r.blocks.give(blocks)
	}()
	return pub, nil
}

// relayError is the body of an answer that is no 200.
type relayError struct {
	Error string `json:"error"`
	Cause string `json:"cause"` // of the package lease, such as handshake
}

func refuse(w http.ResponseWriter, err error) {
	code := http.StatusBadGateway
	switch {
	case errors.Is(err, errTooLarge):
		code = http.StatusRequestEntityTooLarge
	case errors.Is(err, lease.ErrInvalid):
		code = http.StatusBadRequest
	case errors.Is(err, lease.ErrLapsed), errors.Is(err, lease.ErrUnverifiable), errors.Is(err, lease.ErrExpired):
		code = http.StatusConflict
	case errors.Is(err, lease.ErrTimeout), errors.Is(err, context.DeadlineExceeded):
		code = http.StatusGatewayTimeout
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	// A client that is gone hears nothing.
	_ = json.NewEncoder(w).Encode(relayError{err.Error(), lease.CauseOf(err).String()})
}

// relayStats is the answer to GET /stats.
type relayStats struct {
	Passed     uint64       `json:"passed"` // requests republished since the start
	FreeBlocks int          `json:"free_blocks"`
	Blocks     int          `json:"blocks"`
	Node       nixlgo.Stats `json:"node"`
}

func (r *relay) stats(w http.ResponseWriter, _ *http.Request) {
	free, total := r.blocks.count()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(relayStats{r.passed.Load(), free, total, r.node.Stats()})
}
