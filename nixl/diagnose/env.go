package diagnose

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// The variables that are named in more than one place.
const (
	libraryVariable = "NIXLGO_LIBRARY" // nixl.LibraryVariable
	telemetryPort   = "NIXL_TELEMETRY_PROMETHEUS_PORT"
	sideHost        = "VLLM_NIXL_SIDE_CHANNEL_HOST"
	sidePort        = "VLLM_NIXL_SIDE_CHANNEL_PORT"
	podIP           = "POD_IP"
)

// shown lists the variables that matter to NIXL and to this program. Those of shownPrefixes matter too.
var shown = []string{
	libraryVariable, "NIXLGO_KEY_FILE", "NIXL_PREFIX", "NIXL_PLUGIN_DIR", "NIXL_LOG_LEVEL", "NIXL_ETCD_ENDPOINTS", "NIXL_ETCD_NAMESPACE",
	"NIXL_TELEMETRY_ENABLE", "NIXL_TELEMETRY_EXPORTER", telemetryPort, "NIXL_UCX_DEEPBIND", sideHost, sidePort, podIP,
	"OTEL_SERVICE_NAME", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG",
	"LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV",
}

var shownPrefixes = []string{"UCX_", pciPrefix}

// pciPrefix begins the variables in which Kubernetes' SR-IOV plugin lists the PCI addresses that a container was given.
const pciPrefix = "PCIDEVICE_"

// checkEnv reports every variable that matters and is set, in alphabetical order, and those that are missing.
func (h *Host) checkEnv(devices []device) []Finding {
	var fs []Finding
	for _, name := range slices.Sorted(maps.Keys(h.Env)) {
		hasPrefix := func(p string) bool { return strings.HasPrefix(name, p) }
		if !slices.Contains(shown, name) && !slices.ContainsFunc(shownPrefixes, hasPrefix) {
			continue
		}
		fs = append(fs, h.checkVariable(Finding{Name: name, Status: OK, Value: h.Env[name]}, devices))
	}
	if ip := h.podIP(); ip != "" && h.Env[sideHost] == "" {
		f := Finding{Name: sideHost, Value: "not set"}
		fs = append(fs, f.warn("vLLM advertises localhost then, which readers on other machines take for themselves (nixlgo takes POD_IP)",
			"set "+sideHost+" to the pod's address, "+ip).fix(ip))
	}
	if _, set := h.Env["UCX_NET_DEVICES"]; !set {
		fs = append(fs, h.checkGivenDevices(devices)...)
	}
	return fs
}

func (h *Host) checkVariable(f Finding, devices []device) Finding {
	switch f.Name {
	case "UCX_TLS":
		return checkTransports(f, devices)
	case "UCX_NET_DEVICES":
		return h.checkNetDevices(f, devices)
	case "UCX_IB_GID_INDEX":
		return h.checkGIDIndex(f, devices)
	case "NIXL_PLUGIN_DIR":
		return checkPluginDir(h.FS, f)
	case libraryVariable:
		return checkLibrary(h.FS, f)
	case telemetryPort, sidePort:
		if n, err := strconv.Atoi(f.Value); err != nil || n < 1 || n > 65535 {
			return f.fail("it is not a port", "set "+f.Name+" to a number of 1 to 65535, or unset it").fix("")
		}
		if f.Name == telemetryPort {
			return h.checkTelemetry(f)
		}
		port, _ := strconv.Atoi(f.Value)
		if cause, remedy := h.ClientPort(port); cause != "" {
			return f.warn(cause, "set "+f.Name+" to "+remedy)
		}
	case "NIXL_TELEMETRY_ENABLE", "NIXL_UCX_DEEPBIND":
		if _, ok := yes(f.Value); !ok {
			return f.fail("it is neither yes nor no", "set "+f.Name+" to y or n, or unset it").fix("")
		}
		if _, set := h.Env[telemetryPort]; !set && f.Name == "NIXL_TELEMETRY_ENABLE" {
			return h.checkTelemetry(f)
		}
	case sideHost:
		return h.checkSideHost(f)
	}
	if strings.HasPrefix(f.Name, pciPrefix) && !strings.HasSuffix(f.Name, "_INFO") {
		return checkGiven(f, devices)
	}
	return f
}

// yes reads a switch as NIXL does; ok is false for what is none.
func yes(value string) (on, ok bool) {
	switch strings.ToLower(value) {
	case "y", "yes", "on", "true", "enable", "1":
		return true, true
	case "n", "no", "off", "false", "disable", "0":
		return false, true
	}
	return false, false
}

// checkTelemetry examines the port that NIXL's Prometheus exporter listens on, for the finding about its variable or about
// the one that switches it on. Ranks of one machine fight for one port (nixl#1838), and others' default is 9090, too.
func (h *Host) checkTelemetry(f Finding) Finding {
	if on, _ := yes(h.Env["NIXL_TELEMETRY_ENABLE"]); !on || h.Env["NIXL_TELEMETRY_EXPORTER"] != "prometheus" {
		return f
	}
	port, err := strconv.Atoi(cmp.Or(h.Env[telemetryPort], "9090"))
	if err != nil || h.Bind("", port) == nil {
		return f
	}
	f = f.warn(fmt.Sprintf("something listens on port %d, where NIXL's exporter is to listen: another rank, or Prometheus itself", port),
		"give each rank a port of its own in "+telemetryPort)
	for free := port + 1; free < port+100; free++ {
		if h.Bind("", free) == nil {
			f.Fix = []Setting{{telemetryPort, strconv.Itoa(free)}}
			break
		}
	}
	return f
}

