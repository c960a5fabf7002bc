/* Buckets go from a framework's threads to the engine and back; ringreduce.h draws it.
 *
 * One lock for the whole process guards every plan and queue. It is taken a few times for each
 * bucket and never held while bytes are copied, so finer locks would gain nothing and could be
 * taken in the wrong order. A bucket that is being copied is in a state (PACKING, UNPACKING) in
 * which no other thread touches it.
 */

#include "handoff.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "events.h"

/* A plan's number is an index of `plan_entries`. The owner stays after the plan: it has the reason.
 */
struct plan_entry {
    rr_handoff *owner;
    struct plan *plan;
};

pthread_mutex_t rr_handoff_lock = PTHREAD_MUTEX_INITIALIZER;
/* Buckets reduced in place that an engine has or will take; at 0 `let_go` is signalled. */
static uint32_t borrowed;
static pthread_cond_t let_go = PTHREAD_COND_INITIALIZER;

static struct plan_entry *plan_entries;
static uint64_t plan_entry_count, plan_entry_room;

int rr_handoff_open(rr_handoff **opened, rr_events *events)
{
    rr_handoff *handoff = calloc(1, sizeof *handoff);
    if (handoff == NULL)
        return -ENOMEM;
    handoff->last = &handoff->first;
    handoff->events = events;
    pthread_cond_init(&handoff->ready, NULL);
    pthread_cond_init(&handoff->changed, NULL);
    *opened = handoff;
    return RR_DONE;
}

/* ---- plans ---- */

/* The round of a bucket has ended, well or not. After a failure somebody may still read a spare
 * area, such as libzmq: it is never freed. */
static void leave_area(struct bucket *bucket, bool well)
{
    if (bucket->area != NULL && (well || !bucket->area->is_spare))
        rr_area_leave(bucket->area);
    bucket->area = NULL;
}

static void free_plan(struct plan *plan)
{
    for (uint32_t i = 0; i < plan->bucket_count; i++) {
        struct bucket *bucket = &plan->buckets[i];
        leave_area(bucket, false);
        for (uint32_t j = 0; j < bucket->area_count; j++)
            rr_area_plan(bucket->areas[j], -1);
        free(bucket->areas);
        if (bucket->results != bucket->slots)
            free(bucket->results);
        free(bucket->slots);
        free(bucket->why);
    }
    free(plan);
}

static bool are_in_order(const rr_slot *slots, uint32_t count, uint64_t nbytes)
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

static void *copy_of_list(const void *list, size_t nbytes)
{
    void *copy = malloc(nbytes + 1);
    if (copy != NULL && nbytes > 0)
        memcpy(copy, list, nbytes);
    return copy;
}

static rr_slot *copy_of_slots(const rr_slot *slots, uint32_t count)
{
    return copy_of_list(slots, count * sizeof *slots);
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
            .areas = copy_of_list(from->areas, from->area_count * sizeof *from->areas),
            .nbytes = from->nbytes,
            .in_place = from->area_count == 0,
            .slot_count = from->slot_count,
            .result_count = from->results == NULL ? from->slot_count : from->result_count,
            .slots = copy_of_slots(from->slots, from->slot_count),
        };
        bucket->results = from->results == NULL ? bucket->slots
                                                : copy_of_slots(from->results, from->result_count);
        if (bucket->areas == NULL || bucket->slots == NULL || bucket->results == NULL) {
            free_plan(plan);
            return NULL;
        }
        for (; bucket->area_count < from->area_count; bucket->area_count++)
            rr_area_plan(bucket->areas[bucket->area_count], 1);
    }
    return plan;
}

