// SPDX-License-Identifier: Apache-2.0
/// The name table of a header: open addressing with 32-bit slots of tag and index. Also the memory
/// limit of a header's tables.
#include <string.h>

#include "header_build.h"

#define INDEX_BITS 24u
#define INDEX_MASK ((1u << INDEX_BITS) - 1)

/// A slot's tag uses other bits of the hash than its position.
static uint32_t slot_tag(uint32_t hash) { return hash & ~INDEX_MASK; }

static bool same_name(const fsti_header *header, const fsti_tensor *tensor, const char *name,
                      size_t name_size) {
    return tensor->name_size == name_size &&
           memcmp(fsti_header_name(header, tensor), name, name_size) == 0;
}

/// The slot of a name, or the free slot for it.
static size_t find_slot(const fsti_header *header, const char *name, size_t name_size,
                        uint32_t hash) {
    size_t mask = header->slot_count - 1;
    size_t slot = (hash * (size_t)0x9e3779b97f4a7c15u >> 20) & mask;
    for (;; slot = (slot + 1) & mask) {
        uint32_t value = header->slots[slot];
        if (value == 0) return slot;
        if (((value ^ hash) & ~INDEX_MASK) == 0) {
            const fsti_tensor *tensor = &header->tensors[(value & INDEX_MASK) - 1];
            if (tensor->hash == hash && same_name(header, tensor, name, name_size)) return slot;
        }
    }
}

/// Size of the name table for a number of tensors.
static size_t slot_count_of(size_t tensor_count) {
    size_t slot_count = 4;
    while (slot_count < tensor_count + tensor_count / 3) slot_count *= 2;
    return slot_count;
}

bool fsti_header_tables_fit(header_build *build) {
    const fsti_header *header = build->header;
    uint64_t bytes = header->tensor_count * sizeof *header->tensors +
                     header->shape_count * sizeof *header->shapes +
                     header->metadata_count * sizeof *header->metadata +
                     slot_count_of(header->tensor_count) * sizeof *header->slots;
    if (bytes <= header->byte_count + FSTI_FORMAT_TABLES_SLACK) return true;
    build->limit = "its tables would need more memory than its text plus 4 MiB";
    return false;
}

bool fsti_header_index_names(fsti_header *header, size_t *duplicate) {
    *duplicate = SIZE_MAX;
    size_t slot_count = slot_count_of(header->tensor_count);
    header->slots = fsti_alloc_zeroed(slot_count, sizeof *header->slots);
    if (header->slots == NULL) return false;
    header->slot_count = slot_count;
    for (size_t i = 0; i < header->tensor_count; i++) {
        const fsti_tensor *tensor = &header->tensors[i];
        size_t slot =
            find_slot(header, fsti_header_name(header, tensor), tensor->name_size, tensor->hash);
        if (header->slots[slot] != 0) {
            *duplicate = i;
            return true;
        }
        header->slots[slot] = slot_tag(tensor->hash) | (uint32_t)(i + 1);
    }
    return true;
}

size_t fsti_header_find(const fsti_header *header, const char *name, size_t name_size) {
    uint32_t hash = (uint32_t)(fsti_hash(name, name_size, header->hash_key) >> 32);
    uint32_t value = header->slots[find_slot(header, name, name_size, hash)];
    return value == 0 ? SIZE_MAX : (value & INDEX_MASK) - 1;
}
