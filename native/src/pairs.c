/* Messages from one rank of a host to another, apart from the collectives.
 *
 * A channel carries one direction of a pair; it lies in the sender's heap, as drawn in
 * ringreduce.h. The sender fills slots in turn and the receiver empties them. A message begins a
 * slot with its header. What does not fit goes on in the next slots, or lies in the sender's
 * registered array, which the receiver copies while the sender waits.
 *
 * `rr_pair_send` and `rr_pair_receive` may return in the middle and continue when called again, as
 * rr_shm_run does. struct rr_pair holds the state of one end.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "segment.h"

enum { SLOTS = 4, SLOT_BYTES = 32768 };

struct slot {
    uint64_t header[8];
    uint64_t registered; /* 1 + offset in the heap of the message; 0: it follows in slots */
    uint64_t unused[7];
    uint8_t bytes[SLOT_BYTES];
};

struct channel {
    struct rr_counter filled;  /* slots so far, by the sender */
    struct rr_counter emptied; /* slots so far, by the receiver */
    struct slot slots[SLOTS];
};

struct rr_pair {
    struct channel *channel; /* NULL: the sender has not opened it yet */
    struct rr_board *opener; /* the sender's board */
    uint8_t *heap;           /* the sender's */
    uint64_t heap_bytes;
    uint32_t receiver, culprit;
    uint64_t slots;    /* filled or emptied by this end */
    uint64_t messages; /* finished */
    uint64_t theirs[8];
    /* The running message. */
    int is_begun;
    uint64_t position; /* bytes done */
    uint32_t size;
    struct rr_board *boards[];
};

int rr_pair_new(rr_pair **made, uint32_t size, void *const *segments, uint32_t sender,
                uint32_t receiver)
{
    if (size == 0 || size > RR_SHM_SIZE_MAX || sender >= size || receiver >= size)
        return -EINVAL;
    rr_pair *pair = calloc(1, sizeof *pair + size * sizeof pair->boards[0]);
    if (pair == NULL)
        return -ENOMEM;
    const struct rr_head *head = segments[sender];
    pair->size = size;
    pair->receiver = receiver;
    pair->heap = (uint8_t *)segments[sender] + head->heap;
    pair->heap_bytes = head->heap_bytes;
    for (uint32_t rank = 0; rank < size; rank++)
        pair->boards[rank] = (struct rr_board *)((uint8_t *)segments[rank] + RR_BOARD_OFFSET);
    pair->opener = pair->boards[sender];
    *made = pair;
    return RR_DONE;
}

void rr_pair_free(rr_pair *pair)
{
    free(pair);
}

uint64_t rr_pair_channel_bytes(void)
{
    return sizeof(struct channel);
}

void rr_pair_open(rr_pair *pair, uint64_t offset)
{
    struct rr_board *board = pair->opener;
    pair->channel = (struct channel *)(pair->heap + offset);
    __atomic_store_n(&board->channels[pair->receiver], offset + 1, __ATOMIC_RELEASE);
    rr_counter_publish(&board->opened, board->opened.value + 1);
}

/* ---- Waiting ---- */

/* Until `counter` has reached `value`; RR_ABORTED: a rank has aborted. */
static int await(rr_pair *pair, struct rr_counter *counter, uint64_t value,
                 const rr_wait_limits *limits)
{
    uint32_t spins = limits->spins, yields = limits->yields;
    if (rr_counter_wait(counter, value, &spins, &yields, limits->sleep_ms) == RR_DONE)
        return RR_DONE;
    for (uint32_t rank = 0; rank < pair->size; rank++)
        if (__atomic_load_n(&pair->boards[rank]->has_aborted, __ATOMIC_ACQUIRE)) {
            pair->culprit = rank;
            /* The other end may have done its part since, and aborted in a later call. */
            return rr_counter_has_reached(counter, value) ? RR_DONE : RR_ABORTED;
        }
    return RR_WAITING;
}

/* Find the channel; RR_WAITING: the sender has not opened it yet. */
static int find_channel(rr_pair *pair)
{
    if (pair->channel != NULL)
        return RR_DONE;
    const uint64_t *place = &pair->opener->channels[pair->receiver];
    const uint64_t offset = __atomic_load_n(place, __ATOMIC_ACQUIRE);
    if (offset == 0)
        return RR_WAITING;
    if (pair->heap_bytes < sizeof(struct channel) || (offset - 1) % RR_LINE != 0 ||
        offset - 1 > pair->heap_bytes - sizeof(struct channel))
        return RR_BROKEN;
    pair->channel = (struct channel *)(pair->heap + (offset - 1));
    return RR_DONE;
}

/* Until the sender has opened the channel. */
static int await_channel(rr_pair *pair, const rr_wait_limits *limits)
{
    struct rr_board *board = pair->opener;
    for (;;) {
        const uint64_t opened = __atomic_load_n(&board->opened.value, __ATOMIC_ACQUIRE);
        int status = find_channel(pair);
        if (status != RR_WAITING)
            return status;
        status = await(pair, &board->opened, opened + 1, limits);
        if (status != RR_DONE)
            return status;
    }
}

