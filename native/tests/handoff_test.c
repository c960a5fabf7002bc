/* Plans, rounds and queues; an engine in a thread that doubles; every way of ending. */

#include "ringreduce.h"

#include "check.h"
#include "handoff.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>

enum { BUCKETS = 3, ROUNDS = 300 };

static char why[RR_WHY_BYTES];

/* Two gradients of 5 and 3 floats with padding between and after them. */
static const rr_slot SLOTS[] = {{0, 20}, {64, 12}};
static float memory[BUCKETS][32];

static rr_area *areas[4096];
static int area_count;

/* A new area each time, since a round that has failed keeps its area as long as the plan lives. */
static rr_area **area_of(void *data)
{
    CHECK(area_count < 4096);
    rr_area **made = &areas[area_count++];
    *made = rr_area_new(data, NULL, 0, 0);
    CHECK(*made != NULL);
    return made;
}

/* All plans are gone, so nothing uses an area. */
static void free_areas(void)
{
    for (int i = 0; i < area_count; i++) {
        CHECK(!rr_area_is_used(areas[i]));
        rr_area_free(areas[i]);
    }
}

static int64_t registered(rr_handoff *handoff)
{
    rr_bucket buckets[BUCKETS];
    int64_t plan = -1;
    for (int i = 0; i < BUCKETS; i++)
        buckets[i] = (rr_bucket){area_of(memory[i]), sizeof memory[i], SLOTS, NULL, 1, 2, 0};
    CHECK(rr_handoff_register(handoff, buckets, BUCKETS, &plan) == RR_DONE);
    return plan;
}

static rr_events events;

static rr_handoff *opened(void)
{
    rr_handoff *handoff = NULL;
    events = (rr_events){.current.number = 8};
    CHECK(rr_handoff_open(&handoff, &events) == RR_DONE);
    return handoff;
}

static int start(int64_t plan, uint32_t bucket, float value)
{
    float first[5], second[3];
    for (int i = 0; i < 5; i++)
        first[i] = value;
    for (int i = 0; i < 3; i++)
        second[i] = -value;
    rr_part parts[] = {{first, sizeof first}, {second, sizeof second}};
    return rr_handoff_start(plan, bucket, parts, 2, why);
}

static int wait_for(int64_t plan, uint32_t bucket, float *value)
{
    float first[5] = {0}, second[3] = {0};
    rr_part parts[] = {{first, sizeof first}, {second, sizeof second}};
    int code = rr_handoff_wait(plan, bucket, parts, 2, NULL, why);
    for (int i = 0; i < 5 && code == RR_DONE; i++)
        CHECK(first[i] == first[0] && second[i % 3] == -first[0]);
    *value = first[0];
    return code;
}

/* The engine: doubles what it gets, and fails on a complaint. */
static void *engine(void *argument)
{
    rr_handoff *handoff = argument;
    rr_item item;
    uint32_t expected = 0;
    while (rr_handoff_take(handoff, &item) == RR_DONE) {
        if (item.kind == RR_ITEM_BUCKET) {
            CHECK(item.bucket == expected);
            expected = (expected + 1) % BUCKETS;
            for (int i = 0; i < 32; i++)
                memory[item.bucket][i] *= 2;
        } else if (item.kind == RR_ITEM_COMPLAINT) {
            rr_handoff_fail(handoff, "out of turn");
        }
        rr_handoff_finish(handoff, NULL);
    }
    return NULL;
}

static void test_rounds(void)
{
    rr_handoff *handoff = opened();
    int64_t plan = registered(handoff);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, engine, handoff) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        memset(memory, 0x7f, sizeof memory); /* start must clear the padding */
        /* Not in plan order, but the engine takes them in plan order. */
        for (uint32_t i = BUCKETS; i-- > 0;)
            CHECK(start(plan, i, (float)(round + (int)i)) == RR_DONE);
        for (uint32_t i = 0; i < BUCKETS; i++) {
            float value;
            CHECK(wait_for(plan, i, &value) == RR_DONE);
            CHECK(value == 2 * (float)(round + (int)i));
            CHECK(memory[i][5] == 0 && memory[i][15] == 0 && memory[i][31] == 0);
        }
    }
    CHECK(rr_handoff_wait_idle(handoff, 1000) == 1);
    CHECK(rr_handoff_unregister(plan) == RR_DONE);
    CHECK(start(plan, 0, 1) == RR_HANDOFF_MISUSED && strstr(why, "given up") != NULL);
    rr_handoff_close(handoff, "closed");
    pthread_join(thread, NULL);
}

