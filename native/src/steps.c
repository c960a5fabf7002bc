/* Waiting for a number in shared memory to grow: spin, then yield, then sleep on a futex.
 *
 * Spinning reacts in tens of nanoseconds and is best while every rank has a core. With more ranks
 * than cores the awaited rank may need this core, so the waiter yields it (sched_yield). A long
 * wait should cost the others nothing, so the waiter then sleeps.
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

#include "steps.h"

static inline void pause_a_moment(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

/* A futex has 32 bits: this is the low half of the step counter, which every step changes. */
static uint32_t *futex_word(struct rr_board *board)
{
    uint32_t *halves = (uint32_t *)&board->step;
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return halves + 1;
#else
    return halves;
#endif
}

static uint64_t load(const struct rr_board *board)
{
    return __atomic_load_n(&board->step, __ATOMIC_ACQUIRE);
}

int rr_step_is_done(const struct rr_board *board, uint64_t step)
{
    return load(board) >= step;
}

void rr_step_wake(struct rr_board *board)
{
    syscall(SYS_futex, futex_word(board), FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void rr_step_publish(struct rr_board *board, uint64_t step)
{
    /* Sequentially consistent, as is the count of sleepers: either the sleeper sees the new step
     * before it sleeps, or this rank sees the sleeper. */
    __atomic_store_n(&board->step, step, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&board->sleepers, __ATOMIC_SEQ_CST) != 0)
        rr_step_wake(board);
}

int rr_step_wait(struct rr_board *board, uint64_t step, uint32_t *spins, uint32_t *yields,
                 uint32_t sleep_ms)
{
    for (;;) {
        const uint64_t seen = load(board);
        if (seen >= step)
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
    __atomic_add_fetch(&board->sleepers, 1, __ATOMIC_SEQ_CST);
    const uint64_t seen = __atomic_load_n(&board->step, __ATOMIC_SEQ_CST);
    if (seen < step) {
        const struct timespec longest = {sleep_ms / 1000, (long)(sleep_ms % 1000) * 1000000};
        syscall(SYS_futex, futex_word(board), FUTEX_WAIT, (uint32_t)seen, &longest, NULL, 0);
    }
    __atomic_sub_fetch(&board->sleepers, 1, __ATOMIC_SEQ_CST);
    return load(board) >= step ? RR_DONE : RR_WAITING;
}
