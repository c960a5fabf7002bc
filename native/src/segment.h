/* The layout of a segment, as drawn in ringreduce.h; for segment.c, shm.c and pairs.c. */
#ifndef RR_SEGMENT_H
#define RR_SEGMENT_H

#include <stdint.h>

#include "counters.h"
#include "ringreduce.h"

/* Written once by the owner, checked by every process that maps the segment. */
struct rr_head {
    uint64_t magic;
    uint32_t abi;
    uint32_t unused;
    uint64_t bytes;         /* of the whole segment */
    uint64_t staging;       /* offset of the first half */
    uint64_t staging_bytes; /* of each half */
    uint64_t heap;          /* offset */
    uint64_t heap_bytes;
};

/* A call as its rank announces it. */
struct rr_announcement {
    uint64_t header[8];
    uint64_t registered; /* 1 + offset of its array in a heap; 0: it is in none */
    uint64_t owner;      /* of that heap */
    uint64_t unused[6];
};

struct rr_board {
    struct rr_counter step;
    _Alignas(RR_LINE) struct rr_announcement calls[2];
    _Alignas(RR_LINE) uint32_t has_aborted;
    struct rr_counter opened;           /* channels of this rank to others so far */
    uint64_t channels[RR_SHM_SIZE_MAX]; /* 1 + offset in the heap of the channel to each rank */
};

enum {
    RR_BOARD_OFFSET = 4096,
    RR_INBOX_OFFSET = 65536,
    RR_STAGING_OFFSET = RR_INBOX_OFFSET + 2 * RR_INBOX_BYTES,
};
_Static_assert(RR_BOARD_OFFSET + sizeof(struct rr_board) <= RR_INBOX_OFFSET, "board meets inbox");

#endif
