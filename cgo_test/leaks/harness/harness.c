/*
 * Drives every function of nixl/shim.c on a library that is made here. It lets each call of the C API and each
 * allocation fail once, in turn, takes each optional function away once, and counts what the function left behind.
 * Built with the address and leak sanitizers, which see double frees and uses after the end, and name the line of a leak.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *unreliable_realloc(void *old, size_t size);
static void *unreliable_calloc(size_t n, size_t size);
#define realloc unreliable_realloc
#define calloc unreliable_calloc
#include "../../../nixl/shim.c"
#undef realloc
#undef calloc

static long calls, failing; /* of the call that is driven: how many so far, and the one that fails (0: none) */
static const char *failed_call;
static nx_status failure;

/* step counts a call of the driven function and reports whether it fails. */
static bool step(const char *name) {
    if (++calls != failing)
        return false;
    failed_call = name;
    return true;
}

static void calm(void) {
    failing = 0;
}

static void *unreliable_realloc(void *old, size_t size) {
    return step("realloc") ? NULL : realloc(old, size);
}

static void *unreliable_calloc(size_t n, size_t size) {
    return step("calloc") ? NULL : calloc(n, size);
}

/* What the driven function has to answer when a call of it failed. */
static int expected(void) {
    return strstr(failed_call, "alloc") ? NIXLGO_NO_MEMORY : failure;
}

static void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    fflush(stdout);
    abort();
}

/* What the library hands out: an object of a kind, which says what it is until it ends. */
#define KINDS(K)                                                                                   \
    K(agent) K(backend) K(params) K(iterator) K(mem_list) K(string_list) K(opt_args) K(xfer_dlist) \
    K(reg_dlist) K(remote_dlist) K(prepared) K(request) K(notif_map) K(query_list) K(view) K(returned)
#define ENUMERATOR(kind) kind##_kind,
enum { KINDS(ENUMERATOR) KIND_COUNT };
#define NAME(kind) #kind,
static const char *kind_names[] = {KINDS(NAME)};
static int living[KIND_COUNT];

typedef struct {
    int kind;
    int position; /* of an iterator */
    int senders;  /* of a notification map: those that it holds */
} object;

static void *make(int kind) {
    object *o = calloc(1, sizeof *o);
    o->kind = kind;
    living[kind]++;
    return o;
}

static object *use(const void *handle, int kind) {
    object *o = (object *)handle;
    if (!o)
        die("a %s is NULL\n", kind_names[kind]);
    if (o->kind != kind)
        die("a %s is used as a %s\n", kind_names[o->kind], kind_names[kind]);
    return o;
}

static nx_status end(void *handle, int kind) {
    use(handle, kind);
    living[kind]--;
    free(handle);
    return NX_SUCCESS;
}

#define API(name, ...) nx_status nixl_capi_##name(__VA_ARGS__)
#define STEP                                                                                       \
    if (step(__func__))                                                                            \
        return failure;
