package diagnose

import (
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
)

// machine builds the files that the checks read of sysfs and /dev.
type machine struct{ fstest.MapFS }

func newMachine(interfaces ...string) machine {
	m := machine{fstest.MapFS{}}
	for _, i := range interfaces {
		m.file(sysNet+"/"+i+"/operstate", "up")
	}
	return m
}

func (m machine) file(name, content string) {
	m.MapFS[name] = &fstest.MapFile{Data: []byte(content + "\n")}
}

// device adds an RDMA device of one port; node is its name in /dev/infiniband, "" if the container was not given it.
func (m machine) device(name, pci, uverbs string, node bool, state, linkLayer string) {
	at := sysDevices + "/" + name
	m.MapFS[at+"/device"] = &fstest.MapFile{Data: []byte("../../../" + pci), Mode: fs.ModeSymlink}
	m.file(at+"/ports/1/state", state)
	m.file(at+"/ports/1/link_layer", linkLayer)
	m.file(at+"/ports/1/rate", "400 Gb/sec (4X NDR)")
	m.file(at+"/ports/1/gids/0", "0000:0000:0000:0000:0000:0000:0000:0000")
	m.file(sysVerbs+"/"+uverbs+"/ibdev", name)
	m.file(sysVerbs+"/abi_version", "6")
	if node {
		m.file(devNodes+"/"+uverbs, "")
	}
}

func (m machine) gid(dev, index, value, kind, netdev string) {
	at := sysDevices + "/" + dev + "/ports/1"
	m.file(at+"/gids/"+index, value)
	if kind != "" {
		m.file(at+"/gid_attrs/types/"+index, kind)
		m.file(at+"/gid_attrs/ndevs/"+index, netdev)
	}
}

// examine returns the findings about devices, by name.
func (m machine) examine(t *testing.T) map[string]Finding {
	t.Helper()
	devices, err := readDevices(m)
	h := &Host{FS: m, Env: map[string]string{}, Bind: free}
	requireFixed(t, h)
	found := map[string]Finding{}
	for _, f := range h.checkDevices(devices, err) {
		requireRemedy(t, f)
		found[f.Name] = f
	}
	return found
}

const (
	lidGID = "fe80:0000:0000:0000:b83f:d203:0000:0001"
	v1GID  = "fe80:0000:0000:0000:ba3f:d2ff:fe00:0001"
	v2GID  = "0000:0000:0000:0000:0000:ffff:0a00:0001"
)

func TestAMachineWithoutRDMAIsFine(t *testing.T) {
	found := newMachine("lo", "eth0").examine(t)
	require.Equal(t, Finding{Name: "rdma", Status: OK, Value: "no device", Cause: "TCP and shared memory are used"}, found["rdma"])
	require.Len(t, found, 1)
}

func TestAHealthyInfiniBandPortIsReportedWithItsGID(t *testing.T) {
	m := newMachine("lo")
	m.device("mlx5_0", "0000:3b:00.0", "uverbs0", true, "4: ACTIVE", "InfiniBand")
	m.gid("mlx5_0", "0", lidGID, "", "")
	found := m.examine(t)
	require.Len(t, found, 1)
	require.Equal(t, OK, found["rdma mlx5_0:1"].Status)
	require.Equal(t, "ACTIVE, InfiniBand, 400 Gb/sec (4X NDR), GID 0 "+lidGID, found["rdma mlx5_0:1"].Value)

	devices, err := readDevices(m)
	require.NoError(t, err)
	require.True(t, usable(devices))
	require.Equal(t, "0000:3b:00.0", devices[0].pci)
}

// rdma-shared-dp#86, #98, #101 (neighbours.md 7): in a pod the usable GID of RoCE is not the one of index 0.
func TestTheRoCEv2GIDOfThisNetworkNamespaceIsChosen(t *testing.T) {
	m := newMachine("lo", "net1")
	m.device("mlx5_0", "0000:3b:00.0", "uverbs0", true, "4: ACTIVE", "Ethernet")
	m.gid("mlx5_0", "0", v1GID, "RoCE v2", "eth7") // the host's
	m.gid("mlx5_0", "2", v1GID, "IB/RoCE v1", "net1")
	m.gid("mlx5_0", "10", v2GID, "RoCE v2", "net1")
	f := m.examine(t)["rdma mlx5_0:1"]
	require.Equal(t, OK, f.Status)
	require.Contains(t, f.Value, "GID 10 "+v2GID+" (RoCE v2)")
}

