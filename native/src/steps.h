/* Steps: how ranks of a host wait for each other; see ringreduce.h. */
#ifndef RR_STEPS_H
#define RR_STEPS_H

#include <stdint.h>

#include "segment.h"

/* Publish on this rank's own `board` that it has finished step `step`, and wake sleepers. */
void rr_step_publish(struct rr_board *board, uint64_t step);

/* Whether the owner of `board` has finished step `step`. */
int rr_step_is_done(const struct rr_board *board, uint64_t step);

/* Return RR_DONE once the owner of `board` has finished step `step`, or RR_WAITING when the limits
 * run out or a signal comes before. `spins` and `yields` are what remains of the limits of the
 * whole wait, and are decreased. */
int rr_step_wait(struct rr_board *board, uint64_t step, uint32_t *spins, uint32_t *yields,
                 uint32_t sleep_ms);

/* Wake the ranks that sleep on `board`, since this rank has aborted. */
void rr_step_wake(struct rr_board *board);

#endif
