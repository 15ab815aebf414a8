package vllm

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/ports"
)

// ServerOptions of one API server. Zero values take vLLM's defaults, except where the machine wants others.
type ServerOptions struct {
	Role     string         // kv_producer, kv_consumer or kv_both; empty: no KV connector
	EngineID string         // must differ between the engines of a test
	Model    string         // folder name, which is an input of the compatibility hash; empty: tiny-llama
	Block    int            // tokens; 0: 32
	Extra    map[string]any // kv_connector_extra_config
}

// A Server is vLLM's OpenAI server, in a process of its own.
type Server struct {
	URL string

	name  string
	log   string
	ended chan struct{}
}

// StartServer starts a server and returns at once, so that several can start side by side; Wait waits for it. The server
// ends with the test, which fails when vLLM is not installed.
func StartServer(t testing.TB, o ServerOptions) *Server {
	t.Helper()
	folder, err := environment()
	require.NoError(t, err)
	model := filepath.Join(folder, "tiny-llama")
	work := filepath.Dir(model)
	if o.Model != "" { // the same weights under another name
		work = t.TempDir()
		require.NoError(t, os.Symlink(model, filepath.Join(work, o.Model)))
		model = filepath.Join(work, o.Model)
	}
	port, err := ports.Free()
	require.NoError(t, err)
	side, err := ports.Free()
	require.NoError(t, err)
	args := []string{"-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", strconv.Itoa(port), "--model", filepath.Base(model),
		"--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-batched-tokens", "2048",
		"--max-num-seqs", "8", "--block-size", strconv.Itoa(cmp.Or(o.Block, 32)), "--num-gpu-blocks-override", "64", "--kv-cache-memory-bytes", strconv.Itoa(256 << 20)}
	if o.Role != "" {
		kv := map[string]any{"kv_connector": "NixlConnector", "kv_role": o.Role, "engine_id": o.EngineID, "kv_buffer_device": "cpu"}
		if o.Extra != nil {
			kv["kv_connector_extra_config"] = o.Extra
		}
		text, err := json.Marshal(kv)
		require.NoError(t, err)
		args = append(args, "--kv-transfer-config", string(text))
	}
	python := filepath.Join(folder, "venv", "bin", "python")
	site := filepath.Join(folder, "venv", "lib", "python3.11", "site-packages")
	log := logFile(t, o.EngineID)
	c := exec.Command(python, args...)
	c.Dir = work
	c.Env = slices.Concat([]string{
		"VLLM_TARGET_DEVICE=cpu", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1", "VLLM_NO_USAGE_STATS=1",
		"HF_HUB_OFFLINE=1", "CUDA_VISIBLE_DEVICES=", "UCX_TLS=tcp", "NIXL_PLUGIN_DIR=" + filepath.Join(site, ".nixl_cu12.mesonpy.libs", "plugins"),
	}, os.Environ(), []string{"VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT=" + strconv.Itoa(side)})
	c.Stdout, c.Stderr = log, log
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM} // a test that panics does not leave it behind
	require.NoError(t, c.Start())
	s := &Server{URL: fmt.Sprintf("http://127.0.0.1:%d", port), name: o.EngineID, log: log.Name(), ended: make(chan struct{})}
	go func() {
		defer close(s.ended)
		_ = c.Wait()
	}()
	t.Cleanup(func() {
		_ = c.Process.Signal(syscall.SIGTERM)
		kill := time.AfterFunc(time.Minute, func() { _ = c.Process.Kill() })
		<-s.ended
		kill.Stop()
	})
	return s
}

// Wait waits until the server answers.
func (s *Server) Wait(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		q, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+"/health", nil)
		require.NoError(t, err)
		if resp, err := http.DefaultClient.Do(q); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return
			}
		}
		select {
		case <-s.ended:
			t.Fatalf("%s ended:\n%s", s.name, tail(s.log, 30))
		case <-ctx.Done():
			t.Fatalf("%s does not serve after %v:\n%s", s.name, patience, tail(s.log, 30))
		case <-time.After(100 * time.Millisecond):
		}
	}
}
