package etcd

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/nixlgo/nixlgo/rdma"
)

// Directory is an rdma.Directory in etcd, as one process uses it. Several engines of the process may share it.
type Directory struct {
	cfg    Config
	client *clientv3.Client

	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	requests chan request
	kept     chan struct{} // closed when keep has returned
	closing  sync.Once
	closeErr error

	mu       sync.Mutex
	entries  map[string]string // what this process has published
	watches  int               // calls of Changed
	revision int64             // etcd's, as of the last look
	looked   chan struct{}     // closed, and another made, by the next look

	// Of keep alone.
	lease clientv3.LeaseID // 0: none yet
	alive <-chan *clientv3.LeaseKeepAliveResponse
	taken map[string]bool // keys that another process has put since
	down  bool            // the last look at the keys failed
}

var _ rdma.Directory = (*Directory)(nil)

// ErrClosed is returned by the methods of a closed Directory.
var ErrClosed = fmt.Errorf("etcd: directory: %w", rdma.ErrClosed)

// request is something to be done by keep.
type request struct {
	ctx  context.Context
	do   func(context.Context) error
	done chan<- error
}

// Open makes a Directory. It does not wait for etcd: the first call does. But with Client.Username it logs in, which etcd must
// answer within Client.DialTimeout.
func Open(cfg Config) (*Directory, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	client, err := clientv3.New(cfg.Client)
	switch {
	case err == nil:
	case passing(err):
		return nil, fmt.Errorf("etcd: log in at %v: %w", cfg.Client.Endpoints, err)
	default:
		return nil, fmt.Errorf("etcd: %w: %w", rdma.ErrConfig, err)
	}
	d := &Directory{cfg: cfg, client: client, requests: make(chan request), kept: make(chan struct{}),
		entries: map[string]string{}, taken: map[string]bool{}, looked: make(chan struct{})}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	go d.keep()
	return d, nil
}

// Close withdraws what was published and ends the connection. Entries that cannot be withdrawn, for etcd is down, go away
// after Config.TTL; the error says so. It is idempotent.
func (d *Directory) Close() error {
	d.closing.Do(func() {
		d.cancel()
		<-d.kept
		d.mu.Lock()
		ranks := len(d.entries)
		clear(d.entries)
		d.mu.Unlock()
		if d.lease != 0 {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
			defer cancel()
			if _, err := d.client.Revoke(ctx, d.lease); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
				d.closeErr = fmt.Errorf("etcd: withdraw %d ranks (their keys go away after %v): %w", ranks, d.cfg.TTL, err)
			}
		}
		d.closeErr = errors.Join(d.closeErr, d.client.Close())
	})
	return d.closeErr
}

const maxEngine = 1 << 10 // bytes of an engine id

func (d *Directory) prefix(engine string) string {
	return d.cfg.Namespace + "/nixlgo/" + url.PathEscape(engine) + "/"
}

func (d *Directory) key(engine string, rank int) (string, error) {
	if engine == "" || len(engine) > maxEngine || rank < 0 {
		return "", fmt.Errorf("%w: rank %d of engine %.40q", rdma.ErrConfig, rank, engine)
	}
	return d.prefix(engine) + strconv.Itoa(rank), nil
}

// failed gives an error of a call its context.
func (d *Directory) failed(ctx context.Context, op, engine string, err error) error {
	if d.ctx.Err() != nil {
		return ErrClosed
	}
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		err = fmt.Errorf("%w: %w", cause, err)
	}
	return fmt.Errorf("etcd: %s engine %q at %v: %w", op, engine, d.cfg.Client.Endpoints, err)
}

// Publish implements rdma.Directory.
func (d *Directory) Publish(ctx context.Context, engine string, rank int, reply []byte) error {
	key, err := d.key(engine, rank)
	if err == nil && (len(reply) == 0 || len(reply) > rdma.MaxReply) {
		err = fmt.Errorf("%w: rank %d: a reply of %d bytes is not of 1 to %d", rdma.ErrConfig, rank, len(reply), rdma.MaxReply)
	}
	value := string(reply)
	if err == nil {
		err = d.do(ctx, func(ctx context.Context) error {
			if err := d.put(ctx, key, value); err != nil {
				return err
			}
			d.mu.Lock()
			defer d.mu.Unlock()
			d.entries[key] = value
			delete(d.taken, key)
			return nil
		})
	}
	if err != nil {
		return d.failed(ctx, "publish", engine, err)
	}
	return nil
}

