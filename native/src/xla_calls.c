/* XLA custom calls that pass gradients to the engine and return the means, on the CPU.
 *
 *   ringreduce_start(gradients..., after) {plan, bucket, in_place} -> [gradient,] token
 *   ringreduce_wait([gradient,] tokens...) {plan, bucket, in_place} -> means..., token
 *
 * Tokens are s32 scalars that only order calls. A wait takes the tokens of all starts of the step;
 * without them XLA would schedule it right after its own start. A wait never blocks a thread: it
 * returns a future, which the delivery thread completes (delivery.c), and XLA runs what does not
 * need the means.
 *
 * `after` is the token of the previous collective: XLA runs independent calls in any order.
 *
 * The gradient of a bucket that is reduced in place passes through both calls, and each result
 * shares its operand's buffer. So XLA copies the gradient first if anything else needs it, and does
 * not touch it between start and wait, while the engine works on it. When a call fails XLA frees
 * all memory of the step, so the failure is reported only when no engine uses any of it.
 */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "xla_api.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "handoff.h"

/* Every argument structure of XLA begins with its size. */
#define NEW(type) {.struct_size = sizeof(type)}

/* XLA's functions, in the layout of xla_api.h, and the version of its interface. */
static XLA_FFI_Api xla;

static XLA_FFI_Error *failure(const char *why)
{
    XLA_FFI_Error_Create_Args create = NEW(XLA_FFI_Error_Create_Args);
    create.message = why;
    create.errc = XLA_FFI_Error_Code_UNKNOWN; /* as tf_ops.c; ringreduce/tensorflow/failures.py */
    return xla.XLA_FFI_Error_Create(&create);
}

static uint64_t size_of(XLA_FFI_DataType type)
{
    switch (type) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8: return 1;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16: return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32: return 4;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64: return 8;
    }
    return 0; /* matches no gradient: the handoff refuses it */
}

static rr_part part_of(const XLA_FFI_Buffer *buffer)
{
    uint64_t nbytes = size_of(buffer->dtype);
    for (int64_t i = 0; i < buffer->rank; i++)
        nbytes *= (uint64_t)buffer->dims[i];
    return (rr_part){buffer->data, nbytes};
}

static bool attribute(const XLA_FFI_Attrs *attrs, const char *name, int64_t *value)
{
    for (int64_t i = 0; i < attrs->size; i++) {
        const XLA_FFI_ByteSpan *given = attrs->names[i];
        if (given->len != strlen(name) || memcmp(given->ptr, name, given->len) != 0 ||
            attrs->types[i] != XLA_FFI_AttrType_SCALAR)
            continue;
        const XLA_FFI_Scalar *scalar = attrs->attrs[i];
        if (scalar->dtype != XLA_FFI_DataType_S64)
            continue;
        memcpy(value, scalar->value, sizeof *value);
        return true;
    }
    return false;
}

/* The bucket of a call, and the gradients that it packs or unpacks. */
struct call {
    int64_t plan, bucket, in_place;
    uint32_t count;
    rr_part *parts;
};

/* Read a call and its first `count` `buffers`. NULL: success; the caller frees `parts`. */
static XLA_FFI_Error *open_call(struct call *call, const XLA_FFI_CallFrame *frame,
                                void *const *buffers, int64_t count)
{
    if (!attribute(&frame->attrs, "plan", &call->plan) ||
        !attribute(&frame->attrs, "bucket", &call->bucket) ||
        !attribute(&frame->attrs, "in_place", &call->in_place) || count < 0 ||
        (call->in_place && (frame->args.size < 2 || frame->rets.size != 2)))
        return failure("a custom call of ringreduce without its attributes");
    call->count = (uint32_t)count;
    call->parts = malloc(call->count * sizeof *call->parts + 1);
    if (call->parts == NULL)
        return failure("out of memory");
    for (uint32_t i = 0; i < call->count; i++)
        call->parts[i] = part_of(buffers[i]);
    return NULL;
}

static void set_token(const XLA_FFI_CallFrame *frame)
{
    const XLA_FFI_Buffer *token = frame->rets.rets[frame->rets.size - 1];
    memset(token->data, 0, sizeof(int32_t));
}

static XLA_FFI_Error *start(XLA_FFI_CallFrame *frame)
{
    struct call call;
    XLA_FFI_Error *error = open_call(&call, frame, frame->args.args, frame->args.size - 1);
    if (error != NULL) {
        rr_handoff_let_go();
        return error;
    }
    if (call.in_place) {
        const rr_part own = part_of(frame->rets.rets[0]);
        if (own.data != call.parts[0].data)
            memcpy(own.data, call.parts[0].data, own.nbytes);
        call.parts[0] = own;
    }
    char why[RR_WHY_BYTES] = "";
    const int code =
        rr_handoff_start(call.plan, (uint32_t)call.bucket, call.parts, call.count, why);
    free(call.parts);
    if (code != RR_DONE) {
        rr_handoff_let_go();
        return failure(why);
    }
    set_token(frame);
    return NULL;
}

