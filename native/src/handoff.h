/* What handoff.c and delivery.c share: the structures behind a handoff, and its one lock. */
#ifndef RR_HANDOFF_H
#define RR_HANDOFF_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "area.h"
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
    char *why;          /* text of RR_HANDOFF_REFUSED; NULL: there was no memory for it */
    rr_area **areas;
    rr_area *area; /* that this round has taken; NULL: none, or in place */
    char *memory;  /* of `area`, or of the part that is reduced in place */
    uint64_t nbytes;
    bool in_place;
    double begun, packed, taken; /* when it was, in this round */
    uint64_t number;             /* of the call that has reduced it, in this round */
    uint32_t area_count, slot_count, result_count;
    rr_slot *slots, *results; /* the same pointer if they are equal */
};

struct plan {
    uint32_t queued; /* buckets of this round that were appended to the queue */
    uint32_t spent;  /* buckets of this round that have been waited for */
    bool running;    /* a round is in flight */
    uint32_t inside; /* threads in start or wait of one of these buckets, and waiters */
    uint32_t bucket_count;
    struct bucket buckets[];
};

struct rr_handoff {
    pthread_cond_t ready;        /* the engine waits for this */
    pthread_cond_t changed;      /* all other threads wait for this */
    struct entry *first, **last; /* a job's entry is malloc's, a bucket's is in the bucket */
    struct bucket *taken;        /* of the item that the engine has; NULL for a job */
    bool borrows;                /* its memory is XLA's; stays true when close clears `taken` */
    bool busy;                   /* the engine has an item */
    bool complaint;              /* a bucket was started twice; the engine does not know yet */
    int over;                    /* 0, RR_HANDOFF_FAILED or RR_HANDOFF_CLOSED */
    uint32_t inside;             /* threads in start or wait, and waiters */
    rr_events *events;           /* NULL: nothing is recorded */
    struct waiter *waiters;      /* asynchronous waits (delivery.c), in order */
    uint32_t pending;            /* their number, and that of threads that wait for a bucket */
    double pending_since;        /* when it last became more than 0 */
    bool has_thread;             /* `delivery` is started and not joined */
    pthread_t delivery;
    char why[RR_WHY_BYTES];
};

/* Guards everything above, of all handoffs. */
extern pthread_mutex_t rr_handoff_lock;

/* A call of start or wait for one bucket. */
struct visit {
    rr_handoff *owner;
    struct plan *plan;
    struct bucket *bucket;
};

/* Return once no engine of this process uses, or will use, the memory of a bucket that is reduced
 * in place. Call it before reporting a failure to XLA, which may then free that memory. */
void rr_handoff_let_go(void);

/* The following need the lock, and a visit that has begun. */

/* Whether the engine still has to reduce it. */
bool rr_bucket_is_awaited(const struct bucket *bucket);

/* A wait for a bucket begins, and ends: times in which several wait at once count once. */
void rr_handoff_blocks(rr_handoff *owner);
void rr_handoff_unblocks(rr_handoff *owner, const struct bucket *bucket);

/* Record what has happened to a bucket from `began` to `ended`. */
void rr_bucket_record(rr_handoff *owner, const struct bucket *bucket, uint16_t kind, double began,
                      double ended);

/* Unpack a bucket that is no longer awaited, and end the visit; releases the lock while copying.
 * Parts without `data` are lent by `lender`. Returns the code, with its text in `why`. */
int rr_bucket_settle(struct visit *visit, rr_part *parts, rr_area **lender, char *why);

/* In delivery.c; needs the lock. Have the delivery thread settle the visit and call `notify`, once
 * the bucket is no longer awaited. -ENOMEM or -EAGAIN: not possible, and the visit goes on. */
int rr_delivery_add(const struct visit *visit, const rr_part *parts, uint32_t part_count,
                    rr_delivered *notify, void *data);

/* Join the delivery thread, without the lock, after the handoff was closed. */
void rr_delivery_join(rr_handoff *handoff);

#endif
