/*
 * Who may end a lease: reader engines of which several requests share a lease, a
 * router that holds it meanwhile, and owners of one engine id at two addresses.
 *
 * NO owners, each with one rank, one block and one slot, have NL lives one after
 * the other, all of one request id. What several ranks add is in lease.pml. NE
 * engines with NK requests read. A router gets the params of every life, holds
 * its lease, and gives it to one engine at a time, or releases it. (A hold in the
 * engine of a reader is one more request, which is given up before it reads.)
 *
 * An engine counts its requests of a lease. When the last one needs it no more,
 * a release goes out with a later plan, and may be handled at any moment after
 * that, never, or many times. Time is abstract: a lease may run out at any
 * moment, with HEALTHY only while nobody renews it.
 *
 * Properties, those of which the bit is in PROPS are asserted, numbered as in
 * lease.pml:
 *   1  a received request holds the bytes of its own life; if it was not checked,
 *      then unless the lease ran out
 *   2  no block is handed out while a READ of it is active under a lease that did
 *      not run out
 *   5  a check fails only where the lease ran out, with HEALTHY never. A request
 *      that comes when the lease is over, or when its release is decided, is late:
 *      it has no claim, here and in 1 and 2
 *   7  nothing ends a life before its params have left
 *   8  nothing is held for ever: when nothing can happen any more, no life has its
 *      block; and nothing is stuck
 *
 * Options:
 *   UNCHECKED  lives have no slot: reads are not checked, and reported without a
 *              nonce. As in lease.pml such a report is handled only while no other
 *              life of its id has been exported at its address, unless LATE
 *   HEALTHY    nobody dies and no heartbeat is lost: a lease that an engine renews
 *              does not run out
 *   WITHDRAWS  a request that comes before the release has left takes it back
 */

#ifndef NO
#define NO 1
#endif
#ifndef NL
#define NL 2
#endif
#ifndef NE
#define NE 1
#endif
#ifndef NK
#define NK 2
#endif
#ifndef PROPS
#define PROPS 510
#endif
#define NI (NO * NL)          /* leases: life l of owner o is o * NL + l */
#define OWNER(i) ((i) / NL)
#define ROUTER NE             /* sends as one more engine */
#define NOBODY 255
#define EX(e, i) ((e) * NI + (i))

#define CHECK(n, c) if :: (PROPS & (1 << n)) && !(c) -> assert(false) :: else -> skip fi

#ifdef XNONCE
#define NONCE(i) ((i) % NL + 1)
#else
#define NONCE(i) ((i) + 1)
#endif

mtype:st = { UNBORN, RUNNING, GRANTED, ENDED };

/* owners */
mtype:st st[NI] = UNBORN;
byte mem[NO];                 /* what is in the block: lease + 1 */
byte cell[NO];                /* nonce */
bool exported[NI];
bool ranOut[NI];
byte reading[NI];             /* READs that are active, and not late */

/* engines */
byte live[NE * NI];           /* requests that need the lease */
byte beats[NE * NI];          /* requests for which it is renewed */
bool due[NE * NI];            /* a release goes out with the next plan */
bool lapsed[NE * NI];         /* a check found it gone */
bool sent[(NE + 1) * NI];     /* releases on the wire */

/* Where engine e sends messages about lease i, reads its blocks, and its slot.
   The mutants take the address of the engine's first request for all. */
#if defined(XADDR) || defined(XPEER) || defined(XCHECK)
byte first[NE] = NOBODY;
#define FIRST(e, i) (e < NE && first[e] != NOBODY -> first[e] : OWNER(i))
#endif
#ifdef XADDR
#define ADDR(e, i) FIRST(e, i)
#else
#define ADDR(e, i) OWNER(i)
#endif
#ifdef XPEER
#define BLOCK_AT(e, i) FIRST(e, i)
#else
#define BLOCK_AT(e, i) OWNER(i)
#endif
#if defined(XPEER) || defined(XCHECK)
#define SLOT_AT(e, i) FIRST(e, i)
#else
#define SLOT_AT(e, i) OWNER(i)
#endif

byte given[NI] = ROUTER;      /* who the router gave the params to */

#if NE > 1
#define RENEWED(i) (BEAT(0, i) || BEAT(1, i))
#else
#define RENEWED(i) BEAT(0, i)
#endif
#define BEAT(e, i) (beats[EX(e, i)] > 0 && ADDR(e, i) == OWNER(i))
#ifdef HEALTHY
#define MAY_RUN_OUT(i) !RENEWED(i)
#else
#define MAY_RUN_OUT(i) true
#endif

inline endLife(i) { cell[OWNER(i)] = 0; st[i] = ENDED }

