package diagnose

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// device is an RDMA device of sysfs.
type device struct {
	name    string // mlx5_0
	pci     string // 0000:3b:00.0, "" if it has none
	nodeErr error  // why its node in /dev/infiniband cannot be opened
	ports   []port
}

type port struct {
	name      string // as UCX names it, mlx5_0:1
	number    int
	state     string // ACTIVE
	linkLayer string // InfiniBand, Ethernet
	rate      string
	gids      []gid // those that are set
}

type gid struct {
	index   int
	value   string
	kind    string // "RoCE v2", "IB/RoCE v1"
	netdev  string
	foreign bool // its network device is not in this network namespace
}

func (p *port) active() bool { return p.state == "ACTIVE" }

// usableGID returns the GID that can be used, the one of RoCE v2 if there are several. A RoCE GID whose network device
// lives in another network namespace cannot be (rdma-shared-dp#86, #98, #101).
func (p *port) usableGID() (gid, bool) {
	var found []gid
	for _, g := range p.gids {
		if !g.foreign {
			found = append(found, g)
		}
	}
	if i := slices.IndexFunc(found, func(g gid) bool { return g.kind == "RoCE v2" }); i >= 0 {
		return found[i], true
	}
	if len(found) > 0 {
		return found[0], true
	}
	return gid{}, false
}

// usablePort reports whether UCX can use p, a port of d.
func (d *device) usablePort(p *port) bool {
	_, addressed := p.usableGID()
	return d.nodeErr == nil && p.active() && addressed
}

func (d *device) usable() bool {
	return d.nodeErr == nil && slices.ContainsFunc(d.ports, func(p port) bool { return p.active() })
}

// usable reports whether any device can be used.
func usable(devices []device) bool {
	return slices.ContainsFunc(devices, func(d device) bool { return d.usable() })
}

const (
	sysDevices = "sys/class/infiniband"
	sysVerbs   = "sys/class/infiniband_verbs"
	sysNet     = "sys/class/net"
	devNodes   = "dev/infiniband"
)

// readDevices reads the RDMA devices from sysfs; a machine without any has no such directory.
func readDevices(fsys fs.FS) ([]device, error) {
	entries, err := fs.ReadDir(fsys, sysDevices)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	nodes := readNodes(fsys)
	var ds []device
	for _, e := range entries {
		d := device{name: e.Name(), nodeErr: errors.New("no verbs device belongs to it; is the module ib_uverbs loaded?")}
		if node, ok := nodes[d.name]; ok {
			d.nodeErr = open(fsys, path.Join(devNodes, node))
		}
		if link, err := fs.ReadLink(fsys, path.Join(sysDevices, d.name, "device")); err == nil {
			d.pci = path.Base(link)
		}
		d.ports = readPorts(fsys, d.name)
		ds = append(ds, d)
	}
	return ds, err
}

// readNodes maps the name of an RDMA device to that of its node in /dev/infiniband.
func readNodes(fsys fs.FS) map[string]string {
	nodes := map[string]string{}
	entries, _ := fs.ReadDir(fsys, sysVerbs) // absent: no device has a node
	for _, e := range entries {
		if name := text(fsys, path.Join(sysVerbs, e.Name(), "ibdev")); name != "" {
			nodes[name] = e.Name()
		}
	}
	return nodes
}

func open(fsys fs.FS, name string) error {
	f, err := fsys.Open(name)
	if err != nil {
		return reason(err)
	}
	return f.Close()
}

// reason puts back the slash that the names of an fs.FS lack.
func reason(err error) error {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return fmt.Errorf("/%s: %w", p.Path, p.Err)
	}
	return err
}

func readPorts(fsys fs.FS, dev string) []port {
	dir := path.Join(sysDevices, dev, "ports")
	entries, _ := fs.ReadDir(fsys, dir) // a device without ports has no such directory
	var ps []port
	for _, e := range entries {
		n, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		at := path.Join(dir, e.Name())
		state := text(fsys, path.Join(at, "state")) // "4: ACTIVE"
		if _, after, ok := strings.Cut(state, ": "); ok {
			state = after
		}
		ps = append(ps, port{
			name: dev + ":" + e.Name(), number: n, state: state, rate: text(fsys, path.Join(at, "rate")),
			linkLayer: text(fsys, path.Join(at, "link_layer")), gids: readGIDs(fsys, at),
		})
	}
	slices.SortFunc(ps, func(a, b port) int { return cmp.Compare(a.number, b.number) })
	return ps
}