static void test_queue_is_first_in_first_out(void)
{
    rr_handoff *handoff = opened();
    int64_t plan = registered(handoff), other = registered(handoff);
    rr_item item;
    CHECK(start(plan, 0, 1) == RR_DONE);
    CHECK(rr_handoff_post(handoff, 7) == RR_DONE);
    CHECK(start(plan, 2, 1) == RR_DONE); /* has to wait for bucket 1 */
    CHECK(start(other, 0, 1) == RR_DONE);
    CHECK(start(plan, 1, 1) == RR_DONE);
    CHECK(rr_handoff_wait_idle(handoff, 1) == 0);
    const struct {
        int kind;
        int64_t number;
        uint32_t bucket;
    } expected[] = {
        {RR_ITEM_BUCKET, plan, 0}, {RR_ITEM_JOB, 7, 0},       {RR_ITEM_BUCKET, other, 0},
        {RR_ITEM_BUCKET, plan, 1}, {RR_ITEM_BUCKET, plan, 2},
    };
    for (int i = 0; i < 5; i++) {
        CHECK(rr_handoff_take(handoff, &item) == RR_DONE);
        CHECK(rr_handoff_wait_idle(handoff, 1) == 0);
        CHECK(item.kind == expected[i].kind);
        CHECK(item.kind == RR_ITEM_JOB ? item.job == 7 : item.plan == expected[i].number);
        CHECK(item.kind == RR_ITEM_JOB || item.bucket == expected[i].bucket);
        rr_handoff_finish(handoff, NULL);
    }
    CHECK(rr_handoff_wait_idle(handoff, 1) == 1);
    CHECK(rr_handoff_unregister(plan) == RR_HANDOFF_BUSY);
    rr_handoff_close(handoff, "closed");
    CHECK(rr_handoff_post(handoff, 8) == RR_HANDOFF_CLOSED);
}

/* A round that has failed never ends, but its plan can be unregistered. */
static void test_failed_plan_can_be_forgotten_once_nothing_is_taken(void)
{
    rr_handoff *handoff = opened();
    int64_t plan = registered(handoff), other = registered(handoff);
    rr_item item;
    float value;
    CHECK(start(plan, 0, 1) == RR_DONE && start(plan, 1, 1) == RR_DONE);
    CHECK(start(other, 0, 1) == RR_DONE);
    CHECK(rr_handoff_take(handoff, &item) == RR_DONE && item.plan == plan);
    CHECK(rr_handoff_unregister(other) == RR_HANDOFF_BUSY);
    CHECK(rr_handoff_post(handoff, 4) == RR_DONE);
    rr_handoff_fail(handoff, "failed");
    rr_handoff_fail(handoff, "a consequence");
    CHECK(rr_handoff_unregister(other) == RR_DONE);
    CHECK(rr_handoff_unregister(plan) == RR_HANDOFF_BUSY);
    rr_handoff_finish(handoff, NULL);
    CHECK(rr_handoff_unregister(plan) == RR_DONE);
    CHECK(wait_for(plan, 0, &value) == RR_HANDOFF_FAILED && strcmp(why, "failed") == 0);
    CHECK(start(other, 0, 1) == RR_HANDOFF_FAILED);
    /* Of what was queued only the job is left. */
    CHECK(rr_handoff_take(handoff, &item) == RR_DONE && item.job == 4);
    rr_handoff_finish(handoff, NULL);
    CHECK(rr_handoff_wait_idle(handoff, 0) == 1);
    rr_handoff_close(handoff, "closed");
    CHECK(start(other, 0, 1) == RR_HANDOFF_CLOSED && strcmp(why, "failed") == 0);
}

