/* Buckets on their way from a framework's threads to the engine and back; ringreduce.h draws it.
 *
 * One lock for the whole process guards every plan and queue. It is taken a few times for each
 * bucket and never while bytes are copied, so finer locks would only make the order in which
 * they are taken a thing to get wrong. Copying happens between two turns under the lock, with
 * the bucket in a state (PACKING, UNPACKING) that keeps everybody else away from it.
 */

#include "handover.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* What a plan's number stands for. The owner stays when the plan has gone: it knows why. */
struct place {
    rr_handover *owner;
    struct plan *plan;
};

pthread_mutex_t rr_handover_lock = PTHREAD_MUTEX_INITIALIZER;
/* Buckets in place that an engine has, or will get; 0 wakes whoever waits for that. */
static uint32_t borrowed;
static pthread_cond_t let_go = PTHREAD_COND_INITIALIZER;

static struct place *places;
static uint64_t place_count, place_room;

uint64_t rr_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int rr_handover_open(rr_handover **opened)
{
    rr_handover *handover = calloc(1, sizeof *handover);
    if (handover == NULL)
        return -ENOMEM;
    handover->last = &handover->first;
    pthread_cond_init(&handover->ready, NULL);
    pthread_cond_init(&handover->changed, NULL);
    *opened = handover;
    return RR_DONE;
}

/* ---- plans ---- */

static void free_plan(struct plan *plan)
{
    for (uint32_t i = 0; i < plan->bucket_count; i++) {
        struct bucket *bucket = &plan->buckets[i];
        if (bucket->results != bucket->slots)
            free(bucket->results);
        free(bucket->slots);
        free(bucket->why);
    }
    free(plan);
}

static bool lie_well(const rr_slot *slots, uint32_t count, uint64_t nbytes)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (slots[i].start < end || slots[i].start > nbytes ||
            slots[i].nbytes > nbytes - slots[i].start)
            return false;
        end = slots[i].start + slots[i].nbytes;
    }
    return true;
}

static rr_slot *copy_of_slots(const rr_slot *slots, uint32_t count)
{
    rr_slot *copy = malloc(count * sizeof *copy + 1);
    if (copy != NULL && count > 0)
        memcpy(copy, slots, count * sizeof *copy);
    return copy;
}

static struct plan *copy_of(const rr_bucket *buckets, uint32_t count)
{
    struct plan *plan = calloc(1, sizeof *plan + count * sizeof plan->buckets[0]);
    if (plan == NULL)
        return NULL;
    plan->bucket_count = count;
    for (uint32_t i = 0; i < count; i++) {
        const rr_bucket *from = &buckets[i];
        struct bucket *bucket = &plan->buckets[i];
        *bucket = (struct bucket){
            .memory = from->memory,
            .nbytes = from->nbytes,
            .in_place = from->memory == NULL,
            .slot_count = from->slot_count,
            .result_count = from->results == NULL ? from->slot_count : from->result_count,
            .slots = copy_of_slots(from->slots, from->slot_count),
        };
        bucket->results = from->results == NULL ? bucket->slots
                                                : copy_of_slots(from->results, from->result_count);
        if (bucket->slots == NULL || bucket->results == NULL) {
            free_plan(plan);
            return NULL;
        }
    }
    return plan;
}

int rr_handover_register(rr_handover *handover, const rr_bucket *buckets, uint32_t bucket_count,
                         int64_t *plan)
{
    for (uint32_t i = 0; i < bucket_count; i++) {
        const rr_bucket *bucket = &buckets[i];
        if (!lie_well(bucket->slots, bucket->slot_count, bucket->nbytes) ||
            (bucket->results != NULL &&
             !lie_well(bucket->results, bucket->result_count, bucket->nbytes)))
            return -EINVAL;
        if (bucket->memory == NULL && (bucket->slot_count != 1 || bucket->results != NULL ||
                                       bucket->slots[0].nbytes != bucket->nbytes))
            return -EINVAL;
    }
    struct plan *copy = copy_of(buckets, bucket_count);
    if (copy == NULL)
        return -ENOMEM;
    int code = RR_DONE;
    pthread_mutex_lock(&rr_handover_lock);
    if (handover->over == RR_HANDOVER_CLOSED) {
        code = RR_HANDOVER_CLOSED;
    } else if (place_count == place_room) {
        uint64_t room = place_room * 2 + 16;
        struct place *more = realloc(places, room * sizeof *more);
        if (more == NULL) {
            code = -ENOMEM;
        } else {
            places = more;
            place_room = room;
        }
    }
    if (code == RR_DONE) {
        places[place_count] = (struct place){handover, copy};
        *plan = (int64_t)place_count++;
    }
    pthread_mutex_unlock(&rr_handover_lock);
    if (code != RR_DONE)
        free_plan(copy);
    return code;
}

