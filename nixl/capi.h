/*
 * The nixl_capi C API as this package uses it: our own declarations, one line a
 * function, so that building needs no header of NIXL. cgo_test/abi compares each
 * line with the released header.
 *
 * Handles are pointers to NIXL's opaque structs. Enumerations cross as the
 * integers that the C ABI passes.
 */
#ifndef NIXLGO_CAPI_H
#define NIXLGO_CAPI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int nx_status;
typedef unsigned int nx_mem;
typedef unsigned int nx_op;
typedef unsigned int nx_cost;
typedef unsigned int nx_sync;

#define NX_STATUSES(E)                                                                             \
    E(NX_SUCCESS, NIXL_CAPI_SUCCESS, 0)                                                            \
    E(NX_IN_PROG, NIXL_CAPI_IN_PROG, 1)                                                            \
    E(NX_INVALID_PARAM, NIXL_CAPI_ERROR_INVALID_PARAM, -1)                                         \
    E(NX_BACKEND, NIXL_CAPI_ERROR_BACKEND, -2)                                                     \
    E(NX_INVALID_STATE, NIXL_CAPI_ERROR_INVALID_STATE, -3)                                         \
    E(NX_EXCEPTION, NIXL_CAPI_ERROR_EXCEPTION, -4)                                                 \
    E(NX_NO_TELEMETRY, NIXL_CAPI_ERROR_NO_TELEMETRY, -5)                                           \
    E(NX_NOT_FOUND, NIXL_CAPI_ERROR_NOT_FOUND, -6)

#define NX_CONSTANTS(E)                                                                            \
    NX_STATUSES(E)                                                                                 \
    E(NX_MEM_DRAM, NIXL_CAPI_MEM_DRAM, 0)                                                          \
    E(NX_MEM_VRAM, NIXL_CAPI_MEM_VRAM, 1)                                                          \
    E(NX_MEM_BLOCK, NIXL_CAPI_MEM_BLOCK, 2)                                                        \
    E(NX_MEM_OBJECT, NIXL_CAPI_MEM_OBJECT, 3)                                                      \
    E(NX_MEM_FILE, NIXL_CAPI_MEM_FILE, 4)                                                          \
    E(NX_MEM_UNKNOWN, NIXL_CAPI_MEM_UNKNOWN, 5)                                                    \
    E(NX_SYNC_NONE, NIXL_CAPI_THREAD_SYNC_NONE, 0)                                                 \
    E(NX_SYNC_STRICT, NIXL_CAPI_THREAD_SYNC_STRICT, 1)                                             \
    E(NX_SYNC_RW, NIXL_CAPI_THREAD_SYNC_RW, 2)                                                     \
    E(NX_SYNC_DEFAULT, NIXL_CAPI_THREAD_SYNC_DEFAULT, 0)                                           \
    E(NX_OP_READ, NIXL_CAPI_XFER_OP_READ, 0)                                                       \
    E(NX_OP_WRITE, NIXL_CAPI_XFER_OP_WRITE, 1)                                                     \
    E(NX_COST_ANALYTICAL, NIXL_CAPI_COST_ANALYTICAL_BACKEND, 0)

#define NX_ENUMERATOR(ours, theirs, value) ours = value,
enum { NX_CONSTANTS(NX_ENUMERATOR) };
#undef NX_ENUMERATOR

typedef struct nixl_capi_agent_s *nx_agent;
typedef struct nixl_capi_params_s *nx_params;
typedef struct nixl_capi_mem_list_s *nx_mem_list;
typedef struct nixl_capi_string_list_s *nx_string_list;
typedef struct nixl_capi_backend_s *nx_backend;
typedef struct nixl_capi_opt_args_s *nx_opt_args;
typedef struct nixl_capi_param_iter_s *nx_param_iter;
typedef struct nixl_capi_xfer_dlist_s *nx_xfer_dlist;
typedef struct nixl_capi_xfer_dlist_handle_s *nx_prepped;
typedef struct nixl_capi_reg_dlist_s *nx_reg_dlist;
typedef struct nixl_capi_xfer_req_s *nx_req;
typedef struct nixl_capi_notif_map_s *nx_notif_map;
typedef struct nixl_capi_query_resp_list_s *nx_query_list;
typedef struct nixl_capi_remote_dlist_s *nx_remote_dlist;
typedef struct nixl_capi_mem_view_s *nx_mem_view;