static void test_what_does_not_fit_is_refused(void)
{
    rr_handoff *handoff = opened();
    float value;
    int64_t plan = registered(handoff);
    CHECK(start(plan + 1000, 0, 1) == RR_HANDOFF_MISUSED && strstr(why, "no such plan") != NULL);
    CHECK(start(-1, 0, 1) == RR_HANDOFF_MISUSED);
    CHECK(start(plan, BUCKETS, 1) == RR_HANDOFF_MISUSED && strstr(why, "no such bucket") != NULL);
    CHECK(rr_handoff_unregister(-5) == RR_HANDOFF_MISUSED);
    rr_part parts[] = {{&value, 4}, {&value, 12}};
    CHECK(rr_handoff_start(plan, 0, parts, 1, why) == RR_HANDOFF_MISUSED);
    CHECK(strstr(why, "number of gradients") != NULL);
    CHECK(rr_handoff_start(plan, 0, parts, 2, why) == RR_HANDOFF_MISUSED);
    CHECK(strstr(why, "another size") != NULL);
    /* The plan can still be used. */
    for (uint32_t i = 0; i < BUCKETS; i++) {
        rr_item item;
        CHECK(wait_for(plan, i, &value) == RR_HANDOFF_MISUSED);
        CHECK(strstr(why, "not started") != NULL);
        CHECK(start(plan, i, 2) == RR_DONE && rr_handoff_take(handoff, &item) == RR_DONE);
        rr_handoff_finish(handoff, NULL);
        CHECK(wait_for(plan, i, &value) == RR_DONE && value == 2);
    }
    const rr_slot beyond[] = {{120, 12}}, crossing[] = {{0, 20}, {16, 4}};
    rr_area *const *area = area_of(memory);
    const rr_bucket wrong[] = {{area, 128, beyond, NULL, 1, 1, 0},
                               {area, 128, crossing, NULL, 1, 2, 0}};
    CHECK(rr_handoff_register(handoff, &wrong[0], 1, &plan) == -EINVAL);
    CHECK(rr_handoff_register(handoff, &wrong[1], 1, &plan) == -EINVAL);
    rr_handoff_close(handoff, "closed");
}

static void test_second_start_breaks_everything(void)
{
    rr_handoff *handoff = opened();
    int64_t plan = registered(handoff), other = registered(handoff);
    float value;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, engine, handoff) == 0);
    CHECK(start(plan, 0, 1) == RR_DONE);
    CHECK(wait_for(plan, 0, &value) == RR_DONE);
    CHECK(start(plan, 0, 1) == RR_HANDOFF_FAILED && strcmp(why, "out of turn") == 0);
    CHECK(wait_for(plan, 0, &value) == RR_HANDOFF_FAILED);
    CHECK(start(other, 0, 1) == RR_HANDOFF_FAILED && strcmp(why, "out of turn") == 0);
    rr_handoff_close(handoff, "closed");
    pthread_join(thread, NULL);
    /* A late caller gets the first failure. */
    CHECK(start(plan, 0, 1) == RR_HANDOFF_CLOSED && strcmp(why, "out of turn") == 0);
}

static bool is_complaining(rr_handoff *handoff)
{
    pthread_mutex_lock(&rr_handoff_lock);
    const bool is_so = handoff->complaint;
    pthread_mutex_unlock(&rr_handoff_lock);
    return is_so;
}

static void *start_again(void *plan)
{
    char text[RR_WHY_BYTES];
    float first[5] = {0}, second[3] = {0};
    rr_part parts[] = {{first, sizeof first}, {second, sizeof second}};
    const int code = rr_handoff_start(*(int64_t *)plan, 0, parts, 2, text);
    CHECK(code == RR_HANDOFF_FAILED || code == RR_HANDOFF_CLOSED);
    CHECK(strcmp(text, code == RR_HANDOFF_FAILED ? "out of step" : "closed") == 0);
    return NULL;
}

/* A second start is a complaint, whether the bucket is packed, taken, reduced or waited for. It
 * goes before what is queued, which must not be reduced any more; a queue that has one is not idle.
 */
static void test_second_start_is_a_complaint(int state, bool is_closed)
{
    rr_handoff *handoff = opened();
    int64_t plan = registered(handoff);
    rr_item item;
    float value;
    pthread_t thread;
    CHECK(start(plan, 0, 1) == RR_DONE);
    if (state > 0)
        CHECK(rr_handoff_take(handoff, &item) == RR_DONE && item.kind == RR_ITEM_BUCKET);
    if (state > 1)
        rr_handoff_finish(handoff, NULL);
    if (state > 2)
        CHECK(wait_for(plan, 0, &value) == RR_DONE);
    CHECK(pthread_create(&thread, NULL, start_again, &plan) == 0);
    while (!is_complaining(handoff))
        sched_yield();
    if (state == 1)
        rr_handoff_finish(handoff, NULL);
    CHECK(rr_handoff_wait_idle(handoff, 1) == 0);
    if (!is_closed) {
        CHECK(rr_handoff_take(handoff, &item) == RR_DONE && item.kind == RR_ITEM_COMPLAINT);
        rr_handoff_fail(handoff, "out of step");
        rr_handoff_finish(handoff, NULL);
        pthread_join(thread, NULL);
    }
    rr_handoff_close(handoff, "closed");
    if (is_closed)
        pthread_join(thread, NULL);
}