int rr_handoff_register(rr_handoff *handoff, const rr_bucket *buckets, uint32_t bucket_count,
                        int64_t *plan)
{
    for (uint32_t i = 0; i < bucket_count; i++) {
        const rr_bucket *bucket = &buckets[i];
        if (!are_in_order(bucket->slots, bucket->slot_count, bucket->nbytes) ||
            (bucket->results != NULL &&
             !are_in_order(bucket->results, bucket->result_count, bucket->nbytes)))
            return -EINVAL;
        if (bucket->area_count == 0 && (bucket->slot_count != 1 || bucket->results != NULL ||
                                        bucket->slots[0].nbytes != bucket->nbytes))
            return -EINVAL;
    }
    struct plan *copy = copy_of(buckets, bucket_count);
    if (copy == NULL)
        return -ENOMEM;
    int code = RR_DONE;
    pthread_mutex_lock(&rr_handoff_lock);
    if (handoff->over == RR_HANDOFF_CLOSED) {
        code = RR_HANDOFF_CLOSED;
    } else if (plan_entry_count == plan_entry_room) {
        uint64_t room = plan_entry_room * 2 + 16;
        struct plan_entry *more = realloc(plan_entries, room * sizeof *more);
        if (more == NULL) {
            code = -ENOMEM;
        } else {
            plan_entries = more;
            plan_entry_room = room;
        }
    }
    if (code == RR_DONE) {
        plan_entries[plan_entry_count] = (struct plan_entry){handoff, copy};
        *plan = (int64_t)plan_entry_count++;
    }
    pthread_mutex_unlock(&rr_handoff_lock);
    if (code != RR_DONE)
        free_plan(copy);
    return code;
}

/* Whether a thread still uses `plan`, or may; needs the lock. After a failure no bucket of it is
 * packed, queued or taken any more, though its round never ends. */
static bool is_busy(const rr_handoff *owner, const struct plan *plan)
{
    const struct bucket *taken = owner->taken, *end = plan->buckets + plan->bucket_count;
    /* A thread that waits in vain, for a bucket that another one got, uses the plan too. */
    return plan->inside > 0 || (plan->running && owner->over == 0) ||
           (taken >= plan->buckets && taken < end);
}

/* Have all buckets ready for the next round; needs the lock. */
static void end_round(struct plan *plan)
{
    for (uint32_t i = 0; i < plan->bucket_count; i++) {
        plan->buckets[i].state = EMPTY;
        leave_area(&plan->buckets[i], false);
    }
    plan->queued = plan->spent = 0;
    plan->running = false;
}

int rr_handoff_unregister(int64_t number)
{
    struct plan *plan = NULL;
    int code = RR_HANDOFF_MISUSED;
    pthread_mutex_lock(&rr_handoff_lock);
    if (number >= 0 && (uint64_t)number < plan_entry_count && plan_entries[number].plan != NULL) {
        plan = plan_entries[number].plan;
        code = is_busy(plan_entries[number].owner, plan) ? RR_HANDOFF_BUSY : RR_DONE;
        if (code == RR_DONE)
            plan_entries[number].plan = NULL;
        else
            plan = NULL;
    }
    pthread_mutex_unlock(&rr_handoff_lock);
    if (plan != NULL)
        free_plan(plan);
    return code;
}

/* ---- the engine's side ---- */

