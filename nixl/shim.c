//go:build cgo

#define _GNU_SOURCE
#include "shim.h"
#include "capi.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* The function table, filled once by nixlgo_load under a lock held in Go. */
#define MEMBER(result, name, params) result(*name) params;
typedef struct {
    NX_FUNCTIONS(MEMBER) NX_PLANNED(MEMBER)
} function_table;
static function_table api;

#define INDEX(result, name, params) INDEX_##name,
enum { NX_REQUIRED(INDEX) REQUIRED_COUNT, LAST_REQUIRED = REQUIRED_COUNT - 1, NX_OPTIONAL(INDEX) NX_PLANNED(INDEX) COUNT };

#define ENTRY(result, name, params) {"nixl_capi_" #name, offsetof(function_table, name)},
static const struct {
    const char *name;
    size_t offset;
} functions[] = {NX_FUNCTIONS(ENTRY) NX_PLANNED(ENTRY)};

#define NEED(name)                                                                                 \
    if (!api.name)                                                                                 \
        return NIXLGO_LACKS - INDEX_##name;

static void **slot(function_table *t, int i) {
    return (void **)((char *)t + functions[i].offset);
}

int nixlgo_load(const char *path, char *message, size_t size) {
    /* dlopen and dlerror are in one C call: dlerror's text belongs to the thread. */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *text = dlerror();
        snprintf(message, size, "%s", text ? text : "dlopen failed");
        return NIXLGO_NOT_OPENED;
    }
    function_table found;
    size_t used = 0;
    message[0] = 0;
    for (int i = 0; i < COUNT; i++) {
        *slot(&found, i) = dlsym(library, functions[i].name);
        if (!*slot(&found, i) && i < REQUIRED_COUNT && used < size)
            used += (size_t)snprintf(message + used, size - used, "%s%s", used ? ", " : "", functions[i].name);
    }
    if (used) {
        dlclose(library);
        return NIXLGO_INCOMPLETE;
    }
    if (found.is_stub()) {
        dlclose(library);
        return NIXLGO_STUB;
    }
    api = found;
    return NIXLGO_LOADED;
}

const char *nixlgo_function_name(int i) {
    return i >= 0 && i < COUNT ? functions[i].name : NULL;
}

int nixlgo_function_missing(int i) {
    return !*slot(&api, i);
}

void nixlgo_free(void *returned) {
    if (api.mem_free)
        api.mem_free(returned);
    else
        free(returned);
}

/* Through libc, whose calls UCX hooks: its registration cache would not see Go's own munmap. */
int nixlgo_map(size_t size, void **memory) {
    *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return *memory == MAP_FAILED ? errno : 0;
}

int nixlgo_unmap(void *memory, size_t size) {
    return munmap(memory, size) ? errno : 0;
}

void nixlgo_bytes_free(nixlgo_bytes *b) {
    free(b->data);
    *b = (nixlgo_bytes){0};
}

static int pack(nixlgo_bytes *b, const void *data, size_t len) {
    if (len > UINT32_MAX)
        return NIXLGO_GARBLED;
    size_t need = b->len + sizeof(uint32_t) + len;
    if (need > b->cap) {
        size_t cap = need < 2 * b->cap ? 2 * b->cap : need;
        uint8_t *grown = realloc(b->data, cap);
        if (!grown)
            return NIXLGO_NO_MEMORY;
        b->data = grown;
        b->cap = cap;
    }
    uint32_t n = (uint32_t)len;
    memcpy(b->data + b->len, &n, sizeof n);
    if (len)
        memcpy(b->data + b->len + sizeof n, data, len);
    b->len = need;
    return 0;
}

/* Agents and backends */

int nixlgo_agent_create(const char *name, int listen, int port, uint64_t progress_us, uint64_t listen_us,
                        int telemetry, uint64_t *out) {
    nx_config c = {
        .enable_prog_thread = true, /* without it nothing moves unless both sides poll */
        .enable_listen_thread = listen,
        .listen_port = port,
        .thread_sync = NX_SYNC_RW, /* goroutines move between threads; NONE turns the agent's lock off */
        .num_workers = 1,
        .pthr_delay_us = progress_us,
        .lthr_delay_us = listen_us,
        .capture_telemetry = telemetry,
    };
    nx_agent a = NULL;
    int s = api.create_configured_agent(name, &c, &a);
    *out = (uintptr_t)a;
    return s;
}

