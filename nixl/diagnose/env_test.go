package diagnose

import (
	"maps"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
)

// examineEnv returns the findings about the environment, by variable.
func examineEnv(t *testing.T, m machine, env map[string]string) map[string]Finding {
	t.Helper()
	h := &Host{FS: m, Env: env, Bind: free}
	devices, err := readDevices(m)
	require.NoError(t, err)
	found := map[string]Finding{}
	for _, f := range h.checkEnv(devices) {
		requireRemedy(t, f)
		if v, set := env[f.Name]; set {
			require.Equal(t, v, f.Value)
		}
		if f.Status != OK {
			require.Contains(t, f.Remedy, f.Name, "the remedy names the variable")
		}
		for _, s := range f.Fix {
			require.Contains(t, f.Remedy, s.Name)
		}
		found[f.Name] = f
	}
	requireFixed(t, h)
	return found
}

// free is a machine whose every address and port is free.
func free(string, int) error { return nil }

// requireFixed requires that the fixes of all findings put their variables right.
func requireFixed(t *testing.T, h *Host) {
	t.Helper()
	fixed := &Host{FS: h.FS, Env: maps.Clone(h.Env), Bind: h.Bind, MemLock: h.MemLock}
	names := map[string]bool{}
	for _, f := range h.Findings() {
		for _, s := range f.Fix {
			if f.Status == OK || names[s.Name] {
				continue
			}
			names[s.Name] = true
			if fixed.Env[s.Name] = s.Value; s.Value == "" {
				delete(fixed.Env, s.Name)
			}
		}
	}
	for _, f := range fixed.Findings() {
		if names[f.Name] {
			require.Equal(t, OK, f.Status, "%+v", f)
		}
	}
}

// pod is a machine with an InfiniBand port (mlx5_0), one whose port is down (mlx5_1), one without a node (mlx5_2), and one
// without a GID (mlx5_3).
func pod() machine {
	m := newMachine("lo", "eth0")
	m.device("mlx5_0", "0000:3b:00.0", "uverbs0", true, "4: ACTIVE", "InfiniBand")
	m.gid("mlx5_0", "0", lidGID, "", "")
	m.device("mlx5_1", "0000:5e:00.0", "uverbs1", true, "1: DOWN", "InfiniBand")
	m.device("mlx5_2", "0000:86:00.0", "uverbs2", false, "4: ACTIVE", "InfiniBand")
	m.gid("mlx5_2", "0", lidGID, "", "")
	m.device("mlx5_3", "0000:af:00.0", "uverbs3", true, "4: ACTIVE", "Ethernet")
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
		{"mlx5_3:1", "", Fail, "mlx5_3:1 has no GID that is usable here"},
		{"all", "", OK, ""},
		{"eth0", "", OK, ""},
		{"mlx5_0:1", "", OK, ""},
		{"mlx5_0:1,eth0", "", OK, ""},
		{"mlx5_0:1", "0000:3b:00.0,0000:5e:00.0", OK, ""},
		{"^mlx5_2:1", "", OK, ""},
		{"mlx5_*:1", "", OK, ""},
		{"eth[0-3]", "", OK, ""},
		{"nope0", "", Fail, `no device "nope0"; there are: eth0, lo, mlx5_0:1, mlx5_1:1, mlx5_2:1, mlx5_3:1`},
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
		env := map[string]string{"UCX_IB_GID_INDEX": value, "UCX_NET_DEVICES": "mlx5_0:1"}
		f := examineEnv(t, pod(), env)["UCX_IB_GID_INDEX"]
		require.Equal(t, want, f.Status, value)
		if want == Warn {
			require.Contains(t, f.Cause, "mlx5_0:1")
			require.Contains(t, f.Remedy, "set it to 0")
		}
	}
	for devices, want := range map[string]Status{"": Warn, "all": Warn, "mlx5_*:1": Warn, "eth0": OK, "^mlx5_3:1": OK, "^eth0": Warn} {
		env := map[string]string{"UCX_IB_GID_INDEX": "0", "UCX_NET_DEVICES": devices} // mlx5_3 has none
		if devices == "" {
			delete(env, "UCX_NET_DEVICES")
		}
		require.Equal(t, want, examineEnv(t, pod(), env)["UCX_IB_GID_INDEX"].Status, devices)
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
		{"NIXL_UCX_DEEPBIND", "0", OK},
		{"NIXL_UCX_DEEPBIND", "2", Fail},
	} {
		f := examineEnv(t, newMachine(), map[string]string{c.name: c.value})[c.name]
		require.Equal(t, c.want, f.Status, "%s=%s", c.name, c.value)
	}
}

