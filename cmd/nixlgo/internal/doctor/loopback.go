package doctor

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/nixl/diagnose"
)

// step is a check that enters the library, so that it may crash or never return. A step that fails is the last one.
type step struct {
	name    string
	waiting string // what the parent waits for while it runs
	run     func(*loopback) error
}

// steps is in the order of a transfer's life.
var steps = []step{
	{"library", "the NIXL library to load", (*loopback).load},
	{"agents", "the library to create two agents", (*loopback).agents},
	{"plugins", "the library to list its plugins", (*loopback).plugins},
	{"backend", "the UCX backends of two agents to start", (*loopback).backends},
	{"ucx", "the version of the loaded UCX", (*loopback).ucx},
	{"read", "a READ of " + readText + " between two agents of one process to complete", (*loopback).read},
	{"notification", "a notification from one agent to the other to arrive", (*loopback).notify},
	{"close", "the agents to close", (*loopback).close},
}

// InLibrary reports whether the check of this name enters the library. One that fails often shows what is wrong elsewhere.
func InLibrary(name string) bool {
	return slices.ContainsFunc(steps, func(s step) bool { return s.name == name })
}

const (
	plugin   = "UCX"
	readSize = 1 << 20
	readText = "1 MiB"
)

// loopback is an owner and a reader in one process.
type loopback struct {
	library       string // asked for, "" to search
	owner, reader *nixl.Agent
	backend       *nixl.Backend // the owner's
	buffers       []*nixl.Buffer
	report        func(diagnose.Finding) error
}

// Loopback runs the steps that need the library, and writes its messages to out, for Run in the parent process. It waits
// without a deadline: the parent has one for each step and kills this process.
func Loopback(library string, out io.Writer) error {
	send := json.NewEncoder(out).Encode
	l := &loopback{library: library, report: func(f diagnose.Finding) error { return send(message{Finding: &f}) }}
	for _, s := range steps {
		if err := send(message{Begin: s.name}); err != nil {
			return fmt.Errorf("report to the parent process: %w", err)
		}
		if err := s.run(l); err != nil {
			var f failure
			if !errors.As(err, &f) {
				f.Finding = diagnose.Finding{Value: "failed", Cause: err.Error()}
			}
			f.Name, f.Status = s.name, diagnose.Fail
			if err := l.report(f.Finding); err != nil {
				return err
			}
			break
		}
	}
	return send(message{Done: true})
}

// failure is an error that knows more than its text.
type failure struct{ diagnose.Finding }

func (f failure) Error() string { return f.Cause }

func (l *loopback) load() error {
	set := map[string]string{}
	for _, d := range nixl.EnvDefaults() {
		if v, ok := os.LookupEnv(d.Name); ok {
			set[d.Name] = v
		}
	}
	lib, err := nixl.Load(l.library)
	if err != nil {
		remedy := "install the wheel nixl-cu12 or nixl-cu13, or set " + nixl.LibraryVariable + " or --library to the path of libnixl_capi.so"
		value := "not found"
		if errors.Is(err, nixl.ErrStub) {
			value = "a stub: built without NIXL behind it"
		}
		return failure{diagnose.Finding{Value: value, Cause: err.Error(), Remedy: remedy}}
	}
	file := lib.Path
	if !filepath.IsAbs(file) { // found by the system's loader: ask the kernel which file it is
		file = strings.Join(mapped("libnixl_capi"), ", ")
	}
	if wheel := lib.Wheel(); wheel != "" {
		file += " (" + wheel + ")"
	}
	var tried []string
	for _, a := range lib.Tried {
		tried = append(tried, a.String())
	}
	f := diagnose.Finding{Name: "library", Status: diagnose.OK, Value: file, Cause: "not a stub"}
	if len(tried) > 0 {
		f.Cause += "; tried before: " + strings.Join(tried, "; ")
	}
	if err := l.report(f); err != nil {
		return err
	}
	if missing := lib.Missing(); len(missing) > 0 {
		f := diagnose.Finding{Name: "optional functions", Status: diagnose.OK, Value: "missing: " + strings.Join(missing, ", "), Cause: "calls that need them answer an error; nothing else does"}
		if err := l.report(f); err != nil {
			return err
		}
	}
	for _, d := range nixl.EnvDefaults() {
		v, had := set[d.Name]
		if os.Getenv(d.Name) != d.Value || had && v == d.Value {
			continue
		}
		why := "set by nixlgo: " + d.Why
		if had {
			why = fmt.Sprintf("set by nixlgo in place of %q: %s", v, d.Why)
		}
		if err := l.report(diagnose.Finding{Name: d.Name, Status: diagnose.OK, Value: d.Value, Cause: why}); err != nil {
			return err
		}
	}
	return nil
}

// mapped returns the files mapped into this process whose name begins with stem and a dot or a dash.
func mapped(stem string) []string {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return nil
	}
	return mappedFiles(string(maps), stem)
}

func mappedFiles(maps, stem string) []string {
	var files []string
	for line := range strings.Lines(maps) {
		i := strings.IndexByte(line, '/')
		if i < 0 {
			continue
		}
		file := strings.TrimSpace(line[i:])
		rest, ok := strings.CutPrefix(filepath.Base(file), stem)
		if ok && (strings.HasPrefix(rest, ".") || strings.HasPrefix(rest, "-")) && !slices.Contains(files, file) {
			files = append(files, file)
		}
	}
	return files
}

