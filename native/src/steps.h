/* Steps: how ranks of a host wait for each other; see ringreduce.h. */
#ifndef RR_STEPS_H
#define RR_STEPS_H

#include <stdint.h>

#include "segment.h"

/* Say that this rank, whose board it is, has finished step number `step`; wake who sleeps. */
void rr_step_publish(struct rr_board *board, uint64_t step);

/* Whether the owner of `board` has finished step number `step`. */
int rr_step_is_done(const struct rr_board *board, uint64_t step);

/* Return RR_DONE once the owner of `board` has finished step `step`, RR_WAITING when limits
 * has run out before that, or a signal came. `spins` and `yields` are what is left of the
 * limits of the whole wait, and counted down. */
int rr_step_wait(struct rr_board *board, uint64_t step, uint32_t *spins, uint32_t *yields,
                 uint32_t sleep_ms);

/* Wake whoever sleeps on `board`, for news. */
void rr_step_wake(struct rr_board *board);

#endif
