/* Buckets on their way from a framework's threads to the engine and back; ringreduce.h draws it.
 *
 * One lock for the whole process guards every plan and queue. It is taken a few times for each
 * bucket and never while bytes are copied, so finer locks would only make the order in which
 * they are taken a thing to get wrong. Copying happens between two turns under the lock, with
 * the bucket in a state (PACKING, UNPACKING) that keeps everybody else away from it.
 */

#include "ringreduce.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum state { EMPTY, PACKING, PACKED, REDUCING, REDUCED, UNPACKING, SPENT };

struct entry {
    struct entry *next;
    rr_item item;
};

struct bucket {
    enum state state;
    struct entry entry; /* in the queue, or not used */
    char *memory;
    uint64_t nbytes;
    uint32_t slot_count;
    rr_slot *slots;
};

struct plan {
    uint32_t queued; /* buckets of this round that have been put in the queue */
    uint32_t spent;  /* buckets of this round that have been waited for */
    bool running;    /* a round is in flight */
    uint32_t inside; /* threads in start or wait of one of these buckets */
    uint32_t bucket_count;
    struct bucket buckets[];
};

struct rr_handover {
    pthread_cond_t ready;        /* the engine waits for this */
    pthread_cond_t changed;      /* everybody else does */
    struct entry *first, **last; /* those of jobs are malloc's, those of buckets their own */
    struct bucket *taken;        /* of the item that the engine has; NULL for a job */
    bool busy;                   /* the engine has an item */
    bool complaint;  /* the engine is to be told that a bucket was started out of turn */
    int over;        /* 0, RR_HANDOVER_FAILED or RR_HANDOVER_CLOSED */
    uint32_t inside; /* threads in start or wait */
    uint64_t waited_ns;
    char why[RR_WHY_BYTES];
};

/* What a plan's number stands for. The owner stays when the plan has gone: it knows why. */
struct place {
    rr_handover *owner;
    struct plan *plan;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct place *places;
static uint64_t place_count, place_room;

static uint64_t now_ns(void)
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
    for (uint32_t i = 0; i < plan->bucket_count; i++)
        free(plan->buckets[i].slots);
    free(plan);
}

static bool lies_well(const rr_bucket *bucket)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < bucket->slot_count; i++) {
        const rr_slot *slot = &bucket->slots[i];
        if (slot->start < end || slot->start > bucket->nbytes ||
            slot->nbytes > bucket->nbytes - slot->start)
            return false;
        end = slot->start + slot->nbytes;
    }
    return true;
}

static struct plan *copy_of(const rr_bucket *buckets, uint32_t count)
{
    struct plan *plan = calloc(1, sizeof *plan + count * sizeof plan->buckets[0]);
    if (plan == NULL)
        return NULL;
    plan->bucket_count = count;
    for (uint32_t i = 0; i < count; i++) {
        struct bucket *bucket = &plan->buckets[i];
        size_t nbytes = buckets[i].slot_count * sizeof(rr_slot);
        *bucket = (struct bucket){
            .memory = buckets[i].memory,
            .nbytes = buckets[i].nbytes,
            .slot_count = buckets[i].slot_count,
            .slots = malloc(nbytes + 1),
        };
        if (bucket->slots == NULL) {
            free_plan(plan);
            return NULL;
        }
        if (nbytes > 0)
            memcpy(bucket->slots, buckets[i].slots, nbytes);
    }
    return plan;
}

int rr_handover_register(rr_handover *handover, const rr_bucket *buckets, uint32_t bucket_count,
                         int64_t *plan)
{
    for (uint32_t i = 0; i < bucket_count; i++)
        if (!lies_well(&buckets[i]))
            return -EINVAL;
    struct plan *copy = copy_of(buckets, bucket_count);
    if (copy == NULL)
        return -ENOMEM;
    int code = RR_DONE;
    pthread_mutex_lock(&lock);
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
    pthread_mutex_unlock(&lock);
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
    pthread_mutex_lock(&lock);
    if (number >= 0 && (uint64_t)number < place_count && places[number].plan != NULL) {
        plan = places[number].plan;
        code = is_busy(places[number].owner, plan) ? RR_HANDOVER_BUSY : RR_DONE;
        if (code == RR_DONE)
            places[number].plan = NULL;
        else
            plan = NULL;
    }
    pthread_mutex_unlock(&lock);
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
    pthread_mutex_lock(&lock);
    bool closed = handover->over == RR_HANDOVER_CLOSED;
    if (!closed)
        put(handover, entry);
    pthread_mutex_unlock(&lock);
    if (closed)
        free(entry);
    return closed ? RR_HANDOVER_CLOSED : RR_DONE;
}

int rr_handover_take(rr_handover *handover, rr_item *item)
{
    int code = RR_DONE;
    pthread_mutex_lock(&lock);
    while (handover->over != RR_HANDOVER_CLOSED && !handover->complaint && handover->first == NULL)
        pthread_cond_wait(&handover->ready, &lock);
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
        }
    }
    pthread_mutex_unlock(&lock);
    return code;
}

void rr_handover_finish(rr_handover *handover)
{
    pthread_mutex_lock(&lock);
    if (handover->taken != NULL)
        handover->taken->state = REDUCED;
    handover->taken = NULL;
    handover->busy = false;
    pthread_cond_broadcast(&handover->changed);
    pthread_mutex_unlock(&lock);
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
    pthread_mutex_lock(&lock);
    while (handover->over != RR_HANDOVER_CLOSED && code == 0 &&
           (handover->busy || handover->complaint || handover->first != NULL))
        code = pthread_cond_timedwait(&handover->changed, &lock, &until);
    pthread_mutex_unlock(&lock);
    return code == 0;
}

