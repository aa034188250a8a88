// SPDX-License-Identifier: Apache-2.0
/// libzstd, found at run time: private to the codec room. Interface: zstd.h of 1.4 and later.
#ifndef FSTI_ZSTD_LIBRARY_H
#define FSTI_ZSTD_LIBRARY_H

#include "codec.h"

/// Functions of the library, by its names: (result, name, parameters).
#define ZSTD_FUNCTIONS(X)                                                                          \
    X(void *, ZSTD_createCCtx, (void))                                                             \
    X(size_t, ZSTD_freeCCtx, (void *context))                                                      \
    X(size_t, ZSTD_CCtx_setParameter, (void *context, int parameter, int value))                   \
    X(size_t, ZSTD_compress2,                                                                      \
      (void *context, void *target, size_t capacity, const void *source, size_t size))             \
    X(void *, ZSTD_createDCtx, (void))                                                             \
    X(size_t, ZSTD_freeDCtx, (void *context))                                                      \
    X(size_t, ZSTD_decompressDCtx,                                                                 \
      (void *context, void *target, size_t capacity, const void *source, size_t size))             \
    X(size_t, ZSTD_findFrameCompressedSize, (const void *source, size_t size))                     \
    X(unsigned, ZSTD_isError, (size_t code))

typedef struct zstd_library {
#define ZSTD_FIELD(result, name, parameters) result(*name) parameters;
    ZSTD_FUNCTIONS(ZSTD_FIELD)
#undef ZSTD_FIELD
} zstd_library;

/// The library, which stays open. FST_E_UNSUPPORTED that says what to install where it is not
/// there.
fst_status fsti_zstd_open(const zstd_library **out, fst_error *error);

#endif
