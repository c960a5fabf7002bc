/* The part of XLA's foreign function interface that xla_calls.c uses, declared here.
 *
 * It is a versioned C ABI (xla/ffi/api/c_api.h) for libraries that do not link XLA. Its headers
 * come with TensorFlow. tests/tensorflow/test_tf_api.py compares every structure and value with the
 * installed headers. Unused fields are declared only for the layout.
 *
 * Declared as in 0.4. Before, some things had other names; XLA_FFI_Error_GetDetails_Args had no
 * errc, which XLA then leaves alone, and XLA_FFI_Handler_Bundle no record: it finds NULL for the
 * traits that came there, none. In 0.1 XLA_FFI_Metadata had no state_type_id, and the table of
 * TensorFlow 2.18 no XLA_FFI_ThreadPool_NumThreads.
 */
#ifndef RR_XLA_API_H
#define RR_XLA_API_H

#include <stddef.h>
#include <stdint.h>

enum { RR_XLA_MAJOR = 0, RR_XLA_MINOR = 4 }; /* the newest that is known */

typedef enum { XLA_FFI_Extension_Metadata = 1 } XLA_FFI_InternalExtension_Type;

typedef enum { XLA_FFI_Error_Code_UNKNOWN = 2 } XLA_FFI_Error_Code;

typedef enum {
    XLA_FFI_DataType_PRED = 1,
    XLA_FFI_DataType_S8 = 2,
    XLA_FFI_DataType_S16 = 3,
    XLA_FFI_DataType_S32 = 4,
    XLA_FFI_DataType_S64 = 5,
    XLA_FFI_DataType_U8 = 6,
    XLA_FFI_DataType_U16 = 7,
    XLA_FFI_DataType_U32 = 8,
    XLA_FFI_DataType_U64 = 9,
    XLA_FFI_DataType_F16 = 10,
    XLA_FFI_DataType_F32 = 11,
    XLA_FFI_DataType_F64 = 12,
    XLA_FFI_DataType_BF16 = 16
} XLA_FFI_DataType;

typedef enum { XLA_FFI_AttrType_SCALAR = 3 } XLA_FFI_AttrType;

typedef enum { XLA_FFI_ExecutionStage_EXECUTE = 3 } XLA_FFI_ExecutionStage;

typedef struct XLA_FFI_Error XLA_FFI_Error;
typedef struct XLA_FFI_Future XLA_FFI_Future;
typedef struct XLA_FFI_Api XLA_FFI_Api;

typedef struct XLA_FFI_InternalExtension {
    size_t struct_size;
    XLA_FFI_InternalExtension_Type type;
    struct XLA_FFI_InternalExtension *next;
} XLA_FFI_InternalExtension;

typedef struct XLA_FFI_Api_Version {
    size_t struct_size;
    XLA_FFI_InternalExtension *extension_start;
    int major_version;
    int minor_version;
} XLA_FFI_Api_Version;

typedef struct XLA_FFI_ByteSpan {
    const char *ptr;
    size_t len;
} XLA_FFI_ByteSpan;

typedef struct XLA_FFI_Buffer {
    size_t struct_size;
    XLA_FFI_InternalExtension *extension_start;
    XLA_FFI_DataType dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
} XLA_FFI_Buffer;

typedef struct XLA_FFI_Scalar {
    XLA_FFI_DataType dtype;
    void *value;
} XLA_FFI_Scalar;

typedef struct XLA_FFI_Args {
    size_t struct_size;
    XLA_FFI_InternalExtension *extension_start;
    int64_t size;
    void *types;
    void **args;
} XLA_FFI_Args;

typedef struct XLA_FFI_Rets {
    size_t struct_size;
    XLA_FFI_InternalExtension *extension_start;
    int64_t size;
    void *types;
    void **rets;
} XLA_FFI_Rets;

typedef struct XLA_FFI_Attrs {
    size_t struct_size;
    XLA_FFI_InternalExtension *extension_start;
    int64_t size;
    XLA_FFI_AttrType *types;
    XLA_FFI_ByteSpan **names;
    void **attrs;
} XLA_FFI_Attrs;

typedef struct XLA_FFI_CallFrame {
    size_t struct_size;
    XLA_FFI_InternalExtension *extension_start;
    const XLA_FFI_Api *api;
    void *ctx;
    XLA_FFI_ExecutionStage stage;
    XLA_FFI_Args args;
    XLA_FFI_Rets rets;
    XLA_FFI_Attrs attrs;
    XLA_FFI_Future *future;
} XLA_FFI_CallFrame;

