/* TensorFlow ops that pass gradients to the engine and return the means.
 *
 *   RingreduceStart(gradients: N * T; plan, bucket) -> token     packs a bucket, returns at once
 *   RingreduceWait(tokens: M * int32; plan, bucket, shapes) -> means: N * T
 *
 * A wait takes the tokens of all starts of the step, so it cannot block a TensorFlow thread that a
 * start still needs. Its larger results are lent: tensors in the bucket's own memory, of which
 * TensorFlow makes no copy, and into which it does not write, even for a variable to which such a
 * tensor is assigned. Both are ordinary blocking kernels: the `done` of TensorFlow's asynchronous
 * kernels becomes invalid when the compute function returns (seen with 2.21).
 *
 * Both are stateful: never pruned, merged or folded, and run in program order.
 */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "tf_api.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ringreduce.h"

/* A smaller result is copied sooner than it is lent. */
enum { LENT_BYTES_MIN = 1 << 12 };

#define DECLARE(result, name, parameters) result(*name) parameters;
static struct {
    RR_TF_FUNCTIONS(DECLARE)
} tf;
#undef DECLARE

struct kernel {
    int64_t plan, bucket, gradients;
    int64_t *shapes; /* of a wait's results: for each the number of dimensions, and those */
};

static void get_shapes(TF_OpKernelConstruction *construction, struct kernel *kernel,
                       TF_Status *status)
{
    int32_t count, total;
    tf.TF_OpKernelConstruction_GetAttrSize(construction, "shapes", &count, &total, status);
    if (tf.TF_GetCode(status) != TF_OK)
        return;
    kernel->shapes = calloc((size_t)count + 1, sizeof *kernel->shapes);
    if (kernel->shapes == NULL)
        tf.TF_SetStatus(status, TF_UNKNOWN, "out of memory");
    else
        tf.TF_OpKernelConstruction_GetAttrInt64List(construction, "shapes", kernel->shapes, count,
                                                    status);
}

static void *create(TF_OpKernelConstruction *construction, bool is_wait)
{
    TF_Status *status = tf.TF_NewStatus();
    struct kernel *kernel = calloc(1, sizeof *kernel);
    if (kernel == NULL) {
        tf.TF_SetStatus(status, TF_UNKNOWN, "out of memory");
    } else {
        tf.TF_OpKernelConstruction_GetAttrInt64(construction, "plan", &kernel->plan, status);
        if (tf.TF_GetCode(status) == TF_OK)
            tf.TF_OpKernelConstruction_GetAttrInt64(construction, "bucket", &kernel->bucket,
                                                    status);
        if (tf.TF_GetCode(status) == TF_OK)
            tf.TF_OpKernelConstruction_GetAttrInt64(construction, "N", &kernel->gradients, status);
        if (is_wait && tf.TF_GetCode(status) == TF_OK)
            get_shapes(construction, kernel, status);
    }
    if (tf.TF_GetCode(status) != TF_OK)
        tf.TF_OpKernelConstruction_Failure(construction, status);
    tf.TF_DeleteStatus(status);
    return kernel;
}

static void *create_start(TF_OpKernelConstruction *construction)
{
    return create(construction, false);
}

static void *create_wait(TF_OpKernelConstruction *construction)
{
    return create(construction, true);
}

static void destroy(void *made)
{
    struct kernel *kernel = made;
    if (kernel != NULL)
        free(kernel->shapes);
    free(kernel);
}

/* The gradients of one kernel's call, and the tensors that keep their memory. */
struct parts {
    int64_t count;
    rr_part *parts;
    TF_Tensor **tensors;
};

static int parts_new(struct parts *parts, int64_t count)
{
    const size_t room = (size_t)count;
    *parts =
        (struct parts){count, calloc(room, sizeof(rr_part)), calloc(room, sizeof(TF_Tensor *))};
    return parts->parts != NULL && parts->tensors != NULL;
}

static void parts_free(struct parts *parts)
{
    if (parts->tensors != NULL)
        for (int64_t i = 0; i < parts->count; i++)
            if (parts->tensors[i] != NULL)
                tf.TF_DeleteTensor(parts->tensors[i]);
    free(parts->tensors);
    free(parts->parts);
}

static void hold(struct parts *parts, int64_t index, TF_Tensor *tensor)
{
    parts->tensors[index] = tensor;
    parts->parts[index] = (rr_part){tf.TF_TensorData(tensor), tf.TF_TensorByteSize(tensor)};
}

