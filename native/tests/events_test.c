/* Calls are recorded one after the other, also when there are more than are kept. */

#include "events.h"

#include "check.h"

static rr_events events;

static void check_calls(void)
{
    for (uint64_t i = 0; i < 2 * RR_CALLS_KEPT; i++) {
        const double before = events.current.since;
        rr_events_begin(&events, 3, 10 * i);
        CHECK(events.current.operation == 3 && events.current.nbytes == 10 * i);
        CHECK(events.current.since >= before && events.current.calls == i);
        rr_events_end(&events);
        CHECK(events.current.operation == 0 && events.current.nbytes == 0);
        CHECK(events.current.number == i + 1 && events.current.calls == i + 1);
        const rr_span *span = &events.calls[i % RR_CALLS_KEPT];
        CHECK(span->stamp == i + 1 && span->number == i && span->kind == RR_SPAN_CALL);
        CHECK(span->operation == 3 && span->nbytes == 10 * i);
        CHECK(span->began >= before && span->ended == events.current.since);
        CHECK(events.current.elapsed == span->ended - span->began);
    }
}

static void check_a_call_that_was_failed_meanwhile(void)
{
    rr_events_begin(&events, 3, 10);
    events.current.operation = 0;
    const rr_current_call before = events.current;
    rr_events_end(&events);
    CHECK(events.current.number == before.number && events.current.calls == before.calls);
    CHECK(events.calls[before.number % RR_CALLS_KEPT].number != before.number);
}

static void check_parts(void)
{
    static rr_parts parts;
    for (uint64_t i = 0; i < 2 * RR_PARTS_KEPT + 5; i++) {
        rr_parts_add(&parts, (rr_span){.kind = RR_SPAN_PACK + i % 2,
                                       .other = -2,
                                       .number = i,
                                       .nbytes = 3 * i,
                                       .began = (double)i,
                                       .ended = (double)(2 * i)});
        const rr_span *span = &parts.spans[i % RR_PARTS_KEPT];
        CHECK(parts.count == i + 1 && span->stamp == i + 1 && span->kind == RR_SPAN_PACK + i % 2);
        CHECK(span->other == -2 && span->number == i && span->nbytes == 3 * i);
        CHECK(span->began == (double)i && span->ended == (double)(2 * i) && span->thread != 0);
    }
    /* The sums of the even and of the odd numbers below 2,053. */
    CHECK(parts.seconds[RR_SPAN_PACK] == 1026.0 * 1027.0);
    CHECK(parts.seconds[RR_SPAN_PACK + 1] == 1026.0 * 1026.0);
}

int main(void)
{
    check_parts();
    check_calls();
    check_a_call_that_was_failed_meanwhile();
    return 0;
}
