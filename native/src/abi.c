/* Which interface this library has; asked before anything else is called. */

#include "ringreduce.h"

uint32_t rr_abi(void)
{
    return RR_ABI;
}
