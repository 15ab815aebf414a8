package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
)

// serving is a serve that runs until the test ends, and what it printed.
type serving struct {
	cmd   *exec.Cmd
	ready serveReady
	lines *linesOf
}

// linesOf collects the JSON lines of a process.
type linesOf struct {
	mu     sync.Mutex
	events []fileEvent
	raw    []string
	ended  chan struct{}
}

func collectLines(r io.Reader, each func(line string)) *linesOf {
	l := &linesOf{ended: make(chan struct{})}
	go func() {
		defer close(l.ended)
		lines := bufio.NewScanner(r)
		lines.Buffer(nil, 16<<20)
		for lines.Scan() {
			var e fileEvent
			_ = json.Unmarshal(lines.Bytes(), &e) // each is checked by those who wait for it
			l.mu.Lock()
			l.events, l.raw = append(l.events, e), append(l.raw, lines.Text())
			l.mu.Unlock()
			if each != nil {
				each(lines.Text())
			}
		}
	}()
	return l
}

func (l *linesOf) count(event string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.events {
		if e.Event == event {
			n++
		}
	}
	return n
}

func (l *linesOf) first(event string) fileEvent {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.events {
		if e.Event == event {
			return e
		}
	}
	return fileEvent{}
}

func startServe(t *testing.T, exe string, args ...string) *serving {
	t.Helper()
	s := &serving{cmd: exec.Command(exe, append([]string{"serve", "--json"}, args...)...)}
	var stderr bytes.Buffer
	s.cmd.Stderr = &stderr
	stdout, err := s.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, s.cmd.Start())
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		<-s.lines.ended
		_ = s.cmd.Wait()
		if t.Failed() {
			t.Logf("serve printed:\n%s\n%s", strings.Join(s.lines.raw, "\n"), &stderr)
		}
	})
	ready := make(chan string, 1)
	var once sync.Once
	s.lines = collectLines(stdout, func(line string) { once.Do(func() { ready <- line }) })
	select {
	case line := <-ready:
		require.NoError(t, json.Unmarshal([]byte(line), &s.ready), line)
		require.Equal(t, "ready", s.ready.Event)
	case <-s.lines.ended:
		require.Fail(t, "serve ended", "%s", &stderr)
	}
	return s
}

