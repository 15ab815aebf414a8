/*
 * The C side of the comparison: an owner and a reader in one process, driven by
 * lines on stdin. Each answer is one line of nanoseconds, the least of the rounds.
 * Arguments: the library, and the processor for the thread that measures.
 *
 *   lists COUNT SIZE ROUNDS   prepare and make, of one READ
 *   cycle COUNT SIZE ROUNDS   post, complete and release, of one READ
 *   start COUNT SIZE ROUNDS   from make to complete, of lists prepared before
 *   build COUNT SIZE ROUNDS   from block numbers to prepared lists; from descriptors to them
 *   repost SIZE ROUNDS        post and complete a READ that was made before
 *   notify BYTES COUNT        send COUNT messages until all have arrived, each
 *   latency BYTES ROUNDS      from the send until it has arrived
 *   drain COUNT               messages that have arrived
 *   empty ROUNDS              a drain of nothing, in batches of 100
 *   nothing ROUNDS            a call of a function that does nothing, in batches of 100
 */
#define _GNU_SOURCE
#include "capi.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <sched.h>
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
static int indices[MAX_COUNT], blocks[MAX_COUNT];

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

typedef struct {
    uint64_t addr, len, dev;
} desc;

typedef struct {
    nx_prepped local, remote;
} lists;

static desc ours[MAX_COUNT], theirs[MAX_COUNT];

static nx_prepped prep(const char *name, nx_xfer_dlist list) {
    nx_prepped h;
    CHECK(nx_prep_xfer_dlist(reader, name, list, &h, NULL));
    nx_destroy_xfer_dlist(list);
    return h;
}

static nx_prepped prepare(const char *name, const desc *d, size_t count) {
    nx_xfer_dlist list;
    CHECK(nx_create_xfer_dlist(NX_MEM_DRAM, &list));
    for (size_t i = 0; i < count; i++)
        CHECK(nx_xfer_dlist_add_desc(list, d[i].addr, d[i].len, d[i].dev));
    return prep(name, list);
}

static lists prepare_both(size_t count) {
    lists l;
    l.local = prepare("", ours, count);
    l.remote = prepare("owner", theirs, count);
    return l;
}

/* Without descriptors in between. */
static nx_prepped build(const char *name, const char *memory, const int *blocks, size_t count, size_t size) {
    nx_xfer_dlist list;
    CHECK(nx_create_xfer_dlist(NX_MEM_DRAM, &list));
    for (size_t i = 0; i < count; i++)
        CHECK(nx_xfer_dlist_add_desc(list, (uintptr_t)memory + (size_t)blocks[i] * size, size, 0));
    return prep(name, list);
}

static lists build_both(const int *blocks, size_t count, size_t size) {
    lists l;
    l.local = build("", target, blocks, count, size);
    l.remote = build("owner", source, blocks, count, size);
    return l;
}

static void release(lists l) {
    CHECK(nx_release_xfer_dlist_handle(reader, l.local));
    CHECK(nx_release_xfer_dlist_handle(reader, l.remote));
}

static void end(nx_req req) {
    CHECK(nx_release_xfer_req(reader, req));
    CHECK(nx_destroy_xfer_req(req));
}

