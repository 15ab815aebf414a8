package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/cgo_test/crate"
)

// Each change of the contract that would break this module is found.
func TestDifferencesAreFound(t *testing.T) {
	header, _, err := crate.Header()
	require.NoError(t, err)
	text, err := os.ReadFile(header)
	require.NoError(t, err)
	changed := filepath.Join(t.TempDir(), "wrapper.h")
	try := func(from, to string) error {
		require.Equal(t, 1, strings.Count(string(text), from), "%q", from)
		require.NoError(t, os.WriteFile(changed, []byte(strings.Replace(string(text), from, to, 1)), 0o600))
		_, err := check(changed)
		return err
	}
	report, err := check(header)
	require.NoError(t, err)
	require.Contains(t, report, "104/104 functions")
	for name, c := range map[string][3]string{
		"new function":     {"bool\nnixl_capi_is_stub();", "bool nixl_capi_is_stub();\nint nixl_capi_new(void);", "nixl_capi_new is not in capi.h"},
		"removed function": {"nixl_capi_status_t nixl_capi_destroy_opt_args(nixl_capi_opt_args_t args);", "", "nixl_capi_destroy_opt_args is in capi.h only"},
		"parameter type":   {"nixl_capi_opt_args_set_port(nixl_capi_opt_args_t args, uint16_t port);", "nixl_capi_opt_args_set_port(nixl_capi_opt_args_t args, int port);", "nixl_capi_opt_args_set_port has another type"},
		"handle type":      {"nixl_capi_status_t nixl_capi_destroy_params(nixl_capi_params_t params);", "nixl_capi_status_t nixl_capi_destroy_params(nixl_capi_backend_t params);", "nixl_capi_destroy_params has another type"},
		"status value":     {"NIXL_CAPI_ERROR_NOT_FOUND = -6,", "NIXL_CAPI_ERROR_NOT_FOUND = -7,", "NIXL_CAPI_ERROR_NOT_FOUND has another value"},
		"new status":       {"NIXL_CAPI_ERROR_NOT_FOUND = -6,", "NIXL_CAPI_ERROR_NOT_FOUND = -6, NIXL_CAPI_ERROR_NEW = -7,", "paired_NIXL_CAPI_ERROR_NEW"},
		"field type":       {"int listen_port;", "uint16_t listen_port;", "listen_port has another type"},
		"field order":      {"uint64_t pthr_delay_us;\n    uint64_t lthr_delay_us;", "uint64_t lthr_delay_us;\n    uint64_t pthr_delay_us;", "pthr_delay_us is elsewhere"},
		"new field":        {"bool capture_telemetry;", "bool capture_telemetry;\n    uint64_t more;", "agent_config_s has another size"},
		"telemetry":        {"uint64_t desc_count;", "uint32_t desc_count;", "desc_count has another type"},
	} {
		require.ErrorContains(t, try(c[0], c[1]), c[2], name)
	}
}
