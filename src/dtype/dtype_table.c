// SPDX-License-Identifier: Apache-2.0
/// Names, sizes and alignments of the 22 dtypes.
#include <string.h>

#include "dtype.h"

static const struct {
    const char *name;
    uint8_t name_size, bits;
} dtypes[] = {
#define DTYPE_ROW(name, bits) {#name, sizeof #name - 1, bits},
    FST_DTYPE_MAP(DTYPE_ROW)
#undef DTYPE_ROW
};

const char *fsti_dtype_name(fst_dtype dtype) {
    return (unsigned)dtype < FST_DTYPE_COUNT ? dtypes[dtype].name : NULL;
}

uint32_t fsti_dtype_bits(fst_dtype dtype) {
    return (unsigned)dtype < FST_DTYPE_COUNT ? dtypes[dtype].bits : 0;
}

uint32_t fsti_dtype_alignment(fst_dtype dtype) {
    if ((unsigned)dtype >= FST_DTYPE_COUNT) return 0;
    if (dtype == FST_DTYPE_C64) return 4; // two F32
    return dtypes[dtype].bits < 8 ? 1 : dtypes[dtype].bits / 8u;
}

fst_dtype fsti_dtype_find(const char *name, size_t size) {
    for (unsigned i = 0; i < FST_DTYPE_COUNT; i++)
        if (dtypes[i].name_size == size && memcmp(dtypes[i].name, name, size) == 0)
            return (fst_dtype)i;
    return FST_DTYPE_COUNT;
}

fst_status fsti_dtype_size(fst_dtype dtype, uint64_t element_count, uint64_t *size_bytes) {
    uint64_t bits;
    if (!fsti_mul(element_count, fsti_dtype_bits(dtype), &bits)) return FST_E_VALIDATION_OVERFLOW;
    if (bits % 8 != 0) return FST_E_MISALIGNED_SLICE;
    *size_bytes = bits / 8;
    return FST_OK;
}
