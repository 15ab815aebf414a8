package nixl

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// LibraryVariable names the environment variable that holds the path of the
// library, or of a directory that it is in (see Load).
const LibraryVariable = "NIXLGO_LIBRARY"

// Library is the loaded libnixl_capi. A process loads one, and never unloads it.
type Library struct {
	Path  string    // the file, or the bare name that the system's loader resolved
	Tried []Attempt // the places that were looked at before, each with its reason
}

// Attempt is a place where the library was looked for.
type Attempt struct {
	Source string // what made it a candidate
	Path   string
	Err    error // nil for the one that was loaded
}

func (a Attempt) String() string {
	if a.Path == "" { // a place that is not set
		return fmt.Sprintf("%s: %v", a.Source, a.Err)
	}
	return fmt.Sprintf("%s: %s: %v", a.Source, a.Path, a.Err)
}

// The library's file names, the one with a version first.
var libraryNames = []string{"libnixl_capi.so.0", "libnixl_capi.so"}

// Outcomes of rawLoad.
const (
	loaded = iota
	notOpened
	incomplete
	stub
)

var loader struct {
	mu      sync.Mutex
	library *Library
}

// Load opens the library once for the process; NewAgent does so with "" where
// it was not called. A path names the file, its directory, or a directory of an
// unpacked wheel (.nixl), an installation or a Python environment around it.
// Without one, the places are, in order:
//
//  1. NIXLGO_LIBRARY, a path as above; nothing else is tried if it is set
//  2. .nixl, an unpacked wheel, in the working directory, in the executable's, and in their parents,
//     if only this user and root can change what is in it
//  3. the wheel nixl-cu12 or nixl-cu13 in the active Python's site-packages
//  4. lib below NIXL_PREFIX
//  5. the system's loader
//
// The environment of EnvDefaults is set before. A stub, which is a library
// built without NIXL behind it, is refused (ErrStub), and so is one that lacks
// a function this package cannot work without. Optional functions may be
// missing, see Missing. If nothing was loaded, the error matches ErrLibrary and
// lists every place with its reason.
//
// Once a library is loaded, "" and its own path return it; another path is an
// error.
//
// Implements:
//
//	nixl_capi_is_stub
func Load(path string) (*Library, error) {
	loader.mu.Lock()
	defer loader.mu.Unlock()
	if l := loader.library; l != nil {
		if path == "" || leadsTo(path, l.Path) {
			return l, nil
		}
		return nil, fmt.Errorf("nixl: %w: %s asked for, but this process has loaded %s", ErrLibrary, path, l.Path)
	}
	if err := setEnvDefaults(); err != nil {
		return nil, err
	}
	l, err := search(path)
	if err == nil {
		loader.library = l
	}
	return l, err
}

// Loaded returns the library, nil before Load succeeded.
func Loaded() *Library {
	loader.mu.Lock()
	defer loader.mu.Unlock()
	return loader.library
}

// Missing returns the optional functions of the C API that this library lacks.
// Calls that need one answer an error that matches errors.ErrUnsupported.
func (l *Library) Missing() []string { return rawMissing() }

func (l *Library) lacks(function string) bool { return slices.Contains(l.Missing(), function) }

// leadsTo reports whether path names the loaded file, or a directory in which it would be found.
func leadsTo(path, file string) bool {
	want, err := os.Stat(file)
	if err != nil { // a bare name, which the system's loader resolved
		return path == file
	}
	for _, f := range append(files(layouts(path)...), path) {
		if info, err := os.Stat(f); err == nil && os.SameFile(info, want) {
			return true
		}
	}
	return false
}

// search tries the places of Load's list.
func search(path string) (*Library, error) {
	var s searcher
	value, set := os.LookupEnv(LibraryVariable)
	switch {
	case path != "":
		s.explicit("the given path", path)
	case set:
		s.explicit(LibraryVariable, value)
	default:
		s.everywhere()
	}
	if s.found != "" {
		return &Library{Path: s.found, Tried: s.tried}, nil
	}
	return nil, &searchError{s.tried}
}