/* the release of lease i by engine e reaches owner o, whose life j may be meant */
#if defined(UNCHECKED) || defined(XBARE)
#ifdef LATE
#define IS_FOR(e, i, o, j) (st[j] == GRANTED)
#else
#define IS_FOR(e, i, o, j) (st[j] == GRANTED && (i == j || OWNER(i) != o))
#endif
#else
#define IS_FOR(e, i, o, j) ((st[j] == RUNNING || st[j] == GRANTED) && NONCE(i) == NONCE(j))
#endif
#define DELIVER(e, i, o, j) \
    :: atomic { sent[EX(e, i)] && ADDR(e, i) == o && IS_FOR(e, i, o, j) -> CHECK(7, exported[j]); endLife(j) }
#if NL > 1
#define DELIVER_ALL(e, i, o) DELIVER(e, i, o, o * NL) DELIVER(e, i, o, o * NL + 1)
#else
#define DELIVER_ALL(e, i, o) DELIVER(e, i, o, o * NL)
#endif
#if NI > 3
#define FROM(e, o) DELIVER_ALL(e, 0, o) DELIVER_ALL(e, 1, o) DELIVER_ALL(e, 2, o) DELIVER_ALL(e, 3, o)
#elif NI > 1
#define FROM(e, o) DELIVER_ALL(e, 0, o) DELIVER_ALL(e, 1, o)
#else
#define FROM(e, o) DELIVER_ALL(e, 0, o)
#endif

proctype Owner(byte o) {
    byte i = o * NL;          /* the life */
end:
    do
    :: atomic { st[i] == UNBORN ->
        /* the block is handed out */
        CHECK(2, i == o * NL || reading[i - 1] == 0 || ranOut[i - 1]);
        st[i] = RUNNING;
#ifndef UNCHECKED
        cell[o] = NONCE(i)
#endif
        }
    :: atomic { st[i] == RUNNING && !exported[i] -> mem[o] = i + 1; exported[i] = true }
    :: atomic { st[i] == RUNNING && exported[i] -> st[i] = GRANTED }
    :: atomic { st[i] == GRANTED && MAY_RUN_OUT(i) -> ranOut[i] = true; endLife(i) }
    :: atomic { st[i] == ENDED && i + 1 < (o + 1) * NL -> i++ }
    FROM(0, o)
    FROM(1, o)
#if NE > 1
    FROM(2, o)
#endif
    od
}

/* The router holds a lease until it gave it to an engine, and again when that
   engine left it unread. */
#ifdef XFAILED
#define IS_BACK(e, i) (live[EX(e, i)] == 0)
#else
#define IS_BACK(e, i) (live[EX(e, i)] == 0 && !due[EX(e, i)] && !sent[EX(e, i)])
#endif
#ifdef XROUTE
#define MAY_RELEASE(i) (given[i] != NOBODY)
#else
#define MAY_RELEASE(i) (given[i] == ROUTER)
#endif
#if NE > 1
#define GIVE(i) \
    :: atomic { exported[i] && given[i] == ROUTER -> given[i] = 0 } \
    :: atomic { exported[i] && given[i] == ROUTER -> given[i] = 1 } \
    :: atomic { given[i] == 0 && came[EX(0, i)] && IS_BACK(0, i) -> came[EX(0, i)] = false; given[i] = ROUTER } \
    :: atomic { given[i] == 1 && came[EX(1, i)] && IS_BACK(1, i) -> came[EX(1, i)] = false; given[i] = ROUTER }
#else
#define GIVE(i) \
    :: atomic { exported[i] && given[i] == ROUTER -> given[i] = 0 } \
    :: atomic { given[i] == 0 && came[EX(0, i)] && IS_BACK(0, i) -> came[EX(0, i)] = false; given[i] = ROUTER }
#endif
#define ROUTE(i) GIVE(i) \
    :: atomic { exported[i] && MAY_RELEASE(i) -> given[i] = NOBODY; sent[EX(ROUTER, i)] = true }

bool came[NE * NI];           /* a request came with the lease since it was given */

proctype Router() {
end:
    do
    ROUTE(0)
#if NI > 1
    ROUTE(1)
#endif
#if NI > 3
    ROUTE(2)
    ROUTE(3)
#endif
    od
}

/* Engine e builds a plan: what is due leaves. */
#define PLAN(e, i) :: atomic { due[EX(e, i)] -> due[EX(e, i)] = false; sent[EX(e, i)] = true }

proctype Plans(byte e) {
end:
    do
    PLAN(e, 0)
#if NI > 1
    PLAN(e, 1)
#endif
#if NI > 3
    PLAN(e, 2)
    PLAN(e, 3)
#endif
    od
}

