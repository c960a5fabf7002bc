/* What the handoff does with areas. */
#ifndef RR_AREA_H
#define RR_AREA_H

#include <stdbool.h>
#include <stdint.h>

#include "ringreduce.h"

struct rr_area {
    char *memory;
    uint32_t plans; /* that are registered with it */
    uint32_t uses;  /* a round that is under way, and results that are lent */
    bool is_spare;  /* it, and its memory, are freed when `uses` becomes 0 */
};

/* A spare area of zeros for one round, taken; NULL: there is no memory. */
rr_area *rr_area_spare(uint64_t nbytes);

/* A plan is registered with it (1), or no longer (-1). */
void rr_area_plan(rr_area *area, int by);

/* Take it for a round; false if it is in use. `rr_area_give_back` ends that. */
bool rr_area_take(rr_area *area);

/* Lend a result that lies in an area that is in use. */
void rr_area_lend(rr_area *area);

#endif