static void destroy(XLA_FFI_Error *error)
{
    XLA_FFI_Error_Destroy_Args args = NEW(XLA_FFI_Error_Destroy_Args);
    args.error = error;
    xla.XLA_FFI_Error_Destroy(&args);
}

/* Complete `future`. NULL: success. */
static XLA_FFI_Error *settle(XLA_FFI_Future *future, int code, const char *why)
{
    if (code == RR_DONE) {
        XLA_FFI_Future_SetAvailable_Args set = NEW(XLA_FFI_Future_SetAvailable_Args);
        set.future = future;
        return xla.XLA_FFI_Future_SetAvailable(&set);
    }
    XLA_FFI_Future_SetError_Args set = NEW(XLA_FFI_Future_SetError_Args);
    set.future = future;
    set.error = failure(why);
    XLA_FFI_Error *error = xla.XLA_FFI_Future_SetError(&set);
    if (error != NULL)
        destroy(set.error);
    return error;
}

/* The delivery thread calls this too, and then runs XLA's work that waits for the future. */
static void complete(void *data, int code, const char *why)
{
    if (code != RR_DONE)
        rr_handoff_let_go();
    /* Fails only if a structure has another size, which registering has checked. */
    (void)settle(data, code, why);
}

/* Whether the gradient and the mean are in the same memory. */
static bool shares_memory(const XLA_FFI_CallFrame *frame)
{
    const XLA_FFI_Buffer *gradient = frame->args.args[0], *mean = frame->rets.rets[0];
    return gradient->data == mean->data;
}

static XLA_FFI_Error *wait(XLA_FFI_CallFrame *frame)
{
    struct call call;
    XLA_FFI_Future_Create_Args create = NEW(XLA_FFI_Future_Create_Args);
    XLA_FFI_Error *error = open_call(&call, frame, frame->rets.rets, frame->rets.size - 1);
    if (error == NULL && (error = xla.XLA_FFI_Future_Create(&create)) != NULL)
        free(call.parts);
    if (error != NULL) {
        rr_handoff_let_go();
        return error;
    }
    set_token(frame);
    frame->future = create.future;
    char why[RR_WHY_BYTES] = "XLA has moved a gradient while it was reduced";
    const int code = call.in_place && !shares_memory(frame)
                         ? RR_HANDOFF_MISUSED
                         : rr_handoff_wait_async(call.plan, (uint32_t)call.bucket, call.parts,
                                                 call.count, complete, create.future, why);
    free(call.parts);
    if (code != RR_HANDOFF_LATER)
        complete(create.future, code, why);
    return NULL;
}

/* Whether the call only asks for metadata; answers it. */
static bool answers_metadata(const XLA_FFI_CallFrame *frame)
{
    XLA_FFI_InternalExtension *extension = frame->extension_start;
    while (extension != NULL && extension->type != XLA_FFI_Extension_Metadata)
        extension = extension->next;
    if (extension == NULL)
        return false;
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
    metadata->api_version.major_version = xla.api_version.major_version;
    metadata->api_version.minor_version = xla.api_version.minor_version;
    metadata->traits = 0;
    return true;
}

static XLA_FFI_Error *handle_start(XLA_FFI_CallFrame *frame)
{
    return answers_metadata(frame) ? NULL : start(frame);
}

static XLA_FFI_Error *handle_wait(XLA_FFI_CallFrame *frame)
{
    return answers_metadata(frame) ? NULL : wait(frame);
}

/* Store XLA's error message in `why`. */
static int refused(XLA_FFI_Error *error, char *why)
{
    XLA_FFI_Error_GetDetails_Args get = NEW(XLA_FFI_Error_GetDetails_Args);
    get.error = error;
    xla.XLA_FFI_Error_GetDetails(&get);
    snprintf(why, RR_WHY_BYTES, "%s", get.message);
    destroy(error);
    return -EINVAL;
}

/* Complete two futures, one with success. This finds out now whether XLA has enlarged a structure
 * that completing takes; a step would wait for ever. */