func (l *loopback) agents() (err error) {
	for _, a := range []**nixl.Agent{&l.owner, &l.reader} {
		if *a, err = nixl.NewAgent("", nixl.Config{}); err != nil {
			return err
		}
	}
	return nil
}

func (l *loopback) plugins() error {
	names, err := l.owner.Plugins()
	if err != nil {
		return err
	}
	value := strings.Join(names, ", ")
	if !slices.Contains(names, plugin) {
		return failure{diagnose.Finding{Value: "found: " + value, Cause: "the plugin UCX, which nixlgo uses, is not among them"}}
	}
	return l.report(diagnose.Finding{Name: "plugins", Status: diagnose.OK, Value: value})
}

func (l *loopback) backends() (err error) {
	if l.backend, err = l.owner.CreateBackend(plugin, nil); err != nil {
		return err
	}
	if _, err = l.reader.CreateBackend(plugin, nil); err != nil {
		return err
	}
	// The backend tells the parameters that it was given; the plugin tells the defaults of the others.
	params, mems, err := l.owner.PluginParams(plugin)
	if err != nil {
		return err
	}
	given, _, err := l.backend.Params()
	if err != nil {
		return err
	}
	maps.Copy(params, given)
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(params)) {
		parts = append(parts, k+"="+params[k])
	}
	var kinds []string
	for _, m := range mems {
		kinds = append(kinds, m.String())
	}
	return l.report(diagnose.Finding{Name: "backend", Status: diagnose.OK, Value: fmt.Sprintf("UCX: %s; memory %s", strings.Join(parts, " "), strings.Join(kinds, ", "))})
}

// ucx: two copies of UCX in one process take each other's memory hooks, with runaway allocation and crashes (cases.md 35).
func (l *loopback) ucx() error {
	copies := mapped("libucp")
	if len(copies) == 0 {
		return l.report(diagnose.Finding{Name: "ucx", Status: diagnose.Warn, Value: "no libucp is mapped", Cause: "the UCX plugin holds UCX in itself, or UCX has another name here",
			Remedy: "use a NIXL that links UCX as shared libraries, such as the wheel, so that a second copy can be seen"})
	}
	value := strings.Join(copies, ", ")
	if len(copies) > 1 {
		return failure{diagnose.Finding{Value: value, Cause: "this process has loaded more than one UCX, which interfere with each other"}}
	}
	if v := ucxVersion(copies[0]); v != "" {
		value = v + ", " + value
	}
	return l.report(diagnose.Finding{Name: "ucx", Status: diagnose.OK, Value: value, Cause: "one copy in the process"})
}

// buffer allocates size bytes and registers them with a.
func (l *loopback) buffer(a *nixl.Agent, size int) (*nixl.Buffer, error) {
	b, err := nixl.AllocBuffer(size)
	if err != nil {
		return nil, err
	}
	l.buffers = append(l.buffers, b)
	_, err = a.Register(b)
	return b, err
}

func (l *loopback) read() error {
	from, err := l.buffer(l.owner, readSize)
	if err != nil {
		return err
	}
	to, err := l.buffer(l.reader, readSize)
	if err != nil {
		return err
	}
	rand.Read(from.Bytes())
	blob, err := l.owner.LocalMetadata()
	if err != nil {
		return err
	}
	name, err := l.reader.LoadRemote(blob)
	if err != nil {
		return err
	}
	local, err := l.reader.PrepareLocal(nixl.DRAM, []nixl.Desc{{Addr: to.Addr(), Len: readSize}})
	if err != nil {
		return err
	}
	remote, err := l.reader.PrepareRemote(name, nixl.DRAM, []nixl.Desc{{Addr: from.Addr(), Len: readSize}})
	if err != nil {
		return err
	}
	t, err := l.reader.NewTransfer(nixl.Read, local, nil, remote, nil, nixl.TransferOptions{})
	if err != nil {
		return err
	}
	start := time.Now()
	if _, err := t.Post(); err != nil {
		return err
	}
	if err := t.Wait(context.Background()); err != nil {
		return err
	}
	took := time.Since(start)
	if string(to.Bytes()) != string(from.Bytes()) {
		return failure{diagnose.Finding{Value: "wrong bytes", Cause: "the READ was reported as done, but the bytes differ from the owner's"}}
	}
	return l.report(diagnose.Finding{Name: "read", Status: diagnose.OK, Value: fmt.Sprintf("%s in %v, bytes equal", readText, took.Round(time.Microsecond)),
		Cause: "between two agents of one process, the connection included"})
}

func (l *loopback) notify() error {
	text := []byte("nixlgo doctor")
	start := time.Now()
	if err := l.reader.Notify(l.owner.Name(), text); err != nil {
		return err
	}
	for {
		got, err := l.owner.Notifications(nil)
		if err != nil {
			return err
		}
		if len(got) == 0 {
			time.Sleep(100 * time.Microsecond)
			continue
		}
		took := time.Since(start)
		if len(got) != 1 || got[0].From != l.reader.Name() || string(got[0].Payload) != string(text) {
			return failure{diagnose.Finding{Value: fmt.Sprintf("%d, the first from %q: %q", len(got), got[0].From, got[0].Payload), Cause: "another notification arrived than the one sent"}}
		}
		return l.report(diagnose.Finding{Name: "notification", Status: diagnose.OK, Value: fmt.Sprintf("%d B in %v", len(text), took.Round(time.Microsecond))})
	}
}

func (l *loopback) close() error {
	errs := []error{l.reader.Close(), l.owner.Close()}
	for _, b := range l.buffers {
		errs = append(errs, b.Close())
	}
	return errors.Join(errs...)
}