func TestAFailureOfTheLibraryNamesTheVariablesThatAreSet(t *testing.T) {
	h := &Host{FS: fstest.MapFS{}, Env: map[string]string{"UCX_TLS": "tcp", "LD_PRELOAD": "/x.so"}}
	f := h.Advise(Finding{Name: "read", Status: Fail, Cause: "c"})
	require.Contains(t, f.Remedy, "correct or unset UCX_TLS=tcp, LD_PRELOAD=/x.so")
	kept := Finding{Name: "read", Status: Fail, Remedy: "r"}
	require.Equal(t, kept, h.Advise(kept))
	good := Finding{Name: "read", Status: OK}
	require.Equal(t, good, h.Advise(good))
}

// cases.md 35: NIXL brings its own UCX.
func TestASecondUCXIsTakenOutOfThePreloads(t *testing.T) {
	for value, want := range map[string][]Setting{
		"/usr/lib/libucp.so.0":                              {{"LD_PRELOAD", ""}},
		"/a/libjemalloc.so:/usr/lib/libucs.so.0 /b/libx.so": {{"LD_PRELOAD", "/a/libjemalloc.so:/b/libx.so"}},
		"/a/libjemalloc.so":                                 nil,
	} {
		h := &Host{FS: fstest.MapFS{}, Env: map[string]string{"LD_PRELOAD": value}}
		require.Equal(t, want, h.Advise(Finding{Name: "ucx", Status: Fail}).Fix, value)
	}
}

func TestTheFixOfTransportsKeepsWhatIsGood(t *testing.T) {
	for value, want := range map[string]string{
		"tpc": "tcp", "^tpc": "^tcp", "tcp,cuda_icp": "tcp,cuda_ipc", "tcp;self": "", "sm,cuda": "sm,cuda,tcp", "rc": "rc,tcp", "xyzzy,tcp": "tcp",
	} {
		f := examineEnv(t, newMachine("lo"), map[string]string{"UCX_TLS": value})["UCX_TLS"]
		require.Equal(t, []Setting{{"UCX_TLS", want}}, f.Fix, value)
	}
}

func TestTheFixOfNetDevicesKeepsWhatIsGood(t *testing.T) {
	for value, want := range map[string]string{
		"nope0": "", "eth0,nope0": "eth0", "mlx5_0": "mlx5_0:1", "mlx5_1:1,mlx5_0,mlx5_0:1,eth0": "mlx5_0:1,eth0", "mlx5_2": "", "mlx5_3:1": "",
	} {
		f := examineEnv(t, pod(), map[string]string{"UCX_NET_DEVICES": value})["UCX_NET_DEVICES"]
		require.Equal(t, []Setting{{"UCX_NET_DEVICES", want}}, f.Fix, value)
	}
	f := examineEnv(t, pod(), map[string]string{"UCX_NET_DEVICES": "mlx5_9:1", "PCIDEVICE_X": "0000:3b:00.0"})["UCX_NET_DEVICES"]
	require.Equal(t, []Setting{{"UCX_NET_DEVICES", "mlx5_0:1"}}, f.Fix, "the device that the container was given")
}

// neighbours.md 7: the SR-IOV plugin gives a device without its verbs device unless isRdma is set, and sysfs shows them all.
func TestDevicesThatTheContainerWasGivenMustBeUsable(t *testing.T) {
	m := pod()
	f := examineEnv(t, m, map[string]string{"PCIDEVICE_X": "0000:3b:00.0,0000:86:00.0", "PCIDEVICE_X_INFO": "{}"})["PCIDEVICE_X"]
	require.Equal(t, Warn, f.Status)
	require.Contains(t, f.Cause, "0000:86:00.0 is mlx5_2, whose verbs device the container was not given: /dev/infiniband/uverbs2")
	require.Contains(t, f.Remedy, "isRdma: true")
	for _, other := range []string{"0000:3b:00.0", "0000:00:1f.0"} { // in order; no RDMA device
		require.Equal(t, OK, examineEnv(t, m, map[string]string{"PCIDEVICE_X": other})["PCIDEVICE_X"].Status)
	}

	m.device("mlx5_4", "0000:c0:00.0", "uverbs4", true, "4: ACTIVE", "InfiniBand")
	m.gid("mlx5_4", "0", lidGID, "", "")
	f = examineEnv(t, m, map[string]string{"PCIDEVICE_X": "0000:c0:00.0"})["UCX_NET_DEVICES"]
	require.Equal(t, Warn, f.Status)
	require.Contains(t, f.Cause, "was given mlx5_4:1, but UCX can open mlx5_0:1 too")
	require.Equal(t, []Setting{{"UCX_NET_DEVICES", "mlx5_4:1"}}, f.Fix)
	require.NotContains(t, examineEnv(t, m, map[string]string{}), "UCX_NET_DEVICES", "nothing was given")
}

