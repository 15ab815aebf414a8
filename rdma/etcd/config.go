package etcd

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"github.com/nixlgo/nixlgo/rdma"
)

// Config configures Open. Zero values take the documented default.
type Config struct {
	// Client says how to reach etcd: Endpoints, required; TLS, Username and Password and the rest as etcd's client has them. A
	// nil Logger discards.
	Client clientv3.Config
	// Namespace is what all keys begin with, such as /team-a; empty: nothing.
	Namespace string
	// TTL is how long the keys of a process outlive it, in whole seconds, at least 2; 0: 15 s.
	TTL time.Duration

	Logger *slog.Logger // nil: discards
}

const (
	envEndpoints = "NIXL_ETCD_ENDPOINTS"
	envNamespace = "NIXL_ETCD_NAMESPACE"
)

// ConfigFromEnv takes the endpoints, a comma-separated list of URLs, from NIXL_ETCD_ENDPOINTS, and the namespace from
// NIXL_ETCD_NAMESPACE, if set. The error matches rdma.ErrConfig and names the variable.
//
// NIXL itself keeps the metadata of its agents in etcd if NIXL_ETCD_ENDPOINTS is set in the environment of the process; this
// library needs none of it.
func ConfigFromEnv() (Config, error) {
	var c Config
	for e := range strings.SplitSeq(os.Getenv(envEndpoints), ",") {
		if e = strings.TrimSpace(e); e != "" {
			c.Client.Endpoints = append(c.Client.Endpoints, e)
		}
	}
	c.Namespace = os.Getenv(envNamespace)
	if _, err := c.withDefaults(); err != nil {
		return Config{}, fmt.Errorf("%s=%q, %s=%q: %w", envEndpoints, os.Getenv(envEndpoints), envNamespace, c.Namespace, err)
	}
	return c, nil
}

func (c Config) withDefaults() (Config, error) {
	bad := func(format string, a ...any) (Config, error) {
		return c, fmt.Errorf("etcd: %w: "+format, append([]any{rdma.ErrConfig}, a...)...)
	}
	c.Namespace = strings.TrimRight(c.Namespace, "/")
	c.TTL = cmp.Or(c.TTL, 15*time.Second)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if len(c.Client.Endpoints) == 0 {
		return bad("no endpoints")
	}
	for _, e := range c.Client.Endpoints {
		if err := checkEndpoint(e); err != nil {
			return bad("endpoint %q: %w", e, err)
		}
	}
	if c.TTL < 2*time.Second || c.TTL > time.Hour || c.TTL%time.Second != 0 {
		return bad("TTL is %v, must be whole seconds of 2s to 1h", c.TTL)
	}
	k := &c.Client
	if k.Logger == nil {
		k.Logger = zap.NewNop()
	}
	k.DialTimeout = cmp.Or(k.DialTimeout, 5*time.Second)
	k.MaxCallRecvMsgSize = cmp.Or(k.MaxCallRecvMsgSize, 16<<20)
	// A connection that was cut in silence is noticed, and one that comes back is used soon: gRPC backs off for minutes.
	k.DialKeepAliveTime = cmp.Or(k.DialKeepAliveTime, 10*time.Second)
	k.DialKeepAliveTimeout = cmp.Or(k.DialKeepAliveTimeout, 5*time.Second)
	reconnect := backoff.DefaultConfig
	reconnect.BaseDelay, reconnect.MaxDelay = 100*time.Millisecond, 3*time.Second
	k.DialOptions = append([]grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnect, MinConnectTimeout: 3 * time.Second})}, k.DialOptions...)
	return c, nil
}

// checkEndpoint accepts URLs of http, https and unix, and host:port.
func checkEndpoint(e string) error {
	if !strings.Contains(e, "://") {
		e = "http://" + e
	}
	u, err := url.Parse(e)
	switch {
	case err != nil:
		return err
	case u.Scheme != "http" && u.Scheme != "https" && u.Scheme != "unix" && u.Scheme != "unixs":
		return errors.New("want http, https or unix")
	case u.Host == "" && u.Path == "":
		return errors.New("no host")
	}
	return nil
}