/* Whether anybody still looks at `plan`, or may; under the lock. After a failure no bucket of it
 * is packed, queued or taken any more, though its round never ends. */
static bool is_busy(const rr_handover *owner, const struct plan *plan)
{
    const struct bucket *taken = owner->taken, *end = plan->buckets + plan->bucket_count;
    /* Also who waits in vain, for a bucket that another thread has taken, looks at the plan. */
    return plan->inside > 0 || (plan->running && owner->over == 0) ||
           (taken >= plan->buckets && taken < end);
}

int rr_handover_unregister(int64_t number)
{
    struct plan *plan = NULL;
    int code = RR_HANDOVER_MISUSED;
    pthread_mutex_lock(&rr_handover_lock);
    if (number >= 0 && (uint64_t)number < place_count && places[number].plan != NULL) {
        plan = places[number].plan;
        code = is_busy(places[number].owner, plan) ? RR_HANDOVER_BUSY : RR_DONE;
        if (code == RR_DONE)
            places[number].plan = NULL;
        else
            plan = NULL;
    }
    pthread_mutex_unlock(&rr_handover_lock);
    if (plan != NULL)
        free_plan(plan);
    return code;
}

/* ---- the engine's side ---- */

/* Both under the lock. `entry` is the queue's from now on. */
static void put(rr_handover *handover, struct entry *entry)
{
    entry->next = NULL;
    *handover->last = entry;
    handover->last = &entry->next;
    pthread_cond_signal(&handover->ready);
}

static void give_back(bool in_place)
{
    if (in_place && --borrowed == 0)
        pthread_cond_broadcast(&let_go);
}

static void discard(struct entry *entry)
{
    if (entry->item.kind == RR_ITEM_JOB)
        free(entry);
}

static void drop(rr_handover *handover, bool jobs_too)
{
    struct entry **at = &handover->first;
    while (*at != NULL) {
        struct entry *entry = *at;
        if (jobs_too || entry->item.kind != RR_ITEM_JOB) {
            *at = entry->next;
            discard(entry);
        } else {
            at = &entry->next;
        }
    }
    handover->last = at;
}

int rr_handover_post(rr_handover *handover, int64_t job)
{
    struct entry *entry = malloc(sizeof *entry);
    if (entry == NULL)
        return -ENOMEM;
    entry->item = (rr_item){.kind = RR_ITEM_JOB, .job = job};
    pthread_mutex_lock(&rr_handover_lock);
    bool closed = handover->over == RR_HANDOVER_CLOSED;
    if (!closed)
        put(handover, entry);
    pthread_mutex_unlock(&rr_handover_lock);
    if (closed)
        free(entry);
    return closed ? RR_HANDOVER_CLOSED : RR_DONE;
}

int rr_handover_take(rr_handover *handover, rr_item *item)
{
    int code = RR_DONE;
    pthread_mutex_lock(&rr_handover_lock);
    while (handover->over != RR_HANDOVER_CLOSED && !handover->complaint && handover->first == NULL)
        pthread_cond_wait(&handover->ready, &rr_handover_lock);
    if (handover->over == RR_HANDOVER_CLOSED) {
        code = RR_HANDOVER_CLOSED;
    } else if (handover->complaint) {
        handover->complaint = false;
        handover->busy = true;
        *item = (rr_item){.kind = RR_ITEM_COMPLAINT};
    } else {
        struct entry *entry = handover->first;
        handover->first = entry->next;
        if (handover->first == NULL)
            handover->last = &handover->first;
        handover->busy = true;
        *item = entry->item;
        discard(entry);
        if (item->kind == RR_ITEM_BUCKET) {
            /* Its round is in flight, so nobody has unregistered its plan. */
            handover->taken = &places[item->plan].plan->buckets[item->bucket];
            handover->taken->state = REDUCING;
            handover->borrows = handover->taken->in_place;
            item->memory = handover->taken->memory;
        }
    }
    pthread_mutex_unlock(&rr_handover_lock);
    return code;
}

