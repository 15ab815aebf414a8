package main

import (
	"bytes"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
)

const testKey = "0123456789abcdef0123456789abcdef"

func keyFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestKeyIsWhatIsInTheFile(t *testing.T) {
	for text, want := range map[string]string{testKey: testKey, testKey + "\n": testKey, " " + testKey + "\r\n": testKey, "0123456789abcde\n": "", "": "",
		strings.Repeat("x", 4097): ""} {
		key, err := readKey(keyFile(t, text))
		require.Equal(t, want, string(key))
		require.Equal(t, want == "", err != nil, text)
	}
	key, err := readKey("")
	require.NoError(t, err)
	require.Nil(t, key, "no key")
}

// The key is in a file or named by a variable, and in no command line, which every user of the machine sees.
func TestServeGivesNothingToWhoLacksItsKey(t *testing.T) {
	exe := program(t)
	path, _ := testFile(t, 100_000)
	right, wrong := keyFile(t, testKey+"\n"), keyFile(t, strings.ToUpper(testKey))
	s := startServe(t, exe, path, "--key-file", right)
	to := filepath.Join(t.TempDir(), "copy")
	for _, args := range [][]string{nil, {"--key-file", wrong}} {
		code, _, stderr := run(t, exe, append([]string{"fetch", s.ready.URL, "--output", to, "--attempts", "1"}, args...)...)
		require.Equal(t, exitFailed, code)
		require.Contains(t, stderr, "shared key")
		require.NoFileExists(t, to)
	}
	fetch := exec.Command(exe, "fetch", s.ready.URL, "--output", to)
	fetch.Env = append(os.Environ(), "NIXLGO_KEY_FILE="+right)
	out, err := fetch.CombinedOutput()
	require.NoError(t, err, string(out))
	requireSameFile(t, path, to)

	for _, c := range []struct {
		args []string
		says string
	}{{nil, "give --key-file"}, {[]string{"--key-file", wrong}, "is not the instance's"}} {
		code, stdout, stderr := run(t, exe, append([]string{"probe", s.ready.SideChannel, "--json"}, c.args...)...)
		require.Equal(t, exitFailed, code)
		require.Equal(t, "key", probeJSON(t, stdout).Failure)
		require.Contains(t, stderr, c.says)
	}
	code, stdout, stderr := run(t, exe, "probe", s.ready.SideChannel, "--json", "--read", "--key-file", right)
	require.Zero(t, code, stderr)
	require.Equal(t, s.ready.Engine, probeJSON(t, stdout).Engine)
}

func TestHoldRenewsAtAnOwnerWithAKey(t *testing.T) {
	exe := program(t)
	owner := startNode(t, func(c *nixlgo.Config) { c.Key = []byte(testKey) })
	d := startHold(t, exe, append(socketArgs(t), "--key-file", keyFile(t, testKey), "--lease", "600ms")...)
	holdOf(t, d, publish(t, owner, "req", 1), 0)
	deadline(t, "a heartbeat", func() bool { return owner.Stats().Worker.Leases.Renewals > 0 })
}

func TestAPortThatClientsMayTakeIsSaidAtTheStart(t *testing.T) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	require.NoError(t, err)
	first, err := strconv.Atoi(strings.Fields(string(text))[0])
	require.NoError(t, err)
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	warnOfPort(log, 0)
	warnOfPort(log, first-1)
	require.Empty(t, out.String())
	warnOfPort(log, first)
	require.Contains(t, out.String(), "ip_local_reserved_ports")
}

func TestTextsSayOneOfOne(t *testing.T) {
	require.Equal(t, []string{"0 blocks", "1 block", "2 blocks", "1 block"}, []string{many(0, "block"), many(1, "block"), many(2, "block"), many(int64(1), "block")})
	exe := program(t)
	path, _ := testFile(t, 1)
	s := exec.Command(exe, "serve", path)
	stdout, err := s.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, s.Start())
	lines := collectLines(stdout, nil)
	all := func() string {
		lines.mu.Lock()
		defer lines.mu.Unlock()
		return strings.Join(lines.raw, "\n")
	}
	deadline(t, "the line for fetch", func() bool { return strings.Contains(all(), "nixlgo fetch http://") })
	_, url, _ := strings.Cut(all(), "nixlgo fetch ")
	code, out, stderr := run(t, exe, "fetch", url, "--output", filepath.Join(t.TempDir(), "copy"))
	require.Zero(t, code, stderr)
	require.NoError(t, s.Process.Signal(os.Interrupt))
	<-lines.ended
	require.NoError(t, s.Wait())
	require.Contains(t, all(), " in 1 request, SHA-256")
	require.Contains(t, all(), ": 1 block, 1 B")
	require.Contains(t, out, "1 of 1 part verified")
	require.NotRegexp(t, `\b1 [a-z]{2,}s\b`, all()+out)
}