int nixlgo_agent_destroy(uint64_t agent) {
    return api.destroy_agent((nx_agent)(uintptr_t)agent);
}

int nixlgo_plugins(uint64_t agent, nixlgo_bytes *names) {
    nx_string_list list = NULL;
    size_t n = 0;
    int s = api.get_available_plugins((nx_agent)(uintptr_t)agent, &list);
    if (s)
        return s;
    s = api.string_list_size(list, &n);
    for (size_t i = 0; !s && i < n; i++) {
        const char *name = NULL;
        s = api.string_list_get(list, i, &name);
        if (!s)
            s = pack(names, name, strlen(name));
    }
    api.destroy_string_list(list);
    return s;
}

/* Packs key, value, key, value, … */
static int pack_params(nx_params params, nixlgo_bytes *out) {
    bool empty = true, more;
    nx_param_iter it = NULL;
    int s = api.params_is_empty(params, &empty);
    if (!s && !empty)
        s = api.params_create_iterator(params, &it);
    if (it) {
        do {
            const char *key = NULL, *value = NULL;
            more = false;
            s = api.params_iterator_next(it, &key, &value, &more);
            if (!s && !key)
                break;
            if (!s)
                s = pack(out, key, strlen(key));
            if (!s)
                s = pack(out, value, strlen(value));
        } while (!s && more);
        api.params_destroy_iterator(it);
    }
    return s;
}

/* Packs the parameters, and the memory types as a bit set; ends both lists. */
static int unpack_params(nx_params params, nx_mem_list list, nixlgo_bytes *out, uint64_t *mems) {
    size_t n = 0;
    int s = pack_params(params, out);
    *mems = 0;
    if (!s)
        s = api.mem_list_size(list, &n);
    for (size_t i = 0; !s && i < n; i++) {
        nx_mem m = NX_MEM_UNKNOWN;
        s = api.mem_list_get(list, i, &m);
        if (!s && m < 64)
            *mems |= (uint64_t)1 << m;
    }
    api.destroy_params(params);
    api.destroy_mem_list(list);
    return s;
}

int nixlgo_plugin_params(uint64_t agent, const char *plugin, nixlgo_bytes *params, uint64_t *mems) {
    nx_mem_list list = NULL;
    nx_params p = NULL;
    int s = api.get_plugin_params((nx_agent)(uintptr_t)agent, plugin, &list, &p);
    return s ? s : unpack_params(p, list, params, mems);
}

int nixlgo_backend_params(uint64_t agent, uint64_t backend, nixlgo_bytes *params, uint64_t *mems) {
    nx_mem_list list = NULL;
    nx_params p = NULL;
    int s = api.get_backend_params((nx_agent)(uintptr_t)agent, (nx_backend)(uintptr_t)backend, &list, &p);
    return s ? s : unpack_params(p, list, params, mems);
}

/* pairs: key NUL value NUL, pair_count times. */
int nixlgo_backend_create(uint64_t agent, const char *plugin, const char *pairs, size_t pair_count,
                          uint64_t *out) {
    nx_params p = NULL;
    nx_backend b = NULL;
    int s = api.create_params(&p);
    if (s)
        return s;
    for (size_t i = 0; !s && i < pair_count; i++) {
        const char *value = pairs + strlen(pairs) + 1;
        s = api.params_add(p, pairs, value);
        pairs = value + strlen(value) + 1;
    }
    if (!s)
        s = api.create_backend((nx_agent)(uintptr_t)agent, plugin, p, &b);
    api.destroy_params(p);
    *out = (uintptr_t)b;
    return s;
}

int nixlgo_backend_destroy(uint64_t backend) {
    return api.destroy_backend((nx_backend)(uintptr_t)backend);
}

/* Optional arguments that name a backend; none for 0. */
static int backend_args(uint64_t backend, nx_opt_args *out) {
    if (!backend)
        return 0;
    int s = api.create_opt_args(out);
    return s ? s : api.opt_args_add_backend(*out, (nx_backend)(uintptr_t)backend);
}