// nixl#1838, nixl#1898, nixl#1920: the exporters of several ranks fight for one port.
func TestTheTelemetryPortMustBeFree(t *testing.T) {
	busy := func(_ string, port int) error {
		if port == 9090 || port == 9091 {
			return syscall.EADDRINUSE
		}
		return nil
	}
	for _, c := range []struct {
		env  map[string]string
		name string
		want Status
	}{
		{map[string]string{"NIXL_TELEMETRY_ENABLE": "y", "NIXL_TELEMETRY_EXPORTER": "prometheus"}, "NIXL_TELEMETRY_ENABLE", Warn},
		{map[string]string{"NIXL_TELEMETRY_ENABLE": "y", "NIXL_TELEMETRY_EXPORTER": "prometheus", telemetryPort: "9091"}, telemetryPort, Warn},
		{map[string]string{"NIXL_TELEMETRY_ENABLE": "y", "NIXL_TELEMETRY_EXPORTER": "prometheus", telemetryPort: "9100"}, telemetryPort, OK},
		{map[string]string{"NIXL_TELEMETRY_ENABLE": "y"}, "NIXL_TELEMETRY_ENABLE", OK},
		{map[string]string{"NIXL_TELEMETRY_ENABLE": "n", "NIXL_TELEMETRY_EXPORTER": "prometheus"}, "NIXL_TELEMETRY_ENABLE", OK},
	} {
		h := &Host{FS: newMachine(), Env: c.env, Bind: busy}
		found := map[string]Finding{}
		for _, f := range h.checkEnv(nil) {
			found[f.Name] = f
		}
		require.Equal(t, c.want, found[c.name].Status, "%v", c.env)
		if c.want == Warn {
			require.Equal(t, []Setting{{telemetryPort, "9092"}}, found[c.name].Fix)
			requireFixed(t, h)
		}
	}
}

func TestTheSideChannelsAddressMustBeThisMachinesAndReachable(t *testing.T) {
	bind := func(host string, _ int) error {
		switch host {
		case "10.9.9.9":
			return &net.OpError{Op: "listen", Err: os.NewSyscallError("bind", syscall.EADDRNOTAVAIL)}
		case "no-such-host":
			return &net.OpError{Op: "listen", Err: &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}}
		}
		return nil
	}
	for _, c := range []struct {
		host, pod string
		want      Status
		cause     string
		fix       string
	}{
		{"10.0.0.1", "", OK, "", ""},
		{"node-1", "", OK, "", ""},
		{"127.0.0.1", "", OK, "this machine alone", ""},
		{"localhost", "10.0.0.1", Warn, "take it for themselves", "10.0.0.1"},
		{"::1", "10.0.0.1", Warn, "take it for themselves", "10.0.0.1"},
		{"0.0.0.0", "10.0.0.1", Warn, "take it for themselves", "10.0.0.1"},
		{"0.0.0.0", "", Warn, "take it for themselves", ""},
		{"10.9.9.9", "10.0.0.1", Fail, "no interface", "10.0.0.1"},
		{"no-such-host", "", Fail, "does not resolve", ""},
		{"", "10.0.0.1", Warn, "advertises localhost", "10.0.0.1"},
	} {
		h := &Host{FS: newMachine(), Env: map[string]string{}, Bind: bind}
		if c.host != "" {
			h.Env[sideHost] = c.host
		}
		if c.pod != "" {
			h.Env[podIP] = c.pod
		}
		var f Finding
		for _, x := range h.checkEnv(nil) {
			if x.Name == sideHost {
				f = x
			}
		}
		require.Equal(t, c.want, f.Status, "%+v", c)
		require.Contains(t, f.Cause, c.cause)
		requireRemedy(t, f)
		if c.want != OK {
			require.Equal(t, []Setting{{sideHost, c.fix}}, f.Fix)
			requireFixed(t, h)
		}
	}
}