void rr_handover_finish(rr_handover *handover, const char *why)
{
    pthread_mutex_lock(&rr_handover_lock);
    give_back(handover->borrows);
    handover->borrows = false;
    if (handover->taken != NULL) {
        handover->taken->state = REDUCED;
        handover->taken->code = why == NULL ? RR_DONE : RR_HANDOVER_REFUSED;
        free(handover->taken->why);
        handover->taken->why = why == NULL ? NULL : strdup(why);
    }
    handover->taken = NULL;
    handover->busy = false;
    pthread_cond_broadcast(&handover->changed);
    pthread_mutex_unlock(&rr_handover_lock);
}

int rr_handover_wait_idle(rr_handover *handover, uint32_t timeout_ms)
{
    /* The wall clock, since macOS has no other here. When it is set back the wait is longer,
     * but what is waited for still ends it. */
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)(timeout_ms / 1000);
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    int code = 0;
    pthread_mutex_lock(&rr_handover_lock);
    while (handover->over != RR_HANDOVER_CLOSED && code == 0 &&
           (handover->busy || handover->complaint || handover->first != NULL))
        code = pthread_cond_timedwait(&handover->changed, &rr_handover_lock, &until);
    pthread_mutex_unlock(&rr_handover_lock);
    return code == 0;
}

static void end(rr_handover *handover, int code, const char *why)
{
    if (handover->over == 0)
        snprintf(handover->why, sizeof handover->why, "%s", why);
    handover->over = code;
    /* What the engine does not have yet it will not get. */
    for (uint64_t i = 0; i < place_count; i++) {
        struct plan *plan = places[i].owner == handover ? places[i].plan : NULL;
        for (uint32_t j = 0; plan != NULL && j < plan->bucket_count; j++) {
            struct bucket *bucket = &plan->buckets[j];
            if (bucket->state == PACKED && bucket->in_place) {
                give_back(true);
                bucket->state = SPENT;
            }
        }
    }
    pthread_cond_broadcast(&handover->ready);
    pthread_cond_broadcast(&handover->changed);
}

void rr_handover_fail(rr_handover *handover, const char *why)
{
    pthread_mutex_lock(&rr_handover_lock);
    if (handover->over == 0) {
        drop(handover, false);
        end(handover, RR_HANDOVER_FAILED, why);
    }
    pthread_mutex_unlock(&rr_handover_lock);
}

void rr_handover_close(rr_handover *handover, const char *why)
{
    pthread_mutex_lock(&rr_handover_lock);
    drop(handover, true);
    /* After a failure its text stays: it says more. */
    end(handover, RR_HANDOVER_CLOSED, why);
    while (handover->inside > 0)
        pthread_cond_wait(&handover->changed, &rr_handover_lock);
    handover->taken = NULL;
    const bool has_thread = handover->has_thread;
    handover->has_thread = false;
    for (uint64_t i = 0; i < place_count; i++) {
        if (places[i].owner == handover && places[i].plan != NULL) {
            free_plan(places[i].plan);
            places[i].plan = NULL;
        }
    }
    pthread_mutex_unlock(&rr_handover_lock);
    if (has_thread)
        rr_delivery_join(handover);
}

uint64_t rr_handover_waited_ns(rr_handover *handover)
{
    pthread_mutex_lock(&rr_handover_lock);
    uint64_t waited = handover->waited_ns;
    pthread_mutex_unlock(&rr_handover_lock);
    return waited;
}

/* ---- the framework's side ---- */

