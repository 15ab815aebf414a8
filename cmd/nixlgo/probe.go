package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/zmtp"
)

// probeConfig is the command line of probe.
type probeConfig struct {
	address string // as given
	host    string
	port    int
	tp, pp  int
	count   int
	hash    string
	engine  string
	read    bool
	bytes   int
	keyFile string
	key     []byte
	library string
	backend string
	timeout time.Duration
	format  format
}

func newProbe() *cobra.Command {
	var c probeConfig
	cmd := &cobra.Command{
		Use:   "probe tcp://host:port",
		Short: "Shake hands with a running instance and print what it offers",
		Long: "probe asks the side channel of a NixlConnector, vLLM's or nixlgo's, for the metadata that a reader gets, and prints it.\n" +
			"With --read it also reads blocks of the instance's KV cache, in a process of its own, and says over which transport.\n" +
			"Nothing is written at the instance, and no lease is taken or ended.\n\n" +
			"An instance with a shared key answers those alone who have it: --key-file.\n\n" +
			"Only rank 0 is asked unless --tp or --pp say that there are more: a request for a rank that does not exist ends the\n" +
			"side channel of vLLM up to 0.33 for good.",
		Example: "  nixlgo probe tcp://10.0.0.6:5600                    # engine, hash, geometry, lease slots, round trip\n" +
			"  nixlgo probe --read tcp://10.0.0.6:5600             # and how fast, over which transport\n" +
			"  nixlgo probe --hash 9b86b5… tcp://10.0.0.6:5600     # is it compatible with ours? exit code 1 if not",
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := c.check(args); err != nil {
				return usageError{fmt.Errorf("probe: %w", err)}
			}
			return c.run(cmd.Context(), cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.IntVar(&c.tp, "tp", 1, "tensor-parallel ranks to ask")
	f.IntVar(&c.pp, "pp", 1, "pipeline-parallel ranks to ask")
	f.IntVar(&c.count, "count", 3, "handshakes with each rank; the fastest gives round trip and clock offset")
	f.StringVar(&c.hash, "hash", "", "compatibility hash that is expected")
	f.StringVar(&c.engine, "engine", "", "engine id that is expected")
	f.BoolVar(&c.read, "read", false, "read blocks of every rank")
	f.IntVar(&c.bytes, "bytes", 16<<20, "how much --read reads, at least one block")
	keyFlag(f, &c.keyFile)
	libraryFlag(f, &c.library)
	f.StringVar(&c.backend, "backend", "UCX", "NIXL plugin for --read")
	f.DurationVar(&c.timeout, "timeout", 5*time.Second, "longest wait for one answer, and for one READ")
	formatFlags(f, &c.format, false)
	cmd.AddCommand(newProbeRead())
	cmd.Args = cobra.ArbitraryArgs // check says what is wrong with them
	return cmd
}

func (c *probeConfig) check(args []string) (err error) {
	if len(args) != 1 {
		return errors.New("name one instance, as in nixlgo probe tcp://127.0.0.1:5600")
	}
	c.address = args[0]
	if c.host, c.port, err = sideChannelAddress(c.address); err != nil {
		return err
	}
	const limit = 1024
	if c.key, err = readKey(c.keyFile); err != nil {
		return err
	}
	if c.timeout <= 0 {
		return fmt.Errorf("--timeout %v is not positive", c.timeout)
	}
	return checkBounds(bound{"tp", c.tp, 1, limit}, bound{"pp", c.pp, 1, limit}, bound{"count", c.count, 1, limit}, bound{"bytes", c.bytes, 1, math.MaxInt64})
}

// probeRank is what one rank answers.
type probeRank struct {
	PP, TP             int
	Agent              string    `json:"agent"`           // NIXL agent name
	AgentBytes         int       `json:"agent_bytes"`     // size of its NIXL metadata
	RTTSeconds         float64   `json:"rtt_s"`           // of the fastest handshake
	ClockOffsetSeconds float64   `json:"clock_offset_s"`  // the owner's monotonic clock minus this machine's
	ClockBoundSeconds  float64   `json:"clock_bound_s"`   // the offset is off by at most this
	Regions            int       `json:"regions"`         // layers
	Blocks             int       `json:"blocks"`          // per region
	BlockBytes         []int     `json:"block_bytes"`     // per region
	BlockStrides       []int     `json:"block_strides"`   // per region
	KVBytes            int       `json:"kv_bytes"`        // that readers can reach
	MemoryTypes        []string  `json:"memory_types"`    // distinct; empty: not stated
	Device             uint64    `json:"device"`          //
	LeaseSlots         int       `json:"lease_slots"`     // 0: reads cannot be verified
	SlotHeartbeats     bool      `json:"slot_heartbeats"` //
	Read               *probeRun `json:"read,omitempty"`
}

// probeReport is the object of --json.
type probeReport struct {
	Event    string `json:"event"` // probe
	OK       bool   `json:"ok"`
	Address  string `json:"address"`
	Failure  string `json:"failure,omitempty"` // a word of probeFailure
	Error    string `json:"error,omitempty"`
	Engine   string `json:"engine,omitempty"`
	Hash     string `json:"compatibility_hash,omitempty"`
	Layout   string `json:"kv_cache_layout,omitempty"`
	Backend  string `json:"attn_backend_name,omitempty"`
	Tokens   int    `json:"block_tokens,omitempty"` // per kernel block
	Physical int    `json:"physical_blocks_per_logical,omitempty"`
	DCP      int    `json:"dcp_size,omitempty"`
	PCP      int    `json:"pcp_size,omitempty"`

	Ranks []probeRank `json:"ranks,omitempty"`
}

// probeFailure says what went wrong in a word for programs and in a sentence for people.
type probeFailure struct {
	word string // address, refused, unreachable, timeout, protocol, handshake, key, rank, engine, hash, ranks, read
	err  error
}

func (f *probeFailure) Error() string { return f.err.Error() }
func (f *probeFailure) Unwrap() error { return f.err }

func failure(word, format string, a ...any) error {
	return &probeFailure{word, fmt.Errorf(format, a...)}
}

func (c *probeConfig) run(ctx context.Context, out io.Writer) error {
	r := probeReport{Event: "probe", Address: c.address}
	err := c.probe(ctx, &r)
	r.OK = err == nil
	if f, ok := errors.AsType[*probeFailure](err); ok {
		r.Failure, r.Error = f.word, f.Error()
	} else if err != nil {
		r.Failure, r.Error = "error", err.Error()
	}
	var werr error
	if c.format == formatJSON {
		werr = json.NewEncoder(out).Encode(r)
	} else {
		_, werr = io.WriteString(out, r.text())
	}
	if err == nil {
		err = werr
	}
	if err != nil {
		return fmt.Errorf("probe %s: %w", c.address, err)
	}
	return nil
}

// probe asks every rank, and reads from it when it is to.
func (c *probeConfig) probe(ctx context.Context, r *probeReport) error {
	for pp := range c.pp {
		for tp := range c.tp {
			reply, err := c.ask(ctx, pp, tp)
			if err != nil {
				return err
			}
			if err := c.note(r, pp, tp, reply); err != nil {
				return err
			}
			if c.read {
				run, err := c.readBlocks(ctx, reply)
				if err != nil {
					return failure("read", "the handshake with pp rank %d, tp rank %d is good, but reading its blocks failed: %w", pp, tp, err)
				}
				r.Ranks[len(r.Ranks)-1].Read = run
			}
		}
	}
	return nil
}

// ask shakes hands with a rank c.count times and returns the fastest reply.
func (c *probeConfig) ask(ctx context.Context, pp, tp int) (best *rdma.Reply, err error) {
	for range c.count {
		reply, err := c.askOnce(ctx, pp, tp)
		if err != nil {
			return nil, err
		}
		if best == nil || reply.RTT < best.RTT {
			best = reply
		}
	}
	return best, nil
}

func (c *probeConfig) askOnce(ctx context.Context, pp, tp int) (*rdma.Reply, error) {
	short, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	reply, err := rdma.ProbeWithKey(short, c.host, c.port, pp, tp, c.key)
	switch {
	case err == nil:
		return reply, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, rdma.ErrKey) && c.key == nil:
		return nil, failure("key", "%w: the instance answers those alone who have its key: give --key-file", err)
	case errors.Is(err, rdma.ErrKey):
		return nil, failure("key", "%w: the key of --key-file is not the instance's", err)
	case errors.Is(err, rdma.ErrWire):
		return nil, failure("handshake", "%w: the peer speaks ZeroMQ but does not answer as a NixlConnector of vLLM 0.32 or 0.33 or of nixlgo does", err)
	}
	if pp > 0 || tp > 0 { // rank 0 has answered
		return nil, failure("rank", "%w: there is no pp rank %d, tp rank %d, or it stalls (a request for a rank that it does not have ends the side "+
			"channel of vLLM up to 0.33 for good: restart it)", err, pp, tp)
	}
	if err := c.reach(ctx); err != nil {
		return nil, err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return nil, failure("timeout", "no answer in %v: another ZeroMQ service, or a stalled instance", c.timeout)
	}
	return nil, failure("handshake", "%w: the connection ended instead of an answer: not a NixlConnector", err)
}

// reach says why no rank can answer: nobody listens, or whoever does speaks something else. It returns nil when a ZeroMQ
// socket is there.
func (c *probeConfig) reach(ctx context.Context) error {
	short, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	addr := net.JoinHostPort(c.host, strconv.Itoa(c.port))
	z, err := zmtp.Dial(short, addr, 0)
	_, unresolved := errors.AsType[*net.DNSError](err)
	network, dialing := errors.AsType[*net.OpError](err)
	dialing = dialing && network.Op == "dial"
	switch {
	case err == nil:
		return z.Close()
	case ctx.Err() != nil:
		return ctx.Err()
	case unresolved:
		return failure("address", "%w: the host name does not resolve here", err)
	case errors.Is(err, syscall.ECONNREFUSED):
		return failure("refused", "%w: nobody listens there. Is the instance up (it listens once its KV cache is registered), and is the port "+
			"VLLM_NIXL_SIDE_CHANNEL_PORT plus its data-parallel index? Or the side channel of a vLLM up to 0.33 ended on a malformed request: "+
			"restart it", err)
	case dialing && short.Err() != nil:
		return failure("timeout", "no connection to %s in %v: a firewall, another network, or a wrong address", addr, c.timeout)
	case dialing:
		return failure("unreachable", "%w", err)
	case short.Err() != nil:
		return failure("timeout", "%s takes connections but said no ZeroMQ greeting in %v: it is another service, or its process is stopped", addr, c.timeout)
	}
	return failure("protocol", "%w: this is no side channel of a NixlConnector, which speaks ZeroMQ (ZMTP 3)", err)
}

// note adds a reply to the report and compares it with what was expected and with the other ranks.
func (c *probeConfig) note(r *probeReport, pp, tp int, reply *rdma.Reply) error {
	m := reply.Metadata
	if len(r.Ranks) > 0 && (r.Engine != m.Engine || r.Hash != reply.Hash) {
		return failure("ranks", "pp rank %d, tp rank %d is of engine %q with hash %s, rank 0 of engine %q with hash %s", pp, tp, m.Engine, reply.Hash, r.Engine, r.Hash)
	}
	r.Engine, r.Hash, r.Layout, r.Backend, r.Tokens = m.Engine, reply.Hash, m.Layout, m.Attention, m.BlockSize
	r.Physical, r.DCP, r.PCP = m.PhysicalPerLogical, m.DCPSize, m.PCPSize
	rank := probeRank{PP: pp, TP: tp, AgentBytes: len(m.Agent), RTTSeconds: reply.RTT.Seconds(), ClockOffsetSeconds: reply.Offset,
		ClockBoundSeconds: reply.RTT.Seconds() / 2, Regions: len(m.BaseAddrs), Blocks: m.NumBlocks, BlockBytes: m.BlockLens, BlockStrides: m.BlockStrides,
		MemoryTypes: distinct(m.RegionMemTypes), Device: m.Device, LeaseSlots: m.SlotsCount, SlotHeartbeats: m.SlotHeartbeats}
	for i, n := range m.BlockLens {
		blocks := m.NumBlocks
		if len(m.RegionBlocks) > 0 {
			blocks = m.RegionBlocks[i]
		}
		rank.KVBytes += n * blocks
	}
	var err error
	if rank.Agent, err = nixl.MetadataAgentName(m.Agent); err != nil {
		return failure("handshake", "the NIXL metadata of the instance: %w", err)
	}
	r.Ranks = append(r.Ranks, rank)
	switch {
	case c.engine != "" && c.engine != m.Engine:
		return failure("engine", "the instance is engine %q, not %q: it was restarted, or the address is another's", m.Engine, c.engine)
	case c.hash != "" && c.hash != reply.Hash:
		return failure("hash", "its compatibility hash is %s, not %s: model, dtype, attention backend or vLLM version differ, and a reader with the "+
			"expected hash refuses it (enforce_handshake_compat)", reply.Hash, c.hash)
	}
	return nil
}

func distinct(names []string) []string {
	seen := map[string]bool{}
	out := []string{}
	for _, n := range names {
		if !seen[n] {
			seen[n] = true
			out = append(out, n)
		}
	}
	return out
}

// text is the report for people; a failure is main's to print.
func (r *probeReport) text() string {
	var b strings.Builder
	line := func(label, format string, a ...any) { fmt.Fprintf(&b, "%-14s %s\n", label, fmt.Sprintf(format, a...)) }
	if len(r.Ranks) == 0 {
		return ""
	}
	line("engine", "%s", r.Engine)
	line("hash", "%s", r.Hash)
	line("connector", "layout %s, attention %s, %s a block, %s a block, dcp %d, pcp %d", r.Layout, r.Backend, many(r.Tokens, "token"), many(r.Physical, "kernel block"), r.DCP, r.PCP)
	for _, k := range r.Ranks {
		line("rank", "pp %d, tp %d: NIXL agent %s, %s of metadata", k.PP, k.TP, k.Agent, many(k.AgentBytes, "byte"))
		line("  KV cache", "%s of %s, %s bytes a block, %s in all, memory %s, device %d",
			many(k.Regions, "region"), many(k.Blocks, "block"), list(k.BlockBytes), many(k.KVBytes, "byte"), cmp.Or(strings.Join(k.MemoryTypes, " "), "not stated"), k.Device)
		slots := "none: reads cannot be verified (vLLM up to 0.33 has none)"
		if k.LeaseSlots > 0 {
			slots = strconv.Itoa(k.LeaseSlots)
			if k.SlotHeartbeats {
				slots += ", heartbeats by slot"
			}
		}
		line("  lease slots", "%s", slots)
		line("  round trip", "%.3f ms", 1e3*k.RTTSeconds)
		line("  clock", "%+.6f s from ours, ± %.6f s", k.ClockOffsetSeconds, k.ClockBoundSeconds)
		if k.Read != nil {
			line("  read", "%s in %.3f ms, %.3f GB/s; the first, with the connection, %.3f ms", many(k.Read.Bytes, "byte"), 1e3*k.Read.Seconds, k.Read.GBs, 1e3*k.Read.FirstSeconds)
			line("  transport", "%s, %s", k.Read.Backend, k.Read.Transport)
		}
	}
	return b.String()
}

// list writes equal numbers once.
func list(v []int) string {
	for _, n := range v {
		if n != v[0] {
			return strings.Trim(fmt.Sprint(v), "[]")
		}
	}
	return strconv.Itoa(v[0])
}
