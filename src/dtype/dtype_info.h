// SPDX-License-Identifier: Apache-2.0
/// Interface of the dtype module: the table of element types.
///
/// Knows: the 22 dtypes and how values convert.
/// Does not know: tensors, files.
/// Main types: fst_dtype, fsti_conversion.
#ifndef FSTI_DTYPE_INFO_H
#define FSTI_DTYPE_INFO_H

#include "base/primitives.h"
#include "fastsafetensors/dtype.h"

const char *fsti_dtype_name(fst_dtype dtype);
uint32_t fsti_dtype_bits(fst_dtype dtype);
uint32_t fsti_dtype_alignment(fst_dtype dtype);

/// Marks a missing dtype. Never occurs in a table.
#define FSTI_DTYPE_NONE ((fst_dtype)0xff)

/// The dtype with that exact name, or FSTI_DTYPE_NONE.
fst_dtype fsti_dtype_find(const char *name, size_t size);

/// The dtype's position in the order of the reference writer: smallest alignment first.
uint32_t fsti_dtype_sort_rank(fst_dtype dtype);

/// All names, separated by spaces and truncated to `capacity`.
void fsti_dtype_list(char *text, size_t capacity);

/// Size of a packed tensor in bytes. Errors as for fsti_dtype_size().
fst_status fsti_dtype_tensor_bytes(fst_dtype dtype, const uint64_t *shape, uint32_t rank,
                                   uint64_t *size_bytes);

/// Size of `element_count` elements in bytes. FST_E_VALIDATION_OVERFLOW if it exceeds 64 bits,
/// FST_E_MISALIGNED_SLICE if it is not a whole number of bytes.
fst_status fsti_dtype_size(fst_dtype dtype, uint64_t element_count, uint64_t *size_bytes);

/// Whether `from` can be converted to `to`: floats to any float type (rounding to nearest even),
/// integers to wider ones that hold every value. Other dtypes are not converted.
bool fsti_dtype_convertible(fst_dtype from, fst_dtype to);

/// A conversion between two dtypes, in units of whole bytes on both sides.
typedef struct fsti_conversion {
    uint8_t from, to; ///< fst_dtype
    uint8_t unit_elements, from_bytes, to_bytes;
} fsti_conversion;

/// The conversion of a supported pair. For equal dtypes it copies bytes.
fsti_conversion fsti_dtype_conversion(fst_dtype from, fst_dtype to);

/// Converts `unit_count` units. Pointers need no alignment; target and source must not overlap.
void fsti_dtype_convert(fsti_conversion conversion, void *target, const void *source,
                        uint64_t unit_count);

/// For tests: converts with the kernels of one instruction set.
struct convert_kernels;
void fsti_convert_with(const struct convert_kernels *kernels, fsti_conversion conversion,
                       void *target, const void *source, uint64_t unit_count);

#endif