static void start(const struct kernel *kernel, TF_OpKernelContext *context, TF_Status *status)
{
    struct parts parts;
    if (!parts_new(&parts, kernel->gradients)) {
        tf.TF_SetStatus(status, TF_UNKNOWN, "out of memory");
    } else {
        for (int64_t i = 0; i < kernel->gradients; i++) {
            TF_Tensor *tensor;
            tf.TF_GetInput(context, (int)i, &tensor, status);
            if (tf.TF_GetCode(status) != TF_OK)
                break;
            hold(&parts, i, tensor);
        }
    }
    char why[RR_WHY_BYTES] = "";
    if (tf.TF_GetCode(status) == TF_OK &&
        rr_handoff_start(kernel->plan, (uint32_t)kernel->bucket, parts.parts,
                         (uint32_t)kernel->gradients, why) != RR_DONE)
        tf.TF_SetStatus(status, TF_UNKNOWN, why);
    parts_free(&parts);
    if (tf.TF_GetCode(status) != TF_OK)
        return;
    TF_Tensor *token = tf.TF_AllocateOutput(context, 0, TF_INT32, NULL, 0, sizeof(int32_t), status);
    if (tf.TF_GetCode(status) == TF_OK) {
        *(int32_t *)tf.TF_TensorData(token) = (int32_t)kernel->bucket;
        tf.TF_DeleteTensor(token);
    }
}

static void give_back(void *memory, size_t nbytes, void *area)
{
    (void)memory, (void)nbytes;
    rr_area_give_back(area);
}

/* Where each result goes: memory of TensorFlow's, or none if it is to be lent. */
static void place(const struct kernel *kernel, TF_OpKernelContext *context, struct parts *parts,
                  TF_Status *status)
{
    const int64_t *shape = kernel->shapes;
    for (int64_t i = 0; i < kernel->gradients && tf.TF_GetCode(status) == TF_OK; i++) {
        const TF_DataType type = tf.TF_ExpectedOutputDataType(context, (int)i);
        size_t nbytes = tf.TF_DataTypeSize(type);
        const int rank = (int)*shape++;
        for (int j = 0; j < rank; j++)
            nbytes *= (size_t)shape[j];
        parts->parts[i].nbytes = nbytes;
        if (nbytes < LENT_BYTES_MIN) {
            TF_Tensor *output =
                tf.TF_AllocateOutput(context, (int)i, type, shape, rank, nbytes, status);
            if (tf.TF_GetCode(status) == TF_OK)
                hold(parts, i, output);
        }
        shape += rank;
    }
}

/* Pass results on that were lent, or give them back. */
static void pass_on(const struct kernel *kernel, TF_OpKernelContext *context,
                    const struct parts *parts, rr_area *lender, TF_Status *status)
{
    const int64_t *shape = kernel->shapes;
    for (int64_t i = 0; i < kernel->gradients; shape += *shape + 1, i++) {
        const rr_part *part = &parts->parts[i];
        if (parts->tensors[i] != NULL || part->data == NULL)
            continue;
        if (tf.TF_GetCode(status) != TF_OK) {
            rr_area_give_back(lender);
            continue;
        }
        const TF_DataType type = tf.TF_ExpectedOutputDataType(context, (int)i);
        TF_Tensor *tensor = tf.TF_NewTensor(type, shape + 1, (int)*shape, part->data, part->nbytes,
                                            give_back, lender);
        if (tensor == NULL) {
            tf.TF_SetStatus(status, TF_UNKNOWN, "TensorFlow refuses the shape of a result");
            continue;
        }
        tf.TF_SetOutput(context, (int)i, tensor, status);
        tf.TF_DeleteTensor(tensor);
    }
}

static void wait(const struct kernel *kernel, TF_OpKernelContext *context, TF_Status *status)
{
    struct parts parts;
    rr_area *lender = NULL;
    char why[RR_WHY_BYTES] = "";
    if (!parts_new(&parts, kernel->gradients))
        tf.TF_SetStatus(status, TF_UNKNOWN, "out of memory");
    else
        place(kernel, context, &parts, status);
    if (tf.TF_GetCode(status) == TF_OK) {
        if (rr_handoff_wait(kernel->plan, (uint32_t)kernel->bucket, parts.parts,
                            (uint32_t)kernel->gradients, &lender, why) != RR_DONE)
            tf.TF_SetStatus(status, TF_UNKNOWN, why);
        pass_on(kernel, context, &parts, lender, status);
    }
    parts_free(&parts);
}

