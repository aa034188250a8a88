// SPDX-License-Identifier: Apache-2.0
/// Kernels of one instruction set. Private to the dtype module. All sets are compiled from
/// convert_kernels.h with other compiler flags, so that results are identical.
#ifndef FSTI_CONVERT_H
#define FSTI_CONVERT_H

#include "dtype_info.h"

/// Elements per block: intermediate values stay in the L1 cache.
#define CONVERT_BLOCK 512u

/// Conversions of `count` elements (a multiple of the unit): a float dtype to 32-bit floats, and
/// back, rounding to nearest even; an integer dtype to 64 bits and back. Pointers need no
/// alignment.
typedef struct convert_kernels {
    const char *name;
    void (*to_float)(fst_dtype from, const void *source, float *target, size_t count);
    void (*from_float)(fst_dtype to, const float *source, void *target, size_t count);
    void (*to_integer)(fst_dtype from, const void *source, int64_t *target, size_t count);
    void (*from_integer)(fst_dtype to, const int64_t *source, void *target, size_t count);
} convert_kernels;

extern const convert_kernels fsti_convert_scalar;
#if defined(__x86_64__)
extern const convert_kernels fsti_convert_avx2, fsti_convert_avx512;
#elif defined(__aarch64__)
extern const convert_kernels fsti_convert_neon;
#endif

#endif
