/* All-reduce, reduce-scatter and all-gather of the ranks of one host, as ringreduce.h describes. */

#include <string.h>

#include "reduce.h"
#include "shm.h"

static uint64_t chunk_bytes(const struct rr_shm *group, const rr_call *call, uint32_t rank)
{
    return (call->bounds[rank + 1] - call->bounds[rank]) * group->itemsize;
}

static uint64_t total_bytes(const struct rr_shm *group, const rr_call *call)
{
    return call->bounds[group->size] * group->itemsize;
}

static int is_reducing(const rr_call *call)
{
    return call->action != RR_ALL_GATHER;
}

static uint8_t *inbox_of(const struct rr_shm *group, uint32_t rank)
{
    return group->peers[rank].inbox + (group->calls & 1) * RR_INBOX_BYTES;
}

/* Length of segment `number` of a chunk of `bytes`, 0 past its end; its offset in `at`. */
static uint64_t piece(const struct rr_shm *group, uint64_t bytes, uint64_t number, uint64_t *at)
{
    *at = number * group->room;
    if (*at >= bytes)
        return 0;
    return bytes - *at < group->room ? bytes - *at : group->room;
}

/* Where `owner` stages a segment for `reader`. In an all-gather the whole half is one segment, for
 * all ranks. In an all-reduce the reader puts the result there: it has the line in its cache, and
 * `owner` alone needs it. With a place of its own for the result, two ranks took twice the time. */
static uint8_t *staged(const struct rr_shm *group, const rr_call *call, uint32_t owner,
                       uint32_t reader, uint64_t number)
{
    return rr_half(group, owner, number) + (is_reducing(call) ? reader : 0) * group->room;
}

/* Copy segment `number` of what others need of this array into our staging memory. */
static void copy_in(struct rr_shm *group, const rr_call *call, const uint8_t *data, uint64_t number)
{
    const uint32_t own = group->index;
    for (uint32_t rank = 0; rank < group->size; rank++) {
        /* In a reduction others need their own chunks; in an all-gather, ours. */
        if ((rank == own) == is_reducing(call))
            continue;
        uint64_t at;
        const uint64_t bytes = piece(group, chunk_bytes(group, call, rank), number, &at);
        if (bytes > 0)
            rr_copy_near(staged(group, call, own, rank, number),
                         data + call->bounds[rank] * group->itemsize + at, bytes);
        group->bytes_sent += bytes;
    }
}

/* Add up segment `number` of our own chunk, into the array and, if others need it, where they have
 * staged it. */
static void reduce_own(struct rr_shm *group, const rr_call *call, uint8_t *data, uint64_t number)
{
    const uint32_t own = group->index;
    uint64_t at;
    const uint64_t bytes = piece(group, chunk_bytes(group, call, own), number, &at);
    if (bytes == 0)
        return;
    uint8_t *mine = data + call->bounds[own] * group->itemsize + at;
    void *parts[RR_SHM_SIZE_MAX];
    for (uint32_t rank = 0; rank < group->size; rank++)
        parts[rank] = rank == own ? mine : staged(group, call, rank, own, number);
    const int is_wanted = call->action == RR_ALL_REDUCE;
    rr_reduce(call->dtype, call->op, call->divisor, bytes / group->itemsize, group->size,
              (const void *const *)parts, is_wanted ? group->size : 1,
              is_wanted ? parts : &parts[own]);
    group->bytes_received += (group->size - 1) * bytes;
    if (is_wanted)
        group->bytes_sent += (group->size - 1) * bytes;
}

/* Copy segment `number` of the others' chunks into the array, from where they have put it. */
static void copy_out(struct rr_shm *group, const rr_call *call, uint8_t *data, uint64_t number)
{
    for (uint32_t other = 1; other < group->size; other++) {
        /* Each rank begins with the next rank, so that not all read from the same one. */
        const uint32_t rank = (group->index + other) % group->size;
        uint64_t at;
        const uint64_t bytes = piece(group, chunk_bytes(group, call, rank), number, &at);
        if (bytes > 0)
            rr_copy(group, data + call->bounds[rank] * group->itemsize + at,
                    staged(group, call, is_reducing(call) ? group->index : rank, rank, number),
                    bytes);
        group->bytes_received += bytes;
    }
}

/* All arrays are registered: copy the others' chunks out of theirs, unless ours is the same. */
static void gather_in_place(struct rr_shm *group, const rr_call *call, uint8_t *data)
{
    for (uint32_t other = 1; other < group->size; other++) {
        const uint32_t rank = (group->index + other) % group->size;
        const uint64_t at = call->bounds[rank] * group->itemsize;
        const uint64_t bytes = chunk_bytes(group, call, rank);
        const uint8_t *theirs = rr_registered_array(group, rank);
        if (bytes > 0 && theirs != data)
            rr_copy(group, data + at, theirs + at, bytes);
        group->bytes_received += bytes;
        group->bytes_sent += chunk_bytes(group, call, group->index);
    }
}

