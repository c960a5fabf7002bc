/* The C part of ringreduce; README.md beside this folder says what it is for.
 *
 * Rules that hold for all of it: C99 in this header; nothing here aborts or prints; whatever
 * can fail returns one of the codes below; no function keeps a pointer that it was handed
 * unless it says so. Nothing links TensorFlow or libzmq.
 */
#ifndef RINGREDUCE_H
#define RINGREDUCE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RR_EXPORT __attribute__((visibility("default")))

/* Counted up with every change of this header; ringreduce/native.py names the one it needs. */
#define RR_ABI 1

/* What functions return. Errors of the system come as -errno. */
enum {
    RR_DONE = 0,
};

/* The ABI that this library was built with. */
RR_EXPORT uint32_t rr_abi(void);

#ifdef __cplusplus
}
#endif
#endif
