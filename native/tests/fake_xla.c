#include "fake_xla.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct XLA_FFI_Future {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int state;
    XLA_FFI_Error *error;
};

static struct {
    char name[64];
    XLA_FFI_Handler *handler;
} handlers[4];
static int handler_count;
static const char *refusal, *future_refusal;

static XLA_FFI_Error *error_create(XLA_FFI_Error_Create_Args *args)
{
    XLA_FFI_Error *error = malloc(sizeof *error);
    error->code = args->errc;
    snprintf(error->message, sizeof error->message, "%s", args->message);
    return error;
}

static void error_get_details(XLA_FFI_Error_GetDetails_Args *args)
{
    args->message = args->error->message;
}

static void error_destroy(XLA_FFI_Error_Destroy_Args *args)
{
    free(args->error);
}

static XLA_FFI_Error *handler_register(XLA_FFI_Handler_Register_Args *args)
{
    if (refusal != NULL) {
        XLA_FFI_Error_Create_Args create = {.message = refusal};
        return error_create(&create);
    }
    snprintf(handlers[handler_count].name, sizeof handlers[0].name, "%.*s %.*s",
             (int)args->name.len, args->name.ptr, (int)args->platform.len, args->platform.ptr);
    handlers[handler_count++].handler = args->bundle.execute;
    return NULL;
}

static XLA_FFI_Error *future_create(XLA_FFI_Future_Create_Args *args)
{
    args->future = calloc(1, sizeof *args->future);
    pthread_mutex_init(&args->future->lock, NULL);
    pthread_cond_init(&args->future->changed, NULL);
    return NULL;
}

static void set(XLA_FFI_Future *future, int state, XLA_FFI_Error *error)
{
    pthread_mutex_lock(&future->lock);
    future->state = state;
    future->error = error;
    pthread_cond_broadcast(&future->changed);
    pthread_mutex_unlock(&future->lock);
}

static XLA_FFI_Error *future_set_available(XLA_FFI_Future_SetAvailable_Args *args)
{
    set(args->future, 1, NULL);
    return NULL;
}

static XLA_FFI_Error *future_set_error(XLA_FFI_Future_SetError_Args *args)
{
    if (future_refusal != NULL) {
        XLA_FFI_Error_Create_Args create = {.message = future_refusal};
        return error_create(&create);
    }
    set(args->future, 2, args->error);
    return NULL;
}

int fake_future_state(XLA_FFI_Future *future)
{
    pthread_mutex_lock(&future->lock);
    const int state = future->state;
    pthread_mutex_unlock(&future->lock);
    return state;
}

XLA_FFI_Error *fake_future_result(XLA_FFI_Future *future)
{
    pthread_mutex_lock(&future->lock);
    while (future->state == 0)
        pthread_cond_wait(&future->changed, &future->lock);
    pthread_mutex_unlock(&future->lock);
    return future->error;
}

void fake_future_free(XLA_FFI_Future *future)
{
    free(future->error);
    free(future);
}

XLA_FFI_Handler *fake_handler(const char *name)
{
    for (int i = 0; i < handler_count; i++)
        if (strcmp(handlers[i].name, name) == 0)
            return handlers[i].handler;
    return NULL;
}

static const XLA_FFI_Api functions = {
    .XLA_FFI_Error_Create = error_create,
    .XLA_FFI_Error_GetDetails = error_get_details,
    .XLA_FFI_Error_Destroy = error_destroy,
    .XLA_FFI_Handler_Register = handler_register,
    .XLA_FFI_Future_Create = future_create,
    .XLA_FFI_Future_SetAvailable = future_set_available,
    .XLA_FFI_Future_SetError = future_set_error,
};

void fake_refuse(const char *why)
{
    refusal = why;
}

void fake_refuse_futures(const char *why)
{
    future_refusal = why;
}

/* Longer than the table, as TensorFlow's is. */
static struct {
    XLA_FFI_Api api;
    void *more[2];
} shown;

void fake_table(int major, int minor, size_t struct_size, int futures_at)
{
    const size_t first = offsetof(XLA_FFI_Api, XLA_FFI_Error_Create);
    const size_t futures = offsetof(XLA_FFI_Api, XLA_FFI_Future_Create);
    shown.api = functions;
    shown.api.struct_size = struct_size;
    shown.api.api_version.major_version = major;
    shown.api.api_version.minor_version = minor;
    memmove((char *)&shown + first + (size_t)futures_at * sizeof(void *),
            (const char *)&functions + futures, sizeof functions - futures);
}

const XLA_FFI_Api *XLA_FFI_GetApi(void)
{
    return &shown.api;
}