static int try_futures(char *why)
{
    /* XLA destroys only futures that a handler returned, so these are kept. */
    static XLA_FFI_Future *tried[2];
    static int done;
    static const int codes[] = {RR_DONE, -ECANCELED};
    for (; done < 2; done++) {
        XLA_FFI_Error *error = NULL;
        if (tried[done] == NULL) {
            XLA_FFI_Future_Create_Args create = NEW(XLA_FFI_Future_Create_Args);
            error = xla.XLA_FFI_Future_Create(&create);
            tried[done] = create.future;
        }
        if (error == NULL)
            error = settle(tried[done], codes[done], "tried");
        if (error != NULL)
            return refused(error, why);
    }
    return RR_DONE;
}

static int register_call(const char *name, XLA_FFI_Handler *handler, char *why)
{
    static const char platform[] = "Host";
    XLA_FFI_Handler_Register_Args args = NEW(XLA_FFI_Handler_Register_Args);
    args.name = (XLA_FFI_ByteSpan){name, strlen(name)};
    args.platform = (XLA_FFI_ByteSpan){platform, strlen(platform)};
    args.bundle.execute = handler;
    XLA_FFI_Error *error = xla.XLA_FFI_Handler_Register(&args);
    return error == NULL ? RR_DONE : refused(error, why);
}

/* The known tables. The first two have the same version and size. */
static const struct layout {
    int minor;
    size_t struct_size; /* as the table states it; the first two do not count all functions */
    int futures_at;     /* index of XLA_FFI_Future_Create among the functions */
} layouts[] = {
    {1, 88, 12},  /* TensorFlow 2.18 */
    {1, 88, 13},  /* TensorFlow 2.19 */
    {1, 192, 13}, /* TensorFlow 2.20 */
    {2, 192, 13}, /* TensorFlow 2.21 */
    {4, 200, 13}, /* TensorFlow 2.22 */
};

/* Copy XLA's table. `futures_at` is from the header that came with this XLA. */
static int read_table(const XLA_FFI_Api *found, int futures_at, char *why)
{
    const XLA_FFI_Api_Version *version = &found->api_version;
    const struct layout *layout = layouts, *end = layouts + sizeof layouts / sizeof *layouts;
    while (layout < end &&
           (version->major_version != RR_XLA_MAJOR || version->minor_version != layout->minor ||
            found->struct_size != layout->struct_size || futures_at != layout->futures_at))
        layout++;
    if (layout == end) {
        snprintf(why, RR_WHY_BYTES,
                 "this TensorFlow's XLA has version %d.%d of the interface for custom calls, with "
                 "a table of %zu bytes and its futures at %d; this ringreduce knows none like it "
                 "up to %d.%d",
                 version->major_version, version->minor_version, found->struct_size, futures_at,
                 RR_XLA_MAJOR, RR_XLA_MINOR);
        return -ENOSYS;
    }
    const size_t functions = offsetof(XLA_FFI_Api, XLA_FFI_Error_Create);
    const size_t futures = offsetof(XLA_FFI_Api, XLA_FFI_Future_Create);
    memcpy(&xla, found, functions + (size_t)futures_at * sizeof(void *));
    memcpy((char *)&xla + futures,
           (const char *)found + functions + (size_t)futures_at * sizeof(void *),
           sizeof xla - futures);
    return RR_DONE;
}

/* C cannot cast an object pointer to a function pointer, so memcpy does. */
static rr_xla_get_api *find_api(void *library)
{
    static const char *const names[] = {"XLA_FFI_GetApi", "_ZN3xla3ffi12GetXlaFfiApiEv"};
    void *symbol = dlsym(library, names[0]);
    if (symbol == NULL)
        symbol = dlsym(library, names[1]); /* the same function, with its mangled C++ name */
    rr_xla_get_api *get_api;
    memcpy(&get_api, &symbol, sizeof symbol);
    return get_api;
}

static int register_all(const char *path, int futures_at, char *why)
{
    /* Never closed: handlers live as long as the process. */
    void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) {
        snprintf(why, RR_WHY_BYTES, "%s is not loaded", path);
        return -ENOENT;
    }
    rr_xla_get_api *get_api = find_api(library);
    if (get_api == NULL) {
        snprintf(why, RR_WHY_BYTES, "this TensorFlow has no XLA_FFI_GetApi");
        return -ENOSYS;
    }
    int code = read_table(get_api(), futures_at, why);
    if (code == RR_DONE)
        code = try_futures(why);
    if (code == RR_DONE)
        code = register_call("ringreduce_start", handle_start, why);
    return code == RR_DONE ? register_call("ringreduce_wait", handle_wait, why) : code;
}

int rr_xla_register(const char *path, int futures_at, char *why)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static bool is_done;
    why[0] = '\0';
    pthread_mutex_lock(&lock);
    const int code = is_done ? RR_DONE : register_all(path, futures_at, why);
    is_done = code == RR_DONE;
    pthread_mutex_unlock(&lock);
    return code;
}
