//go:build cgo

package nixl

/*
#cgo CFLAGS: -std=gnu11 -O3 -Wall -Wextra
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "capi.h"
#include "shim.h"

// noescape takes effect only beside nocallback. The library never calls into Go.
// A call without either is one whose arguments never lie on the stack.
#cgo noescape nixlgo_load
#cgo nocallback nixlgo_load
#cgo noescape nixlgo_function_name
#cgo nocallback nixlgo_function_name
#cgo noescape nixlgo_function_missing
#cgo nocallback nixlgo_function_missing
#cgo noescape nixlgo_free
#cgo nocallback nixlgo_free
#cgo noescape nixlgo_map
#cgo nocallback nixlgo_map
#cgo noescape nixlgo_unmap
#cgo nocallback nixlgo_unmap
#cgo noescape nixlgo_bytes_free
#cgo nocallback nixlgo_bytes_free
#cgo noescape nixlgo_agent_create
#cgo nocallback nixlgo_agent_create
#cgo noescape nixlgo_agent_destroy
#cgo nocallback nixlgo_agent_destroy
#cgo noescape nixlgo_plugins
#cgo nocallback nixlgo_plugins
#cgo noescape nixlgo_plugin_params
#cgo nocallback nixlgo_plugin_params
#cgo noescape nixlgo_backend_create
#cgo nocallback nixlgo_backend_create
#cgo noescape nixlgo_backend_params
#cgo nocallback nixlgo_backend_params
#cgo noescape nixlgo_backend_destroy
#cgo nocallback nixlgo_backend_destroy
#cgo noescape nixlgo_register
#cgo nocallback nixlgo_register
#cgo noescape nixlgo_deregister
#cgo nocallback nixlgo_deregister
#cgo noescape nixlgo_local_md
#cgo nocallback nixlgo_local_md
#cgo noescape nixlgo_load_md
#cgo nocallback nixlgo_load_md
#cgo noescape nixlgo_invalidate_md
#cgo nocallback nixlgo_invalidate_md
#cgo noescape nixlgo_check_md
#cgo nocallback nixlgo_check_md
#cgo noescape nixlgo_connect
#cgo nocallback nixlgo_connect
#cgo noescape nixlgo_prepare
#cgo nocallback nixlgo_prepare
#cgo noescape nixlgo_list_release
#cgo nocallback nixlgo_list_release
#cgo noescape nixlgo_make
#cgo nocallback nixlgo_make
#cgo noescape nixlgo_poll
#cgo nocallback nixlgo_poll
#cgo noescape nixlgo_release
#cgo nocallback nixlgo_release
#cgo noescape nixlgo_estimate
#cgo nocallback nixlgo_estimate
#cgo noescape nixlgo_partial_md
#cgo nocallback nixlgo_partial_md
#cgo noescape nixlgo_send_md
#cgo nocallback nixlgo_send_md
#cgo noescape nixlgo_send_partial_md
#cgo nocallback nixlgo_send_partial_md
#cgo noescape nixlgo_fetch_md
#cgo nocallback nixlgo_fetch_md
#cgo noescape nixlgo_invalidate_local_md
#cgo nocallback nixlgo_invalidate_local_md
#cgo noescape nixlgo_query
#cgo nocallback nixlgo_query
#cgo noescape nixlgo_create
#cgo nocallback nixlgo_create
#cgo noescape nixlgo_telemetry
#cgo nocallback nixlgo_telemetry
#cgo noescape nixlgo_transfer_backend
#cgo nocallback nixlgo_transfer_backend
#cgo noescape nixlgo_view_local
#cgo nocallback nixlgo_view_local
#cgo noescape nixlgo_view_remote
#cgo nocallback nixlgo_view_remote
#cgo noescape nixlgo_view_release
#cgo nocallback nixlgo_view_release
#cgo noescape nixlgo_device
#cgo nocallback nixlgo_device
#cgo noescape nixlgo_notify
#cgo nocallback nixlgo_notify
#cgo noescape nixlgo_inbox_open
#cgo nocallback nixlgo_inbox_open
#cgo noescape nixlgo_inbox_clear
#cgo nocallback nixlgo_inbox_clear
#cgo noescape nixlgo_inbox_close
#cgo nocallback nixlgo_inbox_close
*/
import "C"

