package nixl

// MemoryView is what code on a GPU needs to start transfers by itself. It serves
// backends with a device API only; the others answer ErrBackend. The library has
// it from NIXL 1.5.0 on.
type MemoryView struct {
	a      *agent
	h      handle
	sides  []*list
	closed bool
}

// RemoteDesc is a descriptor of a peer's memory. An empty Agent is a placeholder,
// which keeps the indices aligned when only some peers are addressed.
type RemoteDesc struct {
	Desc
	Agent string
}

// ViewLocal prepares a view of this agent's memory. Each descriptor must lie
// inside a live registration. Of the options, Backend and Custom count.
//
// Implements:
//
//	nixl_capi_prep_mem_view_local
func (a *Agent) ViewLocal(mem MemType, descs []Desc, o TransferOptions) (*MemoryView, error) {
	const op = "prepare local view"
	s := a.s
	options, err := o.raw(op, s)
	if err != nil {
		return nil, err
	}
	l, err := newList(s, op, "", mem, descs)
	if err != nil {
		return nil, err
	}
	if err := s.lock(op); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	if err := l.locate(op, descs); err != nil {
		return nil, err
	}
	h, st := rawViewLocal(s.h, mem, descs, options)
	if st < 0 {
		return nil, &Error{Op: op, Status: st, Detail: viewHint}
	}
	return s.newView(h, l), nil
}

const viewHint = "views need a backend with a device API: UCX built with it, or GPUNETIO, and a GPU"

// ViewRemote prepares a view of peers' memory. Each descriptor must lie inside
// what the metadata of its agent offers.
//
// Implements:
//
//	nixl_capi_prep_mem_view_remote, nixl_capi_create_remote_dlist,
//	nixl_capi_remote_dlist_add_desc, nixl_capi_destroy_remote_dlist
func (a *Agent) ViewRemote(mem MemType, descs []RemoteDesc, o TransferOptions) (*MemoryView, error) {
	const op = "prepare remote view"
	s := a.s
	options, err := o.raw(op, s)
	if err != nil {
		return nil, err
	}
	plain := make([]Desc, len(descs))
	var owners []byte
	of := map[string][]Desc{}
	for i, d := range descs {
		plain[i] = d.Desc
		owners = append(owners, cname(d.Agent)...)
		if d.Agent == "" {
			plain[i] = Desc{}
			continue
		}
		if err := checkName(op, d.Agent); err != nil {
			return nil, err
		}
		of[d.Agent] = append(of[d.Agent], d.Desc)
	}
	if len(of) == 0 {
		return nil, invalid(op, "no descriptor names an agent")
	}
	var sides []*list
	for name, ds := range of {
		l, err := newList(s, op, name, mem, ds)
		if err != nil {
			return nil, err
		}
		sides = append(sides, l)
	}
	if err := s.lock(op); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	for _, l := range sides {
		if err := l.locate(op, of[l.remote]); err != nil {
			return nil, err
		}
	}
	h, st := rawViewRemote(s.h, mem, plain, owners, options)
	if st < 0 {
		return nil, &Error{Op: op, Status: st, Detail: viewHint}
	}
	return s.newView(h, sides...), nil
}

// newView holds what the view refers to. s.mu is held.
func (s *agent) newView(h handle, sides ...*list) *MemoryView {
	v := &MemoryView{a: s, h: h, sides: sides}
	for _, l := range sides {
		l.hold()
	}
	s.views[v] = struct{}{}
	return v
}

// Close releases the view. The caller has made sure that no GPU uses it any more.
// A second Close does nothing.
//
// Implements:
//
//	nixl_capi_release_mem_view
func (v *MemoryView) Close() error {
	s := v.a
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || v.closed {
		return nil
	}
	v.closed = true
	delete(s.views, v)
	for _, l := range v.sides {
		l.closed = true
		l.unhold()
	}
	return failed("release view", "", rawViewRelease(s.h, v.h))
}