static void fill(size_t count, size_t size) {
    for (size_t i = 0; i < count; i++) {
        blocks[i] = (int)(i % (REGION / size));
        indices[i] = (int)(i * 7919 % count);
        ours[i] = (desc){(uintptr_t)target + (size_t)blocks[i] * size, size, 0};
        theirs[i] = (desc){(uintptr_t)source + (size_t)blocks[i] * size, size, 0};
    }
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

static void lists_only(size_t count, int rounds) {
    uint64_t best[2] = {UINT64_MAX, UINT64_MAX};
    for (int r = 0; r < rounds; r++) {
        nx_req req;
        uint64_t t[3];
        t[0] = now();
        lists l = prepare_both(count);
        t[1] = now();
        CHECK(nx_make_xfer_req(reader, NX_OP_READ, l.local, indices, count, l.remote, indices, count, &req, NULL));
        t[2] = now();
        end(req);
        release(l);
        for (int k = 0; k < 2; k++)
            least(&best[k], t[k + 1] - t[k]);
    }
    printf("%" PRIu64 " %" PRIu64 "\n", best[0], best[1]);
}

static void cycle(size_t count, int rounds) {
    uint64_t best[3] = {UINT64_MAX, UINT64_MAX, UINT64_MAX};
    for (int r = 0; r < rounds; r++) {
        nx_req req;
        uint64_t t[4];
        lists l = prepare_both(count);
        CHECK(nx_make_xfer_req(reader, NX_OP_READ, l.local, indices, count, l.remote, indices, count, &req, NULL));
        t[0] = now();
        int status = nx_post_xfer_req(reader, req, NULL);
        CHECK(status);
        t[1] = now();
        CHECK(complete(req, status));
        t[2] = now();
        end(req);
        release(l);
        t[3] = now();
        for (int k = 0; k < 3; k++)
            least(&best[k], t[k + 1] - t[k]);
    }
    printf("%" PRIu64 " %" PRIu64 " %" PRIu64 "\n", best[0], best[1], best[2]);
}

/* How many short READs are timed at once: reading the clock takes long beside one. */
static size_t batch(size_t bytes) {
    return bytes < 65536 ? 65536 / bytes : 1;
}

static double start(size_t count, size_t size, int rounds) {
    uint64_t best = UINT64_MAX;
    lists l = build_both(blocks, count, size);
    size_t n = batch(count * size);
    nx_req reqs[n];
    for (int r = 0; r < rounds; r++) {
        uint64_t t = now();
        for (size_t i = 0; i < n; i++) {
            CHECK(nx_make_xfer_req(reader, NX_OP_READ, l.local, indices, count, l.remote, indices, count, &reqs[i], NULL));
            int status = nx_post_xfer_req(reader, reqs[i], NULL);
            CHECK(status);
            CHECK(complete(reqs[i], status));
        }
        least(&best, now() - t);
        for (size_t i = 0; i < n; i++)
            end(reqs[i]);
    }
    release(l);
    return (double)best / (double)n;
}

static void build_only(size_t count, size_t size, int rounds) {
    uint64_t both = UINT64_MAX, second = UINT64_MAX;
    for (int r = 0; r < rounds; r++) {
        uint64_t t = now();
        lists l = build_both(blocks, count, size);
        least(&both, now() - t);
        release(l);
        t = now();
        l = prepare_both(count);
        least(&second, now() - t);
        release(l);
    }
    printf("%" PRIu64 " %" PRIu64 "\n", both, second);
}

static double repost(size_t size, int rounds) {
    int zero = 0;
    uint64_t best = UINT64_MAX;
    nx_req req;
    size_t n = batch(size);
    lists l = build_both(&zero, 1, size);
    CHECK(nx_make_xfer_req(reader, NX_OP_READ, l.local, &zero, 1, l.remote, &zero, 1, &req, NULL));
    for (int r = 0; r < rounds; r++) {
        uint64_t t = now();
        for (size_t i = 0; i < n; i++) {
            int status = nx_post_xfer_req(reader, req, NULL);
            CHECK(status);
            CHECK(complete(req, status));
        }
        least(&best, now() - t);
    }
    end(req);
    release(l);
    return (double)best / (double)n;
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

/* Only the drain can tell that all have arrived: if not, it is tried again with a longer wait. */
static uint64_t drain_once(size_t count) {
    for (useconds_t wait = 20000; wait < 5000000; wait *= 2) {
        send_all(64, count);
        usleep(wait);
        uint64_t t = now();
        size_t got = drain();
        t = now() - t;
        if (got == count)
            return t;
        collect(count - got);
    }
    fprintf(stderr, "peer.c: %zu messages did not arrive\n", count);
    _exit(1);
}

static void nothing(void) {}
static void (*volatile call_nothing)(void) = nothing;

static void drain_nothing(void) {
    drain();
}

static double batches(size_t rounds, void (*call)(void)) {
    uint64_t best = UINT64_MAX;
    for (size_t r = 0; r < rounds; r++) {
        uint64_t t = now();
        for (int i = 0; i < 100; i++)
            call();
        least(&best, now() - t);
    }
    return (double)best / 100;
}

int main(int argc, char **argv) {
    char line[256];
    cpu_set_t cpus;
    if (argc != 3)
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
    CPU_ZERO(&cpus);
    CPU_SET((size_t)atoi(argv[2]), &cpus);
    CHECK(sched_setaffinity(0, sizeof cpus, &cpus)); /* this thread; the library's run where they like */
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("ready");
    while (fgets(line, sizeof line, stdin)) {
        char what[16];
        size_t a = 0, b = 0;
        int rounds = 0;
        int n = sscanf(line, "%15s %zu %zu %d", what, &a, &b, &rounds);
        if (n < 2)
            return 2;
        if (n == 4)
            fill(a, b);
        uint64_t best = UINT64_MAX, t = now();
        if (!strcmp(what, "lists")) {
            lists_only(a, rounds);
            continue;
        } else if (!strcmp(what, "cycle")) {
            cycle(a, rounds);
            continue;
        } else if (!strcmp(what, "start")) {
            printf("%f\n", start(a, b, rounds));
            continue;
        } else if (!strcmp(what, "build")) {
            build_only(a, b, rounds);
            continue;
        } else if (!strcmp(what, "repost")) {
            printf("%f\n", repost(a, (int)b));
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
            best = drain_once(a);
        } else if (!strcmp(what, "empty") || !strcmp(what, "nothing")) {
            printf("%f\n", batches(a, what[0] == 'e' ? drain_nothing : call_nothing));
            continue;
        } else {
            return 2;
        }
        printf("%" PRIu64 "\n", best);
    }
    _exit(0); /* libc's exit runs a destructor of libnl that crashes */
}
