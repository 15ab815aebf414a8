package etcd_test

import (
	"context"
	"log"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma/etcd"
)

// A node that others find through etcd, and that finds them there.
func Example() {
	cfg, err := etcd.ConfigFromEnv() // NIXL_ETCD_ENDPOINTS=http://etcd:2379
	if err != nil {
		log.Fatal(err)
	}
	dir, err := etcd.Open(cfg)
	if err != nil {
		log.Fatal(err)
	}
	defer dir.Close()
	node, err := nixlgo.New(nixlgo.Config{Etcd: dir, Layers: 32, Blocks: 1024, BlockBytes: 64 << 10})
	if err != nil {
		log.Fatal(err)
	}
	defer node.Close()
	go node.Run(context.Background())

	var params lease.Params // of a node whose side channel may be out of reach
	if err := node.Fetch(context.Background(), &params, []int{0, 1, 2}); err != nil {
		log.Print(err)
	}
}
