// Package rdmatest is an in-memory network of rdma.Fabrics: a program tests its engine on it without NIXL, without cgo and
// without a network card, and brings about what a real network does rarely or never when asked.
//
//	net := rdmatest.NewNetwork()
//	mem := net.NewMemory(1 << 20)
//	worker, err := rdma.NewWorker(net.NewFabric("P", mem), rdma.WorkerConfig{…})
//
// Everything above the fabric is real: worker, scheduler, handshake over the side channel, lease table, checks.
//
// # What it does as NIXL does
//
// A READ copies when it lands, not when it is posted: what the owner writes in between is what the reader gets. A posted
// READ cannot be stopped, its Close is refused, and a stopped peer leaves it active for ever. A dead peer is an error that
// matches nixl.ErrPeer, replaced metadata one that matches nixl.ErrStale, and descriptors outside of registered memory
// are refused. Notifications of any bytes and any size arrive in the order sent from one fabric to another; a stopped or
// cut-off peer takes them without an error. Eight aligned bytes land whole, more can be torn. TestFabric is the list, and
// the fabric over NIXL passes it too.
//
// Addresses are numbers of this package's own, not pointers, and each memory has unregistered space around it.
//
// # Control
//
// Without orders, a READ lands when its reader polls it, and a notification is there when Notify returns. A test takes
// over with HoldReads and HoldNotifications: then a READ lands in the parts and the order that the test asks for
// (Read.Land, Read.Fetch, Read.Fail), and a notification arrives, late, twice or never, when the test says so
// (Message.Deliver, Duplicate, Drop). Fabrics are killed, stopped and continued, and links cut, mended and broken.
// Fabric.Fail makes one chosen call fail. Shuffle lets all that is held through in an order drawn from a seed.
//
// Nothing here starts a goroutine or looks at a clock, so a test that steps its engines from one goroutine, at times of its
// own, runs the same way each time. (The handshake of a rdma.Worker is real, and takes real time. With a Directory, which is
// one in memory, it needs no socket, so that workers also run in a bubble of testing/synctest.)
//
// All methods are safe for concurrent use. A READ reads the owner's memory and writes the reader's while the reader polls,
// as RDMA does, and only aligned 8-byte descriptors, which is what lease slots are read with, do so atomically. So the race
// detector reports an owner that writes blocks while they are read. In a test in which a lease is to lapse amid a READ,
// step owner and reader from one goroutine.
package rdmatest
