package nixl

import "math"

// BlockRange is a part of a block device, as memory of type Block: register it
// with a backend for block devices (GUSLI), and it is remote memory of the agent
// itself. Addr of its descriptors is the offset on the device, Dev the number by
// which the backend's parameters name the device.
//
// The backend takes host memory for one device at a time: register the Buffer as
// well, as Buffer.ForDevice says. Its transfers can be posted once.
type BlockRange struct {
	unkept
	desc Desc
}

// NewBlockRange returns length bytes at offset of a block device. Whether there
// is such a device, and how large it is, the backend finds out with the first
// transfer.
func NewBlockRange(device uint64, offset, length int64) (*BlockRange, error) {
	if offset < 0 || length <= 0 || offset > math.MaxInt64-length {
		return nil, invalid("describe block device", "%d bytes at offset %d are no part of a device", length, offset)
	}
	return &BlockRange{desc: Desc{Addr: uint64(offset), Len: uint64(length), Dev: device}}, nil
}

// Desc returns the descriptor of length bytes at an offset in the range. Errors match ErrInvalid.
func (b *BlockRange) Desc(offset, length int64) (Desc, error) {
	if offset < 0 || length <= 0 || uint64(offset) > b.desc.Len || uint64(length) > b.desc.Len-uint64(offset) {
		return Desc{}, invalid("describe block device", "%d bytes at offset %d are not inside %d bytes", length, offset, b.desc.Len)
	}
	return Desc{Addr: b.desc.Addr + uint64(offset), Len: uint64(length), Dev: b.desc.Dev}, nil
}

func (b *BlockRange) region() (region, error) { return region{mem: Block, Desc: b.desc}, nil }

// ForDevice returns the buffer as host memory of a block device. Descriptors of
// it are the buffer's, with Dev set to the device. A buffer can be registered for
// any number of devices, and for none, which is what other backends take.
func (b *Buffer) ForDevice(device uint64) Memory { return bufferFor{b, device} }

type bufferFor struct {
	*Buffer
	device uint64
}

func (b bufferFor) region() (region, error) {
	if b.Buffer == nil {
		return region{}, invalid("register buffer", "it is nil")
	}
	r, err := b.Buffer.region()
	r.Dev = b.device
	return r, err
}