typedef struct nx_config {
    bool enable_prog_thread;
    bool enable_listen_thread;
    int listen_port;
    nx_sync thread_sync;
    unsigned int num_workers; /* ignored by the library */
    uint64_t pthr_delay_us;
    uint64_t lthr_delay_us;
    bool capture_telemetry;
} nx_config;

typedef struct nx_telemetry {
    uint64_t start_time_us;
    uint64_t post_duration_us;
    uint64_t xfer_duration_us;
    uint64_t total_bytes;
    uint64_t desc_count;
} nx_telemetry;

/* Functions without which this package cannot work. F(result, name, parameters) */
#define NX_REQUIRED(F)                                                                             \
    F(nx_status, create_configured_agent, (const char *, const nx_config *, nx_agent *))           \
    F(nx_status, destroy_agent, (nx_agent))                                                        \
    F(nx_status, get_local_md, (nx_agent, void **, size_t *))                                      \
    F(nx_status, load_remote_md, (nx_agent, const void *, size_t, char **))                        \
    F(nx_status, invalidate_remote_md, (nx_agent, const char *))                                   \
    F(nx_status, check_remote_md, (nx_agent, const char *, nx_xfer_dlist))                         \
    F(nx_status, get_available_plugins, (nx_agent, nx_string_list *))                              \
    F(nx_status, destroy_string_list, (nx_string_list))                                            \
    F(nx_status, string_list_size, (nx_string_list, size_t *))                                     \
    F(nx_status, string_list_get, (nx_string_list, size_t, const char **))                         \
    F(nx_status, get_plugin_params, (nx_agent, const char *, nx_mem_list *, nx_params *))          \
    F(nx_status, destroy_mem_list, (nx_mem_list))                                                  \
    F(nx_status, destroy_params, (nx_params))                                                      \
    F(nx_status, create_backend, (nx_agent, const char *, nx_params, nx_backend *))                \
    F(nx_status, destroy_backend, (nx_backend))                                                    \
    F(nx_status, get_backend_params, (nx_agent, nx_backend, nx_mem_list *, nx_params *))           \
    F(nx_status, create_opt_args, (nx_opt_args *))                                                 \
    F(nx_status, destroy_opt_args, (nx_opt_args))                                                  \
    F(nx_status, opt_args_add_backend, (nx_opt_args, nx_backend))                                  \
    F(nx_status, opt_args_set_notif_msg, (nx_opt_args, const void *, size_t))                      \
    F(nx_status, opt_args_set_has_notif, (nx_opt_args, bool))                                      \
    F(nx_status, opt_args_set_skip_desc_merge, (nx_opt_args, bool))                                \
    F(nx_status, create_params, (nx_params *))                                                     \
    F(nx_status, params_add, (nx_params, const char *, const char *))                              \
    F(nx_status, params_is_empty, (nx_params, bool *))                                             \
    F(nx_status, params_create_iterator, (nx_params, nx_param_iter *))                             \
    F(nx_status, params_iterator_next, (nx_param_iter, const char **, const char **, bool *))      \
    F(nx_status, params_destroy_iterator, (nx_param_iter))                                         \
    F(nx_status, mem_list_size, (nx_mem_list, size_t *))                                           \
    F(nx_status, mem_list_get, (nx_mem_list, size_t, nx_mem *))                                    \
    F(nx_status, register_mem, (nx_agent, nx_reg_dlist, nx_opt_args))                              \
    F(nx_status, deregister_mem, (nx_agent, nx_reg_dlist, nx_opt_args))                            \
    F(nx_status, agent_make_connection, (nx_agent, const char *, nx_opt_args))                     \
    F(nx_status, prep_xfer_dlist,                                                                  \
      (nx_agent, const char *, nx_xfer_dlist, nx_prepped *, nx_opt_args))                          \
    F(nx_status, release_xfer_dlist_handle, (nx_agent, nx_prepped))                                \
    F(nx_status, make_xfer_req,                                                                    \
      (nx_agent, nx_op, nx_prepped, const int *, size_t, nx_prepped, const int *, size_t,          \
       nx_req *, nx_opt_args))                                                                     \
    F(nx_status, get_notifs, (nx_agent, nx_notif_map, nx_opt_args))                                \
    F(nx_status, create_notif_map, (nx_notif_map *))                                               \
    F(nx_status, destroy_notif_map, (nx_notif_map))                                                \
    F(nx_status, gen_notif, (nx_agent, const char *, const void *, size_t, nx_opt_args))           \
    F(nx_status, post_xfer_req, (nx_agent, nx_req, nx_opt_args))                                   \
    F(nx_status, get_xfer_status, (nx_agent, nx_req))                                              \
    F(nx_status, release_xfer_req, (nx_agent, nx_req))                                             \
    F(nx_status, destroy_xfer_req, (nx_req))                                                       \
    F(nx_status, create_xfer_dlist, (nx_mem, nx_xfer_dlist *))                                     \
    F(nx_status, destroy_xfer_dlist, (nx_xfer_dlist))                                              \
    F(nx_status, xfer_dlist_add_desc, (nx_xfer_dlist, uintptr_t, size_t, uint64_t))                \
    F(nx_status, create_reg_dlist, (nx_mem, nx_reg_dlist *))                                       \
    F(nx_status, destroy_reg_dlist, (nx_reg_dlist))                                                \
    F(nx_status, reg_dlist_add_desc,                                                               \
      (nx_reg_dlist, uintptr_t, size_t, uint64_t, const void *, size_t))                           \
    F(nx_status, notif_map_size, (nx_notif_map, size_t *))                                         \
    F(nx_status, notif_map_get_agent_at, (nx_notif_map, size_t, const char **))                    \
    F(nx_status, notif_map_get_notifs_size, (nx_notif_map, const char *, size_t *))                \
    F(nx_status, notif_map_get_notif,                                                              \
      (nx_notif_map, const char *, size_t, const void **, size_t *))                               \
    F(nx_status, notif_map_clear, (nx_notif_map))                                                  \
    F(bool, is_stub, (void))

