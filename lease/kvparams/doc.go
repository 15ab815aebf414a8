// Package kvparams reads, checks and relays kv_transfer_params in a router
// that sends one client request first to a prefill instance P and then to a
// decode instance D. It is pure Go on the standard library and needs neither
// cgo nor NIXL.
//
// Request bodies and params are edited as bytes: only the values named here
// change, everything else keeps its key order, white space and number forms,
// as do integers beyond 2^53 and keys that neither side of the router knows.
//
// What a router does with one request:
//
//  1. [Prefill] makes P's body. [ErrUnsplittable] means that one handoff cannot
//     serve the request (n > 1, several prompts, …): send [Strip] of the body
//     to D alone. [ErrMalformed] is the client's fault: answer 400.
//  2. An answer of P other than 200 goes to the client unchanged, or the
//     request goes to D alone. It carries no params. A retry makes a second
//     lease on P; the first ends by expiry unless it is released.
//  3. [FromResponse] reads P's params. [ErrNoHandoff] and [ErrUnusable] mean
//     that nothing can be moved: count them, log them, and send [Strip] of the
//     body to D, which computes the prompt itself. Where nobody is told, a
//     cluster can run for weeks with nothing transferred
//     (llm-d/llm-d-router#2855, kserve/kserve#5987).
//  4. [Decode] makes D's body. From here until D answers, P holds the blocks
//     under a lease: a client that leaves now strands them until it expires.
//  5. A [Capture] relays D's answer, streamed or not, and reads the params that
//     D offers for the next turn of a conversation (vLLM's
//     bidirectional_kv_xfer). [Turns] keeps them where the router knows the
//     token ids.
//
// A client must never be able to name a peer: Prefill, Decode and Strip all
// remove the params a client sent. remote_host may be rewritten on the way
// (AIBrix puts the pod's address there), so identify an engine by
// remote_engine_id and authenticate by neither.
//
// The wire facts are those of vLLM 0.33.0 (NixlConnector, pull mode), of
// llm-d-router, AIBrix and kthena as of August 2026.
package kvparams
