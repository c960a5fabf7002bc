/* The collectives of the ranks of one host, on the segments drawn in ringreduce.h.
 *
 * A call is a sequence of steps, each some work and then a wait for all ranks. `rr_shm_run` may
 * return in the middle (a rank is late, a signal came), and continues there when called again.
 * So Python decides about deadlines, signals and lost peers. struct rr_shm holds the state.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "counters.h"
#include "reduce.h"
#include "shm.h"

int rr_shm_new(rr_shm **made, uint32_t index, uint32_t size, void *const *segments)
{
    if (size == 0 || size > RR_SHM_SIZE_MAX || index >= size)
        return -EINVAL;
    rr_shm *group = calloc(1, sizeof *group + size * sizeof group->peers[0]);
    if (group == NULL)
        return -ENOMEM;
    group->index = index;
    group->size = size;
    for (uint32_t rank = 0; rank < size; rank++) {
        const struct rr_head *head = segments[rank];
        struct rr_peer *peer = &group->peers[rank];
        peer->base = segments[rank];
        peer->board = (struct rr_board *)(peer->base + RR_BOARD_OFFSET);
        peer->inbox = peer->base + RR_INBOX_OFFSET;
        peer->staging = peer->base + head->staging;
        peer->heap = peer->base + head->heap;
        if (rank == 0) {
            group->staging_bytes = head->staging_bytes;
            group->heap_bytes = head->heap_bytes;
        }
        /* Offsets are computed once for all. */
        if (head->staging_bytes != group->staging_bytes || head->heap_bytes != group->heap_bytes) {
            free(group);
            return -EPROTO;
        }
    }
    *made = group;
    return RR_DONE;
}

void rr_shm_free(rr_shm *group)
{
    free(group);
}

/* ---- The sequence of steps ---- */

static void publish(struct rr_shm *group)
{
    rr_counter_publish(&group->peers[group->index].board->step, ++group->step);
}

void rr_cut_segments(struct rr_shm *group, uint64_t longest, uint64_t limit)
{
    const uint64_t number = (longest + limit - 1) / limit;
    const uint64_t even = number == 0 ? RR_LINE : (longest + number - 1) / number;
    group->room = (even + RR_LINE - 1) / RR_LINE * RR_LINE;
    group->last_segment = number == 0 ? 0 : (longest + group->room - 1) / group->room;
    group->segment = 0;
}

/* Bytes of the array that `rank` passes. */
static uint64_t array_bytes(const struct rr_shm *group, const rr_call *call, uint32_t rank)
{
    return call->action == RR_ALL_TO_ALL ? rr_all_to_all_array_bytes(group, call, rank)
                                         : rr_chunks_array_bytes(group, call);
}

/* Note in which heap the array lies, and where; 0 if no heap contains all of it. */
static void register_array(const struct rr_shm *group, const rr_call *call, const uint8_t *array,
                           struct rr_announcement *own)
{
    const uint64_t bytes = array_bytes(group, call, group->index);
    own->registered = 0;
    for (uint32_t rank = 0; rank < group->size; rank++) {
        const uint8_t *heap = group->peers[rank].heap;
        if (array < heap || array >= heap + group->heap_bytes)
            continue;
        if (bytes <= group->heap_bytes - (uint64_t)(array - heap))
            own->registered = (uint64_t)(array - heap) + 1;
        own->owner = rank;
        return;
    }
}

static void begin(struct rr_shm *group, const rr_call *call, const uint8_t *source, uint8_t *target)
{
    group->itemsize = rr_itemsize(call->dtype);
    struct rr_announcement *own = rr_announced(group, group->index);
    memcpy(own->header, call->header, sizeof own->header);
    own->header[3] = group->calls;
    register_array(group, call, source, own);
    if (call->action == RR_ALL_TO_ALL)
        rr_all_to_all_begin(group, call, source);
    else
        rr_chunks_begin(group, call, source);
    group->stage = RR_MEET;
    publish(group);
    if (call->action == RR_ALL_TO_ALL)
        rr_all_to_all_keep(group, call, source, target);
}

