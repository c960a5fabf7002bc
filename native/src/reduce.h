/* What reduce.c offers the other files of this library. */
#ifndef RR_REDUCE_H
#define RR_REDUCE_H

#include <stdint.h>

/* Bytes of an element; 0 for a code that is none. */
uint32_t rr_itemsize(uint32_t dtype);

#endif