/* Both need the lock. The queue owns `entry` from now on. */
static void put(rr_handoff *handoff, struct entry *entry)
{
    entry->next = NULL;
    *handoff->last = entry;
    handoff->last = &entry->next;
    pthread_cond_signal(&handoff->ready);
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

static void drop(rr_handoff *handoff, bool jobs_too)
{
    struct entry **at = &handoff->first;
    while (*at != NULL) {
        struct entry *entry = *at;
        if (jobs_too || entry->item.kind != RR_ITEM_JOB) {
            *at = entry->next;
            discard(entry);
        } else {
            at = &entry->next;
        }
    }
    handoff->last = at;
}

int rr_handoff_post(rr_handoff *handoff, int64_t job)
{
    struct entry *entry = malloc(sizeof *entry);
    if (entry == NULL)
        return -ENOMEM;
    entry->item = (rr_item){.kind = RR_ITEM_JOB, .job = job};
    pthread_mutex_lock(&rr_handoff_lock);
    bool closed = handoff->over == RR_HANDOFF_CLOSED;
    if (!closed)
        put(handoff, entry);
    pthread_mutex_unlock(&rr_handoff_lock);
    if (closed)
        free(entry);
    return closed ? RR_HANDOFF_CLOSED : RR_DONE;
}

int rr_handoff_take(rr_handoff *handoff, rr_item *item)
{
    int code = RR_DONE;
    pthread_mutex_lock(&rr_handoff_lock);
    while (handoff->over != RR_HANDOFF_CLOSED && !handoff->complaint && handoff->first == NULL)
        pthread_cond_wait(&handoff->ready, &rr_handoff_lock);
    if (handoff->over == RR_HANDOFF_CLOSED) {
        code = RR_HANDOFF_CLOSED;
    } else if (handoff->complaint) {
        handoff->complaint = false;
        handoff->busy = true;
        *item = (rr_item){.kind = RR_ITEM_COMPLAINT};
    } else {
        struct entry *entry = handoff->first;
        handoff->first = entry->next;
        if (handoff->first == NULL)
            handoff->last = &handoff->first;
        handoff->busy = true;
        *item = entry->item;
        discard(entry);
        if (item->kind == RR_ITEM_BUCKET) {
            /* Its round is in flight, so its plan is still registered. */
            handoff->taken = &plan_entries[item->plan].plan->buckets[item->bucket];
            handoff->taken->state = REDUCING;
            handoff->taken->taken = rr_now();
            handoff->borrows = handoff->taken->in_place;
            item->memory = handoff->taken->memory;
        }
    }
    pthread_mutex_unlock(&rr_handoff_lock);
    return code;
}

void rr_bucket_record(rr_handoff *owner, const struct bucket *bucket, uint16_t kind, double began,
                      double ended)
{
    if (owner->events == NULL)
        return;
    rr_parts_add(&owner->events->queued, (rr_span){.kind = kind,
                                                   .other = (int32_t)bucket->entry.item.bucket,
                                                   .number = bucket->number,
                                                   .nbytes = bucket->nbytes,
                                                   .began = began,
                                                   .ended = ended});
}

/* What has happened to a bucket until now, when the number of its call is known. */
static void record_round(rr_handoff *owner, struct bucket *bucket)
{
    if (owner->events == NULL)
        return;
    const uint64_t calls = owner->events->current.number; /* only this thread makes any */
    bucket->number = calls > 0 ? calls - 1 : 0;
    if (!bucket->in_place)
        rr_bucket_record(owner, bucket, RR_SPAN_PACK, bucket->begun, bucket->packed);
    rr_bucket_record(owner, bucket, RR_SPAN_QUEUE, bucket->packed, bucket->taken);
    rr_bucket_record(owner, bucket, RR_SPAN_REDUCE, bucket->taken, rr_now());
}

void rr_handoff_finish(rr_handoff *handoff, const char *why)
{
    pthread_mutex_lock(&rr_handoff_lock);
    give_back(handoff->borrows);
    handoff->borrows = false;
    if (handoff->taken != NULL) {
        record_round(handoff, handoff->taken);
        handoff->taken->state = REDUCED;
        handoff->taken->code = why == NULL ? RR_DONE : RR_HANDOFF_REFUSED;
        free(handoff->taken->why);
        handoff->taken->why = why == NULL ? NULL : strdup(why);
    }
    handoff->taken = NULL;
    handoff->busy = false;
    pthread_cond_broadcast(&handoff->changed);
    pthread_mutex_unlock(&rr_handoff_lock);
}

int rr_handoff_wait_idle(rr_handoff *handoff, uint32_t timeout_ms)
{
    /* The wall clock, since macOS has no other here. If it is set back the timeout is later, but
     * the condition still ends the wait. */
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)(timeout_ms / 1000);
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    int code = 0;
    pthread_mutex_lock(&rr_handoff_lock);
    while (handoff->over != RR_HANDOFF_CLOSED && code == 0 &&
           (handoff->busy || handoff->complaint || handoff->first != NULL))
        code = pthread_cond_timedwait(&handoff->changed, &rr_handoff_lock, &until);
    pthread_mutex_unlock(&rr_handoff_lock);
    return code == 0;
}

