package nixl

import (
	"bytes"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/nixl/diagnose"
)

// pod is a machine with one RoCE port, whose GID is of index 3, a small limit of locked memory and no capability.
func pod(env map[string]string) *diagnose.Host {
	fs := fstest.MapFS{}
	for name, content := range map[string]string{
		"proc/self/status":                                      "CapEff:\t0000000000000000",
		"sys/class/net/net1/operstate":                          "up",
		"dev/infiniband/uverbs0":                                "",
		"sys/class/infiniband_verbs/uverbs0/ibdev":              "mlx5_0",
		"sys/class/infiniband/mlx5_0/ports/1/state":             "4: ACTIVE",
		"sys/class/infiniband/mlx5_0/ports/1/link_layer":        "Ethernet",
		"sys/class/infiniband/mlx5_0/ports/1/gids/3":            "0000:0000:0000:0000:0000:ffff:0a00:0001",
		"sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/3": "RoCE v2",
		"sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/3": "net1",
	} {
		fs[name] = &fstest.MapFile{Data: []byte(content + "\n")}
	}
	return &diagnose.Host{FS: fs, Env: env, MemLock: 64 << 10, OpenFiles: 1 << 20, ShmSize: 1 << 30, ShmFree: 1 << 30,
		Bind: func(string, int) error { return nil }}
}

// onDevice claims to be memory of a GPU. UCX without CUDA refuses it.
type onDevice struct{ *Buffer }

func (d onDevice) region() (region, error) {
	r, err := d.Buffer.region()
	r.mem = VRAM
	return r, err
}

// ucx#7336, cudf-spark#7632: the library says -2, and UCX a line on standard error that nobody sees.
func TestARefusedRegistrationNamesTheLimitOfLockedMemory(t *testing.T) {
	if hasGPU() {
		t.Skip("NOT TESTED: a refused registration. UCX takes what it asks of a GPU; run this test where there is none")
	}
	a := newUCX(t, Config{})
	a.s.explain = pod(nil).Explain
	r, err := a.Register(onDevice{mustBuffer(t, 4096)})
	if err == nil && lacks(t, "nixl_capi_opt_args_set_custom_param") { // the UCX of NIXL 0.10 takes any address for a GPU's
		require.NoError(t, r.Close())
		return
	}
	require.ErrorIs(t, err, ErrBackend)
	require.ErrorContains(t, err, "backend UCX refused it; memlock limit: 64 KiB: RDMA pins registered memory")
	require.ErrorContains(t, err, "IPC_LOCK")

	a.s.explain = func(...string) string { return "" }
	_, err = a.Register(onDevice{mustBuffer(t, 4096)})
	require.ErrorIs(t, err, ErrBackend)
	require.NotContains(t, err.Error(), ";", "nothing is wrong with the machine")
}

// bare is an agent without backend.
func bare(t *testing.T) *Agent {
	a, err := NewAgent("", Config{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	return a
}

// rdma-shared-dp#86, #98, #101, smg#2520, cases.md 34.
func TestABackendThatDoesNotStartNamesTheVariableAndTheDevice(t *testing.T) {
	for want, env := range map[string]map[string]string{
		`UCX_IB_GID_INDEX="0": the active port mlx5_0:1 has no usable GID 0: unset UCX_IB_GID_INDEX, or set it to 3`: {"UCX_IB_GID_INDEX": "0"},
		`UCX_NET_DEVICES="mlx5_1:1": there is no device "mlx5_1:1"; there are: net1, mlx5_0:1`:                       {"UCX_NET_DEVICES": "mlx5_1:1"},
		`UCX_TLS="rdma": UCX has no transport "rdma"`:                                                                {"UCX_TLS": "rdma"},
		`memlock limit: 64 KiB`: nil,
	} {
		a := bare(t)
		a.s.explain = pod(env).Explain
		_, err := a.CreateBackend("UCX", map[string]string{"ucx_error_handling_mode": "nonsense"})
		require.ErrorIs(t, err, ErrBackend)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "UCX_LOG_LEVEL=info")
	}
	a := bare(t)
	a.s.explain = pod(map[string]string{"NIXL_PLUGIN_DIR": "/opt/plugins"}).Explain
	_, err := a.CreateBackend("NOPE", nil)
	require.ErrorContains(t, err, `NIXL_PLUGIN_DIR="/opt/plugins": NIXL looks for its plugins there alone: /opt/plugins: file does not exist: unset NIXL_PLUGIN_DIR`)
}

func TestAPeerThatCannotBeLoadedNamesTheDevice(t *testing.T) {
	owner, reader := newUCX(t, Config{}), newUCX(t, Config{})
	registered(t, owner, 4096)
	blob, err := owner.LocalMetadata()
	require.NoError(t, err)
	reader.s.explain = pod(map[string]string{"UCX_NET_DEVICES": "mlx5_1:1"}).Explain
	_, err = reader.LoadRemote(bytes.ReplaceAll(blob, []byte("UCX"), []byte("XYZ"))) // of a backend that is not here
	require.Error(t, err)
	require.NotErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, `no backend of this agent fits the peer's, or the metadata is damaged; UCX_NET_DEVICES="mlx5_1:1": there is no device "mlx5_1:1"`)
}
