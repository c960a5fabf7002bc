/* The collectives of the ranks of one host, on the segments drawn in ringreduce.h.
 *
 * A call is a sequence of steps, each some work and then a wait for all ranks. `rr_shm_run` may
 * return in the middle (a rank is late, a signal came), and continues there when called again.
 * So Python decides about deadlines, signals and lost peers. struct rr_shm holds the state.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "reduce.h"
#include "segment.h"
#include "steps.h"

/* The work of the next step. */
enum stage {
    IDLE,   /* no call is running */
    MEET,   /* all have announced their calls: compare them, choose an algorithm */
    LEND,   /* some but not all arrays are registered: stage all of them */
    STAGED, /* segments go through staging memory */
    LAST,   /* only the wait for the others is left */
};

struct peer {
    struct rr_board *board;
    uint8_t *base;
    uint8_t *inbox;
    uint8_t *staging;
    uint8_t *heap;
};

struct rr_shm {
    uint32_t index, size;
    uint64_t staging_bytes; /* of a half, equal in all segments */
    uint64_t heap_bytes;
    uint64_t step;     /* the last one that this rank has finished */
    uint64_t calls;    /* begun so far */
    uint64_t segments; /* staged so far; their parity chooses the half */
    uint64_t bytes_sent, bytes_received;
    uint32_t culprit;
    /* The running call. */
    enum stage stage;
    uint64_t segment, last_segment; /* next one to copy in; the one after the last */
    uint64_t room;                  /* bytes of a segment */
    uint32_t itemsize;
    int is_registered;
    struct peer peers[];
};

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

static struct rr_announcement *announced(const struct rr_shm *group, uint32_t rank)
{
    return &group->peers[rank].board->calls[group->calls & 1];
}

static uint8_t *inbox_of(const struct rr_shm *group, uint32_t rank)
{
    return group->peers[rank].inbox + (group->calls & 1) * RR_INBOX_BYTES;
}

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
        struct peer *peer = &group->peers[rank];
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

/* ---- One step's work ---- */

/* Length of segment `number` of a chunk of `bytes`, 0 past its end; its offset in `at`. */
static uint64_t piece(const struct rr_shm *group, uint64_t bytes, uint64_t number, uint64_t *at)
{
    *at = number * group->room;
    if (*at >= bytes)
        return 0;
    return bytes - *at < group->room ? bytes - *at : group->room;
}

/* Where `owner` stages a segment for `reader`. A reduced segment is for all ranks, and staged with
 * the owner as reader. In an all-gather the whole half is one segment. */
static uint8_t *staged(const struct rr_shm *group, const rr_call *call, uint32_t owner,
                       uint32_t reader, uint64_t number)
{
    const uint64_t half = (group->segments + number) & 1;
    const uint64_t slot = is_reducing(call) ? reader : 0;
    return group->peers[owner].staging + half * group->staging_bytes + slot * group->room;
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
            memcpy(staged(group, call, own, rank, number),
                   data + call->bounds[rank] * group->itemsize + at, bytes);
        group->bytes_sent += bytes;
    }
}

/* Add up segment `number` of our own chunk, into the array and, if others need it, into our
 * staging memory. */
static void reduce_own(struct rr_shm *group, const rr_call *call, uint8_t *data, uint64_t number)
{
    const uint32_t own = group->index;
    uint64_t at;
    const uint64_t bytes = piece(group, chunk_bytes(group, call, own), number, &at);
    if (bytes == 0)
        return;
    uint8_t *mine = data + call->bounds[own] * group->itemsize + at;
    const void *sources[RR_SHM_SIZE_MAX];
    for (uint32_t rank = 0; rank < group->size; rank++)
        sources[rank] = rank == own ? mine : staged(group, call, rank, own, number);
    void *targets[2] = {mine, staged(group, call, own, own, number)};
    const int is_wanted = call->action == RR_ALL_REDUCE && group->size > 1;
    rr_reduce(call->dtype, call->op, call->divisor, bytes / group->itemsize, group->size, sources,
              is_wanted ? 2 : 1, targets);
    group->bytes_received += (group->size - 1) * bytes;
    if (is_wanted)
        group->bytes_sent += bytes;
}

/* Copy segment `number` of the others' chunks from their staging memory into the array. */
static void copy_out(struct rr_shm *group, const rr_call *call, uint8_t *data, uint64_t number)
{
    for (uint32_t other = 1; other < group->size; other++) {
        /* Each rank begins with the next rank, so that not all read from the same one. */
        const uint32_t rank = (group->index + other) % group->size;
        uint64_t at;
        const uint64_t bytes = piece(group, chunk_bytes(group, call, rank), number, &at);
        if (bytes > 0)
            memcpy(data + call->bounds[rank] * group->itemsize + at,
                   staged(group, call, rank, rank, number), bytes);
        group->bytes_received += bytes;
    }
}

