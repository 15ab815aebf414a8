// Package etcd keeps the handshake metadata of engines in etcd (server 3.4 or newer): an rdma.Directory for owners and readers
// whose side channels do not reach each other, or of which there are too many to configure.
//
//	cfg, err := etcd.ConfigFromEnv() // NIXL_ETCD_ENDPOINTS, NIXL_ETCD_NAMESPACE
//	dir, err := etcd.Open(cfg)
//	node, err := nixlgo.New(nixlgo.Config{Etcd: dir, …})
//
// It is a package of its own so that only programs that use it link etcd's client.
//
// # Keys
//
// A rank is one key, <namespace>/nixlgo/<engine id, URL-escaped>/<rank>, and its value is what the rank's side channel would
// answer: vLLM's NixlHandshakePayload, of at most rdma.MaxReply bytes. NIXL's own metadata lies beside that, in
// <namespace>/<agent>/…, and is neither read nor written.
//
// # The session
//
// Keys are bound to an etcd lease, so those of a process that died go away after Config.TTL. (It has nothing to do with the
// leases of package lease.) One goroutine keeps the lease and looks every third of the TTL that the keys are there: what an
// etcd has lost that was restarted, emptied, cut off, or that expired or revoked the lease, is put again. Nothing has to be
// restarted. A key that another process has put meanwhile is left to that process, with a warning: two engines have one id.
//
// While etcd is down, published metadata is as good as before, connections live on, and handshakes are made over the side
// channel where that can be reached.
//
// An etcd that comes back without its data tells that to no watch, so a Directory that watches asks for the revision at every
// look, and has everything looked up again when that went back.
//
// # Costs
//
// Each process has one connection to etcd. An owner makes a lease keep-alive and one request per TTL/3. A reader makes one
// request per handshake and eight ranks; all its watches, one per connected engine, share one stream, and cost it two
// goroutines and 10 KB each, and one request per TTL/3 together. Nothing is asked per request or step. Package rdma's Costs has
// what that is in a fleet; go test -tags etcd -run ^$ -bench Fleet -benchtime 1000x ./rdma/etcd measures it.
//
// A password is dear: etcd takes 0.1 s of a core to check it, and does at every login, which each process does twice or more when
// etcd was restarted. Let a large fleet log in by certificate (etcd's --client-cert-auth, Config.Client.TLS) instead.
//
// # Trust
//
// Who can read the keys can read the memory of their owners, and who can write them decides where readers read. Use TLS and
// users (Config.Client) and a role for the namespace.
package etcd
