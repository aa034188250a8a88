// SPDX-License-Identifier: Apache-2.0
/// By what a compressed file is known: its first tensor, and a mark in its metadata.
#include <string.h>

#include "format.h"

static bool has_key(const fsti_header *header) {
    size_t size = strlen(FSTI_PACKED_KEY);
    for (size_t i = 0; i < header->metadata_count; i++) {
        fsti_text key = header->metadata[i].key;
        if (key.size == size && memcmp(header->bytes + key.at, FSTI_PACKED_KEY, size) == 0)
            return true;
    }
    return false;
}

bool fsti_packed_is(const fsti_header *header) {
    if (header->tensor_count == 0) return false;
    const fsti_tensor *first = &header->tensors[0];
    size_t size = strlen(FSTI_PACKED_NAME);
    bool is_vector = first->dtype == FST_DTYPE_U8 && first->rank == 1;
    return first->name_size == size &&
           memcmp(fsti_header_name(header, first), FSTI_PACKED_NAME, size) == 0 && is_vector &&
           has_key(header);
}
