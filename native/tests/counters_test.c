/* How a thread waits for a counter whose writer was on the same core. */

#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <time.h>

#include "counters.h"

#include "check.h"

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(void)
{
    /* Stay where the counter is written. */
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET((size_t)sched_getcpu(), &here);
    CHECK(sched_setaffinity(0, sizeof here, &here) == 0);

    struct rr_counter counter = {0};
    rr_counter_publish(&counter, 1);
    uint32_t spins = UINT32_MAX, yields = 2;
    CHECK(rr_counter_wait(&counter, 1, &spins, &yields, 1) == RR_DONE);
    CHECK(spins == UINT32_MAX && yields == 2);
    /* So many spins would take a minute. */
    const double began = seconds();
    CHECK(rr_counter_wait(&counter, 2, &spins, &yields, 1) == RR_WAITING);
    CHECK(spins == 0 && yields == 0 && seconds() - began < 5);
    return 0;
}