// take asks for the first part and waits for its params.
func take(t *testing.T, s *serving) *lease.Params {
	t.Helper()
	resp, err := http.Post(s.ready.URL+"/v1/parts/0", "", nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	p := new(lease.Params)
	require.NoError(t, json.NewDecoder(resp.Body).Decode(p))
	return p
}

// A client that hangs up before it has the params does not keep a lease.
func TestWhatNobodyWaitsForIsRevoked(t *testing.T) {
	n := startNode(t)
	p, err := n.Publish(t.Context(), "req", []int{1}, 1)
	require.NoError(t, err)
	gone, hangUp := context.WithCancel(t.Context())
	hangUp()
	require.NoError(t, handOver(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/", nil).WithContext(gone), p, p.Params()))
	<-p.Done()
	require.Equal(t, lease.ReasonAborted, p.Reason())
}

// A client that decodes the object and closes does not wait for the end of the body.
func TestParamsThatWereHandedOverAreNotRevoked(t *testing.T) {
	n := startNode(t)
	p, err := n.Publish(t.Context(), "req", []int{1}, 1)
	require.NoError(t, err)
	has, hangUp := context.WithCancel(t.Context())
	w := &hangsUp{httptest.NewRecorder(), hangUp}
	require.NoError(t, handOver(w, httptest.NewRequest(http.MethodPost, "/", nil).WithContext(has), p, p.Params()))
	select {
	case <-p.Done():
		t.Fatal(p.Reason())
	default:
	}
}

// hangsUp is a client that hangs up when it was written to.
type hangsUp struct {
	*httptest.ResponseRecorder
	hangUp func()
}

func (w *hangsUp) Write(b []byte) (int, error) {
	defer w.hangUp()
	return w.ResponseRecorder.Write(b)
}

// testFile is a file of n random bytes.
func testFile(t *testing.T, n int) (path, sum string) {
	t.Helper()
	b := make([]byte, n)
	source := rand.NewChaCha8([32]byte{byte(n), 1})
	_, _ = source.Read(b)
	path = filepath.Join(t.TempDir(), fmt.Sprintf("file%d.bin", n))
	require.NoError(t, os.WriteFile(path, b, 0o600))
	h := sha256.Sum256(b)
	return path, hex.EncodeToString(h[:])
}

func requireSameFile(t *testing.T, want, got string) {
	t.Helper()
	a, err := os.ReadFile(want)
	require.NoError(t, err)
	b, err := os.ReadFile(got)
	require.NoError(t, err)
	require.True(t, bytes.Equal(a, b), "%d bytes and %d", len(a), len(b))
	left, err := filepath.Glob(filepath.Join(filepath.Dir(got), ".*"))
	require.NoError(t, err)
	require.Empty(t, left, "no unfinished file is left")
}

func TestFetchGetsTheFileThatServeHas(t *testing.T) {
	exe := program(t)
	for _, size := range []int{0, 1<<20 + 1, 5<<20 - 3} { // parts of 1 MiB
		path, sum := testFile(t, size)
		s := startServe(t, exe, path, "--request-mib", "1", "--memory-mib", "2", "--block-bytes", "65536")
		require.Equal(t, fileOffer{filepath.Base(path), int64(size), sum, 65536, 16, max((size+1<<20-1)>>20, 1)}, s.ready.fileOffer)
		require.Equal(t, "nixlgo fetch "+s.ready.URL, s.ready.Fetch)
		var all sync.WaitGroup
		for i := range 2 { // at once, and more than memory has room for
			all.Go(func() {
				to := filepath.Join(t.TempDir(), fmt.Sprint("copy", i))
				code, stdout, stderr := run(t, exe, "fetch", s.ready.URL, "--output", to, "--json")
				if code != 0 {
					t.Errorf("%d: %s", code, stderr)
					return
				}
				lines := strings.Split(strings.TrimSpace(stdout), "\n")
				var d fetchDone
				if err := json.Unmarshal([]byte(lines[len(lines)-1]), &d); err != nil || d.Event != "done" || d.Verified != s.ready.Parts || d.File != to || d.SHA256 != sum {
					t.Errorf("%v: %s", err, lines[len(lines)-1])
				}
				if n := strings.Count(stdout, `"event":"verified"`); n != s.ready.Parts {
					t.Errorf("%d parts verified: %s", n, stdout)
				}
				requireSameFile(t, path, to)
			})
		}
		all.Wait()
		deadline(t, "every lease to end", func() bool { return s.lines.count("read") == 2*s.ready.Parts })
		require.Equal(t, 2*s.ready.Parts, s.lines.count("granted"))
		require.Zero(t, s.lines.count("expired")+s.lines.count("failed"))
		require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
		<-s.lines.ended
		require.NoError(t, s.cmd.Wait())
		require.Equal(t, 1, s.lines.count("drained"))
	}
}

func TestFetchTakesParamsInsteadOfAURL(t *testing.T) {
	exe := program(t)
	path, _ := testFile(t, 3<<20-5)
	s := startServe(t, exe, path, "--params", "--request-mib", "1", "--block-bytes", "1000000")
	params := func() (all []string) {
		s.lines.mu.Lock()
		defer s.lines.mu.Unlock()
		for _, line := range s.lines.raw {
			if strings.Contains(line, `"event":"params"`) {
				all = append(all, line)
			}
		}
		return all
	}
	deadline(t, "params of every part", func() bool { return len(params()) == 4 })
	to := filepath.Join(t.TempDir(), "copy")
	code, _, stderr := run(t, exe, append([]string{"fetch", "--output", to}, params()...)...)
	require.Zero(t, code, stderr)
	requireSameFile(t, path, to)

	deadline(t, "new params, for what was read", func() bool { return len(params()) == 8 })
	pipe := exec.Command(exe, "fetch", "-", "--output", to)
	pipe.Stdin = strings.NewReader("some line\n" + strings.Join(params()[4:], "\n"))
	out, err := pipe.CombinedOutput()
	require.NoError(t, err, string(out))
	requireSameFile(t, path, to)

	code, _, stderr = run(t, exe, append([]string{"fetch", "--output", to}, params()[:4]...)...)
	require.Equal(t, exitFailed, code, "those were read")
	require.Contains(t, stderr, "lapsed")
	requireSameFile(t, path, to) // what was there before
	code, _, stderr = run(t, exe, "fetch", params()[0])
	require.Equal(t, exitFailed, code)
	require.Contains(t, stderr, "kv_transfer_params of 1 part of the file were given, and it has 4")
}

// A reader that dies costs a lease; one that comes later gets everything.
func TestServeOutlivesAReaderThatIsKilled(t *testing.T) {
	exe := program(t)
	path, _ := testFile(t, 1000)
	s := startServe(t, exe, path, "--request-mib", "1", "--memory-mib", "1", "--lease", "1s") // room for one
	take(t, s)                                                                                // and never read
	to := filepath.Join(t.TempDir(), "copy")
	code, _, stderr := run(t, exe, "fetch", s.ready.URL, "--output", to)
	require.Zero(t, code, stderr)
	requireSameFile(t, path, to)
	require.Equal(t, 1, s.lines.count("expired"))
	require.Equal(t, "part0~1", s.lines.first("expired").Request)
}

func TestServeSaysWhoHoldsALeaseWhenItDrains(t *testing.T) {
	exe := program(t)
	path, _ := testFile(t, 1000)
	get := func(url string) (int, string) {
		resp, err := http.Get(url)
		require.NoError(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp.StatusCode, string(body)
	}
	s := startServe(t, exe, path, "--drain", "30s")
	reader := startNode(t, func(c *nixlgo.Config) { *c = fileNode(); c.Blocks, c.BlockBytes = 1, 1<<20 })
	params := take(t, s)
	code, body := get(s.ready.URL + "/readyz")
	require.Equal(t, http.StatusOK, code, body)
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
	deadline(t, "the drain", func() bool { return s.lines.count("waiting") == 1 })
	e := s.lines.first("waiting")
	require.Equal(t, "part0~1", e.Request)
	require.Contains(t, e.Reader, "127.0.0.1:")
	require.Positive(t, e.LeftS)
	code, _ = get(s.ready.URL + "/readyz")
	require.Equal(t, http.StatusServiceUnavailable, code)
	code, _ = get(s.ready.URL + "/healthz")
	require.Equal(t, http.StatusOK, code)
	code, _, stderr := run(t, exe, "fetch", s.ready.URL, "--output", filepath.Join(t.TempDir(), "copy"))
	require.Equal(t, exitFailed, code)
	require.Contains(t, stderr, "draining")
	require.NoError(t, reader.Fetch(t.Context(), params, []int{0}), "what was published goes on")
	<-s.lines.ended
	require.NoError(t, s.cmd.Wait())
	require.Equal(t, 1, s.lines.count("drained"))

	s = startServe(t, exe, path, "--drain", "100ms")
	take(t, s)
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
	<-s.lines.ended
	require.Error(t, s.cmd.Wait())
	require.Equal(t, exitFailed, s.cmd.ProcessState.ExitCode())
	require.Equal(t, "part0~1", s.lines.first("left").Request)
	require.Equal(t, 1, s.lines.count("aborted"))

	s = startServe(t, exe, path, "--drain", "1h")
	take(t, s)
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
	deadline(t, "the drain", func() bool { return s.lines.count("draining") == 1 })
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
	<-s.lines.ended
	require.Error(t, s.cmd.Wait())
	require.Equal(t, syscall.SIGTERM, s.cmd.ProcessState.Sys().(syscall.WaitStatus).Signal(), "the second one ends it at once")
}

func TestServeShowsItsNode(t *testing.T) {
	exe := program(t)
	path, _ := testFile(t, 1000)
	s := startServe(t, exe, path)
	take(t, s)
	for path, says := range map[string]string{
		"/metrics":            "nixlgo_lease_granted_total 1",
		"/v1/file":            `"bytes":1000`,
		"/healthz":            `"ok":true`,
		"/debug/leases":       "part0~1",
		"/debug/leases.json":  `"request":"part0~1","reader":"127.0.0.1:`,
		"/debug/leases?q=nix": "No lease matches",
	} {
		resp, err := http.Get(s.ready.URL + path)
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		resp.Body.Close()
		require.Equal(t, http.StatusOK, resp.StatusCode, path)
		require.Contains(t, string(body), says, path)
	}
	for _, part := range []string{"1", "-1", "x", "99999999999999999999"} {
		resp, err := http.Post(s.ready.URL+"/v1/parts/"+part, "", nil)
		require.NoError(t, err)
		resp.Body.Close()
		require.Equal(t, http.StatusNotFound, resp.StatusCode)
	}
}

// A file that changes under serve is not passed as the one that was offered.
func TestServeRefusesAFileThatChanged(t *testing.T) {
	exe := program(t)
	path, _ := testFile(t, 1000)
	s := startServe(t, exe, path)
	require.NoError(t, os.WriteFile(path, []byte("shorter"), 0o600))
	to := filepath.Join(t.TempDir(), "copy")
	code, _, stderr := run(t, exe, "fetch", s.ready.URL, "--output", to)
	require.Equal(t, exitFailed, code)
	require.Contains(t, stderr, "has changed")
	require.NoFileExists(t, to)
	require.Zero(t, s.lines.count("granted"))
}

// The times and the size of a file can be those of another: what is on the disk in the end is compared with what was offered.
func TestFetchComparesWhatIsOnTheDisk(t *testing.T) {
	exe := program(t)
	path, sum := testFile(t, 1000)
	info, err := os.Stat(path)
	require.NoError(t, err)
	s := startServe(t, exe, path)
	require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte("x"), 1000), 0o600))
	require.NoError(t, os.Chtimes(path, time.Time{}, info.ModTime()))
	to := filepath.Join(t.TempDir(), "copy")
	code, _, stderr := run(t, exe, "fetch", s.ready.URL, "--output", to)
	require.Equal(t, exitFailed, code)
	require.Contains(t, stderr, sum)
	files, err := os.ReadDir(filepath.Dir(to))
	require.NoError(t, err)
	require.Empty(t, files)
}

// sourceOf has one part, whose params are made anew each time.
type sourceOf struct {
	file   fileOffer
	params func(time int) *lease.Params
	asked  int
}

func (s *sourceOf) offer() fileOffer { return s.file }
func (s *sourceOf) repeatable() bool { return true }
func (s *sourceOf) part(context.Context, int) (*lease.Params, error) {
	s.asked++
	return s.params(s.asked), nil
}

// vllm#52234: what lapsed under the read is not written, but asked for again, as often as is allowed.
func TestFetchAsksAgainForAPartWhoseLeaseLapsed(t *testing.T) {
	offer := newOffer("file", 100, 4096, 1)
	h := sha256.Sum256(bytes.Repeat([]byte{7}, 100))
	offer.SHA256 = hex.EncodeToString(h[:])
	fileNodeOf := func(c *nixlgo.Config) { *c = fileNode(); c.Blocks, c.BlockBytes = 4, 4096 }
	owner, reader := startNode(t, fileNodeOf), startNode(t, fileNodeOf)
	for _, c := range []struct{ lapsed, attempts int }{{0, 1}, {1, 2}, {2, 3}, {2, 2}} {
		var pubs []*nixlgo.Publication
		source := &sourceOf{file: offer, params: func(time int) *lease.Params {
			block := time - 1
			for i := range owner.Block(0, block) {
				owner.Block(0, block)[i] = 7
			}
			p, err := owner.Publish(t.Context(), fmt.Sprintf("%v/%d", c, time), []int{block}, 1)
			require.NoError(t, err)
			pubs = append(pubs, p)
			params := p.Params()
			if time <= c.lapsed {
				params.Lease.Nonce++
			}
			return params
		}}
		var out bytes.Buffer
		f := &fetcher{fetchConfig: &fetchConfig{parallel: 1, attempts: c.attempts, format: formatJSON}, source: source, offer: offer, node: reader, blocks: newBlockPool(1)}
		path := filepath.Join(t.TempDir(), "file")
		err := writeWhole(path, io.Discard, func(file *os.File) error { return f.fetch(t.Context(), file, &out, io.Discard) })
		require.Equal(t, min(c.lapsed+1, c.attempts), source.asked)
		require.Equal(t, c.lapsed, strings.Count(out.String(), `"event":"lapsed"`), &out)
		if c.lapsed < c.attempts {
			require.NoError(t, err)
			require.Equal(t, c.lapsed, f.again)
			require.FileExists(t, path)
		} else {
			require.ErrorIs(t, err, lease.ErrLapsed)
			require.NoFileExists(t, path)
		}
		for _, p := range pubs {
			_ = p.Revoke() // those that were not read
			<-p.Done()
		}
	}
}

// What another machine says is not trusted with names, sizes or memory.
func TestFetchRefusesWhatNoServeSays(t *testing.T) {
	exe := program(t)
	sum := strings.Repeat("ab", 32)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "here"), []byte("mine"), 0o600))
	link := filepath.Join(t.TempDir(), "link") // as /dev/stdout is, which a root would replace
	require.NoError(t, os.Symlink("to", link))
	offer := fileOffer{Name: "x", Bytes: 1, SHA256: sum, BlockBytes: 1024, PartBlocks: 1, Parts: 1}
	with := func(change func(*fileOffer)) any {
		o := offer
		change(&o)
		return o
	}
	for _, c := range []struct {
		offer any
		args  []string
		says  string
	}{
		{with(func(o *fileOffer) { o.Name = "../x" }), nil, `calls its file "../x"`},
		{with(func(o *fileOffer) { o.Name = ".bashrc" }), nil, "--output"},
		{with(func(o *fileOffer) { o.Name = "" }), nil, "--output"},
		{with(func(o *fileOffer) { o.Name = "a\nb" }), nil, "--output"},
		{with(func(o *fileOffer) { o.Name = "here" }), nil, "--overwrite"},
		{with(func(o *fileOffer) { o.Parts = 2 }), nil, "2 parts"},
		{with(func(o *fileOffer) { o.Bytes = -1 }), nil, "-1 bytes"},
		{with(func(o *fileOffer) { o.BlockBytes, o.PartBlocks = 1<<40, 1<<40 }), nil, "blocks of"},
		{with(func(o *fileOffer) { o.SHA256 = "abc" }), nil, "no SHA-256"},
		{with(func(o *fileOffer) { o.BlockBytes = 2 << 20 }), []string{"--memory-mib", "1"}, "--memory-mib 1"},
		{"a string", nil, "no nixlgo serve"},
		{offer, []string{"--output", "nothing/"}, "there is no directory nothing/"},
		{offer, []string{"--output", "nothing/x"}, "there is no directory nothing/"},
		{offer, []string{"--output", link}, "no regular file"},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { answer(w, http.StatusOK, c.offer) }))
		cmd := exec.Command(exe, append([]string{"fetch", server.URL}, c.args...)...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		server.Close()
		require.Error(t, err)
		require.Equal(t, exitFailed, cmd.ProcessState.ExitCode(), string(out))
		require.Contains(t, string(out), c.says)
	}
	mine, err := os.ReadFile(filepath.Join(dir, "here"))
	require.NoError(t, err)
	require.Equal(t, "mine", string(mine))
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, files, 1)
}