func readGIDs(fsys fs.FS, portDir string) []gid {
	entries, _ := fs.ReadDir(fsys, path.Join(portDir, "gids"))
	var gs []gid
	for _, e := range entries {
		n, err := strconv.Atoi(e.Name())
		value := text(fsys, path.Join(portDir, "gids", e.Name()))
		if err != nil || strings.Trim(value, "0:") == "" {
			continue
		}
		g := gid{index: n, value: value, kind: text(fsys, path.Join(portDir, "gid_attrs/types", e.Name())),
			netdev: text(fsys, path.Join(portDir, "gid_attrs/ndevs", e.Name()))}
		if g.netdev != "" {
			_, err := fs.Stat(fsys, path.Join(sysNet, g.netdev))
			g.foreign = err != nil
		}
		gs = append(gs, g)
	}
	slices.SortFunc(gs, func(a, b gid) int { return cmp.Compare(a.index, b.index) })
	return gs
}

// text is the trimmed content of a small file, "" when it cannot be read: sysfs refuses to read what is not set.
func text(fsys fs.FS, name string) string {
	b, err := fs.ReadFile(fsys, name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func (h *Host) checkDevices(devices []device, err error) []Finding {
	if err != nil {
		return []Finding{{Name: "rdma", Status: Warn, Value: "unknown", Cause: reason(err).Error(), Remedy: "make /" + sysDevices + " readable"}}
	}
	if len(devices) == 0 {
		return []Finding{{Name: "rdma", Status: OK, Value: "no device", Cause: "TCP and shared memory are used"}}
	}
	var fs []Finding
	for _, d := range devices {
		fs = append(fs, d.findings()...)
	}
	h.avoid(devices, fs)
	if !usable(devices) {
		fs = append(fs, Finding{Name: "rdma", Status: Warn, Value: "no usable device", Cause: "no device has both a node in /dev/infiniband and an active port; TCP is used",
			Remedy: "bring a port up; in a container request the RDMA resource (rdma/… in Kubernetes, --device=/dev/infiniband in Docker)"})
	}
	return fs
}

// avoid says how UCX is kept off the ports that fs warns of, where it would choose by itself (smg#2520: it took a NIC of the
// virtual machine that has no GID).
func (h *Host) avoid(devices []device, fs []Finding) {
	if _, chosen := h.Env["UCX_NET_DEVICES"]; chosen {
		return
	}
	good := h.preferred(devices)
	for i := range fs {
		_, p := findPort(devices, strings.TrimPrefix(fs[i].Name, "rdma "))
		switch {
		case p == nil || fs[i].Status == OK:
		case len(good) > 0:
			fs[i].Fix = []Setting{{"UCX_NET_DEVICES", strings.Join(good, ",")}}
		case h.Env["UCX_TLS"] == "" && len(h.given(devices)) == 0:
			fs[i].Fix = []Setting{{"UCX_TLS", "^ib"}}
		}
	}
}

func (d *device) findings() []Finding {
	var fs []Finding
	if d.nodeErr != nil {
		// rdma-shared-dp#93: sysfs shows every device of the machine, also those that the container was not given.
		fs = append(fs, Finding{Name: "rdma " + d.name, Status: Warn, Value: "in sysfs, but not usable here", Cause: d.nodeErr.Error(),
			Remedy: "give the container its node in /dev/infiniband, or name the devices to use in UCX_NET_DEVICES"})
	}
	for _, p := range d.ports {
		f := Finding{Name: "rdma " + p.name, Status: OK, Value: fmt.Sprintf("%s, %s, %s", p.state, p.linkLayer, p.rate)}
		if g, ok := p.usableGID(); ok {
			f.Value += fmt.Sprintf(", GID %d %s", g.index, g.value)
			if g.kind != "" {
				f.Value += " (" + g.kind + ")"
			}
		} else if p.active() {
			// smg#2520: UCX picked a virtual NIC without a GID.
			f.Status, f.Cause = Warn, "the port is active, but none of its GIDs is usable here"
			f.Remedy = "give its network interface an address in this network namespace, or leave it out of UCX_NET_DEVICES"
			if len(p.gids) > 0 {
				f.Cause += ": their network devices belong to another network namespace"
			}
		}
		fs = append(fs, f)
	}
	return fs
}
