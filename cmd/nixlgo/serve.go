package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"github.com/spf13/cobra"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
)

// serveConfig is the command line of serve.
type serveConfig struct {
	file       string
	http       string
	params     bool
	requestMiB int
	memoryMiB  int
	drain      time.Duration
	node       nixlgo.Config
	handshakes handshakes
	format     format
}

func newServe() *cobra.Command {
	c := serveConfig{node: fileNode()}
	cmd := &cobra.Command{
		Use:   "serve FILE",
		Short: "Publish a file as leased KV blocks, for nixlgo fetch on another machine",
		Long: "serve passes a file as if it were the KV cache of a prompt. It is cut into requests; when a reader asks for one, its bytes\n" +
			"are copied into registered blocks and published under a lease, which the reader renews, reads, verifies and ends. So each\n" +
			"reader has leases of its own, and a reader that dies costs one of them. What happens is printed as it happens, and the\n" +
			"line for the other machine first.\n\n" +
			"HTTP, on --http:\n" +
			"  GET  /v1/file        name, size, SHA-256, and how the file is cut\n" +
			"  POST /v1/parts/N     publishes part N and answers its kv_transfer_params; waits while all blocks are leased\n" +
			"  GET  /metrics        Prometheus\n" +
			"  GET  /healthz        200 while the node steps\n" +
			"  GET  /readyz         503 while draining\n" +
			"  GET  /debug/leases   who holds what, as a page; /debug/leases.json for programs; ?sort= desc= limit= offset= q=\n\n" +
			"With --params the kv_transfer_params are printed as well, a line a part, to be pasted or piped into nixlgo fetch where\n" +
			"HTTP does not reach, and new ones when those were read or ran out.\n\n" +
			"SIGTERM drains: nothing is published any more, and serve waits up to --drain until what is published was read or ran out.\n" +
			"It says who still holds something, and exits with 1 if somebody does at the end. A second SIGTERM ends it at once.\n\n" +
			"With --key-file the side channel gives its metadata to those alone who have the key; HTTP and the bytes stay as they are.\n" +
			"Without it nothing is authenticated or encrypted. Whoever reaches --http or the side channel can read the file and keep its blocks\n" +
			"leased. With the NIXL metadata that the side channel tells everybody, a peer can read the registered memory without a\n" +
			"lease; over TCP, where UCX copies in software and checks no address, a hostile one can read any memory of this process,\n" +
			"or end it. So both ports are on the loopback interface unless --host or --http says otherwise: name an address of a\n" +
			"private network.",
		Example: "  nixlgo serve model.gguf                            # for this machine\n" +
			"  nixlgo serve model.gguf --host 10.0.0.7            # for others: both ports are on that address\n" +
			"  nixlgo serve model.gguf --host 10.0.0.7 --http :8300 --json\n" +
			"  nixlgo serve small.bin --params --json | grep --line-buffered kv_transfer_params",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{errors.New("serve: name one file, as in nixlgo serve model.gguf")}
			}
			c.file = args[0]
			if err := c.check(); err != nil {
				return err
			}
			if err := c.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr()); err != nil {
				return fmt.Errorf("serve %s: %w", c.file, err)
			}
			return nil
		},
	}
	cmd.Args = cobra.ArbitraryArgs // RunE says what is wrong with them
	f := cmd.Flags()
	f.StringVar(&c.http, "http", "", "address for HTTP (default: any free port of --host)")
	f.BoolVar(&c.params, "params", false, "print the kv_transfer_params of every part")
	sideChannelFlags(f, &c.node)
	f.IntVar(&c.requestMiB, "request-mib", 64, "MiB of the file that a request has at most")
	f.IntVar(&c.memoryMiB, "memory-mib", 512, "MiB of registered memory at most, for all readers together")
	f.IntVar(&c.node.BlockBytes, "block-bytes", 1<<20, "bytes of a block")
	f.DurationVar(&c.node.Lease.Duration, "lease", 0, "life of a lease that its reader does not renew (default 30s, with --params 10m)")
	f.DurationVar(&c.drain, "drain", 30*time.Second, "longest wait for readers at the end")
	c.handshakes.flags(f)
	libraryFlag(f, &c.node.Library)
	formatFlags(f, &c.format, false)
	return cmd
}

func (c *serveConfig) check() error {
	bad := func(format string, a ...any) error { return usageError{fmt.Errorf("serve: "+format, a...)} }
	usual := lease.DefaultConfig().Duration
	if c.params {
		usual = 10 * time.Minute
	}
	c.node.Lease.Duration = cmp.Or(c.node.Lease.Duration, usual)
	if err := checkLease(c.node.Lease.Duration); err != nil {
		return bad("%w", err)
	}
	if err := checkSideChannel(&c.node); err != nil {
		return bad("%w", err)
	}
	if err := c.handshakes.check(&c.node); err != nil {
		return bad("%w", err)
	}
	if c.http != "" {
		if err := checkListen(c.http); err != nil {
			return bad("--http: %w", err)
		}
	}
	const most = 1 << 20 // MiB
	switch {
	case c.requestMiB < 1 || c.memoryMiB < c.requestMiB || c.memoryMiB > most:
		return bad("--request-mib %d and --memory-mib %d: want 1 ≤ --request-mib ≤ --memory-mib ≤ %d", c.requestMiB, c.memoryMiB, most)
	case c.node.BlockBytes < 1 || c.node.BlockBytes > c.requestMiB<<20:
		return bad("--block-bytes %d: want 1 to the bytes of a request, %d", c.node.BlockBytes, c.requestMiB<<20)
	case c.drain < 0:
		return bad("--drain %v is negative", c.drain)
	}
	return nil
}

func (c *serveConfig) run(ctx context.Context, out, errs io.Writer) (err error) {
	log := slog.New(slog.NewTextHandler(errs, &slog.HandlerOptions{Level: slog.LevelWarn}))
	c.node.Logger = log
	warnOfPort(log, c.node.Port)
	file, err := openFile(ctx, c.file, c.node.BlockBytes, c.requestMiB<<20/c.node.BlockBytes, errs)
	if err != nil {
		return err
	}
	defer file.Close()
	_, _, whole := file.offer.part(0)
	fit := c.memoryMiB << 20 / c.node.BlockBytes
	if c.params && file.offer.Parts*whole > fit {
		return usageError{fmt.Errorf("--params publishes all of it at once, %s, and --memory-mib is %d", byteSize(file.offer.Bytes), c.memoryMiB)}
	}
	c.node.Blocks = min(fit, whole*max(file.offer.Parts, 4)) // the file, or four readers of a small one
	flag, address := "--http", c.http
	if address == "" {
		flag, address = "--host", net.JoinHostPort(c.node.Host, "0")
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("%s: %w", flag, err)
	}
	defer l.Close()
	node, end, err := c.handshakes.open(c.node)
	if err != nil {
		return err
	}
	s := &fileServer{servedFile: file, node: node, blocks: newBlockPool(c.node.Blocks), log: newFileLog(out, c.format), readers: map[string]string{}}
	background, stop := context.WithCancel(context.Background())
	defer func() {
		stop()
		err = errors.Join(err, end()) // ends what is published
		s.background.Wait()
	}()
	server, err := s.server(log)
	if err != nil {
		return err
	}
	defer server.Close()
	err = serveNode(ctx, node, l, server, func() error {
		if err := s.ready(c, l); err != nil {
			return err
		}
		s.background.Go(func() { s.watch(background) })
		if c.params {
			s.background.Go(func() { s.republish(background) })
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := s.drain(c.drain); err != nil {
		return err
	}
	return s.log.err
}
