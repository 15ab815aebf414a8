// Package otelrdma makes OpenTelemetry spans of what a rank does, under the contexts of those who wait for it. Packages
// nixlgo, rdma and lease do not know OpenTelemetry; only a program that imports this package links it.
//
//	tracer := otelrdma.New(otel.GetTracerProvider())
//	node, err := nixlgo.New(nixlgo.Config{…, Trace: tracer.Trace(0)})
//	…
//	err = node.Fetch(ctx, params, blocks) // its spans are children of the one in ctx
//
// An engine with a loop of its own gives Tracer.Trace to each of its Workers, and calls Tracer.Begin with the context of a
// request before the plan that names it.
//
// # Spans
//
//	nixlgo.hold       reader: a lease is renewed for a request that queues. Owner: the blocks of a request are pinned
//	nixlgo.handshake  an engine is connected, for the request that has waited longest for it: a child of its hold, if it is held
//	nixlgo.read       the blocks of a request are read, from all ranks of the owner
//	nixlgo.verify     its lease is checked
//
// Handshake, read and verify are of kind client. A span that failed has the status Error with the error's text.
//
// # Attributes
//
//	nixlgo.role           of a hold: reader or owner
//	nixlgo.peer           engine id of the owner; not on an owner's hold
//	nixlgo.rank           own tensor-parallel rank; not on a hold, which is the engine's
//	nixlgo.blocks         per layer
//	nixlgo.bytes          of a read, on this rank
//	nixlgo.lease_left_ms  of an owner's hold: what the deadline had left when the lease ended; negative once it had passed
//	nixlgo.result         ok, or why it failed: a cause of package lease (lapsed, peer_lost, …) or of rdma.HandshakeCause; how a
//	                      hold ended: fetch, release, close, read, expired, aborted
//	server.address        of a handshake: the owner's side channel
//	server.port
//
// Request ids are in no attribute.
package otelrdma
