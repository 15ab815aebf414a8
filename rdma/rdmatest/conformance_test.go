package rdmatest_test

import (
	"testing"

	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

func TestInMemoryFabric(t *testing.T) {
	var net *rdmatest.Network
	rdmatest.TestFabric(t, func(t *testing.T) (a, b rdmatest.End) {
		net = rdmatest.NewNetwork()
		ma, mb := net.NewMemory(1<<20), net.NewMemory(1<<20)
		return rdmatest.End{Fabric: net.NewFabric("A", ma), Memory: ma}, rdmatest.End{Fabric: net.NewFabric("B", mb), Memory: mb}
	}, rdmatest.Options{HoldReads: func(hold bool) { net.HoldReads(hold) }})
}
