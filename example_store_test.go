package nixlgo_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log"
	"slices"
	"sync"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
)

// Store is a node that keeps KV blocks by the hash of the tokens that they are computed from, and lends them to readers.
type Store struct {
	node *nixlgo.Node

	mu      sync.Mutex
	entries map[[32]byte]*entry
}

// entry is one block, with one reader or writer at a time.
type entry struct {
	mu    sync.Mutex
	block int
	lends int
	lent  *nixlgo.Publication // the last one
}

var errMissing = errors.New("no such block")

func NewStore(node *nixlgo.Node) *Store {
	return &Store{node: node, entries: map[[32]byte]*entry{}}
}

// Put keeps value, one block at most, under the hash of key. A block that somebody reads meanwhile is taken back first:
// the reader's check fails then.
func (s *Store) Put(key string, value []byte) error {
	hash := sha256.Sum256([]byte(key))
	s.mu.Lock()
	e := s.entries[hash]
	if e == nil {
		e = &entry{block: len(s.entries)} // a real store evicts, as Put overwrites
		s.entries[hash] = e
	}
	s.mu.Unlock()

	e.mu.Lock()
	defer e.mu.Unlock()
	memory := s.node.Block(0, e.block)
	if len(value) > len(memory) {
		return fmt.Errorf("%q: %d bytes, and the store has room for %d", key, len(value), len(memory))
	}
	if e.lent != nil {
		if err := e.lent.Revoke(); err != nil && !errors.Is(err, lease.ErrUnknown) { // unknown: it has ended
			return err
		}
		<-e.lent.Done()
	}
	clear(memory[copy(memory, value):])
	return nil
}

// Lend leases the block of key to one reader, whose params it returns. The next reader waits until it has ended.
func (s *Store) Lend(ctx context.Context, key string) (*lease.Params, error) {
	hash := sha256.Sum256([]byte(key))
	s.mu.Lock()
	e := s.entries[hash]
	s.mu.Unlock()
	if e == nil {
		return nil, errMissing
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lent != nil {
		select {
		case <-e.lent.Done():
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	e.lends++
	p, err := s.node.Publish(ctx, fmt.Sprintf("%x/%d", hash[:8], e.lends), []int{e.block}, 16)
	if err != nil {
		return nil, err
	}
	e.lent = p
	return p.Params(), nil
}

// Get copies a block out of the store into block to of the reader's node, and returns it. Lend is a remote call in earnest.
func Get(ctx context.Context, reader *nixlgo.Node, s *Store, key string, to int) ([]byte, error) {
	params, err := s.Lend(ctx, key)
	if err != nil {
		return nil, err
	}
	if err := reader.Fetch(ctx, params, []int{to}); err != nil {
		return nil, err // lease.ErrLapsed: overwritten meanwhile; ask again, or compute it
	}
	return slices.Clone(reader.Block(0, to)), nil
}

// A store and a reader of it, over NIXL.
func Example_store() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var nodes [2]*nixlgo.Node
	for i := range nodes {
		node, err := nixlgo.New(nixlgo.Config{Layers: 1, Blocks: 16, BlockBytes: 4096})
		if err != nil {
			log.Fatal(err)
		}
		defer node.Close()
		go node.Run(ctx)
		nodes[i] = node
	}
	store, reader := NewStore(nodes[0]), nodes[1]

	if err := store.Put("the quick brown", []byte("keys and values")); err != nil {
		log.Fatal(err)
	}
	block, err := Get(ctx, reader, store, "the quick brown", 3)
	fmt.Printf("%.15s %v\n", block, err)
	_, err = Get(ctx, reader, store, "the lazy dog", 3)
	fmt.Println(err)

	// The block is overwritten between the lend and the read.
	params, err := store.Lend(ctx, "the quick brown")
	if err != nil {
		log.Fatal(err)
	}
	if err := store.Put("the quick brown", []byte("newer values")); err != nil {
		log.Fatal(err)
	}
	err = reader.Fetch(ctx, params, []int{3})
	fmt.Println(errors.Is(err, lease.ErrLapsed))
	// Output:
	// keys and values <nil>
	// no such block
	// true
}
