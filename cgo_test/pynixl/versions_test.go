//go:build pynixl

package pynixl

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/child"
	"github.com/nixlgo/nixlgo/nixl"
)

// releases of the NIXL library, oldest first. The last is the one that this project pins.
var releases = []string{"1.0.1", "1.3.2", "1.4.1", "1.5.1"}

const releaseVariable = "NIXLGO_TEST_RELEASE" // makes the test binary a child

// TestMain leaves by the system call: the exit of libc runs a destructor of the wheel's libnl that crashes under -race.
func TestMain(m *testing.M) {
	if os.Getenv(releaseVariable) != "" {
		child.Exit("child", runChild())
	}
	syscall.Exit(m.Run())
}

// childReady is a child's first line.
type childReady struct {
	Path, Agent string
	Missing     []string
	Metadata    []byte
	Addr        uint64
}

// childTask tells a child to use what another one owns.
type childTask struct {
	Agent    string
	Metadata []byte
	Addr     uint64
}

// runChild is an agent of the release that the environment names: it fills its buffer with a pattern, tells its metadata, and
// carries out tasks: load, read, compare, notify. It answers each with the step that failed, or "".
func runChild() error {
	lib, err := nixl.Load("")
	if err != nil {
		return err
	}
	a, err := nixl.NewAgent("", nixl.Config{})
	if err != nil {
		return err
	}
	if _, err := a.CreateBackend("UCX", nil); err != nil {
		return err
	}
	own, err := nixl.AllocBuffer(65536)
	if err != nil {
		return err
	}
	to, err := nixl.AllocBuffer(65536)
	if err != nil {
		return err
	}
	for _, b := range []*nixl.Buffer{own, to} {
		if _, err := a.Register(b); err != nil {
			return err
		}
	}
	copy(own.Bytes(), pattern(65536, 1))
	blob, err := a.LocalMetadata()
	if err != nil {
		return err
	}
	if err := child.Say(childReady{lib.Path, a.Name(), lib.Missing(), blob, own.Addr()}); err != nil {
		return err
	}
	for task, err := range child.Commands[childTask](os.Stdin) {
		if err != nil {
			return err
		}
		if err := child.Say(task.run(a, to)); err != nil {
			return err
		}
	}
	return nil
}

// run returns the step that failed and why.
func (k childTask) run(a *nixl.Agent, to *nixl.Buffer) string {
	name, err := a.LoadRemote(k.Metadata)
	if err != nil || name != k.Agent {
		return fmt.Sprintf("load: %q %v", name, err)
	}
	local, err := a.PrepareLocal(nixl.DRAM, []nixl.Desc{{Addr: to.Addr(), Len: 65536}})
	if err != nil {
		return fmt.Sprintf("local list: %v", err)
	}
	defer local.Close()
	remote, err := a.PrepareRemote(name, nixl.DRAM, []nixl.Desc{{Addr: k.Addr, Len: 65536}})
	if err != nil {
		return fmt.Sprintf("remote list: %v", err)
	}
	defer remote.Close()
	clear(to.Bytes())
	t, err := a.NewTransfer(nixl.Read, local, nil, remote, nil, nixl.TransferOptions{})
	if err != nil {
		return fmt.Sprintf("read: %v", err)
	}
	defer t.Close()
	if _, err := t.Post(); err != nil {
		return fmt.Sprintf("read: %v", err)
	}
	end := time.Now().Add(patience)
	for state := nixl.Active; state != nixl.Done; {
		if state, err = t.Poll(); err != nil || time.Now().After(end) {
			return fmt.Sprintf("read: %v %v", state, err)
		}
	}
	if !bytes.Equal(to.Bytes(), pattern(65536, 1)) {
		return "read: wrong bytes"
	}
	if err := a.Notify(name, []byte("\x00seen\xff")); err != nil {
		return fmt.Sprintf("notify: %v", err)
	}
	return ""
}

// release is a running child.
type release struct {
	*child.Process
	childReady
	t *testing.T
}

func library(t *testing.T, version string) string {
	t.Helper()
	folder := filepath.Join(root(), ".nixl-versions", version)
	if version == releases[len(releases)-1] {
		folder = filepath.Join(root(), ".nixl")
	}
	found, err := filepath.Glob(filepath.Join(folder, ".nixl_cu*.mesonpy.libs", "libnixl_capi.so"))
	require.NoError(t, err)
	require.Len(t, found, 1, "NIXL %s is not installed in %s: run `make setup-versions`", version, folder)
	return found[0]
}

func startRelease(t *testing.T, version string) *release {
	t.Helper()
	path := library(t, version)
	c := exec.Command(os.Args[0])
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "NIXLGO_LIBRARY=") && !strings.HasPrefix(v, "NIXL_PLUGIN_DIR=") {
			c.Env = append(c.Env, v)
		}
	}
	c.Env = append(c.Env, releaseVariable+"="+version, "NIXLGO_LIBRARY="+path, "UCX_TLS=tcp")
	r := &release{Process: startChild(t, version, c), t: t}
	require.NoError(t, r.Receive(t.Context(), &r.childReady))
	require.Equal(t, path, r.Path)
	return r
}

// use has r load and read what owner has.
func (r *release) use(owner *release) (failed string) {
	r.t.Helper()
	require.NoError(r.t, r.Call(r.t.Context(), childTask{owner.Agent, owner.Metadata, owner.Addr}, &failed))
	return failed
}

// A fleet is updated one engine after the other: all of these releases understand each other's metadata, READs and
// notifications, and this binding works with each. nixl#1668, cases.md 35
func TestReleasesOfTheLibraryWithEachOther(t *testing.T) {
	table := &strings.Builder{}
	fmt.Fprintf(table, "%-14s", "reader\\owner")
	for _, v := range releases {
		fmt.Fprintf(table, " %-8s", v)
	}
	var children []*release
	for _, v := range releases {
		r := startRelease(t, v)
		name, err := nixl.MetadataAgentName(r.Metadata)
		require.NoError(t, err, v)
		require.Equal(t, r.Agent, name)
		t.Logf("NIXL %s lacks %s; %d bytes of metadata: %s…", v, strings.Join(r.Missing, " "), len(r.Metadata), hex.EncodeToString(r.Metadata[:24]))
		children = append(children, r)
	}
	for _, reader := range children {
		fmt.Fprintf(table, "\n%-14s", reader.Name)
		for _, owner := range children {
			verdict := "ok"
			if reader == owner {
				owner = startRelease(t, reader.Name) // an agent does not read itself
			}
			failed := reader.use(owner)
			if failed != "" {
				verdict, _, _ = strings.Cut(failed, ":")
				t.Errorf("a reader of NIXL %s with an owner of %s: %s", reader.Name, owner.Name, failed)
			}
			fmt.Fprintf(table, " %-8s", verdict)
		}
	}
	t.Logf("\n%s", table)
}
