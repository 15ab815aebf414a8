package nixl

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"sort"
)

// Registration is memory that an agent registered: peers that load the agent's
// metadata from now on can read and write it.
type Registration struct{ s *registration }

type registration struct {
	region
	a      *agent
	uses   int // prepared lists and transfers that refer to it
	closed bool
}

// Register registers memory with the backends, or with all that serve its
// type when none is given. Backends that are named must all take it; otherwise
// one is enough. A region can be registered once with an agent. The agent's own
// Close deregisters what is left.
//
// Implements:
//
//	nixl_capi_create_reg_dlist, nixl_capi_reg_dlist_add_desc,
//	nixl_capi_register_mem, nixl_capi_destroy_reg_dlist
func (a *Agent) Register(m Memory, backends ...*Backend) (*Registration, error) {
	const op = "register memory"
	if !ours(m) {
		return nil, invalid(op, "no memory of this package is given")
	}
	reg, err := m.region()
	if err != nil {
		return nil, err
	}
	if reg.Len == 0 {
		return nil, invalid(op, "the memory is empty")
	}
	s := a.s
	if err := s.lock(op); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	for _, b := range backends {
		if b == nil || b.a != s {
			return nil, invalid(op, "a backend is nil or belongs to another agent")
		}
	}
	if len(s.backends) == 0 {
		return nil, invalid(op, "the agent has no backend yet: call CreateBackend first")
	}
	if other := s.regs.overlapping(reg.mem, reg.Desc); other != nil {
		return nil, invalid(op, "%v overlaps %v, which is registered already", reg.Desc, other.Desc)
	}
	if err := m.retain(s); err != nil {
		return nil, err
	}
	s.memories[m] = struct{}{} // before the call: the library may keep the address even if it fails
	if err := s.register(op, &reg, backends); err != nil {
		return nil, err
	}
	r := &registration{region: reg, a: s}
	s.regs.insert(r)
	return &Registration{r}, nil
}

// ours tells a value of this package from a nil pointer, and from a type that has the methods by embedding.
func ours(m Memory) bool {
	v := reflect.ValueOf(m)
	if v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	return v.IsValid() && v.Type().PkgPath() == reflect.TypeFor[Agent]().PkgPath()
}

// register registers with one backend after the other and notes which took the
// region. Left to itself the library deregisters from all backends that hold
// memory of the type, and fails for those that were created later.
func (s *agent) register(op string, reg *region, named []*Backend) error {
	candidates := named
	if len(named) == 0 {
		for _, b := range s.backends {
			if b.mems>>reg.mem&1 != 0 {
				candidates = append(candidates, b)
			}
		}
	}
	worst, refused := StatusNotFound, "no backend serves the type"
	var taken []handle
	for _, b := range candidates {
		reg.backends = []handle{b.h}
		if st := rawRegister(s.h, reg); st < 0 {
			worst, refused = st, "backend "+b.name+" refused it"
		} else {
			taken = append(taken, b.h)
		}
	}
	if len(taken) == 0 || len(named) > 0 && len(taken) < len(named) {
		if reg.backends = taken; len(taken) > 0 {
			rawDeregister(s.h, reg)
		}
		if reg.mem == DRAM || reg.mem == VRAM { // what RDMA pins
			if wrong := s.explain("memlock", "UCX_", "rdma"); wrong != "" {
				refused += "; " + wrong
			}
		}
		return &Error{Op: op, Status: worst, Detail: fmt.Sprintf("%s%v: %s", reg.mem, reg.Desc, refused)}
	}
	reg.backends = taken
	return nil
}

// Close deregisters the memory. It is refused with ErrActive while a prepared
// list or a transfer refers to the registration. It is no fence: over TCP peers
// that know the memory can still read it afterwards, so the memory itself stays
// mapped until the agent's Close. A second Close does nothing.
//
// Implements:
//
//	nixl_capi_deregister_mem
func (r *Registration) Close() error {
	const op = "deregister memory"
	s := r.s.a
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || r.s.closed {
		return nil
	}
	if r.s.uses > 0 {
		return &Error{Op: op, Cause: ErrActive, Detail: "close the prepared lists and transfers that refer to it first"}
	}
	r.s.closed = true
	s.regs.remove(r.s)
	return failed(op, "", rawDeregister(s.h, &r.s.region))
}

// registrations are the live ones of an agent, sorted by type, device and address; none overlap.
type registrations []*registration

func (rs registrations) search(mem MemType, d Desc) int {
	return sort.Search(len(rs), func(i int) bool {
		r := rs[i]
		return cmp.Or(cmp.Compare(r.mem, mem), cmp.Compare(r.Dev, d.Dev), cmp.Compare(r.Addr, d.Addr)) > 0
	})
}

func (rs *registrations) insert(r *registration) {
	*rs = slices.Insert(*rs, rs.search(r.mem, r.Desc), r)
}

func (rs *registrations) remove(r *registration) {
	if i := slices.Index(*rs, r); i >= 0 {
		*rs = slices.Delete(*rs, i, i+1)
	}
}

// containing returns the registration that d lies in.
func (rs registrations) containing(mem MemType, d Desc) *registration {
	i := rs.search(mem, d) - 1
	if i < 0 || !rs[i].covers(mem, d) {
		return nil
	}
	return rs[i]
}

func (r *registration) covers(mem MemType, d Desc) bool { return r.mem == mem && r.Desc.covers(d) }

// overlapping returns a registration that shares bytes with d.
func (rs registrations) overlapping(mem MemType, d Desc) *registration {
	i := rs.search(mem, d)
	for _, k := range []int{i - 1, i} {
		if k < 0 || k >= len(rs) {
			continue
		}
		r := rs[k]
		if r.mem == mem && r.Dev == d.Dev && d.Addr < r.Addr+r.Len && r.Addr < d.Addr+d.Len {
			return r
		}
	}
	return nil
}
