package rdma

import (
	"bytes"
	"cmp"
	"context"
	"crypto/hmac"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/nixlgo/nixlgo/rdma/zmtp"
)

// The side channel: a reader asks an owner's ZMQ ROUTER for the metadata of one rank at a time
// (vllm-wire.md section 1; vLLM 0.32 and 0.33).

const askName = "get_meta_msg"

// rankID names one rank of an engine in a handshake request.
type rankID struct{ pp, tp int }

func appendAsk(b, name []byte, r rankID) []byte {
	b = msgp.AppendBytes(msgp.AppendArrayHeader(b, 3), name)
	return appendInt(appendInt(b, r.pp), r.tp)
}

// parseAsk takes requests of three elements (name, pp, tp) and of four (name, pp, pcp, tp: vLLM's main in 2026). A name
// of type str is taken too, as vLLM's owner does.
func parseAsk(b []byte) (name []byte, r rankID, err error) {
	bad := func(format string, a ...any) ([]byte, rankID, error) {
		return nil, rankID{}, fmt.Errorf("%w: request: "+format, append([]any{ErrWire}, a...)...)
	}
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return bad("%w", err)
	}
	if n != 3 && n != 4 {
		return bad("array of %d elements, want 3 or 4", n)
	}
	if msgp.NextType(b) == msgp.StrType {
		name, b, err = msgp.ReadStringZC(b)
	} else {
		name, b, err = msgp.ReadBytesZC(b)
	}
	if err != nil {
		return bad("name: %w", err)
	}
	if string(name) != askName && !bytes.HasPrefix(name, []byte(sealedName)) {
		return bad("name %.40q, want %q", name, askName)
	}
	v := make([]int, n-1)
	for i := range v {
		if v[i], b, err = readInt(b); err != nil {
			return bad("rank: %w", err)
		}
	}
	if len(b) > 0 {
		return bad("%d bytes after the array", len(b))
	}
	if n == 4 && v[1] != 0 {
		return bad("pcp rank %d, and this engine has no context parallelism in prefill", v[1])
	}
	return name, rankID{pp: v[0], tp: v[len(v)-1]}, nil
}

// appendReply encodes vLLM's NixlHandshakePayload. The metadata is nested as bytes so that a reader can report another
// hash before it meets keys that it does not know. With a key, which vLLM has none of, it carries a proof of that.
func appendReply(b []byte, hash string, m *Metadata, rank rankID, key []byte) []byte {
	n, meta := uint32(2), appendMetadata(nil, m)
	if key != nil {
		n++
	}
	b = msgp.AppendMapHeader(b, n)
	b = msgp.AppendString(msgp.AppendString(b, "compatibility_hash"), hash)
	b = msgp.AppendBytes(msgp.AppendString(b, "agent_metadata_bytes"), meta)
	if key != nil {
		b = msgp.AppendBytes(msgp.AppendString(b, keyProof), proof(key, "owner", rank.bytes(), []byte(hash), meta))
	}
	return b
}

// expected is what a reader asks of a reply; the zero value takes any.
type expected struct {
	hash string // another one is refused before the metadata is decoded
	key  []byte // a reply without its proof is refused before all else
}

// Reply is an owner rank's answer to a handshake request.
type Reply struct {
	Hash     string        // compatibility hash, hex SHA-256
	Metadata *Metadata     // nil when the hash was refused
	Clock    float64       // owner's monotonic clock when it answered, seconds; unrelated to the reader's
	RTT      time.Duration // time from request to reply
	// Offset is the owner's clock minus CLOCK_MONOTONIC here, in seconds; it is off by at most RTT/2.
	Offset float64

	sent, received time.Time
}

// parseReply decodes the two frames of a rank's reply.
func parseReply(frames [][]byte, rank rankID, want expected) (*Reply, error) {
	if isRefusal(frames) {
		return nil, fmt.Errorf("%w: the owner has another one than this engine, or none", ErrKey)
	}
	if len(frames) != 2 {
		return nil, fmt.Errorf("%w: reply of %d frames, want 2", ErrWire, len(frames))
	}
	clock, err := parseClock(frames[1])
	if err != nil {
		return nil, fmt.Errorf("%w: clock frame: %w", ErrWire, err)
	}
	r, err := parsePayload(frames[0], rank, want)
	if err != nil {
		return nil, err
	}
	r.Clock = clock
	return r, nil
}

