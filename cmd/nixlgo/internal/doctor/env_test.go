package doctor

import (
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
)

// examineEnv returns the findings about the environment, by variable.
func examineEnv(t *testing.T, m machine, env map[string]string) map[string]Finding {
	t.Helper()
	h := &Host{FS: m, Env: env}
	devices, err := readDevices(m)
	require.NoError(t, err)
	found := map[string]Finding{}
	for _, f := range h.checkEnv(devices) {
		requireRemedy(t, f)
		require.Equal(t, env[f.Name], f.Value)
		if f.Status != OK {
			require.Contains(t, f.Remedy, f.Name, "the remedy names the variable")
		}
		found[f.Name] = f
	}
	return found
}

// pod is a machine with an InfiniBand port (mlx5_0), one whose port is down (mlx5_1), and one without a node (mlx5_2).
func pod() machine {
	m := newMachine("lo", "eth0")
	m.device("mlx5_0", "0000:3b:00.0", "uverbs0", true, "4: ACTIVE", "InfiniBand")
	m.gid("mlx5_0", "0", lidGID, "", "")
	m.device("mlx5_1", "0000:5e:00.0", "uverbs1", true, "1: DOWN", "InfiniBand")
	m.device("mlx5_2", "0000:86:00.0", "uverbs2", false, "4: ACTIVE", "InfiniBand")
	m.gid("mlx5_2", "0", lidGID, "", "")
	return m
}

func TestTheVariablesThatMatterAreShownAsSeen(t *testing.T) {
	env := map[string]string{
		"UCX_LOG_LEVEL": "info", "NIXL_LOG_LEVEL": "INFO", "PCIDEVICE_NVIDIA_COM_NIC": "0000:3b:00.0", "POD_IP": "10.0.0.1",
		"OTEL_SERVICE_NAME": "decode", "NIXL_ETCD_ENDPOINTS": "http://etcd:2379", "VLLM_NIXL_SIDE_CHANNEL_HOST": "0.0.0.0",
		"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600", "NIXL_TELEMETRY_ENABLE": "y", "UCX_TLS": "",
	}
	hidden := map[string]string{"HOME": "/root", "SECRET": "x", "MY_UCX_TLS": "no"}
	all := map[string]string{}
	for _, m := range []map[string]string{env, hidden} {
		for k, v := range m {
			all[k] = v
		}
	}
	found := examineEnv(t, newMachine("lo"), all)
	require.Len(t, found, len(env))
	for name := range env {
		require.Contains(t, found, name)
	}
}

// cases.md 34 (nixl#1358): a wrong UCX_TLS answers a bare -2; the variable must be named.
func TestTransportsAreCheckedOneByOne(t *testing.T) {
	for _, c := range []struct {
		value string
		rdma  bool
		want  Status
		cause string
	}{
		{"all", false, OK, ""},
		{"tcp", false, OK, ""},
		{"tcp,self,sm", false, OK, ""},
		{"^cuda_ipc", false, OK, ""},
		{"^rc,ud", true, OK, ""},
		{"rc,tcp", false, OK, ""},
		{`\rc_mlx5,ud_mlx5:aux,cuda_copy`, true, OK, ""},
		{"rc_x, dc", true, OK, ""},
		{"srd", true, OK, ""},
		{"tpc", false, Fail, `no transport "tpc" (tcp?)`},
		{"^tpc", false, Fail, `no transport "tpc" (tcp?)`},
		{"tcp,cuda_icp", false, Fail, `"cuda_icp" (cuda_ipc?)`},
		{"tcp;self", false, Fail, `no transport "tcp;self"`},
		{"TCP", false, Fail, `no transport "TCP"`},
		{"tcp,", false, Fail, `no transport ""`},
		{"", false, Fail, `no transport ""`},
		{"rc", false, Fail, "no usable RDMA device"},
		{"ib,sm,self", false, Fail, "no usable RDMA device"},
		{"self", true, Fail, "no transport that reaches other machines"},
		{"sm,cuda", false, Fail, "no transport that reaches other machines"},
	} {
		t.Run(c.value, func(t *testing.T) {
			m := newMachine("lo")
			if c.rdma {
				m = pod()
			}
			f := examineEnv(t, m, map[string]string{"UCX_TLS": c.value})["UCX_TLS"]
			require.Equal(t, c.want, f.Status, f.Cause)
			require.Contains(t, f.Cause, c.cause)
		})
	}
}

