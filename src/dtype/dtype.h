// SPDX-License-Identifier: Apache-2.0
/// The door of the dtype room: the table of element types.
#ifndef FSTI_DTYPE_H
#define FSTI_DTYPE_H

#include "base/base.h"
#include "fastsafetensors/dtype.h"

const char *fsti_dtype_name(fst_dtype dtype);
uint32_t fsti_dtype_bits(fst_dtype dtype);
uint32_t fsti_dtype_alignment(fst_dtype dtype);

/// No dtype: what is found where there is none. Never in a table.
#define FSTI_DTYPE_NONE ((fst_dtype)0xff)

/// The dtype of that name, exact case; FSTI_DTYPE_NONE when there is none.
fst_dtype fsti_dtype_find(const char *name, size_t size);

/// Where the reference writer sorts it: smallest alignment first.
uint32_t fsti_dtype_sort_rank(fst_dtype dtype);

/// All names, with spaces between them; what does not fit is left out.
void fsti_dtype_list(char *text, size_t capacity);

/// Bytes of a packed tensor; errors as of fsti_dtype_size().
fst_status fsti_dtype_tensor_bytes(fst_dtype dtype, const uint64_t *shape, uint32_t rank,
                                   uint64_t *size_bytes);

/// Bytes of `element_count` elements. FST_E_VALIDATION_OVERFLOW when they exceed 64 bits,
/// FST_E_MISALIGNED_SLICE when they are not whole bytes.
fst_status fsti_dtype_size(fst_dtype dtype, uint64_t element_count, uint64_t *size_bytes);

/// Whether tensors of `from` become `to` when that is asked for: floats to any other float type
/// (values round to nearest even), integers to wider ones that hold every value. Else they stay.
bool fsti_dtype_convertible(fst_dtype from, fst_dtype to);

/// How elements of one dtype become another: in units of whole bytes on both sides.
typedef struct fsti_conversion {
    uint8_t from, to; ///< fst_dtype
    uint8_t unit_elements, from_bytes, to_bytes;
} fsti_conversion;

/// The conversion of a convertible pair; of a pair of the same dtype it moves bytes.
fsti_conversion fsti_dtype_conversion(fst_dtype from, fst_dtype to);

/// Converts `unit_count` units. Pointers need no alignment; target and source do not overlap.
void fsti_dtype_convert(fsti_conversion conversion, void *target, const void *source,
                        uint64_t unit_count);

/// The same by kernels of one instruction set, for tests.
struct convert_kernels;
void fsti_convert_with(const struct convert_kernels *kernels, fsti_conversion conversion,
                       void *target, const void *source, uint64_t unit_count);

#endif