struct turn {
    int64_t plan;
    uint32_t bucket;
    float value;
};

static void *start_and_wait(void *argument)
{
    const struct turn *turn = argument;
    char text[RR_WHY_BYTES];
    float first[5], second[3] = {0};
    rr_part parts[] = {{first, sizeof first}, {second, sizeof second}};
    for (int i = 0; i < 5; i++)
        first[i] = turn->value;
    CHECK(rr_handoff_start(turn->plan, turn->bucket, parts, 2, text) == RR_DONE);
    CHECK(rr_handoff_wait(turn->plan, turn->bucket, parts, 2, NULL, text) == RR_DONE);
    CHECK(first[0] == 2 * turn->value && first[4] == first[0] && second[2] == 0);
    return NULL;
}

/* Each bucket of a round has a thread of its own, which starts it and waits for it. */
static void test_rounds_of_many_threads(void)
{
    rr_handoff *handoff = opened();
    const int64_t plan = registered(handoff);
    pthread_t threads[BUCKETS], reducer;
    struct turn turns[BUCKETS];
    CHECK(pthread_create(&reducer, NULL, engine, handoff) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < BUCKETS; i++) {
            turns[i] = (struct turn){plan, i, (float)(round + (int)i)};
            CHECK(pthread_create(&threads[i], NULL, start_and_wait, &turns[i]) == 0);
        }
        for (uint32_t i = 0; i < BUCKETS; i++)
            pthread_join(threads[i], NULL);
    }
    rr_handoff_close(handoff, "closed");
    pthread_join(reducer, NULL);
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
    waiter->code = rr_handoff_wait(waiter->plan, waiter->bucket, parts, 2, NULL, waiter->why);
    return NULL;
}

/* All buckets are started, none is reduced, two threads wait; then `end` is called. */
static void test_waits_end(void (*end)(rr_handoff *, const char *), int expected)
{
    rr_handoff *handoff = opened();
    int64_t plan = registered(handoff);
    struct waiter waiters[2];
    for (uint32_t i = 0; i < BUCKETS; i++)
        CHECK(start(plan, i, 1) == RR_DONE);
    for (uint32_t i = 0; i < 2; i++) {
        waiters[i] = (struct waiter){.plan = plan, .bucket = i};
        CHECK(pthread_create(&waiters[i].thread, NULL, wait_in_thread, &waiters[i]) == 0);
    }
    end(handoff, "the end");
    for (uint32_t i = 0; i < 2; i++) {
        pthread_join(waiters[i].thread, NULL);
        CHECK(waiters[i].code == expected && strcmp(waiters[i].why, "the end") == 0);
    }
    rr_handoff_close(handoff, "the end");
}

/* Two threads wait for the one bucket of a plan, which is freed as soon as one of them has it.
 * Under the address sanitizer: the other must not read a freed plan. */
static void test_plan_stays_while_somebody_is_inside(void)
{
    rr_handoff *handoff = opened();
    const rr_bucket only = {area_of(memory[0]), sizeof memory[0], SLOTS, NULL, 1, 2, 0};
    for (int round = 0; round < ROUNDS; round++) {
        int64_t plan = -1;
        rr_item item;
        CHECK(rr_handoff_register(handoff, &only, 1, &plan) == RR_DONE);
        CHECK(start(plan, 0, 1) == RR_DONE);
        CHECK(rr_handoff_take(handoff, &item) == RR_DONE);
        struct waiter waiters[2];
        for (uint32_t i = 0; i < 2; i++) {
            waiters[i] = (struct waiter){.plan = plan, .bucket = 0};
            CHECK(pthread_create(&waiters[i].thread, NULL, wait_in_thread, &waiters[i]) == 0);
        }
        for (int turn = 0; turn < 50; turn++)
            sched_yield();
        rr_handoff_finish(handoff, NULL);
        while (rr_handoff_unregister(plan) != RR_DONE)
            ;
        int done = 0;
        for (uint32_t i = 0; i < 2; i++) {
            pthread_join(waiters[i].thread, NULL);
            CHECK(waiters[i].code == RR_DONE || waiters[i].code == RR_HANDOFF_MISUSED);
            done += waiters[i].code == RR_DONE;
        }
        CHECK(done == 1);
    }
    rr_handoff_close(handoff, "closed");
}

/* An asynchronous wait, and its result. */
struct asked {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int told, code;
    float first[5], second[3];
    char why[RR_WHY_BYTES];
};

