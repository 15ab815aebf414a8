//go:build leasefaults

package lease

import "sync/atomic"

var injected fault

type tableFaults struct {
	late []lateZero
	gone map[Key]int32 // index of a life that ended
	last map[string]Key
	sets map[string]*readers
}

type lateZero struct {
	index int32
	nonce int64
}

func (f *tableFaults) zero(t *Table, i int32, nonce int64) {
	if injected&faultM1 != 0 {
		f.late = append(f.late, lateZero{i, nonce})
		return
	}
	t.slots.clear(int(i), nonce)
}

func (f *tableFaults) lateFaults(t *Table) {
	for _, l := range f.late {
		t.slots.clear(int(l.index), l.nonce)
	}
	f.late = nil
}

func (f *tableFaults) remember(t *Table, _ int64, i int32) {
	if f.gone == nil {
		f.gone, f.last = map[Key]int32{}, map[string]Key{}
	}
	k := Key{t.cold[i].request, t.cold[i].nonce}
	f.gone[k], f.last[k.Request] = i, k
}

func (f *tableFaults) resurrect(t *Table, at int64, id string) {
	if k, ok := f.last[id]; ok {
		f.raise(t, at, k, t.ext)
	}
}

func (f *tableFaults) revive(t *Table, at int64, g Grant) {
	f.raise(t, at, Key{g.Request, g.Nonce}, int64(g.TTL))
}

func (f *tableFaults) raise(t *Table, at int64, k Key, ttl int64) {
	i, ok := f.gone[k]
	if !ok || t.cold[i].nonce != 0 || t.find(k.Request, k.Nonce) != none {
		return
	}
	if t.hasSlot(i) {
		atomic.StoreInt64(&t.slots.cells[i], k.Nonce)
	}
	t.link(i, k.Request, k.Nonce)
	c := &t.cold[i]
	c.granted, c.export, c.since = true, true, at
	t.hot[i] = hotLife{k.Nonce, at + ttl}
	t.due.push(due{at + ttl, i, c.gen})
	t.grants.list = append(t.grants.list, grant{i, c.gen})
	t.granted++
	t.stats.Live++
}

func (f *tableFaults) seen(_ *Table, id string) *readers {
	if f.sets == nil {
		f.sets = map[string]*readers{}
	}
	if f.sets[id] == nil {
		f.sets[id] = &readers{}
	}
	return f.sets[id]
}