func TestFetchDoesNotWaitForeverForAServerThatIsSilent(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer server.Close()
	code, _, stderr := run(t, program(t), "fetch", server.URL, "--timeout", "100ms")
	require.Equal(t, exitFailed, code, stderr)
	require.Contains(t, stderr, "no answer in 100ms (--timeout)")
}

func TestFetchIsInterruptedWhileItWaitsForParams(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	in, nobody := io.Pipe()
	defer nobody.Close()
	interrupted := errors.New("interrupted")
	cancel(interrupted)
	_, err := openSource(ctx, []string{"-"}, in, time.Minute)
	require.ErrorIs(t, err, interrupted)
}

func TestFetchSaysThatThereAreNoParams(t *testing.T) {
	_, err := openSource(t.Context(), []string{"-"}, strings.NewReader("not\nthese\n"), time.Minute)
	require.ErrorContains(t, err, "standard input has no kv_transfer_params")
}

func TestWriteWholeLeavesNothingHalfDone(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	t.Chdir(dir)
	require.NoError(t, writeWhole("file", io.Discard, func(f *os.File) error {
		require.FileExists(t, filepath.Join(dir, filepath.Base(f.Name())), "a rename from another file system fails")
		_, err := f.WriteString("first")
		return err
	}))
	err := writeWhole(path, io.Discard, func(f *os.File) error {
		_, err := f.WriteString("sec")
		require.NoError(t, err)
		return context.Canceled
	})
	require.ErrorIs(t, err, context.Canceled)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "first", string(text))
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, files, 1)
}

