// Package rdma carries out lease plans over NIXL: one Worker per rank owns the rank's agent, its KV memory and its lease
// slots, reads blocks from other engines, verifies their leases, and holds the leases that others read under. The
// SideChannel answers the handshakes of readers for all ranks of an engine.
//
// # A step
//
// The engine's loop calls Worker.Step with the lease.Plan of its lease.Scheduler and gives the lease.Result back to it.
// One step
//
//  1. writes the nonces of newly admitted requests into the slots and installs deadlines,
//  2. posts block READs, without a completion notification,
//  3. sends the heartbeats that are due, and starts missing handshakes in the background,
//  4. drains notifications, polls READs, reads the slots of all requests whose blocks are in, one READ per owner rank,
//     compares them with the nonces, and tells the owners of verified reads,
//  5. ends the leases that ran out.
//
// Pulls of one engine are posted in order of arrival, as many as WorkerConfig.MaxBytesPerPeer and MaxReadsPerPeer let be under
// way at once; the others wait, and those of other engines do not wait for them.
//
// No step waits for a peer. A heartbeat or a READ for an engine that is not connected yet waits for the handshake, and
// leaves in the step that sees it done.
//
// # A peer
//
//	idle ── first use ──▶ connecting ── handshake ──▶ connected ── a READ or a notification fails ──▶ broken
//	 ▲                        │ fails: back-off 0, 1, 2, 4 … s, an interval at most                      │
//	 └────────────────────────┴──────────────────────────────── no READ of ours is active any more ─────┘
//
// A peer is an engine at an address: a wrong or old address harms only the requests that name it. Another engine at the address is
// refused. Back-off, handshake and heartbeat fit together: heartbeats wait through a back-off, which is never longer than the time
// between two of them, and start the next handshake when it is over; a handshake that hangs ends within a third of a lease. A new
// request tries at once if the last failure is a second old. A peer that is not used for
// lease.Config.EngineTTL is forgotten, with its connection, its lists and its metadata, and connected to anew by the next use.
// NIXL knows an agent by the name in its metadata: of two engines with one name there, the last to be connected has it, and the
// other is connected to anew by its next use.
//
// What is only told something (a heartbeat for a lease that is held, the release of one) need not fit: an engine whose KV cache
// or compatibility hash rules out a READ is connected to for notifications, on every rank.
//
// # Discovery
//
// A reader learns an owner's metadata from its side channel, at the host and port in kv_transfer_params, or from a Directory
// that the owner's ranks are published in (WorkerConfig.Directory; package rdma/etcd has one). The directory is asked first; the
// side channel where it has no entry, or does not answer. Both answers are the same bytes and pass the same checks, and an
// entry that fails them is an error, not a reason to ask elsewhere. While connected, the worker watches the engine's entries:
// when their content changes, also without having been deleted, the engine was started anew, and is connected to anew before
// it is used again, once the READs under way have ended. An entry that goes away ends nothing. Handshakes and watches run
// beside the steps, so a directory that is down delays the engines that are not connected, and those by half of
// HandshakeTimeout.
//
// A directory tells no clock. A decoder's offer for the next turn that carries a lease is verified as any other; one without
// is refused, since its deadline cannot be placed.
//
// # Memory
//
// A READ that was posted cannot be stopped. A pull that fails while its READ is active is reported as quarantined: its
// blocks may still be written, and belong to the engine again only when the Result lists the request as settled.
//
// # Wire
//
// The handshake, the metadata, the descriptor indices and the notifications are those of vLLM's NixlConnector 0.32 and
// 0.33 in pull mode, with keys of our own for lease slots that vLLM ignores.
//
// # Shapes
//
// Owner and reader may differ in tensor-parallel size, where one is a multiple of the other and KV.Heads is stated; in tokens
// per block; in kernel blocks per block id; in the number of blocks; and in memory type. Heads are split or joined as
// their ranks hold them, with grouped-query attention (fewer heads than ranks) and for caches that every rank holds whole
// (MLA). Several KV-cache groups are read, each aligned at the end of the request. Every piece lands where it belongs, so
// nothing is to be permuted afterwards; bytes of a local block beyond the owner's last block are left to WorkerConfig.Zero.
//
// Splitting heads needs a layout with the heads of a block one behind the other (LBHNC, BLHNC, BHLNC); cutting blocks needs
// one region per layer (LBHNC, LBNHC). Pipeline and context parallelism and Mamba state are refused, as is everything else
// that cannot be paired exactly, by an error that names the field and both values.
//
// # Logs
//
// The keys of the log lines, of this package and of nixlgo.Node:
//
//	engine          this engine's id
//	rank            own tensor-parallel rank
//	peer            who it is about: the id of another engine; the NIXL agent that sent a notification; the address that calls
//	                at the side channel
//	peer_rank       a rank of that engine
//	agent           its NIXL agent
//	host, port      its side channel
//	address         of the own side channel
//	request         this engine's id of a request
//	remote_request  the owner's id of it
//	cause           why, in a word: a HandshakeCause
//	failures        in a row
//	took, idle      durations
//	suppressed      how many lines this one stands for, itself included
//	error           what failed, and what to do
//
// What peers can cause at will is a warning each ten seconds for each kind and peer, with suppressed in place of the rest:
// notifications that cannot be read, connections that are no handshake, handshakes that fail, peers that are lost, leases
// that cannot be released. Peers that make up names share a line from the 65th on. Nothing is logged for a request that went
// well.
//
// # Costs
//
// Measured by make bench-fleet on a shared machine of two cores: trust the ratios.
//
//	idle Node, a step every 2 ms              4 % of a core; a notification is handled after 1.2 ms (p50), 3 ms (p99), 40 ms (p99) with the cores overloaded
//	a heartbeat message, on the owner         1.2 µs, and 10 to 20 ns per lease in it; with 780 leases over NIXL and TCP 20 to 90 µs
//	100,000 leases, each renewed every        130 messages/s, 0.3 to 1.2 % of a core beyond idle, 130 MB in all, 2 sockets per reader
//	  second by 64 readers over TCP
//	the owner's step meanwhile                6 µs (p50, the same without heartbeats), 0.4 ms (p99; 0.2 ms without), 20 ms at worst, 100 ms with the cores overloaded
//	the step of a reader that holds           0.6, 0.6 and 3 µs (p50), one or no heartbeat in it
//	  leases at 10, 100 and 1,000 owners
//	1,000 engines of 8 ranks in one etcd      published at once in 6 s; 800 to 1,700 lookups/s; a change is noticed after 35 ms (p50), 0.4 s (p99);
//	  (make bench-etcd)                       8 to 18 % of a core of etcd while idle, 460 MB with 10,000 watches, all back 4 to 9 s after a restart
//	each engine that a reader watches there   2 goroutines and 10 KB; one stream for all
//
// An owner's work grows with the messages and the leases renewed, not with the leases that it holds. There is one message
// per reader rank, interval and MaxNotification bytes to each owner rank that the reader deals with: one where TP sizes are
// equal, owners/readers of them where the owner has more, and all for a HoldOnly worker. READs cost a descriptor per block and
// region, less where blocks are adjacent, and one slot READ per owner rank and step, whatever the number of requests.
//
// A fleet of 1,000 owners and 1,000 readers of one rank each that all know each other, with 100,000 leases per owner of the
// default 30 s, makes 200 messages/s of 100 leases for each owner and from each reader. By these figures that is 1 or 2 % of a
// core beyond idle on either side. What it needs is connections: 2,000 sockets per rank, so more open files than the usual
// limit of 1,024, and 1,000 handshakes per reader when all start at once. A fleet of this size was not run over NIXL.
//
// # Reading fast
//
// Measured by make bench-read: a verified fetch of 1,024 blocks between two processes, as a multiple of the same READ posted as vLLM
// does through NIXL's Python API with UCX's own settings.
//
//	                  blocks of 64 KiB    16 KiB        4 KiB
//	TCP, contiguous   2.2                 2.1           1.8
//	TCP, shuffled     3.0                 2.9           0.9 to 1.4
//	shm, contiguous   1.2                 1.2           1.2
//	shm, shuffled     2.0                 1.1           1.1
//
// Contiguous blocks of 16 KiB and more come at the speed of TCP's loopback. Shuffled ones of 4 KiB cost a system call a block on
// either side, whoever posts them. A check takes 120 to 160 µs whatever the size: 0.6 % of 64 MiB over TCP, 5 % of 16 MiB over
// shared memory.
//
// What helps, and is on: adjacent blocks as one descriptor, pairs in ascending order, for NIXL merges those alone; the variables of
// nixl.EnvDefaults; huge pages (nixl.AllocBuffer). What is off: more threads in UCX (num_threads), which read small blocks
// faster, and take three times the sockets per peer.
//
// # Trust
//
// Whoever has an agent's metadata can read its registered memory. The side channel binds to the loopback interface unless told
// otherwise, and gives metadata to everybody who asks, as vLLM's does; so does a directory. With WorkerConfig.Key and
// SideChannel.RequireKey, which vLLM knows nothing of, the side channel seals it for those who prove that they have the same key, and
// a reader takes nothing else: who sits between the two, or plays back what they said, can withhold and delay, no more. What is listed
// in a directory is proved by the key and not sealed, and an old listing can be put back. NIXL's own traffic, the blocks and the
// notifications, is in the clear either way: keep side channel, directory and transport on a private network.
package rdma
