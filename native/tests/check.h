/* The assertion of the C tests: prints where and what, and exits. */
#ifndef RR_CHECK_H
#define RR_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(holds)                                                            \
    do {                                                                        \
        if (!(holds)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #holds); \
            exit(1);                                                            \
        }                                                                       \
    } while (0)

#endif
