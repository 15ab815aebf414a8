package nixl

import (
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/nixlgo/nixlgo/nixl/diagnose"
)

// Limits of Config and of names.
const (
	DefaultProgressDelay = time.Millisecond
	MinProgressDelay     = 100 * time.Microsecond // below, the progress thread takes most of a core
	MaxProgressDelay     = time.Second
	MaxName              = 255 // bytes of an agent name
)

// Config configures an agent. The zero value is ready to use.
//
// Two settings of the C configuration are not offered, as one value alone is
// safe: synchronisation is always RW, for goroutines move between threads, and
// the progress thread is always on, for without it neither a READ nor a
// notification moves unless both sides poll.
type Config struct {
	// ProgressDelay is the longest sleep of the progress thread, rounded up to
	// milliseconds by the UCX plugin. Zero means DefaultProgressDelay; other
	// values lie between MinProgressDelay and MaxProgressDelay.
	ProgressDelay time.Duration
	// Listen starts NIXL's metadata listener on ListenPort (1 to 65535), which
	// looks for work every ListenDelay (zero means 100 ms). It needs NIXL 1.5.0;
	// older libraries are errors.ErrUnsupported.
	Listen      bool
	ListenPort  int
	ListenDelay time.Duration
	// Telemetry records the times of each transfer.
	Telemetry bool
	// Logger is warned about objects that were dropped without Close. Nil watches for none.
	Logger *slog.Logger
}

func (c *Config) validate() error {
	const op = "create agent"
	if c.ProgressDelay == 0 {
		c.ProgressDelay = DefaultProgressDelay
	}
	if c.ProgressDelay < MinProgressDelay || c.ProgressDelay > MaxProgressDelay {
		return invalid(op, "the progress delay %v is not within %v and %v", c.ProgressDelay, MinProgressDelay, MaxProgressDelay)
	}
	if c.Listen && (c.ListenPort < 1 || c.ListenPort > math.MaxUint16) {
		return invalid(op, "the listen port %d is not within 1 and 65535", c.ListenPort)
	}
	if c.ListenDelay == 0 {
		c.ListenDelay = 100 * time.Millisecond
	}
	if c.ListenDelay < time.Millisecond || c.ListenDelay > time.Minute {
		return invalid(op, "the listen delay %v is not within 1ms and 1m", c.ListenDelay)
	}
	return nil
}

// Agent is one endpoint of NIXL: it owns backends, registrations, prepared
// lists and transfers, and knows the peers whose metadata was loaded.
//
// All methods may be called from any goroutine, also while another one closes
// the agent.
type Agent struct {
	s       *agent
	cleanup runtime.Cleanup
}

// agent is what an Agent and everything made from it share.
//
// mu is held for the length of each crossing into the library, never while
// waiting. One lock for all calls, although the library locks too: it polls a
// request and drops a dead peer under a shared lock, which two threads at once
// do not survive, and a goroutine that waits here needs no thread.
type agent struct {
	name   string
	cname  []byte
	log    *slog.Logger // or nil
	listen bool
	store  bool // a central store for metadata was configured
	folds  bool // the library is older than 1.5.0: StatusBackend stands for StatusNotFound, too
	// explain says what is wrong with this machine about some topics, "" for nothing. It is for errors.
	explain func(topics ...string) string

	mu        sync.Mutex
	closed    bool
	h         handle
	backends  []*Backend
	regs      registrations
	peers     map[string]*peer
	lists     map[*list]struct{}
	transfers []*transfer // in any order; behind its end are closed ones, for the next
	views     map[*MemoryView]struct{}
	memories  map[Memory]struct{} // registered at any time: mapped until the end
	closing   bool                // nothing new is posted
	inbox     inbox
	senders   map[string]string // names seen in notifications, so that each is allocated once
	items     []pollItem        // scratch
	active    activeList
	sweep     sweeper

	settleTime time.Duration
}

// CloseWait is how long an agent's Close waits for active transfers.
const CloseWait = 750 * time.Millisecond

// SettleTime is how long after a transport error the library is given to end
// all requests to the peer. Measured over TCP with the peer killed amid READs:
// nothing landed after the error.
const SettleTime = 2 * time.Second

