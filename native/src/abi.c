/* The interface version of this library; it is checked before any other call. */

#include <stddef.h>

#include "ringreduce.h"

/* As ringreduce/pure/spans.py has them. */
_Static_assert(sizeof(rr_span) == 64 && offsetof(rr_span, other) == 12 &&
                   offsetof(rr_span, began) == 40,
               "SPAN");
_Static_assert(sizeof(rr_standing) == 64 && offsetof(rr_standing, operation) == 32, "STANDING");
_Static_assert(offsetof(rr_events, calls) == 64 && RR_CALLS_KEPT == 256, "CALLS_AT, CALLS_KEPT");

uint32_t rr_abi(void)
{
    return RR_ABI;
}
