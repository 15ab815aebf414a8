package nixl

import (
	"fmt"
	"os"
	"slices"
)

// EnvDefault is an environment variable that Load sets before the library reads it.
type EnvDefault struct {
	Name, Value string
	Why         string
	// Override replaces a value that the user set. The others leave it alone.
	Override bool
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
	{Name: "UCX_TCP_USER_TIMEOUT", Value: "10s",
		Why: "silent packet loss becomes an error within about twice this time, instead of never"},
	{Name: "UCX_TCP_CONN_NB", Value: "y",
		Why: "connecting to a host that does not answer holds up the whole agent otherwise, for the time above"},
	{Name: "UCX_TCP_TX_SEG_SIZE", Value: "64K",
		Why: "READs of many MiB over TCP are 1.4 to 2.9 times faster than with the default"},
	{Name: "UCX_USE_MT_MUTEX", Value: "y",
		Why: "the progress thread and a polling thread share a lock; the default, a spin lock, takes a core from the READ"},
	{Name: "UCX_RCACHE_MAX_UNRELEASED", Value: "1024",
		Why: "bounds the registrations that UCX's cache keeps after their release"},
}

// setEnvDefaults runs before the library is opened. os.Setenv reaches C's
// getenv in a program built with cgo.
func setEnvDefaults() error {
	for _, d := range envDefaults {
		if _, set := os.LookupEnv(d.Name); set && !d.Override {
			continue
		}
		if err := os.Setenv(d.Name, d.Value); err != nil {
			return fmt.Errorf("nixl: set %s: %w", d.Name, err)
		}
	}
	return nil
}