static void tell(void *data, int code, const char *text)
{
    struct asked *asked = data;
    pthread_mutex_lock(&asked->lock);
    asked->told++;
    asked->code = code;
    snprintf(asked->why, sizeof asked->why, "%s", code == RR_DONE ? "" : text);
    pthread_cond_signal(&asked->changed);
    pthread_mutex_unlock(&asked->lock);
}

static int ask(struct asked *asked, int64_t plan, uint32_t bucket)
{
    *asked = (struct asked){.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    rr_part parts[] = {{asked->first, sizeof asked->first}, {asked->second, sizeof asked->second}};
    return rr_handoff_wait_async(plan, bucket, parts, 2, tell, asked, why);
}

static int answer(struct asked *asked)
{
    pthread_mutex_lock(&asked->lock);
    while (asked->told == 0)
        pthread_cond_wait(&asked->changed, &asked->lock);
    CHECK(asked->told == 1);
    pthread_mutex_unlock(&asked->lock);
    return asked->code;
}

static void test_who_asks_is_told(void)
{
    rr_handoff *handoff = opened();
    int64_t plan = registered(handoff);
    struct asked asked[BUCKETS];
    for (uint32_t i = 0; i < BUCKETS; i++)
        CHECK(start(plan, i, 1 + (float)i) == RR_DONE);
    for (uint32_t i = BUCKETS; i-- > 0;)
        CHECK(ask(&asked[i], plan, i) == RR_HANDOFF_LATER);
    CHECK(rr_handoff_unregister(plan) == RR_HANDOFF_BUSY);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, engine, handoff) == 0);
    for (uint32_t i = 0; i < BUCKETS; i++) {
        CHECK(answer(&asked[i]) == RR_DONE);
        CHECK(asked[i].first[4] == 2 + 2 * (float)i && asked[i].second[2] == -asked[i].first[0]);
    }
    CHECK(events.queued.seconds[RR_SPAN_BLOCKED] > 0);
    for (int round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < BUCKETS; i++)
            CHECK(start(plan, i, (float)round) == RR_DONE);
        for (uint32_t i = 0; i < BUCKETS; i++) {
            int code = ask(&asked[i], plan, i);
            CHECK(code == RR_DONE || (code == RR_HANDOFF_LATER && answer(&asked[i]) == RR_DONE));
            CHECK(asked[i].first[0] == 2 * (float)round);
        }
    }
    CHECK(ask(&asked[0], plan, 0) == RR_HANDOFF_MISUSED && strstr(why, "not started") != NULL);
    CHECK(ask(&asked[0], plan, BUCKETS) == RR_HANDOFF_MISUSED);
    rr_handoff_close(handoff, "closed");
    pthread_join(thread, NULL);
    CHECK(ask(&asked[0], plan, 0) == RR_HANDOFF_CLOSED && strcmp(why, "closed") == 0);
}

/* Two asynchronous waits, nothing is reduced: `end` notifies both. */
static void test_who_asks_is_told_of_the_end(void (*end)(rr_handoff *, const char *), int expected)
{
    rr_handoff *handoff = opened();
    int64_t plan = registered(handoff);
    struct asked asked[2];
    for (uint32_t i = 0; i < BUCKETS; i++)
        CHECK(start(plan, i, 1) == RR_DONE);
    for (uint32_t i = 0; i < 2; i++)
        CHECK(ask(&asked[i], plan, i) == RR_HANDOFF_LATER);
    end(handoff, "the end");
    for (uint32_t i = 0; i < 2; i++) {
        /* If `end` is close: before it returns. */
        CHECK(expected != RR_HANDOFF_CLOSED || asked[i].told == 1);
        CHECK(answer(&asked[i]) == expected && strcmp(asked[i].why, "the end") == 0);
    }
    if (expected != RR_HANDOFF_CLOSED)
        rr_handoff_close(handoff, "the end");
}

/* The engine has a bucket in XLA's memory when the handoff is closed: XLA gets the memory back when
 * the engine has finished, whether a thread waits for the bucket or not. */
static void let_go_and_tell(void *data, int code, const char *text)
{
    rr_handoff_let_go();
    tell(data, code, text);
}

static void *close_it(void *handoff)
{
    rr_handoff_close(handoff, "closed");
    return NULL;
}

