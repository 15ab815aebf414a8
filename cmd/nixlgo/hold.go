package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
)

// holdConfig is the command line of hold.
type holdConfig struct {
	listen      string
	allowRemote bool
	state       string
	node        nixlgo.Config
	handshakes  handshakes
	ttl, maxTTL time.Duration
	maxHolds    int
	maxBody     int64
	metricsPort int // 0: none
	format      format
}

func newHold() *cobra.Command {
	c := holdConfig{node: nixlgo.Config{HoldOnly: true, Lease: lease.DefaultConfig()}}
	cmd := &cobra.Command{
		Use:   "hold",
		Short: "Renew leases for a router that has no decoder yet, and give them back",
		Long: "hold is a daemon that renews leases on behalf of programs without NIXL, such as a router built without cgo. The Go\n" +
			"client is the package lease/hold.\n\n" +
			"  POST   /v1/holds                        {\"kv_transfer_params\": {…}, \"ttl\": \"60s\"} → 201 {\"id\", \"engine\", \"request\", \"expires\"}\n" +
			"                                          the same lease again → 200, the same hold, which now expires later\n" +
			"  GET    /v1/holds, /v1/holds/ID          what is held\n" +
			"  DELETE /v1/holds/ID?release=true|false  → 204\n" +
			"  GET    /healthz                         {\"holds\", \"max_holds\"}\n" +
			"  GET    /metrics                         for Prometheus: heartbeats sent and failed, leases renewed now\n" +
			"An error is {\"code\", \"error\"}: 400 invalid, 403 forbidden, 404 unknown_hold, 413 too_large, 415 unsupported_media_type,\n" +
			"429 too_many_holds, 503 unavailable.\n\n" +
			"release=true tells the owner that nobody will read: it frees the blocks at once. That is safe only while no decoder has\n" +
			"the kv_transfer_params, for the owner cannot see a READ that is under way. A decoder that does not verify its lease\n" +
			"(vLLM up to 0.33) would read the next prompt's KV cache and answer from it, with HTTP 200. release=false stops renewing\n" +
			"and says nothing: the decoder renews, or the lease runs out. There is no default.\n\n" +
			"A hold ends after its ttl as with release=false. What is held is kept in --state, so that a daemon that was killed goes on\n" +
			"renewing when it is started again; it never releases on its own.\n\n" +
			"Nothing authenticates a client, and params name the host that the daemon connects to. The socket is the user's alone\n" +
			"(mode 0600); a port on the loopback interface is open to every user of the machine.",
		Example: "  nixlgo hold --listen unix:/run/nixlgo.sock --lease 30s\n" +
			"  curl --unix-socket /run/nixlgo.sock --json \"{\\\"kv_transfer_params\\\": $(cat params.json), \\\"ttl\\\": \\\"60s\\\"}\" http://hold/v1/holds\n" +
			"  curl --unix-socket /run/nixlgo.sock -X DELETE 'http://hold/v1/holds/ID?release=true'",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("hold: unexpected argument %q", args[0])}
			}
			if err := c.check(); err != nil {
				return err
			}
			return c.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Args = cobra.ArbitraryArgs // RunE says what is wrong with them
	f := cmd.Flags()
	f.StringVar(&c.listen, "listen", "", "unix:/path or 127.0.0.1:PORT (default: nixlgo-hold.sock in $XDG_RUNTIME_DIR, or in /tmp/nixlgo-UID)")
	f.BoolVar(&c.allowRemote, "allow-remote", false, "let --listen be an address that other machines reach")
	f.StringVar(&c.state, "state", "", "directory of what is held (default: nixlgo-hold.state beside the default socket)")
	f.DurationVar(&c.node.Lease.Duration, "lease", c.node.Lease.Duration, "shortest kv_lease_duration of the owners; a sixth of it passes between heartbeats")
	f.DurationVar(&c.ttl, "ttl", time.Minute, "life of a hold that does not ask for another")
	f.DurationVar(&c.maxTTL, "max-ttl", 10*time.Minute, "longest life that a hold may ask for")
	f.IntVar(&c.maxHolds, "max-holds", 10000, "holds at once")
	f.Int64Var(&c.maxBody, "max-body", 1<<20, "bytes of a request")
	f.IntVar(&c.metricsPort, "metrics-port", 0, "port for GET /metrics alone, on every interface: Prometheus scrapes no socket (default: none)")
	c.handshakes.flags(f)
	libraryFlag(f, &c.node.Library)
	formatFlags(f, &c.format, false)
	return cmd
}

