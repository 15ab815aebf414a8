package etcd

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// do lets keep do something, and waits for it, until ctx ends. Each try is so short that keep has time for the session.
func (d *Directory) do(ctx context.Context, f func(context.Context) error) error {
	return retry(ctx, func() error {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		done := make(chan error, 1)
		select {
		case d.requests <- request{ctx, f, done}:
			return <-done
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-d.ctx.Done():
			return ErrClosed
		}
	})
}

// retry calls f until it succeeds or fails for good. Etcd's client tries no transaction and no write twice, so one that meets
// a restart fails at once.
func retry(ctx context.Context, f func() error) error {
	for {
		err := f()
		if err == nil || ctx.Err() != nil || !passing(err) {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(50*time.Millisecond + rand.N(50*time.Millisecond)): // not all processes at once
		}
	}
}

// passing says of an error of etcd or its client that the same call may succeed later.
func passing(err error) bool {
	code := status.Code(err)
	if said, ok := errors.AsType[rpctypes.EtcdError](err); ok {
		code = said.Code()
	}
	return code == codes.Unavailable || code == codes.DeadlineExceeded || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, rpctypes.ErrCompacted) // a revision that was read at, by others
}

// keep keeps what is published, until Close.
func (d *Directory) keep() {
	defer close(d.kept)
	look := time.NewTicker(d.cfg.TTL / 3)
	defer look.Stop()
	for {
		select {
		case <-d.ctx.Done():
			return
		case r := <-d.requests:
			ctx, cancel := context.WithTimeout(r.ctx, d.cfg.TTL/3)
			stop := context.AfterFunc(d.ctx, cancel)
			r.done <- r.do(ctx)
			stop()
			cancel()
			continue
		case _, more := <-d.alive:
			if more {
				continue
			}
			d.alive = nil // the lease is gone, or etcd was for longer than it lasts
		case <-look.C:
		}
		ctx, cancel := context.WithTimeout(d.ctx, d.cfg.TTL/3)
		var err error
		if d.lease != 0 { // something was published
			err = d.mend(ctx)
		}
		d.lookAtRevision(ctx)
		cancel()
		if d.ctx.Err() != nil {
			return
		}
		if down := err != nil; down != d.down {
			d.down = down
			if down {
				d.cfg.Logger.Warn("etcd: the published ranks cannot be looked after; trying on", "error", err)
			} else {
				d.cfg.Logger.Info("etcd: the published ranks are looked after again")
			}
		}
	}
}

// lookAtRevision asks for etcd's revision, in one request for all calls of Changed. An etcd that lost its data counts anew, and
// tells nothing to those who watch for later revisions than that.
func (d *Directory) lookAtRevision(ctx context.Context) {
	d.mu.Lock()
	watched := d.watches > 0
	d.mu.Unlock()
	if !watched {
		return
	}
	r, err := d.client.Get(ctx, d.cfg.Namespace+"/nixlgo/", clientv3.WithCountOnly())
	if err != nil {
		return // the next look does
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if r.Header.Revision < d.revision {
		d.cfg.Logger.Warn("etcd: it has lost its data; engines are looked up again", "revision", d.revision, "now", r.Header.Revision)
	}
	d.revision = r.Header.Revision
	close(d.looked)
	d.looked = make(chan struct{})
}

// mend brings the session and its keys back if something of it was lost.
func (d *Directory) mend(ctx context.Context) error {
	s, err := d.client.TimeToLive(ctx, d.lease, clientv3.WithAttachedKeys())
	if err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return err
	}
	d.mu.Lock()
	entries := maps.Clone(d.entries) // a change meanwhile is seen at the next look
	d.mu.Unlock()
	attached := map[string]bool{}
	if err != nil || s.TTL < 0 { // 0 is less than a second left
		d.cfg.Logger.Warn("etcd: the session was lost, its keys are put again", "ranks", len(entries))
		if err := d.begin(ctx); err != nil {
			return err
		}
	} else {
		for _, k := range s.Keys {
			attached[string(k)] = true
		}
		if d.alive == nil {
			if err := d.stayAlive(); err != nil {
				return err
			}
		}
	}
	for key, value := range entries {
		if !attached[key] {
			if err := d.restore(ctx, key, value); err != nil {
				return err
			}
		}
		delete(attached, key)
	}
	for key := range attached { // withdrawn, or put by a call that gave up, while etcd did not answer
		if err := d.remove(ctx, key); err != nil {
			return err
		}
	}
	return nil
}

// begin gets a new lease.
func (d *Directory) begin(ctx context.Context) error {
	l, err := d.client.Grant(ctx, int64(d.cfg.TTL/time.Second))
	if err != nil {
		return fmt.Errorf("grant a lease of %v: %w", d.cfg.TTL, err)
	}
	d.lease = l.ID
	return d.stayAlive()
}

func (d *Directory) stayAlive() (err error) {
	d.alive, err = d.client.KeepAlive(d.ctx, d.lease)
	return err
}

// put puts a key, whoever has put it before.
func (d *Directory) put(ctx context.Context, key, value string) error {
	if d.lease == 0 {
		if err := d.begin(ctx); err != nil {
			return err
		}
	}
	_, err := d.client.Put(ctx, key, value, clientv3.WithLease(d.lease))
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		if err = d.mend(ctx); err == nil {
			_, err = d.client.Put(ctx, key, value, clientv3.WithLease(d.lease))
		}
	}
	return err
}

// restore puts a key that is gone. One that another process has put is left to it.
func (d *Directory) restore(ctx context.Context, key, value string) error {
	r, err := d.client.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).Then(clientv3.OpPut(key, value, clientv3.WithLease(d.lease))).Commit()
	if err != nil {
		return err
	}
	if taken := !r.Succeeded; taken != d.taken[key] {
		d.taken[key] = taken
		if taken {
			d.cfg.Logger.Warn("etcd: another process has published this rank since: two engines have one id", "key", key)
		}
	}
	return nil
}

// remove deletes a key of this session.
func (d *Directory) remove(ctx context.Context, key string) error {
	_, err := d.client.Txn(ctx).If(clientv3.Compare(clientv3.LeaseValue(key), "=", d.lease)).Then(clientv3.OpDelete(key)).Commit()
	return err
}
