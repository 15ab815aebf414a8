package rdma

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/nixlgo/nixlgo/lease"
)

// ErrConfig marks a configuration that NewWorker or ListenSideChannel refuses.
var ErrConfig = errors.New("invalid configuration")

// WorkerConfig configures one rank of an engine. Zero values take the documented default.
type WorkerConfig struct {
	Engine string // engine id, the same on every rank; required
	Rank   int    // tensor-parallel rank, 0…TPSize-1
	TPSize int    // tensor-parallel size; 0: 1
	KV     KV     // layout; required

	Lease   lease.Config // zero value: lease.DefaultConfig()
	MaxSeqs int          // max_num_seqs, for the default number of lease slots

	// Compatibility is the hash that owner and reader must share: Compatibility.Hash for vLLM's, or any string that two
	// engines share. Empty: a hash of KV.Heads alone, for the rest of the layout is compared field by field.
	Compatibility string
	// AnyCompatibility reads from owners with another hash (vLLM's enforce_handshake_compat=false).
	AnyCompatibility bool
	// Key is shared by engines that are to deal with each other only: handshakes prove it both ways, seal what they tell, and
	// fail with ErrKey otherwise. It is at least 16 bytes that cannot be guessed; nil: everybody is taken at his word. vLLM has
	// no such key. The side channel needs it as well, see SideChannel.RequireKey.
	Key []byte
	// HoldOnly renews and releases leases of owners of any layout and hash, on every rank of theirs, and reads nothing: pulls
	// are refused as invalid.
	HoldOnly bool

	// Directory is asked for the metadata of other engines before their side channels are; nil: there is none. The side channel
	// is asked for what is not listed, and when the directory does not answer in half of HandshakeTimeout. A connection made by
	// a listing is made anew when that changes. A directory does not tell the owner's clock: a readback through one needs a
	// lease to verify. The worker neither publishes nor withdraws anything; see Worker.Reply.
	Directory Directory

	// Dial makes the connections to side channels, for those behind a proxy or in another network. Nil: net.Dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	HandshakeTimeout time.Duration // for one peer, all ranks; 0: a third of Lease.Duration, 1 s to 5 s, so that a lease outlives one that hangs
	ReadTimeout      time.Duration // from Step that brought a pull to its verdict; 0: 60 s
	CheckPoll        time.Duration // how long Step waits for slot READs it has just posted; 0: 200 µs

	// MaxBytesPerPeer and MaxReadsPerPeer bound what is read from one engine at a time: the bytes of all its ranks together,
	// and the requests. Later pulls wait in order of arrival and hold up no other engine's; ReadTimeout counts from their
	// arrival. A request of more bytes is read alone. 0: 1 GiB, which is 20 ms at 400 Gb/s, and 256, as vLLM's max_num_seqs.
	MaxBytesPerPeer int64
	MaxReadsPerPeer int

	// Zero writes zeros into n bytes of the KV memory at addr: what a local block holds beyond the owner's last block, which
	// happens where blocks have other sizes there. Step calls it before it posts the READ. Nil: those bytes stay as they were.
	Zero func(addr uint64, n int)

	Trace  Trace
	Logger *slog.Logger // nil: discards
}