/* ---- Messages ---- */

static uint64_t next_piece(const rr_pair *pair, uint64_t bytes)
{
    const uint64_t rest = bytes - pair->position;
    return rest < SLOT_BYTES ? rest : SLOT_BYTES;
}

/* `header` with the words that are filled in here. */
static void complete(const rr_pair *pair, const uint64_t *header, uint64_t bytes, uint64_t *words)
{
    memcpy(words, header, 8 * sizeof *words);
    words[3] = pair->messages;
    words[6] = bytes;
}

static int finish(rr_pair *pair)
{
    pair->is_begun = 0;
    pair->position = 0;
    pair->messages++;
    return RR_DONE;
}

/* 1 + offset of a large message in our heap; 0 if the heap does not contain all of it. */
static uint64_t registered(const rr_pair *pair, const uint8_t *data, uint64_t bytes)
{
    if (bytes <= SLOT_BYTES || bytes > pair->heap_bytes || data < pair->heap ||
        data > pair->heap + (pair->heap_bytes - bytes))
        return 0;
    return (uint64_t)(data - pair->heap) + 1;
}

int rr_pair_send(rr_pair *pair, const uint64_t *header, const void *data, uint64_t bytes,
                 const rr_wait_limits *limits)
{
    struct channel *channel = pair->channel;
    while (!pair->is_begun || pair->position < bytes) {
        const uint64_t needed = pair->slots < SLOTS ? 0 : pair->slots - SLOTS + 1;
        const int status = await(pair, &channel->emptied, needed, limits);
        if (status != RR_DONE)
            return status;
        struct slot *slot = &channel->slots[pair->slots % SLOTS];
        uint64_t piece = next_piece(pair, bytes);
        if (!pair->is_begun) {
            complete(pair, header, bytes, slot->header);
            slot->registered = registered(pair, data, bytes);
            pair->is_begun = 1;
            if (slot->registered != 0)
                piece = pair->position = bytes;
        }
        if (pair->position < bytes) {
            memcpy(slot->bytes, (const uint8_t *)data + pair->position, piece);
            pair->position += piece;
        }
        rr_counter_publish(&channel->filled, ++pair->slots);
    }
    if (bytes > SLOT_BYTES) {
        const int status = await(pair, &channel->emptied, pair->slots, limits);
        if (status != RR_DONE)
            return status;
    }
    return finish(pair);
}

/* Compare the header in `slot` with the expected one, and store where the message lies: in the
 * slot, or in a registered array. RR_MISMATCH, RR_BROKEN. */
static int check(rr_pair *pair, const struct slot *slot, const uint64_t *header, uint64_t bytes,
                 const uint8_t **source)
{
    uint64_t expected[8];
    complete(pair, header, bytes, expected);
    memcpy(pair->theirs, slot->header, sizeof pair->theirs);
    if (memcmp(expected, pair->theirs, sizeof expected) != 0)
        return RR_MISMATCH;
    const uint64_t at = slot->registered;
    *source = at == 0 ? slot->bytes : pair->heap + (at - 1);
    if (at != 0 && (bytes > pair->heap_bytes || at - 1 > pair->heap_bytes - bytes))
        return RR_BROKEN;
    return RR_DONE;
}

int rr_pair_receive(rr_pair *pair, const uint64_t *header, void *data, uint64_t bytes,
                    const rr_wait_limits *limits)
{
    int status = await_channel(pair, limits);
    if (status != RR_DONE)
        return status;
    struct channel *channel = pair->channel;
    while (!pair->is_begun || pair->position < bytes) {
        status = await(pair, &channel->filled, pair->slots + 1, limits);
        if (status != RR_DONE)
            return status;
        const struct slot *slot = &channel->slots[pair->slots % SLOTS];
        const uint8_t *source = slot->bytes;
        uint64_t piece = next_piece(pair, bytes);
        if (!pair->is_begun) {
            status = check(pair, slot, header, bytes, &source);
            if (status != RR_DONE)
                return status;
            pair->is_begun = 1;
            if (source != slot->bytes)
                piece = bytes;
        }
        if (piece > 0)
            memcpy((uint8_t *)data + pair->position, source, piece);
        pair->position += piece;
        rr_counter_publish(&channel->emptied, ++pair->slots);
    }
    return finish(pair);
}

void rr_pair_look(const rr_pair *pair, rr_pair_facts *facts)
{
    const struct channel *channel = pair->channel;
    memset(facts, 0, sizeof *facts);
    facts->sequence = pair->messages;
    facts->aborted = pair->culprit;
    memcpy(facts->theirs, pair->theirs, sizeof facts->theirs);
    if (channel != NULL)
        facts->progress = __atomic_load_n(&channel->filled.value, __ATOMIC_RELAXED) +
                          __atomic_load_n(&channel->emptied.value, __ATOMIC_RELAXED);
}
