package rdma

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Directory is where the ranks of engines leave what they answer to a handshake, for readers that do not reach their side
// channels, or are too many to ask them one by one. Package etcd has one, package rdmatest another for tests. Its methods
// are safe for concurrent use.
//
// What comes from a Directory is checked like an answer of a side channel, and is worth as much trust: who may write there
// can send readers anywhere, and who may read there can read the owners' memory.
type Directory interface {
	// Publish makes the Reply of a rank known, in place of what was known of it, and keeps it known until Withdraw. Nil
	// says that it is. MaxReply bounds its size.
	Publish(ctx context.Context, engine string, rank int, reply []byte) error
	// Withdraw ends a Publish, unless somebody else has published the rank since. Without one it does nothing.
	Withdraw(ctx context.Context, engine string, rank int) error
	// Lookup returns the replies of ranks of an engine, in the same order and as they were at one revision of the Directory.
	// If one is missing, the error matches ErrNotListed and the revision is good.
	Lookup(ctx context.Context, engine string, ranks []int) (replies [][]byte, revision int64, err error)
	// Changed returns nil once a rank of the engine was published or withdrawn after the revision, or the Directory has lost
	// its data since. It may do so without.
	Changed(ctx context.Context, engine string, revision int64) error
}

// ErrNotListed is what a Directory answers for a rank that nobody has published.
var ErrNotListed = errors.New("not in the directory")

// MaxReply is the size in bytes of the largest Reply in a Directory; etcd takes requests of 1.5 MiB.
const MaxReply = 1 << 20

// listing is what a Directory said about the ranks that a peer was connected with.
type listing struct {
	ranks    []int
	replies  [][]byte
	revision int64
}

// lookup asks the directory for ranks. It leaves half of the handshake's time to the side channel, which is asked if the
// directory is down.
func (w *Worker) lookup(ctx context.Context, engine string, ranks []int) (*listing, error) {
	ctx, cancel := context.WithTimeout(ctx, w.cfg.HandshakeTimeout/2)
	defer cancel()
	replies, revision, err := w.cfg.Directory.Lookup(ctx, engine, ranks)
	if err != nil {
		return nil, fmt.Errorf("directory: engine %q: %w", engine, err)
	}
	return &listing{ranks, replies, revision}, nil
}

// parse decodes the replies of a listing, each as parseReply does.
func (l *listing) parse(engine string, want expected) ([]*Reply, error) {
	if len(l.replies) != len(l.ranks) {
		return nil, fmt.Errorf("directory: engine %q: %d replies for %d ranks", engine, len(l.replies), len(l.ranks))
	}
	out := make([]*Reply, len(l.replies))
	for i, b := range l.replies {
		var err error
		if out[i], err = parsePayload(b, rankID{tp: l.ranks[i]}, want); err != nil {
			return nil, fmt.Errorf("directory: engine %q, rank %d: %w", engine, l.ranks[i], err)
		}
	}
	return out, nil
}

// recheck bounds how long a change can go unnoticed that the directory did not tell of. Each engine is looked up at a time of
// its own in the second half of that: a reader that connected to all of a fleet at once does not ask for all at once again.
const recheck = time.Hour

// watch waits until the directory has other replies of p's ranks than those that p was connected with, and tells Step.
func (w *Worker) watch(p *peer) {
	ctx, cancel := context.WithCancel(w.ctx)
	p.unwatch = cancel
	l, engine := p.listed, p.info.Engine
	w.background.Go(func() {
		for revision := l.revision; ctx.Err() == nil; {
			pause := 100 * time.Millisecond // of a directory that says so of every moment
			changed, now, err := w.changed(ctx, engine, l, revision)
			switch {
			case changed:
				select {
				case w.outdated <- l:
				case <-ctx.Done():
				}
				return
			case err == nil:
				revision = now
			case ctx.Err() == nil:
				w.log.Debug("directory: watch an engine", "peer", engine, "error", err)
				pause = time.Second + rand.N(time.Second) // not all readers of a directory that is down at once
			}
			select {
			case <-time.After(pause):
			case <-ctx.Done():
			}
		}
	})
}

// changed waits for news of an engine since a revision, for as long as recheck, and reports whether its replies are others than
// those of l, and as of which revision. A rank that was withdrawn is no other reply: an owner whose session with the
// directory was lost is as good as before.
func (w *Worker) changed(ctx context.Context, engine string, l *listing, since int64) (changed bool, revision int64, err error) {
	wait, cancel := context.WithTimeout(ctx, recheck/2+rand.N(recheck/2))
	err = w.cfg.Directory.Changed(wait, engine, since)
	waited := wait.Err() != nil
	cancel()
	if err != nil && !waited {
		return false, 0, err
	}
	ctx, cancel = context.WithTimeout(ctx, w.cfg.HandshakeTimeout)
	defer cancel()
	replies, revision, err := w.cfg.Directory.Lookup(ctx, engine, l.ranks)
	if errors.Is(err, ErrNotListed) {
		return false, revision, nil
	}
	return err == nil && !slices.EqualFunc(replies, l.replies, bytes.Equal), revision, err
}

// takeOutdated lets go of the peers of which the directory has other metadata by now.
func (w *Worker) takeOutdated() {
	for {
		select {
		case l := <-w.outdated:
			for p := range w.everyone {
				if p.listed == l {
					w.broke(p, errors.New("the directory has other metadata of it by now"))
				}
			}
		default:
			return
		}
	}
}
