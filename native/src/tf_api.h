/* The part of TensorFlow's C API that tf_ops.c uses, declared here.
 *
 * TensorFlow's own headers contain C++, and are missing when this is built. The ABI is stable
 * within TensorFlow 2 (tensorflow/c/kernels.h, ops.h); symbols are looked up when the ops are
 * registered. tests/tensorflow/test_tf_api.py compiles these declarations against the installed
 * headers.
 */
#ifndef RR_TF_API_H
#define RR_TF_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef RR_TF_API_OF_TENSORFLOW /* else its headers have been included before this */

typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;

typedef enum { TF_OK = 0, TF_UNKNOWN = 2, TF_INVALID_ARGUMENT = 3 } TF_Code;
typedef enum {
    TF_FLOAT = 1,
    TF_DOUBLE = 2,
    TF_INT32 = 3,
    TF_BFLOAT16 = 14,
    TF_HALF = 19
} TF_DataType;

#endif

/* X(result, name, parameters) */
#define RR_TF_FUNCTIONS(X)                                                                      \
    X(TF_Status *, TF_NewStatus, (void))                                                        \
    X(void, TF_DeleteStatus, (TF_Status *))                                                     \
    X(void, TF_SetStatus, (TF_Status *, TF_Code, const char *))                                 \
    X(TF_Code, TF_GetCode, (const TF_Status *))                                                 \
    X(const char *, TF_Message, (const TF_Status *))                                            \
    X(void, TF_DeleteTensor, (TF_Tensor *))                                                     \
    X(size_t, TF_DataTypeSize, (TF_DataType))                                                   \
    X(TF_Tensor *, TF_NewTensor,                                                                \
      (TF_DataType, const int64_t *, int, void *, size_t, void (*)(void *, size_t, void *),     \
       void *))                                                                                 \
    X(size_t, TF_TensorByteSize, (const TF_Tensor *))                                           \
    X(void *, TF_TensorData, (const TF_Tensor *))                                               \
    X(TF_OpDefinitionBuilder *, TF_NewOpDefinitionBuilder, (const char *))                      \
    X(void, TF_OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder *, const char *))            \
    X(void, TF_OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder *, const char *))           \
    X(void, TF_OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder *, const char *))          \
    X(void, TF_OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder *, bool))              \
    X(void, TF_OpDefinitionBuilderSetShapeInferenceFunction,                                    \
      (TF_OpDefinitionBuilder *, void (*)(TF_ShapeInferenceContext *, TF_Status *)))            \
    X(void, TF_ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext *, TF_Status *)) \
    X(void, TF_RegisterOpDefinition, (TF_OpDefinitionBuilder *, TF_Status *))                   \
    X(TF_KernelBuilder *, TF_NewKernelBuilder,                                                  \
      (const char *, const char *, void *(*)(TF_OpKernelConstruction *),                        \
       void (*)(void *, TF_OpKernelContext *), void (*)(void *)))                               \
    X(void, TF_RegisterKernelBuilder, (const char *, TF_KernelBuilder *, TF_Status *))          \
    X(void, TF_OpKernelConstruction_GetAttrInt64,                                               \
      (TF_OpKernelConstruction *, const char *, int64_t *, TF_Status *))                        \
    X(void, TF_OpKernelConstruction_GetAttrSize,                                                \
      (TF_OpKernelConstruction *, const char *, int32_t *, int32_t *, TF_Status *))             \
    X(void, TF_OpKernelConstruction_GetAttrInt64List,                                           \
      (TF_OpKernelConstruction *, const char *, int64_t *, int, TF_Status *))                   \
    X(void, TF_OpKernelConstruction_Failure, (TF_OpKernelConstruction *, TF_Status *))          \
    X(void, TF_OpKernelContext_Failure, (TF_OpKernelContext *, TF_Status *))                    \
    X(void, TF_GetInput, (TF_OpKernelContext *, int, TF_Tensor **, TF_Status *))                \
    X(TF_Tensor *, TF_AllocateOutput,                                                           \
      (TF_OpKernelContext *, int, TF_DataType, const int64_t *, int, size_t, TF_Status *))      \
    X(TF_DataType, TF_ExpectedOutputDataType, (TF_OpKernelContext *, int))                      \
    X(void, TF_SetOutput, (TF_OpKernelContext *, int, const TF_Tensor *, TF_Status *))

#endif