// cases.md 34: an unknown device answers a bare -2. neighbours.md 7: UCX_NET_DEVICES against PCIDEVICE_*.
func TestNetDevicesMustExistAndBeUsable(t *testing.T) {
	for _, c := range []struct {
		value, pci string
		want       Status
		cause      string
	}{
		{"all", "", OK, ""},
		{"eth0", "", OK, ""},
		{"mlx5_0:1", "", OK, ""},
		{"mlx5_0:1,eth0", "", OK, ""},
		{"mlx5_0:1", "0000:3b:00.0,0000:5e:00.0", OK, ""},
		{"^mlx5_2:1", "", OK, ""},
		{"mlx5_*:1", "", OK, ""},
		{"eth[0-3]", "", OK, ""},
		{"nope0", "", Fail, `no device "nope0"; there are: eth0, lo, mlx5_0:1, mlx5_1:1, mlx5_2:1`},
		{"eth0,nope0", "", Fail, `no device "nope0"`},
		{"eth0/operstate", "", Fail, `no device "eth0/operstate"`},
		{"", "", Fail, `no device ""`},
		{"mlx5_0:2", "", Fail, `no device "mlx5_0:2"`},
		{"ib*", "", Fail, `no device matches "ib*"`},
		{"mlx5_0", "", Warn, "with their port"},
		{"mlx5_1:1", "", Fail, "is DOWN"},
		{"mlx5_2:1", "", Fail, "/dev/infiniband/uverbs2"},
		{"mlx5_0:1", "0000:5e:00.0", Warn, "mlx5_0:1 is PCI device 0000:3b:00.0, but the container was given 0000:5e:00.0"},
	} {
		t.Run(c.value, func(t *testing.T) {
			env := map[string]string{"UCX_NET_DEVICES": c.value}
			if c.pci != "" {
				env["PCIDEVICE_NVIDIA_COM_NIC"], env["PCIDEVICE_NVIDIA_COM_NIC_INFO"] = c.pci, `{"0000:3b:00.0":{}}`
			}
			f := examineEnv(t, pod(), env)["UCX_NET_DEVICES"]
			require.Equal(t, c.want, f.Status, f.Cause)
			require.Contains(t, f.Cause, c.cause)
		})
	}
}

func TestTheGIDIndexMustBeSetOnActivePorts(t *testing.T) {
	for value, want := range map[string]Status{"auto": OK, "0": OK, "3": Warn, "x": Fail, "-1": Fail} {
		f := examineEnv(t, pod(), map[string]string{"UCX_IB_GID_INDEX": value})["UCX_IB_GID_INDEX"]
		require.Equal(t, want, f.Status, value)
		if want == Warn {
			require.Contains(t, f.Remedy, "set it to 0")
		}
	}
	f := examineEnv(t, newMachine("lo"), map[string]string{"UCX_IB_GID_INDEX": "3"})["UCX_IB_GID_INDEX"]
	require.Equal(t, OK, f.Status, "without RDMA it has no effect")
}

// cases.md 34 (dynamo#9911): a bad plugin directory answers a bare -2.
func TestThePluginDirectoryMustHoldThePlugin(t *testing.T) {
	m := newMachine("lo")
	m.file("opt/nixl/plugins/libplugin_UCX.so", "")
	m.file("opt/empty/readme", "")
	for value, want := range map[string]Status{"/opt/nixl/plugins": OK, "/opt/nixl/plugins/": OK, "/opt/empty": Fail, "/opt/nothing": Fail, "/": Fail, "relative": OK} {
		f := examineEnv(t, m, map[string]string{"NIXL_PLUGIN_DIR": value})["NIXL_PLUGIN_DIR"]
		require.Equal(t, want, f.Status, value)
	}
}

func TestNumbersAndSwitchesAreStrict(t *testing.T) {
	for _, c := range []struct {
		name, value string
		want        Status
	}{
		{"VLLM_NIXL_SIDE_CHANNEL_PORT", "5600", OK},
		{"VLLM_NIXL_SIDE_CHANNEL_PORT", "0", Fail},
		{"VLLM_NIXL_SIDE_CHANNEL_PORT", "65536", Fail},
		{"NIXL_TELEMETRY_PROMETHEUS_PORT", "http", Fail},
		{"NIXL_TELEMETRY_ENABLE", "Enable", OK},
		{"NIXL_TELEMETRY_ENABLE", "maybe", Fail},
	} {
		f := examineEnv(t, newMachine(), map[string]string{c.name: c.value})[c.name]
		require.Equal(t, c.want, f.Status, "%s=%s", c.name, c.value)
	}
}

func TestAFailureOfTheLibraryNamesTheVariablesThatAreSet(t *testing.T) {
	h := &Host{FS: fstest.MapFS{}, Env: map[string]string{"UCX_TLS": "tcp", "LD_PRELOAD": "/x.so"}}
	f := h.advise(Finding{Name: "read", Status: Fail, Cause: "c"})
	require.Contains(t, f.Remedy, "correct or unset UCX_TLS=tcp, LD_PRELOAD=/x.so")
	kept := Finding{Name: "read", Status: Fail, Remedy: "r"}
	require.Equal(t, kept, h.advise(kept))
	good := Finding{Name: "read", Status: OK}
	require.Equal(t, good, h.advise(good))
}

// cases.md 35: two UCX copies in one process.
func TestMappedFilesAreCountedOnceEach(t *testing.T) {
	const maps = `7f0000000000-7f0000001000 r--p 00000000 08:01 1 /w/libs/libucp-b39b3ed9.so.0.0.0
7f0000001000-7f0000002000 r-xp 00001000 08:01 1                          /w/libs/libucp-b39b3ed9.so.0.0.0
7f0000002000-7f0000003000 r--p 00000000 08:01 2 /usr/lib/libucp.so.0
7f0000003000-7f0000004000 r--p 00000000 08:01 3 /usr/lib/libucphelper.so
7f0000004000-7f0000005000 rw-p 00000000 00:00 0
7ffd00000000-7ffd00001000 rw-p 00000000 00:00 0 [stack]
`
	require.Equal(t, []string{"/w/libs/libucp-b39b3ed9.so.0.0.0", "/usr/lib/libucp.so.0"}, mappedFiles(maps, "libucp"))
	require.Empty(t, mappedFiles(maps, "libnixl_capi"))
}
