package nixl

import (
	"errors"
	"fmt"
)

// DeviceRange is memory of a GPU, as memory of type VRAM. The caller owns it and
// must not free it before the last agent that registered it is closed.
type DeviceRange struct {
	unkept
	desc Desc
}

// Device returns size bytes at an address of CUDA device dev. The CUDA driver is
// asked whether they are device memory of one allocation: an address that is not
// makes the library crash. Without a driver or a GPU, the error matches
// errors.ErrUnsupported; a wrong range is ErrInvalid.
func Device(addr, size uint64, dev int) (*DeviceRange, error) {
	const op = "describe device memory"
	d := Desc{Addr: addr, Len: size, Dev: uint64(dev)}
	if _, ok := d.end(); !ok || addr == 0 || size == 0 || dev < 0 {
		return nil, invalid(op, "%v is no range of memory", d)
	}
	p, err := rawDevice(addr)
	if err != nil {
		return nil, &Error{Op: op, Cause: errors.ErrUnsupported, Detail: err.Error()}
	}
	if !p.device {
		return nil, invalid(op, "%#x is not the address of device memory", addr)
	}
	if have := (Desc{Addr: p.start, Len: p.size, Dev: uint64(p.ordinal)}); !have.covers(d) {
		return nil, invalid(op, "%v is outside of its allocation, %v", d, have)
	}
	return &DeviceRange{desc: d}, nil
}

// pointerInfo is what the CUDA driver says about an address.
type pointerInfo struct {
	device      bool
	ordinal     int
	start, size uint64
}

var errNoDriver = errors.New("the CUDA driver libcuda.so.1 does not load: it comes with NVIDIA's GPU driver")

func cudaError(call string, code int) error {
	return fmt.Errorf("the CUDA driver's %s answered error %d: is there a GPU?", call, code)
}

// Desc returns the descriptor of length bytes at an offset. Errors match ErrInvalid.
func (d *DeviceRange) Desc(offset, length uint64) (Desc, error) {
	return d.desc.part("describe device memory", offset, length)
}

func (d *DeviceRange) region() (region, error) { return region{mem: VRAM, Desc: d.desc}, nil }
