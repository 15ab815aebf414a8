package nixl

import (
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
)

// Backend is a transport plugin that an agent uses, UCX for instance. It lives
// as long as its agent.
type Backend struct {
	a    *agent
	h    handle
	name string
	mems uint64 // bit set of the memory types that it serves
}

// Name returns the name of the plugin.
func (b *Backend) Name() string { return b.name }

// Plugins returns the names of the plugins that the library found.
//
// Implements:
//
//	nixl_capi_get_available_plugins
func (a *Agent) Plugins() ([]string, error) {
	const op = "list plugins"
	if err := a.s.lock(op); err != nil {
		return nil, err
	}
	defer a.s.mu.Unlock()
	names, st := rawPlugins(a.s.h)
	slices.Sort(names)
	return names, failed(op, "", st)
}

// PluginParams returns a plugin's parameters with their defaults, and the
// memory types that it serves.
//
// Implements:
//
//	nixl_capi_get_plugin_params
func (a *Agent) PluginParams(plugin string) (map[string]string, []MemType, error) {
	op := "get the parameters of plugin " + plugin
	if err := checkPlugin(op, plugin); err != nil {
		return nil, nil, err
	}
	if err := a.s.lock(op); err != nil {
		return nil, nil, err
	}
	defer a.s.mu.Unlock()
	pairs, mems, st := rawPluginParams(a.s.h, cname(plugin))
	return pairMap(pairs), memSet(mems), failed(op, "", st)
}

// Params returns the parameters that the backend runs with, and the memory
// types that it serves.
//
// Implements:
//
//	nixl_capi_get_backend_params
func (b *Backend) Params() (map[string]string, []MemType, error) {
	op := "get the parameters of backend " + b.name
	if err := b.a.lock(op); err != nil {
		return nil, nil, err
	}
	defer b.a.mu.Unlock()
	pairs, mems, st := rawBackendParams(b.a.h, b.h)
	return pairMap(pairs), memSet(mems), failed(op, "", st)
}

// Notify is Agent.Notify through this backend.
//
// Implements:
//
//	nixl_capi_opt_args_add_backend, nixl_capi_gen_notif
func (b *Backend) Notify(remote string, msg []byte) error { return b.a.notify(remote, msg, b.h) }

// Notifications is Agent.Notifications of what came through this backend only.
//
// Implements:
//
//	nixl_capi_opt_args_add_backend, nixl_capi_get_notifs
func (b *Backend) Notifications(dst []Notification) ([]Notification, error) {
	return b.a.notifications(dst, b.h)
}

// Connect is Agent.Connect of this backend only.
//
// Implements:
//
//	nixl_capi_opt_args_add_backend, nixl_capi_agent_make_connection
func (b *Backend) Connect(remote string) error { return b.a.connect(remote, b.h) }

// CreateBackend loads a plugin into the agent. The parameters replace the
// plugin's defaults (see PluginParams). One backend of each plugin is allowed. A
// UCX backend gets at least as many workers for its callers (num_workers less
// num_threads) as that which had the most in this process, for one with fewer
// can crash, or refuse every transfer of a thread with -2.
//
// The C API answers every failure with one status, so the error says what is
// wrong with this machine: the variable, device, GID or limit, as `nixlgo doctor`
// does, or at least what UCX and the plugin search saw.
//
// Implements:
//
//	nixl_capi_create_params, nixl_capi_params_add, nixl_capi_create_backend
func (a *Agent) CreateBackend(plugin string, params map[string]string) (*Backend, error) {
	op := "create backend " + plugin
	if err := checkPlugin(op, plugin); err != nil {
		return nil, err
	}
	if plugin == "UCX" {
		var err error
		if params, err = ucxParams(op, params); err != nil {
			return nil, err
		}
	}
	var pairs []byte
	for _, key := range slices.Sorted(maps.Keys(params)) {
		value := params[key]
		if key == "" || strings.Contains(key, "\x00") || strings.Contains(value, "\x00") {
			return nil, invalid(op, "the parameter %q=%q is empty or contains NUL", key, value)
		}
		pairs = append(append(pairs, cname(key)...), cname(value)...)
	}
	if err := a.s.lock(op); err != nil {
		return nil, err
	}
	defer a.s.mu.Unlock()
	if slices.ContainsFunc(a.s.backends, func(b *Backend) bool { return b.name == plugin }) {
		return nil, invalid(op, "the agent has that backend already")
	}
	h, st := rawBackendCreate(a.s.h, cname(plugin), pairs, len(params))
	if st < 0 {
		found, _ := rawPlugins(a.s.h)
		return nil, &Error{Op: op, Status: st, Detail: backendHint(plugin, found, a.s.explain)}
	}
	_, mems, st := rawBackendParams(a.s.h, h)
	if st < 0 {
		rawBackendDestroy(h)
		return nil, failed(op, "", st)
	}
	b := &Backend{a: a.s, h: h, name: plugin, mems: mems}
	a.s.backends = append(a.s.backends, b)
	return b, nil
}

