/* Waiting for a bucket without a thread of the framework's: the thread that tells it instead.
 *
 * One for each hand-over, started when somebody first waits so, and joined when the hand-over is
 * closed. It unpacks what the engine has reduced and tells whoever asked, who may go on with the
 * rest of his computation right there. So it is not the engine that does this: it has the next
 * bucket to reduce meanwhile.
 */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* pthread_setname_np */
#endif

#include "handover.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct waiter {
    struct waiter *next;
    struct visit visit;
    rr_delivered *tell;
    void *data;
    rr_part parts[];
};

/* Take out the first whose bucket is awaited no more; NULL: there is none. Under the lock. */
static struct waiter *first_due(rr_handover *handover)
{
    for (struct waiter **at = &handover->waiters; *at != NULL; at = &(*at)->next) {
        struct waiter *waiter = *at;
        if (handover->over != 0 || !rr_bucket_is_awaited(waiter->visit.bucket)) {
            *at = waiter->next;
            return waiter;
        }
    }
    return NULL;
}

static void *deliver(void *argument)
{
    rr_handover *handover = argument;
    char why[RR_WHY_BYTES];
    pthread_mutex_lock(&rr_handover_lock);
    for (;;) {
        struct waiter *waiter = first_due(handover);
        if (waiter == NULL) {
            if (handover->over == RR_HANDOVER_CLOSED)
                break;
            pthread_cond_wait(&handover->changed, &rr_handover_lock);
            continue;
        }
        if (--handover->pending == 0)
            handover->waited_ns += rr_now_ns() - handover->pending_since;
        const int code = rr_bucket_settle(&waiter->visit, waiter->parts, why);
        pthread_mutex_unlock(&rr_handover_lock);
        waiter->tell(waiter->data, code, why);
        free(waiter);
        pthread_mutex_lock(&rr_handover_lock);
    }
    pthread_mutex_unlock(&rr_handover_lock);
    return NULL;
}

int rr_delivery_add(const struct visit *visit, const rr_part *parts, uint32_t part_count,
                    rr_delivered *tell, void *data)
{
    rr_handover *handover = visit->owner;
    struct waiter *waiter = malloc(sizeof *waiter + part_count * sizeof *parts);
    if (waiter == NULL)
        return -ENOMEM;
    if (!handover->has_thread) {
        const int code = pthread_create(&handover->delivery, NULL, deliver, handover);
        if (code != 0) {
            free(waiter);
            return -code;
        }
#ifdef __linux__
        pthread_setname_np(handover->delivery, "rr-delivery");
#endif
        handover->has_thread = true;
    }
    *waiter = (struct waiter){.visit = *visit, .tell = tell, .data = data};
    if (part_count > 0)
        memcpy(waiter->parts, parts, part_count * sizeof *parts);
    struct waiter **last = &handover->waiters;
    while (*last != NULL)
        last = &(*last)->next;
    *last = waiter;
    if (handover->pending++ == 0)
        handover->pending_since = rr_now_ns();
    return RR_DONE;
}

void rr_delivery_join(rr_handover *handover)
{
    pthread_join(handover->delivery, NULL);
}
