// SPDX-License-Identifier: Apache-2.0
/// Fillers: the tensors that stand between aligned ones, known by name, dtype and metadata.
#include <string.h>

#include "format.h"

bool fsti_filler_name(const char *name, size_t name_size) {
    size_t size = strlen(FSTI_FILLER_NAME);
    return name_size > size && memcmp(name, FSTI_FILLER_NAME, size) == 0;
}

bool fsti_header_has_fillers(const fsti_header *header) {
    return fsti_header_has_key(header, FSTI_FILLER_KEY);
}

bool fsti_filler_like(const char *name, size_t name_size, fst_dtype dtype, uint32_t rank) {
    if (dtype != FST_DTYPE_U8 || rank != 1 || !fsti_filler_name(name, name_size)) return false;
    for (size_t i = strlen(FSTI_FILLER_NAME); i < name_size; i++)
        if (name[i] < '0' || name[i] > '9') return false;
    return true;
}

bool fsti_header_is_filler(const fsti_header *header, const fsti_tensor *tensor) {
    return fsti_filler_like(fsti_header_name(header, tensor), tensor->name_size,
                            (fst_dtype)tensor->dtype, tensor->rank);
}