static void end_args(nx_opt_args args) {
    if (args)
        api.destroy_opt_args(args);
}

/* Registration */

static int with_region(uint64_t agent, const nixlgo_region *r,
                       nx_status (*call)(nx_agent, nx_reg_dlist, nx_opt_args)) {
    nx_reg_dlist list = NULL;
    nx_opt_args args = NULL;
    int s = api.create_reg_dlist((nx_mem)r->mem, &list);
    if (s)
        return s;
    s = api.reg_dlist_add_desc(list, (uintptr_t)r->desc.addr, r->desc.len, r->desc.dev, r->meta, r->meta_len);
    if (!s && r->backend_count)
        s = api.create_opt_args(&args);
    for (size_t i = 0; !s && i < r->backend_count; i++)
        s = api.opt_args_add_backend(args, (nx_backend)(uintptr_t)r->backends[i]);
    if (!s)
        s = call((nx_agent)(uintptr_t)agent, list, args);
    end_args(args);
    api.destroy_reg_dlist(list);
    return s;
}

int nixlgo_register(uint64_t agent, const nixlgo_region *r) {
    return with_region(agent, r, api.register_mem);
}

int nixlgo_deregister(uint64_t agent, const nixlgo_region *r) {
    return with_region(agent, r, api.deregister_mem);
}

/* items are meta_len and bytes (see pack) of each descriptor, or NULL for none. */
static int build_regs(uint32_t mem, const nixlgo_desc *d, size_t n, const uint8_t *metas, nx_reg_dlist *out) {
    int s = api.create_reg_dlist(mem, out);
    for (size_t i = 0; !s && i < n; i++) {
        uint32_t len = 0;
        if (metas) {
            memcpy(&len, metas, sizeof len);
            metas += sizeof len;
        }
        s = api.reg_dlist_add_desc(*out, (uintptr_t)d[i].addr, d[i].len, d[i].dev, len ? metas : NULL, len);
        if (metas)
            metas += len;
    }
    if (s && *out) {
        api.destroy_reg_dlist(*out);
        *out = NULL;
    }
    return s;
}

/* Packs for each descriptor "y" and its parameters, or "n", and an empty field. */
int nixlgo_query(uint64_t agent, uint64_t backend, uint32_t mem, const nixlgo_desc *descs, size_t n,
                 const uint8_t *metas, nixlgo_bytes *out) {
    nx_reg_dlist list = NULL;
    nx_query_list answers = NULL;
    nx_opt_args args = NULL;
    size_t count = 0;
    NEED(query_mem)
    NEED(create_query_resp_list)
    NEED(destroy_query_resp_list)
    NEED(query_resp_list_size)
    NEED(query_resp_list_has_value)
    NEED(query_resp_list_get_params)
    int s = build_regs(mem, descs, n, metas, &list);
    if (!s)
        s = api.create_query_resp_list(&answers);
    if (!s)
        s = backend_args(backend, &args);
    if (!s)
        s = api.query_mem((nx_agent)(uintptr_t)agent, list, answers, args);
    if (!s)
        s = api.query_resp_list_size(answers, &count);
    for (size_t i = 0; !s && i < count; i++) {
        bool known = false;
        nx_params params = NULL;
        s = api.query_resp_list_has_value(answers, i, &known);
        if (!s)
            s = pack(out, known ? "y" : "n", 1);
        if (!s && known)
            s = api.query_resp_list_get_params(answers, i, &params);
        if (params) {
            s = pack_params(params, out);
            api.destroy_params(params);
        }
        if (!s)
            s = pack(out, "", 0);
    }
    end_args(args);
    if (answers)
        api.destroy_query_resp_list(answers);
    if (list)
        api.destroy_reg_dlist(list);
    return s;
}

/* Metadata */

int nixlgo_local_md(uint64_t agent, void **data, size_t *len) {
    return api.get_local_md((nx_agent)(uintptr_t)agent, data, len);
}

int nixlgo_load_md(uint64_t agent, const void *blob, size_t len, char **name) {
    return api.load_remote_md((nx_agent)(uintptr_t)agent, blob, len, name);
}

