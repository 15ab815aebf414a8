package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
)

// serveNode steps node and answers HTTP on l. It calls ready when both run, and returns nil when ctx has ended, while they
// still run: what is under way is the caller's to finish, before it shuts the server and closes the node.
func serveNode(ctx context.Context, node *nixlgo.Node, l net.Listener, server *http.Server, ready func() error) error {
	stepped, served := make(chan error, 1), make(chan error, 1)
	go func() { stepped <- node.Run(context.Background()) }()
	go func() { served <- server.Serve(l) }()
	if err := ready(); err != nil {
		return err
	}
	select {
	case err := <-served:
		return fmt.Errorf("HTTP on %s: %w", l.Addr(), err)
	case err := <-stepped:
		return fmt.Errorf("the node stopped: %w", err)
	case <-ctx.Done():
		return nil
	}
}

// handOver answers the params of what was published. When the client is gone before it has them nobody will read, so p is
// revoked; the error is about that.
func handOver(w http.ResponseWriter, r *http.Request, p *nixlgo.Publication, params *lease.Params) error {
	text, err := json.Marshal(params)
	if err == nil {
		err = r.Context().Err() // not after the write: a client that has decoded the object may hang up
	}
	if err == nil {
		w.Header().Set("Content-Type", "application/json")
		_, err = w.Write(append(text, '\n'))
	}
	if err == nil {
		err = http.NewResponseController(w).Flush()
	}
	if err == nil {
		return nil
	}
	if err := p.Revoke(); err != nil {
		return fmt.Errorf("revoke what the client is not there to read: %w", err)
	}
	return nil
}
