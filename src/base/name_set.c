// SPDX-License-Identifier: Apache-2.0
/// Names that must differ.
#include <string.h>

#include "base.h"

static bool same_name(fsti_name a, fsti_name b) {
    return a.size == b.size && memcmp(a.bytes, b.bytes, a.size) == 0;
}

bool fsti_names_twice(fsti_name_at name_at, const void *context, size_t count, size_t *twice) {
    size_t slot_count = 4;
    *twice = SIZE_MAX;
    while (slot_count < 2 * count) slot_count *= 2;
    uint32_t *slots = fsti_alloc_zeroed(slot_count, sizeof *slots);
    if (slots == NULL) return false;
    uint64_t key = fsti_hash_key();
    for (size_t i = 0; i < count && *twice == SIZE_MAX; i++) {
        fsti_name name = name_at(context, i);
        size_t slot = fsti_hash(name.bytes, name.size, key) & (slot_count - 1);
        while (slots[slot] != 0 && !same_name(name, name_at(context, slots[slot] - 1)))
            slot = (slot + 1) & (slot_count - 1);
        if (slots[slot] != 0) *twice = i;
        slots[slot] = (uint32_t)i + 1;
    }
    fsti_free(slots);
    return true;
}
