/*
 * Lease verification, as package lease implements it: an owner with a scheduler
 * and NR ranks, NQ lives of requests, ND readers.
 *
 * A rank has its own block bytes, slots, lease records and queue of work, so
 * ranks lag freely. Time is abstract: a granted lease may run out at any moment.
 * Once sent, a read-complete may be handled at any later moment, never, or many
 * times. A block READ sees a block at a moment of its own, twice with TORN; a
 * slot READ sees its slot at any moment after it was posted. What a reader engine
 * with several requests, a router and several owners do is in sharing.pml.
 *
 * Properties, those of which the bit is in PROPS are asserted:
 *   1  a received request holds the bytes of its own life; if it was not checked,
 *      then unless the lease expired or was revoked
 *   2  no block is handed out while an exported lease on it is live on a rank
 *   3  no slot is lent while another life holds it
 *   4  each rank reports a life once; with the end-state check, nothing is stuck
 *   5  a check fails only where the lease expired or was revoked
 *   6  no block is handed out while a slot shows the nonce of the lease on it
 *   7  no rank reports a life as read before it was exported
 *   8  nothing is held for ever: when nothing can happen any more, no block is
 *      taken and no slot is lent
 *
 * What else may happen, by define:
 *   ABORTS    a request ends before it is exported
 *   PREEMPTS  a running request loses its blocks and gets others
 *   REVOKES   the engine takes an exported lease back
 *   GIVEUPS   a reader releases a lease, or leaves it, without having read it
 *   RETRIES   … and one that left it reads it again
 *   REPEATS   a rank's report of an end reaches the scheduler twice
 *   REFUSES   a rank refuses an admission
 *   SEVERAL   a reader reads one life after another
 *   OFFERED   lives without a slot are read, too: not checked, and reported
 *             without a nonce
 *   OLD       reader 1 never checks, and reports without a nonce
 *   READBACK  the owner is a reader itself: its blocks are filled by a READ
 *   RESTARTS  the scheduler is replaced by another one that knows nothing of the
 *             lives of the first
 *
 * With CHECKED the first property is that of checked reads alone.
 *
 * A report without a nonce names an id, and all lives have one id. So it can be
 * told which life it means only while no other life of the id is exported. Such
 * a report is handled at such moments alone, unless LATE is defined: the wire
 * promises no more. With UNIQUE no id is used twice.
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
#if NS == 0
#define CELLS 1   /* there is no empty array */
#else
#define CELLS NS
#endif
#ifndef GEO
#define GEO 0     /* 0: each reader reads both ranks; 1: one each; 2: reader 0 both, reader 1 the second;
                     3: both, and a life is read by one of them, as they are of two engines */
#endif
#ifndef PROPS
#define PROPS 510
#endif
#define NR 2
#define ND 2
#define ALL 3
#define NONE 255
#define IX(r, q) ((r) * NQ + (q))
#define CX(r, s) ((r) * CELLS + (s))
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
#elif GEO == 3
#define READS(d, r) true
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

mtype:op = { ADMIT, FILL, READ, GRANT, ABORT };
mtype:st = { UNBORN, RUNNING, PINNED, ABORTED, DONE };
mtype:rec = { NOTHING, ADMITTED, GRANTED, ENDED };

/* scheduler */
mtype:st st[NQ] = UNBORN;
bool busy[NB];             /* blocks */
bool lent[CELLS];             /* slots */
byte blk[NQ] = NONE;
byte slot[NQ] = NONE;
byte filled[NQ];           /* ranks that wrote the bytes of this turn */
bit turn[NQ];
byte reported[NQ];         /* ranks */
#ifdef XTWICE
byte reports[NQ];
#endif
#ifdef REPEATS
bool repeated[NR * NQ];    /* reports that came twice */
#endif
#ifdef READBACK
byte settled[NQ];          /* ranks on which no READ writes to the blocks */
#endif
#ifdef RESTARTS
bool restarted;
bool old[NQ];              /* lives of the scheduler before */
#endif
bool exported[NQ];
byte pblk[NQ] = NONE;      /* params */
byte pslot[NQ] = NONE;

/* ranks */
byte mem[NR * NB];         /* life + 1 */
byte cell[NR * CELLS];        /* nonce */
mtype:rec rec[NR * NQ] = NOTHING;
byte senders[NR * NQ];     /* that reported, as a mask */
#ifdef XSEEN
#define SENDERS(r, q) senders[r]
#else
#define SENDERS(r, q) senders[IX(r, q)]
#endif
bool lapsed[NR * NQ];      /* expired or revoked here */
bool said[NR * ND * NQ];   /* read-completes that were sent */
#ifdef XKEPT
byte kept[NR];             /* senders of reports that matched nothing */
#endif
chan work0 = [8] of { mtype:op, byte, byte, bit };   /* operation, life, slot or block, turn */
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

