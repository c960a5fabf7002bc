/* Plans, rounds and queues; an engine in a thread that doubles; every way of ending. */

#include "ringreduce.h"

#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>

enum { BUCKETS = 3, ROUNDS = 300 };

static char why[RR_WHY_BYTES];

/* Two gradients of 5 and 3 floats with padding between and after them. */
static const rr_slot SLOTS[] = {{0, 20}, {64, 12}};
static float memory[BUCKETS][32];

static int64_t registered(rr_handover *handover)
{
    rr_bucket buckets[BUCKETS];
    int64_t plan = -1;
    for (int i = 0; i < BUCKETS; i++)
        buckets[i] = (rr_bucket){memory[i], sizeof memory[i], SLOTS, 2};
    CHECK(rr_handover_register(handover, buckets, BUCKETS, &plan) == RR_DONE);
    return plan;
}

static rr_handover *opened(void)
{
    rr_handover *handover = NULL;
    CHECK(rr_handover_open(&handover) == RR_DONE);
    return handover;
}

static int start(int64_t plan, uint32_t bucket, float value)
{
    float first[5], second[3];
    for (int i = 0; i < 5; i++)
        first[i] = value;
    for (int i = 0; i < 3; i++)
        second[i] = -value;
    rr_part parts[] = {{first, sizeof first}, {second, sizeof second}};
    return rr_handover_start(plan, bucket, parts, 2, why);
}

static int wait_for(int64_t plan, uint32_t bucket, float *value)
{
    float first[5] = {0}, second[3] = {0};
    rr_part parts[] = {{first, sizeof first}, {second, sizeof second}};
    int code = rr_handover_wait(plan, bucket, parts, 2, why);
    for (int i = 0; i < 5 && code == RR_DONE; i++)
        CHECK(first[i] == first[0] && second[i % 3] == -first[0]);
    *value = first[0];
    return code;
}

/* The engine: doubles what it gets, and fails on a complaint. */
static void *engine(void *argument)
{
    rr_handover *handover = argument;
    rr_item item;
    uint32_t expected = 0;
    while (rr_handover_take(handover, &item) == RR_DONE) {
        if (item.kind == RR_ITEM_BUCKET) {
            CHECK(item.bucket == expected);
            expected = (expected + 1) % BUCKETS;
            for (int i = 0; i < 32; i++)
                memory[item.bucket][i] *= 2;
        } else if (item.kind == RR_ITEM_COMPLAINT) {
            rr_handover_fail(handover, "out of turn");
        }
        rr_handover_finish(handover);
    }
    return NULL;
}

static void test_rounds(void)
{
    rr_handover *handover = opened();
    int64_t plan = registered(handover);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, engine, handover) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        memset(memory, 0x7f, sizeof memory); /* whatever lies in the padding must go */
        /* Against plan order: the engine gets them in plan order all the same. */
        for (uint32_t i = BUCKETS; i-- > 0;)
            CHECK(start(plan, i, (float)(round + (int)i)) == RR_DONE);
        for (uint32_t i = 0; i < BUCKETS; i++) {
            float value;
            CHECK(wait_for(plan, i, &value) == RR_DONE);
            CHECK(value == 2 * (float)(round + (int)i));
            CHECK(memory[i][5] == 0 && memory[i][15] == 0 && memory[i][31] == 0);
        }
    }
    CHECK(rr_handover_wait_idle(handover, 1000) == 1);
    CHECK(rr_handover_unregister(plan) == RR_DONE);
    CHECK(start(plan, 0, 1) == RR_HANDOVER_MISUSED && strstr(why, "given up") != NULL);
    rr_handover_close(handover, "closed");
    pthread_join(thread, NULL);
}

