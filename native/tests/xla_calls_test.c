/* The custom calls, called as XLA calls them, by `fake_xla`. */

#include "ringreduce.h"

#include "check.h"
#include "fake_xla.h"
#include "handoff.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <string.h>

enum { FLOATS = 6, ROUNDS = 200 };

static char why[RR_WHY_BYTES];
static float memory[16];
static XLA_FFI_Handler *start_handler, *wait_handler;

/* A call with one float32 matrix of 2 x 3 in or out, and tokens. */
struct call {
    float values[FLOATS];
    int32_t tokens[2];
    int64_t dims[2];
    XLA_FFI_Buffer matrix, token[2];
    int64_t plan, bucket, in_place;
    XLA_FFI_Scalar scalars[3];
    XLA_FFI_ByteSpan names[3];
    XLA_FFI_AttrType types[3];
    void *attrs[3];
    XLA_FFI_ByteSpan *name[3];
    void *buffers[2];
    void *given[1];
    XLA_FFI_CallFrame frame;
};

static void prepare(struct call *call, int64_t plan, bool is_start)
{
    memset(call, 0, sizeof *call);
    call->dims[0] = 2;
    call->dims[1] = 3;
    call->matrix = (XLA_FFI_Buffer){
        .dtype = XLA_FFI_DataType_F32, .data = call->values, .rank = 2, .dims = call->dims};
    for (int i = 0; i < 2; i++) {
        call->tokens[i] = -1;
        call->token[i] = (XLA_FFI_Buffer){.dtype = XLA_FFI_DataType_S32, .data = &call->tokens[i]};
    }
    call->plan = plan;
    call->scalars[0] = (XLA_FFI_Scalar){XLA_FFI_DataType_S64, &call->bucket};
    call->scalars[1] = (XLA_FFI_Scalar){XLA_FFI_DataType_S64, &call->plan};
    call->scalars[2] = (XLA_FFI_Scalar){XLA_FFI_DataType_S64, &call->in_place};
    call->names[0] = (XLA_FFI_ByteSpan){"bucket", 6};
    call->names[1] = (XLA_FFI_ByteSpan){"planet", 4};
    call->names[2] = (XLA_FFI_ByteSpan){"in_place", 8};
    for (int i = 0; i < 3; i++) {
        call->types[i] = XLA_FFI_AttrType_SCALAR;
        call->attrs[i] = &call->scalars[i];
        call->name[i] = &call->names[i];
    }
    call->buffers[0] = &call->matrix;
    call->buffers[1] = &call->token[0];
    call->given[0] = &call->token[1];
    call->frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
    call->frame.attrs.size = 3;
    call->frame.attrs.types = call->types;
    call->frame.attrs.names = call->name;
    call->frame.attrs.attrs = call->attrs;
    call->frame.args.size = is_start ? 2 : 1;
    call->frame.args.args = is_start ? call->buffers : call->given;
    call->frame.rets.size = is_start ? 1 : 2;
    call->frame.rets.rets = is_start ? call->given : call->buffers;
}

static int64_t registered(rr_handoff *handoff)
{
    static const rr_slot slot = {0, FLOATS * sizeof(float)};
    static rr_area *area;
    if (area == NULL)
        area = rr_area_new(memory, NULL, 0, 0);
    const rr_bucket bucket = {&area, sizeof memory, &slot, NULL, 1, 1, 0};
    int64_t plan = -1;
    CHECK(rr_handoff_register(handoff, &bucket, 1, &plan) == RR_DONE);
    return plan;
}

static void *engine(void *argument)
{
    rr_handoff *handoff = argument;
    rr_item item;
    while (rr_handoff_take(handoff, &item) == RR_DONE) {
        const char *text = memory[0] < 0 ? "not this time" : NULL;
        for (int i = 0; i < FLOATS; i++)
            memory[i] *= 2;
        rr_handoff_finish(handoff, text);
    }
    return NULL;
}

static void start(int64_t plan, float value)
{
    struct call call;
    prepare(&call, plan, true);
    for (int i = 0; i < FLOATS; i++)
        call.values[i] = value + (float)i;
    CHECK(start_handler(&call.frame) == NULL);
    CHECK(call.frame.future == NULL && call.tokens[1] == 0);
}

static XLA_FFI_Error *wait_for(struct call *call, int64_t plan)
{
    prepare(call, plan, false);
    CHECK(wait_handler(&call->frame) == NULL);
    return fake_future_result(call->frame.future);
}