/* how the blocks are filled at first: by a prefill, or from another engine */
#ifdef READBACK
#define FILLS READ
#else
#define FILLS FILL
#endif

/* every rank reported, and no READ writes to the blocks any more */
#ifdef XTWICE
#define ALL_REPORTED(q) (reports[q] >= NR)
#else
#define ALL_REPORTED(q) (reported[q] == ALL)
#endif
#if defined(READBACK) && !defined(XSETTLE)
#define IS_OVER(q) (ALL_REPORTED(q) && settled[q] == ALL)
#else
#define IS_OVER(q) ALL_REPORTED(q)
#endif

/* the scheduler takes a report */
inline report(r, q) {
    reported[q] = reported[q] | (1 << r);
#ifdef XTWICE
    reports[q]++
#endif
}

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
#ifdef RESTARTS
        :: i != q && exported[i] && !old[i] && pblk[i] == blk[q] ->   /* of the others it cannot know: see FILL */
#else
        :: i != q && exported[i] && pblk[i] == blk[q] ->
#endif
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
#if NS > 0
    :: !lent[0] -> slot[q] = 0
#endif
#if NS > 1 && defined(RESTARTS)
    :: !lent[1] -> slot[q] = 1     /* another scheduler, another order */
#elif NS > 1
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
        send(ADMIT, q, slot[q]); send(FILLS, q, blk[q]);
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
#elif (defined(REFUSES) || defined(RESTARTS)) && !defined(XPARAMS)
    :: atomic { st[q] == RUNNING && filled[q] == ALL && reported[q] == 0 ->
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
#if defined(REFUSES) || defined(RESTARTS)
    /* a rank refused it: no params */
    :: atomic { st[q] == RUNNING && reported[q] != 0 -> st[q] = ABORTED; send(ABORT, q, 0) }
#endif
#ifdef READBACK
    /* A load failed. The engine computes the blocks when no READ writes to them. */
#ifdef XRECOMPUTE
    :: atomic { st[q] == RUNNING && (settled[q] & ~filled[q]) != 0 && turn[q] == 0 -> turn[q] = 1; filled[q] = 0; send(FILL, q, blk[q]) }
#else
    :: atomic { st[q] == RUNNING && settled[q] == ALL && filled[q] != ALL && turn[q] == 0 -> turn[q] = 1; filled[q] = 0; send(FILL, q, blk[q]) }
#endif
#endif
#ifdef RESTARTS
    :: atomic { st[q] == DONE -> break }
#endif
#ifdef ABORTS
    :: atomic { st[q] == RUNNING ->
        st[q] = ABORTED;
#if defined(XLEAK)
        skip
#elif defined(XABSLOT)
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
    :: atomic { (st[q] == PINNED || st[q] == ABORTED) && IS_OVER(q) -> break }
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
    report(r, q)
}

inline expire(r, q) { lapsed[IX(r, q)] = true; ends(r, q) }

/* a read-complete for life q from reader d reaches rank r */
inline handle(r, d, q) {
    if
    :: rec[IX(r, q)] == ADMITTED || rec[IX(r, q)] == GRANTED ->
        SENDERS(r, q) = SENDERS(r, q) | (1 << d);
#ifdef XCNT
        count[IX(r, q)]++;
        if
        :: count[IX(r, q)] >= READERS(r) ->
#else
        if
        :: ((SENDERS(r, q) & 1) + (SENDERS(r, q) >> 1)) >= READERS(r) ->
#endif
            CHECK(7, exported[q]);
            ends(r, q)
        :: else
        fi
    :: else
    fi
}

#define LIVE(r, q) (rec[IX(r, q)] == ADMITTED || rec[IX(r, q)] == GRANTED)

/* Reader d reads life q without a check, and reports it without a nonce. */
#ifdef OLD
#define BARE(d, q) (pslot[q] == NONE || d == 1)
#else
#define BARE(d, q) (pslot[q] == NONE)
#endif

#if defined(OFFERED) || defined(OLD)
/* The lives that a report without a nonce can be for: those that are granted,
   as the grant comes when the params have left. */
#ifdef XWAIT
#define CANDIDATE(r, i) (rec[IX(r, i)] == GRANTED || rec[IX(r, i)] == ADMITTED && at[i] == NONE)
#else
#define CANDIDATE(r, i) (rec[IX(r, i)] == GRANTED)
#endif
#if NQ > 2
#define CANDIDATES(r) (CANDIDATE(r, 0) + CANDIDATE(r, 1) + CANDIDATE(r, 2))
#define OTHERS(r, q) ((q != 0 && rec[IX(r, 0)] == GRANTED) || \
    (q != 1 && rec[IX(r, 1)] == GRANTED) || (q != 2 && rec[IX(r, 2)] == GRANTED))
