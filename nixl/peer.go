package nixl

import (
	"bytes"
	"crypto/sha256"
	"fmt"
)

// peer is a remote agent whose metadata is loaded. A reload makes a new peer:
// lists and transfers of the old one hold keys that the library has freed.
type peer struct {
	name   string
	cname  []byte
	digest [sha256.Size]byte
	ranges remoteRanges
	conns  []byte // connection information of all backends, as serialised
	active int    // transfers in flight
	failed bool   // a transfer ended with a transport error
	gone   bool   // replaced, invalidated, or dropped by the library
	// fetched: the library's listener or store loaded it, so ranges and conns are not known here.
	fetched bool
}

// peer returns the peer of that name, also one that the library loaded by
// itself (see FetchRemote), or nil. s.mu is held.
func (s *agent) peer(name string) *peer {
	p := s.peers[name]
	if p == nil || p.fetched {
		if known := rawCheck(s.h, cname(name), DRAM, nil) == StatusSuccess; p != nil && !known {
			p.gone = true
			delete(s.peers, name)
			p = nil
		} else if p == nil && known {
			p = &peer{name: name, cname: cname(name), fetched: true}
			s.peers[name] = p
		}
	}
	return p
}

// offers finds the descriptors in what the peer offers. s.mu is held.
func (s *agent) offers(op string, p *peer, mem MemType, descs []Desc) error {
	if p.fetched {
		if st := rawCheck(s.h, p.cname, mem, descs); st < 0 {
			return &Error{Op: op, Remote: p.name, Status: st, Cause: ErrInvalid, Detail: "a descriptor is outside of what the peer offers"}
		}
		return nil
	}
	for i := 0; i < len(descs); {
		r := p.ranges.containing(mem, descs[i])
		if r == nil {
			return &Error{Op: op, Remote: p.name, Cause: ErrInvalid,
				Detail: fmt.Sprintf("descriptor %d, %s%v, is outside of what the peer offers: %v", i, mem, descs[i], p.ranges)}
		}
		i += inside(descs[i:], r.Desc)
	}
	return nil
}

// LocalMetadata returns what peers need to reach this agent: connection
// information of its backends and the registrations of this moment. It is
// opaque bytes for LoadRemote; who holds them can read and write all registered
// memory, so it belongs on trusted channels only.
//
// Implements:
//
//	nixl_capi_get_local_md
func (a *Agent) LocalMetadata() ([]byte, error) {
	const op = "get local metadata"
	if err := a.s.lock(op); err != nil {
		return nil, err
	}
	defer a.s.mu.Unlock()
	if len(a.s.backends) == 0 {
		return nil, invalid(op, "the agent has no backend yet: call CreateBackend first")
	}
	blob, st := rawLocalMetadata(a.s.h)
	if st < 0 {
		return nil, failed(op, "", st)
	}
	return blob, nil
}

// LoadRemote loads a peer's metadata and returns the peer's name. The blob's
// frame is checked before the library sees it (ErrInvalid). Its connection
// information and keys are UCX's own: if those are damaged, the library can refuse
// the name for the rest of the agent's life, or crash (see the package comment), so
// the caller compares a digest that came by another way. An unchanged blob of a
// peer that is loaded is accepted without work, as each reload costs a socket on
// both sides. So is one that only offers more memory than before. Any
// other replaces the old metadata: lists and transfers made from that are then
// ErrStale, and the replacement is refused with ErrActive while a transfer to
// the peer is active. Metadata of single registrations (see PartialMetadata)
// adds to what is loaded; without that, it is ErrNotFound.
//
// Implements:
//
//	nixl_capi_load_remote_md, nixl_capi_check_remote_md, nixl_capi_invalidate_remote_md
func (a *Agent) LoadRemote(blob []byte) (name string, err error) {
	const op = "load remote metadata"
	f, err := parseMetadata(blob)
	if err != nil {
		return "", err
	}
	s := a.s
	if f.name == s.name {
		return "", &Error{Op: op, Remote: f.name, Cause: ErrInvalid, Detail: "the peer has this agent's own name; names must be unique"}
	}
	p := &peer{name: f.name, cname: cname(f.name), digest: sha256.Sum256(blob), ranges: f.ranges, conns: f.conns}
	if err := s.lock(op); err != nil {
		return "", err
	}
	defer s.mu.Unlock()
	if f.partial {
		return f.name, s.extend(op, p, blob)
	}
	if old := s.peer(f.name); old != nil {
		known := rawCheck(s.h, old.cname, DRAM, nil) == StatusSuccess
		if known && old.digest == p.digest {
			return f.name, nil
		}
		// Only what was loaded may be loaded again: if the library finds a
		// range with another key, it drops the peer but keeps the connection,
		// and the name never loads again.
		if known && bytes.Equal(old.conns, p.conns) && p.ranges.include(old.ranges) {
			if _, st := rawLoadMetadata(s.h, blob); st >= 0 {
				old.digest, old.ranges = p.digest, p.ranges
				return f.name, nil
			}
		}
		if old.active > 0 {
			return "", &Error{Op: op, Remote: f.name, Cause: ErrActive, Detail: fmt.Sprintf("%d transfers to the peer are in flight", old.active)}
		}
		s.drop(old)
	}
	got, st := rawLoadMetadata(s.h, blob)
	if st < 0 {
		rawInvalidate(s.h, p.cname) // what was loaded before it failed
		detail := "no backend of this agent fits the peer's, or the metadata is damaged"
		if st == StatusInvalidParam {
			detail = "the library keeps a connection of that name, which damaged metadata left behind; the name loads again in a new agent only"
		}
		if wrong := s.explain("UCX_", "rdma"); wrong != "" {
			detail += "; " + wrong
		}
		return "", &Error{Op: op, Remote: f.name, Status: st, Detail: detail}
	}
	if got != f.name {
		rawInvalidate(s.h, cname(got))
		return "", &Error{Op: op, Remote: f.name, Cause: ErrInvalid, Detail: fmt.Sprintf("the library read the name %q", got)}
	}
	s.peers[f.name] = p
	return f.name, nil
}