/* Whether all ranks are in the same call with the same arguments. */
static int compare(struct rr_shm *group, const rr_call *call)
{
    const uint64_t high_half = ~(uint64_t)0 << 32; /* word 2: the rank, which differs */
    for (uint32_t rank = 0; rank < group->size; rank++) {
        const struct rr_announcement *theirs = rr_announced(group, rank);
        for (int word = 0; word < 8; word++) {
            const uint64_t ours = word == 3 ? group->calls : call->header[word];
            const uint64_t differing = theirs->header[word] ^ ours;
            if ((word == 2 ? differing & ~high_half : differing) != 0) {
                group->culprit = rank;
                return RR_MISMATCH;
            }
        }
        const uint64_t bytes = array_bytes(group, call, rank);
        if (theirs->registered != 0 &&
            (bytes > group->heap_bytes || theirs->registered - 1 > group->heap_bytes - bytes ||
             theirs->owner >= group->size)) {
            group->culprit = rank;
            return RR_BROKEN;
        }
    }
    return RR_DONE;
}

static int wait_for_all(struct rr_shm *group, const rr_wait_limits *limits)
{
    uint32_t spins = limits->spins, yields = limits->yields;
    for (uint32_t other = 1; other < group->size; other++) {
        const uint32_t rank = (group->index + other) % group->size;
        struct rr_board *board = group->peers[rank].board;
        if (rr_counter_wait(&board->step, group->step, &spins, &yields, limits->sleep_ms) ==
            RR_DONE)
            continue;
        int status = RR_WAITING;
        group->culprit = rank;
        for (uint32_t aborted = 0; status == RR_WAITING && aborted < group->size; aborted++)
            if (__atomic_load_n(&group->peers[aborted].board->has_aborted, __ATOMIC_ACQUIRE)) {
                group->culprit = aborted;
                status = RR_ABORTED;
            }
        /* One that has aborted in a later call has passed this one, so all have arrived: they may
         * have since this rank looked. */
        if (status == RR_ABORTED && rr_counter_has_reached(&board->step, group->step))
            continue;
        return status;
    }
    return RR_DONE;
}

/* The next step's work: RR_WAITING when a wait for the others follows. */
static int advance(struct rr_shm *group, const rr_call *call, const uint8_t *source,
                   uint8_t *target)
{
    const int status = group->stage == RR_MEET ? compare(group, call) : RR_DONE;
    if (status != RR_DONE)
        return status;
    return call->action == RR_ALL_TO_ALL ? rr_all_to_all_advance(group, call, source, target)
                                         : rr_chunks_advance(group, call, target);
}

int rr_shm_exchange(rr_shm *group, const rr_call *call, const void *source, void *target,
                    const rr_wait_limits *limits)
{
    if (group->stage == RR_IDLE)
        begin(group, call, source, target);
    for (;;) {
        int status = wait_for_all(group, limits);
        if (status != RR_DONE)
            return status;
        status = advance(group, call, source, target);
        if (status == RR_WAITING) {
            publish(group);
            continue;
        }
        if (status == RR_DONE) {
            group->stage = RR_IDLE;
            group->calls++;
        }
        return status;
    }
}

int rr_shm_run(rr_shm *group, const rr_call *call, void *data, const rr_wait_limits *limits)
{
    return rr_shm_exchange(group, call, data, data, limits);
}

/* ---- Errors and facts, for Python ---- */

void rr_shm_abort(rr_shm *group)
{
    struct rr_board *board = group->peers[group->index].board;
    __atomic_store_n(&board->has_aborted, 1, __ATOMIC_RELEASE);
    rr_counter_wake(&board->step);
}

int rr_shm_has_arrived(const rr_shm *group, uint32_t peer)
{
    return peer < group->size &&
           rr_counter_has_reached(&group->peers[peer].board->step, group->step);
}

void rr_shm_look(const rr_shm *group, rr_shm_facts *facts)
{
    memset(facts, 0, sizeof *facts);
    facts->sequence = group->calls;
    facts->peer = group->culprit;
    facts->step = (uint32_t)group->segment;
    facts->steps = (uint32_t)group->last_segment;
    memcpy(facts->theirs, rr_announced(group, group->culprit)->header, sizeof facts->theirs);
    for (uint32_t rank = 0; rank < group->size; rank++)
        facts->progress += __atomic_load_n(&group->peers[rank].board->step.value, __ATOMIC_RELAXED);
    facts->bytes_sent = group->bytes_sent;
    facts->bytes_received = group->bytes_received;
}