#else
#define CANDIDATES(r) (CANDIDATE(r, 0) + CANDIDATE(r, 1))
#define OTHERS(r, q) (rec[IX(r, 1 - q)] == GRANTED)
#endif
#ifdef LATE
#define TELLABLE(r, q) true
#else
#define TELLABLE(r, q) !OTHERS(r, q)
#endif

/* A report without a nonce counts for the only life that it can be for. */
inline handleBare(r, d) {
    if
    :: CANDIDATE(r, 0) -> handle(r, d, 0)
    :: CANDIDATE(r, 1) -> handle(r, d, 1)
#if NQ > 2
    :: CANDIDATE(r, 2) -> handle(r, d, 2)
#endif
    fi
}
#ifdef UNIQUE
#define DELIVER_BARE(r, d, q) :: atomic { said[SX(r, d, q)] && BARE(d, q) && CANDIDATE(r, q) -> handle(r, d, q); where = NONE }
#else
#define DELIVER_BARE(r, d, q) :: atomic { said[SX(r, d, q)] && BARE(d, q) && TELLABLE(r, q) && CANDIDATES(r) == 1 -> handleBare(r, d); where = NONE }
#endif
#else
#define DELIVER_BARE(r, d, q)
#endif
#ifdef XKEPT
#define KEEP(r, d, q) :: atomic { said[SX(r, d, q)] && BARE(d, q) && CANDIDATES(r) == 0 && !(kept[r] & (1 << d)) -> kept[r] = kept[r] | (1 << d) }
#else
#define KEEP(r, d, q)
#endif
#ifdef REPEATS
#define REPEAT(r, q) :: atomic { (reported[q] & (1 << r)) && !repeated[IX(r, q)] && st[q] != DONE -> repeated[IX(r, q)] = true; report(r, q) }
#else
#define REPEAT(r, q)
#endif
/* A READ into the blocks of a life ends: with the bytes, or, when the lease on
   the other side lapsed, with others, which its check finds out. */
#ifdef READBACK
#define LAND(r, q) \
    :: atomic { into[q] != NONE -> \
        settled[q] = settled[q] | (1 << r); \
        if \
        :: mem[MX(r, into[q])] = q + 1; if :: turn[q] == 0 -> filled[q] = filled[q] | (1 << r) :: else fi \
        :: mem[MX(r, into[q])] = 0 \
        fi; \
        into[q] = NONE }
#else
#define LAND(r, q)
#endif

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
#define ZERO_LATE(r, q) :: atomic { unzeroed[IX(r, q)] && (st[q] == DONE || blk[q] == NONE) -> unzeroed[IX(r, q)] = false; where = at[q]; zero(r, q); where = NONE }
#else
#define ZERO_LATE(r, q)
#endif
#ifdef M6
/* without a nonce the message is for whatever life has the id */
#if NQ > 2
#define DELIVER(r, d, q) :: atomic { said[SX(r, d, q)] -> handle(r, d, 0); handle(r, d, 1); handle(r, d, 2); where = NONE }
#else
#define DELIVER(r, d, q) :: atomic { said[SX(r, d, q)] -> handle(r, d, 0); handle(r, d, 1); where = NONE }
#endif
#else
#define DELIVER(r, d, q) :: atomic { said[SX(r, d, q)] && !BARE(d, q) && LIVE(r, q) -> handle(r, d, q); where = NONE }
#endif
#define EVENTS(r, q) \
    :: atomic { rec[IX(r, q)] == GRANTED -> expire(r, q); where = NONE } \
    DELIVER(r, 0, q) \
    DELIVER(r, 1, q) \
    DELIVER_BARE(r, 0, q) \
    DELIVER_BARE(r, 1, q) \
    KEEP(r, 0, q) \
    KEEP(r, 1, q) \
    REPEAT(r, q) \
    LAND(r, q) \
    RESURRECT(r, q) \
    ZERO_LATE(r, q)