static int refuse(char *why, int64_t plan, uint32_t bucket, const char *reason)
{
    snprintf(why, RR_WHY_BYTES, "bucket %u of plan %lld: %s", bucket, (long long)plan, reason);
    return RR_HANDOVER_MISUSED;
}

/* Look a bucket up and enter its hand-over, under the lock; leave after RR_DONE only. `parts` are
 * for the bucket's results, or else for its slots. */
static int enter(struct visit *visit, int64_t number, uint32_t index, bool for_results,
                 const rr_part *parts, uint32_t part_count, char *why)
{
    if (number < 0 || (uint64_t)number >= place_count)
        return refuse(why, number, index, "there is no such plan in this process");
    visit->owner = places[number].owner;
    visit->plan = places[number].plan;
    if (visit->owner->over != 0) {
        snprintf(why, RR_WHY_BYTES, "%s", visit->owner->why);
        return visit->owner->over;
    }
    if (visit->plan == NULL)
        return refuse(why, number, index,
                      "the plan was given up with the optimizer it was made for");
    if (index >= visit->plan->bucket_count)
        return refuse(why, number, index, "the plan has no such bucket");
    visit->bucket = &visit->plan->buckets[index];
    const rr_slot *slots = for_results ? visit->bucket->results : visit->bucket->slots;
    if (part_count != (for_results ? visit->bucket->result_count : visit->bucket->slot_count))
        return refuse(why, number, index, "got another number of gradients than were planned");
    for (uint32_t i = 0; i < part_count; i++)
        if (parts[i].nbytes != slots[i].nbytes)
            return refuse(why, number, index, "got a gradient of another size than was planned");
    visit->owner->inside++;
    visit->plan->inside++;
    return RR_DONE;
}

/* Under the lock, after `enter`: the code to return, and its text. */
static int leave(struct visit *visit, char *why)
{
    rr_handover *owner = visit->owner;
    int code = owner->over;
    if (code != 0)
        snprintf(why, RR_WHY_BYTES, "%s", owner->why);
    visit->plan->inside--;
    if (--owner->inside == 0 && code == RR_HANDOVER_CLOSED)
        pthread_cond_broadcast(&owner->changed);
    return code;
}

static void pack(const struct bucket *bucket, const rr_part *parts)
{
    uint64_t filled = 0;
    for (uint32_t i = 0; i < bucket->slot_count; i++) {
        const rr_slot *slot = &bucket->slots[i];
        memset(bucket->memory + filled, 0, slot->start - filled);
        if (slot->nbytes > 0)
            memcpy(bucket->memory + slot->start, parts[i].data, slot->nbytes);
        filled = slot->start + slot->nbytes;
    }
    memset(bucket->memory + filled, 0, bucket->nbytes - filled);
}

static void unpack(const struct bucket *bucket, const rr_part *parts)
{
    for (uint32_t i = 0; i < bucket->result_count; i++)
        if (parts[i].nbytes > 0 && parts[i].data != bucket->memory)
            memcpy(parts[i].data, bucket->memory + bucket->results[i].start, parts[i].nbytes);
}

/* Tell the engine that this rank is out of step, and wait for what it makes of that. */
static void complain(rr_handover *owner)
{
    owner->complaint = true;
    pthread_cond_signal(&owner->ready);
    while (owner->over == 0)
        pthread_cond_wait(&owner->changed, &rr_handover_lock);
}

int rr_handover_start(int64_t plan, uint32_t bucket, const rr_part *parts, uint32_t part_count,
                      char *why)
{
    struct visit visit;
    pthread_mutex_lock(&rr_handover_lock);
    int code = enter(&visit, plan, bucket, false, parts, part_count, why);
    if (code != RR_DONE) {
        pthread_mutex_unlock(&rr_handover_lock);
        return code;
    }
    struct bucket *own = visit.bucket;
    if (own->state != EMPTY) {
        complain(visit.owner);
        code = leave(&visit, why);
        pthread_mutex_unlock(&rr_handover_lock);
        return code;
    }
    visit.plan->running = true;
    if (own->in_place) {
        own->memory = parts[0].data;
        borrowed++;
    } else {
        own->state = PACKING;
        pthread_mutex_unlock(&rr_handover_lock);
        pack(own, parts);
        pthread_mutex_lock(&rr_handover_lock);
    }
    own->state = PACKED;
    /* This bucket, and those after it that had to wait for it. */
    struct plan *whole = visit.plan;
    while (visit.owner->over == 0 && whole->queued < whole->bucket_count &&
           whole->buckets[whole->queued].state == PACKED) {
        struct bucket *next = &whole->buckets[whole->queued];
        next->entry.item =
            (rr_item){.kind = RR_ITEM_BUCKET, .plan = plan, .bucket = whole->queued++};
        put(visit.owner, &next->entry);
    }
    code = leave(&visit, why);
    pthread_mutex_unlock(&rr_handover_lock);
    return code;
}

