package doctor

import (
	"cmp"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
)

// shown lists the variables that matter to NIXL and to this program. Those of shownPrefixes matter too.
var shown = []string{
	"NIXLGO_LIBRARY", "NIXL_PREFIX", "NIXL_PLUGIN_DIR", "NIXL_LOG_LEVEL", "NIXL_ETCD_ENDPOINTS", "NIXL_ETCD_NAMESPACE",
	"NIXL_TELEMETRY_ENABLE", "NIXL_TELEMETRY_EXPORTER", "NIXL_TELEMETRY_PROMETHEUS_PORT", "NIXL_UCX_DEEPBIND",
	"VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "POD_IP",
	"OTEL_SERVICE_NAME", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG",
	"LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV",
}

var shownPrefixes = []string{"UCX_", pciPrefix}

// pciPrefix begins the variables in which Kubernetes' SR-IOV plugin lists the PCI addresses that a container was given.
const pciPrefix = "PCIDEVICE_"

// checkEnv reports every variable that matters and is set, in alphabetical order.
func (h *Host) checkEnv(devices []device) []Finding {
	var fs []Finding
	for _, name := range slices.Sorted(maps.Keys(h.Env)) {
		hasPrefix := func(p string) bool { return strings.HasPrefix(name, p) }
		if !slices.Contains(shown, name) && !slices.ContainsFunc(shownPrefixes, hasPrefix) {
			continue
		}
		f := Finding{Name: name, Status: OK, Value: h.Env[name]}
		switch name {
		case "UCX_TLS":
			f = checkTransports(f, devices)
		case "UCX_NET_DEVICES":
			f = h.checkNetDevices(f, devices)
		case "UCX_IB_GID_INDEX":
			f = checkGIDIndex(f, devices)
		case "NIXL_PLUGIN_DIR":
			f = checkPluginDir(h.FS, f)
		case "NIXL_TELEMETRY_PROMETHEUS_PORT", "VLLM_NIXL_SIDE_CHANNEL_PORT":
			if n, err := strconv.Atoi(f.Value); err != nil || n < 1 || n > 65535 {
				f = f.fail("it is not a port", "set "+name+" to a number of 1 to 65535, or unset it")
			}
		case "NIXL_TELEMETRY_ENABLE":
			if !slices.Contains([]string{"y", "yes", "on", "true", "enable", "1", "n", "no", "off", "false", "disable", "0"}, strings.ToLower(f.Value)) {
				f = f.fail("it is neither yes nor no", "set NIXL_TELEMETRY_ENABLE to y or n, or unset it")
			}
		}
		fs = append(fs, f)
	}
	return fs
}

func (f Finding) fail(cause, remedy string) Finding {
	f.Status, f.Cause, f.Remedy = Fail, cause, remedy
	return f
}

func (f Finding) warn(cause, remedy string) Finding {
	f.Status, f.Cause, f.Remedy = Warn, cause, remedy
	return f
}

// The transports and aliases that UCX documents for UCX_TLS (`ucx_info -c -f`), by how far they reach.
var (
	rdmaTransports = []string{"ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "rc_gda", "ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5",
		"dc", "dc_x", "dc_mlx5", "gga", "gga_mlx5", "srd"}
	networkTransports = []string{"all", "tcp", "ugni", "ugni_smsg", "ugni_udt", "ugni_rdma"}
	localTransports   = []string{"self", "sm", "shm", "mm", "posix", "sysv", "xpmem", "knem", "cma",
		"cuda", "cuda_copy", "cuda_ipc", "gdr_copy", "rocm", "rocm_copy", "rocm_ipc", "rocm_gdr", "ze", "ze_copy", "ze_ipc", "ze_gdr", "gaudi", "gaudi_gdr", "mad"}
)