/* All arrays are registered: add up our own chunk and write it into all of them. */
static void reduce_in_place(struct rr_shm *group, const rr_call *call)
{
    const uint32_t own = group->index;
    const uint64_t bytes = chunk_bytes(group, call, own);
    void *arrays[RR_SHM_SIZE_MAX];
    for (uint32_t rank = 0; rank < group->size; rank++)
        arrays[rank] = rr_registered_array(group, rank) + call->bounds[own] * group->itemsize;
    void *const *targets = call->action == RR_ALL_REDUCE ? arrays : &arrays[own];
    rr_reduce(call->dtype, call->op, call->divisor, bytes / group->itemsize, group->size,
              (const void *const *)arrays, call->action == RR_ALL_REDUCE ? group->size : 1,
              targets);
    group->bytes_received += (group->size - 1) * bytes;
    if (call->action == RR_ALL_REDUCE)
        group->bytes_sent += (group->size - 1) * bytes;
}

/* Add up the whole messages in all inboxes. */
static void reduce_inboxes(struct rr_shm *group, const rr_call *call, uint8_t *data)
{
    const void *sources[RR_SHM_SIZE_MAX];
    for (uint32_t rank = 0; rank < group->size; rank++)
        sources[rank] = inbox_of(group, rank);
    void *target = data;
    rr_reduce(call->dtype, call->op, call->divisor, call->bounds[group->size], group->size, sources,
              1, &target);
    group->bytes_sent += total_bytes(group, call);
    group->bytes_received += (group->size - 1) * total_bytes(group, call);
}

static int fits_inbox(const struct rr_shm *group, const rr_call *call)
{
    return call->action == RR_ALL_REDUCE && total_bytes(group, call) <= RR_INBOX_BYTES;
}

/* ---- The sequence of steps ---- */

uint64_t rr_chunks_array_bytes(const struct rr_shm *group, const rr_call *call)
{
    return total_bytes(group, call);
}

void rr_chunks_begin(struct rr_shm *group, const rr_call *call, const uint8_t *data)
{
    if (fits_inbox(group, call)) {
        group->last_segment = group->segment = 0; /* clear those of the previous call */
        memcpy(inbox_of(group, group->index), data, total_bytes(group, call));
        return;
    }
    /* A reduction has just read what it writes. */
    group->is_far = !is_reducing(call) && group->size * total_bytes(group, call) >= RR_FAR_BYTES;
    uint64_t longest = 0;
    for (uint32_t rank = 0; rank < group->size; rank++)
        if (chunk_bytes(group, call, rank) > longest)
            longest = chunk_bytes(group, call, rank);
    const uint64_t slots = is_reducing(call) ? group->size : 1;
    rr_cut_segments(group, longest, group->staging_bytes / slots / RR_LINE * RR_LINE);
    if (!rr_is_registered(group, group->index) && group->last_segment > 0)
        copy_in(group, call, data, 0);
}

/* The work of step `segment` of a staged call; RR_DONE after the last, else RR_WAITING. */
static int advance_staged(struct rr_shm *group, const rr_call *call, uint8_t *data)
{
    const uint64_t now = ++group->segment, end = group->last_segment;
    if (is_reducing(call)) {
        if (call->action == RR_ALL_REDUCE && now >= 2)
            copy_out(group, call, data, now - 2);
        if (now < end)
            copy_in(group, call, data, now);
        if (now - 1 < end)
            reduce_own(group, call, data, now - 1);
    } else {
        if (now < end)
            copy_in(group, call, data, now);
        copy_out(group, call, data, now - 1);
    }
    if (now < end + (call->action == RR_ALL_REDUCE))
        return RR_WAITING;
    group->segments += end;
    return RR_DONE;
}

/* Headers are equal: choose the algorithm, and do the work of its first step. */
static int advance_from_meeting(struct rr_shm *group, const rr_call *call, uint8_t *data)
{
    if (fits_inbox(group, call)) {
        reduce_inboxes(group, call, data);
        return RR_DONE;
    }
    uint32_t registered_arrays = 0;
    for (uint32_t rank = 0; rank < group->size; rank++)
        registered_arrays += (uint32_t)rr_is_registered(group, rank);
    if (group->last_segment == 0)
        return RR_DONE;
    if (registered_arrays == group->size) {
        if (is_reducing(call))
            reduce_in_place(group, call);
        else
            gather_in_place(group, call, data);
        group->stage = RR_LAST;
    } else if (registered_arrays > 0) {
        if (rr_is_registered(group, group->index))
            copy_in(group, call, data, 0);
        group->stage = RR_LEND;
    } else {
        group->stage = RR_STAGED;
        return advance_staged(group, call, data);
    }
    return RR_WAITING;
}

int rr_chunks_advance(struct rr_shm *group, const rr_call *call, uint8_t *data)
{
    switch (group->stage) {
    case RR_MEET: return advance_from_meeting(group, call, data);
    case RR_LEND: group->stage = RR_STAGED; return advance_staged(group, call, data);
    case RR_STAGED: return advance_staged(group, call, data);
    default: return RR_DONE;
    }
}
