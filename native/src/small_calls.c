/* A collective or message of one array, from its arguments on, as one C function of Python's.
 *
 * The GIL is held but for the call itself, so that what Python's threads see of it is consistent.
 */

#include <pthread.h>
#include <stddef.h>

#include "python_api.h"
#include "ringreduce.h"

_Static_assert(sizeof(void *) != 8 ||
                   (offsetof(rr_array, dimensions) == 24 && offsetof(rr_array, dtype) == 56 &&
                    offsetof(rr_array, flags) == 64),
               "as numpy's");

static uint32_t slot_of(const void *dtype, const void *option, uint64_t count)
{
    const uint64_t all = (uintptr_t)dtype / 16 + (uintptr_t)option / 16 * 31 + count * 7;
    return (uint32_t)(all * UINT64_C(0x9E3779B97F4A7C15) >> 58);
}

_Static_assert(RR_SMALL_CALLS == 1 << (64 - 58), "a slot for each value");

uint32_t rr_small_learn(rr_small_calls *calls, const rr_small_call *call)
{
    const uint32_t slot = slot_of(call->dtype, call->option, call->count);
    calls->known[slot] = *call;
    return slot;
}

static uint64_t elements(const rr_array *array)
{
    uint64_t count = 1;
    for (int32_t i = 0; i < array->dimensions; i++)
        count *= (uint64_t)array->shape[i];
    return count;
}

/* The call on `array`; NULL: it was not taught, or is for Python. */
static const rr_small_call *find(const rr_small_calls *calls, const rr_array *array,
                                 const void *option)
{
    if (calls->end == NULL || (calls->thread != 0 && calls->thread != (uint64_t)pthread_self()) ||
        array->object.type != calls->array_type ||
        (array->flags & RR_ARRAY_USUAL) != RR_ARRAY_USUAL)
        return NULL;
    const uint64_t count = elements(array);
    const rr_small_call *known = &calls->known[slot_of(array->dtype, option, count)];
    const int same =
        known->dtype == array->dtype && known->option == option && known->count == count;
    return same && known->call != NULL ? known : NULL;
}

static int run(const rr_small_calls *calls, void *end, const rr_small_call *call, void *data)
{
    switch (calls->kind) {
    case RR_SMALL_SEND: return rr_pair_send(end, call->call, data, call->nbytes, calls->limits);
    case RR_SMALL_RECEIVE:
        return rr_pair_receive(end, call->call, data, call->nbytes, calls->limits);
    default: return rr_shm_run(end, call->call, data, calls->limits);
    }
}

static void *returned(const rr_small_calls *calls, void *object)
{
    calls->hold(object);
    return object;
}

/* Exclude other calls. 0: one runs, perhaps this thread's own, which a signal handler has
 * interrupted. -1: Python has raised. */
static int enter(const rr_small_calls *calls)
{
    if (calls->lock == NULL)
        return 1;
    if (*calls->caller != 0)
        return 0;
    void *has_locked = calls->call(calls->lock);
    if (has_locked == NULL)
        return -1;
    calls->drop(has_locked);
    if (has_locked != calls->done)
        return 0;
    *calls->caller = (uint64_t)pthread_self();
    return 1;
}

/* End the running call; return `object`. */
static void *leave(rr_small_calls *calls, void *object)
{
    calls->running = NULL;
    if (calls->lock != NULL) {
        *calls->caller = 0;
        void *none = calls->call(calls->unlock);
        if (none == NULL)
            return NULL;
        calls->drop(none);
    }
    return returned(calls, object);
}

void *rr_small_run(void *self, void *const *arguments, intptr_t number)
{
    rr_small_calls *calls = ((const rr_array *)self)->data;
    const rr_array *array = number == 2 ? arguments[0] : NULL;
    const rr_small_call *call = array == NULL ? NULL : find(calls, array, arguments[1]);
    const int has_entered = call == NULL ? 0 : enter(calls);
    if (has_entered != 1)
        return has_entered < 0 ? NULL : returned(calls, calls->unknown);
    void *data = array->data;
    /* Without the GIL another thread may close: it frees the end when this call is over. */
    void *end = calls->end;
    calls->running = call;
    if (calls->events != NULL)
        rr_events_begin(calls->events, calls->operation, call->nbytes);
    void *thread = calls->release_gil();
    const int status = run(calls, end, call, data);
    calls->take_gil(thread);
    if (status != RR_DONE) {
        if (calls->lock == NULL)
            calls->running = NULL;
        return returned(calls, calls->late);
    }
    calls->bytes += call->nbytes;
    if (calls->events != NULL)
        rr_events_end(calls->events);
    return leave(calls, calls->done);
}

void *rr_small_end(void *self, void *const *arguments, intptr_t number)
{
    (void)arguments;
    (void)number;
    rr_small_calls *calls = ((const rr_array *)self)->data;
    if (calls->running == NULL || *calls->caller != (uint64_t)pthread_self())
        return returned(calls, calls->unknown);
    return leave(calls, calls->unknown);
}
