/* The reductions for one instruction set. reduce.c includes this once for each, with
 *   RR_TARGET        the attribute that selects it
 *   RR_NAMED(name)   the name with its suffix
 *
 * A block of the result is accumulated in `sum`, which stays in the first-level cache. So each
 * source is read once, each target is written once, and a target may be a source. Sums of two
 * sources are written without it, since the passes over it would show.
 */

#define RR_REDUCTION(NAME, T, A, FLOATING)                                                     \
    RR_TARGET static void RR_NAMED(NAME)(const struct reduction *how, uint64_t count,          \
                                         const void *const *sources, void *const *targets)     \
    {                                                                                          \
        typedef T element;                                                                     \
        typedef A accumulator;                                                                 \
        accumulator sum[RR_BLOCK];                                                             \
        for (uint64_t start = 0; start < count; start += RR_BLOCK) {                           \
            const uint64_t n = count - start < RR_BLOCK ? count - start : RR_BLOCK;            \
            const element *first = (const element *)sources[0] + start;                        \
            const element *second = (const element *)sources[how->sources > 1] + start;        \
            element *target = (element *)targets[0] + start;                                   \
            const accumulator by = (accumulator)how->divisor;                                  \
            if (how->sources == 2 && how->op == RR_SUM) {                                      \
                RR_INDEPENDENT                                                                 \
                for (uint64_t i = 0; i < n; i++)                                               \
                    target[i] = STORE((accumulator)(LOAD(first[i]) + LOAD(second[i])));        \
            } else if (how->sources == 2 && how->op == RR_MEAN) {                              \
                RR_INDEPENDENT                                                                 \
                for (uint64_t i = 0; i < n; i++) {                                             \
                    const accumulator both = (accumulator)(LOAD(first[i]) + LOAD(second[i]));  \
                    target[i] = STORE(DIVIDE(accumulator, both, by));                          \
                }                                                                              \
            } else {                                                                           \
                uint32_t source = 1;                                                           \
                if (how->sources > 1 && (how->op == RR_SUM || how->op == RR_MEAN)) {           \
                    for (uint64_t i = 0; i < n; i++)                                           \
                        sum[i] = (accumulator)(LOAD(first[i]) + LOAD(second[i]));              \
                    source = 2;                                                                \
                } else {                                                                       \
                    for (uint64_t i = 0; i < n; i++)                                           \
                        sum[i] = LOAD(first[i]);                                               \
                }                                                                              \
                for (; source < how->sources; source++) {                                      \
                    const element *next = (const element *)sources[source] + start;            \
                    switch (how->op) {                                                         \
                    case RR_MIN:                                                               \
                        /* b != b holds for NaN alone, which must stay visible; one that is in \
                         * the sum already stays since < is false then. */                     \
                        for (uint64_t i = 0; i < n; i++) {                                     \
                            const accumulator b = LOAD(next[i]);                               \
                            sum[i] = b < sum[i] || (FLOATING && b != b) ? b : sum[i];          \
                        }                                                                      \
                        break;                                                                 \
                    case RR_MAX:                                                               \
                        for (uint64_t i = 0; i < n; i++) {                                     \
                            const accumulator b = LOAD(next[i]);                               \
                            sum[i] = b > sum[i] || (FLOATING && b != b) ? b : sum[i];          \
                        }                                                                      \
                        break;                                                                 \
                    case RR_PRODUCT:                                                           \
                        for (uint64_t i = 0; i < n; i++)                                       \
                            sum[i] = (accumulator)(sum[i] * LOAD(next[i]));                    \
                        break;                                                                 \
                    default:                                                                   \
                        for (uint64_t i = 0; i < n; i++)                                       \
                            sum[i] = (accumulator)(sum[i] + LOAD(next[i]));                    \
                        break;                                                                 \
                    }                                                                          \
                }                                                                              \
                if (how->op == RR_MEAN) {                                                      \
                    for (uint64_t i = 0; i < n; i++)                                           \
                        sum[i] = DIVIDE(accumulator, sum[i], by);                              \
                }                                                                              \
                for (uint64_t i = 0; i < n; i++)                                               \
                    target[i] = STORE(sum[i]);                                                 \
            }                                                                                  \
            for (uint32_t t = 1; t < how->targets; t++)                                        \
                rr_copy_near((element *)targets[t] + start, target, n * sizeof(element));      \
        }                                                                                      \
    }

#define LOAD(x) (x)
#define STORE(x) (x)
#define DIVIDE(A, a, b) ((a) / (b))
RR_REDUCTION(float32, float, float, 1)
RR_REDUCTION(float64, double, double, 1)
#undef DIVIDE
/* Rounds towards minus infinity. The divisor is a number of ranks, so it is positive. */
#define DIVIDE(A, a, b) ((A)((a) / (b) - ((a) % (b) < 0)))
RR_REDUCTION(int8, int8_t, int8_t, 0)
RR_REDUCTION(int16, int16_t, int16_t, 0)
RR_REDUCTION(int32, int32_t, int32_t, 0)
RR_REDUCTION(int64, int64_t, int64_t, 0)
#undef DIVIDE
#define DIVIDE(A, a, b) ((A)((a) / (b)))
RR_REDUCTION(uint8, uint8_t, uint8_t, 0)
#undef LOAD
#undef STORE

/* 16-bit floats are added up in float32 and rounded once. */
#define LOAD(x) ((float)(x))
#define STORE(x) ((half)(x))
RR_REDUCTION(float16, half, float, 1)
#undef LOAD
#undef STORE
#define LOAD(x) from_bfloat16(x)
#define STORE(x) to_bfloat16(x)
RR_REDUCTION(bfloat16, uint16_t, float, 1)
#undef LOAD
#undef STORE
#undef DIVIDE

static const reduction_function RR_NAMED(reductions)[] = {
    [RR_FLOAT16] = RR_NAMED(float16), [RR_BFLOAT16] = RR_NAMED(bfloat16),
    [RR_FLOAT32] = RR_NAMED(float32), [RR_FLOAT64] = RR_NAMED(float64),
    [RR_INT8] = RR_NAMED(int8),       [RR_INT16] = RR_NAMED(int16),
    [RR_INT32] = RR_NAMED(int32),     [RR_INT64] = RR_NAMED(int64),
    [RR_UINT8] = RR_NAMED(uint8),
};

#undef RR_REDUCTION
