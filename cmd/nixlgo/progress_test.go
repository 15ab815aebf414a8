package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// terminal is a pseudo-terminal, and what was written to it.
type terminal struct {
	file *os.File
	mu   sync.Mutex
	seen bytes.Buffer
}

func openTerminal(t *testing.T) *terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetWinsize(int(slave.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 100}))
	term := &terminal{file: slave}
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = io.Copy(term, master) // ends with EIO when the other side is closed
	}()
	t.Cleanup(func() {
		_ = slave.Close()
		<-read
		_ = master.Close()
	})
	return term
}

func (x *terminal) Write(b []byte) (int, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.seen.Write(b)
}

func (x *terminal) text() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.seen.String()
}

func TestProgressIsForPeopleWhoWait(t *testing.T) {
	var file bytes.Buffer
	p := newProgress(&file, "model.gguf", 100, true)
	require.Nil(t, p.timer, "no terminal, no bar")
	p.add(50)
	_, err := io.WriteString(p.lines(&file), "a line\n")
	require.NoError(t, err)
	p.end()
	require.Equal(t, "a line\n", file.String())

	x := openTerminal(t)
	p = newProgress(x.file, "quick", 100, true)
	p.add(100)
	p.end()
	p.show() // the timer came too late
	require.Empty(t, x.text(), "whoever waits for less than two seconds sees nothing")
}

func TestProgressDrawsABarBelowTheLines(t *testing.T) {
	x := openTerminal(t)
	p := newProgress(x.file, "model.gguf", 64<<20, true)
	out := p.lines(x.file)
	_, err := io.WriteString(out, "before the bar\n")
	require.NoError(t, err)
	p.add(16 << 20)
	p.show() // as after two seconds
	p.add(16 << 20)
	deadline(t, "the bar", func() bool { return strings.Contains(x.text(), "32.0 MiB of 64.0 MiB") })
	require.Contains(t, x.text(), "model.gguf")
	require.Contains(t, x.text(), "/s")
	_, err = io.WriteString(out, "above the bar\n")
	require.NoError(t, err)
	deadline(t, "the line", func() bool { return strings.Contains(x.text(), "above the bar") })
	p.end()
	p.end()
	_, err = io.WriteString(out, "after the bar\n")
	require.NoError(t, err)
	deadline(t, "the last line", func() bool { return strings.HasSuffix(x.text(), "after the bar\r\n") })
	for _, line := range []string{"before the bar", "above the bar", "after the bar"} {
		require.Equal(t, 1, strings.Count(x.text(), line))
	}

	for _, unknown := range []int64{0, 10} {
		x := openTerminal(t)
		p := newProgress(x.file, "wait for D", unknown, false)
		p.show()
		p.add(3)
		want := "wait for D"
		if unknown > 0 {
			want = "3 of 10"
		}
		deadline(t, want, func() bool { return strings.Contains(x.text(), want) })
		p.end()
	}
}
