/* The interface version of this library; it is checked before any other call. */

#include "ringreduce.h"

uint32_t rr_abi(void)
{
    return RR_ABI;
}