func (c *holdConfig) check() error {
	if err := checkLease(c.node.Lease.Duration); err != nil {
		return usageError{fmt.Errorf("hold: %w", err)}
	}
	switch {
	case c.ttl <= 0 || c.maxTTL < c.ttl || c.maxTTL > lease.MaxTTL:
		return usageError{fmt.Errorf("hold: --ttl %v and --max-ttl %v: want 0 < --ttl ≤ --max-ttl ≤ %v", c.ttl, c.maxTTL, lease.MaxTTL)}
	case c.maxBody < 1:
		return usageError{fmt.Errorf("hold: --max-body %d is not positive", c.maxBody)}
	}
	if err := c.handshakes.check(&c.node); err != nil {
		return usageError{fmt.Errorf("hold: %w", err)}
	}
	if err := checkBounds(bound{"max-holds", c.maxHolds, 1, math.MaxInt32}, bound{"metrics-port", c.metricsPort, 0, 65535}); err != nil {
		return usageError{fmt.Errorf("hold: %w", err)}
	}
	if c.listen != "" {
		if err := checkHoldListen(c.listen, c.allowRemote); err != nil {
			return usageError{fmt.Errorf("hold: --listen %s: %w", c.listen, err)}
		}
	}
	return nil
}

// holdReady is printed when requests are served.
type holdReady struct {
	Event   string `json:"event"` // ready
	Engine  string `json:"engine"`
	Address string `json:"address"` // for the client
	State   string `json:"state"`
	Holds   int    `json:"holds"` // those of an earlier run that go on
}

func (c *holdConfig) run(ctx context.Context, out, errs io.Writer) (err error) {
	log := slog.New(slog.NewTextHandler(errs, &slog.HandlerOptions{Level: slog.LevelWarn}))
	c.node.Logger = log
	if c.listen == "" || c.state == "" {
		dir, err := runtimeDir()
		if err != nil {
			return fmt.Errorf("hold: %w", err)
		}
		if c.listen == "" {
			c.listen = "unix:" + dir + "/nixlgo-hold.sock"
			if err := checkHoldListen(c.listen, false); err != nil {
				return fmt.Errorf("hold: %s: %w: give --listen", c.listen, err)
			}
		}
		if c.state == "" {
			c.state = dir + "/nixlgo-hold.state"
		}
	}
	state, err := openHoldState(c.state)
	if err != nil {
		return fmt.Errorf("hold: --state: %w", err)
	}
	defer func() { err = errors.Join(err, state.Close()) }()
	l, address, err := listenHold(c.listen)
	if err != nil {
		return err
	}
	defer l.Close()
	var forMetrics net.Listener
	if c.metricsPort != 0 {
		if forMetrics, err = net.Listen("tcp", fmt.Sprintf(":%d", c.metricsPort)); err != nil {
			return fmt.Errorf("hold: --metrics-port %d: %w", c.metricsPort, err)
		}
		defer forMetrics.Close()
	}
	node, end, err := c.handshakes.open(c.node)
	if err != nil {
		return fmt.Errorf("hold: %w", err)
	}
	defer func() { err = errors.Join(err, end()) }()
	h := newHolder(c, node, state, log)
	defer h.stop()
	resumed, err := h.resume()
	if err != nil {
		return fmt.Errorf("hold: --state: %w", err)
	}
	scraped, err := metricsOf(node)
	if err != nil {
		return fmt.Errorf("hold: %w", err)
	}
	server := &http.Server{
		Handler:           h.handler(l.Addr().Network() == "tcp" && !c.allowRemote, scraped),
		ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 15 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: 2 * time.Minute,
		MaxHeaderBytes: 16 << 10, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	if forMetrics != nil {
		stop := serveMetrics(forMetrics, scraped, log)
		defer stop()
	}
	err = serveNode(ctx, node, l, server, func() error {
		return say(out, c.format, holdReady{"ready", node.Engine(), address, c.state, resumed}, "hold: %s, %s of an earlier run", address, many(resumed, "hold"))
	})
	if err != nil {
		return fmt.Errorf("hold: %w", err)
	}
	rest, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := server.Shutdown(rest); err != nil {
		return fmt.Errorf("hold: requests were cut off: %w", err)
	}
	return nil
}
