/*
 * The C side of the comparison: an owner and a reader in one process, driven by
 * lines on stdin. Each answer is one line of nanoseconds, the least of the rounds.
 *
 *   cycle COUNT SIZE ROUNDS   prepare make post complete release, of one READ
 *   repost SIZE ROUNDS        post and complete a READ that was made before
 *   notify BYTES COUNT        send COUNT messages until all have arrived, each
 *   latency BYTES ROUNDS      from the send until it has arrived
 *   drain COUNT               messages that have arrived
 *   empty ROUNDS              a drain of nothing
 */
#define _GNU_SOURCE
#include "capi.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MEMBER(result, name, params) static result(*nx_##name) params;
NX_REQUIRED(MEMBER)

#define REGION ((size_t)64 << 20)
#define MAX_COUNT 100000

static void check(int status, const char *what) {
    if (status < 0) {
        fprintf(stderr, "peer.c: %s: %d\n", what, status);
        _exit(1);
    }
}
#define CHECK(call) check(call, #call)

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static nx_agent owner, reader;
static char *source, *target;
static nx_notif_map inbox;
static int *indices;

static nx_agent new_agent(const char *name, char **memory) {
    nx_config c = {.enable_prog_thread = true, .thread_sync = NX_SYNC_RW, .num_workers = 1, .pthr_delay_us = 1000};
    nx_agent a;
    nx_backend b;
    nx_params p;
    nx_reg_dlist regs;
    CHECK(nx_create_configured_agent(name, &c, &a));
    CHECK(nx_create_params(&p));
    CHECK(nx_params_add(p, "ucx_error_handling_mode", "none")); /* shared memory has no other */
    CHECK(nx_create_backend(a, "UCX", p, &b));
    *memory = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(*memory, REGION, MADV_HUGEPAGE);
    memset(*memory, 1, REGION);
    CHECK(nx_create_reg_dlist(NX_MEM_DRAM, &regs));
    CHECK(nx_reg_dlist_add_desc(regs, (uintptr_t)*memory, REGION, 0, NULL, 0));
    CHECK(nx_register_mem(a, regs, NULL));
    return a;
}

static void introduce(nx_agent from, nx_agent to) {
    void *blob;
    size_t len;
    char *name;
    CHECK(nx_get_local_md(from, &blob, &len));
    CHECK(nx_load_remote_md(to, blob, len, &name));
}

static nx_prepped prepare(const char *name, char *memory, size_t count, size_t size) {
    nx_xfer_dlist list;
    nx_prepped h;
    size_t slots = REGION / size;
    CHECK(nx_create_xfer_dlist(NX_MEM_DRAM, &list));
    for (size_t i = 0; i < count; i++)
        CHECK(nx_xfer_dlist_add_desc(list, (uintptr_t)memory + i % slots * size, size, 0));
    CHECK(nx_prep_xfer_dlist(reader, name, list, &h, NULL));
    nx_destroy_xfer_dlist(list);
    return h;
}

static int complete(nx_req req, int status) {
    while (status == NX_IN_PROG)
        status = nx_get_xfer_status(reader, req);
    return status;
}

static void least(uint64_t *best, uint64_t took) {
    if (took < *best)
        *best = took;
}

static void cycle(size_t count, size_t size, int rounds, int move) {
    uint64_t best[5] = {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX};
    for (size_t i = 0; i < count; i++)
        indices[i] = (int)(i * 7919 % count);
    for (int r = 0; r < rounds; r++) {
        nx_req req;
        uint64_t t[6];
        t[0] = now();
        nx_prepped local = prepare("", target, count, size);
        nx_prepped remote = prepare("owner", source, count, size);
        t[1] = now();
        CHECK(nx_make_xfer_req(reader, NX_OP_READ, local, indices, count, remote, indices, count, &req, NULL));
        t[2] = t[3] = t[4] = now();
        if (move) {
            int status = nx_post_xfer_req(reader, req, NULL);
            CHECK(status);
            t[3] = now();
            CHECK(complete(req, status));
            t[4] = now();
        }
        CHECK(nx_release_xfer_req(reader, req));
        CHECK(nx_destroy_xfer_req(req));
        CHECK(nx_release_xfer_dlist_handle(reader, local));
        CHECK(nx_release_xfer_dlist_handle(reader, remote));
        t[5] = now();
        for (int k = 0; k < 5; k++)
            least(&best[k], t[k + 1] - t[k]);
    }
    printf("%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", best[0], best[1], best[2], best[3], best[4]);
}

