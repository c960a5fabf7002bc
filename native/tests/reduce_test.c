/* Reductions compared with a simple loop: every type and operator, several numbers of sources, and
 * lengths around the ends of blocks and vectors. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "reduce.h"
#include "ringreduce.h"

#include "check.h"

enum { LONGEST = 2100, SOURCES = 5 };

static const uint64_t LENGTHS[] = {0, 1, 2, 3, 7, 31, 64, 1023, 1024, 1025, 2053};

/* Small whole numbers, exact in every type, by position and source. */
static double value(uint32_t source, uint64_t i)
{
    return (double)((i * 7 + source * 3) % 5) + 1;
}

static void put(uint32_t dtype, void *array, uint64_t i, double x)
{
    const float f = (float)x;
    uint32_t word;
    switch (dtype) {
    case RR_FLOAT16: {
        __extension__ const _Float16 h = (_Float16)f;
        memcpy((uint8_t *)array + 2 * i, &h, 2);
        break;
    }
    case RR_BFLOAT16:
        memcpy(&word, &f, 4);
        ((uint16_t *)array)[i] = (uint16_t)(word >> 16);
        break;
    case RR_FLOAT32: ((float *)array)[i] = f; break;
    case RR_FLOAT64: ((double *)array)[i] = x; break;
    case RR_INT8: ((int8_t *)array)[i] = (int8_t)x; break;
    case RR_INT16: ((int16_t *)array)[i] = (int16_t)x; break;
    case RR_INT32: ((int32_t *)array)[i] = (int32_t)x; break;
    case RR_INT64: ((int64_t *)array)[i] = (int64_t)x; break;
    default: ((uint8_t *)array)[i] = (uint8_t)x; break;
    }
}

static double expected(uint32_t dtype, uint32_t op, uint32_t sources, uint64_t i)
{
    double result = value(0, i);
    for (uint32_t s = 1; s < sources; s++) {
        const double x = value(s, i);
        switch (op) {
        case RR_MIN: result = x < result ? x : result; break;
        case RR_MAX: result = x > result ? x : result; break;
        case RR_PRODUCT: result *= x; break;
        default: result += x; break;
        }
    }
    if (op == RR_MEAN)
        result /= 4; /* exact in binary */
    return dtype >= RR_INT8 ? floor(result) : result;
}

static void test_every_kind(void)
{
    static uint64_t arrays[SOURCES][LONGEST], wanted[LONGEST], other[LONGEST];
    for (uint32_t dtype = RR_FLOAT16; dtype <= RR_UINT8; dtype++)
        for (uint32_t op = RR_SUM; op <= RR_PRODUCT; op++)
            for (uint32_t sources = 1; sources <= (op == RR_PRODUCT ? 3 : SOURCES); sources++)
                for (size_t l = 0; l < sizeof LENGTHS / sizeof LENGTHS[0]; l++) {
                    const uint64_t count = LENGTHS[l], bytes = count * rr_itemsize(dtype);
                    const void *from[SOURCES];
                    for (uint32_t s = 0; s < sources; s++) {
                        from[s] = arrays[s];
                        for (uint64_t i = 0; i < count; i++)
                            put(dtype, arrays[s], i, value(s, i));
                    }
                    for (uint64_t i = 0; i < count; i++)
                        put(dtype, wanted, i, expected(dtype, op, sources, i));
                    /* The first target is a source. */
                    void *targets[2] = {arrays[0], other};
                    rr_reduce(dtype, op, 4, count, sources, from, 2, targets);
                    CHECK(memcmp(arrays[0], wanted, bytes) == 0);
                    CHECK(memcmp(other, wanted, bytes) == 0);
                }
}

static void test_not_a_number_stays(void)
{
    const float a[3] = {NAN, 1, 1}, b[3] = {1, NAN, 2};
    const void *sources[2] = {a, b};
    float result[3];
    void *target = result;
    for (uint32_t op = RR_SUM; op <= RR_PRODUCT; op++) {
        rr_reduce(RR_FLOAT32, op, 2, 3, 2, sources, 1, &target);
        CHECK(isnan(result[0]) && isnan(result[1]) && !isnan(result[2]));
    }
}

static void test_integers_wrap_and_round_down(void)
{
    const int8_t a[2] = {127, -3}, b[2] = {1, 0};
    const void *sources[2] = {a, b};
    int8_t result[2];
    void *target = result;
    rr_reduce(RR_INT8, RR_SUM, 1, 2, 2, sources, 1, &target);
    CHECK(result[0] == -128);
    rr_reduce(RR_INT8, RR_MEAN, 2, 2, 2, sources, 1, &target);
    CHECK(result[1] == -2);
}

static void test_halves_add_in_single_precision(void)
{
    /* 2048 + 1 is 2048 in float16: added one at a time, the ones would be lost. */
    enum { ONES = 64 };
    __extension__ _Float16 big = 2048, one = 1, result;
    const void *sources[ONES + 1] = {&big};
    for (int i = 1; i <= ONES; i++)
        sources[i] = &one;
    void *target = &result;
    rr_reduce(RR_FLOAT16, RR_SUM, 1, 1, ONES + 1, sources, 1, &target);
    CHECK(result == 2048 + ONES);
}

int main(void)
{
    test_every_kind();
    test_not_a_number_stays();
    test_integers_wrap_and_round_down();
    test_halves_add_in_single_precision();
    CHECK(rr_itemsize(0) == 0 && rr_itemsize(10) == 0);
    return 0;
}
