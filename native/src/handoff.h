/* What handoff.c and delivery.c share: the structures behind a handoff, and its one lock. */
#ifndef RR_HANDOFF_H
#define RR_HANDOFF_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "ringreduce.h"

enum state { EMPTY, PACKING, PACKED, REDUCING, REDUCED, UNPACKING, SPENT };

struct entry {
    struct entry *next;
    rr_item item;
};

struct bucket {
    enum state state;
    struct entry entry; /* in the queue, or not used */
    int code;           /* of this round: RR_DONE, or RR_HANDOFF_REFUSED */
    char *why;          /* then its text; NULL: there was no memory for it */
    char *memory;
    uint64_t nbytes;
    bool in_place; /* `memory` is whoever's started it, in this round */
    uint32_t slot_count, result_count;
    rr_slot *slots, *results; /* `results` is `slots` where they are the same */
};

struct plan {
    uint32_t queued; /* buckets of this round that have been put in the queue */
    uint32_t spent;  /* buckets of this round that have been waited for */
    bool running;    /* a round is in flight */
    uint32_t inside; /* threads in start or wait of one of these buckets, and waiters */
    uint32_t bucket_count;
    struct bucket buckets[];
};

struct rr_handoff {
    pthread_cond_t ready;        /* the engine waits for this */
    pthread_cond_t changed;      /* everybody else does */
    struct entry *first, **last; /* those of jobs are malloc's, those of buckets their own */
    struct bucket *taken;        /* of the item that the engine has; NULL for a job */
    bool borrows;                /* that item's memory is XLA's; `taken` goes first in a close */
    bool busy;                   /* the engine has an item */
    bool complaint;  /* the engine is to be told that a bucket was started out of turn */
    int over;        /* 0, RR_HANDOFF_FAILED or RR_HANDOFF_CLOSED */
    uint32_t inside; /* threads in start or wait, and waiters */
    uint64_t waited_ns;
    struct waiter *waiters; /* those who asked to be told (delivery.c), in that order */
    uint32_t pending;       /* how many of them there are, */
    uint64_t pending_since; /* and since when there has been any */
    bool has_thread;        /* `delivery` was started, and not joined */
    pthread_t delivery;
    char why[RR_WHY_BYTES];
};

/* Guards everything above, of all handoffs. */
extern pthread_mutex_t rr_handoff_lock;

/* A bucket that somebody has come to. */
struct visit {
    rr_handoff *owner;
    struct plan *plan;
    struct bucket *bucket;
};

uint64_t rr_now_ns(void);

/* Return once no engine of this process reads or writes, or will, the memory of a bucket that is
 * reduced in place. Before whoever owns that is told of a failure: he may free it then. */
void rr_handoff_let_go(void);

/* All under the lock, after a visit has begun. */

/* Whether the engine has still to reduce it. */
bool rr_bucket_is_awaited(const struct bucket *bucket);

/* Unpack a bucket that is awaited no more, and end the visit; lets go of the lock while bytes are
 * copied. Returns the code, with its text in `why`. */
int rr_bucket_settle(struct visit *visit, const rr_part *parts, char *why);

/* delivery.c, under the lock: have a thread settle the visit and tell, once the bucket is awaited
 * no more. -ENOMEM or -EAGAIN: it cannot, and the visit goes on. */
int rr_delivery_add(const struct visit *visit, const rr_part *parts, uint32_t part_count,
                    rr_delivered *tell, void *data);

/* Without the lock, after the handoff was closed: the thread has ended after the return. */
void rr_delivery_join(rr_handoff *handoff);

#endif