// extend loads metadata of single registrations. s.mu is held.
func (s *agent) extend(op string, more *peer, blob []byte) error {
	p := s.peer(more.name)
	switch {
	case p == nil:
		return &Error{Op: op, Remote: more.name, Cause: ErrNotFound, Detail: "this metadata has no connection information; load the peer's LocalMetadata, or PartialMetadata of nothing, first"}
	case p.fetched:
		return &Error{Op: op, Remote: more.name, Cause: ErrInvalid, Detail: "the library fetched this peer by itself; fetch the rest, too"}
	}
	if r := p.ranges.conflict(more.ranges); r != nil {
		return &Error{Op: op, Remote: more.name, Cause: ErrInvalid, Detail: fmt.Sprintf("%s%v was registered anew; load the peer's LocalMetadata", r.mem, r.Desc)}
	}
	if _, st := rawLoadMetadata(s.h, blob); st < 0 {
		if rawCheck(s.h, p.cname, DRAM, nil) != StatusSuccess {
			s.drop(p)
		}
		return &Error{Op: op, Remote: more.name, Status: st, Detail: "the metadata is damaged"}
	}
	p.ranges = p.ranges.union(more.ranges)
	p.digest = [sha256.Size]byte{} // no blob says all that is loaded now
	return nil
}

// drop ends a peer in the library and here. s.mu is held.
func (s *agent) drop(p *peer) Status {
	p.gone = true
	if s.peers[p.name] == p {
		delete(s.peers, p.name)
	}
	return rawInvalidate(s.h, p.cname)
}

// InvalidateRemote forgets a peer. Lists and transfers made for it are then
// ErrStale. It is refused with ErrActive while a transfer to it is active: the
// library would answer at once, and the bytes would land all the same. An
// unknown name is ErrNotFound.
//
// Implements:
//
//	nixl_capi_invalidate_remote_md
func (a *Agent) InvalidateRemote(name string) error {
	const op = "invalidate remote metadata"
	if err := checkName(op, name); err != nil {
		return err
	}
	s := a.s
	if err := s.lock(op); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if p := s.peers[name]; p != nil {
		if p.active > 0 {
			return &Error{Op: op, Remote: name, Cause: ErrActive, Detail: fmt.Sprintf("%d transfers to the peer are in flight", p.active)}
		}
		if st := s.drop(p); st != StatusNotFound { // the library may have dropped it before
			return failed(op, name, st)
		}
		return nil
	}
	if name == s.name {
		return &Error{Op: op, Remote: name, Cause: ErrInvalid, Detail: "that is this agent's own name"}
	}
	st := rawInvalidate(s.h, cname(name))
	if st == StatusBackend { // what libraries before 1.5.0 say instead
		st = StatusNotFound
	}
	return failed(op, name, st)
}

// CheckRemote asks whether metadata of the peer is loaded and, with
// descriptors, whether it covers them. ErrNotFound says that it is not or does
// not. It sends nothing: a peer that died stays known.
//
// Implements:
//
//	nixl_capi_check_remote_md
func (a *Agent) CheckRemote(name string, mem MemType, descs []Desc) error {
	const op = "check remote metadata"
	if err := checkName(op, name); err != nil {
		return err
	}
	if len(descs) > 0 {
		if _, err := checkDescs(op, mem, descs); err != nil {
			return err
		}
	}
	if err := a.s.lock(op); err != nil {
		return err
	}
	defer a.s.mu.Unlock()
	return failed(op, name, rawCheck(a.s.h, cname(name), mem, descs))
}

// Connect opens the connection to a peer now instead of on the first transfer.
//
// Implements:
//
//	nixl_capi_agent_make_connection
func (a *Agent) Connect(name string) error { return a.s.connect(name, 0) }

// connect goes through the backend via, or all for 0.
func (s *agent) connect(name string, via handle) error {
	const op = "connect"
	if err := checkName(op, name); err != nil {
		return err
	}
	if err := s.lock(op); err != nil {
		return err
	}
	defer s.mu.Unlock()
	st := rawConnect(s.h, cname(name), via)
	if st == StatusBackend {
		return s.peerError(op, name)
	}
	return failed(op, name, st)
}

// peerError explains a backend error of a call that was sound: the peer or the
// transport. It asks whether the library still knows the peer. s.mu is held.
func (s *agent) peerError(op, name string) error {
	if name == s.name {
		return &Error{Op: op, Status: StatusBackend, Detail: "the backend could not use the agent's own memory or storage"}
	}
	e := &Error{Op: op, Remote: name, Status: StatusBackend, Cause: ErrPeer}
	if rawCheck(s.h, cname(name), DRAM, nil) == StatusNotFound {
		p := s.peers[name]
		if p == nil { // libraries before 1.5.0 do not say so
			return failed(op, name, StatusNotFound)
		}
		s.drop(p)
		e.Detail = "the library has dropped the peer's metadata; load it again"
	} else {
		e.Detail = "the peer may be gone; if it is back, invalidate its metadata and load the new"
	}
	return e
}