int nixlgo_invalidate_md(uint64_t agent, const char *remote) {
    return api.invalidate_remote_md((nx_agent)(uintptr_t)agent, remote);
}

static int build(uint32_t mem, const nixlgo_desc *d, size_t n, nx_xfer_dlist *out) {
    int s = api.create_xfer_dlist(mem, out);
    if (!s && n > 1 && api.xfer_dlist_resize && api.xfer_dlist_clear) {
        /* Room for all at once, or the list grows by doubling: 8 instead of 19 ns for each of 100,000. */
        s = api.xfer_dlist_resize(*out, n);
        if (!s)
            s = api.xfer_dlist_clear(*out);
    }
    for (size_t i = 0; !s && i < n; i++)
        s = api.xfer_dlist_add_desc(*out, (uintptr_t)d[i].addr, d[i].len, d[i].dev);
    if (s && *out) {
        api.destroy_xfer_dlist(*out);
        *out = NULL;
    }
    return s;
}

int nixlgo_check_md(uint64_t agent, const char *remote, uint32_t mem, const nixlgo_desc *descs, size_t n) {
    nx_xfer_dlist list = NULL;
    if (!n)
        return api.check_remote_md((nx_agent)(uintptr_t)agent, remote, NULL);
    int s = build(mem, descs, n, &list);
    if (s)
        return s;
    s = api.check_remote_md((nx_agent)(uintptr_t)agent, remote, list);
    api.destroy_xfer_dlist(list);
    return s;
}

int nixlgo_connect(uint64_t agent, const char *remote, uint64_t backend) {
    nx_opt_args args = NULL;
    int s = backend_args(backend, &args);
    if (!s)
        s = api.agent_make_connection((nx_agent)(uintptr_t)agent, remote, args);
    end_args(args);
    return s;
}

int nixlgo_partial_md(uint64_t agent, uint32_t mem, const nixlgo_desc *descs, size_t n, void **data, size_t *len) {
    nx_reg_dlist list = NULL;
    NEED(get_local_partial_md)
    int s = build_regs(mem, descs, n, NULL, &list);
    if (s)
        return s;
    s = api.get_local_partial_md((nx_agent)(uintptr_t)agent, list, data, len, NULL);
    api.destroy_reg_dlist(list);
    return s;
}

/* Where metadata goes: a listener, or the central store for an empty address. */
static int address_args(const char *ip, uint16_t port, nx_opt_args *out) {
    if (!*ip)
        return 0;
    NEED(opt_args_set_ip_addr)
    NEED(opt_args_set_port)
    int s = api.create_opt_args(out);
    if (!s)
        s = api.opt_args_set_ip_addr(*out, ip);
    return s ? s : api.opt_args_set_port(*out, port);
}

int nixlgo_send_md(uint64_t agent, const char *ip, uint16_t port) {
    nx_opt_args args = NULL;
    NEED(send_local_md)
    int s = address_args(ip, port, &args);
    if (!s)
        s = api.send_local_md((nx_agent)(uintptr_t)agent, args);
    end_args(args);
    return s;
}

int nixlgo_send_partial_md(uint64_t agent, uint32_t mem, const nixlgo_desc *descs, size_t n, const char *ip,
                           uint16_t port) {
    nx_reg_dlist list = NULL;
    nx_opt_args args = NULL;
    NEED(send_local_partial_md)
    int s = address_args(ip, port, &args);
    if (!s)
        s = build_regs(mem, descs, n, NULL, &list);
    if (!s)
        s = api.send_local_partial_md((nx_agent)(uintptr_t)agent, list, args);
    if (list)
        api.destroy_reg_dlist(list);
    end_args(args);
    return s;
}

int nixlgo_fetch_md(uint64_t agent, const char *remote, const char *ip, uint16_t port) {
    nx_opt_args args = NULL;
    NEED(fetch_remote_md)
    int s = address_args(ip, port, &args);
    if (!s)
        s = api.fetch_remote_md((nx_agent)(uintptr_t)agent, remote, args);
    end_args(args);
    return s;
}