// NewAgent creates an agent. The name is how peers know it: unique in the
// cluster, as peers merge two agents of one name; up to MaxName bytes without
// NUL. An empty name means a random UUID. The library is loaded first if it is
// not yet (see Load).
//
// Implements:
//
//	nixl_capi_create_configured_agent
func NewAgent(name string, cfg Config) (*Agent, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if name == "" {
		name = randomUUID()
	}
	if err := checkName("create agent", name); err != nil {
		return nil, err
	}
	library, err := Load("")
	if err != nil {
		return nil, err
	}
	folds := library.lacks("nixl_capi_prep_mem_view_local")
	if cfg.Listen && folds {
		return nil, &Error{Op: "create agent " + name, Cause: errors.ErrUnsupported,
			Detail: "the listener needs NIXL 1.5.0: older ones close file descriptors of others, which crashes the process"}
	}
	s := &agent{
		name:     name,
		cname:    cname(name),
		log:      cfg.Logger,
		listen:   cfg.Listen,
		store:    storeConfigured(),
		folds:    folds,
		explain:  diagnose.Explain,
		peers:    map[string]*peer{},
		lists:    map[*list]struct{}{},
		views:    map[*MemoryView]struct{}{},
		memories: map[Memory]struct{}{},
		senders:  map[string]string{},

		settleTime: SettleTime,
	}
	if st := s.inbox.open(); st < 0 {
		return nil, failed("create agent", "", st)
	}
	var st Status
	s.h, st = rawAgentCreate(s.cname, cfg.Listen, cfg.ListenPort, micros(cfg.ProgressDelay), micros(cfg.ListenDelay), cfg.Telemetry)
	if st < 0 {
		s.inbox.close()
		return nil, failed("create agent "+name, "", st)
	}
	a := &Agent{s: s}
	if s.log != nil {
		a.cleanup = runtime.AddCleanup(a, (*agent).warnLeak, s)
	}
	return a, nil
}

func micros(d time.Duration) uint64 { return uint64((d + time.Microsecond - 1) / time.Microsecond) }

func randomUUID() string {
	var u [16]byte
	rand.Read(u[:]) // never fails
	u[6] = u[6]&0x0f | 0x40
	u[8] = u[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// checkName refuses what a C string cannot carry.
func checkName(op, name string) error {
	switch {
	case name == "":
		return invalid(op, "the agent name is empty")
	case len(name) > MaxName:
		return invalid(op, "the agent name has %d bytes, more than %d", len(name), MaxName)
	case strings.IndexByte(name, 0) >= 0:
		return invalid(op, "the agent name %q contains NUL", name)
	}
	return nil
}

// cname returns the bytes of a C string.
func cname(s string) []byte { return append([]byte(s), 0) }

func (s *agent) warnLeak() {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock() // first: the logger may call the agent
	if !closed {
		s.log.Warn("nixl: an agent was dropped without Close; its memory stays registered", "agent", s.name)
	}
}

// lock takes the agent for one crossing, or reports that it is closed.
func (s *agent) lock(op string) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return closed(op)
	}
	return nil
}

// Name returns the agent's name.
func (a *Agent) Name() string { return a.s.name }

// Close ends the agent and everything made from it: transfers, lists,
// registrations and backends. Active transfers get CloseWait to end, for their
// peers' sake: over TCP a reader that vanishes amid a READ can crash the owner.
// Then they end with the agent. Once Close has returned, the library writes none
// of the registered memory any more, which makes it the last resort for the
// buffers of a transfer that never ends. Buffers that were closed before are
// unmapped now. A second Close does nothing.
//
// Implements:
//
//	nixl_capi_release_xfer_req, nixl_capi_destroy_xfer_req,
//	nixl_capi_release_xfer_dlist_handle, nixl_capi_deregister_mem,
//	nixl_capi_destroy_backend, nixl_capi_destroy_notif_map, nixl_capi_destroy_agent
func (a *Agent) Close() error {
	a.cleanup.Stop()
	return a.s.close()
}

// drain waits up to CloseWait for the active transfers, while nothing new is posted.
func (s *agent) drain() {
	s.mu.Lock()
	s.closing = true
	s.mu.Unlock()
	for end := time.Now().Add(CloseWait); s.pollActive() && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
}

func (s *agent) close() error {
	s.drain()
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	var errs []error
	for _, t := range s.transfers {
		rawRelease(s.h, t.h) // may refuse an active one, which ends with the agent
	}
	for v := range s.views {
		rawViewRelease(s.h, v.h)
	}
	for l := range s.lists {
		rawListRelease(s.h, l.h)
	}
	for _, r := range s.regs {
		errs = append(errs, failed("deregister memory", "", rawDeregister(s.h, &r.region)))
	}
	for _, b := range s.backends {
		rawBackendDestroy(b.h)
	}
	s.inbox.close()
	errs = append(errs, failed("destroy agent "+s.name, "", rawAgentDestroy(s.h)))
	memories := s.memories
	s.h, s.backends, s.regs, s.lists, s.transfers, s.views, s.memories, s.peers = 0, nil, nil, nil, nil, nil, nil, nil
	s.active = activeList{}
	s.mu.Unlock()

	s.sweep.end()
	for m := range memories {
		m.release(s)
	}
	return errors.Join(errs...)
}
