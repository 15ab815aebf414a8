package nixl

import (
	"math"
	"sync/atomic"
)

// ObjectRange is an object of a store, as memory of type Object: register it with
// the OBJ backend, and it is remote memory of the agent itself. Dev of its
// descriptors is a number that stands for the key in this process.
type ObjectRange struct {
	unkept
	key    string
	length uint64
	dev    uint64
}

var objects atomic.Uint64 // numbers given so far

// NewObjectRange returns the first length bytes of the object of that key, which
// need not exist before a WRITE.
func NewObjectRange(key string, length int64) (*ObjectRange, error) {
	if key == "" || len(key) > math.MaxInt32 || length <= 0 {
		return nil, invalid("describe object", "the key %q is empty or too long, or the length %d not positive", key, length)
	}
	return &ObjectRange{key: key, length: uint64(length), dev: objects.Add(1)}, nil
}

// Desc returns the descriptor of length bytes at an offset in the object. Errors match ErrInvalid.
func (o *ObjectRange) Desc(offset, length int64) (Desc, error) {
	if offset < 0 || length <= 0 || uint64(offset) > o.length || uint64(length) > o.length-uint64(offset) {
		return Desc{}, invalid("describe object", "%d bytes at offset %d are not inside %d bytes", length, offset, o.length)
	}
	return Desc{Addr: uint64(offset), Len: uint64(length), Dev: o.dev}, nil
}

func (o *ObjectRange) region() (region, error) {
	return region{mem: Object, Desc: Desc{Len: o.length, Dev: o.dev}, meta: []byte(o.key)}, nil
}
