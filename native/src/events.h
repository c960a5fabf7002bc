/* Records of what calls consist of. */
#ifndef RR_EVENTS_H
#define RR_EVENTS_H

#include "ringreduce.h"

/* Seconds on CLOCK_MONOTONIC. */
double rr_now(void);

/* Add a span, whose stamp and thread are filled in; by one thread at a time. */
void rr_parts_add(rr_parts *parts, rr_span span);

#endif
