package diagnose

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
)

// The transports and aliases that UCX documents for UCX_TLS (`ucx_info -c -f`), by how far they reach.
var (
	rdmaTransports = []string{"ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "rc_gda", "ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5",
		"dc", "dc_x", "dc_mlx5", "gga", "gga_mlx5", "srd"}
	networkTransports = []string{"all", "tcp", "ugni", "ugni_smsg", "ugni_udt", "ugni_rdma"}
	localTransports   = []string{"self", "sm", "shm", "mm", "posix", "sysv", "xpmem", "knem", "cma",
		"cuda", "cuda_copy", "cuda_ipc", "gdr_copy", "rocm", "rocm_copy", "rocm_ipc", "rocm_gdr", "ze", "ze_copy", "ze_ipc", "ze_gdr", "gaudi", "gaudi_gdr", "mad"}
)

// UnknownTransports lists what UCX does not know of a list for UCX_TLS, quoted, with what may have been meant; nil: it knows all.
func UnknownTransports(list string) (unknown []string) {
	for given := range strings.SplitSeq(strings.TrimPrefix(list, "^"), ",") {
		t := transport(given)
		if known(t) {
			continue
		}
		said := fmt.Sprintf("%q", t)
		if near := nearest(t); near != "" {
			said += " (" + near + "?)"
		}
		unknown = append(unknown, said)
	}
	return unknown
}

