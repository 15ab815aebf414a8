package nixl

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// EnvDefault is an environment variable that Load sets before the library reads it.
type EnvDefault struct {
	Name, Value string
	Why         string
	// Override replaces a value that the user set. The others leave it alone.
	Override bool
	// Transport is the UCX transport that reads it, empty for all. Where UCX_TLS leaves that out it is not set: UCX would warn.
	Transport string
}

// EnvDefaults returns the variables that Load sets before it opens the library
// for the first time. UCX and NIXL read them once, at the first backend.
func EnvDefaults() []EnvDefault { return slices.Clone(envDefaults[:]) }

var envDefaults = [...]EnvDefault{
	{Name: "UCX_HANDLE_ERRORS", Value: "none", Override: true,
		Why: "with bt, UCX takes SIGSEGV, and a nil dereference in Go kills the process instead of panicking"},
	{Name: "UCX_DEBUG_SIGNO", Value: "0",
		Why: "UCX takes SIGHUP otherwise, and signal.Notify never sees it"},
	{Name: "UCX_LOG_FILE", Value: "stderr",
		Why: "UCX prints its diagnostics on standard output otherwise"},
	{Name: "UCX_TCP_USER_TIMEOUT", Value: "10s", Transport: "tcp",
		Why: "silent packet loss becomes an error within about twice this time, instead of never"},
	{Name: "UCX_TCP_CONN_NB", Value: "y", Transport: "tcp",
		Why: "connecting to a host that does not answer holds up the whole agent otherwise, for the time above"},
	{Name: "UCX_TCP_TX_SEG_SIZE", Value: "64K", Transport: "tcp",
		Why: "READs of many MiB over TCP are 1.4 to 2.9 times faster than with the default"},
	{Name: "UCX_CMA_TX_QUOTA", Value: "16", Transport: "cma",
		Why: "over shared memory UCX copies one block per turn of its progress otherwise, and READs of small blocks take up to twice as long"},
	{Name: "UCX_USE_MT_MUTEX", Value: "y",
		Why: "the progress thread and a polling thread share a lock; the default, a spin lock, takes a core from the READ"},
	{Name: "UCX_RCACHE_MAX_UNRELEASED", Value: "1024",
		Why: "bounds the registrations that UCX's cache keeps after their release"},
}

// setEnvDefaults runs before the library is opened. os.Setenv reaches C's
// getenv in a program built with cgo.
func setEnvDefaults() error {
	tls := os.Getenv("UCX_TLS")
	for _, d := range envDefaults {
		if _, set := os.LookupEnv(d.Name); set && !d.Override || !uses(tls, d.Transport) {
			continue
		}
		if err := os.Setenv(d.Name, d.Value); err != nil {
			return fmt.Errorf("nixl: set %s: %w", d.Name, err)
		}
	}
	return nil
}

// uses reports whether a value of UCX_TLS lets UCX use a transport.
func uses(tls, transport string) bool {
	names, without := strings.CutPrefix(tls, "^")
	if transport == "" || names == "" || names == "all" {
		return !without || transport == ""
	}
	listed := slices.ContainsFunc(strings.Split(names, ","), func(name string) bool {
		name = strings.TrimPrefix(name, `\`) // the transport, not the alias of that name
		return name == transport || transport == "cma" && (name == "shm" || name == "sm")
	})
	return listed != without
}
