package nixl

import (
	"bufio"
	"fmt"
	"os"
	"unsafe"
)

// HostRange is host memory of the caller's, as memory of type DRAM: of an mmap of its own, of C, or pinned by a GPU's driver.
// The caller keeps it mapped until the Close of the last agent that registered it, deregistered or not: a peer's READ of
// memory that was unmapped kills the owner's process.
type HostRange struct {
	unkept
	desc Desc
}

// Host returns size bytes at an address outside of the Go heap. The kernel is asked whether they are mapped, and can be read
// and written; a range that is not, or that is Go's, is ErrInvalid. [AllocBuffer] has memory that the package looks after.
func Host(addr, size uint64) (*HostRange, error) {
	const op = "describe host memory"
	d := Desc{Addr: addr, Len: size}
	if _, ok := d.end(); !ok || addr == 0 || size == 0 {
		return nil, invalid(op, "%v is no range of memory", d)
	}
	maps, err := mappings()
	if err != nil {
		return nil, fmt.Errorf("nixl: %s: %w", op, err)
	}
	if span := around(maps, uint64(uintptr(unsafe.Pointer(new([64]byte)))), anyAccess); span.Addr < d.Addr+d.Len && d.Addr < span.Addr+span.Len {
		return nil, invalid(op, "%v is in the heap of Go, which gives it to others once it is collected: use memory of mmap, of C or of AllocBuffer", d)
	}
	if !around(maps, addr, readWrite).covers(d) {
		return nil, invalid(op, "%v is not mapped for reading and writing", d)
	}
	return &HostRange{desc: d}, nil
}

const (
	anyAccess = ""
	readWrite = "rw"
)

type mapping struct {
	Desc
	access string
}

// mappings lists what the process has mapped, by address.
func mappings() (maps []mapping, err error) {
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); ; {
		if !lines.Scan() {
			return maps, lines.Err()
		}
		var start, end uint64
		var access string
		if _, err := fmt.Sscanf(lines.Text(), "%x-%x %s", &start, &end, &access); err != nil {
			return nil, fmt.Errorf("/proc/self/maps: %q: %w", lines.Text(), err)
		}
		maps = append(maps, mapping{Desc{Addr: start, Len: end - start}, access})
	}
}

// around is the longest range around addr of mappings without a gap that allow the access; zero where there is none.
func around(maps []mapping, addr uint64, access string) (d Desc) {
	for _, m := range maps {
		switch {
		case m.access[:len(access)] != access:
			continue
		case d.Len > 0 && d.Addr+d.Len == m.Addr:
			d.Len += m.Len
		case d.Len > 0 && addr-d.Addr < d.Len:
			return d
		default:
			d = m.Desc
		}
	}
	if addr-d.Addr >= d.Len {
		return Desc{}
	}
	return d
}

// Desc returns the descriptor of length bytes at an offset. Errors match ErrInvalid.
func (h *HostRange) Desc(offset, length uint64) (Desc, error) {
	return h.desc.part("describe host memory", offset, length)
}

func (h *HostRange) region() (region, error) { return region{mem: DRAM, Desc: h.desc}, nil }
