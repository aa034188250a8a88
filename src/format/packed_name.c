// SPDX-License-Identifier: Apache-2.0
/// Recognises a compressed file by its first tensor and a metadata key.
#include <string.h>

#include "format.h"

bool fsti_packed_is(const fsti_header *header) {
    if (header->tensor_count == 0) return false;
    const fsti_tensor *first = &header->tensors[0];
    size_t size = strlen(FSTI_PACKED_NAME);
    bool is_vector = first->dtype == FST_DTYPE_U8 && first->rank == 1;
    return first->name_size == size &&
           memcmp(fsti_header_name(header, first), FSTI_PACKED_NAME, size) == 0 && is_vector &&
           fsti_header_has_key(header, FSTI_PACKED_KEY);
}
