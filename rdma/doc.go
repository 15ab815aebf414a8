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
// No step waits for a peer. A heartbeat or a READ for an engine that is not connected yet waits for the handshake, and
// leaves in the step that sees it done.
//
// # A peer
//
//	idle ── first use ──▶ connecting ── handshake ──▶ connected ── a READ or a notification fails ──▶ broken
//	 ▲                        │ fails: back-off 0, 1, 2, 4 … 60 s                                        │
//	 └────────────────────────┴──────────────────────────────── no READ of ours is active any more ─────┘
//
// An engine is known by its id. Its address may change; another engine at its address is refused.
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
// # Trust
//
// Nothing authenticates the side channel, and whoever has an agent's metadata can read its registered memory. Keep both on
// a private network.
package rdma