// smg#2520 (neighbours.md 7): UCX picks a NIC without a GID.
func TestAnActivePortWithoutUsableGIDIsAWarning(t *testing.T) {
	for name, foreign := range map[string]bool{"none is set": false, "all are of another namespace": true} {
		t.Run(name, func(t *testing.T) {
			m := newMachine("lo")
			m.device("mlx5_0", "0000:3b:00.0", "uverbs0", true, "4: ACTIVE", "Ethernet")
			if foreign {
				m.gid("mlx5_0", "3", v2GID, "RoCE v2", "eth7")
			}
			f := m.examine(t)["rdma mlx5_0:1"]
			require.Equal(t, Warn, f.Status)
			require.Equal(t, foreign, strings.Contains(f.Cause, "another network namespace"), f.Cause)
			require.Equal(t, []Setting{{"UCX_TLS", "^ib"}}, f.Fix)
			m.device("mlx5_1", "0000:5e:00.0", "uverbs1", true, "4: ACTIVE", "InfiniBand")
			m.gid("mlx5_1", "0", lidGID, "", "")
			require.Equal(t, []Setting{{"UCX_NET_DEVICES", "mlx5_1:1"}}, m.examine(t)["rdma mlx5_0:1"].Fix)
			require.Empty(t, m.examine(t)["rdma mlx5_1:1"].Fix)
		})
	}
}

// rdma-shared-dp#93 (neighbours.md 7): sysfs shows all devices, though the container was given one.
func TestADeviceWithoutNodeIsNamedAndNotUsable(t *testing.T) {
	m := newMachine("lo")
	m.device("mlx5_0", "0000:3b:00.0", "uverbs0", true, "4: ACTIVE", "InfiniBand")
	m.gid("mlx5_0", "0", lidGID, "", "")
	m.device("mlx5_1", "0000:5e:00.0", "uverbs1", false, "4: ACTIVE", "InfiniBand")
	m.gid("mlx5_1", "0", lidGID, "", "")
	found := m.examine(t)
	require.Equal(t, Warn, found["rdma mlx5_1"].Status)
	require.Contains(t, found["rdma mlx5_1"].Cause, "/dev/infiniband/uverbs1")
	require.NotContains(t, found, "rdma mlx5_0")
	require.NotContains(t, found, "rdma", "one device is usable")

	delete(m.MapFS, devNodes+"/uverbs0")
	require.Equal(t, Warn, m.examine(t)["rdma"].Status)
}

func TestADeviceWithoutVerbsIsNotUsable(t *testing.T) {
	m := newMachine("lo")
	m.device("mlx5_0", "0000:3b:00.0", "uverbs0", true, "4: ACTIVE", "InfiniBand")
	m.gid("mlx5_0", "0", lidGID, "", "")
	delete(m.MapFS, sysVerbs+"/uverbs0/ibdev")
	require.Contains(t, m.examine(t)["rdma mlx5_0"].Cause, "ib_uverbs")
}

func TestPortsThatAreDownLeaveNoUsableDevice(t *testing.T) {
	m := newMachine("lo")
	m.device("mlx5_0", "0000:3b:00.0", "uverbs0", true, "1: DOWN", "InfiniBand")
	found := m.examine(t)
	require.Equal(t, OK, found["rdma mlx5_0:1"].Status, "an unused port may be down")
	require.Equal(t, Warn, found["rdma"].Status)
}

// unreadable is a file system whose sysfs answers with an error.
type unreadable struct{ fs.FS }

func (u unreadable) Open(name string) (fs.File, error) {
	if strings.HasPrefix(name, "sys/") {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
	}
	return u.FS.Open(name)
}

func TestUnreadableSysfsIsAWarning(t *testing.T) {
	devices, err := readDevices(unreadable{fstest.MapFS{}})
	fs := (&Host{}).checkDevices(devices, err)
	require.Len(t, fs, 1)
	require.Equal(t, Warn, fs[0].Status)
	require.Contains(t, fs[0].Cause, "/sys/class/infiniband: permission denied")
}

// nixlbench's --device_list has devices of RDMA without a port.
func TestADeviceListNamesInterfacesAndDevicesOfRDMA(t *testing.T) {
	m := newMachine("eth0", "lo")
	for _, d := range []string{"mlx5_0", "mlx5_1"} {
		m.device(d, "0000:3b:00.0", "uverbs"+d, true, "4: ACTIVE", "InfiniBand")
		m.gid(d, "0", lidGID, "", "")
	}
	h := &Host{FS: m}
	for _, c := range []struct{ list, devices, wrong string }{
		{"eth0", "eth0", ""}, {"eth0, lo", "eth0,lo", ""}, {"mlx5_0", "mlx5_0:1", ""}, {"mlx5_0,mlx5_1:1", "mlx5_0:1,mlx5_1:1", ""},
		{"nope0", "nope0", `there is no device "nope0"; there are: eth0, lo, mlx5_0:1, mlx5_1:1`}, {"eth0,mlx5_1:2", "eth0,mlx5_1:2", `no device "mlx5_1:2"`},
		{"", "", `there is no device ""`},
	} {
		devices, wrong := h.NetDevices(c.list)
		require.Equal(t, c.devices, devices)
		require.Equal(t, c.wrong == "", wrong == "", "%s: %s", c.list, wrong)
		require.Contains(t, wrong, c.wrong)
	}
}
