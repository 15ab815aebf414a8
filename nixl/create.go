package nixl

import "maps"

// CreateTransfer makes a request of descriptors instead of prepared lists: local
// descriptor k with remote descriptor k, of equal length. It suits descriptors
// that are used once; all of them cross into C for each request. Every check of
// PrepareLocal, PrepareRemote and NewTransfer applies.
//
// Files and objects are remote memory of the agent itself: name the agent as the
// remote one.
//
// Implements:
//
//	nixl_capi_create_xfer_req, nixl_capi_create_xfer_dlist,
//	nixl_capi_xfer_dlist_add_desc, nixl_capi_destroy_xfer_dlist
func (a *Agent) CreateTransfer(op Op, localMem MemType, local []Desc, remote string, remoteMem MemType, descs []Desc, o TransferOptions) (*Transfer, error) {
	const what = "create transfer"
	if op != Read && op != Write {
		return nil, invalid(what, "the operation %d does not exist", int32(op))
	}
	if err := checkName(what, remote); err != nil {
		return nil, err
	}
	s := a.s
	options, err := o.raw(what, s)
	if err != nil {
		return nil, err
	}
	l, err := newList(s, what, "", localMem, local)
	if err != nil {
		return nil, err
	}
	r, err := newList(s, what, remote, remoteMem, descs)
	if err != nil {
		return nil, err
	}
	if l.n != r.n {
		return nil, invalid(what, "%d local descriptors for %d remote ones", l.n, r.n)
	}
	var bytes uint64
	for k, d := range local {
		if d.Len != descs[k].Len {
			return nil, invalid(what, "pair %d joins %d local bytes with %d remote ones", k, d.Len, descs[k].Len)
		}
		bytes += d.Len
	}
	if err := s.lock(what); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	if err := l.locate(what, local); err != nil {
		return nil, err
	}
	if err := r.locate(what, descs); err != nil {
		return nil, err
	}
	h, st := rawCreate(s.h, op, localMem, local, remoteMem, descs, cname(remote), options)
	if st < 0 {
		return nil, s.refused(what, r, options, st)
	}
	for _, side := range []*list{l, r} {
		side.hold()
		side.closed = true // only the transfer holds it
	}
	t := s.adopt(h, l, r, bytes, l.n)
	if op == Read && r.mem == File {
		t.s.ends = fileEnds(descs, r.indices(nil))
	}
	return t, nil
}

// Backend returns the backend that carries the transfer. ErrNotFound says that
// it cannot be told from another one, which has the same parameters.
//
// Implements:
//
//	nixl_capi_query_xfer_backend, nixl_capi_get_backend_params
func (t *Transfer) Backend() (*Backend, error) {
	const op = "query transfer backend"
	if err := t.lock(op); err != nil {
		return nil, err
	}
	s := t.remote.a
	defer s.mu.Unlock()
	pairs, mems, st := rawTransferBackend(s.h, t.s.h)
	if st < 0 {
		return nil, failed(op, t.remote.remote, st)
	}
	var found *Backend
	for _, b := range s.backends {
		own, ownMems, st := rawBackendParams(s.h, b.h)
		if st < 0 {
			return nil, failed(op, t.remote.remote, st)
		}
		if ownMems != mems || !maps.Equal(pairMap(own), pairMap(pairs)) {
			continue
		}
		if found != nil {
			return nil, &Error{Op: op, Remote: t.remote.remote, Cause: ErrNotFound, Detail: found.name + " and " + b.name + " have the same parameters"}
		}
		found = b
	}
	if found == nil {
		return nil, &Error{Op: op, Remote: t.remote.remote, Cause: ErrNotFound, Detail: "no backend of the agent has these parameters"}
	}
	return found, nil
}