static void test_rounds(void)
{
    rr_handoff *handoff = NULL;
    CHECK(rr_handoff_open(&handoff, NULL) == RR_DONE);
    const int64_t plan = registered(handoff);
    /* Before the bucket is reduced, a wait returns with its future pending. */
    struct call call;
    start(plan, 3);
    prepare(&call, plan, false);
    CHECK(wait_handler(&call.frame) == NULL);
    CHECK(fake_future_state(call.frame.future) == 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, engine, handoff) == 0);
    CHECK(fake_future_result(call.frame.future) == NULL);
    CHECK(call.values[0] == 6 && call.values[5] == 16 && call.tokens[0] == 0);
    fake_future_free(call.frame.future);
    for (int round = 0; round < ROUNDS; round++) {
        start(plan, (float)round);
        CHECK(wait_for(&call, plan) == NULL);
        CHECK(call.values[1] == 2 * ((float)round + 1));
        fake_future_free(call.frame.future);
    }
    start(plan, -1);
    XLA_FFI_Error *error = wait_for(&call, plan);
    CHECK(error->code == XLA_FFI_Error_Code_UNKNOWN);
    CHECK(strcmp(error->message, "not this time") == 0);
    fake_future_free(call.frame.future);
    rr_handoff_close(handoff, "closed");
    pthread_join(thread, NULL);
    error = wait_for(&call, plan);
    CHECK(error->code == XLA_FFI_Error_Code_UNKNOWN && strcmp(error->message, "closed") == 0);
    fake_future_free(call.frame.future);
    prepare(&call, plan, true);
    error = start_handler(&call.frame);
    CHECK(error->code == XLA_FFI_Error_Code_UNKNOWN && strcmp(error->message, "closed") == 0);
    free(error);
}

/* The ring breaks while XLA waits: the future gets the text. */
static void test_failure_completes_what_waits(void)
{
    rr_handoff *handoff = NULL;
    CHECK(rr_handoff_open(&handoff, NULL) == RR_DONE);
    const int64_t plan = registered(handoff);
    struct call call;
    start(plan, 1);
    prepare(&call, plan, false);
    CHECK(wait_handler(&call.frame) == NULL);
    rr_handoff_fail(handoff, "rank 1 died");
    XLA_FFI_Error *error = fake_future_result(call.frame.future);
    CHECK(error->code == XLA_FFI_Error_Code_UNKNOWN && strcmp(error->message, "rank 1 died") == 0);
    fake_future_free(call.frame.future);
    rr_handoff_close(handoff, "closed");
}

static void *wait_in_thread(void *frame)
{
    CHECK(wait_handler(frame) == NULL);
    return NULL;
}

/* The gradient passes through both calls, and the engine works on it in XLA's memory. */
static void test_in_place(void)
{
    rr_handoff *handoff = NULL;
    CHECK(rr_handoff_open(&handoff, NULL) == RR_DONE);
    static const rr_slot slot = {0, FLOATS * sizeof(float)};
    const rr_bucket bucket = {NULL, FLOATS * sizeof(float), &slot, NULL, 0, 1, 0};
    const rr_bucket longer = {NULL, FLOATS * sizeof(float) + 4, &slot, NULL, 0, 1, 0};
    int64_t plan = -1;
    CHECK(rr_handoff_register(handoff, &longer, 1, &plan) == -EINVAL);
    CHECK(rr_handoff_register(handoff, &bucket, 1, &plan) == RR_DONE);
    for (int round = 0; round < 4; round++) {
        struct call begin, end;
        float kept[FLOATS];
        prepare(&begin, plan, true);
        begin.in_place = 1;
        for (int i = 0; i < FLOATS; i++)
            begin.values[i] = (float)i;
        /* XLA has shared the buffer, or has not, which costs a copy. */
        XLA_FFI_Buffer own = begin.matrix;
        own.data = round == 0 ? kept : begin.values;
        void *results[] = {&own, &begin.token[1]};
        begin.frame.rets.size = 2;
        begin.frame.rets.rets = results;
        CHECK(start_handler(&begin.frame) == NULL);
        prepare(&end, plan, false);
        end.in_place = 1;
        end.matrix.data = own.data;
        void *operands[] = {&own, &end.token[1]};
        end.frame.args.size = 2;
        end.frame.args.args = operands;
        rr_item item;
        CHECK(rr_handoff_take(handoff, &item) == RR_DONE && item.memory == own.data);
        if (round < 2) {
            CHECK(wait_handler(&end.frame) == NULL);
            for (int i = 0; i < FLOATS; i++)
                ((float *)item.memory)[i] *= 2;
            rr_handoff_finish(handoff, NULL);
            CHECK(fake_future_result(end.frame.future) == NULL);
            CHECK(((float *)own.data)[5] == 10);
            fake_future_free(end.frame.future);
            continue;
        }
        /* The ring breaks, or XLA has moved it: reported only when the engine has released it. */
        if (round == 2)
            end.matrix.data = kept;
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, wait_in_thread, &end.frame) == 0);
        if (round == 3)
            rr_handoff_fail(handoff, "rank 1 died");
        for (int turn = 0; turn < 50; turn++) {
            ((volatile float *)item.memory)[0] += 1;
            sched_yield();
        }
        rr_handoff_finish(handoff, NULL);
        pthread_join(thread, NULL);
        XLA_FFI_Error *error = fake_future_result(end.frame.future);
        CHECK(strstr(error->message, round == 2 ? "moved" : "rank 1 died") != NULL);
        memset(own.data, 0, sizeof begin.values); /* XLA owns the memory again */
        fake_future_free(end.frame.future);
        /* As if it had been waited for. */
        rr_part part = {own.data, sizeof begin.values};
        CHECK(rr_handoff_wait(plan, 0, &part, 1, NULL, why) ==
              (round == 2 ? RR_DONE : RR_HANDOFF_FAILED));
    }
    /* A bucket that is started but not taken is released at once when the ring breaks. */
    rr_handoff_close(handoff, "closed");
    rr_handoff_let_go();
    CHECK(rr_handoff_open(&handoff, NULL) == RR_DONE);
    CHECK(rr_handoff_register(handoff, &bucket, 1, &plan) == RR_DONE);
    float own[FLOATS];
    rr_part part = {own, sizeof own};
    CHECK(rr_handoff_start(plan, 0, &part, 1, why) == RR_DONE);
    rr_handoff_fail(handoff, "rank 1 died");
    rr_handoff_let_go();
    rr_handoff_close(handoff, "closed");
}

