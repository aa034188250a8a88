// SPDX-License-Identifier: Apache-2.0
/// Metadata keys that mark a file, and padding tensors between aligned ones, recognised by name,
/// dtype and such a key.
#include <string.h>

#include "format.h"

bool fsti_header_has_key(const fsti_header *header, const char *key) {
    size_t size = strlen(key);
    for (size_t i = 0; i < header->metadata_count; i++) {
        fsti_text known = header->metadata[i].key;
        if (known.size == size && memcmp(header->bytes + known.at, key, size) == 0) return true;
    }
    return false;
}

bool fsti_padding_name(const char *name, size_t name_size) {
    size_t size = strlen(FSTI_PADDING_NAME);
    return name_size > size && memcmp(name, FSTI_PADDING_NAME, size) == 0;
}

bool fsti_padding_like(const char *name, size_t name_size, fst_dtype dtype, uint32_t rank) {
    if (dtype != FST_DTYPE_U8 || rank != 1 || !fsti_padding_name(name, name_size)) return false;
    for (size_t i = strlen(FSTI_PADDING_NAME); i < name_size; i++)
        if (name[i] < '0' || name[i] > '9') return false;
    return true;
}

bool fsti_header_is_padding(const fsti_header *header, const fsti_tensor *tensor) {
    return fsti_padding_like(fsti_header_name(header, tensor), tensor->name_size,
                             (fst_dtype)tensor->dtype, tensor->rank);
}

size_t fsti_header_padding_count(const fsti_header *header) {
    size_t count = 0;
    if (!fsti_header_has_key(header, FSTI_PADDING_KEY)) return 0;
    for (size_t i = 0; i < header->tensor_count; i++)
        count += fsti_header_is_padding(header, &header->tensors[i]);
    return count;
}