static void test_what_is_lent_comes_back_after_a_close(bool is_awaited)
{
    static float own[6];
    static const rr_slot slot = {0, sizeof own};
    static const rr_bucket lent = {NULL, sizeof own, &slot, NULL, 0, 1, 0};
    rr_handoff *handoff = opened();
    int64_t plan = -1;
    rr_item item;
    rr_part part = {own, sizeof own};
    struct asked asked = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    pthread_t thread;
    CHECK(rr_handoff_register(handoff, &lent, 1, &plan) == RR_DONE);
    CHECK(rr_handoff_start(plan, 0, &part, 1, why) == RR_DONE);
    CHECK(rr_handoff_take(handoff, &item) == RR_DONE && item.memory == (void *)own);
    if (is_awaited)
        CHECK(rr_handoff_wait_async(plan, 0, &part, 1, let_go_and_tell, &asked, why) ==
              RR_HANDOFF_LATER);
    CHECK(pthread_create(&thread, NULL, close_it, handoff) == 0);
    if (!is_awaited)
        pthread_join(thread, NULL);
    while (rr_handoff_post(handoff, 0) != RR_HANDOFF_CLOSED)
        sched_yield();
    rr_handoff_finish(handoff, NULL);
    rr_handoff_let_go();
    if (is_awaited) {
        CHECK(answer(&asked) == RR_HANDOFF_CLOSED);
        pthread_join(thread, NULL);
    }
}

/* One round of a bucket fails: its waiter gets the reason, and the next round succeeds. */
static void test_a_round_may_fail_alone(void)
{
    rr_handoff *handoff = opened();
    /* The slots are 5 and 3 floats, the result is the range between them. */
    static const rr_slot result = {32, 8};
    rr_area *const *area = area_of(memory[0]);
    const rr_bucket only = {area, sizeof memory[0], SLOTS, &result, 1, 2, 1};
    const rr_bucket beyond = {area, 36, SLOTS, &result, 1, 1, 1};
    int64_t plan = -1;
    rr_item item;
    float found[2] = {0};
    rr_part part = {found, sizeof found};
    CHECK(rr_handoff_register(handoff, &beyond, 1, &plan) == -EINVAL);
    CHECK(rr_handoff_register(handoff, &only, 1, &plan) == RR_DONE);
    for (int i = 0; i < 3; i++) {
        const char *text = i == 2 ? NULL : "not this time";
        CHECK(start(plan, 0, 1) == RR_DONE);
        CHECK(rr_handoff_take(handoff, &item) == RR_DONE);
        memory[0][8] = 7;
        memory[0][9] = 8;
        rr_handoff_finish(handoff, text);
        CHECK(rr_handoff_wait(plan, 0, &part, 1, NULL, why) ==
              (i == 2 ? RR_DONE : RR_HANDOFF_REFUSED));
        CHECK(i == 2 || strcmp(why, text) == 0);
    }
    CHECK(found[0] == 7 && found[1] == 8);
    part.nbytes = 4;
    CHECK(start(plan, 0, 1) == RR_DONE);
    CHECK(rr_handoff_wait(plan, 0, &part, 1, NULL, why) == RR_HANDOFF_MISUSED);
    rr_handoff_close(handoff, "closed");
}

static void test_reopened_after_a_failure(void)
{
    rr_handoff *handoff = opened();
    rr_item item;
    int64_t plan = registered(handoff);
    CHECK(start(plan, 0, 1) == RR_DONE && start(plan, 1, 3) == RR_DONE);
    CHECK(rr_handoff_take(handoff, &item) == RR_DONE && item.bucket == 0);
    rr_handoff_fail(handoff, "lost rank 1");
    CHECK(start(plan, 0, 1) == RR_HANDOFF_FAILED);
    rr_handoff_finish(handoff, NULL);
    CHECK(rr_handoff_reopen(handoff) == RR_DONE);
    /* The plan stays, and begins with its first bucket, whatever was under way. */
    CHECK(start(plan, 0, 1) == RR_DONE);
    CHECK(rr_handoff_take(handoff, &item) == RR_DONE && item.bucket == 0);
    rr_handoff_finish(handoff, NULL);
    CHECK(rr_handoff_reopen(handoff) == RR_DONE); /* nothing has failed */
    CHECK(start(plan, 1, 3) == RR_DONE);
    CHECK(rr_handoff_take(handoff, &item) == RR_DONE && item.bucket == 1);
    rr_handoff_finish(handoff, NULL);
    rr_handoff_close(handoff, "closed");
    CHECK(rr_handoff_reopen(handoff) == RR_HANDOFF_CLOSED);
}

