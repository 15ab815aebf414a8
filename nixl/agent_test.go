package nixl

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The library's lock does nothing unless the agent asks for it, and goroutines
// move between threads. Both modes pass a short stress test, so the setting
// itself is asserted. sglang#28897, nixl#649, cases.md 32
func TestAgentsAreCreatedWithRWSync(t *testing.T) {
	source, err := os.ReadFile("shim.c")
	require.NoError(t, err)
	require.Regexp(t, regexp.MustCompile(`(?m)^\s*\.thread_sync = NX_SYNC_RW,`), string(source))
	require.Equal(t, 1, strings.Count(string(source), "create_configured_agent("))
	require.NotContains(t, string(source), "api.create_agent(")
}

// nixl#2090, nixl#1822, cases.md 30
func TestAgentsAreCreatedWithTheProgressThread(t *testing.T) {
	source, err := os.ReadFile("shim.c")
	require.NoError(t, err)
	require.Regexp(t, regexp.MustCompile(`(?m)^\s*\.enable_prog_thread = true,`), string(source))
}

func TestConfigIsChecked(t *testing.T) {
	for name, c := range map[string]Config{
		"negative progress delay": {ProgressDelay: -1},
		"busy progress thread":    {ProgressDelay: time.Microsecond},
		"endless progress delay":  {ProgressDelay: time.Hour},
		"listen without a port":   {Listen: true},
		"listen port too large":   {Listen: true, ListenPort: 65536},
		"listen delay":            {ListenDelay: time.Nanosecond},
	} {
		_, err := NewAgent("", c)
		require.ErrorIs(t, err, ErrInvalid, name)
	}
}

func TestNamesThatCCannotCarryAreRefused(t *testing.T) {
	a := newUCX(t, Config{})
	for _, name := range []string{"a\x00b", strings.Repeat("n", MaxName+1), strings.Repeat("n", 64<<10)} {
		_, err := NewAgent(name, Config{})
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorIs(t, a.Notify(name, nil), ErrInvalid)
		require.ErrorIs(t, a.Connect(name), ErrInvalid)
		require.ErrorIs(t, a.InvalidateRemote(name), ErrInvalid)
		require.ErrorIs(t, a.CheckRemote(name, DRAM, nil), ErrInvalid)
		_, err = a.PrepareRemote(name, DRAM, []Desc{{Addr: 1, Len: 1}})
		require.ErrorIs(t, err, ErrInvalid)
		_, err = a.CreateBackend(name, nil)
		require.ErrorIs(t, err, ErrInvalid)
	}
	_, err := a.CreateBackend("POSIX", map[string]string{"a\x00": "b"})
	require.ErrorIs(t, err, ErrInvalid)
	longest, err := NewAgent(strings.Repeat("n", MaxName), Config{})
	require.NoError(t, err)
	require.NoError(t, longest.Close())
}

// Peers merge two agents of one name, so names are random unless given.
func TestNamesAreRandomUUIDs(t *testing.T) {
	a, b := newUCX(t, Config{}), newUCX(t, Config{})
	require.NotEqual(t, a.Name(), b.Name())
	require.Regexp(t, `^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`, a.Name())
}

func TestPluginsAndParams(t *testing.T) {
	a := newUCX(t, Config{})
	plugins, err := a.Plugins()
	require.NoError(t, err)
	require.Contains(t, plugins, "UCX")
	params, mems, err := a.PluginParams("UCX")
	require.NoError(t, err)
	require.Equal(t, "peer", params["ucx_error_handling_mode"])
	require.Contains(t, mems, DRAM)
	other, err := NewAgent("", Config{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, other.Close()) })
	forgetWorkers(t)
	b, err := other.CreateBackend("UCX", map[string]string{"num_workers": "2"})
	require.NoError(t, err)
	require.Equal(t, "UCX", b.Name())
	params, mems, err = b.Params()
	require.NoError(t, err)
	require.Equal(t, "2", params["num_workers"])
	require.Contains(t, mems, DRAM)
	_, _, err = a.PluginParams("NOPE")
	require.ErrorIs(t, err, ErrBackend)
	_, err = a.CreateBackend("UCX", nil)
	require.ErrorIs(t, err, ErrInvalid, "a second backend of the plugin")
}

// The C API answers -2 and no more. dynamo#13547, nixl#1358, cases.md 34
func TestUnknownPluginNamesTheSearchPath(t *testing.T) {
	a := newUCX(t, Config{})
	_, err := a.CreateBackend("NOPE", nil)
	require.ErrorIs(t, err, ErrBackend)
	require.ErrorContains(t, err, "NIXL_PLUGIN_DIR (unset)")
	require.ErrorContains(t, err, `"UCX"`)
}

