/* Calls are recorded one after the other, also when there are more than are kept. */

#include "ringreduce.h"

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

int main(void)
{
    check_calls();
    check_a_call_that_was_failed_meanwhile();
    return 0;
}
