package nixl_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/nixlgo/nixlgo/nixl"
)

// newAgent returns an agent with a UCX backend and a registered buffer.
func newAgent(size int) (*nixl.Agent, *nixl.Buffer) {
	agent, err := nixl.NewAgent("", nixl.Config{})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := agent.CreateBackend("UCX", nil); err != nil {
		log.Fatal(err)
	}
	buffer, err := nixl.AllocBuffer(size)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := agent.Register(buffer); err != nil {
		log.Fatal(err)
	}
	return agent, buffer
}

// An agent reads its own memory: its own name stands for a peer's.
func Example_loopback() {
	agent, buffer := newAgent(8192)
	defer buffer.Close()
	defer agent.Close()
	copy(buffer.Bytes(), "KV cache")

	source, err := agent.PrepareRemote(agent.Name(), nixl.DRAM, []nixl.Desc{{Addr: buffer.Addr(), Len: 8}})
	if err != nil {
		log.Fatal(err)
	}
	target, err := agent.PrepareLocal(nixl.DRAM, []nixl.Desc{{Addr: buffer.Addr() + 4096, Len: 8}})
	if err != nil {
		log.Fatal(err)
	}
	read, err := agent.NewTransfer(nixl.Read, target, nil, source, nil, nixl.TransferOptions{})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := read.Post(); err != nil {
		log.Fatal(err)
	}
	if err := read.Wait(context.Background()); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s, %d bytes\n", buffer.Bytes()[4096:4104], read.Bytes())
	// Output: KV cache, 8 bytes
}

// Two agents exchange metadata; one reads the other's memory, which is told
// when the READ is done.
func Example_notification() {
	owner, theirs := newAgent(4096)
	defer theirs.Close()
	defer owner.Close()
	reader, ours := newAgent(4096)
	defer ours.Close()
	defer reader.Close()
	copy(theirs.Bytes(), "block 0")

	blob, err := owner.LocalMetadata() // goes to the reader by any channel
	if err != nil {
		log.Fatal(err)
	}
	name, err := reader.LoadRemote(blob)
	if err != nil {
		log.Fatal(err)
	}
	remote, err := reader.PrepareRemote(name, nixl.DRAM, []nixl.Desc{{Addr: theirs.Addr(), Len: 4096}})
	if err != nil {
		log.Fatal(err)
	}
	local, err := reader.PrepareLocal(nixl.DRAM, []nixl.Desc{{Addr: ours.Addr(), Len: 4096}})
	if err != nil {
		log.Fatal(err)
	}
	read, _, err := reader.Start(nixl.Read, local, nil, remote, nil, nixl.TransferOptions{Notification: []byte("got it")})
	if err != nil {
		log.Fatal(err)
	}
	if err := read.Wait(context.Background()); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("reader has %s\n", ours.Bytes()[:7])

	for inbox := []nixl.Notification(nil); len(inbox) == 0; {
		if inbox, err = owner.Notifications(inbox); err != nil {
			log.Fatal(err)
		}
		for _, n := range inbox {
			fmt.Printf("owner was told %q by the reader: %t\n", n.Payload, n.From == reader.Name())
		}
	}
	// Output:
	// reader has block 0
	// owner was told "got it" by the reader: true
}

// A context bounds the wait, not the transfer: after the deadline the memory is
// still the library's until the transfer is settled.
func ExampleTransfer_Wait() {
	agent, buffer := newAgent(8192)
	defer buffer.Close()
	defer agent.Close()
	source, err := agent.PrepareRemote(agent.Name(), nixl.DRAM, []nixl.Desc{{Addr: buffer.Addr(), Len: 4096}})
	if err != nil {
		log.Fatal(err)
	}
	target, err := agent.PrepareLocal(nixl.DRAM, []nixl.Desc{{Addr: buffer.Addr() + 4096, Len: 4096}})
	if err != nil {
		log.Fatal(err)
	}
	read, err := agent.NewTransfer(nixl.Read, target, nil, source, nil, nixl.TransferOptions{})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := read.Post(); err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := read.Wait(ctx); err != nil {
		fmt.Println("settled:", read.Settled())
		return
	}
	fmt.Println("settled:", read.Settled(), read.Close())
	// Output: settled: true <nil>
}