static void compute(void (*work)(const struct kernel *, TF_OpKernelContext *, TF_Status *),
                    void *kernel, TF_OpKernelContext *context)
{
    TF_Status *status = tf.TF_NewStatus();
    work(kernel, context, status);
    if (tf.TF_GetCode(status) != TF_OK)
        tf.TF_OpKernelContext_Failure(context, status);
    tf.TF_DeleteStatus(status);
}

static void compute_start(void *kernel, TF_OpKernelContext *context)
{
    compute(start, kernel, context);
}

static void compute_wait(void *kernel, TF_OpKernelContext *context)
{
    compute(wait, kernel, context);
}

/* The caller knows the shapes; a shape function cannot find out through the C API how many outputs
 * a list has. */
static void infer_nothing(TF_ShapeInferenceContext *context, TF_Status *status)
{
    tf.TF_ShapeInferenceContextSetUnknownShape(context, status);
}

static int resolve(void *library, char *why)
{
    const char *missing = NULL;
    /* C cannot cast an object pointer to a function pointer, so memcpy does. */
#define RESOLVE(result, name, parameters)         \
    {                                             \
        void *symbol = dlsym(library, #name);     \
        memcpy(&tf.name, &symbol, sizeof symbol); \
        if (symbol == NULL && missing == NULL)    \
            missing = #name;                      \
    }
    RR_TF_FUNCTIONS(RESOLVE)
#undef RESOLVE
    if (missing == NULL)
        return RR_DONE;
    snprintf(why, RR_WHY_BYTES, "this TensorFlow has no %s", missing);
    return -ENOSYS;
}

static void define(const char *name, const char *const *attributes, const char *const *inputs,
                   const char *output, TF_Status *status)
{
    TF_OpDefinitionBuilder *builder = tf.TF_NewOpDefinitionBuilder(name);
    for (; *attributes != NULL; attributes++)
        tf.TF_OpDefinitionBuilderAddAttr(builder, *attributes);
    for (; *inputs != NULL; inputs++)
        tf.TF_OpDefinitionBuilderAddInput(builder, *inputs);
    tf.TF_OpDefinitionBuilderAddOutput(builder, output);
    tf.TF_OpDefinitionBuilderSetIsStateful(builder, true);
    tf.TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, infer_nothing);
    tf.TF_RegisterOpDefinition(builder, status);
}

static void define_all(TF_Status *status)
{
    static const char *const start_attributes[] = {"T: {half, bfloat16, float, double}",
                                                   "N: int >= 1", "plan: int", "bucket: int", NULL};
    static const char *const start_inputs[] = {"gradients: N * T", NULL};
    static const char *const wait_attributes[] = {"T: {half, bfloat16, float, double}",
                                                  "N: int >= 1",
                                                  "M: int >= 1",
                                                  "plan: int",
                                                  "bucket: int",
                                                  "shapes: list(int)",
                                                  NULL};
    static const char *const wait_inputs[] = {"tokens: M * int32", NULL};
    define("RingreduceStart", start_attributes, start_inputs, "token: int32", status);
    if (tf.TF_GetCode(status) == TF_OK)
        define("RingreduceWait", wait_attributes, wait_inputs, "means: N * T", status);
    if (tf.TF_GetCode(status) == TF_OK)
        tf.TF_RegisterKernelBuilder(
            "RingreduceStart",
            tf.TF_NewKernelBuilder("RingreduceStart", "CPU", create_start, compute_start, destroy),
            status);
    if (tf.TF_GetCode(status) == TF_OK)
        tf.TF_RegisterKernelBuilder(
            "RingreduceWait",
            tf.TF_NewKernelBuilder("RingreduceWait", "CPU", create_wait, compute_wait, destroy),
            status);
}

static int register_all(const char *path, char *why)
{
    void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) {
        snprintf(why, RR_WHY_BYTES, "%s is not loaded", path);
        return -ENOENT;
    }
    /* Never closed: kernels live as long as the process. */
    int code = resolve(library, why);
    if (code != RR_DONE)
        return code;
    TF_Status *status = tf.TF_NewStatus();
    define_all(status);
    if (tf.TF_GetCode(status) != TF_OK) {
        snprintf(why, RR_WHY_BYTES, "%s", tf.TF_Message(status));
        code = -EINVAL;
    }
    tf.TF_DeleteStatus(status);
    return code;
}

int rr_tensorflow_register(const char *path, char *why)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static int is_done;
    why[0] = '\0';
    pthread_mutex_lock(&lock);
    const int code = is_done ? RR_DONE : register_all(path, why);
    is_done = is_done || code == RR_DONE;
    pthread_mutex_unlock(&lock);
    return code;
}