/* After a restart: while a READ of the scheduler before is active, its block may
   be anybody's. */
#if defined(RESTARTS) && defined(READBACK) && !defined(XOLDREAD)
#if NQ > 2
#define MUST_REFUSE(r) (old[0] && into[0] != NONE || old[1] && into[1] != NONE || old[2] && into[2] != NONE)
#else
#define MUST_REFUSE(r) (old[0] && into[0] != NONE || old[1] && into[1] != NONE)
#endif
#endif

proctype Rank(byte r; chan work) {
    byte q, x, where = NONE;
    byte at[NQ] = NONE;    /* slots of the lives, as admitted */
#ifdef READBACK
    byte into[NQ] = NONE;  /* blocks that a READ writes to */
#endif
#ifdef RESTARTS
    byte i;
    bool met;              /* the new scheduler */
#endif
    bit t;
end:
    do
    :: atomic { work?ADMIT, q, x, t ->
#if defined(RESTARTS) && !defined(XRESTART)
        /* a plan of another scheduler: first end the lives of the one before */
        if
        :: restarted && !old[q] && !met ->
            met = true;
            do
            :: i < NQ -> if :: old[i] && LIVE(r, i) -> expire(r, i) :: else fi; i++
            :: else -> i = 0; break
            od
        :: else
        fi;
#endif
        if
#ifdef MUST_REFUSE
        :: !MUST_REFUSE(r) -> at[q] = x;
#else
        :: at[q] = x;
#endif
            rec[IX(r, q)] = ADMITTED;
            if :: x != NONE -> cell[CX(r, x)] = NONCE(q) :: else fi;
#ifdef XKEPT
            if
            :: x == NONE && kept[r] != 0 -> senders[IX(r, q)] = kept[r]; kept[r] = 0
            :: else
            fi
#endif
#if defined(REFUSES) || defined(MUST_REFUSE)
#ifdef MUST_REFUSE
        :: MUST_REFUSE(r) -> rec[IX(r, q)] = ENDED;
#else
        :: rec[IX(r, q)] = ENDED;
#endif
#ifndef XREFUSE
            report(r, q)
#endif
#endif
        fi;
        q = 0; x = 0; t = 0; where = NONE }
#ifdef READBACK
    :: atomic { work?READ, q, x, t ->
        if
        :: rec[IX(r, q)] != ENDED -> into[q] = x
        :: settled[q] = settled[q] | (1 << r)   /* refused, or its peer cannot be reached */
        fi;
        q = 0; x = 0; t = 0 }
#endif
    :: atomic { work?FILL, q, x, t ->
#ifdef RESTARTS
        /* the second property as far as a rank can see it */
        do
        :: i < NQ -> CHECK(2, i == q || !exported[i] || pblk[i] != x || !LIVE(r, i)); i++
        :: else -> i = 0; break
        od;
#endif
        mem[MX(r, x)] = q + 1;
        if :: t == turn[q] -> filled[q] = filled[q] | (1 << r) :: else fi;
        q = 0; x = 0; t = 0 }
    :: atomic { work?GRANT, q, x, t ->
        if
        :: rec[IX(r, q)] == ADMITTED ->
            rec[IX(r, q)] = GRANTED;
#ifdef XKEPT
            if :: ((SENDERS(r, q) & 1) + (SENDERS(r, q) >> 1)) >= READERS(r) -> ends(r, q) :: else fi
#endif
#ifdef XGRANT
        :: rec[IX(r, q)] == ENDED -> rec[IX(r, q)] = GRANTED
#endif
        :: else   /* a read-complete came first: dropped */
        fi;
        q = 0; x = 0; t = 0; where = NONE }
    :: atomic { work?ABORT, q, x, t ->
        if
#ifdef XBLIND
        :: LIVE(r, q) -> rec[IX(r, q)] = ENDED; lapsed[IX(r, q)] = true; report(r, q)
#else
        :: LIVE(r, q) -> expire(r, q)
#endif
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
#elif defined(OFFERED) || defined(OLD)
#define CHECKS(r) (READS(d, r) && !BARE(d, q))
#else
#define CHECKS(r) READS(d, r)
#endif
/* without a check a lapse goes unseen */
#ifdef CHECKED
#define WRONG(r) (wrong[r] && !BARE(d, q))
#else
#define WRONG(r) (wrong[r] && !(BARE(d, q) && lapsed[IX(r, q)]))
#endif
#ifdef OFFERED
#define READABLE(q) exported[q]
#else
#define READABLE(q) (exported[q] && pslot[q] != NONE)
#endif
/* with SEVERAL a reader reads one life after another */
#ifdef SEVERAL
#define IS_NEXT(i) (q == NONE || i > q)
#else
#define IS_NEXT(i) true
#endif
#if GEO == 3
#define IS_MINE(i) !given[i]
#define TAKE(i) q = i; given[i] = true
bool given[NQ];
#else
#define IS_MINE(i) true
#define TAKE(i) q = i
#endif
#ifdef XNZ
#define GOOD(r) (!CHECKS(r) || value[r] != 0)
#else
#define GOOD(r) (!CHECKS(r) || value[r] == NONCE(q))
#endif

/* reader d needs the lease of life q no more */
inline say(d, q) {
    if :: READS(d, 0) -> said[SX(0, d, q)] = true :: else fi;
    if :: READS(d, 1) -> said[SX(1, d, q)] = true :: else fi
}

inline forget() {
    seen[0] = 0; seen[1] = 0; wrong[0] = false; wrong[1] = false;
    looked[0] = false; looked[1] = false; value[0] = 0; value[1] = 0
}

proctype Reader(byte d) {
    byte q = NONE;
    byte seen[NR], value[NR];
    bool wrong[NR], looked[NR];
    bool again;
    byte zombie[NR] = NONE;
end_idle:
    if
    :: atomic { READABLE(0) && IS_NEXT(0) && IS_MINE(0) -> TAKE(0) }
    :: atomic { READABLE(1) && IS_NEXT(1) && IS_MINE(1) -> TAKE(1) }
#if NQ > 2
    :: atomic { READABLE(2) && IS_NEXT(2) && IS_MINE(2) -> TAKE(2) }
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
#ifdef GIVEUPS
    /* Given up, or failed: no READ was posted yet, or none is active any more. */
    :: atomic { ((seen[0] == 0 && seen[1] == 0) || BLOCKS_IN) ->
        if
        :: say(d, q); goto end_over
        :: goto end_over
#ifdef RETRIES
        :: !again -> again = true;
            forget()
#endif
        fi }
#endif
    :: atomic { BLOCKS_IN && (looked[0] || !CHECKS(0)) && (looked[1] || !CHECKS(1)) -> break }
    od;
    atomic {
        if
        :: GOOD(0) && GOOD(1) ->
            CHECK(1, !WRONG(0) && !WRONG(1));
#ifdef REACH
            assert(REACH != 1);
#endif
            say(d, q)
        :: else ->   /* lapsed: nothing is said */
            CHECK(5, (READS(d, 0) && lapsed[IX(0, q)]) || (READS(d, 1) && lapsed[IX(1, q)]));
#ifdef REACH
            assert(REACH != 2);
#endif
        fi;
#ifdef SEVERAL
        forget(); goto end_idle
#endif
    }
#ifdef XZOMBIE
    if
    :: atomic { zombie[0] != NONE && value[0] == NONCE(q) && value[1] == NONCE(q) ->
        wrong[0] = mem[MX(0, zombie[0])] != q + 1; zombie[0] = NONE; CHECK(1, !wrong[0]) }
    :: true
    fi
#endif
#ifdef GIVEUPS
end_over:
    skip
#endif
}

#ifdef RESTARTS
/* Another scheduler takes over. For it all blocks and slots are free. */
proctype Restart() {
    byte i;
end_idle:
    atomic {
        st[0] != UNBORN -> restarted = true;
        do
        :: i < NQ ->
            if
            :: st[i] != UNBORN ->
                old[i] = true; st[i] = DONE;
                if :: blk[i] != NONE -> busy[blk[i]] = false; blk[i] = NONE :: else fi;
                if :: slot[i] != NONE -> lent[slot[i]] = false; slot[i] = NONE :: else fi
            :: else
            fi;
            i++
        :: else -> i = 0; break
        od
    }
}
#endif

init {
    atomic {
        run Rank(0, work0); run Rank(1, work1);
        run Life(0); run Life(1);
#if NQ > 2
        run Life(2);
#endif
#ifdef RESTARTS
        run Restart();
#endif
        run Reader(0); run Reader(1)
    }
    /* when nothing else can happen */
end:
    timeout;
    CHECK(8, !busy[0] && !lent[0]);
#if NB > 1
    CHECK(8, !busy[1]);
#endif
#if NS > 1
    CHECK(8, !lent[1])
#endif
}