// transport is the name in an item of UCX_TLS.
func transport(item string) string {
	return strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(item), `\`), ":aux")
}

// checkTransports examines UCX_TLS. A wrong one makes NIXL answer a bare -2 (cases.md 34), so it is taken apart here.
func checkTransports(f Finding, devices []device) Finding {
	list, excluded := strings.CutPrefix(f.Value, "^")
	var rdma, network int
	unknown := UnknownTransports(f.Value)
	var meant []string // the list with what can be corrected corrected, and the rest left out
	for given := range strings.SplitSeq(list, ",") {
		t := transport(given)
		if known(t) {
			meant = append(meant, strings.TrimSpace(given))
		} else if t = nearest(t); t != "" {
			meant = append(meant, t)
		}
		switch {
		case slices.Contains(rdmaTransports, t):
			rdma++
		case slices.Contains(networkTransports, t):
			network++
		}
	}
	cut := network == 0 && (rdma == 0 || !usable(devices))
	value := strings.Join(meant, ",")
	switch {
	case value == "":
	case excluded:
		value = "^" + value
	case cut:
		value += ",tcp"
	}
	switch {
	case len(unknown) > 0:
		return f.fail("UCX has no transport "+strings.Join(unknown, ", "), "correct UCX_TLS, or unset it to let UCX choose").fix(value)
	case excluded || !cut:
	case rdma > 0:
		return f.fail("it asks for RDMA alone, and no usable RDMA device is here",
			"add tcp to UCX_TLS or unset it; in a container request the RDMA resource, in Docker pass --device=/dev/infiniband").fix(value)
	default:
		// UCX: "no active messages transport … no peer failure handler". A dead peer would go unnoticed.
		return f.fail("it has no transport that reaches other machines and notices a dead peer, so the backend does not start",
			"add tcp, rc or another network transport to UCX_TLS, or unset it").fix(value)
	}
	return f
}

var transports = slices.Concat([]string{"tcp"}, rdmaTransports, networkTransports, localTransports)

func known(t string) bool { return slices.Contains(transports, t) }

// nearest names the known transport that differs from t in one letter, or in two letters changed places; "" if there is none.
func nearest(t string) string {
	for _, k := range transports {
		if near(t, k) {
			return k
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
// The first fault is told. The fix keeps what is good, and what can be made good.
func (h *Host) checkNetDevices(f Finding, devices []device) Finding {
	list, excluded := strings.CutPrefix(f.Value, "^")
	if excluded || f.Value == "all" {
		return f
	}
	var good []string
	found := f
	for _, name := range strings.Split(list, ",") {
		name = strings.TrimSpace(name)
		g, better := h.checkNetDevice(f, name, devices)
		if better != "" && !slices.Contains(good, better) {
			good = append(good, better)
		}
		if found.Status == OK {
			found = g
		}
	}
	if found.Status == OK {
		return found
	}
	if len(good) == 0 && len(h.given(devices)) > 0 {
		good = h.preferred(devices)
	}
	return found.fix(strings.Join(good, ","))
}

// NetDevices is UCX_NET_DEVICES for a list of devices by comma, in which those of RDMA may lack their port: mlx5_0 for mlx5_0:1.
// wrong says why UCX cannot use them, "" when it can.
func (h *Host) NetDevices(list string) (devices, wrong string) {
	have, err := readDevices(h.FS)
	if err != nil {
		return list, "" // UCX will say
	}
	names := strings.Split(list, ",")
	for i, name := range names {
		names[i] = strings.TrimSpace(name)
		if d, p := findPort(have, names[i]); d != nil && p == nil {
			names[i] += ":1"
		}
	}
	devices = strings.Join(names, ",")
	if f := h.checkNetDevices(Finding{Value: devices, Status: OK}, have); f.Status == Fail {
		return devices, f.Cause
	}
	return devices, ""
}

// checkNetDevice examines one name, and says what to write instead, "" for nothing.
func (h *Host) checkNetDevice(f Finding, name string, devices []device) (Finding, string) {
	const letChoose = "correct UCX_NET_DEVICES, or unset it to let UCX choose"
	given := h.given(devices)
	if h.interfaceIs(name) {
		return f, name
	}
	d, p := findPort(devices, name)
	switch {
	case p == nil && d != nil:
		better := ""
		if ports := portNames([]device{*d}, (*device).usablePort); len(ports) > 0 {
			better = ports[0]
		}
		return f.warn(fmt.Sprintf("UCX names RDMA devices with their port, not %q", name), fmt.Sprintf("write %s:1 in UCX_NET_DEVICES", name)), better
	case p == nil && strings.ContainsAny(name, "*?["):
		if !h.matches(name, devices) {
			return f.fail(fmt.Sprintf("no device matches %q%s", name, h.haveDevices(devices)), letChoose), ""
		}
	case p == nil:
		return f.fail(fmt.Sprintf("there is no device %q%s", name, h.haveDevices(devices)), letChoose), ""
	case d.nodeErr != nil:
		return f.fail(fmt.Sprintf("%s is in sysfs but cannot be used: %v", name, d.nodeErr),
			"name a device in UCX_NET_DEVICES that was given to the container, or give it this one"), ""
	case !p.active():
		return f.fail(fmt.Sprintf("the port %s is %s", name, p.state), "bring it up, or name another one in UCX_NET_DEVICES"), ""
	case !d.usablePort(p):
		return f.fail(fmt.Sprintf("the port %s has no GID that is usable here", name),
			"give its network interface an address in this network namespace, or name another port in UCX_NET_DEVICES"), ""
	case len(given) > 0 && !slices.Contains(given, d.pci):
		return f.warn(fmt.Sprintf("%s is PCI device %s, but the container was given %s (%s*)", name, d.pci, strings.Join(given, ", "), pciPrefix),
			"name a device in UCX_NET_DEVICES that was given to the container"), ""
	}
	return f, name
}

// interfaceIs reports whether a network interface has this name.
func (h *Host) interfaceIs(name string) bool {
	if name == "" || strings.Contains(name, "/") {
		return false
	}
	_, err := fs.Stat(h.FS, path.Join(sysNet, name))
	return err == nil
}

// given returns the PCI addresses of the RDMA devices that the container was given. Its other PCI devices do not matter.
func (h *Host) given(devices []device) (addresses []string) {
	for _, name := range slices.Sorted(maps.Keys(h.Env)) {
		if strings.HasPrefix(name, pciPrefix) && !strings.HasSuffix(name, "_INFO") {
			addresses = append(addresses, strings.Split(h.Env[name], ",")...)
		}
	}
	return slices.DeleteFunc(addresses, func(a string) bool {
		return !slices.ContainsFunc(devices, func(d device) bool { return d.pci == a })
	})
}

// preferred lists the ports that UCX can use, of those that the container was given if it was given any.
func (h *Host) preferred(devices []device) []string {
	given := h.given(devices)
	return portNames(devices, func(d *device, p *port) bool {
		return d.usablePort(p) && (len(given) == 0 || slices.Contains(given, d.pci))
	})
}

// checkGiven examines a list of PCI addresses that the container was given: their RDMA devices must have a node.
func checkGiven(f Finding, devices []device) Finding {
	for _, address := range strings.Split(f.Value, ",") {
		for i := range devices {
			if d := &devices[i]; d.pci == address && d.nodeErr != nil {
				return f.warn(fmt.Sprintf("PCI device %s is %s, whose verbs device the container was not given: %v", address, d.name, d.nodeErr),
					"set isRdma: true for the resource of the SR-IOV plugin that is in "+f.Name)
			}
		}
	}
	return f
}

// checkGivenDevices: with no UCX_NET_DEVICES, UCX takes every device that it can open, also those of others.
func (h *Host) checkGivenDevices(devices []device) []Finding {
	mine := h.preferred(devices)
	others := portNames(devices, func(d *device, p *port) bool { return d.usablePort(p) && !slices.Contains(mine, p.name) })
	if len(mine) == 0 || len(others) == 0 {
		return nil
	}
	f := Finding{Name: "UCX_NET_DEVICES", Value: "not set"}
	return []Finding{f.warn(fmt.Sprintf("the container was given %s, but UCX can open %s too, and chooses", strings.Join(mine, ", "), strings.Join(others, ", ")),
		"set UCX_NET_DEVICES to the devices of the container").fix(strings.Join(mine, ","))}
}

// portNames lists the ports for which which is true, as UCX names them.
func portNames(devices []device, which func(*device, *port) bool) (names []string) {
	for i := range devices {
		d := &devices[i]
		for k := range d.ports {
			if which(d, &d.ports[k]) {
				names = append(names, d.ports[k].name)
			}
		}
	}
	return names
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
	return append(names, portNames(devices, func(*device, *port) bool { return true })...)
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

// checkGIDIndex examines UCX_IB_GID_INDEX, the GID that UCX takes of every RDMA port: of those of UCX_NET_DEVICES, if that is
// set.
func (h *Host) checkGIDIndex(f Finding, devices []device) Finding {
	if f.Value == "auto" {
		return f
	}
	n, err := strconv.Atoi(f.Value)
	if err != nil || n < 0 {
		return f.fail("it is neither auto nor an index", "set UCX_IB_GID_INDEX to a number or to auto, or unset it").fix("")
	}
	list, excluded := strings.CutPrefix(h.Env["UCX_NET_DEVICES"], "^")
	chosen := func(p *port) bool {
		return list == "" || list == "all" || slices.ContainsFunc(strings.Split(list, ","), func(pattern string) bool {
			ok, err := path.Match(strings.TrimSpace(pattern), p.name)
			return err == nil && ok
		}) != excluded
	}
	for i := range devices {
		for k := range devices[i].ports {
			p := &devices[i].ports[k]
			at := slices.IndexFunc(p.gids, func(g gid) bool { return g.index == n })
			if !p.active() || !chosen(p) || at >= 0 && !p.gids[at].foreign {
				continue
			}
			remedy := "unset UCX_IB_GID_INDEX"
			if g, ok := p.usableGID(); ok {
				remedy += fmt.Sprintf(", or set it to %d", g.index)
			}
			return f.warn(fmt.Sprintf("the active port %s has no usable GID %d", p.name, n), remedy).fix("")
		}
	}
	return f
}