static void end(rr_handover *handover, int code, const char *why)
{
    if (handover->over == 0)
        snprintf(handover->why, sizeof handover->why, "%s", why);
    handover->over = code;
    pthread_cond_broadcast(&handover->ready);
    pthread_cond_broadcast(&handover->changed);
}

void rr_handover_fail(rr_handover *handover, const char *why)
{
    pthread_mutex_lock(&lock);
    if (handover->over == 0) {
        drop(handover, false);
        end(handover, RR_HANDOVER_FAILED, why);
    }
    pthread_mutex_unlock(&lock);
}

void rr_handover_close(rr_handover *handover, const char *why)
{
    pthread_mutex_lock(&lock);
    drop(handover, true);
    /* After a failure its text stays: it says more. */
    end(handover, RR_HANDOVER_CLOSED, why);
    while (handover->inside > 0)
        pthread_cond_wait(&handover->changed, &lock);
    handover->taken = NULL;
    for (uint64_t i = 0; i < place_count; i++) {
        if (places[i].owner == handover && places[i].plan != NULL) {
            free_plan(places[i].plan);
            places[i].plan = NULL;
        }
    }
    pthread_mutex_unlock(&lock);
}

uint64_t rr_handover_waited_ns(rr_handover *handover)
{
    pthread_mutex_lock(&lock);
    uint64_t waited = handover->waited_ns;
    pthread_mutex_unlock(&lock);
    return waited;
}

/* ---- the framework's side ---- */

struct visit {
    rr_handover *owner;
    struct plan *plan;
    struct bucket *bucket;
};

static int refuse(char *why, int64_t plan, uint32_t bucket, const char *reason)
{
    snprintf(why, RR_WHY_BYTES, "bucket %u of plan %lld: %s", bucket, (long long)plan, reason);
    return RR_HANDOVER_MISUSED;
}

/* Look a bucket up and enter its hand-over, under the lock; leave after RR_DONE only. */
static int enter(struct visit *visit, int64_t number, uint32_t index, const rr_part *parts,
                 uint32_t part_count, char *why)
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
    if (part_count != visit->bucket->slot_count)
        return refuse(why, number, index, "got another number of gradients than were planned");
    for (uint32_t i = 0; i < part_count; i++)
        if (parts[i].nbytes != visit->bucket->slots[i].nbytes)
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
    for (uint32_t i = 0; i < bucket->slot_count; i++)
        if (parts[i].nbytes > 0)
            memcpy(parts[i].data, bucket->memory + bucket->slots[i].start, parts[i].nbytes);
}

/* Tell the engine that this rank is out of step, and wait for what it makes of that. */
static void complain(rr_handover *owner)
{
    owner->complaint = true;
    pthread_cond_signal(&owner->ready);
    while (owner->over == 0)
        pthread_cond_wait(&owner->changed, &lock);
}

int rr_handover_start(int64_t plan, uint32_t bucket, const rr_part *parts, uint32_t part_count,
                      char *why)
{
    struct visit visit;
    pthread_mutex_lock(&lock);
    int code = enter(&visit, plan, bucket, parts, part_count, why);
    if (code != RR_DONE) {
        pthread_mutex_unlock(&lock);
        return code;
    }
    struct bucket *own = visit.bucket;
    if (own->state != EMPTY) {
        complain(visit.owner);
        code = leave(&visit, why);
        pthread_mutex_unlock(&lock);
        return code;
    }
    visit.plan->running = true;
    own->state = PACKING;
    pthread_mutex_unlock(&lock);
    pack(own, parts);
    pthread_mutex_lock(&lock);
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
    pthread_mutex_unlock(&lock);
    return code;
}

static bool is_awaited(const struct bucket *bucket)
{
    return bucket->state == PACKING || bucket->state == PACKED || bucket->state == REDUCING;
}

int rr_handover_wait(int64_t plan, uint32_t bucket, const rr_part *parts, uint32_t part_count,
                     char *why)
{
    struct visit visit;
    pthread_mutex_lock(&lock);
    int code = enter(&visit, plan, bucket, parts, part_count, why);
    if (code != RR_DONE) {
        pthread_mutex_unlock(&lock);
        return code;
    }
    rr_handover *owner = visit.owner;
    struct bucket *own = visit.bucket;
    if (is_awaited(own)) {
        uint64_t since = now_ns();
        while (is_awaited(own) && owner->over == 0)
            pthread_cond_wait(&owner->changed, &lock);
        owner->waited_ns += now_ns() - since;
    }
    bool ours = own->state == REDUCED;
    if (ours && owner->over == 0) {
        own->state = UNPACKING;
        pthread_mutex_unlock(&lock);
        unpack(own, parts);
        pthread_mutex_lock(&lock);
        own->state = SPENT;
        struct plan *whole = visit.plan;
        if (++whole->spent == whole->bucket_count) {
            for (uint32_t i = 0; i < whole->bucket_count; i++)
                whole->buckets[i].state = EMPTY;
            whole->queued = whole->spent = 0;
            whole->running = false;
        }
    }
    code = leave(&visit, why);
    if (code == RR_DONE && !ours)
        code = refuse(why, plan, bucket, "waited for, but not started in this round");
    pthread_mutex_unlock(&lock);
    return code;
}
