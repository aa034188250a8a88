// SPDX-License-Identifier: Apache-2.0
/// The 22 element types of the safetensors format.
#ifndef FASTSAFETENSORS_DTYPE_H
#define FASTSAFETENSORS_DTYPE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/// X(name in the file, bits per element), in the order in which the reference writer sorts
/// (smallest alignment first). F4 and F6 shapes count elements, not bytes.
#define FST_DTYPE_MAP(X)                                                                           \
    X(BOOL, 8)                                                                                     \
    X(F4, 4)                                                                                       \
    X(F6_E2M3, 6)                                                                                  \
    X(F6_E3M2, 6)                                                                                  \
    X(U8, 8)                                                                                       \
    X(I8, 8)                                                                                       \
    X(F8_E5M2, 8)                                                                                  \
    X(F8_E4M3, 8)                                                                                  \
    X(F8_E8M0, 8)                                                                                  \
    X(F8_E4M3FNUZ, 8)                                                                              \
    X(F8_E5M2FNUZ, 8)                                                                              \
    X(I16, 16)                                                                                     \
    X(U16, 16)                                                                                     \
    X(F16, 16)                                                                                     \
    X(BF16, 16)                                                                                    \
    X(I32, 32)                                                                                     \
    X(U32, 32)                                                                                     \
    X(F32, 32)                                                                                     \
    X(C64, 64)                                                                                     \
    X(F64, 64)                                                                                     \
    X(I64, 64)                                                                                     \
    X(U64, 64)

typedef enum fst_dtype {
#define FST_DTYPE_ENUM(name, bits) FST_DTYPE_##name,
    FST_DTYPE_MAP(FST_DTYPE_ENUM)
#undef FST_DTYPE_ENUM
        FST_DTYPE_COUNT
} fst_dtype;

/// The format's name of a dtype ("BF16"). NULL for a number that is no dtype.
FST_API const char *fst_dtype_name(fst_dtype dtype);

/// Bits of one element (4, 6, 8, 16, 32 or 64); 0 for a number that is no dtype.
FST_API uint32_t fst_dtype_bits(fst_dtype dtype);

/// The alignment in bytes that an element wants in memory (1, 2, 4 or 8; C64 wants 4);
/// 0 for a number that is no dtype.
FST_API uint32_t fst_dtype_alignment(fst_dtype dtype);

#ifdef __cplusplus
}
#endif

#endif