// checkTransports examines UCX_TLS. A wrong one makes NIXL answer a bare -2 (cases.md 34), so it is taken apart here.
func checkTransports(f Finding, devices []device) Finding {
	list, excluded := strings.CutPrefix(f.Value, "^")
	var rdma, network int
	for _, t := range strings.Split(list, ",") {
		t = strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(t), `\`), ":aux")
		switch {
		case slices.Contains(rdmaTransports, t):
			rdma++
		case slices.Contains(networkTransports, t):
			network++
		case !slices.Contains(localTransports, t):
			return f.fail(fmt.Sprintf("UCX has no transport %q%s", t, suggest(t)), "correct UCX_TLS, or unset it to let UCX choose")
		}
	}
	switch {
	case excluded || network > 0:
	case rdma > 0 && !usable(devices):
		return f.fail("it asks for RDMA alone, and no usable RDMA device is here",
			"add tcp to UCX_TLS or unset it; in a container request the RDMA resource, in Docker pass --device=/dev/infiniband")
	case rdma == 0:
		// UCX: "no active messages transport … no peer failure handler". A dead peer would go unnoticed.
		return f.fail("it has no transport that reaches other machines and notices a dead peer, so the backend does not start",
			"add tcp, rc or another network transport to UCX_TLS, or unset it")
	}
	return f
}

// suggest names the known transport that differs from t in one letter, or in two letters changed places.
func suggest(t string) string {
	for _, known := range slices.Concat([]string{"tcp"}, rdmaTransports, networkTransports, localTransports) {
		if near(t, known) {
			return fmt.Sprintf(" (%s?)", known)
		}
	}
	return ""
}

func near(a, b string) bool {
	if len(a) < 2 || len(b) < 2 {
		return false
	}
	for len(a) > 0 && len(b) > 0 && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	for len(a) > 0 && len(b) > 0 && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	return len(a)+len(b) <= 2 || len(a) == 2 && len(b) == 2 && a[0] == b[1] && a[1] == b[0]
}

// checkNetDevices examines UCX_NET_DEVICES: names of network interfaces, or of RDMA ports as mlx5_0:1, or patterns of them.
func (h *Host) checkNetDevices(f Finding, devices []device) Finding {
	list, excluded := strings.CutPrefix(f.Value, "^")
	if excluded || f.Value == "all" {
		return f
	}
	given, anyGiven := h.pciDevices()
	for _, name := range strings.Split(list, ",") {
		name = strings.TrimSpace(name)
		if _, err := fs.Stat(h.FS, path.Join(sysNet, name)); name != "" && err == nil && !strings.Contains(name, "/") {
			continue
		}
		d, p := findPort(devices, name)
		switch {
		case p == nil && d != nil:
			return f.warn(fmt.Sprintf("UCX names RDMA devices with their port, not %q", name), fmt.Sprintf("write %s:1 in UCX_NET_DEVICES", name))
		case p == nil && strings.ContainsAny(name, "*?["):
			if !h.matches(name, devices) {
				return f.fail(fmt.Sprintf("no device matches %q%s", name, h.haveDevices(devices)), "correct UCX_NET_DEVICES, or unset it to let UCX choose")
			}
		case p == nil:
			return f.fail(fmt.Sprintf("there is no device %q%s", name, h.haveDevices(devices)), "correct UCX_NET_DEVICES, or unset it to let UCX choose")
		case d.nodeErr != nil:
			return f.fail(fmt.Sprintf("%s is in sysfs but cannot be used: %v", name, d.nodeErr), "name a device in UCX_NET_DEVICES that was given to the container, or give it this one")
		case !p.active():
			return f.fail(fmt.Sprintf("the port %s is %s", name, p.state), "bring it up, or name another one in UCX_NET_DEVICES")
		case anyGiven && !slices.Contains(given, d.pci):
			return f.warn(fmt.Sprintf("%s is PCI device %s, but the container was given %s (%s*)", name, d.pci, strings.Join(given, ", "), pciPrefix),
				"name a device in UCX_NET_DEVICES that was given to the container")
		}
	}
	return f
}

// pciDevices returns the PCI addresses that the container was given.
func (h *Host) pciDevices() (addresses []string, any bool) {
	for _, name := range slices.Sorted(maps.Keys(h.Env)) {
		if strings.HasPrefix(name, pciPrefix) && !strings.HasSuffix(name, "_INFO") {
			addresses, any = append(addresses, strings.Split(h.Env[name], ",")...), true
		}
	}
	return addresses, any
}

// findPort returns the device and the port of mlx5_0:1, or the device alone of mlx5_0.
func findPort(devices []device, name string) (*device, *port) {
	for i := range devices {
		d := &devices[i]
		if d.name == name {
			return d, nil
		}
		for k := range d.ports {
			if d.ports[k].name == name {
				return d, &d.ports[k]
			}
		}
	}
	return nil, nil
}

// netDevices lists what UCX_NET_DEVICES can name.
func (h *Host) netDevices(devices []device) []string {
	var names []string
	entries, _ := fs.ReadDir(h.FS, sysNet) // unreadable: none is listed
	for _, e := range entries {
		names = append(names, e.Name())
	}
	for _, d := range devices {
		for _, p := range d.ports {
			names = append(names, p.name)
		}
	}
	return names
}

func (h *Host) matches(pattern string, devices []device) bool {
	return slices.ContainsFunc(h.netDevices(devices), func(name string) bool {
		ok, err := path.Match(pattern, name)
		return ok && err == nil
	})
}

func (h *Host) haveDevices(devices []device) string {
	return "; there are: " + strings.Join(h.netDevices(devices), ", ")
}

// checkGIDIndex examines UCX_IB_GID_INDEX, the GID that UCX takes of every RDMA port.
func checkGIDIndex(f Finding, devices []device) Finding {
	if f.Value == "auto" {
		return f
	}
	n, err := strconv.Atoi(f.Value)
	if err != nil || n < 0 {
		return f.fail("it is neither auto nor an index", "set UCX_IB_GID_INDEX to a number or to auto, or unset it")
	}
	for _, d := range devices {
		for _, p := range d.ports {
			if i := slices.IndexFunc(p.gids, func(g gid) bool { return g.index == n }); p.active() && (i < 0 || p.gids[i].foreign) {
				remedy := "unset UCX_IB_GID_INDEX"
				if g, ok := p.usableGID(); ok {
					remedy += fmt.Sprintf(", or set it to %d", g.index)
				}
				return f.warn(fmt.Sprintf("the active port %s has no usable GID %d", p.name, n), remedy)
			}
		}
	}
	return f
}

// checkPluginDir examines NIXL_PLUGIN_DIR, which replaces the directory beside the library.
func checkPluginDir(fsys fs.FS, f Finding) Finding {
	const remedy = "unset NIXL_PLUGIN_DIR: the library finds the plugins beside itself"
	dir := strings.Trim(path.Clean(f.Value), "/")
	if !path.IsAbs(f.Value) {
		return f // relative to a directory that FS does not know; the check `plugins` tells
	}
	if _, err := fs.ReadDir(fsys, cmp.Or(dir, ".")); err != nil {
		return f.fail(fmt.Sprintf("NIXL looks for its plugins there alone: %v", reason(err)), remedy)
	}
	if _, err := fs.Stat(fsys, path.Join(dir, "libplugin_UCX.so")); err != nil {
		return f.fail("NIXL looks for its plugins there alone, and there is no libplugin_UCX.so", remedy)
	}
	return f
}