import (
	"encoding/binary"
	"runtime"
	"sync"
	"syscall"
	"unsafe"
)

// This file is the only one that knows C. Every array crosses once, every
// returned piece of memory is copied and freed in the function that got it.

// handle is a pointer of the library's, kept as a number so that Go neither follows nor copies it.
type handle = uint64

// The Go structs that cross in arrays are the C structs, and the Go constants the C constants.
var (
	_ [unsafe.Sizeof(Desc{})]byte     = [unsafe.Sizeof(C.nixlgo_desc{})]byte{}
	_ [unsafe.Sizeof(pollItem{})]byte = [unsafe.Sizeof(C.nixlgo_poll_item{})]byte{}
	_ [unsafe.Sizeof(message{})]byte  = [unsafe.Sizeof(C.nixlgo_message{})]byte{}
	_                                 = [1]struct{}{}[unsafe.Offsetof(Desc{}.Addr)-unsafe.Offsetof(C.nixlgo_desc{}.addr)]
	_                                 = [1]struct{}{}[unsafe.Offsetof(Desc{}.Len)-unsafe.Offsetof(C.nixlgo_desc{}.len)]
	_                                 = [1]struct{}{}[unsafe.Offsetof(Desc{}.Dev)-unsafe.Offsetof(C.nixlgo_desc{}.dev)]
	_                                 = [1]struct{}{}[unsafe.Offsetof(pollItem{}.req)-unsafe.Offsetof(C.nixlgo_poll_item{}.req)]
	_                                 = [1]struct{}{}[unsafe.Offsetof(pollItem{}.status)-unsafe.Offsetof(C.nixlgo_poll_item{}.status)]
	_                                 = [1]struct{}{}[unsafe.Offsetof(message{}.data)-unsafe.Offsetof(C.nixlgo_message{}.data)]
	_                                 = [1]struct{}{}[unsafe.Offsetof(message{}.fromLen)-unsafe.Offsetof(C.nixlgo_message{}.from_len)]
	_                                 = [1]struct{}{}[unsafe.Offsetof(message{}.len)-unsafe.Offsetof(C.nixlgo_message{}.len)]

	_ = [1]struct{}{}[StatusInProgress-C.NX_IN_PROG]
	_ = [1]struct{}{}[StatusInvalidParam-C.NX_INVALID_PARAM]
	_ = [1]struct{}{}[StatusBackend-C.NX_BACKEND]
	_ = [1]struct{}{}[StatusInvalidState-C.NX_INVALID_STATE]
	_ = [1]struct{}{}[StatusException-C.NX_EXCEPTION]
	_ = [1]struct{}{}[StatusNoTelemetry-C.NX_NO_TELEMETRY]
	_ = [1]struct{}{}[StatusNotFound-C.NX_NOT_FOUND]
	_ = [1]struct{}{}[statusNoMemory-C.NIXLGO_NO_MEMORY]
	_ = [1]struct{}{}[statusGarbled-C.NIXLGO_GARBLED]
	_ = [1]struct{}{}[statusIndex-C.NIXLGO_INDEX]
	_ = [1]struct{}{}[statusLacks-C.NIXLGO_LACKS]
	_ = [1]struct{}{}[VRAM-C.NX_MEM_VRAM]
	_ = [1]struct{}{}[Block-C.NX_MEM_BLOCK]
	_ = [1]struct{}{}[Object-C.NX_MEM_OBJECT]
	_ = [1]struct{}{}[File-C.NX_MEM_FILE]
	_ = [1]struct{}{}[Write-C.NX_OP_WRITE]
)

// cstr gives a name that ends in NUL (see cname) to C for the length of one call.
func cstr(name []byte) *C.char { return (*C.char)(unsafe.Pointer(unsafe.SliceData(name))) }

func cdescs(d []Desc) *C.nixlgo_desc { return (*C.nixlgo_desc)(unsafe.Pointer(unsafe.SliceData(d))) }

func cindices(i []int32) *C.int32_t { return (*C.int32_t)(unsafe.Pointer(unsafe.SliceData(i))) }

