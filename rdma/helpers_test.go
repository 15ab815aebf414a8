package rdma

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/nixlgo/nixlgo/rdma/zmtp"
)

func contextFor(t *testing.T, d time.Duration) (context.Context, context.CancelFunc) {
	t.Helper()
	return context.WithTimeout(context.Background(), d)
}

func zmtpDial(t *testing.T, addr string) (*zmtp.Client, error) {
	t.Helper()
	ctx, cancel := contextFor(t, 5*time.Second)
	defer cancel()
	return zmtp.Dial(ctx, addr, 0)
}

// dial is how workers reach side channels unless told otherwise.
var dial = new(net.Dialer).DialContext
