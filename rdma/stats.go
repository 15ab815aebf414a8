package rdma

import (
	"errors"
	"io"
	"net"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma/zmtp"
)

// WorkerStats counts what a Worker did since it was made. StatsBounds has the bounds of its histograms.
type WorkerStats struct {
	Steps int64

	// Block READs, one per request and owner rank. The histograms are of those that completed.
	Reads           int64           // posted
	ReadsLost       int64           // failed because the peer is gone, or the transport to it
	ReadsFailed     int64           // failed for another reason, some before they were posted
	BytesRead       int64           // of those that completed
	ReadTime        lease.Histogram // seconds from the post to the step that sees the end
	PostTime        lease.Histogram // seconds that the post itself took
	ReadSize        lease.Histogram // bytes
	ReadDescriptors lease.Histogram // pairs of local and remote memory, before NIXL joins neighbours

	// Slot READs, one for all requests of a step and owner rank.
	Checks       int64 // posted
	ChecksLost   int64
	ChecksFailed int64
	CheckTime    lease.Histogram // seconds from the post to the step that sees the end

	// Pulls by verdict.
	Verified     int64 // received after a check
	Unverified   int64 // received without one (verification off)
	Lapsed       int64 // refused because a slot held another nonce
	Unverifiable int64 // refused because they could not be checked

	HandshakeTime    lease.Histogram        // seconds, of those that succeeded
	HandshakesFailed [handshakeCauses]int64 // by HandshakeCause
	HeartbeatsSent   int64                  // messages
	NotifyLost       int64                  // heartbeats and read-completes not sent because the peer is gone
	NotifyFailed     int64                  // not sent for another reason

	Pulls   int // waiting, being read, checked, or in quarantine now
	Waiting int // of those, waiting for a handshake or for room (MaxBytesPerPeer, MaxReadsPerPeer)

	// Engines that this rank knows now: connected, not connected, with a handshake under way, and lost with a READ still active.
	Peers, PeersIdle, PeersConnecting, PeersBroken int
	PeersEvicted                                   int64 // forgotten because they were not used for Lease.EngineTTL

	Leases lease.TableStats
}

// Bounds are the bounds of the histograms of WorkerStats. The first four are vLLM's.
type Bounds struct {
	ReadTime, PostTime, ReadSize, ReadDescriptors []float64

	CheckTime, HandshakeTime []float64
}

// StatsBounds returns the bounds of the histograms of WorkerStats.
func StatsBounds() Bounds {
	return Bounds{ReadTime: clone(postSeconds[1:]), PostTime: clone(postSeconds[:]), ReadSize: clone(sizeBytes[:]),
		ReadDescriptors: clone(descriptorCounts[:]), CheckTime: clone(checkSeconds[:]), HandshakeTime: clone(postSeconds[1:])}
}

func clone(b []float64) []float64 { return append([]float64(nil), b...) }

var (
	postSeconds      = [...]float64{.001, .005, .01, .025, .05, .075, .1, .2, .3, .5, .75, 1, 5}
	sizeBytes        = [...]float64{1 << 11, 1 << 13, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 25, 1 << 27, 1 << 29, 1 << 31, 1 << 33}
	descriptorCounts = [...]float64{10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000}
	checkSeconds     = [...]float64{.00001, .000025, .00005, .0001, .00025, .0005, .001, .0025, .005, .01, .05, .1, 1, 5}
)

// HandshakeCause says why a handshake failed.
type HandshakeCause uint8

// The causes of a failed handshake.
const (
	// HandshakeUnreachable: no connection: refused, no route, a host name that does not resolve.
	HandshakeUnreachable HandshakeCause = iota
	// HandshakeTimeout: no connection or no answer in time.
	HandshakeTimeout
	// HandshakeProtocol: whoever listens there is no side channel, or ends the connection instead of an answer.
	HandshakeProtocol
	// HandshakeIncompatible: another compatibility hash, or KV caches that cannot be paired.
	HandshakeIncompatible
	// HandshakeEngine: another engine answers at the address.
	HandshakeEngine
	// HandshakeKey: one side has no key, or another one.
	HandshakeKey
	// HandshakeTransport: NIXL does not take the owner's metadata, or cannot reach it.
	HandshakeTransport
	// HandshakeOther is none of the above.
	HandshakeOther
	handshakeCauses
)

var handshakeCauseNames = [...]string{"unreachable", "timeout", "protocol", "incompatible", "engine", "key", "transport", "other"}

func (c HandshakeCause) String() string { return handshakeCauseNames[min(c, HandshakeOther)] }

// errEngine marks an address at which another engine answers.
var errEngine = errors.New("another engine answers")

// HandshakeCauseOf maps an error of a handshake to its cause.
func HandshakeCauseOf(err error) HandshakeCause {
	var (
		network   net.Error
		dialed    *net.OpError
		transport *nixl.Error
	)
	switch {
	case errors.As(err, &transport):
		return HandshakeTransport
	case errors.Is(err, ErrCompatibility), errors.Is(err, errShape):
		return HandshakeIncompatible
	case errors.Is(err, ErrKey):
		return HandshakeKey
	case errors.Is(err, errEngine):
		return HandshakeEngine
	case errors.Is(err, ErrWire), errors.Is(err, zmtp.ErrProtocol), errors.Is(err, zmtp.ErrRefused):
		return HandshakeProtocol
	case errors.As(err, &network) && network.Timeout(): // context.DeadlineExceeded is one
		return HandshakeTimeout
	case errors.As(err, &dialed) && dialed.Op != "dial", errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return HandshakeProtocol
	case errors.As(err, &network):
		return HandshakeUnreachable
	}
	return HandshakeOther
}

// lost reports whether a READ or a notification failed with its peer, or with the transport to it, or since the fabric has dropped
// the peer.
func lost(err error) bool {
	return errors.Is(err, nixl.ErrPeer) || errors.Is(err, nixl.ErrStale) || errors.Is(err, nixl.ErrNotFound)
}

// countFailed counts a READ, of slots or of blocks, that failed or could not be made.
func (s *WorkerStats) countFailed(check bool, err error) {
	switch gone := lost(err); {
	case check && gone:
		s.ChecksLost++
	case check:
		s.ChecksFailed++
	case gone:
		s.ReadsLost++
	default:
		s.ReadsFailed++
	}
}

// countUnsent counts a notification that the fabric did not take.
func (s *WorkerStats) countUnsent(err error) {
	if lost(err) {
		s.NotifyLost++
	} else {
		s.NotifyFailed++
	}
}