inline quiet() {
    if
    :: beating ->
        beating = false;
#ifdef XBEAT
        beats[EX(e, q)] = 0       /* for all requests of the lease */
#else
        beats[EX(e, q)]--
#endif
    :: else
    fi
}

/* The request needs the lease no more. With release, and if no other request
   needs it and it is not known to be lost, the owner gets it back. */
inline conclude(release) {
#ifndef XSTILL
    quiet();
#endif
    live[EX(e, q)]--;
    if
#ifdef XEACH
    :: release -> due[EX(e, q)] = true
#elif defined(XLAPSED)
    :: release && live[EX(e, q)] == 0 -> due[EX(e, q)] = true
#else
    :: release && live[EX(e, q)] == 0 && !lapsed[EX(e, q)] -> due[EX(e, q)] = true
#endif
#ifdef XFAILED
    :: !release && live[EX(e, q)] == 0 -> due[EX(e, q)] = true
#endif
    :: else
    fi
}

#define ARRIVE(i) \
    :: atomic { exported[i] && given[i] == e -> q = i; arrive() }

inline arrive() {
#if defined(XADDR) || defined(XPEER) || defined(XCHECK)
    if :: first[e] == NOBODY -> first[e] = OWNER(q) :: else fi;
#endif
    came[EX(e, q)] = true;
#ifdef WITHDRAWS
    due[EX(e, q)] = false;
#endif
#ifdef XNEXT
    late = st[q] == ENDED || sent[EX(e, q)];
#else
    late = st[q] == ENDED || due[EX(e, q)] || sent[EX(e, q)];
#endif
    live[EX(e, q)]++;
    beats[EX(e, q)]++;
    beating = true
}

#ifdef HEALTHY
#define EXCUSED late
#else
#define EXCUSED (late || ranOut[q])
#endif

/* one request of engine e */
proctype Request(byte e) {
    byte q = NOBODY, value;
    bool late, beating, wrong, dropped;
#ifdef XKEEP
    bool keep;
#endif
end_idle:
    if
    ARRIVE(0)
#if NI > 1
    ARRIVE(1)
#endif
#if NI > 3
    ARRIVE(2)
    ARRIVE(3)
#endif
    fi;
    if
    :: atomic { true ->          /* given up while it waits: released, or left to another reader */
        if
        :: true -> conclude(true)
        :: true -> conclude(false)
        fi;
        goto end_over }
    :: atomic { true ->          /* the READ is posted */
        if :: !late -> reading[q]++ :: else fi;
#ifdef XKEEP
        keep = live[EX(e, q)] > 1
#endif
        }
    fi;
    if
    :: skip
    :: atomic { true ->          /* given up while the READ is active, which is waited for */
        dropped = true;
        quiet();
#ifdef XRELEASE
        conclude(true)
#endif
        }
    fi;
    atomic {                     /* the READ ends; to have seen the block before is to end before */
        if :: !late -> reading[q]-- :: else fi;
        if
        :: dropped ->
#ifndef XRELEASE
            if
            :: true -> conclude(true)
            :: true -> conclude(false)
            fi;
#endif
            goto end_over
        :: else -> wrong = mem[BLOCK_AT(e, q)] != q + 1
        fi
    }
#ifndef UNCHECKED
    atomic { value = cell[SLOT_AT(e, q)] }
#endif
    atomic {
        if
#ifdef UNCHECKED
        :: CHECK(1, !wrong || EXCUSED);
#else
        :: value == NONCE(q) -> CHECK(1, !wrong);
#endif
#ifdef REACH
            assert(REACH != 1);
#endif
#ifdef XKEEP
            if
            :: !keep -> sent[EX(e, q)] = true; conclude(false)
            :: else -> conclude(true)
            fi
#else
            conclude(true)
#endif
#ifndef UNCHECKED
        :: value != NONCE(q) ->
            CHECK(5, EXCUSED);
#ifdef REACH
            assert(REACH != 2);
#endif
            lapsed[EX(e, q)] = true;
            conclude(true)
#endif
        fi
    }
end_over:
    skip
}

init {
    atomic {
        run Owner(0);
#if NO > 1
        run Owner(1);
#endif
        run Router();
        run Plans(0); run Request(0);
#if NK > 1
        run Request(0);
#endif
#if NK > 2
        run Request(0);
#endif
#if NE > 1
        run Plans(1); run Request(1);
#if NK > 1
        run Request(1);
#endif
#endif
    }
    /* when nothing else can happen */
end:
    timeout;
    byte i;
    do
    :: i < NI -> CHECK(8, st[i] == ENDED); i++
    :: else -> break
    od
}
