package nixl

import (
	"fmt"
	"net/netip"
	"os"
)

// The library can carry metadata by itself, in a thread of its own: from agent to
// agent through the listener of Config.Listen, or through the central store
// (etcd) that NIXL_ETCD_ENDPOINTS named when the agent was created. The methods
// below only hand it the work and return; ask CheckRemote for the outcome.
//
// Metadata that arrives this way is not checked by this package (see
// LoadRemote): whoever reaches the listener or the store can crash the process.

// storeVariables name the central store; the library reads them with each new agent.
var storeVariables = []string{"NIXL_ETCD_ENDPOINTS", "NIXL_TCPSTORE_ENDPOINT"}

func storeConfigured() bool {
	for _, v := range storeVariables {
		if os.Getenv(v) != "" {
			return true
		}
	}
	return false
}

// place turns an address into what crosses; "" is the store. s.mu is held.
func (s *agent) place(op string, at netip.AddrPort) (ip []byte, port uint16, err error) {
	switch {
	case at == netip.AddrPort{}:
		if !s.store {
			return nil, 0, invalid(op, "no address given, and no store: set %s before the agent is created", storeVariables[0])
		}
		return cname(""), 0, nil
	case !at.IsValid() || at.Port() == 0 || at.Addr().IsUnspecified():
		return nil, 0, invalid(op, "%v is not the address and port of a listener", at)
	case !s.listen && !s.store:
		return nil, 0, invalid(op, "the agent has no thread to carry metadata: create it with Config.Listen")
	}
	return cname(at.Addr().Unmap().String()), at.Port(), nil
}

// PartialMetadata returns metadata of some registrations, all of one memory type,
// without connection information: peers that have that load it in addition (see
// LoadRemote). Without registrations it returns the connection information alone.
//
// Implements:
//
//	nixl_capi_get_local_partial_md
func (a *Agent) PartialMetadata(regs ...*Registration) ([]byte, error) {
	const op = "get partial metadata"
	s := a.s
	if err := s.lock(op); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	mem, descs, err := s.described(op, regs)
	if err != nil {
		return nil, err
	}
	blob, st := rawPartialMetadata(s.h, mem, descs)
	if st < 0 {
		return nil, &Error{Op: op, Status: st, Detail: "an agent needs a backend first that peers can reach"}
	}
	return blob, nil
}

// described returns the descriptors of registrations. s.mu is held.
func (s *agent) described(op string, regs []*Registration) (MemType, []Desc, error) {
	mem, descs := DRAM, make([]Desc, 0, len(regs))
	for i, r := range regs {
		switch {
		case r == nil || r.s.a != s:
			return 0, nil, invalid(op, "registration %d is nil or another agent's", i)
		case r.s.closed:
			return 0, nil, &Error{Op: op, Cause: ErrClosed, Detail: fmt.Sprintf("registration %d is closed", i)}
		case i > 0 && r.s.mem != mem:
			return 0, nil, invalid(op, "registration %d is %v, those before %v", i, r.s.mem, mem)
		}
		mem = r.s.mem
		descs = append(descs, r.s.Desc)
	}
	return mem, descs, nil
}

// SendMetadata has the library send this agent's metadata to the listener at
// that address, or into the store for the zero address.
//
// Implements:
//
//	nixl_capi_send_local_md, nixl_capi_opt_args_set_ip_addr, nixl_capi_opt_args_set_port
func (a *Agent) SendMetadata(to netip.AddrPort) error {
	return a.s.exchange("send metadata", to, func(ip []byte, port uint16) Status {
		return rawSendMetadata(a.s.h, ip, port)
	})
}

// SendPartialMetadata has the library send what PartialMetadata returns to a
// listener. The store takes whole metadata only: there is no zero address here.
//
// Implements:
//
//	nixl_capi_send_local_partial_md
func (a *Agent) SendPartialMetadata(to netip.AddrPort, regs ...*Registration) error {
	const op = "send partial metadata"
	if (to == netip.AddrPort{}) {
		return invalid(op, "no address given")
	}
	var bad error
	err := a.s.exchange(op, to, func(ip []byte, port uint16) Status {
		mem, descs, err := a.s.described(op, regs)
		if bad = err; err != nil {
			return StatusSuccess
		}
		return rawSendPartialMetadata(a.s.h, mem, descs, ip, port)
	})
	if bad != nil {
		return bad
	}
	return err
}

// FetchRemote has the library ask the listener at that address, or the store for
// the zero address, for the metadata of an agent and load it. CheckRemote tells
// when it is there.
//
// Implements:
//
//	nixl_capi_fetch_remote_md
func (a *Agent) FetchRemote(name string, from netip.AddrPort) error {
	const op = "fetch remote metadata"
	if err := checkName(op, name); err != nil {
		return err
	}
	if name == a.s.name {
		return &Error{Op: op, Remote: name, Cause: ErrInvalid, Detail: "that is this agent's own name"}
	}
	return a.s.exchange(op, from, func(ip []byte, port uint16) Status {
		return rawFetchMetadata(a.s.h, cname(name), ip, port)
	})
}

// InvalidateLocal has the library tell the peer at that address to forget this
// agent, or take its metadata out of the store for the zero address.
//
// Implements:
//
//	nixl_capi_invalidate_local_md
func (a *Agent) InvalidateLocal(at netip.AddrPort) error {
	return a.s.exchange("invalidate local metadata", at, func(ip []byte, port uint16) Status {
		return rawInvalidateLocal(a.s.h, ip, port)
	})
}

func (s *agent) exchange(op string, at netip.AddrPort, call func(ip []byte, port uint16) Status) error {
	if err := s.lock(op); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if len(s.backends) == 0 {
		return invalid(op, "the agent has no backend yet: call CreateBackend first")
	}
	ip, port, err := s.place(op, at)
	if err != nil {
		return err
	}
	return failed(op, "", call(ip, port))
}