/* Two areas, as of weights: what is lent stays as it is while later rounds use other memory. */
static void test_results_are_lent(void)
{
    static float first[8], second[8];
    static const rr_slot slot = {0, sizeof first};
    rr_handoff *handoff = opened();
    rr_area **one = area_of(first), **two = area_of(second), *both[] = {*one, *two};
    const rr_bucket bucket = {both, sizeof first, &slot, NULL, 2, 1, 0};
    int64_t plan = -1;
    rr_area *lenders[4];
    float *lent[4];
    CHECK(rr_handoff_register(handoff, &bucket, 1, &plan) == RR_DONE);
    for (int round = 0; round < 4; round++) {
        float values[8];
        for (int i = 0; i < 8; i++)
            values[i] = (float)(round + 1);
        rr_part part = {values, sizeof values};
        rr_item item;
        if (round == 3) /* of the first area nothing is lent any more */
            rr_area_give_back(lenders[0]);
        CHECK(rr_handoff_start(plan, 0, &part, 1, why) == RR_DONE);
        CHECK(rr_handoff_take(handoff, &item) == RR_DONE);
        if (round != 2) /* else it is spare memory */
            CHECK(item.memory == (round == 1 ? second : first));
        CHECK((uintptr_t)item.memory % 4 == 0 && ((float *)item.memory)[7] == values[7]);
        rr_handoff_finish(handoff, NULL);
        part.data = NULL;
        CHECK(rr_handoff_wait(plan, 0, &part, 1, &lenders[round], why) == RR_DONE);
        lent[round] = part.data;
        CHECK(lent[round] == item.memory);
        CHECK(rr_handoff_wait(plan, 0, &part, 1, NULL, why) == RR_HANDOFF_MISUSED);
    }
    for (int round = 1; round < 4; round++)
        CHECK(lent[round][0] == (float)(round + 1) && lent[round][7] == lent[round][0]);
    CHECK(rr_handoff_unregister(plan) == RR_DONE);
    CHECK(rr_area_is_used(*one) && rr_area_is_used(*two));
    rr_handoff_close(handoff, "closed");
    for (int round = 1; round < 4; round++)
        rr_area_give_back(lenders[round]);
    CHECK(!rr_area_is_used(*one) && !rr_area_is_used(*two));
}

/* Two ranks share memory: a round waits for what either has lent, not for the other's round. */
static void test_ranks_share_an_area(void)
{
    static struct mark marks[2];
    static char shared[64];
    rr_area *area[2];
    _Static_assert(sizeof marks[0] == RR_MARK_BYTES, "a mark is a line");
    for (uint32_t rank = 0; rank < 2; rank++) {
        marks[rank].holds = 1;
        area[rank] = rr_area_new(shared, marks, 2, rank);
    }
    CHECK(rr_area_is_used(area[0]) && !rr_area_is_used(area[1])); /* the memory is rank 0's */
    for (uint32_t lender = 0; lender < 2; lender++) {
        CHECK(rr_area_take(area[0]) && rr_area_take(area[1]));
        rr_area_lend(area[lender]);
        rr_area_lend(area[lender]);
        rr_area_leave(area[0]);
        rr_area_leave(area[1]);
        rr_area_give_back(area[lender]);
        CHECK(!rr_area_take(area[0]) && !rr_area_take(area[1]));
        CHECK(rr_area_is_used(area[lender]));
        rr_area_give_back(area[lender]);
    }
    CHECK(rr_area_take(area[0]));
    rr_area_leave(area[0]);
    CHECK(rr_area_is_used(area[0]) && !rr_area_is_used(area[1]));
    rr_area_free(area[1]);
    CHECK(!rr_area_is_used(area[0]));
    rr_area_free(area[0]);
}

/* A result of no bytes, for which there is no memory, is not lent: nobody would give it back. */
static void test_nothing_is_not_lent(void)
{
    static float values[8];
    static const rr_slot slots[] = {{0, 0}, {0, sizeof values}};
    rr_handoff *handoff = opened();
    rr_area **area = area_of(values);
    const rr_bucket bucket = {area, sizeof values, slots, NULL, 1, 2, 0};
    int64_t plan = -1;
    rr_item item;
    float own[8] = {1};
    rr_part parts[] = {{NULL, 0}, {own, sizeof own}};
    rr_area *lender = NULL;
    CHECK(rr_handoff_register(handoff, &bucket, 1, &plan) == RR_DONE);
    CHECK(rr_handoff_start(plan, 0, parts, 2, why) == RR_DONE);
    CHECK(rr_handoff_take(handoff, &item) == RR_DONE);
    rr_handoff_finish(handoff, NULL);
    CHECK(rr_handoff_wait(plan, 0, parts, 2, &lender, why) == RR_DONE);
    CHECK(lender == NULL && rr_handoff_unregister(plan) == RR_DONE && !rr_area_is_used(*area));
    rr_handoff_close(handoff, "closed");
}