static void repost(size_t size, int rounds) {
    int zero = 0;
    uint64_t best = UINT64_MAX;
    nx_req req;
    nx_prepped local = prepare("", target, 1, size), remote = prepare("owner", source, 1, size);
    CHECK(nx_make_xfer_req(reader, NX_OP_READ, local, &zero, 1, remote, &zero, 1, &req, NULL));
    for (int r = 0; r < rounds; r++) {
        uint64_t t = now();
        int status = nx_post_xfer_req(reader, req, NULL);
        CHECK(status);
        CHECK(complete(req, status));
        least(&best, now() - t);
    }
    CHECK(nx_release_xfer_req(reader, req));
    CHECK(nx_destroy_xfer_req(req));
    CHECK(nx_release_xfer_dlist_handle(reader, local));
    CHECK(nx_release_xfer_dlist_handle(reader, remote));
    printf("%" PRIu64 "\n", best);
}

/* Drains the owner into copies, as the others do. */
static size_t drain(void) {
    size_t senders, got = 0;
    CHECK(nx_get_notifs(owner, inbox, NULL));
    CHECK(nx_notif_map_size(inbox, &senders));
    for (size_t i = 0; i < senders; i++) {
        const char *from;
        size_t n;
        CHECK(nx_notif_map_get_agent_at(inbox, i, &from));
        CHECK(nx_notif_map_get_notifs_size(inbox, from, &n));
        for (size_t k = 0; k < n; k++) {
            const void *data;
            size_t len;
            CHECK(nx_notif_map_get_notif(inbox, from, k, &data, &len));
            void *copy = malloc(len ? len : 1);
            memcpy(copy, data, len);
            free(copy);
        }
        got += n;
    }
    if (senders)
        CHECK(nx_notif_map_clear(inbox));
    return got;
}

static void send_all(size_t bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        CHECK(nx_gen_notif(reader, "owner", source, bytes, NULL));
}

static void collect(size_t count) {
    for (size_t got = 0; got < count;)
        got += drain();
}

int main(int argc, char **argv) {
    char line[256];
    if (argc != 2)
        return 2;
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "peer.c: %s\n", dlerror());
        return 1;
    }
#define FIND(result, name, params) *(void **)&nx_##name = dlsym(library, "nixl_capi_" #name);
    NX_REQUIRED(FIND)
    owner = new_agent("owner", &source);
    reader = new_agent("reader", &target);
    introduce(owner, reader);
    introduce(reader, owner);
    CHECK(nx_create_notif_map(&inbox));
    indices = calloc(MAX_COUNT, sizeof *indices);
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("ready");
    while (fgets(line, sizeof line, stdin)) {
        char what[16];
        size_t a = 0, b = 0;
        int rounds = 0, move = 1;
        int n = sscanf(line, "%15s %zu %zu %d %d", what, &a, &b, &rounds, &move);
        if (n < 2)
            return 2;
        uint64_t best = UINT64_MAX, t = now();
        if (!strcmp(what, "cycle")) {
            cycle(a, b, rounds, move);
            continue;
        } else if (!strcmp(what, "repost")) {
            repost(a, (int)b);
            continue;
        } else if (!strcmp(what, "notify")) {
            send_all(a, b);
            collect(b);
            best = (now() - t) / b;
        } else if (!strcmp(what, "latency")) {
            for (size_t i = 0; i < b; i++) {
                t = now();
                send_all(a, 1);
                collect(1);
                least(&best, now() - t);
            }
        } else if (!strcmp(what, "drain")) {
            send_all(64, a);
            usleep(500000); /* all have arrived; the count is checked below */
            t = now();
            size_t got = drain();
            best = now() - t;
            if (got != a) {
                fprintf(stderr, "peer.c: %zu of %zu messages had arrived\n", got, a);
                _exit(1);
            }
        } else if (!strcmp(what, "empty")) {
            t = now();
            for (size_t i = 0; i < a; i++)
                drain();
            printf("%f\n", (double)(now() - t) / (double)a);
            continue;
        } else {
            return 2;
        }
        printf("%" PRIu64 "\n", best);
    }
    _exit(0); /* libc's exit runs a destructor of libnl that crashes */
}