int nixlgo_invalidate_local_md(uint64_t agent, const char *ip, uint16_t port) {
    nx_opt_args args = NULL;
    NEED(invalidate_local_md)
    int s = address_args(ip, port, &args);
    if (!s)
        s = api.invalidate_local_md((nx_agent)(uintptr_t)agent, args);
    end_args(args);
    return s;
}

/* Prepared lists and transfers */

int nixlgo_prepare(uint64_t agent, const char *owner, uint32_t mem, const nixlgo_desc *descs, size_t n,
                   uint64_t *out) {
    nx_xfer_dlist list = NULL;
    nx_prepped h = NULL;
    int s = build(mem, descs, n, &list);
    if (s)
        return s;
    s = api.prep_xfer_dlist((nx_agent)(uintptr_t)agent, owner, list, &h, NULL);
    api.destroy_xfer_dlist(list);
    *out = (uintptr_t)h;
    return s;
}

static int post_one(uint64_t agent, nx_req req) {
    /* No optional arguments: any would drop the notification that was set at creation. */
    return api.post_xfer_req((nx_agent)(uintptr_t)agent, req, NULL);
}

int nixlgo_list_release(uint64_t agent, uint64_t list) {
    return api.release_xfer_dlist_handle((nx_agent)(uintptr_t)agent, (nx_prepped)(uintptr_t)list);
}

/* None for NULL. */
static int transfer_args(const nixlgo_options *o, nx_opt_args *out) {
    if (!o)
        return 0;
    if (o->custom_len) {
        NEED(opt_args_set_custom_param)
    }
    int s = api.create_opt_args(out);
    if (!s && o->notify) { /* the message first: the flag decides whether an empty one is sent */
        s = api.opt_args_set_notif_msg(*out, o->message, o->message_len);
        if (!s)
            s = api.opt_args_set_has_notif(*out, true);
    }
    if (!s && o->skip_merge)
        s = api.opt_args_set_skip_desc_merge(*out, true);
    if (!s && o->backend)
        s = api.opt_args_add_backend(*out, (nx_backend)(uintptr_t)o->backend);
    if (!s && o->custom_len)
        s = api.opt_args_set_custom_param(*out, o->custom, o->custom_len);
    return s;
}

/* Whether all indices are in 0 … len-1. One sign bit for all, as compilers turn that into vector code. */
static bool within(const int32_t *indices, size_t n, int32_t len) {
    uint32_t bad = 0;
    for (size_t k = 0; k < n; k++)
        bad |= (uint32_t)indices[k] | ((uint32_t)len - 1 - (uint32_t)indices[k]);
    return (int32_t)bad >= 0;
}

/* Makes a request and, with post, posts it: then out->status is what the post answered. */
void nixlgo_make(uint64_t agent, uint32_t op, uint64_t local, const int32_t *li, int32_t local_len,
                 uint64_t remote, const int32_t *ri, int32_t remote_len, size_t n,
                 const nixlgo_options *options, int post, nixlgo_poll_item *out) {
    nx_opt_args args = NULL;
    nx_req req = NULL;
    int s = NIXLGO_INDEX;
    if (within(li, n, local_len) && within(ri, n, remote_len))
        s = transfer_args(options, &args);
    if (!s)
        s = api.make_xfer_req((nx_agent)(uintptr_t)agent, op, (nx_prepped)(uintptr_t)local, li, n,
                              (nx_prepped)(uintptr_t)remote, ri, n, &req, args);
    end_args(args);
    out->req = (uintptr_t)req;
    out->made = s;
    if (!s && post)
        out->status = post_one(agent, req);
}

int nixlgo_create(uint64_t agent, uint32_t op, uint32_t local_mem, const nixlgo_desc *local, uint32_t remote_mem,
                  const nixlgo_desc *remote, size_t n, const char *owner, const nixlgo_options *options,
                  uint64_t *out) {
    nx_opt_args args = NULL;
    nx_xfer_dlist ours = NULL, theirs = NULL;
    nx_req req = NULL;
    NEED(create_xfer_req)
    int s = transfer_args(options, &args);
    if (!s)
        s = build(local_mem, local, n, &ours);
    if (!s)
        s = build(remote_mem, remote, n, &theirs);
    if (!s)
        s = api.create_xfer_req((nx_agent)(uintptr_t)agent, op, ours, theirs, owner, &req, args);
    if (ours)
        api.destroy_xfer_dlist(ours);
    if (theirs)
        api.destroy_xfer_dlist(theirs);
    end_args(args);
    *out = (uintptr_t)req;
    return s;
}