/* A result is given back by another thread while the next round begins. */
static void *give_back_soon(void *area)
{
    sched_yield();
    rr_area_give_back(area);
    return NULL;
}

static void test_results_come_back_from_other_threads(void)
{
    static float first[8], second[8];
    static const rr_slot slot = {0, sizeof first};
    rr_handoff *handoff = opened();
    rr_area *both[] = {*area_of(first), *area_of(second)};
    const rr_bucket bucket = {both, sizeof first, &slot, NULL, 2, 1, 0};
    int64_t plan = -1;
    pthread_t thread;
    CHECK(rr_handoff_register(handoff, &bucket, 1, &plan) == RR_DONE);
    for (int round = 0; round < ROUNDS; round++) {
        float values[8] = {(float)round};
        rr_part part = {values, sizeof values};
        rr_item item;
        rr_area *lender = NULL;
        CHECK(rr_handoff_start(plan, 0, &part, 1, why) == RR_DONE);
        CHECK(rr_handoff_take(handoff, &item) == RR_DONE);
        rr_handoff_finish(handoff, NULL);
        part.data = NULL;
        CHECK(rr_handoff_wait(plan, 0, &part, 1, &lender, why) == RR_DONE);
        CHECK(((float *)part.data)[0] == (float)round);
        if (round > 0)
            pthread_join(thread, NULL);
        CHECK(pthread_create(&thread, NULL, give_back_soon, lender) == 0);
    }
    pthread_join(thread, NULL);
    rr_handoff_close(handoff, "closed");
}

/* A round whose results are lent when the ring breaks: they stay, and the area is used once. */
static void test_failure_of_a_round_keeps_no_area(void)
{
    rr_handoff *handoff = opened();
    int64_t plan = registered(handoff);
    rr_area *last = areas[area_count - 1];
    for (uint32_t i = 0; i < BUCKETS; i++)
        CHECK(start(plan, i, 1) == RR_DONE);
    rr_handoff_fail(handoff, "lost rank 1");
    CHECK(rr_handoff_reopen(handoff) == RR_DONE);
    CHECK(rr_area_take(last)); /* the failed round has left it */
    rr_area_leave(last);
    CHECK(rr_handoff_unregister(plan) == RR_DONE && !rr_area_is_used(last));
    rr_handoff_close(handoff, "closed");
}

static void test_long_text_is_cut(void)
{
    static char text[2 * RR_WHY_BYTES];
    rr_handoff *handoff = opened();
    int64_t plan = registered(handoff);
    memset(text, 'x', sizeof text - 1);
    rr_handoff_fail(handoff, text);
    CHECK(start(plan, 0, 1) == RR_HANDOFF_FAILED && strlen(why) == RR_WHY_BYTES - 1);
    rr_handoff_close(handoff, "closed");
}

int main(void)
{
    test_rounds();
    test_queue_is_first_in_first_out();
    test_failed_plan_can_be_forgotten_once_nothing_is_taken();
    test_what_does_not_fit_is_refused();
    test_second_start_breaks_everything();
    for (int state = 0; state < 4; state++) {
        test_second_start_is_a_complaint(state, false);
        test_second_start_is_a_complaint(state, true);
    }
    test_rounds_of_many_threads();
    for (int i = 0; i < 50; i++) {
        test_waits_end(rr_handoff_fail, RR_HANDOFF_FAILED);
        test_waits_end(rr_handoff_close, RR_HANDOFF_CLOSED);
    }
    test_plan_stays_while_somebody_is_inside();
    test_who_asks_is_told();
    for (int i = 0; i < 50; i++) {
        test_who_asks_is_told_of_the_end(rr_handoff_fail, RR_HANDOFF_FAILED);
        test_who_asks_is_told_of_the_end(rr_handoff_close, RR_HANDOFF_CLOSED);
    }
    for (int round = 0; round < ROUNDS; round++)
        test_what_is_lent_comes_back_after_a_close(round % 2 == 0);
    test_a_round_may_fail_alone();
    test_reopened_after_a_failure();
    test_long_text_is_cut();
    test_results_are_lent();
    test_ranks_share_an_area();
    test_nothing_is_not_lent();
    test_results_come_back_from_other_threads();
    test_failure_of_a_round_keeps_no_area();
    free_areas();
    return 0;
}
