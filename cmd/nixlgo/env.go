package main

import (
	"cmp"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/nixl/diagnose"
)

// The variables of NIXL and vLLM that are read here, too. A value that NIXL would take for its default in silence is an error.
var (
	envBooleans = []string{"NIXL_TELEMETRY_ENABLE", "NIXL_UCX_DEEPBIND"}
	envPorts    = []string{"NIXL_TELEMETRY_PROMETHEUS_PORT", envSidePort}
	yesAndNo    = []string{"y", "yes", "on", "true", "enable", "1", "n", "no", "off", "false", "disable", "0"}
)

const (
	envSideHost = "VLLM_NIXL_SIDE_CHANNEL_HOST"
	envSidePort = "VLLM_NIXL_SIDE_CHANNEL_PORT"
	envPodIP    = "POD_IP"
)

// checkEnv refuses variables whose values mean nothing.
func checkEnv() error {
	for _, name := range envBooleans {
		if v := os.Getenv(name); v != "" && !slices.Contains(yesAndNo, strings.ToLower(v)) {
			return usageError{fmt.Errorf("%s is %.40q, want one of %s", name, v, strings.Join(yesAndNo, ", "))}
		}
	}
	for _, name := range envPorts {
		if v := os.Getenv(name); v != "" {
			if n, err := strconv.Atoi(v); err != nil || n < 1 || n > 65535 {
				return usageError{fmt.Errorf("%s is %.40q, want a port, 1 to 65535", name, v)}
			}
		}
	}
	return nil
}

// sideChannelFlags adds --host and --port of a node, whose defaults are vLLM's variables.
func sideChannelFlags(f *pflag.FlagSet, c *nixlgo.Config) {
	port, _ := strconv.Atoi(os.Getenv(envSidePort)) // checkEnv refuses what is no port
	host := cmp.Or(os.Getenv(envSideHost), os.Getenv(envPodIP), "127.0.0.1")
	f.StringVar(&c.Host, "host", host, "side-channel address, bound and advertised: $"+envSideHost+", else $"+envPodIP+", else loopback")
	f.IntVar(&c.Port, "port", port, "side-channel port, 0 for any free one: $"+envSidePort+", else 0")
}

// checkSideChannel refuses an address or a port that readers are told and cannot reach.
func checkSideChannel(c *nixlgo.Config) error {
	if err := checkHost(c.Host); err != nil {
		return fmt.Errorf("--host: %w", err)
	}
	if net.ParseIP(c.Host).IsUnspecified() {
		return fmt.Errorf("--host %s is what readers are told, and none can connect to it: want an address of this machine that they reach", c.Host)
	}
	return checkBounds(bound{"port", c.Port, 0, 65535})
}

// warnOfPort says what may keep a fixed port from being bound again.
func warnOfPort(log *slog.Logger, port int) {
	if cause, remedy := diagnose.ThisHost().ClientPort(port); cause != "" {
		log.Warn("--port may be taken at the next start", "port", port, "cause", cause, "remedy", "choose "+remedy)
	}
}

func libraryFlag(f *pflag.FlagSet, library *string) {
	f.StringVar(library, "library", "", "path of libnixl_capi.so (default: $NIXLGO_LIBRARY, else searched, see nixlgo doctor)")
}