// Withdraw implements rdma.Directory. If it fails, the key is deleted once etcd can be reached.
func (d *Directory) Withdraw(ctx context.Context, engine string, rank int) error {
	key, err := d.key(engine, rank)
	if err == nil {
		d.mu.Lock()
		_, ours := d.entries[key]
		delete(d.entries, key)
		d.mu.Unlock()
		if !ours {
			return nil
		}
		err = d.do(ctx, func(ctx context.Context) error { return d.remove(ctx, key) })
	}
	if err != nil {
		return d.failed(ctx, "withdraw", engine, err)
	}
	return nil
}

// Lookup implements rdma.Directory.
func (d *Directory) Lookup(ctx context.Context, engine string, ranks []int) (replies [][]byte, revision int64, err error) {
	if d.ctx.Err() != nil {
		return nil, 0, ErrClosed
	}
	err = retry(ctx, func() error {
		replies, revision, err = d.lookup(ctx, engine, ranks)
		return err
	})
	if err != nil {
		return nil, revision, d.failed(ctx, "look up", engine, err)
	}
	return replies, revision, nil
}

// ranksAtOnce is how many ranks are asked for in one request: those of an engine, mostly. The largest answer is below
// Config.Client.MaxCallRecvMsgSize.
const ranksAtOnce = 8

func (d *Directory) lookup(ctx context.Context, engine string, ranks []int) (replies [][]byte, revision int64, err error) {
	for some := range slices.Chunk(ranks, ranksAtOnce) {
		gets := make([]clientv3.Op, len(some))
		for i, rank := range some {
			key, err := d.key(engine, rank)
			if err != nil {
				return nil, 0, err
			}
			gets[i] = clientv3.OpGet(key, clientv3.WithRev(revision)) // 0 is now
		}
		r, err := d.client.Txn(ctx).Then(gets...).Commit()
		if err != nil {
			return nil, 0, err
		}
		if revision == 0 {
			revision = r.Header.Revision
		}
		for i, answer := range r.Responses {
			kvs := answer.GetResponseRange().GetKvs()
			if len(kvs) == 0 {
				return nil, revision, fmt.Errorf("rank %d is %w", some[i], rdma.ErrNotListed)
			}
			if n := len(kvs[0].Value); n > rdma.MaxReply {
				return nil, 0, fmt.Errorf("%w: rank %d: %d bytes, more than %d", rdma.ErrWire, some[i], n, rdma.MaxReply)
			}
			replies = append(replies, kvs[0].Value)
		}
	}
	return replies, revision, nil
}

// Changed implements rdma.Directory. All calls of a Directory share one stream.
func (d *Directory) Changed(ctx context.Context, engine string, revision int64) error {
	if d.ctx.Err() != nil {
		return ErrClosed
	}
	if _, err := d.key(engine, 0); err != nil {
		return d.failed(ctx, "watch", engine, err)
	}
	d.mu.Lock()
	d.watches++
	looked := d.looked
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		d.watches--
		d.mu.Unlock()
	}()
	watch, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	events := d.client.Watch(watch, d.prefix(engine), clientv3.WithPrefix(), clientv3.WithRev(revision+1), clientv3.WithFragment())
	for {
		select {
		case r, more := <-events:
			switch err := r.Err(); {
			case !more:
				return d.failed(ctx, "watch", engine, errors.New("the watch ended"))
			case errors.Is(err, rpctypes.ErrCompacted), err == nil && len(r.Events) > 0:
				return nil
			case err != nil:
				return d.failed(ctx, "watch", engine, err)
			}
		case <-looked:
			d.mu.Lock()
			now := d.revision
			looked = d.looked
			d.mu.Unlock()
			if now < revision {
				return nil // etcd has lost its data
			}
		}
	}
}
