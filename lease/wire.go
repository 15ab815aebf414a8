package lease

import (
	"bytes"
	"encoding/binary"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	// DefaultMaxNotification is the size cap of one notification in bytes.
	DefaultMaxNotification = 16 << 10

	// MaxReaders bounds the reader count N of a read-complete.
	MaxReaders = 4096

	minNotification = 64

	heartbeatPrefix     = "HB:"
	slotHeartbeatPrefix = "HB2:"
	pushPrefix          = "PUSH_REG:"

	// slotTargetSize: slot as uint32, nonce as uint64, little endian.
	slotTargetSize = 12

	// readCompleteTail is the longest that follows an id: ":4096:" and a nonce
	// of 16 digits.
	readCompleteTail = 6 + 16
)

// ReadComplete is a parsed read-complete: "<request>:<readers>" as vLLM sends
// it, or "<request>:<readers>:<nonce>". Request aliases the parsed bytes.
type ReadComplete struct {
	Request []byte
	Readers int
	Nonce   int64 // 0 when the message carries none
}

// AppendReadComplete appends "<request>:<readers>", and ":<nonce>" unless nonce
// is 0. readers is N, how many readers will notify the receiving rank.
func AppendReadComplete(dst []byte, request string, readers int, nonce int64) []byte {
	dst = append(dst, request...)
	dst = strconv.AppendInt(append(dst, ':'), int64(readers), 10)
	if nonce != 0 {
		dst = strconv.AppendInt(append(dst, ':'), nonce, 10)
	}
	return dst
}

// ParseReadComplete reads what AppendReadComplete writes. Ids may contain
// colons, so "a:2:3" has two readings: request "a" with nonce 3, and request
// "a:2" without one. It returns the first; a Table that holds no such lease
// tries the second.
func ParseReadComplete(payload []byte) (ReadComplete, error) {
	if rc, ok := parseWithNonce(payload); ok {
		return rc, nil
	}
	if rc, ok := parseWithoutNonce(payload); ok {
		return rc, nil
	}
	return ReadComplete{}, malformed(payload, "want <request>:<readers> or <request>:<readers>:<nonce>")
}

func parseWithNonce(payload []byte) (ReadComplete, bool) {
	head, nonce, ok := cutNumber(payload, MaxNonce)
	if !ok {
		return ReadComplete{}, false
	}
	head, n, ok := cutNumber(head, MaxReaders)
	if !ok {
		return ReadComplete{}, false
	}
	return ReadComplete{Request: head, Readers: int(n), Nonce: nonce}, true
}

func parseWithoutNonce(payload []byte) (ReadComplete, bool) {
	head, n, ok := cutNumber(payload, MaxReaders)
	return ReadComplete{Request: head, Readers: int(n)}, ok
}

// cutNumber splits "head:123" with a non-empty, valid head and a canonical
// number of 1 to max.
func cutNumber(b []byte, max int64) (head []byte, n int64, ok bool) {
	i := bytes.LastIndexByte(b, ':')
	if i < 1 || !utf8.Valid(b[:i]) {
		return nil, 0, false
	}
	digits := b[i+1:]
	if len(digits) == 0 || len(digits) > 16 || digits[0] == '0' {
		return nil, 0, false
	}
	for _, c := range digits {
		if c < '0' || c > '9' {
			return nil, 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return b[:i], n, n <= max
}

func malformed(payload []byte, want string) error {
	return &Error{Op: "parse notification " + strconv.QuoteToASCII(string(payload[:min(len(payload), 40)])), Detail: want, Err: ErrMalformed}
}

// AppendHeartbeat appends one "HB:" message, the ids of as many targets as fit
// into max bytes, and returns the targets that are left:
//
//	for len(targets) > 0 {
//		if msg, targets, err = AppendHeartbeat(msg[:0], targets, max); err != nil { … }
//		send(msg)
//	}
//
// max 0 means DefaultMaxNotification. An id that fits into no message is an
// error; rest then starts behind it.
func AppendHeartbeat(dst []byte, targets []Target, max int) (msg []byte, rest []Target, err error) {
	if max == 0 {
		max = DefaultMaxNotification
	}
	size := len(heartbeatPrefix)
	n := 0
	for ; n < len(targets); n++ {
		add := len(targets[n].Request)
		if n > 0 {
			add++
		}
		if size+add > max {
			break
		}
		size += add
	}
	if n == 0 {
		if len(targets) == 0 {
			return dst, nil, nil
		}
		return dst, targets[1:], invalid("heartbeat", targets[0].Request, "id of %d bytes does not fit into a notification of %d", len(targets[0].Request), max)
	}
	dst = append(dst, heartbeatPrefix...)
	for i, t := range targets[:n] {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, t.Request...)
	}
	return dst, targets[n:], nil
}

// AppendSlotHeartbeat is AppendHeartbeat for "HB2:", 12 bytes a target, to
// owners that offer it. Every target needs a slot; one without is an error, and
// rest then starts behind it.
func AppendSlotHeartbeat(dst []byte, targets []Target, max int) (msg []byte, rest []Target, err error) {
	if max == 0 {
		max = DefaultMaxNotification
	}
	if len(targets) == 0 {
		return dst, nil, nil
	}
	n := min(len(targets), (max-len(slotHeartbeatPrefix))/slotTargetSize)
	if n <= 0 {
		return dst, targets[1:], invalid("slot heartbeat", targets[0].Request, "does not fit into a notification of %d bytes", max)
	}
	mark := len(dst)
	dst = append(dst, slotHeartbeatPrefix...)
	for i, t := range targets[:n] {
		if t.Slot < 0 || t.Slot > math.MaxInt32 || t.Nonce < 1 || t.Nonce > MaxNonce {
			if i == 0 {
				return dst[:mark], targets[1:], invalid("slot heartbeat", t.Request, "has no lease slot, renew it by id")
			}
			return dst, targets[i:], nil
		}
		dst = binary.LittleEndian.AppendUint32(dst, uint32(t.Slot))
		dst = binary.LittleEndian.AppendUint64(dst, uint64(t.Nonce))
	}
	return dst, targets[n:], nil
}

// ValidateRequestID says whether notifications of at most max bytes can carry
// the id: not empty, valid UTF-8, no comma (it separates the ids of a
// heartbeat), no leading message name, short enough for a read-complete. max 0
// means DefaultMaxNotification. Ids may hold colons and spaces.
func ValidateRequestID(id string, max int) error {
	if max == 0 {
		max = DefaultMaxNotification
	}
	const op = "validate request id"
	shown := id[:min(len(id), 80)]
	switch {
	case id == "":
		return invalid(op, "", "is empty")
	case len(id) > max-readCompleteTail:
		return invalid(op, shown, "has %d bytes, notifications of %d carry at most %d", len(id), max, max-readCompleteTail)
	case strings.ContainsRune(id, ','):
		return invalid(op, shown, "contains a comma, which separates the ids of a heartbeat")
	case !utf8.ValidString(id):
		return invalid(op, shown, "is no valid UTF-8")
	}
	for _, prefix := range []string{heartbeatPrefix, slotHeartbeatPrefix, pushPrefix} {
		if strings.HasPrefix(id, prefix) {
			return invalid(op, shown, "starts with %q, which names another message", prefix)
		}
	}
	return nil
}
