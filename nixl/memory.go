package nixl

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// MemType is the kind of memory that a descriptor names (nixl_capi_mem_type_t).
type MemType int32

// The memory types of NIXL.
const (
	DRAM MemType = iota
	VRAM
	Block
	Object
	File

	memTypes = int(File) + 1
)

var memTypeNames = [memTypes]string{"DRAM", "VRAM", "BLOCK", "OBJECT", "FILE"}

// String returns NIXL's name of the type.
func (m MemType) String() string {
	if m.valid() {
		return memTypeNames[m]
	}
	return fmt.Sprintf("MemType(%d)", int32(m))
}

func (m MemType) valid() bool { return m >= 0 && int(m) < memTypes }

// ParseMemType reads a name in any case. Errors match ErrInvalid.
func ParseMemType(name string) (MemType, error) {
	for m, n := range memTypeNames {
		if strings.EqualFold(n, name) {
			return MemType(m), nil
		}
	}
	return 0, invalid("parse memory type", "%q is none of %s", name, strings.Join(memTypeNames[:], ", "))
}

// Desc is a descriptor: Len bytes at Addr of device Dev. DRAM has device 0.
// The addresses of a peer's memory are numbers here, never pointers.
type Desc struct{ Addr, Len, Dev uint64 }

// end returns the address behind the descriptor, false when it wraps around 2^64.
func (d Desc) end() (uint64, bool) {
	end := d.Addr + d.Len
	return end, end >= d.Addr
}

// covers reports whether the other lies inside, on the same device.
func (d Desc) covers(o Desc) bool {
	return d.Dev == o.Dev && o.Addr >= d.Addr && o.Len <= d.Len && o.Addr-d.Addr <= d.Len-o.Len
}

// part is the descriptor of length bytes at an offset in d.
func (d Desc) part(op string, offset, length uint64) (Desc, error) {
	if length == 0 || offset > d.Len || length > d.Len-offset {
		return Desc{}, invalid(op, "%d bytes at offset %d are not inside %d bytes", length, offset, d.Len)
	}
	return Desc{Addr: d.Addr + offset, Len: length, Dev: d.Dev}, nil
}

// inside returns how many descriptors from the first on lie inside of r.
func inside(descs []Desc, r Desc) int {
	for i := range descs {
		d := &descs[i]
		if d.Dev != r.Dev || d.Addr < r.Addr || d.Len > r.Len || d.Addr-r.Addr > r.Len-d.Len {
			return i
		}
	}
	return len(descs)
}

func (d Desc) String() string { return fmt.Sprintf("[%#x +%d dev %d]", d.Addr, d.Len, d.Dev) }

// Memory is what an agent can register: a *Buffer, a *HostRange, a *FileRange, a
// *BlockRange, an *ObjectRange or a *DeviceRange. Memory of the Go heap is not among it, as the collector may
// give it to somebody else while peers write it.
type Memory interface {
	region() (region, error)
	// retain keeps the memory mapped until the agent's Close releases it.
	retain(*agent) error
	release(*agent)
}

// region is one registration as it crosses into C.
type region struct {
	mem MemType
	Desc
	meta     []byte
	backends []handle
}

// Buffer is page-aligned memory outside of the Go heap, zeroed at first. Peers
// read and write it once it is registered.
//
// The library's threads may touch registered memory as long as an agent lives
// that ever registered it, deregistered or not: a peer's READ of memory that
// was unmapped kills the owner's process. Close therefore unmaps at once only
// when no living agent ever registered the Buffer, and leaves the unmapping to
// the Close of the last such agent otherwise.
type Buffer struct {
	lifetime
	mapped []byte // whole pages, as mapped
	data   []byte // the first size bytes of them
}

// unkept is Memory that is not the package's to keep.
type unkept struct{}

func (unkept) retain(*agent) error { return nil }
func (unkept) release(*agent)      {}

// lifetime keeps a resource until it is closed and no living agent ever registered it.
type lifetime struct {
	mu     sync.Mutex
	agents map[*agent]struct{} // living agents that registered it at any time
	closed bool
	free   func() error
}

func (l *lifetime) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	if len(l.agents) > 0 {
		return nil
	}
	return l.free()
}

func (l *lifetime) retain(a *agent) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return closed("register memory")
	}
	if l.agents == nil {
		l.agents = map[*agent]struct{}{}
	}
	l.agents[a] = struct{}{}
	return nil
}

func (l *lifetime) release(a *agent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, held := l.agents[a]; !held {
		return // once for each memory that is made of it
	}
	delete(l.agents, a)
	if l.closed && len(l.agents) == 0 {
		l.free() // nobody is left to tell
	}
}

// lock takes the lifetime of something that is not closed.
func (l *lifetime) lock(op string) error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return closed(op)
	}
	return nil
}

// AllocBuffer maps size bytes, rounded up to whole pages inside.
func AllocBuffer(size int) (*Buffer, error) {
	if size <= 0 {
		return nil, invalid("allocate buffer", "the size %d is not positive", size)
	}
	page := os.Getpagesize()
	rounded := (size + page - 1) / page * page
	if rounded < size {
		return nil, invalid("allocate buffer", "the size %d is too large", size)
	}
	mapped, err := rawMap(rounded)
	if err != nil {
		return nil, fmt.Errorf("nixl: allocate buffer of %d bytes: %w", size, err)
	}
	// Over shared memory a READ from and into huge pages is twice as fast. A
	// kernel without them says so, which is no error.
	_ = unix.Madvise(mapped, unix.MADV_HUGEPAGE)
	b := &Buffer{mapped: mapped, data: mapped[:size:size]}
	b.free = b.unmap
	return b, nil
}

// Bytes returns the memory, nil once the Buffer is closed. The slice must not
// be used after the memory was unmapped.
func (b *Buffer) Bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	return b.data
}

// Addr returns the address of the first byte, 0 once the Buffer is closed.
func (b *Buffer) Addr() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return 0
	}
	return b.addr()
}

func (b *Buffer) addr() uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b.data)))) }

// Len returns the size in bytes, also of a closed Buffer.
func (b *Buffer) Len() int { return len(b.data) }

// Desc returns the descriptor of length bytes at offset. Errors match ErrInvalid or ErrClosed.
func (b *Buffer) Desc(offset, length int) (Desc, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return Desc{}, closed("describe buffer")
	}
	if offset < 0 || length <= 0 || offset > len(b.data) || length > len(b.data)-offset {
		return Desc{}, invalid("describe buffer", "%d bytes at offset %d are not inside %d bytes", length, offset, len(b.data))
	}
	return Desc{Addr: b.addr() + uint64(offset), Len: uint64(length)}, nil
}

// Close ends the use of the Buffer. The memory is unmapped now, or by the Close
// of the last agent that ever registered it. A second Close does nothing.
func (b *Buffer) Close() error { return b.close() }

func (b *Buffer) unmap() error {
	if err := rawUnmap(b.mapped); err != nil {
		return fmt.Errorf("nixl: unmap buffer: %w", err)
	}
	return nil
}

func (b *Buffer) region() (region, error) {
	if err := b.lock("register buffer"); err != nil {
		return region{}, err
	}
	defer b.mu.Unlock()
	return region{mem: DRAM, Desc: Desc{Addr: b.addr(), Len: uint64(len(b.data))}}, nil
}
