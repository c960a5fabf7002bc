/* Element-wise reductions of any number of arrays in one pass.
 *
 * The kernels are compiled for the architecture's baseline and, on x86-64, for AVX2 and AVX-512;
 * each call asks the processor which to use. All give the same bits: they add in the same order,
 * and nothing is contracted (-ffp-contract=off).
 */

#include <string.h>

#include "copy.h"
#include "reduce.h"
#include "ringreduce.h"

/* Elements of a block. With eight bytes each it fills a sixth of a first-level cache of 48 KiB,
 * which leaves room for pieces of all sources. */
#define RR_BLOCK 1024

__extension__ typedef _Float16 half;

struct reduction {
    uint32_t op;
    uint32_t divisor;
    uint32_t sources;
    uint32_t targets;
};

typedef void (*reduction_function)(const struct reduction *, uint64_t, const void *const *,
                                   void *const *);

static inline __attribute__((always_inline)) float from_bfloat16(uint16_t bits)
{
    const uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* Round to nearest, ties to even. NaN keeps its sign and becomes quiet, since rounding could turn
 * it into infinity. */
static inline __attribute__((always_inline)) uint16_t to_bfloat16(float value)
{
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    const uint32_t rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16;
    const uint32_t quiet = (word >> 16) | 0x40;
    return (uint16_t)((word & 0x7FFFFFFF) > 0x7F800000 ? quiet : rounded);
}

/* Before a loop whose arrays are equal or do not overlap, so that it may be vectorized. */
#if defined(__clang__)
#define RR_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define RR_INDEPENDENT _Pragma("GCC ivdep")
#else
#define RR_INDEPENDENT
#endif

#define RR_TARGET
#define RR_NAMED(name) name##_any
#include "reduce_kernels.h"
#undef RR_TARGET
#undef RR_NAMED

#if defined(__x86_64__) && !defined(RR_ONE_INSTRUCTION_SET)
#define RR_TARGET __attribute__((target("avx2,f16c")))
#define RR_NAMED(name) name##_avx2
#include "reduce_kernels.h"
#undef RR_TARGET
#undef RR_NAMED
#define RR_TARGET \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c,prefer-vector-width=512")))
#define RR_NAMED(name) name##_avx512
#include "reduce_kernels.h"
#undef RR_TARGET
#undef RR_NAMED
#endif

static const reduction_function *best(void)
{
#if defined(__x86_64__) && !defined(RR_ONE_INSTRUCTION_SET)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return reductions_avx512;
    if (__builtin_cpu_supports("avx2"))
        return reductions_avx2;
#endif
    return reductions_any;
}

uint32_t rr_itemsize(uint32_t dtype)
{
    static const uint8_t sizes[] = {
        [RR_FLOAT16] = 2, [RR_BFLOAT16] = 2, [RR_FLOAT32] = 4, [RR_FLOAT64] = 8, [RR_INT8] = 1,
        [RR_INT16] = 2,   [RR_INT32] = 4,    [RR_INT64] = 8,   [RR_UINT8] = 1,
    };
    return dtype < sizeof sizes ? sizes[dtype] : 0;
}

void rr_reduce(uint32_t dtype, uint32_t op, uint32_t divisor, uint64_t count, uint32_t sources,
               const void *const *source, uint32_t targets, void *const *target)
{
    if (rr_itemsize(dtype) == 0 || sources == 0 || targets == 0)
        return;
    const struct reduction how = {op, divisor, sources, targets};
    best()[dtype](&how, count, source, target);
}
