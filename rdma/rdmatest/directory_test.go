package rdmatest_test

import (
	"testing"

	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

func TestInMemoryDirectory(t *testing.T) {
	rdmatest.TestDirectory(t, func(*testing.T) (rdma.Directory, rdma.Directory) {
		d := rdmatest.NewDirectory()
		return d, d.Session()
	})
}