void nixlgo_post(uint64_t agent, nixlgo_poll_item *item) {
    item->status = post_one(agent, (nx_req)(uintptr_t)item->req);
}

void nixlgo_poll(uint64_t agent, nixlgo_poll_item *items, size_t n) {
    for (size_t i = 0; i < n; i++)
        items[i].status = api.get_xfer_status((nx_agent)(uintptr_t)agent, (nx_req)(uintptr_t)items[i].req);
}

int nixlgo_release(uint64_t agent, uint64_t req) {
    int s = api.release_xfer_req((nx_agent)(uintptr_t)agent, (nx_req)(uintptr_t)req);
    return s ? s : api.destroy_xfer_req((nx_req)(uintptr_t)req);
}

int nixlgo_estimate(uint64_t agent, uint64_t req, int64_t *duration_us, int64_t *margin_us) {
    nx_cost method;
    NEED(estimate_xfer_cost)
    return api.estimate_xfer_cost((nx_agent)(uintptr_t)agent, (nx_req)(uintptr_t)req, NULL, duration_us, margin_us,
                                  &method);
}

int nixlgo_telemetry(uint64_t agent, uint64_t req, nixlgo_times *out) {
    nx_telemetry t = {0};
    NEED(get_xfer_telemetry)
    int s = api.get_xfer_telemetry((nx_agent)(uintptr_t)agent, (nx_req)(uintptr_t)req, &t);
    *out = (nixlgo_times){t.start_time_us, t.post_duration_us, t.xfer_duration_us, t.total_bytes, t.desc_count};
    return s;
}

/* Tells the backend by its parameters and memory types: its handle is a new shell, equal to no other. */
int nixlgo_transfer_backend(uint64_t agent, uint64_t req, nixlgo_bytes *params, uint64_t *mems) {
    nx_backend b = NULL;
    NEED(query_xfer_backend)
    int s = api.query_xfer_backend((nx_agent)(uintptr_t)agent, (nx_req)(uintptr_t)req, &b);
    if (s)
        return s;
    s = nixlgo_backend_params(agent, (uintptr_t)b, params, mems);
    api.destroy_backend(b);
    return s;
}

/* Memory views */

static int view_args(const nixlgo_options *o, nx_opt_args *args) {
    NEED(release_mem_view)
    return transfer_args(o, args);
}

int nixlgo_view_local(uint64_t agent, uint32_t mem, const nixlgo_desc *descs, size_t n,
                      const nixlgo_options *options, uint64_t *out) {
    nx_xfer_dlist list = NULL;
    nx_opt_args args = NULL;
    nx_mem_view view = NULL;
    NEED(prep_mem_view_local)
    int s = view_args(options, &args);
    if (!s)
        s = build(mem, descs, n, &list);
    if (!s)
        s = api.prep_mem_view_local((nx_agent)(uintptr_t)agent, list, &view, args);
    if (list)
        api.destroy_xfer_dlist(list);
    end_args(args);
    *out = (uintptr_t)view;
    return s;
}

/* owners: a name and NUL for each descriptor; an empty name is a placeholder. */
int nixlgo_view_remote(uint64_t agent, uint32_t mem, const nixlgo_desc *descs, size_t n, const char *owners,
                       const nixlgo_options *options, uint64_t *out) {
    nx_remote_dlist list = NULL;
    nx_opt_args args = NULL;
    nx_mem_view view = NULL;
    NEED(prep_mem_view_remote)
    NEED(create_remote_dlist)
    NEED(destroy_remote_dlist)
    NEED(remote_dlist_add_desc)
    int s = view_args(options, &args);
    if (!s)
        s = api.create_remote_dlist(mem, &list);
    for (size_t i = 0; !s && i < n; i++) {
        s = api.remote_dlist_add_desc(list, (uintptr_t)descs[i].addr, descs[i].len, descs[i].dev,
                                      *owners ? owners : NULL);
        owners += strlen(owners) + 1;
    }
    if (!s)
        s = api.prep_mem_view_remote((nx_agent)(uintptr_t)agent, list, &view, args);
    if (list)
        api.destroy_remote_dlist(list);
    end_args(args);
    *out = (uintptr_t)view;
    return s;
}

