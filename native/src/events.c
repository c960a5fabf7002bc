/* Records of calls, as ringreduce/effects/events.py makes them without this library, and of parts.
 */

#include "events.h"

#include <pthread.h>
#include <stddef.h>
#include <time.h>

/* As ringreduce/pure/spans.py has them. */
_Static_assert(sizeof(rr_span) == 64 && offsetof(rr_span, other) == 12 &&
                   offsetof(rr_span, began) == 40,
               "SPAN");
_Static_assert(sizeof(rr_current_call) == 64 && offsetof(rr_current_call, operation) == 32,
               "STANDING");
_Static_assert(offsetof(rr_events, calls) == 64 && RR_CALLS_KEPT == 256, "CALLS_AT, CALLS_KEPT");
_Static_assert(offsetof(rr_parts, seconds) == 64 && offsetof(rr_parts, spans) == 192 &&
                   RR_PARTS_KEPT == 1024,
               "SECONDS_AT, SPANS_AT, PARTS_KEPT");
_Static_assert(offsetof(rr_events, ours) == 16448 && offsetof(rr_events, queued) == 82176,
               "PARTS_AT");

double rr_now(void)
{
    struct timespec clock;
    clock_gettime(CLOCK_MONOTONIC, &clock);
    return (double)clock.tv_sec + (double)clock.tv_nsec * 1e-9;
}

void rr_events_begin(rr_events *events, uint64_t operation, uint64_t nbytes)
{
    rr_current_call *current = &events->current;
    current->operation = operation;
    current->nbytes = nbytes;
    current->thread = (uint64_t)pthread_self();
    current->since = rr_now();
}

void rr_events_end(rr_events *events)
{
    const double ended = rr_now();
    const rr_current_call was = events->current;
    if (was.operation == 0) /* another thread has recorded a failure */
        return;
    events->calls[was.number % RR_CALLS_KEPT] = (rr_span){.stamp = was.number + 1,
                                                          .kind = RR_SPAN_CALL,
                                                          .operation = (uint16_t)was.operation,
                                                          .number = was.number,
                                                          .nbytes = was.nbytes,
                                                          .thread = was.thread,
                                                          .began = was.since,
                                                          .ended = ended};
    const double elapsed = ended - was.since;
    events->current = (rr_current_call){.number = was.number + 1,
                                        .calls = was.calls + 1,
                                        .seconds = was.seconds + elapsed,
                                        .elapsed = elapsed,
                                        .since = ended};
}

typedef uint64_t __attribute__((may_alias)) word;

void rr_parts_add(rr_parts *parts, rr_span span)
{
    word *slot = (word *)&parts->spans[parts->count % RR_PARTS_KEPT];
    const word *from = (const word *)&span;
    span.thread = (uint64_t)pthread_self();
    /* The stamp is first 0 and last new, in this order for every reader: one that finds a stamp
     * before and after it has copied the span has no half of it. */
    __atomic_store_n(&slot[0], 0, __ATOMIC_RELAXED);
    for (size_t i = 1; i < sizeof span / sizeof *from; i++)
        __atomic_store_n(&slot[i], from[i], __ATOMIC_RELEASE);
    __atomic_store_n(&slot[0], parts->count + 1, __ATOMIC_RELEASE);
    parts->count++;
    parts->seconds[span.kind] += span.ended - span.began;
}

static rr_python python;

void rr_events_use(const rr_python *functions)
{
    python = *functions;
}

static void *none(void)
{
    python.hold(python.none);
    return python.none;
}

/* Arguments are from effects/events.py, which passes numbers that fit. */
static rr_events *events_of(void *self)
{
    return (rr_events *)(uintptr_t)python.as_number(self);
}

void *rr_events_on_begin(void *self, void *const *arguments, intptr_t number)
{
    (void)number;
    rr_events_begin(events_of(self), python.as_number(arguments[0]),
                    python.as_number(arguments[1]));
    return none();
}

void *rr_events_on_end(void *self, void *const *arguments, intptr_t number)
{
    (void)arguments;
    (void)number;
    rr_events_end(events_of(self));
    return none();
}
