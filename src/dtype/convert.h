// SPDX-License-Identifier: Apache-2.0
/// Kernels of one instruction set: private to the dtype room. Every set is made from the same
/// source, convert_kernels.h, by another compiler setting, so that all give the same bits.
#ifndef FSTI_CONVERT_H
#define FSTI_CONVERT_H

#include "dtype.h"

/// Elements that are worked on at a time: the intermediate stays in the first-level cache.
#define CONVERT_BLOCK 512u

/// `count` elements (a multiple of the unit) of a float dtype to 32-bit floats, and back with
/// round to nearest even; 64-bit integers likewise. Sources and targets need no alignment.
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