static void test_queue_is_first_in_first_out(void)
{
    rr_handover *handover = opened();
    int64_t plan = registered(handover), other = registered(handover);
    rr_item item;
    CHECK(start(plan, 0, 1) == RR_DONE);
    CHECK(rr_handover_post(handover, 7) == RR_DONE);
    CHECK(start(plan, 2, 1) == RR_DONE); /* has to wait for bucket 1 */
    CHECK(start(other, 0, 1) == RR_DONE);
    CHECK(start(plan, 1, 1) == RR_DONE);
    CHECK(rr_handover_wait_idle(handover, 1) == 0);
    const struct {
        int kind;
        int64_t number;
        uint32_t bucket;
    } expected[] = {
        {RR_ITEM_BUCKET, plan, 0}, {RR_ITEM_JOB, 7, 0},       {RR_ITEM_BUCKET, other, 0},
        {RR_ITEM_BUCKET, plan, 1}, {RR_ITEM_BUCKET, plan, 2},
    };
    for (int i = 0; i < 5; i++) {
        CHECK(rr_handover_take(handover, &item) == RR_DONE);
        CHECK(rr_handover_wait_idle(handover, 1) == 0);
        CHECK(item.kind == expected[i].kind);
        CHECK(item.kind == RR_ITEM_JOB ? item.job == 7 : item.plan == expected[i].number);
        CHECK(item.kind == RR_ITEM_JOB || item.bucket == expected[i].bucket);
        rr_handover_finish(handover);
    }
    CHECK(rr_handover_wait_idle(handover, 1) == 1);
    CHECK(rr_handover_unregister(plan) == RR_HANDOVER_BUSY);
    rr_handover_close(handover, "closed");
    CHECK(rr_handover_post(handover, 8) == RR_HANDOVER_CLOSED);
}

/* A round that has failed never ends, but its plan need not stay for that. */
static void test_failed_plan_can_be_forgotten_once_nothing_is_taken(void)
{
    rr_handover *handover = opened();
    int64_t plan = registered(handover), other = registered(handover);
    rr_item item;
    float value;
    CHECK(start(plan, 0, 1) == RR_DONE && start(plan, 1, 1) == RR_DONE);
    CHECK(start(other, 0, 1) == RR_DONE);
    CHECK(rr_handover_take(handover, &item) == RR_DONE && item.plan == plan);
    CHECK(rr_handover_unregister(other) == RR_HANDOVER_BUSY);
    rr_handover_fail(handover, "failed");
    CHECK(rr_handover_unregister(other) == RR_DONE);
    CHECK(rr_handover_unregister(plan) == RR_HANDOVER_BUSY);
    rr_handover_finish(handover);
    CHECK(rr_handover_unregister(plan) == RR_DONE);
    CHECK(wait_for(plan, 0, &value) == RR_HANDOVER_FAILED && strcmp(why, "failed") == 0);
    CHECK(start(other, 0, 1) == RR_HANDOVER_FAILED);
    rr_handover_close(handover, "closed");
}

static void test_what_does_not_fit_is_refused(void)
{
    rr_handover *handover = opened();
    float value;
    int64_t plan = registered(handover);
    CHECK(start(plan + 1000, 0, 1) == RR_HANDOVER_MISUSED && strstr(why, "no such plan") != NULL);
    CHECK(start(-1, 0, 1) == RR_HANDOVER_MISUSED);
    CHECK(start(plan, BUCKETS, 1) == RR_HANDOVER_MISUSED && strstr(why, "no such bucket") != NULL);
    CHECK(rr_handover_unregister(-5) == RR_HANDOVER_MISUSED);
    rr_part parts[] = {{&value, 4}, {&value, 12}};
    CHECK(rr_handover_start(plan, 0, parts, 1, why) == RR_HANDOVER_MISUSED);
    CHECK(strstr(why, "number of gradients") != NULL);
    CHECK(rr_handover_start(plan, 0, parts, 2, why) == RR_HANDOVER_MISUSED);
    CHECK(strstr(why, "another size") != NULL);
    CHECK(wait_for(plan, 0, &value) == RR_HANDOVER_MISUSED && strstr(why, "not started") != NULL);
    const rr_slot beyond[] = {{120, 12}}, crossing[] = {{0, 20}, {16, 4}};
    const rr_bucket wrong[] = {{memory, 128, beyond, 1}, {memory, 128, crossing, 2}};
    CHECK(rr_handover_register(handover, &wrong[0], 1, &plan) == -EINVAL);
    CHECK(rr_handover_register(handover, &wrong[1], 1, &plan) == -EINVAL);
    rr_handover_close(handover, "closed");
}

static void test_second_start_breaks_everything(void)
{
    rr_handover *handover = opened();
    int64_t plan = registered(handover), other = registered(handover);
    float value;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, engine, handover) == 0);
    CHECK(start(plan, 0, 1) == RR_DONE);
    CHECK(wait_for(plan, 0, &value) == RR_DONE);
    CHECK(start(plan, 0, 1) == RR_HANDOVER_FAILED && strcmp(why, "out of turn") == 0);
    CHECK(wait_for(plan, 0, &value) == RR_HANDOVER_FAILED);
    CHECK(start(other, 0, 1) == RR_HANDOVER_FAILED && strcmp(why, "out of turn") == 0);
    rr_handover_close(handover, "closed");
    pthread_join(thread, NULL);
    /* What went wrong first is what a latecomer should read. */
    CHECK(start(plan, 0, 1) == RR_HANDOVER_CLOSED && strcmp(why, "out of turn") == 0);
}