// withDefaults validates c and fills in the defaults.
func (c WorkerConfig) withDefaults() (WorkerConfig, error) {
	bad := func(format string, a ...any) (WorkerConfig, error) {
		return c, fmt.Errorf("worker of engine %q: %w: "+format, append([]any{c.Engine, ErrConfig}, a...)...)
	}
	if c.Lease == (lease.Config{}) {
		c.Lease = lease.DefaultConfig()
	}
	c.TPSize = cmp.Or(c.TPSize, 1)
	c.HandshakeTimeout = cmp.Or(c.HandshakeTimeout, min(5*time.Second, max(time.Second, c.Lease.Duration/3)))
	c.Lease.MaxNotification = cmp.Or(c.Lease.MaxNotification, lease.DefaultMaxNotification)
	if c.Dial == nil {
		c.Dial = new(net.Dialer).DialContext
	}
	c.ReadTimeout = cmp.Or(c.ReadTimeout, time.Minute)
	c.CheckPoll = cmp.Or(c.CheckPoll, 200*time.Microsecond)
	c.MaxBytesPerPeer = cmp.Or(c.MaxBytesPerPeer, 1<<30)
	c.MaxReadsPerPeer = cmp.Or(c.MaxReadsPerPeer, 256)
	c.KV.Layout = cmp.Or(c.KV.Layout, "LBHNC")
	c.KV.Attention = cmp.Or(c.KV.Attention, "CPU_ATTN")
	c.KV.BlockTokens = cmp.Or(c.KV.BlockTokens, 16)
	c.KV.PhysicalPerLogical = cmp.Or(c.KV.PhysicalPerLogical, 1)
	c.KV.Regions = append([]Region(nil), c.KV.Regions...)
	c.Key = bytes.Clone(c.Key)
	c.Logger = logger(c.Logger)
	if err := c.Lease.Validate(); err != nil {
		return bad("%w", err)
	}
	switch {
	case c.Engine == "" || !utf8.ValidString(c.Engine):
		return bad("Engine is empty or no UTF-8, which kv_transfer_params could not carry")
	case c.Rank < 0 || c.Rank >= c.TPSize:
		return bad("Rank %d is not in 0…%d", c.Rank, c.TPSize-1)
	case c.Key != nil && len(c.Key) < minKey:
		return bad("Key is of %d bytes, want %d", len(c.Key), minKey)
	case len(c.KV.Regions) == 0 || len(c.KV.Regions) > maxRegions:
		return bad("KV has %d regions", len(c.KV.Regions))
	case c.HandshakeTimeout < 0 || c.ReadTimeout < 0 || c.CheckPoll < 0:
		return bad("a timeout is negative")
	case c.MaxBytesPerPeer < 0 || c.MaxReadsPerPeer < 0:
		return bad("MaxBytesPerPeer %d, MaxReadsPerPeer %d", c.MaxBytesPerPeer, c.MaxReadsPerPeer)
	}
	if h := c.KV.Heads; h < 0 || h > 0 && !divides(h, c.TPSize) {
		return bad("KV.Heads %d cannot be spread evenly over TPSize %d ranks", h, c.TPSize)
	}
	if c.KV.BlockTokens > 0 && c.KV.PhysicalPerLogical > maxTokens/c.KV.BlockTokens {
		return bad("KV.PhysicalPerLogical %d blocks of %d tokens", c.KV.PhysicalPerLogical, c.KV.BlockTokens)
	}
	_, heads := headsOf(cmp.Or(c.KV.Heads, c.TPSize), c.Rank, c.TPSize)
	total := 0
	for i := range c.KV.Regions {
		r := &c.KV.Regions[i]
		r.Replicated = r.Replicated || c.KV.Replicated
		if r.Group < SharedGroup || r.Group >= len(c.KV.Regions) {
			return bad("region %d has Group %d", i, r.Group)
		}
		if !r.Replicated && r.BlockLen%heads != 0 {
			return bad("region %d has blocks of %d bytes for %d heads", i, r.BlockLen, heads)
		}
		r.BlockStride = cmp.Or(r.BlockStride, r.BlockLen)
		total += r.Blocks
		if total > math.MaxInt32 {
			return bad("more than %d blocks in all regions", math.MaxInt32)
		}
	}
	if err := c.metadata().validate(); err != nil {
		return bad("%w", err)
	}
	if c.Lease.Slots == 0 {
		c.Lease.Slots = c.KV.Regions[0].Blocks/c.KV.PhysicalPerLogical + c.MaxSeqs
	}
	if c.Compatibility == "" {
		c.Compatibility = c.layoutHash()
	}
	return c, nil
}

// metadata is the part of the handshake metadata that follows from the configuration.
func (c *WorkerConfig) metadata() *Metadata {
	m := &Metadata{
		Engine: c.Engine, Device: c.KV.Device, Layout: c.KV.Layout, BlockSize: c.KV.BlockTokens, Attention: c.KV.Attention,
		PhysicalPerLogical: c.KV.PhysicalPerLogical, NumBlocks: c.KV.Regions[0].Blocks, DCPSize: 1, PCPSize: 1,
	}
	named := true
	for _, r := range c.KV.Regions {
		m.BaseAddrs = append(m.BaseAddrs, r.Base)
		m.BlockLens = append(m.BlockLens, r.BlockLen)
		m.BlockStrides = append(m.BlockStrides, r.BlockStride)
		m.RegionBlocks = append(m.RegionBlocks, r.Blocks)
		m.RegionGroups = append(m.RegionGroups, r.Group)
		m.RegionNames = append(m.RegionNames, r.Name)
		m.RegionMemTypes = append(m.RegionMemTypes, c.KV.MemType.String())
		named = named && r.Name != ""
	}
	if !named {
		m.RegionNames = nil
	}
	return m
}

func (c *WorkerConfig) layoutHash() string {
	sum := sha256.Sum256(fmt.Appendf(nil, "nixlgo/1 heads %d", c.KV.Heads))
	return hex.EncodeToString(sum[:])
}

func logger(l *slog.Logger) *slog.Logger {
	if l == nil {
		return slog.New(slog.DiscardHandler)
	}
	return l
}

// Epoch is the zero of the clock that side channels tell, on the clock of time.Now: what an engine gives its scheduler as
// lease.SchedulerConfig.Epoch, so that readers can place the deadlines that it exports.
func Epoch() time.Time { return epoch }

// epoch is the moment of 0 on CLOCK_MONOTONIC.
var epoch = func() time.Time {
	var ts unix.Timespec
	now := time.Now()
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return now // cannot fail on Linux with a valid clock id
	}
	return now.Add(-time.Duration(ts.Nano()))
}()

// monotonic is the time on CLOCK_MONOTONIC in seconds: Python's perf_counter on Linux, which vLLM's reader expects.
func monotonic() float64 { return time.Since(epoch).Seconds() }
