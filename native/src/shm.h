/* The state of a rank's view of its host: for shm.c, which runs the steps of a call, and for the
 * files that do the work of a step. */
#ifndef RR_SHM_H
#define RR_SHM_H

#include <stdint.h>
#include <string.h>

#include "copy.h"
#include "segment.h"

/* The work of the next step. */
enum rr_stage {
    RR_IDLE,   /* no call is running */
    RR_MEET,   /* all have announced their calls: compare them, choose an algorithm */
    RR_LEND,   /* some but not all arrays are registered: stage all of them */
    RR_STAGED, /* segments go through staging memory */
    RR_LAST,   /* only the wait for the others is left */
};

struct rr_peer {
    struct rr_board *board;
    uint8_t *base;
    uint8_t *inbox;
    uint8_t *staging;
    uint8_t *heap;
    /* Of the running all-to-all, in bytes. */
    uint64_t outgoing; /* what it sends to others */
    uint64_t offset;   /* of our part in its array */
    uint64_t position; /* of our part in what it sends to others */
};

struct rr_shm {
    uint32_t index, size;
    uint64_t staging_bytes; /* of a half, equal in all segments */
    uint64_t heap_bytes;
    uint64_t step;     /* the last one that this rank has finished */
    uint64_t calls;    /* begun so far */
    uint64_t segments; /* staged so far; their parity chooses the half */
    uint64_t bytes_sent, bytes_received;
    uint32_t culprit;
    /* The running call. */
    enum rr_stage stage;
    uint64_t segment, last_segment; /* next one to copy in; the one after the last */
    uint64_t room;                  /* bytes of a segment */
    uint32_t itemsize;
    int is_far; /* whether no cache holds its arrays */
    struct rr_peer peers[];
};

static inline struct rr_announcement *rr_announced(const struct rr_shm *group, uint32_t rank)
{
    return &group->peers[rank].board->calls[group->calls & 1];
}

static inline int rr_is_registered(const struct rr_shm *group, uint32_t rank)
{
    return rr_announced(group, rank)->registered != 0;
}

/* First byte of the registered array of `rank`. */
static inline uint8_t *rr_registered_array(const struct rr_shm *group, uint32_t rank)
{
    const struct rr_announcement *of = rr_announced(group, rank);
    return group->peers[of->owner].heap + (of->registered - 1);
}

/* The half of the staging memory of `rank` that segment `number` of this call goes through. */
static inline uint8_t *rr_half(const struct rr_shm *group, uint32_t rank, uint64_t number)
{
    return group->peers[rank].staging + ((group->segments + number) & 1) * group->staging_bytes;
}

/* Copy into an array of the caller. */
static inline void rr_copy(const struct rr_shm *group, void *target, const void *source,
                           uint64_t bytes)
{
    if (group->is_far)
        rr_copy_past_cache(target, source, bytes);
    else
        rr_copy_near(target, source, bytes);
}

/* Cut `longest` bytes into segments of about equal length, so that the last one is worth its step,
 * and of at most `limit` bytes, a multiple of RR_LINE. */
void rr_cut_segments(struct rr_shm *group, uint64_t longest, uint64_t limit);

/* The work of a call. `begin` is what precedes the first wait for the others; our own announcement
 * already says whether our array is registered. `advance` is one step's work: RR_WAITING when a
 * wait for the others follows, RR_DONE at the end. */
void rr_chunks_begin(struct rr_shm *group, const rr_call *call, const uint8_t *data);
int rr_chunks_advance(struct rr_shm *group, const rr_call *call, uint8_t *data);
void rr_all_to_all_begin(struct rr_shm *group, const rr_call *call, const uint8_t *source);
/* Copy our own part, while the others arrive. */
void rr_all_to_all_keep(struct rr_shm *group, const rr_call *call, const uint8_t *source,
                        uint8_t *target);
int rr_all_to_all_advance(struct rr_shm *group, const rr_call *call, const uint8_t *source,
                          uint8_t *target);

/* Bytes of the array that `rank` passes to this call. */
uint64_t rr_chunks_array_bytes(const struct rr_shm *group, const rr_call *call);
uint64_t rr_all_to_all_array_bytes(const struct rr_shm *group, const rr_call *call, uint32_t rank);

#endif