// An instance that restarts may find a port of the kernel's own range taken by a client's connection.
func TestASideChannelPortThatClientsMayTakeIsAWarning(t *testing.T) {
	for _, c := range []struct {
		port, ports, reserved string
		want                  Status
		remedy                string
	}{
		{"5600", "32768\t60999", "", OK, ""}, {"32767", "32768\t60999", "", OK, ""}, {"61000", "32768\t60999", "", OK, ""},
		{"32768", "32768\t60999", "", Warn, "below 32768, such as 5600, or reserve it: sysctl -w net.ipv4.ip_local_reserved_ports=32768"},
		{"60999", "32768\t60999", "8080,9148-9150", Warn, "ip_local_reserved_ports=8080,9148-9150,60999"},
		{"41000", "32768\t60999", "8080,40990-41000", OK, ""}, {"41000", "32768\t60999", "41000", OK, ""},
		{"5600", "1024\t65535", "", Warn, "a port outside of 1024 to 65535"},
		{"41000", "", "", OK, ""}, {"41000", "x", "", OK, ""},
	} {
		m := newMachine()
		if c.ports != "" {
			m.file(portRange, c.ports)
			m.file(reservedPorts, c.reserved)
		}
		f := examineEnv(t, m, map[string]string{sidePort: c.port})[sidePort]
		require.Equal(t, c.want, f.Status, "%+v", c)
		require.Contains(t, f.Remedy, c.remedy)
	}
	cause, _ := ThisHost().ClientPort(1)
	require.Empty(t, cause)
}

func TestTheLibraryOfTheVariableMustBeThere(t *testing.T) {
	m := newMachine()
	m.file("opt/nixl/libnixl_capi.so", "")
	for value, want := range map[string]Status{"/opt/nixl/libnixl_capi.so": OK, "/opt/nixl": OK, "/opt/other/libnixl_capi.so": Fail, "lib/libnixl_capi.so": OK} {
		require.Equal(t, want, examineEnv(t, m, map[string]string{libraryVariable: value})[libraryVariable].Status, value)
	}
}

// What an error of package nixl ends with.
func TestAnExplanationHasWhatIsWrongOfItsTopicsAlone(t *testing.T) {
	m := pod()
	m.file("proc/self/status", "CapEff:\t0000000000000000")
	h := &Host{FS: m, Bind: free, MemLock: 64 << 10, OpenFiles: 1, ShmSize: 1 << 30, ShmFree: 1 << 30,
		Env: map[string]string{"UCX_TLS": "tpc", "UCX_NET_DEVICES": "mlx5_0:1", "UCX_IB_GID_INDEX": "7"}}
	got := h.Explain("UCX_", "memlock")
	require.Contains(t, got, `UCX_TLS="tpc": UCX has no transport "tpc" (tcp?): correct UCX_TLS`)
	require.Contains(t, got, `UCX_IB_GID_INDEX="7": the active port mlx5_0:1 has no usable GID 7: unset UCX_IB_GID_INDEX, or set it to 0`)
	require.Contains(t, got, "memlock limit: 64 KiB: RDMA pins registered memory")
	require.NotContains(t, got, "open-file")
	require.NotContains(t, got, "mlx5_2")
	require.Contains(t, h.Explain("rdma"), "mlx5_2")
	h.Env = map[string]string{"UCX_TLS": "tcp"}
	require.Empty(t, h.Explain("UCX_"))
}

func TestExportsAreQuotedForAShell(t *testing.T) {
	got := Exports([]Finding{
		{Name: "A", Status: Fail, Cause: "it's\nbad", Fix: []Setting{{"A", "it's $HOME"}}},
		{Name: "B", Status: Warn, Cause: "b", Fix: []Setting{{"B", ""}, {"A", "later"}}},
		{Name: "C", Status: OK, Fix: []Setting{{"C", "x"}}},
		{Name: "D", Status: Fail, Cause: "no variable helps"},
	})
	require.Equal(t, "# A: it's bad\nexport A='it'\\''s $HOME'\n# B: b\nunset B\n", got)
	out, err := exec.Command("sh", "-c", got+`printf %s "$A"`).Output()
	require.NoError(t, err)
	require.Equal(t, "it's $HOME", string(out))
}
