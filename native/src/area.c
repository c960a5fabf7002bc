/* Memory for rounds of a bucket, and who still needs it; ringreduce.h describes it. */

#include "area.h"

#include <stdlib.h>
#include <string.h>

/* TensorFlow copies what is not aligned to this. */
enum { ALIGNMENT = 64 };

rr_area *rr_area_new(void *memory, void *marks, uint32_t ranks, uint32_t rank)
{
    rr_area *area = calloc(1, sizeof *area);
    if (area != NULL)
        *area = (rr_area){.memory = memory, .marks = marks, .ranks = ranks, .rank = rank};
    return area;
}

rr_area *rr_area_spare(uint64_t nbytes)
{
    const size_t room = nbytes / ALIGNMENT * ALIGNMENT + ALIGNMENT;
    rr_area *area = rr_area_new(aligned_alloc(ALIGNMENT, room), NULL, 0, 0);
    if (area != NULL && area->memory != NULL) {
        memset(area->memory, 0, room);
        area->is_spare = true;
        area->uses = 1;
        return area;
    }
    if (area != NULL)
        free(area->memory);
    free(area);
    return NULL;
}

int rr_area_is_used(const rr_area *area)
{
    bool is_used = __atomic_load_n(&area->plans, __ATOMIC_ACQUIRE) > 0 ||
                   __atomic_load_n(&area->uses, __ATOMIC_ACQUIRE) > 0;
    /* The memory is the first rank's. */
    for (uint32_t other = 1; area->marks != NULL && area->rank == 0 && other < area->ranks; other++)
        is_used |= __atomic_load_n(&area->marks[other].holds, __ATOMIC_ACQUIRE) > 0;
    return is_used;
}

void rr_area_free(rr_area *area)
{
    if (area->marks != NULL)
        __atomic_store_n(&area->marks[area->rank].holds, 0, __ATOMIC_RELEASE);
    free(area);
}

void rr_area_plan(rr_area *area, int by)
{
    __atomic_fetch_add(&area->plans, (uint32_t)by, __ATOMIC_ACQ_REL);
}

bool rr_area_take(rr_area *area)
{
    uint32_t none = 0;
    if (!__atomic_compare_exchange_n(&area->uses, &none, 1, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_RELAXED))
        return false;
    for (uint32_t rank = 0; area->marks != NULL && rank < area->ranks; rank++)
        if (__atomic_load_n(&area->marks[rank].lent, __ATOMIC_ACQUIRE) > 0) {
            rr_area_leave(area);
            return false;
        }
    return true;
}

void rr_area_lend(rr_area *area)
{
    __atomic_fetch_add(&area->uses, 1, __ATOMIC_ACQ_REL);
    if (area->marks != NULL)
        __atomic_fetch_add(&area->marks[area->rank].lent, 1, __ATOMIC_ACQ_REL);
}

void rr_area_give_back(rr_area *area)
{
    if (area->marks != NULL)
        __atomic_fetch_sub(&area->marks[area->rank].lent, 1, __ATOMIC_ACQ_REL);
    rr_area_leave(area);
}

void rr_area_leave(rr_area *area)
{
    /* Only a spare one has no other owner, who might free it now. */
    const bool is_spare = area->is_spare;
    if (__atomic_sub_fetch(&area->uses, 1, __ATOMIC_ACQ_REL) == 0 && is_spare) {
        free(area->memory);
        free(area);
    }
}