static void end(rr_handoff *handoff, int code, const char *why)
{
    if (handoff->over == 0)
        snprintf(handoff->why, sizeof handoff->why, "%s", why);
    handoff->over = code;
    /* The engine will take no more buckets. */
    for (uint64_t i = 0; i < plan_entry_count; i++) {
        struct plan *plan = plan_entries[i].owner == handoff ? plan_entries[i].plan : NULL;
        for (uint32_t j = 0; plan != NULL && j < plan->bucket_count; j++) {
            struct bucket *bucket = &plan->buckets[j];
            if (bucket->state == PACKED && bucket->in_place) {
                give_back(true);
                bucket->state = SPENT;
            }
        }
    }
    pthread_cond_broadcast(&handoff->ready);
    pthread_cond_broadcast(&handoff->changed);
}

void rr_handoff_fail(rr_handoff *handoff, const char *why)
{
    pthread_mutex_lock(&rr_handoff_lock);
    if (handoff->over == 0) {
        drop(handoff, false);
        end(handoff, RR_HANDOFF_FAILED, why);
    }
    pthread_mutex_unlock(&rr_handoff_lock);
}

int rr_handoff_reopen(rr_handoff *handoff)
{
    pthread_mutex_lock(&rr_handoff_lock);
    while (handoff->over == RR_HANDOFF_FAILED &&
           (handoff->inside > 0 || handoff->busy || handoff->first != NULL))
        pthread_cond_wait(&handoff->changed, &rr_handoff_lock);
    const int code = handoff->over == RR_HANDOFF_CLOSED ? RR_HANDOFF_CLOSED : RR_DONE;
    if (handoff->over == RR_HANDOFF_FAILED) {
        /* Rounds that the failure has cut short begin again with their first bucket. */
        for (uint64_t i = 0; i < plan_entry_count; i++)
            if (plan_entries[i].owner == handoff && plan_entries[i].plan != NULL)
                end_round(plan_entries[i].plan);
        handoff->over = 0;
        handoff->complaint = false;
    }
    pthread_mutex_unlock(&rr_handoff_lock);
    return code;
}

void rr_handoff_close(rr_handoff *handoff, const char *why)
{
    pthread_mutex_lock(&rr_handoff_lock);
    drop(handoff, true);
    /* After a failure its text is kept: it says more. */
    end(handoff, RR_HANDOFF_CLOSED, why);
    while (handoff->inside > 0)
        pthread_cond_wait(&handoff->changed, &rr_handoff_lock);
    handoff->taken = NULL;
    handoff->events = NULL;
    const bool has_thread = handoff->has_thread;
    handoff->has_thread = false;
    for (uint64_t i = 0; i < plan_entry_count; i++) {
        if (plan_entries[i].owner == handoff && plan_entries[i].plan != NULL) {
            free_plan(plan_entries[i].plan);
            plan_entries[i].plan = NULL;
        }
    }
    pthread_mutex_unlock(&rr_handoff_lock);
    if (has_thread)
        rr_delivery_join(handoff);
}

/* ---- the framework's side ---- */

static int refuse(char *why, int64_t plan, uint32_t bucket, const char *reason)
{
    snprintf(why, RR_WHY_BYTES, "bucket %u of plan %lld: %s", bucket, (long long)plan, reason);
    return RR_HANDOFF_MISUSED;
}

/* Look a bucket up and enter its handoff; needs the lock. Call `leave` only after RR_DONE. `parts`
 * are for the bucket's results, or else for its slots. */