// parsePayload decodes what Worker.Reply encodes, as parseReply does.
func parsePayload(payload []byte, rank rankID, want expected) (*Reply, error) {
	r := &Reply{}
	var meta, mac []byte
	err := parseMap(payload, func(key string, b []byte) (rest []byte, err error) {
		switch key {
		case "compatibility_hash":
			r.Hash, rest, err = msgp.ReadStringBytes(b)
		case "agent_metadata_bytes":
			meta, rest, err = readBin(b)
		case keyProof:
			mac, rest, err = readBin(b)
		default:
			return msgp.Skip(b)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		return rest, nil
	})
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: reply: %w", ErrWire, err)
	case want.key != nil && !hmac.Equal(mac, proof(want.key, "owner", rank.bytes(), []byte(r.Hash), meta)):
		return nil, fmt.Errorf("%w: what the owner answers is not proved by ours", ErrKey)
	case r.Hash == "" || meta == nil:
		return nil, fmt.Errorf("%w: reply: compatibility_hash or agent_metadata_bytes is missing", ErrWire)
	case want.hash != "" && r.Hash != want.hash:
		return nil, fmt.Errorf("%w of the owner is %s, ours is %s: model, dtype, attention backend or version differ "+
			"(or set the hash of the peer, or turn the check off)", ErrCompatibility, r.Hash, want.hash)
	}
	r.Metadata, err = parseMetadata(meta)
	return r, err
}

func parseClock(b []byte) (v float64, err error) {
	v, rest, err := readNumber(b)
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("%d bytes too many", len(rest))
	}
	return v, err
}

// SideChannel answers handshake requests for every rank of one engine. Its methods are safe for concurrent use.
type SideChannel struct {
	listener net.Listener
	cancel   context.CancelFunc
	done     chan struct{}
	quiet    *quiet

	mu      sync.Mutex
	key     []byte // nil: everybody is answered
	replies map[rankID][]byte
	asked   int64
	bad     int64
}

// ListenSideChannel opens the side channel of an engine on host:port; an empty host is 127.0.0.1, and port 0 takes a free
// one. Without RequireKey nothing authenticates a reader, and who has the metadata can read the registered memory: bind it to
// a private network. A nil logger discards.
func ListenSideChannel(host string, port int, log *slog.Logger) (*SideChannel, error) {
	host = cmp.Or(host, "127.0.0.1")
	if port < 0 || port > 65535 {
		return nil, fmt.Errorf("side channel: port %d is not in 0…65535", port)
	}
	addr := net.JoinHostPort(host, strconv.Itoa(port))
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("side channel: listen on %s (choose another port, or 0 for a free one): %w", addr, err)
	}
	return NewSideChannel(l, log), nil
}

// NewSideChannel is ListenSideChannel on a listener that is there, of socket activation or another network; Close closes it.
func NewSideChannel(l net.Listener, log *slog.Logger) *SideChannel {
	ctx, cancel := context.WithCancel(context.Background())
	log = logger(log)
	s := &SideChannel{listener: l, cancel: cancel, done: make(chan struct{}), quiet: newQuiet(log), replies: map[rankID][]byte{}}
	server := &zmtp.Server{Handler: s.answer, OnError: func(from net.Addr, err error) {
		s.mu.Lock()
		s.bad++
		s.mu.Unlock()
		s.quiet.Warn("side channel: dropped a request", hostOf(from), "error", err)
	}}
	go func() {
		defer close(s.done)
		if err := server.Serve(ctx, l); err != nil {
			log.Error("side channel stopped: no new reader can connect", "address", l.Addr().String(), "error", err)
		}
	}()
	return s
}

// hostOf is the address without the port, which is another one for each connection; "" for a nil one.
func hostOf(a net.Addr) string {
	if t, ok := a.(*net.TCPAddr); ok {
		return t.IP.String()
	}
	return ""
}

// Port is the bound TCP port, 0 if it is not TCP.
func (s *SideChannel) Port() int {
	if a, ok := s.listener.Addr().(*net.TCPAddr); ok {
		return a.Port
	}
	return 0
}

// Serve publishes a worker's handshake reply; a later call for the same rank replaces it.
func (s *SideChannel) Serve(w *Worker) { s.ServeReply(w.cfg.Rank, w.Reply()) }

// ServeReply publishes the Reply of a worker that lives in another process; a later call for the same rank replaces it.
func (s *SideChannel) ServeReply(rank int, reply []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.replies[rankID{tp: rank}] = bytes.Clone(reply)
}

// RequireKey answers only those from now on who prove that they have the key of WorkerConfig.Key, and seals the answers. Call it
// before Serve. An empty key answers everybody.
func (s *SideChannel) RequireKey(key []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.key = nil
	if len(key) > 0 {
		s.key = bytes.Clone(key)
	}
}

// Reply is what the side channel of the engine answers for this rank, encoded: vLLM's NixlHandshakePayload.
func (w *Worker) Reply() []byte {
	return appendReply(nil, w.cfg.Compatibility, &w.meta, rankID{tp: w.cfg.Rank}, w.cfg.Key)
}

// SideChannelStats counts handshake requests since the side channel was opened.
type SideChannelStats struct {
	Answered int64 // requests answered
	Bad      int64 // malformed requests and connections, unknown ranks
}

// Stats returns the counts so far.
func (s *SideChannel) Stats() SideChannelStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return SideChannelStats{Answered: s.asked, Bad: s.bad}
}

// Close stops answering and waits for the connections to end.
func (s *SideChannel) Close() error {
	s.cancel()
	<-s.done
	s.quiet.Close()
	return nil
}

