/* Copies of arrays: between caches, and of those that no cache holds. */
#ifndef RR_COPY_H
#define RR_COPY_H

#include <stdint.h>

/* Arrays of together so many bytes are in no cache: a group of cores seldom shares a larger one.
 * What the system says (_SC_LEVEL3_CACHE_SIZE) is of no use: in a virtual machine it was ten times
 * that of its cores. */
#define RR_FAR_BYTES (UINT64_C(32) << 20)

/* As memcpy, and faster than glibc's from 2 KiB on where that uses `rep movsb`. */
void rr_copy_near(void *target, const void *source, uint64_t bytes);

/* As memcpy, and leaves the target in memory rather than in the cache. */
void rr_copy_past_cache(void *target, const void *source, uint64_t bytes);

#endif