int nixlgo_view_release(uint64_t agent, uint64_t view) {
    NEED(release_mem_view)
    return api.release_mem_view((nx_agent)(uintptr_t)agent, (nx_mem_view)(uintptr_t)view);
}

/* Notifications */

int nixlgo_notify(uint64_t agent, const char *remote, const void *message, size_t len, uint64_t backend) {
    nx_opt_args args = NULL;
    int s = backend_args(backend, &args);
    if (!s) /* the library builds a std::string from the pointer, which must not be NULL */
        s = api.gen_notif((nx_agent)(uintptr_t)agent, remote, message ? message : "", len, args);
    end_args(args);
    return s;
}

nixlgo_inbox *nixlgo_inbox_open(void) {
    nixlgo_inbox *box = calloc(1, sizeof *box);
    nx_notif_map map = NULL;
    if (box && api.create_notif_map(&map)) {
        free(box);
        return NULL;
    }
    if (box)
        box->map = (uintptr_t)map;
    return box;
}

#define KEEP_MESSAGES 32768 /* room for them is kept between drains, 1 MiB */

static int inbox_room(nixlgo_inbox *box, size_t more) {
    if (box->count + more > box->cap) {
        size_t cap = box->count + more + box->cap;
        nixlgo_message *grown = realloc(box->messages, cap * sizeof *grown);
        if (!grown)
            return NIXLGO_NO_MEMORY;
        box->messages = grown;
        box->cap = cap;
    }
    return 0;
}

static int inbox_drain(uint64_t agent, nixlgo_inbox *box, uint64_t backend) {
    nx_notif_map map = (nx_notif_map)(uintptr_t)box->map;
    size_t senders = 0;
    nx_opt_args args = NULL;
    box->count = box->bytes = 0;
    int got = backend_args(backend, &args);
    if (!got)
        got = api.get_notifs((nx_agent)(uintptr_t)agent, map, args);
    end_args(args);
    int s = api.notif_map_size(map, &senders);
    for (size_t i = 0; !s && i < senders; i++) {
        const char *from = NULL;
        size_t n = 0;
        s = api.notif_map_get_agent_at(map, i, &from);
        if (s)
            break;
        if (api.notif_map_get_notifs_size(map, from, &n))
            continue; /* a name with a NUL byte: the C API cannot reach its messages */
        s = inbox_room(box, n);
        for (size_t k = 0, from_len = strlen(from); !s && k < n; k++) {
            const void *data = NULL;
            size_t len = 0;
            s = api.notif_map_get_notif(map, from, k, &data, &len);
            box->messages[box->count++] = (nixlgo_message){from, data, from_len, len};
            box->bytes += len;
        }
    }
    if (s) { /* the map keeps everything: get_notifs appends, and the next drain lists it again */
        box->count = 0;
        return s;
    }
    if (senders && !box->count)
        s = api.notif_map_clear(map);
    return got ? got : s;
}

/* Lists what arrived. The inbox crosses as a number, which spares cgo its check of pointers. */
void nixlgo_inbox_drain(uint64_t agent, uint64_t inbox, uint64_t backend) {
    nixlgo_inbox *box = (nixlgo_inbox *)(uintptr_t)inbox;
    box->status = inbox_drain(agent, box, backend);
}

/* Ends the messages of a drain, and gives back what a burst made large. */
int nixlgo_inbox_clear(nixlgo_inbox *box) {
    box->count = 0;
    if (box->cap > KEEP_MESSAGES) {
        free(box->messages);
        box->messages = NULL;
        box->cap = 0;
    }
    return api.notif_map_clear((nx_notif_map)(uintptr_t)box->map);
}

void nixlgo_inbox_close(nixlgo_inbox *box) {
    api.destroy_notif_map((nx_notif_map)(uintptr_t)box->map);
    free(box->messages);
    free(box);
}