// kill -9 leaves a file that nobody would remove.
func TestFetchReplacesWhatAKilledFetchHasLeft(t *testing.T) {
	path := filepath.Join(t.TempDir(), "copy")
	left := filepath.Join(filepath.Dir(path), ".copy.part")
	require.NoError(t, os.WriteFile(left, []byte("longer than the file"), 0o600))
	var said bytes.Buffer
	require.NoError(t, writeWhole(path, &said, func(f *os.File) error {
		var other bytes.Buffer
		err := writeWhole(path, &other, func(*os.File) error { return errors.New("two write it") })
		require.EqualError(t, err, "another nixlgo fetch is writing "+path)
		require.Empty(t, other.String())
		_, err = f.WriteString("whole")
		return err
	}))
	require.Equal(t, "fetch: "+left+", 20 B, was left by a fetch that was killed: it is replaced\n", said.String())
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "whole", string(b))
	require.NoFileExists(t, left)

	said.Reset()
	require.NoError(t, writeWhole(path, &said, func(*os.File) error { return nil }))
	require.Empty(t, said.String(), "nothing was left")

	secret := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(secret, []byte("secret"), 0o600))
	require.NoError(t, os.Symlink(secret, left))
	require.Error(t, writeWhole(path, &said, func(*os.File) error { return nil }), "a link that somebody else put there")
	b, err = os.ReadFile(secret)
	require.NoError(t, err)
	require.Equal(t, "secret", string(b))
}