// Whatever a plugin lacks, the C API answers -2.
func TestPluginThatDoesNotStartIsNotBlamedOnUCX(t *testing.T) {
	_, err := newUCX(t, Config{}).CreateBackend("OBJ", nil) // needs a bucket
	require.ErrorIs(t, err, ErrBackend)
	require.ErrorContains(t, err, "look at its parameters")
	require.NotContains(t, err.Error(), "UCX")
}

// everyCall calls every exported method that reaches the library.
func everyCall(t *testing.T, l *link) map[string]func() error {
	reg, err := l.reader.Register(mustBuffer(t, 4096))
	require.NoError(t, err)
	x := l.read(t, TransferOptions{}, 0)
	blob, err := l.owner.LocalMetadata()
	require.NoError(t, err)
	a, desc := l.reader, []Desc{blocks(l.dst, 4096)[0]}
	b := a.s.backends[0]
	spare := mustBuffer(t, 4096)
	nowhere := netip.MustParseAddrPort("127.0.0.1:9")
	return map[string]func() error{
		"Plugins":          func() error { _, err := a.Plugins(); return err },
		"PluginParams":     func() error { _, _, err := a.PluginParams("UCX"); return err },
		"CreateBackend":    func() error { _, err := a.CreateBackend("POSIX", nil); return err },
		"Backend.Params":   func() error { _, _, err := b.Params(); return err },
		"Register":         func() error { _, err := a.Register(spare); return err },
		"LocalMetadata":    func() error { _, err := a.LocalMetadata(); return err },
		"LoadRemote":       func() error { _, err := a.LoadRemote(blob); return err },
		"InvalidateRemote": func() error { return a.InvalidateRemote("somebody") },
		"CheckRemote":      func() error { return a.CheckRemote(l.owner.Name(), DRAM, nil) },
		"Connect":          func() error { return a.Connect(l.owner.Name()) },
		"PrepareLocal":     func() error { _, err := a.PrepareLocal(DRAM, desc); return err },
		"PrepareRemote":    func() error { _, err := a.PrepareRemote(l.owner.Name(), DRAM, blocks(l.src, 4096)); return err },
		"NewTransfer": func() error {
			_, err := a.NewTransfer(Read, l.local, nil, l.remote, nil, TransferOptions{})
			return err
		},
		"Start": func() error {
			y, _, err := a.Start(Read, l.local, []int32{1}, l.remote, []int32{1}, TransferOptions{})
			if err == nil {
				err = y.Wait(context.Background())
			}
			if err == nil {
				err = y.Close()
			}
			return err
		},
		"EstimateCost": func() error { _, err := x.EstimateCost(); return err },
		"ViewLocal":    func() error { _, err := a.ViewLocal(DRAM, desc, TransferOptions{}); return err },
		"ViewRemote": func() error {
			_, err := a.ViewRemote(DRAM, []RemoteDesc{{Desc: blocks(l.src, 4096)[0], Agent: l.owner.Name()}}, TransferOptions{})
			return err
		},
		"Post":          func() error { _, err := x.Post(); return err },
		"Poll":          func() error { _, err := x.Poll(); return err },
		"PollAll":       func() error { return PollAll([]*Transfer{x}, make([]State, 1)) },
		"Wait":          func() error { return x.Wait(context.Background()) },
		"Notify":        func() error { return a.Notify(l.owner.Name(), []byte("m")) },
		"Notifications": func() error { _, err := a.Notifications(nil); return err },
		"CreateTransfer": func() error {
			y, err := a.CreateTransfer(Read, DRAM, desc, l.owner.Name(), DRAM, blocks(l.src, 4096)[:1], TransferOptions{})
			if err == nil {
				err = y.Close()
			}
			return err
		},
		"Telemetry":             func() error { _, err := x.Telemetry(); return err },
		"Transfer.Backend":      func() error { _, err := x.Backend(); return err },
		"PartialMetadata":       func() error { _, err := a.PartialMetadata(); return err },
		"SendMetadata":          func() error { return a.SendMetadata(nowhere) },
		"SendPartialMetadata":   func() error { return a.SendPartialMetadata(nowhere) },
		"FetchRemote":           func() error { return a.FetchRemote("somebody", nowhere) },
		"InvalidateLocal":       func() error { return a.InvalidateLocal(nowhere) },
		"Backend.Query":         func() error { _, err := b.Query(File, []Query{{Name: "f"}}); return err },
		"Backend.Notify":        func() error { return b.Notify(l.owner.Name(), []byte("m")) },
		"Backend.Notifications": func() error { _, err := b.Notifications(nil); return err },
		"Backend.Connect":       func() error { return b.Connect(l.owner.Name()) },
		"Registration.Close": func() error {
			if err := reg.Close(); err != nil {
				return err
			}
			return ErrClosed // Close after Close is no error
		},
	}
}

