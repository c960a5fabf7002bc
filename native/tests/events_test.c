/* Calls are recorded one after the other, also when there are more than are kept. */

#include "events.h"

#include "check.h"

static rr_events events;

static void check_calls(void)
{
    for (uint64_t i = 0; i < 2 * RR_CALLS_KEPT; i++) {
        const double before = events.standing.since;
        rr_events_begin(&events, 3, 10 * i);
        CHECK(events.standing.operation == 3 && events.standing.nbytes == 10 * i);
        CHECK(events.standing.since >= before && events.standing.calls == i);
        rr_events_end(&events);
        CHECK(events.standing.operation == 0 && events.standing.nbytes == 0);
        CHECK(events.standing.number == i + 1 && events.standing.calls == i + 1);
        const rr_span *span = &events.calls[i % RR_CALLS_KEPT];
        CHECK(span->stamp == i + 1 && span->number == i && span->kind == RR_SPAN_CALL);
        CHECK(span->operation == 3 && span->nbytes == 10 * i);
        CHECK(span->began >= before && span->ended == events.standing.since);
        CHECK(events.standing.elapsed == span->ended - span->began);
    }
}

static void check_a_call_that_was_failed_meanwhile(void)
{
    rr_events_begin(&events, 3, 10);
    events.standing.operation = 0;
    const rr_standing before = events.standing;
    rr_events_end(&events);
    CHECK(events.standing.number == before.number && events.standing.calls == before.calls);
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