/* Functions that a library may lack: the calls that need one answer errors.ErrUnsupported. */
#define NX_OPTIONAL(F)                                                                             \
    F(nx_status, create_agent, (const char *, nx_agent *))                                         \
    F(nx_status, get_local_partial_md, (nx_agent, nx_reg_dlist, void **, size_t *, nx_opt_args))   \
    F(nx_status, invalidate_local_md, (nx_agent, nx_opt_args))                                     \
    F(nx_status, send_local_md, (nx_agent, nx_opt_args))                                           \
    F(nx_status, send_local_partial_md, (nx_agent, nx_reg_dlist, nx_opt_args))                     \
    F(nx_status, fetch_remote_md, (nx_agent, const char *, nx_opt_args))                           \
    F(nx_status, opt_args_get_notif_msg, (nx_opt_args, void **, size_t *))                         \
    F(nx_status, opt_args_set_custom_param, (nx_opt_args, const void *, size_t))                   \
    F(nx_status, opt_args_get_custom_param, (nx_opt_args, void **, size_t *))                      \
    F(nx_status, opt_args_get_has_notif, (nx_opt_args, bool *))                                    \
    F(nx_status, opt_args_get_skip_desc_merge, (nx_opt_args, bool *))                              \
    F(nx_status, opt_args_set_ip_addr, (nx_opt_args, const char *))                                \
    F(nx_status, opt_args_set_port, (nx_opt_args, uint16_t))                                       \
    F(nx_status, mem_list_is_empty, (nx_mem_list, bool *))                                         \
    F(nx_status, mem_type_to_string, (nx_mem, const char **))                                      \
    F(nx_status, create_xfer_req,                                                                  \
      (nx_agent, nx_op, nx_xfer_dlist, nx_xfer_dlist, const char *, nx_req *, nx_opt_args))        \
    F(nx_status, estimate_xfer_cost,                                                               \
      (nx_agent, nx_req, nx_opt_args, int64_t *, int64_t *, nx_cost *))                            \
    F(nx_status, query_xfer_backend, (nx_agent, nx_req, nx_backend *))                             \
    F(nx_status, xfer_dlist_get_type, (nx_xfer_dlist, nx_mem *))                                   \
    F(nx_status, xfer_dlist_desc_count, (nx_xfer_dlist, size_t *))                                 \
    F(nx_status, xfer_dlist_len, (nx_xfer_dlist, size_t *))                                        \
    F(nx_status, xfer_dlist_is_empty, (nx_xfer_dlist, bool *))                                     \
    F(nx_status, xfer_dlist_trim, (nx_xfer_dlist))                                                 \
    F(nx_status, xfer_dlist_rem_desc, (nx_xfer_dlist, int))                                        \
    F(nx_status, xfer_dlist_clear, (nx_xfer_dlist))                                                \
    F(nx_status, xfer_dlist_resize, (nx_xfer_dlist, size_t))                                       \
    F(nx_status, xfer_dlist_print, (nx_xfer_dlist))                                                \
    F(nx_status, reg_dlist_get_type, (nx_reg_dlist, nx_mem *))                                     \
    F(nx_status, reg_dlist_desc_count, (nx_reg_dlist, size_t *))                                   \
    F(nx_status, reg_dlist_is_empty, (nx_reg_dlist, bool *))                                       \
    F(nx_status, reg_dlist_trim, (nx_reg_dlist))                                                   \
    F(nx_status, reg_dlist_rem_desc, (nx_reg_dlist, int))                                          \
    F(nx_status, reg_dlist_clear, (nx_reg_dlist))                                                  \
    F(nx_status, reg_dlist_resize, (nx_reg_dlist, size_t))                                         \
    F(nx_status, reg_dlist_print, (nx_reg_dlist))                                                  \
    F(nx_status, create_query_resp_list, (nx_query_list *))                                        \
    F(nx_status, destroy_query_resp_list, (nx_query_list))                                         \
    F(nx_status, query_resp_list_size, (nx_query_list, size_t *))                                  \
    F(nx_status, query_resp_list_has_value, (nx_query_list, size_t, bool *))                       \
    F(nx_status, query_resp_list_get_params, (nx_query_list, size_t, nx_params *))                 \
    F(nx_status, query_mem, (nx_agent, nx_reg_dlist, nx_query_list, nx_opt_args))                  \
    F(nx_status, prep_mem_view_local, (nx_agent, nx_xfer_dlist, nx_mem_view *, nx_opt_args))       \
    F(nx_status, prep_mem_view_remote, (nx_agent, nx_remote_dlist, nx_mem_view *, nx_opt_args))    \
    F(nx_status, create_remote_dlist, (nx_mem, nx_remote_dlist *))                                 \
    F(nx_status, destroy_remote_dlist, (nx_remote_dlist))                                          \
    F(nx_status, remote_dlist_add_desc,                                                            \
      (nx_remote_dlist, uintptr_t, size_t, uint64_t, const char *))                                \
    F(nx_status, release_mem_view, (nx_agent, nx_mem_view))                                        \
    F(nx_status, get_xfer_telemetry, (nx_agent, nx_req, nx_telemetry *))

/* Planned upstream (NIXL pull request 2180), in no released header: frees what the library returns. */
#define NX_PLANNED(F) F(void, mem_free, (void *))

#define NX_FUNCTIONS(F) NX_REQUIRED(F) NX_OPTIONAL(F)

#endif
