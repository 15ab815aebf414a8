//go:build !leasefaults

package lease

const injected fault = 0

type tableFaults struct{}

func (*tableFaults) zero(t *Table, i int32, nonce int64) { t.slots.clear(int(i), nonce) }
func (*tableFaults) revive(*Table, int64, Grant)         {}
func (*tableFaults) resurrect(*Table, int64, string)     {}
func (*tableFaults) remember(*Table, int64, int32)       {}
func (*tableFaults) lateFaults(*Table)                   {}
func (*tableFaults) seen(*Table, string) *readers        { return nil }
