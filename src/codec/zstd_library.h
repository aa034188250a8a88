// SPDX-License-Identifier: Apache-2.0
/// libzstd, loaded at run time. Private to the codec module. Interface: zstd.h of 1.4 and later.
#ifndef FSTI_ZSTD_LIBRARY_H
#define FSTI_ZSTD_LIBRARY_H

#include "codec.h"

/// ZSTD_inBuffer and ZSTD_outBuffer of zstd.h.
typedef struct zstd_input {
    const void *bytes;
    size_t size, position;
} zstd_input;
typedef struct zstd_output {
    void *bytes;
    size_t size, position;
} zstd_output;

/// Functions of the library: (result, name, parameters).
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
    X(unsigned long long, ZSTD_getFrameContentSize, (const void *source, size_t size))             \
    X(size_t, ZSTD_DCtx_setParameter, (void *context, int parameter, int value))                   \
    X(size_t, ZSTD_DCtx_reset, (void *context, int directive))                                     \
    X(size_t, ZSTD_decompressStream, (void *context, zstd_output *output, zstd_input *input))      \
    X(size_t, ZSTD_CCtx_reset, (void *context, int directive))                                     \
    X(size_t, ZSTD_CCtx_setPledgedSrcSize, (void *context, unsigned long long size))               \
    X(size_t, ZSTD_compressStream2,                                                                \
      (void *context, zstd_output *output, zstd_input *input, int directive))                      \
    X(unsigned, ZSTD_isError, (size_t code))

typedef struct zstd_library {
#define ZSTD_FIELD(result, name, parameters) result(*name) parameters;
    ZSTD_FUNCTIONS(ZSTD_FIELD)
#undef ZSTD_FIELD
} zstd_library;

/// Opens the library, for ever. FST_E_UNSUPPORTED says what to install if it is missing.
fst_status fsti_zstd_open(const zstd_library **out, fst_error *error);

#endif
