package metrics_test

import (
	"log"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/rdma/metrics"
)

func ExampleRegister() {
	node, err := nixlgo.New(nixlgo.Config{Layers: 32, Blocks: 1024, BlockBytes: 65536})
	if err != nil {
		log.Fatal(err)
	}
	defer node.Close()
	reg := prometheus.NewRegistry() // the program's, behind its own /metrics
	if _, err := metrics.Register(reg, metrics.NodeSources(node)); err != nil {
		log.Fatal(err)
	}
	if err := metrics.RegisterBuildInfo(reg); err != nil {
		log.Fatal(err)
	}
}
