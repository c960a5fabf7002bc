/* Both ends of channels as threads on real segments. */

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "ringreduce.h"

#include "check.h"

enum { SIZE = 3, STAGING = 8192, HEAP = 1 << 22, ARRAY = 1 << 19 };

/* Bytes of the messages: none, one, a slot and around it, as many as all slots, more. */
static const uint64_t BYTES[] = {0, 1, 1000, 32767, 32768, 32769, 131072, 131073, 300007};
enum { MESSAGES = sizeof BYTES / sizeof BYTES[0] };

static const rr_wait_limits LIMITS = {50, 20, 10};

static struct {
    int descriptors[SIZE];
    void *segments[SIZE];
    uint64_t bytes[SIZE];
    uint8_t *heaps[SIZE];
} host;

static void open_host(void)
{
    for (uint32_t rank = 0; rank < SIZE; rank++) {
        CHECK(rr_segment_create(STAGING, HEAP, &host.descriptors[rank]) == RR_DONE);
        CHECK(rr_segment_map(host.descriptors[rank], &host.segments[rank], &host.bytes[rank]) ==
              RR_DONE);
        uint64_t heap_bytes;
        host.heaps[rank] =
            (uint8_t *)host.segments[rank] + rr_segment_heap(host.segments[rank], &heap_bytes);
        CHECK(rr_segment_reserve(host.descriptors[rank], host.segments[rank], 0, HEAP) == RR_DONE);
    }
}

static void close_host(void)
{
    for (uint32_t rank = 0; rank < SIZE; rank++) {
        CHECK(rr_segment_unmap(host.segments[rank], host.bytes[rank]) == RR_DONE);
        close(host.descriptors[rank]);
    }
}

static rr_pair *end_of(uint32_t sender, uint32_t receiver)
{
    rr_pair *pair;
    CHECK(rr_pair_new(&pair, SIZE, host.segments, sender, receiver) == RR_DONE);
    return pair;
}

/* Each channel has a place of its own in its sender's heap. */
static void open_channel(rr_pair *pair, uint32_t receiver)
{
    rr_pair_open(pair, ARRAY + receiver * (rr_pair_channel_bytes() + 4096) / 64 * 64);
}

static int do_send(rr_pair *pair, const uint64_t *header, const void *data, uint64_t bytes)
{
    int status;
    do {
        status = rr_pair_send(pair, header, data, bytes, &LIMITS);
    } while (status == RR_WAITING);
    return status;
}

static int do_receive(rr_pair *pair, const uint64_t *header, void *data, uint64_t bytes)
{
    int status;
    do {
        status = rr_pair_receive(pair, header, data, bytes, &LIMITS);
    } while (status == RR_WAITING);
    return status;
}

static uint8_t byte_of(uint32_t sender, int message, uint64_t i)
{
    return (uint8_t)(i * 7 + sender * 31 + (uint32_t)message * 3);
}

struct job {
    uint32_t sender, receiver;
};

/* From ordinary and from registered memory in turn. */
static void *sends(void *argument)
{
    const struct job *job = argument;
    rr_pair *pair = end_of(job->sender, job->receiver);
    open_channel(pair, job->receiver);
    uint8_t *private = malloc(ARRAY);
    CHECK(private != NULL);
    for (int message = 0; message < 2 * MESSAGES; message++) {
        /* Several threads of a sender share its one array, a part for each. */
        uint8_t *registered = host.heaps[job->sender] + job->receiver % 2 * ARRAY / 2;
        const uint64_t bytes = message % 2 ? BYTES[message / 2] % (ARRAY / 2) : BYTES[message / 2];
        uint8_t *data = message % 2 ? registered : private;
        for (uint64_t i = 0; i < bytes; i++)
            data[i] = byte_of(job->sender, message, i);
        const uint64_t header[8] = {1, 2, job->sender, 0, bytes, 0, 0, 7};
        CHECK(do_send(pair, header, data, bytes) == RR_DONE);
        memset(data, 0xFF, bytes); /* ours again */
    }
    free(private);
    rr_pair_free(pair);
    return NULL;
}

static void *receives(void *argument)
{
    const struct job *job = argument;
    rr_pair *pair = end_of(job->sender, job->receiver);
    uint8_t *data = malloc(ARRAY);
    CHECK(data != NULL);
    for (int message = 0; message < 2 * MESSAGES; message++) {
        const uint64_t bytes = message % 2 ? BYTES[message / 2] % (ARRAY / 2) : BYTES[message / 2];
        const uint64_t header[8] = {1, 2, job->sender, 0, bytes, 0, 0, 7};
        CHECK(do_receive(pair, header, data, bytes) == RR_DONE);
        for (uint64_t i = 0; i < bytes; i++)
            CHECK(data[i] == byte_of(job->sender, message, i));
    }
    rr_pair_facts facts;
    rr_pair_look(pair, &facts);
    CHECK(facts.sequence == 2 * MESSAGES && facts.progress > 2 * MESSAGES);
    free(data);
    rr_pair_free(pair);
    return NULL;
}

