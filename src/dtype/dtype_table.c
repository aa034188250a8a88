// SPDX-License-Identifier: Apache-2.0
/// Names, sizes and alignments of the 22 dtypes.
#include <string.h>

#include "dtype_info.h"
#include "dtype_map.h"

static const struct {
    const char *name;
    uint8_t name_size, bits, sort_rank;
} dtypes[] = {
#define DTYPE_ROW(number, name, bits, rank) {#name, sizeof #name - 1, bits, rank},
    FSTI_DTYPE_MAP(DTYPE_ROW)
#undef DTYPE_ROW
};

// Compile-time check: the public enum, the map and this table agree.
#define DTYPE_AGREES(number, name, bits, rank)                                                     \
    _Static_assert(FST_DTYPE_##name == (number), "FST_DTYPE_" #name);
FSTI_DTYPE_MAP(DTYPE_AGREES)
#undef DTYPE_AGREES
_Static_assert(sizeof dtypes / sizeof *dtypes == FST_DTYPE_COUNT, "one row for each dtype");

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
    return FSTI_DTYPE_NONE;
}

uint32_t fsti_dtype_sort_rank(fst_dtype dtype) { return dtypes[dtype].sort_rank; }

void fsti_dtype_list(char *text, size_t capacity) {
    size_t used = 0;
    for (unsigned i = 0; i < FST_DTYPE_COUNT && used + dtypes[i].name_size + 2 < capacity; i++) {
        if (i > 0) text[used++] = ' ';
        memcpy(text + used, dtypes[i].name, dtypes[i].name_size);
        used += dtypes[i].name_size;
    }
    text[used] = '\0';
}

fst_status fsti_dtype_tensor_bytes(fst_dtype dtype, const uint64_t *shape, uint32_t rank,
                                   uint64_t *size_bytes) {
    uint64_t count = 1;
    for (uint32_t i = 0; i < rank; i++)
        if (!fsti_mul(count, shape[i], &count)) return FST_E_VALIDATION_OVERFLOW;
    return fsti_dtype_size(dtype, count, size_bytes);
}

fst_status fsti_dtype_size(fst_dtype dtype, uint64_t element_count, uint64_t *size_bytes) {
    uint64_t bits;
    if (!fsti_mul(element_count, fsti_dtype_bits(dtype), &bits)) return FST_E_VALIDATION_OVERFLOW;
    if (bits % 8 != 0) return FST_E_MISALIGNED_SLICE;
    *size_bytes = bits / 8;
    return FST_OK;
}
