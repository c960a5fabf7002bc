/* The C function that stands for a call of Python's, with objects and an interpreter made up here.
 */

#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "python_api.h"
#include "ringreduce.h"

#include "check.h"

enum { STAGING = 4096, HEAP = 1 << 20, COUNT = 6 };

static const rr_wait_limits LIMITS = {5, 5, 1};
static rr_object array_type, float32, other_dtype, sum, max, done, late, unknown;
static int held, released, taken;

static void hold(void *object)
{
    ((rr_object *)object)->references++;
    held++;
}

/* Closed by another thread as soon as that has the GIL. */
static rr_small_calls *closes;

static void *release_gil(void)
{
    released++;
    if (closes != NULL)
        closes->end = NULL;
    return &released;
}

static void take_gil(void *thread)
{
    CHECK(thread == &released);
    taken++;
}

/* A lock that this thread has taken `depth` times; another thread may have it. */
static int depth, is_elsewhere, has_raised;
static rr_object lock, unlock;

static void drop(void *object)
{
    ((rr_object *)object)->references--;
    held--;
}

static void *call_python(void *object)
{
    if (has_raised)
        return NULL;
    if (object == &unlock) {
        CHECK(depth-- > 0);
        hold(&unknown);
        return &unknown;
    }
    CHECK(object == &lock);
    if (!is_elsewhere)
        depth++;
    hold(is_elsewhere ? &late : &done);
    return is_elsewhere ? &late : &done;
}

static rr_small_calls new_calls(uint32_t kind, void *end)
{
    return (rr_small_calls){.kind = kind,
                            .end = end,
                            .limits = &LIMITS,
                            .array_type = &array_type,
                            .done = &done,
                            .late = &late,
                            .unknown = &unknown,
                            .release_gil = release_gil,
                            .take_gil = take_gil,
                            .hold = hold,
                            .drop = drop,
                            .call = call_python};
}

static const intptr_t SHAPE[] = {2, 3}, LONGER[] = {2, 4};

static rr_array new_array(void *data)
{
    return (rr_array){.object.type = &array_type,
                      .data = data,
                      .dimensions = 2,
                      .shape = SHAPE,
                      .dtype = &float32,
                      .flags = RR_ARRAY_USUAL | 4};
}

static void *call(rr_small_calls *calls, rr_array *array, void *option, intptr_t number)
{
    rr_array self = {.data = calls};
    void *arguments[] = {array, option, option};
    return rr_small_run(&self, arguments, number);
}

