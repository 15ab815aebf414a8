/*
 * The calls that cross from Go: each does the work of several C API calls on
 * whole arrays. Handles cross as integers. A result below NIXLGO_LACKS names a
 * function that the loaded library does not have. The calls of every READ return
 * nothing and write their result instead, which spares cgo two calls.
 */
#ifndef NIXLGO_SHIM_H
#define NIXLGO_SHIM_H

#include <stddef.h>
#include <stdint.h>

#define NIXLGO_NO_MEMORY (-100) /* malloc failed on our side; nothing was lost */
#define NIXLGO_GARBLED (-101)   /* the library contradicted itself */
#define NIXLGO_INDEX (-102)     /* an index names no descriptor; nothing was made */
#define NIXLGO_LACKS (-1000)    /* -1000 - index of the function */

/* Results of nixlgo_load. */
enum { NIXLGO_LOADED = 0, NIXLGO_NOT_OPENED, NIXLGO_INCOMPLETE, NIXLGO_STUB };

typedef struct {
    uint64_t addr, len, dev;
} nixlgo_desc;

typedef struct {
    uint64_t req;
    int32_t status;
    int32_t made; /* nixlgo_make: the status of making it */
} nixlgo_poll_item;

/* A growing buffer of ours. Fields are packed as uint32 length and bytes. */
typedef struct {
    uint8_t *data;
    size_t len, cap;
} nixlgo_bytes;

/* One notification, in memory of the library's until nixlgo_inbox_clear. */
typedef struct {
    const char *from;
    const void *data;
    uint64_t from_len, len;
} nixlgo_message;

typedef struct {
    nixlgo_message *messages;
    uint64_t count, cap, bytes; /* bytes: of all payloads */
    uint64_t map;
    int status; /* of the last drain */
} nixlgo_inbox;

typedef struct {
    uint64_t mem;
    nixlgo_desc desc;
    const void *meta;
    size_t meta_len;
    const uint64_t *backends;
    size_t backend_count;
} nixlgo_region;

/* Optional arguments of a transfer or a view. */
typedef struct {
    const void *message;
    size_t message_len;
    const void *custom;
    size_t custom_len;
    uint64_t backend;
    int notify, skip_merge;
} nixlgo_options;

typedef struct {
    uint64_t start_us, post_us, transfer_us, bytes, descs;
} nixlgo_times;

/* What the CUDA driver says about an address; call is the one that failed. */
typedef struct {
    const char *call;
    int device, ordinal;
    uint64_t start, size;
} nixlgo_pointer;
#define NIXLGO_NO_DRIVER (-1)
int nixlgo_device(uint64_t addr, nixlgo_pointer *out);

int nixlgo_load(const char *path, char *message, size_t size);
const char *nixlgo_function_name(int index);
int nixlgo_function_missing(int index);
void nixlgo_free(void *returned);
int nixlgo_map(size_t size, void **memory);
int nixlgo_unmap(void *memory, size_t size);
void nixlgo_bytes_free(nixlgo_bytes *b);

int nixlgo_agent_create(const char *name, int listen, int port, uint64_t progress_us, uint64_t listen_us,
                        int telemetry, uint64_t *agent);
int nixlgo_agent_destroy(uint64_t agent);
int nixlgo_plugins(uint64_t agent, nixlgo_bytes *names);
int nixlgo_plugin_params(uint64_t agent, const char *plugin, nixlgo_bytes *params, uint64_t *mems);
int nixlgo_backend_create(uint64_t agent, const char *plugin, const char *pairs, size_t pair_count,
                          uint64_t *backend);
int nixlgo_backend_params(uint64_t agent, uint64_t backend, nixlgo_bytes *params, uint64_t *mems);
int nixlgo_backend_destroy(uint64_t backend);

int nixlgo_register(uint64_t agent, const nixlgo_region *r);
int nixlgo_deregister(uint64_t agent, const nixlgo_region *r);

int nixlgo_local_md(uint64_t agent, void **data, size_t *len);
int nixlgo_load_md(uint64_t agent, const void *blob, size_t len, char **name);
int nixlgo_invalidate_md(uint64_t agent, const char *remote);
int nixlgo_check_md(uint64_t agent, const char *remote, uint32_t mem, const nixlgo_desc *descs, size_t n);
int nixlgo_connect(uint64_t agent, const char *remote, uint64_t backend);
int nixlgo_partial_md(uint64_t agent, uint32_t mem, const nixlgo_desc *descs, size_t n, void **data, size_t *len);
int nixlgo_send_md(uint64_t agent, const char *ip, uint16_t port);
int nixlgo_send_partial_md(uint64_t agent, uint32_t mem, const nixlgo_desc *descs, size_t n, const char *ip,
                           uint16_t port);
int nixlgo_fetch_md(uint64_t agent, const char *remote, const char *ip, uint16_t port);
int nixlgo_invalidate_local_md(uint64_t agent, const char *ip, uint16_t port);
int nixlgo_query(uint64_t agent, uint64_t backend, uint32_t mem, const nixlgo_desc *descs, size_t n,
                 const uint8_t *metas, nixlgo_bytes *answers);

int nixlgo_prepare(uint64_t agent, const char *owner, uint32_t mem, const nixlgo_desc *descs, size_t n,
                   uint64_t *list);
int nixlgo_list_release(uint64_t agent, uint64_t list);

void nixlgo_make(uint64_t agent, uint32_t op, uint64_t local, const int32_t *li, int32_t local_len,
                 uint64_t remote, const int32_t *ri, int32_t remote_len, size_t n,
                 const nixlgo_options *options, int post, nixlgo_poll_item *out);
int nixlgo_create(uint64_t agent, uint32_t op, uint32_t local_mem, const nixlgo_desc *local, uint32_t remote_mem,
                  const nixlgo_desc *remote, size_t n, const char *owner, const nixlgo_options *options,
                  uint64_t *req);
void nixlgo_post(uint64_t agent, nixlgo_poll_item *item);
void nixlgo_poll(uint64_t agent, nixlgo_poll_item *items, size_t n);
int nixlgo_release(uint64_t agent, uint64_t req);
int nixlgo_estimate(uint64_t agent, uint64_t req, int64_t *duration_us, int64_t *margin_us);

int nixlgo_telemetry(uint64_t agent, uint64_t req, nixlgo_times *out);
int nixlgo_transfer_backend(uint64_t agent, uint64_t req, nixlgo_bytes *params, uint64_t *mems);

int nixlgo_view_local(uint64_t agent, uint32_t mem, const nixlgo_desc *descs, size_t n,
                      const nixlgo_options *options, uint64_t *view);
int nixlgo_view_remote(uint64_t agent, uint32_t mem, const nixlgo_desc *descs, size_t n, const char *owners,
                       const nixlgo_options *options, uint64_t *view);
int nixlgo_view_release(uint64_t agent, uint64_t view);

int nixlgo_notify(uint64_t agent, const char *remote, const void *message, size_t len, uint64_t backend);
nixlgo_inbox *nixlgo_inbox_open(void);
void nixlgo_inbox_drain(uint64_t agent, uint64_t inbox, uint64_t backend);
int nixlgo_inbox_clear(nixlgo_inbox *box);
void nixlgo_inbox_close(nixlgo_inbox *box);

#endif
