package nixl

import (
	"fmt"
	"math"
	"os"
	"syscall"
)

// FileRange is a part of a file, as memory of type File: register it with a
// backend for files (POSIX, GDS), and it is remote memory of the agent itself.
// Addr of its descriptors is the offset in the file, Dev the file descriptor.
//
// The range has a file descriptor of its own, which stays open until Close and
// the Close of every agent that registered the range. Thus the library never
// writes to another file that got the same number.
type FileRange struct {
	lifetime
	fd             int
	offset, length uint64
}

// NewFileRange returns length bytes at offset of a file. READs need a file that
// is open for reading and long enough, WRITEs one that is open for writing.
func NewFileRange(f *os.File, offset, length int64) (*FileRange, error) {
	const op = "describe file"
	if f == nil {
		return nil, invalid(op, "no file given")
	}
	if offset < 0 || length <= 0 || offset > math.MaxInt64-length {
		return nil, invalid(op, "%d bytes at offset %d are no part of a file", length, offset)
	}
	c, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("nixl: %s: %w", op, err)
	}
	fd := -1
	var failed error
	err = c.Control(func(own uintptr) {
		n, _, errno := syscall.Syscall(syscall.SYS_FCNTL, own, syscall.F_DUPFD_CLOEXEC, 0)
		if errno != 0 {
			failed = errno
			return
		}
		fd = int(n)
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return nil, fmt.Errorf("nixl: %s %s: %w", op, f.Name(), err)
	}
	r := &FileRange{fd: fd, offset: uint64(offset), length: uint64(length)}
	r.free = func() error { return syscall.Close(fd) }
	return r, nil
}

// Desc returns the descriptor of length bytes at an offset in the range. Errors match ErrInvalid or ErrClosed.
func (f *FileRange) Desc(offset, length int64) (Desc, error) {
	const op = "describe file"
	if err := f.lock(op); err != nil {
		return Desc{}, err
	}
	defer f.mu.Unlock()
	if offset < 0 || length <= 0 || uint64(offset) > f.length || uint64(length) > f.length-uint64(offset) {
		return Desc{}, invalid(op, "%d bytes at offset %d are not inside %d bytes", length, offset, f.length)
	}
	return Desc{Addr: f.offset + uint64(offset), Len: uint64(length), Dev: uint64(f.fd)}, nil
}

// Close ends the use of the range. Its file descriptor is closed now, or by the
// Close of the last agent that ever registered it. A second Close does nothing.
func (f *FileRange) Close() error { return f.close() }

// fileEnds returns how long the file of each file descriptor must be for a READ.
func fileEnds(descs []Desc, indices []int32) map[uint64]uint64 {
	ends := map[uint64]uint64{}
	for _, i := range indices {
		d := descs[i]
		ends[d.Dev] = max(ends[d.Dev], d.Addr+d.Len)
	}
	return ends
}

// checkFileEnds refuses to read beyond the end of a file: libraries before 1.5.0
// call that a success, and leave the memory as it was.
func checkFileEnds(op string, ends map[uint64]uint64) error {
	for fd, end := range ends {
		var st syscall.Stat_t
		if err := syscall.Fstat(int(fd), &st); err != nil {
			return &Error{Op: op, Cause: ErrState, Detail: fmt.Sprintf("file descriptor %d: %v", fd, err)}
		}
		if st.Mode&syscall.S_IFMT == syscall.S_IFREG && uint64(st.Size) < end {
			return &Error{Op: op, Cause: ErrState, Detail: fmt.Sprintf("the file of descriptor %d has %d bytes, and the READ goes to %d", fd, st.Size, end)}
		}
	}
	return nil
}

func (f *FileRange) region() (region, error) {
	if err := f.lock("register file"); err != nil {
		return region{}, err
	}
	defer f.mu.Unlock()
	return region{mem: File, Desc: Desc{Addr: f.offset, Len: f.length, Dev: uint64(f.fd)}}, nil
}
