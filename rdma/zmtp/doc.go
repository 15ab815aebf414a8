// Package zmtp carries the side channel of the handshake: a ZMTP 3.1 server that acts as a ZeroMQ ROUTER
// and a client that acts as a ZeroMQ REQ, with the NULL mechanism, over TCP. Both work against libzmq,
// which is what vLLM's NixlConnector uses on both ends.
//
// The server answers one request at a time per connection. It bounds what a peer can cost: the number of
// connections, the bytes and frames of a request, and the time of a handshake, a request, a reply and of
// silence. A peer that breaks the protocol loses its own connection and nothing else. There is no
// authentication and no encryption: put the port on a private network.
//
// Not implemented: other socket types and mechanisms, ZMTP before 3.0, transports other than a net.Conn,
// and automatic reconnection.
//
// Source: ZMTP 3.1 (ZeroMQ RFC 37), checked against libzmq 4.3.5.
package zmtp