static int enter(struct visit *visit, int64_t number, uint32_t index, bool for_results,
                 const rr_part *parts, uint32_t part_count, char *why)
{
    if (number < 0 || (uint64_t)number >= plan_entry_count)
        return refuse(why, number, index, "there is no such plan in this process");
    visit->owner = plan_entries[number].owner;
    visit->plan = plan_entries[number].plan;
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

/* After `enter`, with the lock: the code to return, and its text. */
static int leave(struct visit *visit, char *why)
{
    rr_handoff *owner = visit->owner;
    int code = owner->over;
    if (code != 0)
        snprintf(why, RR_WHY_BYTES, "%s", owner->why);
    visit->plan->inside--;
    if (--owner->inside == 0 && code != 0)
        pthread_cond_broadcast(&owner->changed);
    return code;
}

static void pack(const struct bucket *bucket, const rr_part *parts)
{
    /* Where results have places of their own, what lies between the slots is the caller's. */
    const bool clears = bucket->results == bucket->slots;
    uint64_t filled = 0;
    for (uint32_t i = 0; i < bucket->slot_count; i++) {
        const rr_slot *slot = &bucket->slots[i];
        if (clears)
            memset(bucket->memory + filled, 0, slot->start - filled);
        if (slot->nbytes > 0)
            memcpy(bucket->memory + slot->start, parts[i].data, slot->nbytes);
        filled = slot->start + slot->nbytes;
    }
    if (clears)
        memset(bucket->memory + filled, 0, bucket->nbytes - filled);
}

static void unpack(const struct bucket *bucket, rr_part *parts, rr_area **lender)
{
    for (uint32_t i = 0; i < bucket->result_count; i++) {
        char *result = bucket->memory + bucket->results[i].start;
        if (parts[i].nbytes == 0)
            continue; /* TensorFlow may have no memory for it: that asks for no loan. */
        if (parts[i].data == NULL && lender != NULL) {
            *lender = bucket->area;
            rr_area_lend(bucket->area);
            parts[i].data = result;
        } else if (parts[i].data != bucket->memory) {
            memcpy(parts[i].data, result, parts[i].nbytes);
        }
    }
}

/* Take the first area that is free; needs the lock. False: none is. */
static bool take_area(struct bucket *bucket)
{
    bucket->area = NULL;
    for (uint32_t i = 0; i < bucket->area_count && bucket->area == NULL; i++)
        if (rr_area_take(bucket->areas[i]))
            bucket->area = bucket->areas[i];
    return bucket->area != NULL;
}

/* Notify the engine that this rank is out of step, and wait until it has failed the handoff. */
static void complain(rr_handoff *owner)
{
    owner->complaint = true;
    pthread_cond_signal(&owner->ready);
    while (owner->over == 0)
        pthread_cond_wait(&owner->changed, &rr_handoff_lock);
}

int rr_handoff_start(int64_t plan, uint32_t bucket, const rr_part *parts, uint32_t part_count,
                     char *why)
{
    struct visit visit;
    pthread_mutex_lock(&rr_handoff_lock);
    int code = enter(&visit, plan, bucket, false, parts, part_count, why);
    if (code != RR_DONE) {
        pthread_mutex_unlock(&rr_handoff_lock);
        return code;
    }
    struct bucket *own = visit.bucket;
    if (own->state != EMPTY) {
        complain(visit.owner);
        code = leave(&visit, why);
        pthread_mutex_unlock(&rr_handoff_lock);
        return code;
    }
    visit.plan->running = true;
    own->begun = rr_now();
    if (own->in_place) {
        own->memory = parts[0].data;
        borrowed++;
    } else {
        own->state = PACKING;
        const bool has_area = take_area(own);
        pthread_mutex_unlock(&rr_handoff_lock);
        if (!has_area)
            own->area = rr_area_spare(own->nbytes);
        if (own->area != NULL) {
            own->memory = own->area->memory;
            pack(own, parts);
        }
        pthread_mutex_lock(&rr_handoff_lock);
        if (own->area == NULL) {
            own->state = EMPTY;
            code = leave(&visit, why);
            pthread_mutex_unlock(&rr_handoff_lock);
            return code == RR_DONE ? refuse(why, plan, bucket, "there is no memory for it") : code;
        }
    }
    own->state = PACKED;
    own->packed = rr_now();
    /* Queue this bucket, and later ones that had to wait for it. */
    struct plan *whole = visit.plan;
    while (visit.owner->over == 0 && whole->queued < whole->bucket_count &&
           whole->buckets[whole->queued].state == PACKED) {
        struct bucket *next = &whole->buckets[whole->queued];
        next->entry.item =
            (rr_item){.kind = RR_ITEM_BUCKET, .plan = plan, .bucket = whole->queued++};
        put(visit.owner, &next->entry);
    }
    code = leave(&visit, why);
    pthread_mutex_unlock(&rr_handoff_lock);
    return code;
}

bool rr_bucket_is_awaited(const struct bucket *bucket)
{
    return bucket->state == PACKING || bucket->state == PACKED || bucket->state == REDUCING;
}

int rr_bucket_settle(struct visit *visit, rr_part *parts, rr_area **lender, char *why)
{
    struct bucket *own = visit->bucket;
    const bool ours = own->state == REDUCED;
    int code = own->code;
    if (ours && visit->owner->over == 0) {
        own->state = UNPACKING;
        if (code == RR_DONE) {
            const double began = rr_now();
            pthread_mutex_unlock(&rr_handoff_lock);
            unpack(own, parts, lender);
            pthread_mutex_lock(&rr_handoff_lock);
            if (!own->in_place)
                rr_bucket_record(visit->owner, own, RR_SPAN_UNPACK, began, rr_now());
        } else {
            snprintf(why, RR_WHY_BYTES, "%s", own->why == NULL ? "out of memory" : own->why);
        }
        leave_area(own, true);
        own->state = SPENT;
        if (++visit->plan->spent == visit->plan->bucket_count)
            end_round(visit->plan);
    }
    const int end = leave(visit, why);
    if (end != RR_DONE)
        return end;
    if (!ours) {
        snprintf(why, RR_WHY_BYTES, "a bucket was waited for, but not started in this round");
        return RR_HANDOFF_MISUSED;
    }
    return code;
}

void rr_handoff_blocks(rr_handoff *owner)
{
    if (owner->pending++ == 0)
        owner->pending_since = rr_now();
}

void rr_handoff_unblocks(rr_handoff *owner, const struct bucket *bucket)
{
    if (--owner->pending == 0)
        rr_bucket_record(owner, bucket, RR_SPAN_BLOCKED, owner->pending_since, rr_now());
}

int rr_handoff_wait(int64_t plan, uint32_t bucket, rr_part *parts, uint32_t part_count,
                    rr_area **lender, char *why)
{
    struct visit visit;
    pthread_mutex_lock(&rr_handoff_lock);
    int code = enter(&visit, plan, bucket, true, parts, part_count, why);
    if (code == RR_DONE) {
        if (rr_bucket_is_awaited(visit.bucket)) {
            rr_handoff_blocks(visit.owner);
            while (rr_bucket_is_awaited(visit.bucket) && visit.owner->over == 0)
                pthread_cond_wait(&visit.owner->changed, &rr_handoff_lock);
            rr_handoff_unblocks(visit.owner, visit.bucket);
        }
        code = rr_bucket_settle(&visit, parts, lender, why);
    }
    pthread_mutex_unlock(&rr_handoff_lock);
    return code;
}

int rr_handoff_wait_async(int64_t plan, uint32_t bucket, rr_part *parts, uint32_t part_count,
                          rr_delivered *notify, void *data, char *why)
{
    struct visit visit;
    pthread_mutex_lock(&rr_handoff_lock);
    int code = enter(&visit, plan, bucket, true, parts, part_count, why);
    if (code == RR_DONE && rr_bucket_is_awaited(visit.bucket) && visit.owner->over == 0) {
        code = rr_delivery_add(&visit, parts, part_count, notify, data);
        if (code == RR_DONE)
            code = RR_HANDOFF_LATER;
        else if (leave(&visit, why) == RR_DONE)
            snprintf(why, RR_WHY_BYTES, "cannot wait in the background: %s", strerror(-code));
    } else if (code == RR_DONE) {
        code = rr_bucket_settle(&visit, parts, NULL, why);
    }
    pthread_mutex_unlock(&rr_handoff_lock);
    return code;
}

void rr_handoff_let_go(void)
{
    pthread_mutex_lock(&rr_handoff_lock);
    while (borrowed > 0)
        pthread_cond_wait(&let_go, &rr_handoff_lock);
    pthread_mutex_unlock(&rr_handoff_lock);
}
