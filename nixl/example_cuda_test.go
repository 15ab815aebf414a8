package nixl_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/nixlgo/nixlgo/cgo_test/cuda"
	"github.com/nixlgo/nixlgo/nixl"
)

// gpuMemory describes size bytes of GPU 0 by their address, which whoever allocates for you has: cuMemAlloc here,
// tensor.data_ptr() of PyTorch, a pool of your own. They must stay allocated until the agent is closed. Where there is no
// GPU it says so, and host memory stands in.
func gpuMemory(size int) (nixl.Memory, nixl.MemType, nixl.Desc) {
	addr, err := cuda.Alloc(size)
	if err != nil {
		fmt.Fprintf(os.Stderr, "NOT RUN ON A GPU: %v; with one, these %d bytes would be VRAM of device 0\n", err, size)
		buffer, err := nixl.AllocBuffer(size)
		if err != nil {
			log.Fatal(err)
		}
		return buffer, nixl.DRAM, nixl.Desc{Addr: buffer.Addr(), Len: uint64(size)}
	}
	gpu, err := nixl.Device(addr, uint64(size), 0) // refuses what is not one allocation of the device
	if err != nil {
		log.Fatal(err)
	}
	return gpu, nixl.VRAM, nixl.Desc{Addr: addr, Len: uint64(size), Dev: 0}
}

// Memory of a GPU is registered, written and read as host memory is: only its type and its device differ. An engine names
// it in rdma.KV as MemType, Device and the regions' addresses.
func Example_cuda() {
	const size = 1 << 20
	agent, host := newAgent(2 * size)
	defer host.Close()
	defer agent.Close()
	gpu, memType, block := gpuMemory(size)
	if _, err := agent.Register(gpu); err != nil {
		log.Fatal(err)
	}
	copy(host.Bytes(), "KV cache")

	// To the GPU, and back into the other half of the host's buffer.
	move := func(op nixl.Op, at int) error {
		mine, err := host.Desc(at, size)
		if err != nil {
			return err
		}
		x, err := agent.CreateTransfer(op, nixl.DRAM, []nixl.Desc{mine}, agent.Name(), memType, []nixl.Desc{block}, nixl.TransferOptions{})
		if err != nil {
			return err
		}
		if _, err := x.Post(); err != nil {
			return errors.Join(err, x.Close())
		}
		return errors.Join(x.Wait(context.Background()), x.Close())
	}
	if err := errors.Join(move(nixl.Write, 0), move(nixl.Read, size)); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", host.Bytes()[size:size+8])
	// Output: KV cache
}
