// SPDX-License-Identifier: Apache-2.0
/// The door of the dtype room: the table of element types.
#ifndef FSTI_DTYPE_H
#define FSTI_DTYPE_H

#include "base/base.h"
#include "fastsafetensors/dtype.h"

const char *fsti_dtype_name(fst_dtype dtype);
uint32_t fsti_dtype_bits(fst_dtype dtype);
uint32_t fsti_dtype_alignment(fst_dtype dtype);

/// The dtype of that name, exact case; FST_DTYPE_COUNT when there is none.
fst_dtype fsti_dtype_find(const char *name, size_t size);

/// Bytes of `element_count` elements. FST_E_VALIDATION_OVERFLOW when they exceed 64 bits,
/// FST_E_MISALIGNED_SLICE when they are not whole bytes.
fst_status fsti_dtype_size(fst_dtype dtype, uint64_t element_count, uint64_t *size_bytes);

#endif
