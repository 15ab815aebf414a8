package nixl_test

import (
	"context"
	"fmt"
	"log"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nixlgo/nixlgo/nixl"
)

// An engine has its KV cache in an arena that it mapped itself, and registers it where it lies.
func ExampleHost() {
	arena, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_SHARED)
	if err != nil {
		log.Fatal(err)
	}
	defer unix.Munmap(arena) // deferred first, so that it runs last: peers reach the memory until the agent's Close
	copy(arena, "KV cache")

	agent, err := nixl.NewAgent("", nixl.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer agent.Close()
	if _, err := agent.CreateBackend("UCX", nil); err != nil {
		log.Fatal(err)
	}
	memory, err := nixl.Host(uint64(uintptr(unsafe.Pointer(&arena[0]))), uint64(len(arena)))
	if err != nil {
		log.Fatal(err)
	}
	if _, err := agent.Register(memory); err != nil {
		log.Fatal(err)
	}

	from, err := memory.Desc(0, 8)
	if err != nil {
		log.Fatal(err)
	}
	to, err := memory.Desc(4096, 8)
	if err != nil {
		log.Fatal(err)
	}
	remote, err := agent.PrepareRemote(agent.Name(), nixl.DRAM, []nixl.Desc{from})
	if err != nil {
		log.Fatal(err)
	}
	local, err := agent.PrepareLocal(nixl.DRAM, []nixl.Desc{to})
	if err != nil {
		log.Fatal(err)
	}
	read, _, err := agent.Start(nixl.Read, local, nil, remote, nil, nixl.TransferOptions{})
	if err != nil {
		log.Fatal(err)
	}
	if err := read.Wait(context.Background()); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", arena[4096:4104])
	// Output: KV cache
}