// ucxWorkers is the largest number of workers that the callers of a UCX backend of this process had, those of num_threads apart.
var ucxWorkers atomic.Int64

const maxUCXWorkers = 1024 // each has sockets and memory of its own, and is made while the agent is locked

// ucxParams refuses parameters at which the plugin crashes, and raises num_workers until callers have as many as any backend of the
// process had: UCX's plugin keeps each thread's worker under the address of the engine, and only the thread that closes the agent
// forgets it. In an engine with fewer, at the address of a closed agent's, such a thread would take a worker behind the last:
// transfers are then -2, and notifications crash.
func ucxParams(op string, params map[string]string) (map[string]string, error) {
	numbers := map[string]int64{}
	for _, p := range []struct {
		key         string
		least, most int64
	}{{"num_workers", 0, maxUCXWorkers}, {"num_threads", 0, maxUCXWorkers}, {"split_batch_size", 1, math.MaxInt32}} {
		value, set := params[p.key]
		if !set {
			continue
		}
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil || n < p.least || n > p.most {
			return nil, invalid(op, "the parameter %s is %q, not a number of %d to %d", p.key, value, p.least, p.most)
		}
		numbers[p.key] = n
	}
	threads := numbers["num_threads"] // each has a worker that no caller gets
	workers := max(numbers["num_workers"]-threads, 1)
	most := ucxWorkers.Load()
	for workers > most && !ucxWorkers.CompareAndSwap(most, workers) {
		most = ucxWorkers.Load()
	}
	if most = max(most, workers); most > 1 {
		params = maps.Clone(params)
		if params == nil {
			params = map[string]string{}
		}
		params["num_workers"] = strconv.FormatInt(most+threads, 10)
	}
	return params, nil
}

func checkPlugin(op, plugin string) error {
	if plugin == "" || len(plugin) > MaxName || strings.Contains(plugin, "\x00") {
		return invalid(op, "the plugin name %q is empty, too long or contains NUL", plugin)
	}
	return nil
}

// backendHint says what to look at when a backend does not start.
func backendHint(plugin string, found []string, explain func(topics ...string) string) string {
	var b strings.Builder
	look := func(wrong string, variables ...string) {
		if b.WriteString(wrong); wrong == "" {
			b.WriteString("look at ")
			writeVariables(&b, variables...)
		}
	}
	if !slices.Contains(found, plugin) {
		slices.Sort(found)
		fmt.Fprintf(&b, "no plugin of that name was found, only %q; ", found)
		look(explain("NIXL_PLUGIN_DIR"), "NIXL_PLUGIN_DIR")
		return b.String()
	}
	if plugin != "UCX" {
		b.WriteString("look at its parameters, which PluginParams lists, and at the libraries that the plugin itself needs; NIXL_LOG_LEVEL=INFO prints the cause to standard error")
		return b.String()
	}
	look(explain("UCX_", "NIXL_PLUGIN_DIR", "rdma", "memlock"), "UCX_TLS", "UCX_NET_DEVICES", "NIXL_PLUGIN_DIR")
	b.WriteString("; UCX_LOG_LEVEL=info and NIXL_LOG_LEVEL=INFO print the cause to standard error")
	return b.String()
}

func writeVariables(b *strings.Builder, names ...string) {
	for i, name := range names {
		if i > 0 {
			b.WriteString(", ")
		}
		if v, ok := os.LookupEnv(name); ok {
			fmt.Fprintf(b, "%s=%q", name, v)
		} else {
			fmt.Fprintf(b, "%s (unset)", name)
		}
	}
}

func pairMap(pairs []string) map[string]string {
	m := make(map[string]string, len(pairs)/2)
	for i := 0; i+1 < len(pairs); i += 2 {
		m[pairs[i]] = pairs[i+1]
	}
	return m
}

func memSet(bits uint64) []MemType {
	var ms []MemType
	for m := range MemType(memTypes) {
		if bits>>m&1 != 0 {
			ms = append(ms, m)
		}
	}
	return ms
}
