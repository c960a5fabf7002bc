/* The header compiles by itself, and the library was built from it. */

#include "ringreduce.h"

#include "check.h"

int main(void)
{
    CHECK(rr_abi() == RR_ABI);
    return 0;
}