// searchError lists every attempt, and matches ErrLibrary and the causes.
type searchError struct{ tried []Attempt }

func (e *searchError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "nixl: %v; tried:", ErrLibrary)
	for _, a := range e.tried {
		fmt.Fprintf(&b, "\n\t%v", a)
	}
	fmt.Fprintf(&b, "\ninstall the wheel nixl-cu12, or set %s to the library's path", LibraryVariable)
	return b.String()
}

func (e *searchError) Unwrap() []error {
	errs := []error{ErrLibrary}
	for _, a := range e.tried {
		errs = append(errs, a.Err)
	}
	return errs
}

// searcher tries places until one works. A step after that does nothing.
type searcher struct {
	found string
	tried []Attempt
}

func (s *searcher) miss(source, path string, err error) {
	s.tried = append(s.tried, Attempt{source, path, err})
}

var errNoFile = fmt.Errorf("neither %s is there: %w", strings.Join(libraryNames, " nor "), fs.ErrNotExist)

func (s *searcher) explicit(source, path string) {
	if path == "" {
		s.miss(source, `""`, errors.New("the path is empty"))
		return
	}
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		if !s.directories(source, layouts(path)...) {
			s.miss(source, path, errNoFile)
		}
		return
	}
	s.open(source, path)
}

func (s *searcher) everywhere() {
	if wd, err := os.Getwd(); err == nil {
		s.unpacked("the working directory", wd)
	}
	if exe, err := os.Executable(); err == nil {
		s.unpacked("the executable's directory", filepath.Dir(exe))
	}
	s.python()
	s.prefix()
	for _, name := range libraryNames {
		s.open("the system's loader", name)
	}
}

// open loads one file.
func (s *searcher) open(source, path string) {
	if s.found != "" {
		return
	}
	if strings.IndexByte(path, 0) >= 0 {
		s.miss(source, path, errors.New("the path contains NUL"))
		return
	}
	real := path
	if strings.Contains(path, "/") { // the library finds its parts beside the file, not beside a link to it
		if r, err := filepath.EvalSymlinks(path); err == nil {
			real = r
		}
	}
	switch outcome, message := rawLoad(real); outcome {
	case loaded:
		s.found = path
	case incomplete:
		s.miss(source, path, fmt.Errorf("functions are missing: %s", message))
	case stub:
		s.miss(source, path, ErrStub)
	default:
		s.miss(source, path, errors.New(message))
	}
}

// directories tries the library's names in each directory of the patterns, and
// reports whether there was a file of such a name.
func (s *searcher) directories(source string, patterns ...string) bool {
	found := files(patterns...)
	for _, f := range found {
		s.open(source, f)
	}
	return len(found) > 0
}

// files returns the files of the library's names in the directories of the patterns.
func files(patterns ...string) (found []string) {
	for _, pattern := range patterns {
		for _, name := range libraryNames {
			f, _ := filepath.Glob(filepath.Join(pattern, name)) // the pattern is well formed
			found = append(found, f...)
		}
	}
	return found
}

// The directory inside of a wheel; both CUDA versions serve without CUDA.
const wheelPattern = ".nixl_cu*.mesonpy.libs"

// layouts are the patterns of where below dir the library lies: in an unpacked wheel or Python's site-packages, in dir itself, in
// an installation's prefix, or in a Python environment.
func layouts(dir string) []string {
	dir = globEscape(dir)
	return []string{filepath.Join(dir, wheelPattern), dir, filepath.Join(dir, "lib*"), filepath.Join(dir, "lib", "python3*", "site-packages", wheelPattern)}
}

