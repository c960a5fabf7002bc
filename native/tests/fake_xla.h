/* A fake XLA: accepts registrations, and calls handlers as XLA would. */
#ifndef FAKE_XLA_H
#define FAKE_XLA_H

#include "xla_api.h"

#define FAKE __attribute__((visibility("default")))

struct XLA_FFI_Error {
    XLA_FFI_Error_Code code;
    char message[4096];
};

/* A future's state: 0 pending, 1 available, 2 with an error. */
FAKE int fake_future_state(XLA_FFI_Future *future);
/* Wait until a future is no longer pending; its error, or NULL. */
FAKE XLA_FFI_Error *fake_future_result(XLA_FFI_Future *future);
FAKE void fake_future_free(XLA_FFI_Future *future);

/* The handler registered under a name, or NULL. */
FAKE XLA_FFI_Handler *fake_handler(const char *name);

/* The next registrations, or errors of futures, fail with this text. */
FAKE void fake_refuse(const char *why);
FAKE void fake_refuse_futures(const char *why);
/* Set the table that XLA exports, and the index of its futures. */
FAKE void fake_table(int major, int minor, size_t struct_size, int futures_at);

FAKE rr_xla_get_api XLA_FFI_GetApi;

#endif
