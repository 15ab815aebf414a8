/*
 * Lease verification, as package lease implements it: an owner with a scheduler
 * and NR ranks, NQ lives of requests, ND readers.
 *
 * A rank has its own block bytes, slots, lease records and queue of work, so
 * ranks lag freely. Time is abstract: a granted lease may run out at any moment.
 * Once sent, a read-complete may be handled at any later moment, never, or many
 * times. A block READ sees a block at a moment of its own, twice with TORN; a
 * slot READ sees its slot at any moment after it was posted.
 *
 * Properties, those of which the bit is in PROPS are asserted:
 *   1  a received request holds the bytes of its own life
 *   2  no block is handed out while an exported lease on it is live on a rank
 *   3  no slot is lent while another life holds it
 *   4  each rank reports a life once; with the end-state check, nothing is stuck
 *   5  a check fails only where the lease expired or was revoked
 *   6  no block is handed out while a slot shows the nonce of the lease on it
 *   7  no rank reports a life as read before it was exported
 *
 * Defining M1 … XCNT breaks one rule; see main.go for what that does.
 */

#ifndef NQ
#define NQ 2      /* lives */
#endif
#ifndef NB
#define NB 1      /* blocks */
#endif
#ifndef NS
#define NS 1      /* slots */
#endif
#ifndef GEO
#define GEO 0     /* 0: each reader reads both ranks; 1: one each; 2: reader 0 both, reader 1 the second */
#endif
#ifndef PROPS
#define PROPS 254
#endif
#define NR 2
#define ND 2
#define ALL 3
#define NONE 255
#define IX(r, q) ((r) * NQ + (q))
#define CX(r, s) ((r) * NS + (s))
#define MX(r, b) ((r) * NB + (b))
#define SX(r, d, q) (((r) * ND + (d)) * NQ + (q))

#define CHECK(n, c) if :: (PROPS & (1 << n)) && !(c) -> assert(false) :: else -> skip fi

/* the readers of rank r, and the ranks of reader d */
#if GEO == 0
#define READS(d, r) true
#define READERS(r) 2
#elif GEO == 1
#define READS(d, r) (d == r)
#define READERS(r) 1
#else
#define READS(d, r) (d == 0 || r == 1)
#define READERS(r) (1 + r)
#endif
#ifdef M10
#undef READERS
#define READERS(r) 1
#endif

#ifdef M3
#define NONCE(q) 1
#else
#define NONCE(q) (q + 1)
#endif

mtype:op = { ADMIT, FILL, GRANT, ABORT };
mtype:st = { UNBORN, RUNNING, PINNED, ABORTED, DONE };
mtype:rec = { NOTHING, ADMITTED, GRANTED, ENDED };

/* scheduler */
mtype:st st[NQ] = UNBORN;
bool busy[NB];             /* blocks */
bool lent[NS];             /* slots */
byte blk[NQ] = NONE;
byte slot[NQ] = NONE;
byte filled[NQ];           /* ranks that wrote the bytes of this turn */
bit turn[NQ];
byte reported[NQ];         /* ranks */
bool exported[NQ];
byte pblk[NQ] = NONE;      /* params */
byte pslot[NQ] = NONE;

/* ranks */
byte mem[NR * NB];         /* life + 1 */
byte cell[NR * NS];        /* nonce */
mtype:rec rec[NR * NQ] = NOTHING;
byte senders[NR * NQ];     /* that reported, as a mask */
bool lapsed[NR * NQ];      /* expired or revoked here */
bool said[NR * ND * NQ];   /* read-completes that were sent */
chan work0 = [8] of { mtype:op, byte, byte, bit };
chan work1 = [8] of { mtype:op, byte, byte, bit };
#ifdef M1
bool unzeroed[NR * NQ];
#endif
#ifdef M8
bool renewed[NR * NQ];
#endif
#ifdef XCNT
byte count[NR * NQ];
#endif
#ifdef XABSLOT
bool aborting[NQ];         /* aborts that wait for the admissions of the step */
#endif

inline send(o, q, b) { work0!o, q, b, turn[q]; work1!o, q, b, turn[q] }

/* take a free block for life q */
inline takeBlock(q) {
    if
    :: !busy[0] -> blk[q] = 0
#if NB > 1
    :: !busy[1] -> blk[q] = 1
#endif
    fi;
    busy[blk[q]] = true;
    i = 0;
    do
    :: i < NQ ->
        if
        :: i != q && exported[i] && pblk[i] == blk[q] ->
            CHECK(2, rec[IX(0, i)] != GRANTED && rec[IX(0, i)] != ADMITTED && rec[IX(1, i)] != GRANTED && rec[IX(1, i)] != ADMITTED);
            if
            :: pslot[i] != NONE -> CHECK(6, cell[CX(0, pslot[i])] != NONCE(i) && cell[CX(1, pslot[i])] != NONCE(i))
            :: else
            fi
        :: else
        fi;
        i++
    :: else -> i = 0; break
    od
}

