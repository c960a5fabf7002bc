/* What the handoff does with areas. */
#ifndef RR_AREA_H
#define RR_AREA_H

#include <stdbool.h>
#include <stdint.h>

#include "ringreduce.h"

/* What a rank says of an area that the ranks of a host share, in that memory. */
struct mark {
    _Alignas(64) uint32_t lent; /* results that are lent there */
    uint32_t holds;             /* whether the rank has the area */
};

struct rr_area {
    char *memory;
    struct mark *marks; /* of all ranks that share it; NULL: it is this process's */
    uint32_t ranks, rank;
    uint32_t plans; /* that are registered with it */
    uint32_t uses;  /* a round that is under way, and results that are lent */
    bool is_spare;  /* it, and its memory, are freed when `uses` becomes 0 */
};

/* A spare area of zeros for one round, taken; NULL: there is no memory. */
rr_area *rr_area_spare(uint64_t nbytes);

/* A plan is registered with it (1), or no longer (-1). */
void rr_area_plan(rr_area *area, int by);

/* Take it for a round; false while it is in use, or a rank that shares it has results of an earlier
 * round in it. Those only become fewer until this round's are lent, so a rank that finds none may
 * write, whatever another found before. `rr_area_leave` ends the round. */
bool rr_area_take(rr_area *area);
void rr_area_leave(rr_area *area);

/* Lend a result that lies in an area that is in use. */
void rr_area_lend(rr_area *area);

#endif
