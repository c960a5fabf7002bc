/* Copies of all lengths and alignments change what they should and nothing around it. */

#include <stdint.h>
#include <string.h>

#include "check.h"
#include "copy.h"

enum { ROOM = 9000, MARGIN = 64 };

static uint8_t source[ROOM], target[ROOM];

int main(void)
{
    static void (*const COPIES[])(void *, const void *, uint64_t) = {rr_copy_near,
                                                                     rr_copy_past_cache};
    static const uint64_t LENGTHS[] = {0,    1,    63,   64,   65,   2047, 2048, 2175,
                                       2176, 4095, 4096, 4097, 4159, 4160, 8191, 8192};
    for (int i = 0; i < ROOM; i++)
        source[i] = (uint8_t)(i * 7 + i / 256);
    for (int copy = 0; copy < 2; copy++)
        for (size_t n = 0; n < sizeof LENGTHS / sizeof LENGTHS[0]; n++)
            for (uint64_t to = 0; to < MARGIN; to += 9)
                for (uint64_t from = 0; from < MARGIN; from += 13) {
                    const uint64_t bytes = LENGTHS[n];
                    memset(target, 0xEE, sizeof target);
                    COPIES[copy](target + MARGIN + to, source + from, bytes);
                    CHECK(memcmp(target + MARGIN + to, source + from, bytes) == 0);
                    for (uint64_t i = 0; i < MARGIN + to; i++)
                        CHECK(target[i] == 0xEE);
                    for (uint64_t i = MARGIN + to + bytes; i < ROOM; i++)
                        CHECK(target[i] == 0xEE);
                }
    return 0;
}
