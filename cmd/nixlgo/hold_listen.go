package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
)

// runtimeDir is a directory that belongs to this user alone.
func runtimeDir() (string, error) {
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
		return dir, nil
	}
	dir := fmt.Sprintf("/tmp/nixlgo-%d", os.Getuid())
	return dir, privateDir(dir)
}

// privateDir makes dir, and refuses one that somebody else could have prepared.
func privateDir(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !info.IsDir() || !ok || int(st.Uid) != os.Getuid() || info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("%s is not a directory that belongs to user %d with mode 0700: remove it, or name another", dir, os.Getuid())
	}
	return nil
}

// checkHoldListen refuses what is neither unix:/path nor, unless remote machines are allowed, a port of the loopback interface.
func checkHoldListen(listen string, allowRemote bool) error {
	if path, ok := strings.CutPrefix(listen, "unix:"); ok {
		if max := len(syscall.RawSockaddrUnix{}.Path) - 1; path == "" || len(path) > max {
			return fmt.Errorf("the path of a socket has %s, want 1 to %d", many(len(path), "byte"), max)
		}
		return nil
	}
	if err := checkListen(listen); err != nil {
		return fmt.Errorf("want unix:/path or 127.0.0.1:PORT: %w", err)
	}
	if host, _, _ := net.SplitHostPort(listen); !loopback(host) && !allowRemote {
		return errors.New("other machines reach it, and nothing authenticates them: want 127.0.0.1 or a socket, or --allow-remote as well")
	}
	return nil
}

// listenHold opens what checkHoldListen has let through. address is what a client is given.
func listenHold(listen string) (l net.Listener, address string, err error) {
	fail := func(err error) (net.Listener, string, error) {
		return nil, "", fmt.Errorf("hold: --listen %s: %w", listen, err)
	}
	if path, ok := strings.CutPrefix(listen, "unix:"); ok {
		if l, err = listenUnix(path); err != nil {
			return fail(err)
		}
		return l, listen, nil
	}
	if l, err = net.Listen("tcp", listen); err != nil {
		return fail(err)
	}
	return l, "http://" + l.Addr().String(), nil
}

func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsLoopback() || host == "localhost"
}

// listenUnix opens a socket for this user alone. One that a killed daemon left behind is replaced.
func listenUnix(path string) (net.Listener, error) {
	if info, err := os.Lstat(path); err == nil {
		if info.Mode()&os.ModeSocket == 0 {
			return nil, errors.New("a file that is no socket is there")
		}
		c, err := net.Dial("unix", path)
		if err == nil {
			return nil, errors.Join(errors.New("another daemon listens there"), c.Close())
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return nil, err
		}
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	// Before anything else runs that makes files: there is no moment in which others could connect.
	old := syscall.Umask(0o177)
	defer syscall.Umask(old)
	return net.Listen("unix", path)
}
