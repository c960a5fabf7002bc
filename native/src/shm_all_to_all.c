/* All-to-all of the ranks of one host: every rank copies its parts out of the others' memory.
 *
 * What a rank sends to others is its array without its own part, beginning behind that part and
 * going on at the start: so all ranks send to different ones at any time. Registered arrays are
 * read where they are. The others go through staging memory, a half at a time, while the receivers
 * copy the previous half out.
 */

#include <string.h>

#include "shm.h"

static uint64_t part_bytes(const struct rr_shm *group, const rr_call *call, uint32_t sender,
                           uint32_t receiver)
{
    return call->bounds[(uint64_t)sender * group->size + receiver] * group->itemsize;
}

/* Bytes of the parts of `sender` for the ranks before `end`. */
static uint64_t bytes_before(const struct rr_shm *group, const rr_call *call, uint32_t sender,
                             uint32_t end)
{
    uint64_t bytes = 0;
    for (uint32_t receiver = 0; receiver < end; receiver++)
        bytes += part_bytes(group, call, sender, receiver);
    return bytes;
}

uint64_t rr_all_to_all_array_bytes(const struct rr_shm *group, const rr_call *call, uint32_t rank)
{
    return bytes_before(group, call, rank, group->size);
}

/* Copy segment `number` of what we send to others into our staging memory. */
static void copy_in(struct rr_shm *group, const rr_call *call, const uint8_t *source,
                    uint64_t number)
{
    const uint32_t own = group->index;
    const uint64_t outgoing = group->peers[own].outgoing, start = number * group->room;
    if (start >= outgoing)
        return;
    const uint64_t bytes = outgoing - start < group->room ? outgoing - start : group->room;
    const uint64_t before = group->peers[own].offset; /* of our own part */
    const uint64_t behind = outgoing - before;        /* bytes behind it, sent first */
    const uint64_t first = start >= behind ? 0 : bytes > behind - start ? behind - start : bytes;
    uint8_t *half = rr_half(group, own, number);
    rr_copy_near(half, source + before + part_bytes(group, call, own, own) + start, first);
    if (first < bytes)
        rr_copy_near(half + first, source + (start + first - behind), bytes - first);
    group->bytes_sent += bytes;
}

/* Copy what segment `number` of the staged arrays has for us into `target`. */
static void copy_out(struct rr_shm *group, const rr_call *call, uint8_t *target, uint64_t number)
{
    const uint64_t start = number * group->room, end = start + group->room;
    uint64_t at = 0;
    for (uint32_t rank = 0; rank < group->size; rank++) {
        const uint64_t bytes = part_bytes(group, call, rank, group->index);
        const uint64_t first = group->peers[rank].position, last = first + bytes;
        const uint64_t from = first > start ? first : start, to = last < end ? last : end;
        if (rank != group->index && from < to && !rr_is_registered(group, rank)) {
            rr_copy(group, target + at + (from - first),
                    rr_half(group, rank, number) + (from - start), to - from);
            group->bytes_received += to - from;
        }
        at += bytes;
    }
}

void rr_all_to_all_keep(struct rr_shm *group, const rr_call *call, const uint8_t *source,
                        uint8_t *target)
{
    const uint32_t own = group->index;
    uint64_t at = 0;
    for (uint32_t rank = 0; rank < own; rank++)
        at += part_bytes(group, call, rank, own);
    const uint64_t bytes = part_bytes(group, call, own, own);
    if (bytes > 0)
        rr_copy(group, target + at, source + group->peers[own].offset, bytes);
}

/* Copy our parts out of registered arrays; returns how many ranks have such, which others read. */
static int copy_registered(struct rr_shm *group, const rr_call *call, uint8_t *target)
{
    const uint32_t own = group->index;
    int lent = 0;
    uint64_t at = 0;
    for (uint32_t rank = 0; rank < group->size; rank++) {
        const struct rr_peer *peer = &group->peers[rank];
        const uint64_t bytes = part_bytes(group, call, rank, own);
        const int is_lent = peer->outgoing > 0 && rr_is_registered(group, rank);
        if (rank != own && bytes > 0 && is_lent) {
            rr_copy(group, target + at, rr_registered_array(group, rank) + peer->offset, bytes);
            group->bytes_received += bytes;
        }
        lent += is_lent;
        at += bytes;
    }
    return lent;
}

void rr_all_to_all_begin(struct rr_shm *group, const rr_call *call, const uint8_t *source)
{
    const uint32_t own = group->index;
    uint64_t longest = 0, everything = 0;
    for (uint32_t rank = 0; rank < group->size; rank++) {
        struct rr_peer *peer = &group->peers[rank];
        const uint64_t total = rr_all_to_all_array_bytes(group, call, rank);
        everything += total;
        const uint64_t behind = bytes_before(group, call, rank, rank + 1);
        peer->outgoing = total - part_bytes(group, call, rank, rank);
        peer->offset = bytes_before(group, call, rank, own);
        peer->position = own > rank ? peer->offset - behind : total - behind + peer->offset;
        if (peer->outgoing > longest)
            longest = peer->outgoing;
    }
    group->is_far = 2 * everything >= RR_FAR_BYTES; /* all sources and targets */
    rr_cut_segments(group, longest, group->staging_bytes);
    if (!rr_is_registered(group, own))
        copy_in(group, call, source, 0);
}

static int advance_staged(struct rr_shm *group, const rr_call *call, const uint8_t *source,
                          uint8_t *target)
{
    const uint64_t now = ++group->segment, end = group->last_segment;
    if (now < end && !rr_is_registered(group, group->index))
        copy_in(group, call, source, now);
    copy_out(group, call, target, now - 1);
    if (now < end)
        return RR_WAITING;
    group->segments += end;
    return RR_DONE;
}

/* Headers are equal: do the work of the first step. */
static int advance_from_meeting(struct rr_shm *group, const rr_call *call, const uint8_t *source,
                                uint8_t *target)
{
    uint64_t longest = 0; /* of those that are staged */
    for (uint32_t rank = 0; rank < group->size; rank++)
        if (!rr_is_registered(group, rank) && group->peers[rank].outgoing > longest)
            longest = group->peers[rank].outgoing;
    group->last_segment = (longest + group->room - 1) / group->room;
    const int lent = copy_registered(group, call, target);
    group->stage = RR_STAGED;
    if (group->last_segment > 0 && advance_staged(group, call, source, target) == RR_WAITING)
        return RR_WAITING; /* which is also a wait for those that read registered arrays */
    group->stage = RR_LAST;
    return lent > 0 ? RR_WAITING : RR_DONE;
}

int rr_all_to_all_advance(struct rr_shm *group, const rr_call *call, const uint8_t *source,
                          uint8_t *target)
{
    switch (group->stage) {
    case RR_MEET: return advance_from_meeting(group, call, source, target);
    case RR_STAGED: return advance_staged(group, call, source, target);
    default: return RR_DONE;
    }
}