#define MAKER(name, kind, type)                                                                    \
    API(name, type *out) {                                                                         \
        STEP *out = make(kind##_kind);                                                             \
        return NX_SUCCESS;                                                                         \
    }
#define ENDER(name, kind, type)                                                                    \
    API(name, type handle) {                                                                       \
        return end(handle, kind##_kind);                                                           \
    }

static bool stub;
bool nixl_capi_is_stub(void) {
    return stub;
}

API(create_configured_agent, const char *name, const nx_config *c, nx_agent *out) {
    STEP
    if (!*name || c->thread_sync != NX_SYNC_RW || !c->enable_prog_thread)
        die("an agent without RW synchronisation or progress thread\n");
    *out = make(agent_kind);
    return NX_SUCCESS;
}
ENDER(destroy_agent, agent, nx_agent)

API(create_backend, nx_agent a, const char *plugin, nx_params p, nx_backend *out) {
    STEP
    use(a, agent_kind), use(p, params_kind);
    if (!*plugin)
        die("no plugin\n");
    *out = make(backend_kind);
    return NX_SUCCESS;
}
ENDER(destroy_backend, backend, nx_backend)

API(get_available_plugins, nx_agent a, nx_string_list *out) {
    STEP
    use(a, agent_kind);
    *out = make(string_list_kind);
    return NX_SUCCESS;
}
ENDER(destroy_string_list, string_list, nx_string_list)

API(string_list_size, nx_string_list l, size_t *n) {
    STEP
    use(l, string_list_kind);
    *n = 3;
    return NX_SUCCESS;
}

API(string_list_get, nx_string_list l, size_t i, const char **out) {
    STEP
    use(l, string_list_kind);
    *out = i == 1 ? "" : "UCX";
    return NX_SUCCESS;
}

static nx_status both_lists(nx_mem_list *mems, nx_params *params) {
    *mems = make(mem_list_kind);
    *params = make(params_kind);
    return NX_SUCCESS;
}

API(get_plugin_params, nx_agent a, const char *plugin, nx_mem_list *mems, nx_params *params) {
    STEP
    use(a, agent_kind);
    if (!*plugin)
        die("no plugin\n");
    return both_lists(mems, params);
}

API(get_backend_params, nx_agent a, nx_backend b, nx_mem_list *mems, nx_params *params) {
    STEP
    use(a, agent_kind), use(b, backend_kind);
    return both_lists(mems, params);
}
ENDER(destroy_mem_list, mem_list, nx_mem_list)

API(mem_list_size, nx_mem_list l, size_t *n) {
    STEP
    use(l, mem_list_kind);
    *n = 3;
    return NX_SUCCESS;
}

API(mem_list_get, nx_mem_list l, size_t i, nx_mem *out) {
    STEP
    use(l, mem_list_kind);
    *out = i == 2 ? 1000 : (nx_mem)i; /* a type that nobody knows must not shift beyond the set */
    return NX_SUCCESS;
}

MAKER(create_params, params, nx_params)
ENDER(destroy_params, params, nx_params)

API(params_add, nx_params p, const char *key, const char *value) {
    STEP
    use(p, params_kind);
    if (!*key || !value)
        die("no key\n");
    return NX_SUCCESS;
}

API(params_is_empty, nx_params p, bool *out) {
    STEP
    use(p, params_kind);
    *out = false;
    return NX_SUCCESS;
}

API(params_create_iterator, nx_params p, nx_param_iter *out) {
    STEP
    use(p, params_kind);
    *out = make(iterator_kind);
    return NX_SUCCESS;
}
ENDER(params_destroy_iterator, iterator, nx_param_iter)

API(params_iterator_next, nx_param_iter it, const char **key, const char **value, bool *more) {
    STEP
    object *o = use(it, iterator_kind);
    *key = "key";
    *value = "value";
    *more = ++o->position < 3;
    return NX_SUCCESS;
}

MAKER(create_opt_args, opt_args, nx_opt_args)
ENDER(destroy_opt_args, opt_args, nx_opt_args)

API(opt_args_add_backend, nx_opt_args o, nx_backend b) {
    STEP
    use(o, opt_args_kind), use(b, backend_kind);
    return NX_SUCCESS;
}

/* With zero bytes in it. */
#define BYTES "\1\0\2\0\3"
static void check_bytes(const void *bytes, size_t n) {
    if (n && (n != 5 || memcmp(bytes, BYTES, n)))
        die("other bytes\n");
}

static nx_status bytes_option(nx_opt_args o, const void *bytes, size_t n) {
    use(o, opt_args_kind);
    check_bytes(bytes, n);
    return NX_SUCCESS;
}

API(opt_args_set_notif_msg, nx_opt_args o, const void *message, size_t n) {
    STEP return bytes_option(o, message, n);
}

API(opt_args_set_custom_param, nx_opt_args o, const void *custom, size_t n) {
    STEP return bytes_option(o, custom, n);
}

#define OPTION(name, ...)                                                                          \
    API(name, nx_opt_args o, __VA_ARGS__) {                                                        \
        STEP use(o, opt_args_kind);                                                                \
        (void)value;                                                                               \
        return NX_SUCCESS;                                                                         \
    }
OPTION(opt_args_set_has_notif, bool value)
OPTION(opt_args_set_skip_desc_merge, bool value)
OPTION(opt_args_set_ip_addr, const char *value)
OPTION(opt_args_set_port, uint16_t value)

#define LIST_MAKER(name, kind, type)                                                               \
    API(name, nx_mem mem, type *out) {                                                             \
        STEP if (mem > NX_MEM_FILE) die("memory type %u\n", mem);                                  \
        *out = make(kind##_kind);                                                                  \
        return NX_SUCCESS;                                                                         \
    }
LIST_MAKER(create_xfer_dlist, xfer_dlist, nx_xfer_dlist)
LIST_MAKER(create_reg_dlist, reg_dlist, nx_reg_dlist)
LIST_MAKER(create_remote_dlist, remote_dlist, nx_remote_dlist)
ENDER(destroy_xfer_dlist, xfer_dlist, nx_xfer_dlist)
ENDER(destroy_reg_dlist, reg_dlist, nx_reg_dlist)
ENDER(destroy_remote_dlist, remote_dlist, nx_remote_dlist)

static void check_desc(uintptr_t addr, size_t len, uint64_t dev) {
    if (!addr || len != 8 || dev != 1)
        die("descriptor %#zx +%zu dev %zu\n", (size_t)addr, len, (size_t)dev);
}

API(xfer_dlist_add_desc, nx_xfer_dlist l, uintptr_t addr, size_t len, uint64_t dev) {
    STEP
    use(l, xfer_dlist_kind);
    check_desc(addr, len, dev);
    return NX_SUCCESS;
}

API(xfer_dlist_clear, nx_xfer_dlist l) {
    STEP
    use(l, xfer_dlist_kind);
    return NX_SUCCESS;
}

API(xfer_dlist_resize, nx_xfer_dlist l, size_t n) {
    STEP
    use(l, xfer_dlist_kind);
    if (n < 2)
        die("room for %zu\n", n);
    return NX_SUCCESS;
}

API(reg_dlist_add_desc, nx_reg_dlist l, uintptr_t addr, size_t len, uint64_t dev, const void *meta, size_t n) {
    STEP
    use(l, reg_dlist_kind);
    check_desc(addr, len, dev);
    check_bytes(meta, n);
    return NX_SUCCESS;
}

API(remote_dlist_add_desc, nx_remote_dlist l, uintptr_t addr, size_t len, uint64_t dev, const char *owner) {
    STEP
    use(l, remote_dlist_kind);
    check_desc(addr, len, dev);
    if (owner && strcmp(owner, "peer"))
        die("owner %s\n", owner);
    return NX_SUCCESS;
}

static void check_args(nx_opt_args args) {
    if (args)
        use(args, opt_args_kind);
}

#define REGISTRATION(name)                                                                         \
    API(name, nx_agent a, nx_reg_dlist l, nx_opt_args args) {                                      \
        STEP use(a, agent_kind), use(l, reg_dlist_kind), check_args(args);                         \
        return NX_SUCCESS;                                                                         \
    }
REGISTRATION(register_mem)
REGISTRATION(deregister_mem)
REGISTRATION(send_local_partial_md)

static nx_status returned(void **out, size_t *n) {
    *out = make(returned_kind);
    *n = sizeof(object);
    return NX_SUCCESS;
}

/* As the planned library: what it returned is its own to free. */
void nixl_capi_mem_free(void *p) {
    end(p, returned_kind);
}

API(get_local_md, nx_agent a, void **out, size_t *n) {
    STEP
    use(a, agent_kind);
    return returned(out, n);
}

API(get_local_partial_md, nx_agent a, nx_reg_dlist l, void **out, size_t *n, nx_opt_args args) {
    STEP
    use(a, agent_kind), use(l, reg_dlist_kind), check_args(args);
    return returned(out, n);
}

API(load_remote_md, nx_agent a, const void *blob, size_t n, char **name) {
    STEP
    use(a, agent_kind), check_bytes(blob, n);
    return returned((void **)name, &n);
}

API(check_remote_md, nx_agent a, const char *name, nx_xfer_dlist l) {
    STEP
    use(a, agent_kind);
    if (l)
        use(l, xfer_dlist_kind);
    return *name ? NX_SUCCESS : NX_INVALID_PARAM;
}

#define BY_NAME(api, ...)                                                                          \
    API(api, nx_agent a, const char *name __VA_ARGS__) {                                           \
        STEP use(a, agent_kind);                                                                   \
        return *name ? NX_SUCCESS : NX_INVALID_PARAM;                                              \
    }
BY_NAME(invalidate_remote_md)

#define WITH_ARGS(api)                                                                             \
    API(api, nx_agent a, nx_opt_args args) {                                                       \
        STEP use(a, agent_kind), check_args(args);                                                 \
        return NX_SUCCESS;                                                                         \
    }
WITH_ARGS(invalidate_local_md)
WITH_ARGS(send_local_md)

#define BY_NAME_WITH_ARGS(api)                                                                     \
    API(api, nx_agent a, const char *name, nx_opt_args args) {                                     \
        STEP use(a, agent_kind), check_args(args);                                                 \
        return *name ? NX_SUCCESS : NX_INVALID_PARAM;                                              \
    }
BY_NAME_WITH_ARGS(fetch_remote_md)
BY_NAME_WITH_ARGS(agent_make_connection)

API(gen_notif, nx_agent a, const char *name, const void *message, size_t n, nx_opt_args args) {
    STEP
    use(a, agent_kind), check_args(args);
    if (!message || !*name)
        die("no message\n");
    check_bytes(message, n);
    return NX_SUCCESS;
}

API(prep_xfer_dlist, nx_agent a, const char *owner, nx_xfer_dlist l, nx_prepped *out, nx_opt_args args) {
    STEP
    use(a, agent_kind), use(l, xfer_dlist_kind), check_args(args);
    if (!owner)
        die("no owner\n");
    *out = make(prepared_kind);
    return NX_SUCCESS;
}

API(release_xfer_dlist_handle, nx_agent a, nx_prepped p) {
    use(a, agent_kind);
    end(p, prepared_kind); /* whatever it answers */
    STEP
    return NX_SUCCESS;
}

API(make_xfer_req, nx_agent a, nx_op op, nx_prepped local, const int *li, size_t ln, nx_prepped remote, const int *ri,
    size_t rn, nx_req *out, nx_opt_args args) {
    STEP
    use(a, agent_kind), use(local, prepared_kind), use(remote, prepared_kind), check_args(args);
    if (op > NX_OP_WRITE || ln != rn || li[ln - 1] < 0 || ri[rn - 1] < 0)
        die("other indices\n");
    *out = make(request_kind);
    return NX_SUCCESS;
}

API(create_xfer_req, nx_agent a, nx_op op, nx_xfer_dlist local, nx_xfer_dlist remote, const char *owner, nx_req *out,
    nx_opt_args args) {
    STEP
    use(a, agent_kind), use(local, xfer_dlist_kind), use(remote, xfer_dlist_kind), check_args(args);
    if (op > NX_OP_WRITE || !*owner)
        die("other owner\n");
    *out = make(request_kind);
    return NX_SUCCESS;
}

API(post_xfer_req, nx_agent a, nx_req r, nx_opt_args args) {
    STEP
    use(a, agent_kind), use(r, request_kind);
    if (args)
        die("optional arguments of a post lose its notification\n");
    return NX_SUCCESS;
}

#define OF_REQUEST(name)                                                                           \
    API(name, nx_agent a, nx_req r) {                                                              \
        STEP use(a, agent_kind), use(r, request_kind);                                             \
        return NX_SUCCESS;                                                                         \
    }
OF_REQUEST(get_xfer_status)
OF_REQUEST(release_xfer_req)
ENDER(destroy_xfer_req, request, nx_req)

API(estimate_xfer_cost, nx_agent a, nx_req r, nx_opt_args args, int64_t *duration, int64_t *margin, nx_cost *method) {
    STEP
    use(a, agent_kind), use(r, request_kind), check_args(args);
    *duration = *margin = 1;
    *method = NX_COST_ANALYTICAL;
    return NX_SUCCESS;
}

API(get_xfer_telemetry, nx_agent a, nx_req r, nx_telemetry *out) {
    STEP
    use(a, agent_kind), use(r, request_kind);
    *out = (nx_telemetry){1, 2, 3, 4, 5};
    return NX_SUCCESS;
}

API(query_xfer_backend, nx_agent a, nx_req r, nx_backend *out) {
    STEP
    use(a, agent_kind), use(r, request_kind);
    *out = make(backend_kind);
    return NX_SUCCESS;
}

MAKER(create_query_resp_list, query_list, nx_query_list)
ENDER(destroy_query_resp_list, query_list, nx_query_list)

API(query_mem, nx_agent a, nx_reg_dlist l, nx_query_list out, nx_opt_args args) {
    STEP
    use(a, agent_kind), use(l, reg_dlist_kind), use(out, query_list_kind), check_args(args);
    return NX_SUCCESS;
}

API(query_resp_list_size, nx_query_list l, size_t *n) {
    STEP
    use(l, query_list_kind);
    *n = 2;
    return NX_SUCCESS;
}

API(query_resp_list_has_value, nx_query_list l, size_t i, bool *out) {
    STEP
    use(l, query_list_kind);
    *out = i == 0;
    return NX_SUCCESS;
}

API(query_resp_list_get_params, nx_query_list l, size_t i, nx_params *out) {
    STEP
    use(l, query_list_kind);
    if (i)
        die("the parameters of nothing\n");
    *out = make(params_kind);
    return NX_SUCCESS;
}

#define VIEW(name, type, kind)                                                                     \
    API(name, nx_agent a, type l, nx_mem_view *out, nx_opt_args args) {                            \
        STEP use(a, agent_kind), use(l, kind##_kind), check_args(args);                            \
        *out = make(view_kind);                                                                    \
        return NX_SUCCESS;                                                                         \
    }
VIEW(prep_mem_view_local, nx_xfer_dlist, xfer_dlist)
VIEW(prep_mem_view_remote, nx_remote_dlist, remote_dlist)

API(release_mem_view, nx_agent a, nx_mem_view v) {
    use(a, agent_kind);
    end(v, view_kind);
    STEP
    return NX_SUCCESS;
}

MAKER(create_notif_map, notif_map, nx_notif_map)
ENDER(destroy_notif_map, notif_map, nx_notif_map)

API(get_notifs, nx_agent a, nx_notif_map m, nx_opt_args args) {
    STEP
    use(a, agent_kind), check_args(args);
    use(m, notif_map_kind)->senders += 3;
    return NX_SUCCESS;
}

API(notif_map_size, nx_notif_map m, size_t *n) {
    STEP
    *n = (size_t)use(m, notif_map_kind)->senders;
    return NX_SUCCESS;
}

API(notif_map_get_agent_at, nx_notif_map m, size_t i, const char **out) {
    STEP
    if ((int)i >= use(m, notif_map_kind)->senders)
        die("sender %zu\n", i);
    *out = i % 3 == 1 ? "" : "peer";
    return NX_SUCCESS;
}

API(notif_map_get_notifs_size, nx_notif_map m, const char *from, size_t *n) {
    STEP
    use(m, notif_map_kind);
    *n = 2;
    return *from ? NX_SUCCESS : NX_INVALID_PARAM; /* a name with a NUL byte */
}

API(notif_map_get_notif, nx_notif_map m, const char *from, size_t k, const void **out, size_t *n) {
    STEP
    use(m, notif_map_kind);
    *out = k ? NULL : from;
    *n = k ? 0 : strlen(from);
    return NX_SUCCESS;
}

API(notif_map_clear, nx_notif_map m) {
    STEP
    use(m, notif_map_kind)->senders = 0;
    return NX_SUCCESS;
}

/* What the drivers work with. It outlives them. */
static uint64_t agent, backend, local, remote, request;
static const nixlgo_desc descs[] = {{4096, 8, 1}, {8192, 8, 1}, {12288, 8, 1}};
enum { N = sizeof descs / sizeof *descs };
static const int32_t indices[] = {2, 0, 1};
static const nixlgo_options options[] = {
    {0},
    {BYTES, 5, BYTES, 5, 0, 1, 1},
    {NULL, 0, NULL, 0, 0, 1, 0}, /* an empty notification */
};

static nixlgo_options with_backend(nixlgo_options o) {
    o.backend = backend;
    return o;
}

/* A driver calls one function of the shim, and ends what that hands out. */
#define DRIVER(name) static int drive_##name(void)

DRIVER(agent_create) {
    uint64_t a = 0;
    int s = nixlgo_agent_create("name", 1, 1, 1, 1, 1, &a);
    calm();
    if (a)
        nixlgo_agent_destroy(a);
    return s;
}

DRIVER(agent_destroy) { return drive_agent_create(); }

DRIVER(plugins) {
    nixlgo_bytes b = {0};
    int s = nixlgo_plugins(agent, &b);
    nixlgo_bytes_free(&b);
    return s;
}

DRIVER(bytes_free) { return drive_plugins(); }

DRIVER(plugin_params) {
    nixlgo_bytes b = {0};
    uint64_t mems = 0;
    int s = nixlgo_plugin_params(agent, "UCX", &b, &mems);
    nixlgo_bytes_free(&b);
    if (!s && mems != 3)
        die("memory types %#zx\n", (size_t)mems);
    return s;
}

DRIVER(backend_params) {
    nixlgo_bytes b = {0};
    uint64_t mems = 0;
    int s = nixlgo_backend_params(agent, backend, &b, &mems);
    nixlgo_bytes_free(&b);
    return s;
}

DRIVER(backend_create) {
    uint64_t b = 0;
    int s = nixlgo_backend_create(agent, "UCX", "one\0" "1\0" "two\0", 2, &b);
    calm();
    if (b)
        nixlgo_backend_destroy(b);
    return s;
}

DRIVER(backend_destroy) { return drive_backend_create(); }

static const nixlgo_region *region(size_t backends) {
    static nixlgo_region r;
    r = (nixlgo_region){NX_MEM_OBJECT, descs[0], BYTES, 5, &backend, backends};
    return &r;
}

DRIVER(register) {
    int s = nixlgo_register(agent, region(1));
    return s ? s : nixlgo_register(agent, region(0));
}

DRIVER(deregister) {
    return nixlgo_deregister(agent, region(1));
}

DRIVER(query) {
    /* each name with its length before it */
    static const uint8_t names[] = {5, 0, 0, 0, 1, 0, 2, 0, 3, 0, 0, 0, 0, 5, 0, 0, 0, 1, 0, 2, 0, 3};
    nixlgo_bytes b = {0};
    int s = nixlgo_query(agent, backend, NX_MEM_FILE, descs, N, names, &b);
    nixlgo_bytes_free(&b);
    return s;
}

DRIVER(local_md) {
    void *data = NULL;
    size_t n = 0;
    int s = nixlgo_local_md(agent, &data, &n);
    if (data)
        nixlgo_free(data);
    return s;
}

DRIVER(free) {
    void (*planned)(void *) = api.mem_free;
    int s = drive_local_md();
    api.mem_free = NULL; /* as in every released library: what it returned is malloc's */
    nixlgo_free(malloc(8));
    api.mem_free = planned;
    return s;
}

DRIVER(load_md) {
    char *name = NULL;
    int s = nixlgo_load_md(agent, BYTES, 5, &name);
    if (name)
        nixlgo_free(name);
    return s;
}

DRIVER(partial_md) {
    void *data = NULL;
    size_t n = 0;
    int s = nixlgo_partial_md(agent, NX_MEM_DRAM, descs, N, &data, &n);
    if (data)
        nixlgo_free(data);
    return s;
}

DRIVER(invalidate_md) { return nixlgo_invalidate_md(agent, "peer"); }

DRIVER(check_md) {
    int s = nixlgo_check_md(agent, "peer", NX_MEM_DRAM, NULL, 0);
    return s ? s : nixlgo_check_md(agent, "peer", NX_MEM_DRAM, descs, N);
}

DRIVER(connect) {
    int s = nixlgo_connect(agent, "peer", 0);
    return s ? s : nixlgo_connect(agent, "peer", backend);
}

DRIVER(send_md) {
    int s = nixlgo_send_md(agent, "", 0);
    return s ? s : nixlgo_send_md(agent, "127.0.0.1", 1);
}

DRIVER(send_partial_md) { return nixlgo_send_partial_md(agent, NX_MEM_DRAM, descs, N, "127.0.0.1", 1); }

DRIVER(fetch_md) { return nixlgo_fetch_md(agent, "peer", "127.0.0.1", 1); }

DRIVER(invalidate_local_md) { return nixlgo_invalidate_local_md(agent, "127.0.0.1", 1); }

DRIVER(prepare) {
    uint64_t list = 0;
    int s = nixlgo_prepare(agent, "peer", NX_MEM_DRAM, descs, N, &list);
    calm();
    if (list)
        nixlgo_list_release(agent, list);
    return s;
}

DRIVER(list_release) {
    uint64_t list = 0;
    long at = failing;
    calm();
    nixlgo_prepare(agent, "peer", NX_MEM_DRAM, descs, N, &list);
    calls = 0, failing = at;
    return nixlgo_list_release(agent, list); /* ended whatever it answers */
}

/* end_request ends what make and create hand out, also after a refused release. No call of it fails or counts. */
static void end_request(uint64_t req) {
    long so_far = calls, at = failing;
    calm();
    if (req && nixlgo_release(agent, req))
        die("a request that does not end\n");
    calls = so_far, failing = at;
}

static int make_request(const nixlgo_options *o, int post, uint64_t *req) {
    nixlgo_poll_item item = {0};
    nixlgo_make(agent, NX_OP_READ, local, indices, N, remote, indices, N, N, o, post, &item);
    *req = item.req;
    return item.made ? item.made : item.status;
}

DRIVER(make) {
    int s = 0;
    for (size_t i = 0; !s && i < sizeof options / sizeof *options; i++) {
        nixlgo_options o = with_backend(options[i]);
        uint64_t req = 0;
        s = make_request(i ? &o : NULL, i == 1, &req);
        end_request(req);
    }
    if (!s) {
        nixlgo_poll_item item = {0};
        nixlgo_make(agent, NX_OP_READ, local, indices, N - 1, remote, indices, N, N, NULL, 1, &item);
        if (item.made != NIXLGO_INDEX || item.req)
            die("an index out of range makes a request\n");
    }
    return s;
}

DRIVER(create) {
    uint64_t req = 0;
    nixlgo_options o = with_backend(options[1]);
    int s = nixlgo_create(agent, NX_OP_WRITE, NX_MEM_DRAM, descs, NX_MEM_FILE, descs, N, "peer", &o, &req);
    end_request(req);
    return s;
}

DRIVER(post) {
    nixlgo_poll_item item = {request, 7, 0};
    nixlgo_post(agent, &item);
    return item.status;
}

DRIVER(poll) {
    nixlgo_poll_item items[] = {{request, 7, 0}, {request, 7, 0}};
    nixlgo_poll(agent, items, 2);
    return items[0].status ? items[0].status : items[1].status;
}

DRIVER(release) {
    uint64_t req = 0;
    long at = failing;
    calm();
    make_request(NULL, 0, &req);
    calls = 0, failing = at;
    int s = nixlgo_release(agent, req);
    if (s)
        end_request(req);
    return s;
}

DRIVER(estimate) {
    int64_t duration, margin;
    return nixlgo_estimate(agent, request, &duration, &margin);
}

DRIVER(telemetry) {
    nixlgo_times t;
    return nixlgo_telemetry(agent, request, &t);
}

DRIVER(transfer_backend) {
    nixlgo_bytes b = {0};
    uint64_t mems;
    int s = nixlgo_transfer_backend(agent, request, &b, &mems);
    nixlgo_bytes_free(&b);
    return s;
}

static void end_view(uint64_t view) {
    calm();
    if (view)
        nixlgo_view_release(agent, view);
}

DRIVER(view_local) {
    nixlgo_options o = with_backend(options[1]);
    uint64_t view = 0;
    int s = nixlgo_view_local(agent, NX_MEM_VRAM, descs, N, &o, &view);
    end_view(view);
    return s;
}

DRIVER(view_remote) {
    uint64_t view = 0;
    int s = nixlgo_view_remote(agent, NX_MEM_VRAM, descs, N, "peer\0\0peer\0", &options[1], &view);
    end_view(view);
    return s;
}

DRIVER(view_release) { return drive_view_local(); }

DRIVER(notify) {
    int s = nixlgo_notify(agent, "peer", NULL, 0, 0);
    return s ? s : nixlgo_notify(agent, "peer", BYTES, 5, backend);
}

DRIVER(inbox_open) {
    nixlgo_inbox *box = nixlgo_inbox_open();
    if (!box)
        return failed_call ? expected() : NX_EXCEPTION;
    nixlgo_inbox_close(box);
    return 0;
}

DRIVER(inbox_close) { return drive_inbox_open(); }

static int drain(nixlgo_inbox *box, uint64_t from) {
    nixlgo_inbox_drain(agent, (uintptr_t)box, from);
    return box->status;
}

DRIVER(inbox_drain) {
    long at = failing;
    calm();
    nixlgo_inbox *box = nixlgo_inbox_open();
    object *map = use((void *)(uintptr_t)box->map, notif_map_kind);
    calls = 0, failing = at;
    int s = drain(box, backend);
    if (!s)
        s = nixlgo_inbox_clear(box);
    if (!s)
        s = drain(box, 0); /* into the room of before */
    calm();
    if (!failed_call && map->senders != 3)
        die("%d senders of two drains\n", map->senders);
    int undrained = map->senders; /* a failure loses nothing */
    if (drain(box, 0) || (int)box->count != 4 * (undrained / 3 + 1) || box->bytes != 2 * box->count)
        die("%zu messages, %d senders undrained before\n", (size_t)box->count, undrained);
    box->cap = KEEP_MESSAGES + 1;
    if (nixlgo_inbox_clear(box) || box->messages || box->cap || map->senders)
        die("the room of a burst is kept\n");
    drain(box, 0);
    nixlgo_inbox_close(box);
    return s;
}

DRIVER(inbox_clear) { return drive_inbox_drain(); }

DRIVER(load) {
    char message[256];
    function_table before = api;
    stub = true;
    int s = nixlgo_load(NULL, message, sizeof message) != NIXLGO_STUB;
    stub = false;
    s |= nixlgo_load("/nonexistent", message, sizeof message) != NIXLGO_NOT_OPENED;
    s |= nixlgo_load("libm.so.6", message, sizeof message) != NIXLGO_INCOMPLETE || !message[0];
    s |= nixlgo_load("libm.so.6", message, 8) != NIXLGO_INCOMPLETE || strlen(message) > 7;
    s |= memcmp(&before, &api, sizeof api); /* what does not load changes nothing */
    return s;
}

DRIVER(function_name) { return nixlgo_function_name(-1) || nixlgo_function_name(COUNT) || !nixlgo_function_name(0); }
DRIVER(function_missing) { return nixlgo_function_missing(0); }

DRIVER(map) {
    void *m = NULL;
    int s = nixlgo_map(1 << 16, &m);
    if (!s)
        s = nixlgo_unmap(m, 1 << 16);
    return s || nixlgo_map(SIZE_MAX, &m) == 0 || nixlgo_unmap((void *)1, 1) == 0;
}

DRIVER(unmap) { return drive_map(); }

#define DRIVERS(D)                                                                                 \
    D(load) D(function_name) D(function_missing) D(map) D(unmap) D(bytes_free) D(free)             \
    D(agent_create) D(agent_destroy) D(plugins) D(plugin_params) D(backend_params)                 \
    D(backend_create) D(backend_destroy) D(register) D(deregister) D(query) D(local_md) D(load_md) \
    D(partial_md) D(invalidate_md) D(check_md) D(connect) D(send_md) D(send_partial_md)            \
    D(fetch_md) D(invalidate_local_md) D(prepare) D(list_release) D(make) D(create) D(post)        \
    D(poll) D(release) D(estimate) D(telemetry) D(transfer_backend) D(view_local) D(view_remote)   \
    D(view_release) D(notify) D(inbox_open) D(inbox_close) D(inbox_drain)        \
    D(inbox_clear)
#define DRIVER_ENTRY(name) {"nixlgo_" #name, drive_##name},
static const struct {
    const char *name;
    int (*drive)(void);
} drivers[] = {DRIVERS(DRIVER_ENTRY)};

/* run drives a function once, with the failing call, and prints what is wrong. It returns what the function answered. */
static int faults;
static int run(const char *name, int (*drive)(void), long at) {
    int before[KIND_COUNT];
    memcpy(before, living, sizeof before);
    calls = 0, failing = at, failed_call = NULL;
    int s = drive();
    calm();
    for (int kind = 0; kind < KIND_COUNT; kind++) {
        if (living[kind] == before[kind])
            continue;
        printf("FAULT %s leaves %d %s when %s fails\n", name, living[kind] - before[kind], kind_names[kind],
               failed_call ? failed_call : "nothing");
        living[kind] = before[kind];
        faults++;
    }
    return s;
}

static void fault(const char *name, int s) {
    printf("FAULT %s answers %d when %s fails\n", name, s, failed_call ? failed_call : "nothing");
    faults++;
}

static void each_failure(const char *name, int (*drive)(void)) {
    for (long at = 1;; at++) {
        int s = run(name, drive, at);
        if (!failed_call) {
            if (s)
                fault(name, s);
            printf("%s %ld\n", name, at - 1);
            return;
        }
        int want = expected();
        if (!strcmp(failed_call, "nixl_capi_notif_map_get_notifs_size"))
            want = 0; /* the messages of one sender are out of reach: the others count */
        if (s != want)
            fault(name, s);
    }
}

static void each_lack(const char *name, int (*drive)(void)) {
    for (int i = REQUIRED_COUNT; i < COUNT; i++) {
        void *was = *slot(&api, i);
        if (!was || !strcmp(functions[i].name, "nixl_capi_mem_free"))
            continue;
        *slot(&api, i) = NULL;
        int s = run(name, drive, 0);
        if (s && s != NIXLGO_LACKS - i)
            fault(name, s);
        *slot(&api, i) = was;
    }
}

int main(void) {
    char message[256];
    setvbuf(stdout, NULL, _IOLBF, 0); /* the leak sanitizer ends the process before a flush */
    if (nixlgo_load(NULL, message, sizeof message) != NIXLGO_LOADED)
        die("not loaded: %s\n", message);
    agent = (uintptr_t)make(agent_kind);
    backend = (uintptr_t)make(backend_kind);
    local = (uintptr_t)make(prepared_kind);
    remote = (uintptr_t)make(prepared_kind);
    request = (uintptr_t)make(request_kind);
    for (size_t i = 0; i < sizeof drivers / sizeof *drivers; i++) {
        failure = NX_BACKEND;
        each_failure(drivers[i].name, drivers[i].drive);
        failure = NX_EXCEPTION;
        run(drivers[i].name, drivers[i].drive, 1);
        each_lack(drivers[i].name, drivers[i].drive);
    }
    for (uint64_t *h = (uint64_t[]){agent, backend, local, remote, request, 0}; *h; h++)
        free((void *)(uintptr_t)*h);
    return faults != 0;
}