func (s *SideChannel) answer(_ context.Context, request [][]byte) ([][]byte, error) {
	if len(request) != 1 {
		return nil, fmt.Errorf("%w: request of %d frames, want 1", ErrWire, len(request))
	}
	name, r, err := parseAsk(request[0])
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.key != nil {
		err = admit(s.key, name, r)
	} else if string(name) != askName {
		err = fmt.Errorf("%w: a reader with one, and this engine has none", ErrKey)
	}
	if err != nil {
		s.bad++
		s.quiet.Warn("side channel: refused a reader", "", "error", err)
		return [][]byte{[]byte(refused)}, nil
	}
	reply, ok := s.replies[r]
	if !ok {
		return nil, fmt.Errorf("request for pp rank %d, tp rank %d, which this engine does not have", r.pp, r.tp)
	}
	s.asked++
	frames := [][]byte{reply, msgp.AppendFloat64(nil, monotonic())}
	if s.key != nil {
		frames = seal(s.key, name, r, frames)
	}
	return frames, nil
}

// dialer makes connections to side channels.
type dialer = func(ctx context.Context, network, address string) (net.Conn, error)

// ask performs the handshake with the given ranks over one connection and returns a reply per rank.
func ask(ctx context.Context, dial dialer, host string, port int, ranks []rankID, want expected) ([]*Reply, error) {
	if port < 1 || port > 65535 {
		return nil, fmt.Errorf("remote_port %d is not in 1…65535", port)
	}
	addr := net.JoinHostPort(host, strconv.Itoa(port))
	var c *zmtp.Client
	nc, err := dial(ctx, "tcp", addr)
	if err == nil {
		c, err = zmtp.NewClient(ctx, nc, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("side channel %s: %w", addr, hint(err))
	}
	defer c.Close()
	replies := make([]*Reply, len(ranks))
	for i, r := range ranks {
		name := []byte(askName)
		if want.key != nil {
			name = newName(want.key, r)
		}
		start, sent := time.Now(), monotonic()
		frames, err := c.Request(ctx, [][]byte{appendAsk(nil, name, r)})
		if err != nil {
			return nil, fmt.Errorf("side channel %s, pp rank %d, tp rank %d: %w", addr, r.pp, r.tp, hint(err))
		}
		received := monotonic()
		if want.key != nil {
			frames, err = open(want.key, name, r, frames)
		}
		if err == nil {
			replies[i], err = parseReply(frames, r, want)
		}
		if err != nil {
			return nil, fmt.Errorf("side channel %s, pp rank %d, tp rank %d: %w", addr, r.pp, r.tp, err)
		}
		replies[i].sent, replies[i].received = start, time.Now()
		replies[i].RTT = time.Duration((received - sent) * 1e9)
		replies[i].Offset = replies[i].Clock - (sent+received)/2
	}
	return replies, nil
}

// Probe performs the handshake with one rank of the engine at host:port and returns what it answers. It compares nothing:
// the hash and the engine id are the caller's to check.
//
// Errors: syscall.ECONNREFUSED and other network errors, zmtp.ErrProtocol for a peer that does not speak ZeroMQ, ErrWire for
// one that does not answer as a NixlConnector, ErrKey for one that answers those alone who have its key, the context's.
func Probe(ctx context.Context, host string, port, pp, tp int) (*Reply, error) {
	return ProbeWithKey(ctx, host, port, pp, tp, nil)
}

// ProbeWithKey is Probe of an engine that has a shared key, see WorkerConfig.Key. Nil: it has none.
func ProbeWithKey(ctx context.Context, host string, port, pp, tp int, key []byte) (*Reply, error) {
	replies, err := ask(ctx, new(net.Dialer).DialContext, host, port, []rankID{{pp, tp}}, expected{key: key})
	if err != nil {
		return nil, err
	}
	return replies[0], nil
}

// hint adds to an error of a connection what usually causes it.
func hint(err error) error {
	var (
		name   *net.DNSError
		dialed *net.OpError
		likely string
	)
	switch cause := HandshakeCauseOf(err); {
	case errors.As(err, &name):
		likely = "remote_host does not resolve here: let the owner advertise an address, in VLLM_NIXL_SIDE_CHANNEL_HOST"
	case errors.Is(err, syscall.ECONNREFUSED):
		likely = "nobody listens there: is the owner up, and is the port its VLLM_NIXL_SIDE_CHANNEL_PORT plus its data-parallel index?"
	case cause == HandshakeTimeout && errors.As(err, &dialed) && dialed.Op == "dial":
		likely = "a firewall, another network, or an address that is not the owner's VLLM_NIXL_SIDE_CHANNEL_HOST"
	case cause == HandshakeTimeout:
		likely = "the owner is stalled, has no such rank, or the port is not a NixlConnector side channel"
	case cause == HandshakeProtocol:
		likely = "the port is not a NixlConnector side channel, or the owner is shutting down"
	default:
		return err
	}
	return fmt.Errorf("%w (%s)", err, likely)
}