/* All arrays are registered: add up our own chunk and write it into all of them. */
static void reduce_in_place(struct rr_shm *group, const rr_call *call)
{
    const uint32_t own = group->index;
    const uint64_t bytes = chunk_bytes(group, call, own);
    void *arrays[RR_SHM_SIZE_MAX];
    for (uint32_t rank = 0; rank < group->size; rank++)
        arrays[rank] = group->peers[rank].heap + (announced(group, rank)->registered - 1) +
                       call->bounds[own] * group->itemsize;
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

static void publish(struct rr_shm *group)
{
    rr_step_publish(group->peers[group->index].board, ++group->step);
}

/* Choose how chunks are cut into segments. */
static void plan(struct rr_shm *group, const rr_call *call)
{
    uint64_t longest = 0;
    for (uint32_t rank = 0; rank < group->size; rank++)
        if (chunk_bytes(group, call, rank) > longest)
            longest = chunk_bytes(group, call, rank);
    const uint64_t slots = is_reducing(call) ? group->size : 1;
    const uint64_t limit = group->staging_bytes / slots / RR_LINE * RR_LINE;
    /* Segments of about equal length, so that the last one is worth its step. */
    const uint64_t number = (longest + limit - 1) / limit;
    const uint64_t even = number == 0 ? RR_LINE : (longest + number - 1) / number;
    group->room = (even + RR_LINE - 1) / RR_LINE * RR_LINE;
    group->last_segment = number == 0 ? 0 : (longest + group->room - 1) / group->room;
    group->segment = 0;
}

/* 1 + offset of the array in our heap; 0 if the heap does not contain all of it. */
static uint64_t registered(const struct rr_shm *group, const rr_call *call, const uint8_t *data)
{
    const uint8_t *heap = group->peers[group->index].heap;
    if (!is_reducing(call) || data < heap || data >= heap + group->heap_bytes ||
        total_bytes(group, call) > group->heap_bytes - (uint64_t)(data - heap))
        return 0;
    return (uint64_t)(data - heap) + 1;
}

static void begin(struct rr_shm *group, const rr_call *call, uint8_t *data)
{
    group->itemsize = rr_itemsize(call->dtype);
    struct rr_announcement *own = announced(group, group->index);
    memcpy(own->header, call->header, sizeof own->header);
    own->header[3] = group->calls;
    own->registered = 0;
    if (fits_inbox(group, call)) {
        group->last_segment = group->segment = 0; /* clear those of the previous call */
        memcpy(inbox_of(group, group->index), data, total_bytes(group, call));
    } else {
        plan(group, call);
        own->registered = registered(group, call, data);
        if (own->registered == 0 && group->last_segment > 0)
            copy_in(group, call, data, 0);
    }
    group->is_registered = own->registered != 0;
    group->stage = MEET;
    publish(group);
}

/* Whether all ranks are in the same call with the same arguments. */
static int compare(struct rr_shm *group, const rr_call *call)
{
    const uint64_t high_half = ~(uint64_t)0 << 32; /* word 2: the rank, which differs */
    for (uint32_t rank = 0; rank < group->size; rank++) {
        const struct rr_announcement *theirs = announced(group, rank);
        for (int word = 0; word < 8; word++) {
            const uint64_t ours = word == 3 ? group->calls : call->header[word];
            const uint64_t differing = theirs->header[word] ^ ours;
            if ((word == 2 ? differing & ~high_half : differing) != 0) {
                group->culprit = rank;
                return RR_MISMATCH;
            }
        }
        const uint64_t bytes = total_bytes(group, call);
        if (theirs->registered != 0 &&
            (bytes > group->heap_bytes || theirs->registered - 1 > group->heap_bytes - bytes)) {
            group->culprit = rank;
            return RR_BROKEN;
        }
    }
    return RR_DONE;
}

/* The work of step `segment` of a staged call; RR_DONE after the last, else RR_WAITING. */
static int advance_staged(struct rr_shm *group, const rr_call *call, uint8_t *data)
{
    const uint64_t now = ++group->segment, end = group->last_segment;
    if (is_reducing(call)) {
        if (now < end)
            copy_in(group, call, data, now);
        if (now - 1 < end)
            reduce_own(group, call, data, now - 1);
        if (call->action == RR_ALL_REDUCE && now >= 2)
            copy_out(group, call, data, now - 2);
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

/* All ranks have announced: compare, choose the algorithm, and do the work of its first step. */
static int advance_from_meeting(struct rr_shm *group, const rr_call *call, uint8_t *data)
{
    const int status = compare(group, call);
    if (status != RR_DONE)
        return status;
    if (fits_inbox(group, call)) {
        reduce_inboxes(group, call, data);
        return RR_DONE;
    }
    uint32_t registered_arrays = 0;
    for (uint32_t rank = 0; rank < group->size; rank++)
        registered_arrays += announced(group, rank)->registered != 0;
    if (group->last_segment == 0)
        return RR_DONE;
    if (registered_arrays == group->size) {
        reduce_in_place(group, call);
        group->stage = LAST;
    } else if (registered_arrays > 0) {
        if (group->is_registered)
            copy_in(group, call, data, 0);
        group->stage = LEND;
    } else {
        group->stage = STAGED;
        return advance_staged(group, call, data);
    }
    return RR_WAITING;
}

/* Do the next step's work: RR_WAITING when a wait for the others follows. */
static int advance(struct rr_shm *group, const rr_call *call, uint8_t *data)
{
    switch (group->stage) {
    case MEET: return advance_from_meeting(group, call, data);
    case LEND: group->stage = STAGED; return advance_staged(group, call, data);
    case STAGED: return advance_staged(group, call, data);
    default: return RR_DONE;
    }
}

static int wait_for_all(struct rr_shm *group, const rr_wait_limits *limits)
{
    uint32_t spins = limits->spins, yields = limits->yields;
    for (uint32_t other = 1; other < group->size; other++) {
        const uint32_t rank = (group->index + other) % group->size;
        struct rr_board *board = group->peers[rank].board;
        if (rr_step_wait(board, group->step, &spins, &yields, limits->sleep_ms) == RR_DONE)
            continue;
        group->culprit = rank;
        for (uint32_t aborted = 0; aborted < group->size; aborted++)
            if (__atomic_load_n(&group->peers[aborted].board->news_bytes, __ATOMIC_ACQUIRE)) {
                group->culprit = aborted;
                return RR_ABORTED;
            }
        return RR_WAITING;
    }
    return RR_DONE;
}

int rr_shm_run(rr_shm *group, const rr_call *call, void *data, const rr_wait_limits *limits)
{
    if (group->stage == IDLE)
        begin(group, call, data);
    for (;;) {
        int status = wait_for_all(group, limits);
        if (status != RR_DONE)
            return status;
        status = advance(group, call, data);
        if (status == RR_WAITING) {
            publish(group);
            continue;
        }
        if (status == RR_DONE) {
            group->stage = IDLE;
            group->calls++;
        }
        return status;
    }
}

/* ---- Errors and facts, for Python ---- */

void rr_shm_abort(rr_shm *group, const void *reason, uint32_t bytes)
{
    struct rr_board *board = group->peers[group->index].board;
    const uint32_t length = bytes < RR_REASON_BYTES ? bytes : RR_REASON_BYTES;
    memcpy(board->reason, reason, length);
    __atomic_store_n(&board->news_bytes, length, __ATOMIC_RELEASE);
    rr_step_wake(board);
}

uint32_t rr_shm_reason(const rr_shm *group, uint32_t peer, void *reason)
{
    if (peer >= group->size)
        return 0;
    const struct rr_board *board = group->peers[peer].board;
    uint32_t length = __atomic_load_n(&board->news_bytes, __ATOMIC_ACQUIRE);
    if (length > RR_REASON_BYTES) /* another process wrote it */
        length = RR_REASON_BYTES;
    memcpy(reason, board->reason, length);
    return length;
}

int rr_shm_has_arrived(const rr_shm *group, uint32_t peer)
{
    return peer < group->size && rr_step_is_done(group->peers[peer].board, group->step);
}

void rr_shm_look(const rr_shm *group, rr_shm_facts *facts)
{
    memset(facts, 0, sizeof *facts);
    facts->sequence = group->calls;
    facts->peer = group->culprit;
    facts->step = (uint32_t)group->segment;
    facts->steps = (uint32_t)group->last_segment;
    memcpy(facts->theirs, announced(group, group->culprit)->header, sizeof facts->theirs);
    for (uint32_t rank = 0; rank < group->size; rank++)
        facts->progress += __atomic_load_n(&group->peers[rank].board->step, __ATOMIC_RELAXED);
    facts->bytes_sent = group->bytes_sent;
    facts->bytes_received = group->bytes_received;
}
