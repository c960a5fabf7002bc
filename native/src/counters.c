/* Waiting for a number in shared memory to grow: spin, then yield, then sleep on a futex.
 *
 * Spinning reacts in tens of nanoseconds and is best while every rank has a core. With more ranks
 * than cores the awaited rank may need this core, so the waiter yields it (sched_yield). A long
 * wait should cost the others nothing, so the waiter then sleeps. A rank that was on this very core
 * when it last counted cannot go on while this one spins.
 */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "counters.h"

static inline void pause_a_moment(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

/* A futex has 32 bits: this is the low half of the counter, which every change changes. */
static uint32_t *futex_word(struct rr_counter *counter)
{
    uint32_t *halves = (uint32_t *)&counter->value;
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return halves + 1;
#else
    return halves;
#endif
}

/* As many as where ranks share all cores (ringreduce/transport/shm_ranks.py). */
enum { SPINS_SHARED = 20 };

static uint32_t own_core(void)
{
    return (uint32_t)(sched_getcpu() + 1);
}

/* Whether its writer needs this core to go on, as two ranks do that were woken by one process: the
 * system leaves them there for tenths of a second. */
static int shares_core(const struct rr_counter *counter)
{
    const uint32_t theirs = __atomic_load_n(&counter->core, __ATOMIC_RELAXED);
    return theirs != 0 && theirs == own_core();
}

static uint64_t load(const struct rr_counter *counter)
{
    return __atomic_load_n(&counter->value, __ATOMIC_ACQUIRE);
}

int rr_counter_has_reached(const struct rr_counter *counter, uint64_t value)
{
    return load(counter) >= value;
}

void rr_counter_wake(struct rr_counter *counter)
{
    syscall(SYS_futex, futex_word(counter), FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void rr_counter_publish(struct rr_counter *counter, uint64_t value)
{
    __atomic_store_n(&counter->core, own_core(), __ATOMIC_RELAXED);
    /* Sequentially consistent, as is the count of sleepers: either the sleeper sees the new value
     * before it sleeps, or this rank sees the sleeper. */
    __atomic_store_n(&counter->value, value, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&counter->sleepers, __ATOMIC_SEQ_CST) != 0)
        rr_counter_wake(counter);
}

int rr_counter_wait(struct rr_counter *counter, uint64_t value, uint32_t *spins, uint32_t *yields,
                    uint32_t sleep_ms)
{
    if (load(counter) < value && *spins > SPINS_SHARED && shares_core(counter))
        *spins = SPINS_SHARED;
    for (;;) {
        const uint64_t seen = load(counter);
        if (seen >= value)
            return RR_DONE;
        if (*spins > 0) {
            (*spins)--;
            pause_a_moment();
        } else if (*yields > 0) {
            (*yields)--;
            sched_yield();
        } else {
            break;
        }
    }
    __atomic_add_fetch(&counter->sleepers, 1, __ATOMIC_SEQ_CST);
    const uint64_t seen = __atomic_load_n(&counter->value, __ATOMIC_SEQ_CST);
    if (seen < value) {
        const struct timespec longest = {sleep_ms / 1000, (long)(sleep_ms % 1000) * 1000000};
        syscall(SYS_futex, futex_word(counter), FUTEX_WAIT, (uint32_t)seen, &longest, NULL, 0);
    }
    __atomic_sub_fetch(&counter->sleepers, 1, __ATOMIC_SEQ_CST);
    return load(counter) >= value ? RR_DONE : RR_WAITING;
}
