package hold

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/nixlgo/nixlgo/lease"
)

// Client talks to one daemon. It is safe for concurrent use.
type Client struct {
	base string // URL without a path
	http http.Client
}

// maxAnswer bounds what is read of an answer, in bytes.
const maxAnswer = 64 << 20

// New makes a client of the daemon at address: unix:/path/of/socket or http://host:port, as the daemon prints it. Nothing
// is connected yet.
func New(address string) (*Client, error) {
	t := &http.Transport{MaxIdleConnsPerHost: 16, IdleConnTimeout: time.Minute}
	c := &Client{base: strings.TrimSuffix(address, "/"), http: http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse // the daemon does not redirect
	}}}
	dialer := net.Dialer{Timeout: 5 * time.Second}
	if path, ok := strings.CutPrefix(address, "unix:"); ok && path != "" {
		c.base = "http://localhost"
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return dialer.DialContext(ctx, "unix", path) }
		return c, nil
	}
	u, err := url.Parse(c.base)
	if err != nil || u.Scheme != "http" || u.Port() == "" || u.Path != "" || u.RawQuery != "" || u.User != nil {
		return nil, fmt.Errorf("hold: %w: address %q, want unix:/path or http://host:port", lease.ErrInvalid, address)
	}
	t.DialContext = dialer.DialContext
	return c, nil
}

// Hold makes the daemon renew the lease of params, a kv_transfer_params object that an owner answered with
// do_remote_prefill (kvparams.Handoff.Raw), for ttl; 0 is the daemon's default, and more than it allows is
// lease.ErrInvalid. The first heartbeat leaves as soon as the daemon is connected to the owner.
//
// A lease has one hold: the same params again give the same Hold, which then ends when the later of the two would. So a
// request that failed half way can be repeated, and a hold be extended.
func (c *Client) Hold(ctx context.Context, params []byte, ttl time.Duration) (Hold, error) {
	const op = "hold"
	r := Request{Params: params}
	if ttl != 0 {
		r.TTL = ttl.String()
	}
	body, err := json.Marshal(r)
	if err != nil {
		return Hold{}, fmt.Errorf("hold: %s: %w: kv_transfer_params: %w", op, lease.ErrInvalid, err)
	}
	var h Hold
	return h, c.do(ctx, op, http.MethodPost, HoldsPath, body, &h)
}

// Get returns a hold; lease.ErrUnknown when it has ended.
func (c *Client) Get(ctx context.Context, id string) (Hold, error) {
	const op = "get"
	var h Hold
	path, err := holdPath(op, id)
	if err != nil {
		return h, err
	}
	return h, c.do(ctx, op, http.MethodGet, path, nil, &h)
}

// List returns all holds.
func (c *Client) List(ctx context.Context) ([]Hold, error) {
	var l List
	return l.Holds, c.do(ctx, "list", http.MethodGet, HoldsPath, nil, &l)
}

// Release ends a hold and frees the owner's blocks at once. It is for a request that no decoder has the params of, or will
// get them: see the package documentation. The message leaves when the daemon is connected to the owner; if it cannot be
// reached, the lease runs out. lease.ErrUnknown when the hold has ended.
func (c *Client) Release(ctx context.Context, id string) error {
	return c.end(ctx, "release", id, true)
}

// Leave ends a hold without telling the owner: a decoder has taken the lease over, or it runs out. lease.ErrUnknown when
// the hold has ended.
func (c *Client) Leave(ctx context.Context, id string) error { return c.end(ctx, "leave", id, false) }

func (c *Client) end(ctx context.Context, op, id string, release bool) error {
	path, err := holdPath(op, id)
	if err != nil {
		return err
	}
	return c.do(ctx, op, http.MethodDelete, fmt.Sprintf("%s?release=%t", path, release), nil, nil)
}

// Health asks whether the daemon serves.
func (c *Client) Health(ctx context.Context) (Health, error) {
	var h Health
	return h, c.do(ctx, "health", http.MethodGet, HealthPath, nil, &h)
}

// Close closes idle connections.
func (c *Client) Close() error {
	c.http.CloseIdleConnections()
	return nil
}

func holdPath(op, id string) (string, error) {
	if id == "" || strings.Trim(id, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") != "" {
		return "", fmt.Errorf("hold: %s: %w: %q is no id of a hold", op, lease.ErrInvalid, id)
	}
	return HoldsPath + "/" + id, nil
}

func (c *Client) do(ctx context.Context, op, method, path string, body []byte, out any) error {
	fail := func(err error) error { return fmt.Errorf("hold: %s: %w", op, err) }
	q, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return fail(errors.Join(lease.ErrInvalid, err))
	}
	if body != nil {
		q.Header.Set("Content-Type", "application/json")
	}
	answer, err := c.http.Do(q)
	if err != nil {
		if ctx.Err() != nil {
			return fail(context.Cause(ctx))
		}
		return fail(fmt.Errorf("%w: %w", ErrUnavailable, err))
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer+1))
	switch {
	case err != nil && ctx.Err() != nil:
		return fail(context.Cause(ctx))
	case err != nil:
		return fail(fmt.Errorf("%w: %w", ErrUnavailable, err))
	case len(text) > maxAnswer:
		return fail(fmt.Errorf("%w: the answer has more than %d bytes", ErrUnavailable, maxAnswer))
	case answer.StatusCode/100 != 2:
		e := &Error{Op: op, Status: answer.StatusCode}
		if json.Unmarshal(text, e) != nil || e.Code == "" {
			return fail(fmt.Errorf("%w: HTTP %s, and not in the daemon's form: %.200q", ErrUnavailable, answer.Status, text))
		}
		return e
	case out == nil:
		return nil
	}
	if err := json.Unmarshal(text, out); err != nil {
		return fail(fmt.Errorf("%w: its answer: %w", ErrUnavailable, err))
	}
	return nil
}