bool rr_bucket_is_awaited(const struct bucket *bucket)
{
    return bucket->state == PACKING || bucket->state == PACKED || bucket->state == REDUCING;
}

int rr_bucket_settle(struct visit *visit, const rr_part *parts, char *why)
{
    struct bucket *own = visit->bucket;
    const bool ours = own->state == REDUCED;
    int code = own->code;
    if (ours && visit->owner->over == 0) {
        own->state = UNPACKING;
        if (code == RR_DONE) {
            pthread_mutex_unlock(&rr_handover_lock);
            unpack(own, parts);
            pthread_mutex_lock(&rr_handover_lock);
        } else {
            snprintf(why, RR_WHY_BYTES, "%s", own->why == NULL ? "out of memory" : own->why);
        }
        own->state = SPENT;
        struct plan *whole = visit->plan;
        if (++whole->spent == whole->bucket_count) {
            for (uint32_t i = 0; i < whole->bucket_count; i++)
                whole->buckets[i].state = EMPTY;
            whole->queued = whole->spent = 0;
            whole->running = false;
        }
    }
    const int end = leave(visit, why);
    if (end != RR_DONE)
        return end;
    if (!ours) {
        snprintf(why, RR_WHY_BYTES, "a bucket was waited for, but not started in this round");
        return RR_HANDOVER_MISUSED;
    }
    return code;
}

int rr_handover_wait(int64_t plan, uint32_t bucket, const rr_part *parts, uint32_t part_count,
                     char *why)
{
    struct visit visit;
    pthread_mutex_lock(&rr_handover_lock);
    int code = enter(&visit, plan, bucket, true, parts, part_count, why);
    if (code == RR_DONE) {
        if (rr_bucket_is_awaited(visit.bucket)) {
            uint64_t since = rr_now_ns();
            while (rr_bucket_is_awaited(visit.bucket) && visit.owner->over == 0)
                pthread_cond_wait(&visit.owner->changed, &rr_handover_lock);
            visit.owner->waited_ns += rr_now_ns() - since;
        }
        code = rr_bucket_settle(&visit, parts, why);
    }
    pthread_mutex_unlock(&rr_handover_lock);
    return code;
}

int rr_handover_wait_async(int64_t plan, uint32_t bucket, const rr_part *parts, uint32_t part_count,
                           rr_delivered *tell, void *data, char *why)
{
    struct visit visit;
    pthread_mutex_lock(&rr_handover_lock);
    int code = enter(&visit, plan, bucket, true, parts, part_count, why);
    if (code == RR_DONE && rr_bucket_is_awaited(visit.bucket) && visit.owner->over == 0) {
        code = rr_delivery_add(&visit, parts, part_count, tell, data);
        if (code == RR_DONE)
            code = RR_HANDOVER_LATER;
        else if (leave(&visit, why) == RR_DONE)
            snprintf(why, RR_WHY_BYTES, "cannot wait in the background: %s", strerror(-code));
    } else if (code == RR_DONE) {
        code = rr_bucket_settle(&visit, parts, why);
    }
    pthread_mutex_unlock(&rr_handover_lock);
    return code;
}

void rr_handover_let_go(void)
{
    pthread_mutex_lock(&rr_handover_lock);
    while (borrowed > 0)
        pthread_cond_wait(&let_go, &rr_handover_lock);
    pthread_mutex_unlock(&rr_handover_lock);
}
