/* Counters in shared memory, and how ranks of a host wait for them; see ringreduce.h. */
#ifndef RR_COUNTERS_H
#define RR_COUNTERS_H

#include <stdint.h>

#include "ringreduce.h"

#define RR_LINE 64

/* Grows; one thread writes `value`, others may sleep until it has grown. */
struct rr_counter {
    _Alignas(RR_LINE) uint64_t value;
    uint32_t core;                       /* 1 + the core that its writer was on; 0: unknown */
    _Alignas(RR_LINE) uint32_t sleepers; /* written by them */
};

/* Store a larger value and wake sleepers. */
void rr_counter_publish(struct rr_counter *counter, uint64_t value);

/* Whether the counter has reached `value`. */
int rr_counter_has_reached(const struct rr_counter *counter, uint64_t value);

/* Return RR_DONE once the counter has reached `value`, or RR_WAITING when the limits run out or a
 * signal comes before. `spins` and `yields` are what remains of the limits of the whole wait, and
 * are decreased. */
int rr_counter_wait(struct rr_counter *counter, uint64_t value, uint32_t *spins, uint32_t *yields,
                    uint32_t sleep_ms);

/* Wake sleepers although nothing has changed, since this rank has aborted. */
void rr_counter_wake(struct rr_counter *counter);

#endif