// podIP is POD_IP, "" where it is not set, or is no address that others reach.
func (h *Host) podIP() string {
	if a, err := netip.ParseAddr(h.Env[podIP]); err != nil || a.IsLoopback() || a.IsUnspecified() {
		return ""
	}
	return h.Env[podIP]
}

// checkSideHost examines the address that an owner binds and advertises.
func (h *Host) checkSideHost(f Finding) Finding {
	ip := h.podIP()
	remedy := "set " + sideHost + " to an address of this machine that readers reach"
	if ip != "" {
		remedy += ", such as the pod's, " + ip
	}
	addr, err := netip.ParseAddr(f.Value)
	local := f.Value == "localhost" || err == nil && addr.IsLoopback()
	switch {
	case err == nil && addr.IsUnspecified():
		return f.warn("it is also what readers are told to connect to, and they take it for themselves", remedy).fix(ip)
	case local && ip != "":
		return f.warn("readers on other machines take it for themselves", remedy).fix(ip)
	case local:
		f.Cause = "readers of this machine alone"
		return f
	}
	var unknown *net.DNSError
	switch err := h.Bind(f.Value, 0); {
	case errors.As(err, &unknown):
		return f.fail("the name does not resolve here", remedy).fix(ip)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return f.fail("no interface of this machine has the address", remedy).fix(ip)
	case err != nil:
		return f.fail(err.Error(), remedy).fix(ip)
	}
	return f
}

// ClientPort says why port is a bad one to listen on at every start: the kernel gives it to connections of clients, too, so that an
// instance that restarts may find it taken. remedy is what to choose in its place. Both are "" for a good one.
func (h *Host) ClientPort(port int) (cause, remedy string) {
	var first, last int
	text, err := fs.ReadFile(h.FS, portRange)
	if err != nil {
		return "", ""
	}
	if n, _ := fmt.Sscan(string(text), &first, &last); n != 2 || port < first || port > last {
		return "", ""
	}
	text, _ = fs.ReadFile(h.FS, reservedPorts) // none, where it cannot be read
	reserved := strings.TrimSpace(string(text))
	for _, part := range strings.Split(reserved, ",") {
		low, high, isRange := strings.Cut(part, "-")
		a, err := strconv.Atoi(low)
		b := a
		if isRange {
			b, _ = strconv.Atoi(high)
		}
		if err == nil && a <= port && port <= b {
			return "", ""
		}
	}
	remedy = fmt.Sprintf("a port below %d, such as 5600", first)
	if first <= 5600 {
		remedy = fmt.Sprintf("a port outside of %d to %d", first, last)
	}
	all := strings.TrimPrefix(fmt.Sprintf("%s,%d", reserved, port), ",")
	return fmt.Sprintf("the kernel gives the ports %d to %d (net.ipv4.ip_local_port_range) to connections of clients, so an instance that restarts may find "+
			"it taken: address already in use", first, last),
		remedy + fmt.Sprintf(", or reserve it: sysctl -w net.ipv4.ip_local_reserved_ports=%s", all)
}

const (
	portRange     = "proc/sys/net/ipv4/ip_local_port_range"
	reservedPorts = "proc/sys/net/ipv4/ip_local_reserved_ports"
)

// checkLibrary examines NIXLGO_LIBRARY, beside which nothing is tried.
func checkLibrary(fsys fs.FS, f Finding) Finding {
	if !path.IsAbs(f.Value) {
		return f // relative to a directory that FS does not know; the check `library` tells
	}
	if _, err := fs.Stat(fsys, inFS(f.Value)); err != nil {
		return f.fail(fmt.Sprintf("the library is looked for there alone: %v", reason(err)), "correct "+libraryVariable+", or unset it to search").fix("")
	}
	return f
}

// checkPluginDir examines NIXL_PLUGIN_DIR, which replaces the directory beside the library.
func checkPluginDir(fsys fs.FS, f Finding) Finding {
	const remedy = "unset NIXL_PLUGIN_DIR: the library finds the plugins beside itself"
	if !path.IsAbs(f.Value) {
		return f // relative to a directory that FS does not know; the check `plugins` tells
	}
	dir := inFS(f.Value)
	if _, err := fs.ReadDir(fsys, dir); err != nil {
		return f.fail(fmt.Sprintf("NIXL looks for its plugins there alone: %v", reason(err)), remedy).fix("")
	}
	if _, err := fs.Stat(fsys, path.Join(dir, "libplugin_UCX.so")); err != nil {
		return f.fail("NIXL looks for its plugins there alone, and there is no libplugin_UCX.so", remedy).fix("")
	}
	return f
}

// inFS is an absolute path as a name of an fs.FS.
func inFS(name string) string { return cmp.Or(strings.Trim(path.Clean(name), "/"), ".") }