static void only_the_call_that_was_taught(rr_small_calls *calls)
{
    float data[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    rr_array array = new_array(data);
    CHECK(call(calls, &array, &sum, 2) == &done);
    CHECK(calls->bytes == sizeof(float) * COUNT && calls->running == NULL);
    CHECK(released == 1 && taken == 1 && done.references == 1);

    CHECK(call(calls, &array, &sum, 1) == &unknown);
    CHECK(call(calls, &array, &sum, 3) == &unknown);
    CHECK(call(calls, &array, &max, 2) == &unknown);
    rr_array strange = array;
    strange.dtype = &other_dtype;
    CHECK(call(calls, &strange, &sum, 2) == &unknown);
    strange = array;
    strange.shape = LONGER;
    CHECK(call(calls, &strange, &sum, 2) == &unknown);
    strange = array;
    strange.object.type = &float32;
    CHECK(call(calls, &strange, &sum, 2) == &unknown);
    for (int32_t flag = 1; flag <= 0x400; flag *= 2)
        if (flag & RR_ARRAY_USUAL) {
            strange = array;
            strange.flags &= ~flag;
            CHECK(call(calls, &strange, &sum, 2) == &unknown);
        }
    void *end = calls->end;
    calls->end = NULL;
    CHECK(call(calls, &array, &sum, 2) == &unknown);
    calls->end = end;
    CHECK(released == 1 && taken == 1);
    closes = calls;
    CHECK(call(calls, &array, &sum, 2) == &done);
    CHECK(call(calls, &array, &sum, 2) == &unknown);
    closes = NULL;
    calls->end = end;
    CHECK(released == 2 && unknown.references == held - 2);
}

static void *end(rr_small_calls *calls)
{
    rr_array self = {.data = calls};
    return rr_small_end(&self, NULL, 0);
}

/* `calls` is of a rank that is alone. */
static void only_while_no_other_call_runs(rr_small_calls *calls)
{
    float data[COUNT] = {1, 2, 3, 4, 5, 6};
    rr_array array = new_array(data);
    uint64_t caller = 0;
    calls->lock = &lock;
    calls->unlock = &unlock;
    calls->caller = &caller;
    CHECK(call(calls, &array, &sum, 2) == &done && depth == 0 && caller == 0);
    calls->thread = (uint64_t)pthread_self() + 1;
    CHECK(call(calls, &array, &sum, 2) == &unknown && depth == 0 && caller == 0);
    calls->thread = (uint64_t)pthread_self();
    CHECK(call(calls, &array, &sum, 2) == &done && depth == 0 && caller == 0);
    calls->thread = 0;
    caller = 5;
    CHECK(call(calls, &array, &sum, 2) == &unknown && depth == 0 && caller == 5);
    CHECK(end(calls) == &unknown && depth == 0 && caller == 5);
    caller = 0;
    is_elsewhere = 1;
    CHECK(call(calls, &array, &sum, 2) == &unknown && depth == 0 && caller == 0);
    is_elsewhere = 0;
    has_raised = 1;
    CHECK(call(calls, &array, &sum, 2) == NULL && caller == 0);
    has_raised = 0;
    CHECK(calls->running == NULL);
}

int main(void)
{
    int descriptors[2];
    void *segments[2];
    uint64_t bytes[2];
    rr_shm *groups[3];
    for (int rank = 0; rank < 2; rank++) {
        CHECK(rr_segment_create(STAGING, HEAP, &descriptors[rank]) == RR_DONE);
        CHECK(rr_segment_map(descriptors[rank], &segments[rank], &bytes[rank]) == RR_DONE);
    }

    /* Alone, a call is done at once. */
    const uint64_t whole[] = {0, COUNT}, halves[] = {0, COUNT / 2, COUNT};
    rr_call alone = {.action = RR_ALL_REDUCE, .dtype = RR_FLOAT32, .op = RR_SUM, .bounds = whole};
    CHECK(rr_shm_new(&groups[2], 0, 1, segments) == RR_DONE);
    rr_small_calls calls = new_calls(RR_SMALL_COLLECTIVE, groups[2]);
    const rr_small_call known = {&float32, &sum, COUNT, sizeof(float) * COUNT, &alone};
    CHECK(rr_small_learn(&calls, &known) < RR_SMALL_CALLS);
    only_the_call_that_was_taught(&calls);
    only_while_no_other_call_runs(&calls);
    rr_shm_free(groups[2]);

    /* With another rank it is late, and goes on where it was begun. */
    rr_call together = {
        .action = RR_ALL_REDUCE, .dtype = RR_FLOAT32, .op = RR_SUM, .bounds = halves};
    for (uint32_t rank = 0; rank < 2; rank++) {
        CHECK(rr_segment_unmap(segments[rank], bytes[rank]) == RR_DONE &&
              close(descriptors[rank]) == 0);
        CHECK(rr_segment_create(STAGING, HEAP, &descriptors[rank]) == RR_DONE);
        CHECK(rr_segment_map(descriptors[rank], &segments[rank], &bytes[rank]) == RR_DONE);
    }
    for (uint32_t rank = 0; rank < 2; rank++)
        CHECK(rr_shm_new(&groups[rank], rank, 2, segments) == RR_DONE);
    float data[2][COUNT];
    for (int i = 0; i < COUNT; i++) {
        data[0][i] = (float)i;
        data[1][i] = 10;
    }
    rr_array array = new_array(data[0]);
    calls = new_calls(RR_SMALL_COLLECTIVE, groups[0]);
    const rr_small_call both = {&float32, &sum, COUNT, sizeof(float) * COUNT, &together};
    rr_small_learn(&calls, &both);
    uint64_t caller = 0;
    calls.lock = &lock;
    calls.unlock = &unlock;
    calls.caller = &caller;
    CHECK(call(&calls, &array, &sum, 2) == &late && calls.bytes == 0);
    /* Until its end no other call begins, not even this thread's. */
    CHECK(depth == 1 && caller == (uint64_t)pthread_self() && calls.running != NULL);
    CHECK(call(&calls, &array, &sum, 2) == &unknown && depth == 1);
    int status[2] = {RR_WAITING, RR_WAITING};
    while (status[0] != RR_DONE || status[1] != RR_DONE)
        for (int rank = 1; rank >= 0; rank--)
            if (status[rank] != RR_DONE)
                status[rank] = rr_shm_run(groups[rank], &together, data[rank], &LIMITS);
    for (int i = 0; i < COUNT; i++)
        CHECK(data[0][i] == (float)i + 10 && data[1][i] == data[0][i]);
    CHECK(end(&calls) == &unknown && depth == 0 && caller == 0 && calls.running == NULL);

    /* A message: the receiver finds what was sent. */
    rr_pair *sender, *receiver;
    CHECK(rr_pair_new(&sender, 2, segments, 0, 1) == RR_DONE);
    CHECK(rr_pair_new(&receiver, 2, segments, 0, 1) == RR_DONE);
    CHECK(rr_segment_reserve(descriptors[0], segments[0], 0, HEAP / 2) == RR_DONE);
    rr_pair_open(sender, 0);
    const uint64_t header[8] = {1, 2};
    const rr_small_call message = {&float32, &sum, COUNT, sizeof(float) * COUNT, header};
    rr_small_calls sends = new_calls(RR_SMALL_SEND, sender);
    rr_small_calls receives = new_calls(RR_SMALL_RECEIVE, receiver);
    rr_small_learn(&sends, &message);
    rr_small_learn(&receives, &message);
    rr_array target = new_array(data[1]);
    memset(data[1], 0, sizeof data[1]);
    CHECK(call(&receives, &target, &sum, 2) == &late && receives.running == NULL);
    CHECK(call(&sends, &array, &sum, 2) == &done);
    CHECK(call(&receives, &target, &sum, 2) == &done && receives.bytes == sizeof data[1]);
    CHECK(memcmp(data[0], data[1], sizeof data[0]) == 0);

    rr_pair_free(sender);
    rr_pair_free(receiver);
    for (uint32_t rank = 0; rank < 2; rank++) {
        rr_shm_free(groups[rank]);
        CHECK(rr_segment_unmap(segments[rank], bytes[rank]) == RR_DONE &&
              close(descriptors[rank]) == 0);
    }
    return 0;
}
