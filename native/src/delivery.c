/* Asynchronous waits: the delivery thread, so that no framework thread blocks.
 *
 * Each handoff has one, started by the first asynchronous wait and joined when the handoff is
 * closed. It unpacks reduced buckets and notifies the waiters, whose callbacks may go on computing
 * in this thread. Meanwhile the engine reduces the next bucket.
 */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* pthread_setname_np */
#endif

#include "handoff.h"

#include "events.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct waiter {
    struct waiter *next;
    struct visit visit;
    rr_delivered *notify;
    void *data;
    rr_part parts[];
};

/* Remove and return the first waiter whose bucket is reduced; NULL: there is none. Needs the lock.
 */
static struct waiter *first_due(rr_handoff *handoff)
{
    for (struct waiter **at = &handoff->waiters; *at != NULL; at = &(*at)->next) {
        struct waiter *waiter = *at;
        if (handoff->over != 0 || !rr_bucket_is_awaited(waiter->visit.bucket)) {
            *at = waiter->next;
            return waiter;
        }
    }
    return NULL;
}

static void *deliver(void *argument)
{
    rr_handoff *handoff = argument;
    char why[RR_WHY_BYTES];
    pthread_mutex_lock(&rr_handoff_lock);
    for (;;) {
        struct waiter *waiter = first_due(handoff);
        if (waiter == NULL) {
            if (handoff->over == RR_HANDOFF_CLOSED)
                break;
            pthread_cond_wait(&handoff->changed, &rr_handoff_lock);
            continue;
        }
        rr_handoff_unblocks(handoff, waiter->visit.bucket);
        const int code = rr_bucket_settle(&waiter->visit, waiter->parts, NULL, why);
        pthread_mutex_unlock(&rr_handoff_lock);
        waiter->notify(waiter->data, code, why);
        free(waiter);
        pthread_mutex_lock(&rr_handoff_lock);
    }
    pthread_mutex_unlock(&rr_handoff_lock);
    return NULL;
}

int rr_delivery_add(const struct visit *visit, const rr_part *parts, uint32_t part_count,
                    rr_delivered *notify, void *data)
{
    rr_handoff *handoff = visit->owner;
    struct waiter *waiter = malloc(sizeof *waiter + part_count * sizeof *parts);
    if (waiter == NULL)
        return -ENOMEM;
    if (!handoff->has_thread) {
        const int code = pthread_create(&handoff->delivery, NULL, deliver, handoff);
        if (code != 0) {
            free(waiter);
            return -code;
        }
#ifdef __linux__
        pthread_setname_np(handoff->delivery, "rr-delivery");
#endif
        handoff->has_thread = true;
    }
    *waiter = (struct waiter){.visit = *visit, .notify = notify, .data = data};
    if (part_count > 0)
        memcpy(waiter->parts, parts, part_count * sizeof *parts);
    struct waiter **last = &handoff->waiters;
    while (*last != NULL)
        last = &(*last)->next;
    *last = waiter;
    rr_handoff_blocks(handoff);
    return RR_DONE;
}

void rr_delivery_join(rr_handoff *handoff)
{
    pthread_join(handoff->delivery, NULL);
}