func cflag(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

// rawLoad fills the function table. The caller holds the loader's lock.
func rawLoad(path string) (outcome int, message string) {
	text := make([]byte, 1024)
	outcome = int(C.nixlgo_load(cstr(cname(path)), cstr(text), C.size_t(len(text))))
	return outcome, C.GoString(cstr(text))
}

// rawMap returns zeroed memory that the Go heap does not know.
func rawMap(size int) ([]byte, error) {
	var p unsafe.Pointer
	if e := C.nixlgo_map(C.size_t(size), &p); e != 0 {
		return nil, syscall.Errno(e)
	}
	return unsafe.Slice((*byte)(p), size), nil
}

func rawUnmap(m []byte) error {
	if e := C.nixlgo_unmap(unsafe.Pointer(unsafe.SliceData(m)), C.size_t(len(m))); e != 0 {
		return syscall.Errno(e)
	}
	return nil
}

func functionName(i int) string { return C.GoString(C.nixlgo_function_name(C.int(i))) }

func rawMissing() []string {
	var names []string
	for i := 0; ; i++ {
		name := functionName(i)
		if name == "" {
			return names
		}
		if C.nixlgo_function_missing(C.int(i)) != 0 {
			names = append(names, name)
		}
	}
}

func rawAgentCreate(name []byte, listen bool, port int, progressMicros, listenMicros uint64, telemetry bool) (h handle, s Status) {
	s = Status(C.nixlgo_agent_create(cstr(name), cflag(listen), C.int(port), C.uint64_t(progressMicros),
		C.uint64_t(listenMicros), cflag(telemetry), (*C.uint64_t)(&h)))
	return h, s
}

func rawAgentDestroy(agent handle) Status { return Status(C.nixlgo_agent_destroy(C.uint64_t(agent))) }

// unpack copies the packed fields and frees the C buffer.
func unpack(b *C.nixlgo_bytes) []string {
	defer C.nixlgo_bytes_free(b)
	packed := unsafe.Slice((*byte)(unsafe.Pointer(b.data)), int(b.len))
	var fields []string
	for len(packed) > 0 {
		n := binary.NativeEndian.Uint32(packed)
		fields = append(fields, string(packed[4:4+n]))
		packed = packed[4+n:]
	}
	return fields
}

func rawPlugins(agent handle) ([]string, Status) {
	var b C.nixlgo_bytes
	s := Status(C.nixlgo_plugins(C.uint64_t(agent), &b))
	return unpack(&b), s
}

// rawPluginParams returns key, value, key, value, … and the memory types as a bit set.
func rawPluginParams(agent handle, plugin []byte) (pairs []string, mems uint64, s Status) {
	var b C.nixlgo_bytes
	s = Status(C.nixlgo_plugin_params(C.uint64_t(agent), cstr(plugin), &b, (*C.uint64_t)(&mems)))
	return unpack(&b), mems, s
}

func rawBackendParams(agent, backend handle) (pairs []string, mems uint64, s Status) {
	var b C.nixlgo_bytes
	s = Status(C.nixlgo_backend_params(C.uint64_t(agent), C.uint64_t(backend), &b, (*C.uint64_t)(&mems)))
	return unpack(&b), mems, s
}

// rawBackendCreate takes the parameters as key NUL value NUL.
func rawBackendCreate(agent handle, plugin, pairs []byte, pairCount int) (h handle, s Status) {
	s = Status(C.nixlgo_backend_create(C.uint64_t(agent), cstr(plugin), cstr(pairs), C.size_t(pairCount), (*C.uint64_t)(&h)))
	return h, s
}

func rawBackendDestroy(backend handle) Status {
	return Status(C.nixlgo_backend_destroy(C.uint64_t(backend)))
}

func rawRegister(agent handle, r *region) Status {
	return withRegion(r, func(c *C.nixlgo_region) C.int { return C.nixlgo_register(C.uint64_t(agent), c) })
}

func rawDeregister(agent handle, r *region) Status {
	return withRegion(r, func(c *C.nixlgo_region) C.int { return C.nixlgo_deregister(C.uint64_t(agent), c) })
}

func withRegion(r *region, call func(*C.nixlgo_region) C.int) Status {
	var pin runtime.Pinner // the struct holds Go pointers for the length of the call
	defer pin.Unpin()
	c := C.nixlgo_region{
		mem:           C.uint64_t(r.mem),
		desc:          C.nixlgo_desc{addr: C.uint64_t(r.Addr), len: C.uint64_t(r.Len), dev: C.uint64_t(r.Dev)},
		meta_len:      C.size_t(len(r.meta)),
		backend_count: C.size_t(len(r.backends)),
	}
	if len(r.meta) > 0 {
		pin.Pin(unsafe.SliceData(r.meta))
		c.meta = unsafe.Pointer(unsafe.SliceData(r.meta))
	}
	if len(r.backends) > 0 {
		pin.Pin(unsafe.SliceData(r.backends))
		c.backends = (*C.uint64_t)(unsafe.SliceData(r.backends))
	}
	return Status(call(&c))
}

func rawLocalMetadata(agent handle) ([]byte, Status) {
	var data unsafe.Pointer
	var n C.size_t
	s := Status(C.nixlgo_local_md(C.uint64_t(agent), &data, &n))
	return takeBytes(data, n), s
}

// takeBytes copies memory that the library returned, and frees it.
func takeBytes(data unsafe.Pointer, n C.size_t) []byte {
	if data == nil {
		return nil
	}
	defer C.nixlgo_free(data)
	return append([]byte(nil), unsafe.Slice((*byte)(data), int(n))...)
}

func rawLoadMetadata(agent handle, blob []byte) (name string, s Status) {
	var c *C.char
	s = Status(C.nixlgo_load_md(C.uint64_t(agent), unsafe.Pointer(unsafe.SliceData(blob)), C.size_t(len(blob)), &c))
	if c == nil {
		return "", s
	}
	defer C.nixlgo_free(unsafe.Pointer(c))
	return C.GoString(c), s
}

func rawInvalidate(agent handle, remote []byte) Status {
	return Status(C.nixlgo_invalidate_md(C.uint64_t(agent), cstr(remote)))
}

func rawCheck(agent handle, remote []byte, mem MemType, descs []Desc) Status {
	s := Status(C.nixlgo_check_md(C.uint64_t(agent), cstr(remote), C.uint32_t(mem), cdescs(descs), C.size_t(len(descs))))
	if s == StatusBackend { // what libraries before 1.5.0 say instead
		return StatusNotFound
	}
	return s
}

func rawConnect(agent handle, remote []byte, via handle) Status {
	return Status(C.nixlgo_connect(C.uint64_t(agent), cstr(remote), C.uint64_t(via)))
}

func rawPartialMetadata(agent handle, mem MemType, descs []Desc) ([]byte, Status) {
	var data unsafe.Pointer
	var n C.size_t
	s := Status(C.nixlgo_partial_md(C.uint64_t(agent), C.uint32_t(mem), cdescs(descs), C.size_t(len(descs)), &data, &n))
	return takeBytes(data, n), s
}

func rawSendMetadata(agent handle, ip []byte, port uint16) Status {
	return Status(C.nixlgo_send_md(C.uint64_t(agent), cstr(ip), C.uint16_t(port)))
}

func rawSendPartialMetadata(agent handle, mem MemType, descs []Desc, ip []byte, port uint16) Status {
	return Status(C.nixlgo_send_partial_md(C.uint64_t(agent), C.uint32_t(mem), cdescs(descs), C.size_t(len(descs)), cstr(ip), C.uint16_t(port)))
}

func rawFetchMetadata(agent handle, remote, ip []byte, port uint16) Status {
	return Status(C.nixlgo_fetch_md(C.uint64_t(agent), cstr(remote), cstr(ip), C.uint16_t(port)))
}

func rawInvalidateLocal(agent handle, ip []byte, port uint16) Status {
	return Status(C.nixlgo_invalidate_local_md(C.uint64_t(agent), cstr(ip), C.uint16_t(port)))
}

// rawQuery takes what names each descriptor as uint32 length and bytes. It
// returns for each "y", key, value, … or "n", and "" behind.
func rawQuery(agent, backend handle, mem MemType, descs []Desc, metas []byte) ([]string, Status) {
	var b C.nixlgo_bytes
	s := Status(C.nixlgo_query(C.uint64_t(agent), C.uint64_t(backend), C.uint32_t(mem), cdescs(descs), C.size_t(len(descs)),
		(*C.uint8_t)(unsafe.SliceData(metas)), &b))
	return unpack(&b), s
}

func rawPrepare(agent handle, owner []byte, mem MemType, descs []Desc) (h handle, s Status) {
	s = Status(C.nixlgo_prepare(C.uint64_t(agent), cstr(owner), C.uint32_t(mem), cdescs(descs), C.size_t(len(descs)), (*C.uint64_t)(&h)))
	return h, s
}

func rawListRelease(agent, list handle) Status {
	return Status(C.nixlgo_list_release(C.uint64_t(agent), C.uint64_t(list)))
}

// rawOptions are optional arguments.
type rawOptions struct {
	message, custom []byte
	notify, noMerge bool
	backend         handle
	pin             runtime.Pinner
}

// c returns the options for one call, behind which unpin follows; nil for nil.
// They hold Go pointers, which stay pinned until then.
func (o *rawOptions) c() *C.nixlgo_options {
	if o == nil {
		return nil
	}
	c := &C.nixlgo_options{
		message_len: C.size_t(len(o.message)),
		custom_len:  C.size_t(len(o.custom)),
		backend:     C.uint64_t(o.backend),
		notify:      cflag(o.notify),
		skip_merge:  cflag(o.noMerge),
	}
	if len(o.message) > 0 {
		o.pin.Pin(unsafe.SliceData(o.message))
		c.message = unsafe.Pointer(unsafe.SliceData(o.message))
	}
	if len(o.custom) > 0 {
		o.pin.Pin(unsafe.SliceData(o.custom))
		c.custom = unsafe.Pointer(unsafe.SliceData(o.custom))
	}
	return c
}

func (o *rawOptions) unpin() {
	if o != nil {
		o.pin.Unpin()
	}
}

// rawMake makes a request and, with post, posts it: then out.status is what the post answered.
func rawMake(agent handle, op Op, l *list, li []int32, r *list, ri []int32, o *rawOptions, post bool) (out pollItem) {
	defer o.unpin()
	C.nixlgo_make(C.uint64_t(agent), C.uint32_t(op), C.uint64_t(l.h), cindices(li), C.int32_t(l.n), C.uint64_t(r.h), cindices(ri),
		C.int32_t(r.n), C.size_t(len(li)), o.c(), cflag(post), (*C.nixlgo_poll_item)(unsafe.Pointer(&out)))
	return out
}

// rawCreate makes a request of two lists of equal length.
func rawCreate(agent handle, op Op, localMem MemType, local []Desc, remoteMem MemType, remote []Desc, owner []byte, o *rawOptions) (h handle, s Status) {
	defer o.unpin()
	s = Status(C.nixlgo_create(C.uint64_t(agent), C.uint32_t(op), C.uint32_t(localMem), cdescs(local), C.uint32_t(remoteMem), cdescs(remote),
		C.size_t(len(local)), cstr(owner), o.c(), (*C.uint64_t)(&h)))
	return h, s
}

func rawTelemetry(agent, req handle) (t rawTimes, s Status) {
	var c C.nixlgo_times
	s = Status(C.nixlgo_telemetry(C.uint64_t(agent), C.uint64_t(req), &c))
	return rawTimes{uint64(c.start_us), uint64(c.post_us), uint64(c.transfer_us), uint64(c.bytes), uint64(c.descs)}, s
}

func rawTransferBackend(agent, req handle) (pairs []string, mems uint64, s Status) {
	var b C.nixlgo_bytes
	s = Status(C.nixlgo_transfer_backend(C.uint64_t(agent), C.uint64_t(req), &b, (*C.uint64_t)(&mems)))
	return unpack(&b), mems, s
}

func rawViewLocal(agent handle, mem MemType, descs []Desc, o *rawOptions) (h handle, s Status) {
	defer o.unpin()
	s = Status(C.nixlgo_view_local(C.uint64_t(agent), C.uint32_t(mem), cdescs(descs), C.size_t(len(descs)), o.c(), (*C.uint64_t)(&h)))
	return h, s
}

// rawViewRemote takes the owners' names, each with NUL behind; an empty one is a placeholder.
func rawViewRemote(agent handle, mem MemType, descs []Desc, owners []byte, o *rawOptions) (h handle, s Status) {
	defer o.unpin()
	s = Status(C.nixlgo_view_remote(C.uint64_t(agent), C.uint32_t(mem), cdescs(descs), C.size_t(len(descs)), cstr(owners), o.c(), (*C.uint64_t)(&h)))
	return h, s
}

func rawViewRelease(agent, view handle) Status {
	return Status(C.nixlgo_view_release(C.uint64_t(agent), C.uint64_t(view)))
}

// rawPost posts item.req. The item lies on the heap.
func rawPost(agent handle, item *pollItem) Status {
	C.nixlgo_post(C.uint64_t(agent), (*C.nixlgo_poll_item)(unsafe.Pointer(item)))
	return Status(item.status)
}

func rawPoll(agent handle, items []pollItem) {
	C.nixlgo_poll(C.uint64_t(agent), (*C.nixlgo_poll_item)(unsafe.Pointer(unsafe.SliceData(items))), C.size_t(len(items)))
}

func rawRelease(agent, req handle) Status {
	return Status(C.nixlgo_release(C.uint64_t(agent), C.uint64_t(req)))
}

func rawEstimate(agent, req handle) (micros, margin int64, s Status) {
	s = Status(C.nixlgo_estimate(C.uint64_t(agent), C.uint64_t(req), (*C.int64_t)(&micros), (*C.int64_t)(&margin)))
	return micros, margin, s
}

var device sync.Mutex

func rawDevice(addr uint64) (pointerInfo, error) {
	device.Lock()
	defer device.Unlock()
	var c C.nixlgo_pointer
	switch code := int(C.nixlgo_device(C.uint64_t(addr), &c)); code {
	case 0:
		return pointerInfo{c.device != 0, int(c.ordinal), uint64(c.start), uint64(c.size)}, nil
	case C.NIXLGO_NO_DRIVER:
		return pointerInfo{}, errNoDriver
	default:
		return pointerInfo{}, cudaError(C.GoString(c.call), code)
	}
}

// rawNotify sends through the backend via, or any for 0.
func rawNotify(agent handle, remote, message []byte, via handle) Status {
	return Status(C.nixlgo_notify(C.uint64_t(agent), cstr(remote), unsafe.Pointer(unsafe.SliceData(message)), C.size_t(len(message)), C.uint64_t(via)))
}

// inbox is the C side of an agent's notifications.
type inbox struct{ c *C.nixlgo_inbox }

func (b *inbox) open() Status {
	if b.c = C.nixlgo_inbox_open(); b.c == nil {
		return statusNoMemory
	}
	return StatusSuccess
}

// drain fetches what arrived: count messages with bytes of payload together, which stay until clear.
func (b *inbox) drain(agent, via handle) (count, bytes int, s Status) {
	C.nixlgo_inbox_drain(C.uint64_t(agent), C.uint64_t(uintptr(unsafe.Pointer(b.c))), C.uint64_t(via))
	return int(b.c.count), int(b.c.bytes), Status(b.c.status)
}

// message is one notification in memory of the library's; == nixlgo_message.
type message struct {
	from, data   *byte
	fromLen, len uint64
}

// messages returns those of the last drain. All of one sender have the same from.
func (b *inbox) messages() []message {
	return unsafe.Slice((*message)(unsafe.Pointer(b.c.messages)), int(b.c.count))
}

func (m *message) sender() []byte  { return unsafe.Slice(m.from, int(m.fromLen)) }
func (m *message) payload() []byte { return unsafe.Slice(m.data, int(m.len)) }

func (b *inbox) clear() Status { return Status(C.nixlgo_inbox_clear(b.c)) }

func (b *inbox) close() { C.nixlgo_inbox_close(b.c) }