struct waiter {
    pthread_t thread;
    int64_t plan;
    uint32_t bucket;
    int code;
    char why[RR_WHY_BYTES];
};

static void *wait_in_thread(void *argument)
{
    struct waiter *waiter = argument;
    float first[5], second[3];
    rr_part parts[] = {{first, sizeof first}, {second, sizeof second}};
    waiter->code = rr_handover_wait(waiter->plan, waiter->bucket, parts, 2, waiter->why);
    return NULL;
}

/* All buckets started, nobody reduces, two threads wait; then `end` comes. */
static void test_waits_end(void (*end)(rr_handover *, const char *), int expected)
{
    rr_handover *handover = opened();
    int64_t plan = registered(handover);
    struct waiter waiters[2];
    for (uint32_t i = 0; i < BUCKETS; i++)
        CHECK(start(plan, i, 1) == RR_DONE);
    for (uint32_t i = 0; i < 2; i++) {
        waiters[i] = (struct waiter){.plan = plan, .bucket = i};
        CHECK(pthread_create(&waiters[i].thread, NULL, wait_in_thread, &waiters[i]) == 0);
    }
    end(handover, "the end");
    for (uint32_t i = 0; i < 2; i++) {
        pthread_join(waiters[i].thread, NULL);
        CHECK(waiters[i].code == expected && strcmp(waiters[i].why, "the end") == 0);
    }
    rr_handover_close(handover, "the end");
}

/* Two threads wait for the one bucket of a plan, which goes as soon as one of them has it. Under
 * the address sanitizer: the other must not look at a plan that is gone. */
static void test_plan_stays_while_somebody_is_inside(void)
{
    rr_handover *handover = opened();
    const rr_bucket only = {memory[0], sizeof memory[0], SLOTS, 2};
    for (int round = 0; round < ROUNDS; round++) {
        int64_t plan = -1;
        rr_item item;
        CHECK(rr_handover_register(handover, &only, 1, &plan) == RR_DONE);
        CHECK(start(plan, 0, 1) == RR_DONE);
        CHECK(rr_handover_take(handover, &item) == RR_DONE);
        struct waiter waiters[2];
        for (uint32_t i = 0; i < 2; i++) {
            waiters[i] = (struct waiter){.plan = plan, .bucket = 0};
            CHECK(pthread_create(&waiters[i].thread, NULL, wait_in_thread, &waiters[i]) == 0);
        }
        for (int turn = 0; turn < 50; turn++)
            sched_yield();
        rr_handover_finish(handover);
        while (rr_handover_unregister(plan) != RR_DONE)
            ;
        int done = 0;
        for (uint32_t i = 0; i < 2; i++) {
            pthread_join(waiters[i].thread, NULL);
            CHECK(waiters[i].code == RR_DONE || waiters[i].code == RR_HANDOVER_MISUSED);
            done += waiters[i].code == RR_DONE;
        }
        CHECK(done == 1);
    }
    rr_handover_close(handover, "closed");
}

static void test_long_text_is_cut(void)
{
    static char text[2 * RR_WHY_BYTES];
    rr_handover *handover = opened();
    int64_t plan = registered(handover);
    memset(text, 'x', sizeof text - 1);
    rr_handover_fail(handover, text);
    CHECK(start(plan, 0, 1) == RR_HANDOVER_FAILED && strlen(why) == RR_WHY_BYTES - 1);
    rr_handover_close(handover, "closed");
}

int main(void)
{
    test_rounds();
    test_queue_is_first_in_first_out();
    test_failed_plan_can_be_forgotten_once_nothing_is_taken();
    test_what_does_not_fit_is_refused();
    test_second_start_breaks_everything();
    for (int i = 0; i < 50; i++) {
        test_waits_end(rr_handover_fail, RR_HANDOVER_FAILED);
        test_waits_end(rr_handover_close, RR_HANDOVER_CLOSED);
    }
    test_plan_stays_while_somebody_is_inside();
    test_long_text_is_cut();
    return 0;
}
