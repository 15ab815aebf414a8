package rdma

import (
	"errors"
	"fmt"

	"github.com/nixlgo/nixlgo/nixl"
)

// Fabric is the transport of one rank: one NIXL agent with its registrations (OpenNIXL), or an in-memory one for tests of
// engines (package rdmatest). Step calls it from one goroutine, Load and RemoteList from handshakes beside it.
type Fabric interface {
	// Alloc returns zeroed, registered memory for lease slots and their checks; it lives as long as the fabric.
	Alloc(size int) (Memory, error)
	// Metadata is what a peer's Load needs to reach this fabric and all memory registered so far.
	Metadata() ([]byte, error)
	// Load makes a peer known and returns the name of its agent; again with other metadata, it replaces the old.
	Load(metadata []byte) (agent string, err error)
	// Forget drops a peer. It is refused while a READ from it is active.
	Forget(agent string) error

	// LocalList and RemoteList prepare descriptors, which must lie in registered memory.
	LocalList(mem nixl.MemType, descs []nixl.Desc) (List, error)
	RemoteList(agent string, mem nixl.MemType, descs []nixl.Desc) (List, error)
	// NewRead makes a READ of descriptor remote[ri[k]] into local[li[k]]; nil indices mean all. separate keeps neighbours
	// from being merged into one.
	NewRead(local List, li []int32, remote List, ri []int32, separate bool) (Read, error)
	// Poll asks for the states of reads, all made by this fabric.
	Poll(reads []Read, states []nixl.State) error

	// Notify sends msg to a loaded peer. Nobody confirms it.
	Notify(agent string, msg []byte) error
	// Notifications appends what arrived since the last call.
	Notifications(dst []nixl.Notification) ([]nixl.Notification, error)

	// Close ends everything made by the fabric; no byte lands in its memory afterwards.
	Close() error
}

// Memory is memory that peers may read and write.
type Memory interface {
	Addr() uint64
	Bytes() []byte
}

// List is a prepared descriptor list.
type List interface{ Close() error }

// Read is a READ that was made. A posted one is polled to its end; then Err says how it went.
type Read interface {
	Post() (nixl.State, error)
	Err() error
	Bytes() uint64
	Close() error // refused while it is active
}

// NIXLConfig configures OpenNIXL.
type NIXLConfig struct {
	Agent         nixl.Config
	Backend       string            // NIXL plugin; empty: UCX
	BackendParams map[string]string // its parameters, such as num_threads
	// Memory is the rank's KV memory: a nixl.Buffer, a GPU's (nixl.Device), or an arena of the engine's own in host memory
	// (nixl.Host). The engine frees its own after the Close of the fabric.
	Memory []nixl.Memory
}

// nixlFabric is a Fabric over a NIXL agent.
type nixlFabric struct {
	*nixl.Agent
	owned []*nixl.Buffer
	regs  []*nixl.Registration
	batch []*nixl.Transfer // scratch of Poll
}

// OpenNIXL makes a NIXL agent with one backend and registers the KV memory with it.
func OpenNIXL(cfg NIXLConfig) (Fabric, error) {
	if cfg.Backend == "" {
		cfg.Backend = "UCX"
	}
	a, err := nixl.NewAgent("", cfg.Agent)
	if err != nil {
		return nil, err
	}
	f := &nixlFabric{Agent: a}
	if _, err := a.CreateBackend(cfg.Backend, cfg.BackendParams); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	for _, m := range cfg.Memory {
		if err := f.register(m); err != nil {
			return nil, errors.Join(fmt.Errorf("register KV memory: %w", err), f.Close())
		}
	}
	return f, nil
}

func (f *nixlFabric) register(m nixl.Memory) error {
	r, err := f.Register(m)
	if err == nil {
		f.regs = append(f.regs, r)
	}
	return err
}

func (f *nixlFabric) Alloc(size int) (Memory, error) {
	b, err := nixl.AllocBuffer(size)
	if err != nil {
		return nil, err
	}
	if err := f.register(b); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	f.owned = append(f.owned, b)
	return b, nil
}

func (f *nixlFabric) Metadata() ([]byte, error) { return f.LocalMetadata() }

func (f *nixlFabric) Load(metadata []byte) (string, error) { return f.LoadRemote(metadata) }

func (f *nixlFabric) Forget(agent string) error {
	if err := f.InvalidateRemote(agent); !errors.Is(err, nixl.ErrNotFound) {
		return err
	}
	return nil // the library dropped it already
}

func (f *nixlFabric) LocalList(mem nixl.MemType, descs []nixl.Desc) (List, error) {
	return made(f.PrepareLocal(mem, descs))
}

func (f *nixlFabric) RemoteList(agent string, mem nixl.MemType, descs []nixl.Desc) (List, error) {
	return made(f.PrepareRemote(agent, mem, descs))
}

// made keeps a nil pointer from becoming an interface that is not nil.
func made(l *nixl.List, err error) (List, error) {
	if err != nil {
		return nil, err
	}
	return l, nil
}

func (f *nixlFabric) NewRead(local List, li []int32, remote List, ri []int32, separate bool) (Read, error) {
	l, ok := local.(*nixl.List)
	r, ok2 := remote.(*nixl.List)
	if !ok || !ok2 {
		return nil, fmt.Errorf("%w: a list of another fabric", nixl.ErrInvalid)
	}
	t, err := f.NewTransfer(nixl.Read, l, li, r, ri, nixl.TransferOptions{SkipMerge: separate})
	if err != nil {
		return nil, err
	}
	return t, nil
}

func (f *nixlFabric) Poll(reads []Read, states []nixl.State) error {
	f.batch = f.batch[:0]
	for _, r := range reads {
		t, ok := r.(*nixl.Transfer)
		if !ok {
			return fmt.Errorf("%w: a READ of another fabric", nixl.ErrInvalid)
		}
		f.batch = append(f.batch, t)
	}
	err := nixl.PollAll(f.batch, states)
	clear(f.batch)
	return err
}

func (f *nixlFabric) Close() error {
	err := f.Agent.Close() // ends transfers, lists and registrations, its children
	for _, b := range f.owned {
		err = errors.Join(err, b.Close())
	}
	return err
}
