// Package failures holds tests that kill, stop, starve and cut off real processes. Each process is a nixlgo.Node over NIXL
// on TCP; the test process itself loads no NIXL.
//
// Whatever happens to one process, every request ends once, with a cause that errors.Is can tell; the owner has its blocks
// back when the lease is over; bytes that a reader accepts are the request's; other readers of the same owner go on.
//
// One failure of a reader can take the owner along: a death in the middle of a READ over TCP (package nixl, "Readers that
// die over TCP"). Nothing on this side prevents it, so that test accepts both ends and says which it saw.
//
// Nor can an agent go on in whose UCX the limit of file descriptors was met: it may connect to nobody any more. Those tests
// start the process anew, and say so.
//
// RLIMIT_MEMLOCK has no test of its own: over TCP nothing is pinned, and a limit of 0 is not felt (two processes of one test run under it; as
// root they would not feel it anyway). It limits registration over RDMA
// transports.
package failures