/* lend a slot to life q, none if there is none */
inline takeSlot(q) {
    if
    :: !lent[0] -> slot[q] = 0
#if NS > 1
    :: lent[0] && !lent[1] -> slot[q] = 1
#endif
    :: else -> skip
    fi;
    if
    :: slot[q] != NONE ->
        lent[slot[q]] = true;
        i = 0;
        do
        :: i < NQ ->
            CHECK(3, i == q || slot[i] != slot[q] || st[i] == UNBORN || st[i] == DONE);
            i++
        :: else -> i = 0; break
        od
    :: else
    fi
}

/* One life as the scheduler and the engine see it. */
proctype Life(byte q) {
    byte i, first = NONE;
    bool preempted, revoked;
    /* the engine starts lives in order; their ids are one and the same */
    atomic {
        (q == 0 || st[q - 1] != UNBORN) && (!busy[0]
#if NB > 1
            || !busy[1]
#endif
        );
        takeBlock(q); takeSlot(q);
        st[q] = RUNNING;
        first = blk[q];
        send(ADMIT, q, slot[q]); send(FILL, q, blk[q]);
#ifdef XABSLOT
        /* a step writes nonces first and ends leases last */
        i = 0;
        do
        :: i < NQ -> if :: aborting[i] -> aborting[i] = false; send(ABORT, i, 0) :: else fi; i++
        :: else -> i = 0; break
        od
#endif
    }
    do
#ifdef XEXP1
    :: atomic { st[q] == RUNNING && filled[q] != 0 ->
#else
    :: atomic { st[q] == RUNNING && filled[q] == ALL ->
#endif
        st[q] = PINNED;
        exported[q] = true;
        pslot[q] = slot[q];
#ifdef XEARLY
        pblk[q] = first;
#else
        pblk[q] = blk[q];
#endif
        send(GRANT, q, 0) }
#ifdef ABORTS
    :: atomic { st[q] == RUNNING ->
        st[q] = ABORTED;
#ifdef XABSLOT
        aborting[q] = true;
        if :: slot[q] != NONE -> lent[slot[q]] = false :: else fi
#else
        send(ABORT, q, 0)
#endif
        }
#ifdef XABSLOT
    :: atomic { aborting[q] -> aborting[q] = false; send(ABORT, q, 0) }
#endif
#endif
#ifdef PREEMPTS
    :: atomic { st[q] == RUNNING && !preempted && blk[q] != NONE ->
        preempted = true; busy[blk[q]] = false; blk[q] = NONE; filled[q] = 0; turn[q] = 1 }
    :: atomic { st[q] == RUNNING && blk[q] == NONE && (!busy[0]
#if NB > 1
            || !busy[1]
#endif
        ) -> takeBlock(q); send(FILL, q, blk[q]) }
#endif
#ifdef REVOKES
    :: atomic { st[q] == PINNED && !revoked -> revoked = true; send(ABORT, q, 0) }
#endif
#ifdef XFORCE
    :: atomic { st[q] == PINNED && blk[q] != NONE -> busy[blk[q]] = false; blk[q] = NONE }
#endif
#ifdef M5
    :: atomic { (st[q] == PINNED || st[q] == ABORTED) && reported[q] != 0 && blk[q] != NONE ->
        busy[blk[q]] = false; blk[q] = NONE }
#endif
#ifdef M9B
    :: atomic { (st[q] == PINNED || st[q] == ABORTED) && reported[q] != 0 && slot[q] != NONE && lent[slot[q]] && !preempted ->
        lent[slot[q]] = false; preempted = true }
#endif
    :: atomic { (st[q] == PINNED || st[q] == ABORTED) && reported[q] == ALL -> break }
    od;
    /* every rank has reported: first the blocks, then the slot */
#ifdef M9
    atomic { if :: slot[q] != NONE -> lent[slot[q]] = false; slot[q] = NONE :: else fi };
    atomic { if :: blk[q] != NONE -> busy[blk[q]] = false; blk[q] = NONE :: else fi; st[q] = DONE }
#else
    atomic { if :: blk[q] != NONE -> busy[blk[q]] = false; blk[q] = NONE :: else fi };
    atomic {
#if !defined(M9B) && !defined(XABSLOT)
        if :: slot[q] != NONE -> lent[slot[q]] = false; slot[q] = NONE :: else fi;
#else
        slot[q] = NONE;
#endif
        st[q] = DONE }
#endif
}

/* zero the slot, only of its own nonce */
inline zero(r, q) {
    if
    :: where != NONE && cell[CX(r, where)] == NONCE(q) -> cell[CX(r, where)] = 0
    :: else
    fi
}

/* end life q on rank r */
inline ends(r, q) {
    where = at[q];
#ifdef M1
    unzeroed[IX(r, q)] = true;
#else
    zero(r, q);
#endif
    rec[IX(r, q)] = ENDED;
    CHECK(4, !(reported[q] & (1 << r)));
    reported[q] = reported[q] | (1 << r)
}

inline expire(r, q) { lapsed[IX(r, q)] = true; ends(r, q) }

/* a read-complete for life q from reader d reaches rank r */
inline handle(r, d, q) {
    if
    :: rec[IX(r, q)] == ADMITTED || rec[IX(r, q)] == GRANTED ->
        senders[IX(r, q)] = senders[IX(r, q)] | (1 << d);
#ifdef XCNT
        count[IX(r, q)]++;
        if
        :: count[IX(r, q)] >= READERS(r) ->
#else
        if
        :: ((senders[IX(r, q)] & 1) + (senders[IX(r, q)] >> 1)) >= READERS(r) ->
#endif
            CHECK(7, exported[q]);
            ends(r, q)
        :: else
        fi
    :: else
    fi
}

/* what may happen to life q on rank r at any moment */
#ifdef M8
#define RESURRECT(r, q) \
    :: atomic { rec[IX(r, q)] == ENDED && !renewed[IX(r, q)] && exported[q] -> \
        renewed[IX(r, q)] = true; rec[IX(r, q)] = GRANTED; \
        if :: at[q] != NONE -> cell[CX(r, at[q])] = NONCE(q) :: else fi }
#else
#define RESURRECT(r, q)
#endif
#ifdef M1
#define LATE(r, q) :: atomic { unzeroed[IX(r, q)] && (st[q] == DONE || blk[q] == NONE) -> unzeroed[IX(r, q)] = false; where = at[q]; zero(r, q); where = NONE }
#else
#define LATE(r, q)
#endif
#ifdef M6
/* without a nonce the message is for whatever life has the id */
#if NQ > 2
#define DELIVER(r, d, q) :: atomic { said[SX(r, d, q)] -> handle(r, d, 0); handle(r, d, 1); handle(r, d, 2); where = NONE }
#else
#define DELIVER(r, d, q) :: atomic { said[SX(r, d, q)] -> handle(r, d, 0); handle(r, d, 1); where = NONE }
#endif
#else
#define DELIVER(r, d, q) :: atomic { said[SX(r, d, q)] && (rec[IX(r, q)] == ADMITTED || rec[IX(r, q)] == GRANTED) -> handle(r, d, q); where = NONE }
#endif
#define EVENTS(r, q) \
    :: atomic { rec[IX(r, q)] == GRANTED -> expire(r, q); where = NONE } \
    DELIVER(r, 0, q) \
    DELIVER(r, 1, q) \
    RESURRECT(r, q) \
    LATE(r, q)

proctype Rank(byte r; chan work) {
    byte q, x, where = NONE;
    byte at[NQ] = NONE;    /* slots of the lives, as admitted */
    bit t;
end:
    do
    :: atomic { work?ADMIT, q, x, t ->
        at[q] = x;
        rec[IX(r, q)] = ADMITTED;
        if :: x != NONE -> cell[CX(r, x)] = NONCE(q) :: else fi;
        q = 0; x = 0; t = 0 }
    :: atomic { work?FILL, q, x, t ->
        mem[MX(r, x)] = q + 1;
        if :: t == turn[q] -> filled[q] = filled[q] | (1 << r) :: else fi;
        q = 0; x = 0; t = 0 }
    :: atomic { work?GRANT, q, x, t ->
        if
        :: rec[IX(r, q)] == ADMITTED -> rec[IX(r, q)] = GRANTED
#ifdef XGRANT
        :: rec[IX(r, q)] == ENDED -> rec[IX(r, q)] = GRANTED
#endif
        :: else   /* a read-complete came first: dropped */
        fi;
        q = 0; x = 0; t = 0 }
    :: atomic { work?ABORT, q, x, t ->
        if
        :: rec[IX(r, q)] == ADMITTED || rec[IX(r, q)] == GRANTED -> expire(r, q)
        :: else
        fi;
        q = 0; x = 0; t = 0; where = NONE }
    EVENTS(r, 0)
    EVENTS(r, 1)
#if NQ > 2
    EVENTS(r, 2)
#endif
    od
}

/* the block of the life is read: once, or in two halves with TORN */
#ifdef TORN
#define SEEN 2
#else
#define SEEN 1
#endif

#define BLOCKS_IN ((seen[0] == SEEN || !READS(d, 0)) && (seen[1] == SEEN || !READS(d, 1)))
#ifdef M2
#define MAY_CHECK(r) true
#else
#ifdef M2B
#define MAY_CHECK(r) (seen[r] == SEEN)
#else
#define MAY_CHECK(r) BLOCKS_IN
#endif
#endif
#ifdef M4
/* one rank is enough: the first that is read */
#define CHECKS(r) (READS(d, r) && (r == 0 || !READS(d, 0)))
#else
#define CHECKS(r) READS(d, r)
#endif
#ifdef XNZ
#define GOOD(r) (!CHECKS(r) || value[r] != 0)
#else
#define GOOD(r) (!CHECKS(r) || value[r] == NONCE(q))
#endif

proctype Reader(byte d) {
    byte q = NONE;
    byte seen[NR], value[NR];
    bool wrong[NR], looked[NR];
    bool again;
    byte zombie[NR] = NONE;
end_idle:
    if
    :: atomic { exported[0] && pslot[0] != NONE -> q = 0 }
    :: atomic { exported[1] && pslot[1] != NONE -> q = 1 }
#if NQ > 2
    :: atomic { exported[2] && pslot[2] != NONE -> q = 2 }
#endif
    fi;
pull:
    do
    :: atomic { READS(d, 0) && seen[0] < SEEN -> seen[0]++; wrong[0] = wrong[0] || mem[MX(0, pblk[q])] != q + 1;
#ifdef M7
        said[SX(0, d, q)] = true
#endif
        }
    :: atomic { READS(d, 1) && seen[1] < SEEN -> seen[1]++; wrong[1] = wrong[1] || mem[MX(1, pblk[q])] != q + 1;
#ifdef M7
        said[SX(1, d, q)] = true
#endif
        }
    :: atomic { CHECKS(0) && !looked[0] && MAY_CHECK(0) -> looked[0] = true; value[0] = cell[CX(0, pslot[q])] }
    :: atomic { CHECKS(1) && !looked[1] && MAY_CHECK(1) -> looked[1] = true; value[1] = cell[CX(1, pslot[q])] }
#ifdef XZOMBIE
    /* give up a READ that is active, and pull again into the same buffers */
    :: atomic { !again && READS(d, 0) && seen[0] == 0 ->
        again = true; zombie[0] = pblk[q]; seen[1] = 0; wrong[1] = false; looked[0] = false; looked[1] = false;
        value[0] = 0; value[1] = 0;
        if
        :: exported[0] && pslot[0] != NONE -> q = 0
        :: exported[1] && pslot[1] != NONE -> q = 1
        fi }
    :: atomic { zombie[0] != NONE && seen[0] == SEEN -> wrong[0] = mem[MX(0, zombie[0])] != q + 1; zombie[0] = NONE }
#endif
    :: atomic { BLOCKS_IN && (looked[0] || !CHECKS(0)) && (looked[1] || !CHECKS(1)) -> break }
    od;
    atomic {
        if
        :: GOOD(0) && GOOD(1) ->
            CHECK(1, !wrong[0] && !wrong[1]);
#ifdef REACH
            assert(REACH != 1);
#endif
            if :: READS(d, 0) -> said[SX(0, d, q)] = true :: else fi;
            if :: READS(d, 1) -> said[SX(1, d, q)] = true :: else fi
        :: else ->
            CHECK(5, (READS(d, 0) && lapsed[IX(0, q)]) || (READS(d, 1) && lapsed[IX(1, q)]));
#ifdef REACH
            assert(REACH != 2);
#endif
        fi
    }
#ifdef XZOMBIE
    if
    :: atomic { zombie[0] != NONE && value[0] == NONCE(q) && value[1] == NONCE(q) ->
        wrong[0] = mem[MX(0, zombie[0])] != q + 1; zombie[0] = NONE; CHECK(1, !wrong[0]) }
    :: true
    fi
#endif
}

init {
    atomic {
        run Rank(0, work0); run Rank(1, work1);
        run Life(0); run Life(1);
#if NQ > 2
        run Life(2);
#endif
        run Reader(0); run Reader(1)
    }
}