// unpacked looks for .nixl in a directory and its parents. Nobody named it, so it must not be another user's: whoever can put one
// into /tmp, for instance, would run code in every program that is started below.
func (s *searcher) unpacked(what, dir string) {
	if s.found != "" {
		return
	}
	source, any := ".nixl in "+what+" or above", false
	for d := dir; s.found == ""; d = filepath.Dir(d) {
		root := filepath.Join(d, ".nixl")
		if err := trusted(root); err == nil {
			for _, f := range files(layouts(root)...) {
				any = true
				if s.found != "" {
					break
				}
				if err := trustedBelow(root, f); err != nil {
					s.miss(source, f, err)
					continue
				}
				s.open(source, f)
			}
		} else if !errors.Is(err, fs.ErrNotExist) {
			any = true
			s.miss(source, root, err)
		}
		if d == filepath.Dir(d) {
			break
		}
	}
	if !any {
		s.miss(source, filepath.Join(dir, ".nixl"), errNoFile)
	}
}

// trusted refuses what users other than this one and root can change: a link that is theirs, and a file or directory that is
// theirs or that they can write to.
func trusted(path string) error {
	for _, stat := range []func(string) (fs.FileInfo, error){os.Lstat, os.Stat} {
		info, err := stat(path)
		if err != nil {
			return err
		}
		if owner, ok := info.Sys().(*syscall.Stat_t); !ok || owner.Uid != 0 && int(owner.Uid) != os.Geteuid() {
			return fmt.Errorf("not trusted: %s belongs to another user; to load it all the same, set %s", path, LibraryVariable)
		}
		if info.Mode()&fs.ModeSymlink == 0 && info.Mode()&0o022 != 0 {
			return fmt.Errorf("not trusted: other users can write to %s (%v); chmod -R go-w, or set %s", path, info.Mode(), LibraryVariable)
		}
	}
	return nil
}

// trustedBelow is trusted for file and the directories between it and root.
func trustedBelow(root, file string) error {
	for p := file; p != root; p = filepath.Dir(p) {
		if err := trusted(p); err != nil {
			return err
		}
	}
	return nil
}

func globEscape(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

// pythonTimeout bounds the wait for python3 to tell where its packages are.
const pythonTimeout = 5 * time.Second

func (s *searcher) python() {
	if s.found != "" {
		return
	}
	source := "the wheel in VIRTUAL_ENV"
	var sites []string
	if env := os.Getenv("VIRTUAL_ENV"); env != "" {
		sites, _ = filepath.Glob(filepath.Join(globEscape(env), "lib", "python3*", "site-packages"))
		if len(sites) == 0 {
			s.miss(source, env, errors.New("it has no lib/python3*/site-packages"))
		}
	} else {
		source = "the wheel of python3"
		ctx, cancel := context.WithTimeout(context.Background(), pythonTimeout)
		defer cancel()
		cmd := exec.CommandContext(ctx, "python3", "-c", "import sys; print('\\n'.join(p for p in sys.path if p))")
		cmd.WaitDelay = time.Second
		out, err := cmd.Output()
		if err != nil {
			s.miss(source, "python3", err)
		}
		sites = slices.DeleteFunc(strings.Split(string(out), "\n"), func(p string) bool {
			return filepath.Base(p) != "site-packages" && filepath.Base(p) != "dist-packages"
		})
	}
	for _, site := range sites {
		if s.found == "" && !s.directories(source, filepath.Join(globEscape(site), wheelPattern)) {
			s.miss(source, filepath.Join(site, wheelPattern), errNoFile)
		}
	}
}

func (s *searcher) prefix() {
	if s.found != "" {
		return
	}
	prefix := os.Getenv("NIXL_PREFIX")
	if prefix == "" {
		s.miss("NIXL_PREFIX", "", errors.New("not set"))
		return
	}
	root := globEscape(prefix)
	triplet := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	if !s.directories("NIXL_PREFIX", filepath.Join(root, "lib"), filepath.Join(root, "lib64"), filepath.Join(root, "lib", triplet)) {
		s.miss("NIXL_PREFIX", filepath.Join(prefix, "lib"), errNoFile)
	}
}