// Natively the deregistration of memory that is older than the agent's second
// backend fails with -6.
func TestDeregistrationAfterASecondBackend(t *testing.T) {
	a := newUCX(t, Config{})
	older, err := a.Register(mustBuffer(t, 4096))
	require.NoError(t, err)
	_, err = a.CreateBackend("POSIX", nil)
	require.NoError(t, err)
	younger, err := a.Register(mustBuffer(t, 4096))
	require.NoError(t, err)
	require.NoError(t, older.Close())
	require.NoError(t, younger.Close())
}

func mustBuffer(t testing.TB, size int) *Buffer {
	t.Helper()
	b, err := AllocBuffer(size)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return b
}

// Natively a call after destroy_agent is a crash. cases.md 38
func TestEveryCallAfterCloseIsErrClosed(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	calls := everyCall(t, l)
	harmless := []string{"Close", "Name", "Len", "Bytes", "Count", "Settled", "Err"} // no error, or none after Close
	for _, of := range []reflect.Type{reflect.TypeFor[*Agent](), reflect.TypeFor[*Backend](), reflect.TypeFor[*Transfer](), reflect.TypeFor[*List](), reflect.TypeFor[*MemoryView]()} {
		for i := range of.NumMethod() {
			name := of.Method(i).Name
			if _, called := calls[of.Elem().Name()+"."+name]; !called && calls[name] == nil && !slices.Contains(harmless, name) {
				t.Errorf("%v.%s is not called", of, name)
			}
		}
	}
	require.NoError(t, l.reader.Close())
	require.NoError(t, l.reader.Close(), "a second Close")
	for name, call := range calls {
		err := call()
		require.ErrorIs(t, err, ErrClosed, name)
		require.ErrorIs(t, err, net.ErrClosed, name)
	}
	require.NoError(t, l.local.Close())
	require.NoError(t, l.remote.Close())
}

// cases.md 38: the same while Close runs, under -race.
func TestCloseMayMeetAnyCall(t *testing.T) {
	for range 5 {
		l := newLink(t, 1<<16, 4096)
		calls := everyCall(t, l)
		var wg sync.WaitGroup
		for name, call := range calls {
			wg.Go(func() {
				for start := time.Now(); time.Since(start) < patience; {
					if err := call(); errors.Is(err, ErrClosed) {
						return
					}
				}
				t.Errorf("%s never noticed the Close", name)
			})
		}
		time.Sleep(time.Millisecond) // lets calls run; nothing depends on how many
		require.NoError(t, l.reader.Close())
		wg.Wait()
	}
}

func TestClosedListsAndTransfersAreErrClosed(t *testing.T) {
	l := newLink(t, 1<<16, 4096)
	x := l.read(t, TransferOptions{})
	finish(t, x)
	require.NoError(t, x.Close())
	require.NoError(t, x.Close(), "a second Close")
	_, err := x.Post()
	require.ErrorIs(t, err, ErrClosed)
	_, err = x.Poll()
	require.ErrorIs(t, err, ErrClosed)
	states := []State{Idle}
	require.NoError(t, PollAll([]*Transfer{x}, states))
	require.Equal(t, []State{Done}, states)
	require.NoError(t, l.local.Close())
	require.NoError(t, l.local.Close(), "a second Close")
	_, err = l.reader.NewTransfer(Read, l.local, nil, l.remote, nil, TransferOptions{})
	require.ErrorIs(t, err, ErrClosed)
}

// An agent that is collected is a leak, and says so; nothing native is freed.
func TestDroppedAgentsWarn(t *testing.T) {
	var log safeBuffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	var inner *agent
	func() {
		a, err := NewAgent("dropped", Config{Logger: logger})
		require.NoError(t, err)
		inner = a.s
	}()
	require.Eventually(t, func() bool {
		runtime.GC()
		return strings.Contains(log.String(), "dropped without Close")
	}, patience, 10*time.Millisecond)
	require.Contains(t, log.String(), "agent=dropped")
	require.NoError(t, inner.close())
}

func TestDroppedTransfersAndListsWarn(t *testing.T) {
	var log safeBuffer
	a := newUCX(t, Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	b := registered(t, a, 1<<16)
	func() {
		local, err := a.PrepareLocal(DRAM, blocks(b, 4096)[:8])
		require.NoError(t, err)
		self, err := a.PrepareRemote(a.Name(), DRAM, blocks(b, 4096)[8:])
		require.NoError(t, err)
		_, err = a.NewTransfer(Read, local, nil, self, nil, TransferOptions{})
		require.NoError(t, err)
	}()
	require.Eventually(t, func() bool {
		runtime.GC()
		return strings.Contains(log.String(), "a transfer was dropped") && strings.Count(log.String(), "list was dropped") == 2
	}, patience, 10*time.Millisecond)
}

type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}