func TestServeAndFetchRefuseAWrongCommandLine(t *testing.T) {
	exe := program(t)
	path, _ := testFile(t, 10)
	for _, args := range [][]string{
		{"serve"}, {"serve", path, path}, {"serve", path, "--request-mib", "0"}, {"serve", path, "--memory-mib", "1", "--request-mib", "2"},
		{"serve", path, "--block-bytes", "0"}, {"serve", path, "--lease", "-1s"}, {"serve", path, "--drain", "-1s"},
		{"serve", path, "--host", "0.0.0.0"}, {"serve", path, "--port", "65536"}, {"relay", "--host", "::"}, {"fetch", "http://a", "--output", "-"},
		{"fetch"}, {"fetch", "nonsense"}, {"fetch", "http://a", "http://b"}, {"fetch", "-", "{}"}, {"fetch", "http://a", "--parallel", "0"},
		{"fetch", "http://a", "--timeout", "0s"}, {"fetch", "http://a", "--attempts", "0"},
	} {
		code, stdout, stderr := run(t, exe, args...)
		require.Equal(t, exitUsage, code, "%v: %s", args, stderr)
		require.Empty(t, stdout)
	}
	for _, args := range [][]string{
		{"serve", filepath.Join(t.TempDir(), "nothing")}, {"serve", t.TempDir()}, {"serve", path, "--http", "192.0.2.1:80"}, {"serve", path, "--library", "/nowhere.so"},
		{"fetch", "http://127.0.0.1:1"}, {"fetch", "{}"},
	} {
		code, _, stderr := run(t, exe, args...)
		require.Equal(t, exitFailed, code, "%v: %s", args, stderr)
		require.True(t, strings.HasPrefix(stderr, "nixlgo: "+args[0]), stderr)
	}
}
