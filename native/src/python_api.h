/* What this library uses of Python's C API and of numpy's: it is built without their headers, so
 * that one build serves every version. Python passes the functions' addresses, and checks on an
 * array that the layouts are these (ringreduce/transport/small_calls.py). */
#ifndef RR_PYTHON_API_H
#define RR_PYTHON_API_H

#include <stdint.h>

typedef struct {
    intptr_t references;
    const void *type;
} rr_object;

/* The part of numpy's PyArrayObject_fields that never changes. */
typedef struct {
    rr_object object;
    void *data;
    int32_t dimensions;
    const intptr_t *shape;
    const intptr_t *strides;
    rr_object *base;
    rr_object *dtype;
    int32_t flags;
} rr_array;

/* NPY_ARRAY_CARRAY: contiguous in C's order, aligned, writable. */
enum { RR_ARRAY_USUAL = 0x1 | 0x100 | 0x400 };

#endif
