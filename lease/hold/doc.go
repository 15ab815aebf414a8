// Package hold is the client of the daemon `nixlgo hold`, for programs that are built without cgo: it keeps a prefill
// instance's lease alive while a router looks for a decoder, and gives the blocks back at once when nobody will read them.
//
//	router ── Hold, Release, Leave over HTTP ──▶ nixlgo hold ── heartbeats, read-complete over NIXL ──▶ owner
//
// # Release or Leave
//
// A hold ends in one of three ways, and the caller has to say which:
//
//   - [Client.Release] tells the owner that nobody will read the request. It frees the blocks at once, and may write the
//     next prompt into them. That is safe only while no decoder has the kv_transfer_params, or ever will: the owner cannot
//     see a READ that is under way. A decoder that verifies its lease would be refused (lease.ErrLapsed). One that does not,
//     vLLM up to 0.33 for example, would read another prompt's KV cache and answer from it with HTTP 200.
//   - [Client.Leave] stops renewing and says nothing to the owner: a decoder renews the lease from here on, and ends it
//     when it has read, or the lease runs out. When in doubt, Leave.
//   - After its time to live the daemon does what Leave does. So an abandoned hold never costs more than that and one lease.
//
// The daemon never releases a lease on its own, whether it ends, crashes or starts again.
package hold
