/* What other files of this library use of reduce.c. */
#ifndef RR_REDUCE_H
#define RR_REDUCE_H

#include <stdint.h>

/* Bytes of an element; 0 for an unknown code. */
uint32_t rr_itemsize(uint32_t dtype);

#endif