/* Both directions of a pair and a third rank, all at once. */
static void test_all_messages_arrive(void)
{
    static struct job jobs[] = {{0, 1}, {1, 0}, {2, 1}};
    enum { JOBS = sizeof jobs / sizeof jobs[0] };
    pthread_t threads[2 * JOBS];
    open_host();
    for (int job = 0; job < JOBS; job++) {
        CHECK(pthread_create(&threads[2 * job], NULL, receives, &jobs[job]) == 0);
        CHECK(pthread_create(&threads[2 * job + 1], NULL, sends, &jobs[job]) == 0);
    }
    for (int thread = 0; thread < 2 * JOBS; thread++)
        CHECK(pthread_join(threads[thread], NULL) == 0);
    close_host();
}

/* A small message is sent although nobody receives; another one than expected is shown. */
static void test_another_message_is_a_mismatch(void)
{
    open_host();
    rr_pair *sender = end_of(0, 1), *receiver = end_of(0, 1);
    uint64_t header[8] = {1, 2, 0, 0, 3, 0, 0, 7};
    char data[4] = "abc";
    CHECK(rr_pair_receive(receiver, header, data, 3, &LIMITS) == RR_WAITING);
    open_channel(sender, 1);
    CHECK(rr_pair_receive(receiver, header, data, 3, &LIMITS) == RR_WAITING);
    for (int message = 0; message < 4; message++)
        CHECK(rr_pair_send(sender, header, data, 3, &LIMITS) == RR_DONE);
    CHECK(rr_pair_send(sender, header, data, 3, &LIMITS) == RR_WAITING); /* all slots are full */
    CHECK(rr_pair_receive(receiver, header, data, 3, &LIMITS) == RR_DONE);
    CHECK(rr_pair_receive(receiver, header, data, 2, &LIMITS) == RR_MISMATCH);
    header[7] = 8;
    CHECK(rr_pair_receive(receiver, header, data, 3, &LIMITS) == RR_MISMATCH);
    rr_pair_facts facts;
    rr_pair_look(receiver, &facts);
    CHECK(facts.sequence == 1 && facts.theirs[3] == 1 && facts.theirs[7] == 7);
    rr_pair_free(sender);
    rr_pair_free(receiver);
    close_host();
}

/* A large message waits for its receiver, and ends when any rank aborts. */
static void test_an_abort_ends_a_wait(void)
{
    static char data[ARRAY];
    open_host();
    rr_pair *sender = end_of(0, 1), *receiver = end_of(1, 0);
    const uint64_t header[8] = {0};
    open_channel(sender, 1);
    CHECK(rr_pair_send(sender, header, data, 40000, &LIMITS) == RR_WAITING);
    rr_shm *group;
    CHECK(rr_shm_new(&group, 2, SIZE, host.segments) == RR_DONE);
    rr_shm_abort(group);
    rr_shm_free(group);
    CHECK(rr_pair_send(sender, header, data, 40000, &LIMITS) == RR_ABORTED);
    CHECK(rr_pair_receive(receiver, header, data, 1, &LIMITS) == RR_ABORTED);
    rr_pair_facts facts;
    rr_pair_look(receiver, &facts);
    CHECK(facts.aborted == 2);
    rr_pair_free(sender);
    rr_pair_free(receiver);
    close_host();
}

/* What another process may have written. */
static void test_impossible_places_are_broken(void)
{
    open_host();
    rr_pair *sender = end_of(0, 1), *receiver = end_of(0, 1);
    const uint64_t header[8] = {0};
    char data[1];
    rr_pair_open(sender, HEAP);
    CHECK(rr_pair_receive(receiver, header, data, 1, &LIMITS) == RR_BROKEN);
    rr_pair_free(sender);
    rr_pair_free(receiver);
    CHECK(rr_pair_new(&sender, SIZE, host.segments, 0, SIZE) == -EINVAL);
    close_host();
}

int main(void)
{
    test_all_messages_arrive();
    test_another_message_is_a_mismatch();
    test_an_abort_ends_a_wait();
    test_impossible_places_are_broken();
    return 0;
}