static void test_what_does_not_fit_is_refused(void)
{
    rr_handoff *handoff = NULL;
    CHECK(rr_handoff_open(&handoff, NULL) == RR_DONE);
    const int64_t plan = registered(handoff);
    struct call call;
    for (int i = 0; i < 5; i++) {
        prepare(&call, plan, true);
        if (i == 0)
            call.frame.attrs.size = 2;
        else if (i == 1)
            call.scalars[1].dtype = XLA_FFI_DataType_S32;
        else if (i == 2)
            call.frame.args.size = 0;
        else if (i == 3)
            call.dims[0] = 3;
        else
            call.matrix.dtype = XLA_FFI_DataType_F16;
        XLA_FFI_Error *error = start_handler(&call.frame);
        CHECK(error != NULL && error->code == XLA_FFI_Error_Code_UNKNOWN);
        CHECK(strstr(error->message, i < 3 ? "attributes" : "another size") != NULL);
        free(error);
    }
    rr_handoff_close(handoff, "closed");
}

static void test_metadata_is_answered(void)
{
    XLA_FFI_Metadata metadata = {.api_version = {.major_version = -1, .minor_version = -1}};
    XLA_FFI_Metadata_Extension extension = {.extension_base = {.type = XLA_FFI_Extension_Metadata},
                                            .metadata = &metadata};
    XLA_FFI_CallFrame frame = {.extension_start = &extension.extension_base};
    CHECK(start_handler(&frame) == NULL && wait_handler(&frame) == NULL);
    CHECK(metadata.api_version.major_version == 0 && metadata.api_version.minor_version == 1);
}

int main(int count, char **arguments)
{
    CHECK(count == 2);
    CHECK(rr_xla_register("/no/such/library", 13, why) == -ENOENT && why[0] != '\0');
    static const struct {
        int major, minor;
        size_t size;
        int futures_at;
    } unknown[] = {{1, 2, 192, 13}, {0, 0, 192, 13}, {0, 3, 192, 13}, {0, 4, 192, 13},
                   {0, 2, 88, 13},  {0, 2, 200, 13}, {0, 2, 192, 12}};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        fake_table(unknown[i].major, unknown[i].minor, unknown[i].size, unknown[i].futures_at);
        CHECK(rr_xla_register(arguments[1], unknown[i].futures_at, why) == -ENOSYS);
    }
    CHECK(strstr(why, "0.2") != NULL && strstr(why, "192 bytes") != NULL);
    fake_table(0, 1, 88, 12); /* as in TensorFlow 2.18 */
    fake_refuse_futures("of another size");
    CHECK(rr_xla_register(arguments[1], 12, why) == -EINVAL && strcmp(why, "of another size") == 0);
    CHECK(fake_handler("ringreduce_start Host") == NULL);
    fake_refuse_futures(NULL);
    fake_refuse("no more names");
    CHECK(rr_xla_register(arguments[1], 12, why) == -EINVAL && strcmp(why, "no more names") == 0);
    fake_refuse(NULL);
    CHECK(rr_xla_register(arguments[1], 12, why) == RR_DONE);
    CHECK(rr_xla_register(arguments[1], 12, why) == RR_DONE);
    start_handler = fake_handler("ringreduce_start Host");
    wait_handler = fake_handler("ringreduce_wait Host");
    CHECK(start_handler != NULL && wait_handler != NULL);
    test_metadata_is_answered();
    test_rounds();
    for (int i = 0; i < 50; i++)
        test_failure_completes_what_waits();
    test_in_place();
    test_what_does_not_fit_is_refused();
    return 0;
}