typedef struct XLA_FFI_Metadata {
    size_t struct_size;
    XLA_FFI_Api_Version api_version;
    uint32_t traits;
    int64_t state_type_id;
} XLA_FFI_Metadata;

typedef struct XLA_FFI_Metadata_Extension {
    XLA_FFI_InternalExtension extension_base;
    XLA_FFI_Metadata *metadata;
} XLA_FFI_Metadata_Extension;

typedef struct XLA_FFI_Error_Create_Args {
    size_t struct_size;
    XLA_FFI_InternalExtension *extension_start;
    const char *message;
    XLA_FFI_Error_Code errc;
} XLA_FFI_Error_Create_Args;

typedef struct XLA_FFI_Error_GetDetails_Args {
    size_t struct_size;
    XLA_FFI_InternalExtension *extension_start;
    XLA_FFI_Error *error;
    const char *message;
    XLA_FFI_Error_Code errc;
} XLA_FFI_Error_GetDetails_Args;

typedef struct XLA_FFI_Error_Destroy_Args {
    size_t struct_size;
    XLA_FFI_InternalExtension *extension_start;
    XLA_FFI_Error *error;
} XLA_FFI_Error_Destroy_Args;

typedef XLA_FFI_Error *XLA_FFI_Handler(XLA_FFI_CallFrame *frame);

typedef struct XLA_FFI_Handler_Bundle {
    XLA_FFI_Handler *instantiate;
    XLA_FFI_Handler *prepare;
    XLA_FFI_Handler *initialize;
    XLA_FFI_Handler *execute;
    XLA_FFI_Handler *record;
} XLA_FFI_Handler_Bundle;

typedef struct XLA_FFI_Handler_Register_Args {
    size_t struct_size;
    XLA_FFI_InternalExtension *extension_start;
    XLA_FFI_ByteSpan name;
    XLA_FFI_ByteSpan platform;
    XLA_FFI_Handler_Bundle bundle;
    uint32_t traits;
} XLA_FFI_Handler_Register_Args;

typedef struct XLA_FFI_Future_Create_Args {
    size_t struct_size;
    XLA_FFI_InternalExtension *extension_start;
    XLA_FFI_Future *future;
} XLA_FFI_Future_Create_Args;

typedef struct XLA_FFI_Future_SetAvailable_Args {
    size_t struct_size;
    XLA_FFI_InternalExtension *extension_start;
    XLA_FFI_Future *future;
} XLA_FFI_Future_SetAvailable_Args;

typedef struct XLA_FFI_Future_SetError_Args {
    size_t struct_size;
    XLA_FFI_InternalExtension *extension_start;
    XLA_FFI_Future *future;
    XLA_FFI_Error *error;
} XLA_FFI_Future_SetError_Args;

typedef void rr_xla_not_used(void);

struct XLA_FFI_Api {
    size_t struct_size;
    XLA_FFI_InternalExtension *extension_start;
    XLA_FFI_Api_Version api_version;
    const void *internal_api;
    XLA_FFI_Error *(*XLA_FFI_Error_Create)(XLA_FFI_Error_Create_Args *);
    void (*XLA_FFI_Error_GetDetails)(XLA_FFI_Error_GetDetails_Args *);
    void (*XLA_FFI_Error_Destroy)(XLA_FFI_Error_Destroy_Args *);
    XLA_FFI_Error *(*XLA_FFI_Handler_Register)(XLA_FFI_Handler_Register_Args *);
    rr_xla_not_used *XLA_FFI_Stream_Get;
    rr_xla_not_used *XLA_FFI_Type_Register;
    rr_xla_not_used *XLA_FFI_InvokeContext_Get;
    rr_xla_not_used *XLA_FFI_State_Set;
    rr_xla_not_used *XLA_FFI_State_Get;
    rr_xla_not_used *XLA_FFI_DeviceMemory_Allocate;
    rr_xla_not_used *XLA_FFI_DeviceMemory_Free;
    rr_xla_not_used *XLA_FFI_ThreadPool_Schedule;
    rr_xla_not_used *XLA_FFI_ThreadPool_NumThreads;
    XLA_FFI_Error *(*XLA_FFI_Future_Create)(XLA_FFI_Future_Create_Args *);
    XLA_FFI_Error *(*XLA_FFI_Future_SetAvailable)(XLA_FFI_Future_SetAvailable_Args *);
    XLA_FFI_Error *(*XLA_FFI_Future_SetError)(XLA_FFI_Future_SetError_Args *);
    /* TensorFlow may have more behind these. */
};

/* Exported by libtensorflow_framework or libtensorflow_cc: the interface of the XLA in there. */
typedef const XLA_FFI_Api *rr_xla_get_api(void);

#endif
