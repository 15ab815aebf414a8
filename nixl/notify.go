package nixl

import (
	"math"
	"slices"
)

// Notification is a message that reached the agent.
type Notification struct {
	From    string // name of the agent that sent it, as that agent gives it
	Payload []byte // the caller's; the payloads of one drain share memory
}

// Notify sends a message to a peer. It neither waits nor confirms: a peer that
// is stopped or cut off silently looks alive for minutes. ErrNotFound says that
// the peer is unknown, ErrPeer that the transport reported it dead.
//
// Implements:
//
//	nixl_capi_gen_notif
func (a *Agent) Notify(remote string, msg []byte) error { return a.s.notify(remote, msg, 0) }

// notify goes through the backend via, or any for 0.
func (s *agent) notify(remote string, msg []byte, via handle) error {
	const op = "notify"
	if err := checkName(op, remote); err != nil {
		return err
	}
	if len(msg) > math.MaxInt32 {
		return invalid(op, "the message has %d bytes", len(msg))
	}
	if err := s.lock(op); err != nil {
		return err
	}
	defer s.mu.Unlock()
	var name []byte
	if p := s.peers[remote]; p != nil {
		name = p.cname
	} else {
		name = cname(remote)
	}
	switch st := rawNotify(s.h, name, msg, via); {
	case st >= 0:
		return nil
	case st == StatusBackend && via != 0:
		return viaError(op, remote, rawCheck(s.h, name, DRAM, nil))
	case st == StatusBackend && len(s.backends) > 0:
		return s.peerError(op, remote)
	default:
		return failed(op, remote, st)
	}
}

// viaError explains a backend error of a call that named the backend; known says
// whether the library knows the peer.
func viaError(op, remote string, known Status) error {
	if known == StatusNotFound {
		return failed(op, remote, known)
	}
	return &Error{Op: op, Remote: remote, Status: StatusBackend, Detail: "the backend carries no notifications, as those for files, or the peer is gone"}
}

const keepSenders = 4096 // names kept between drains

// Notifications appends to dst what arrived since the last call, each message
// once, and returns the extended slice. It costs one crossing, one more when
// something arrived, and allocates nothing when nothing did. What is not drained
// queues without bound in the library. Messages and an error can come together.
//
// Implements:
//
//	nixl_capi_get_notifs, nixl_capi_notif_map_size, nixl_capi_notif_map_get_agent_at,
//	nixl_capi_notif_map_get_notifs_size, nixl_capi_notif_map_get_notif, nixl_capi_notif_map_clear
func (a *Agent) Notifications(dst []Notification) ([]Notification, error) {
	return a.s.notifications(dst, 0)
}

// notifications drains the backend from, or all for 0.
func (s *agent) notifications(dst []Notification, from handle) ([]Notification, error) {
	const op = "get notifications"
	if err := s.lock(op); err != nil {
		return dst, err
	}
	defer s.mu.Unlock()
	count, size, st := s.inbox.drain(s.h, from)
	if count > 0 {
		dst = s.collect(slices.Grow(dst, count), size)
		if cleared := s.inbox.clear(); st >= 0 {
			st = cleared
		}
	}
	if st == StatusBackend && len(s.backends) == 0 {
		return dst, invalid(op, "the agent has no backend yet: call CreateBackend first")
	}
	if st == StatusBackend && from != 0 {
		return dst, &Error{Op: op, Status: st, Detail: "the backend carries no notifications"}
	}
	return dst, failed(op, "", st)
}

// collect copies the messages of a drain, for which dst has room, all payloads into one piece of memory.
func (s *agent) collect(dst []Notification, size int) []Notification {
	messages, payloads := s.inbox.messages(), make([]byte, size)
	var name string
	for i := range messages {
		m := &messages[i]
		if i == 0 || m.from != messages[i-1].from {
			name = s.sender(m.sender())
		}
		n := copy(payloads, m.payload())
		dst = dst[:len(dst)+1]
		d := &dst[len(dst)-1] // by field: a literal is built on the stack first, and read back before it is stored
		d.From = name
		d.Payload = payloads[:n:n]
		payloads = payloads[n:]
	}
	return dst
}

// sender returns the name as a string, the same one for each message of a sender.
func (s *agent) sender(name []byte) string {
	if known, ok := s.senders[string(name)]; ok {
		return known
	}
	if len(s.senders) >= keepSenders {
		clear(s.senders)
	}
	n := string(name)
	s.senders[n] = n
	return n
}
