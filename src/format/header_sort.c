// SPDX-License-Identifier: Apache-2.0
/// Sorts the tensors of a header into file order, by a stable radix sort of (begin, end).
#include <string.h>

#include "header_build.h"

#define DIGIT_BITS 11u
#define DIGIT_COUNT (1u << DIGIT_BITS)

typedef struct sort_key {
    uint64_t key;
    uint32_t index;
} sort_key;

static void sort_pass(const sort_key *from, sort_key *to, size_t count, unsigned shift) {
    size_t starts[DIGIT_COUNT] = {0};
    for (size_t i = 0; i < count; i++) starts[(from[i].key >> shift) % DIGIT_COUNT]++;
    size_t sum = 0;
    for (size_t digit = 0; digit < DIGIT_COUNT; digit++) {
        size_t here = starts[digit];
        starts[digit] = sum;
        sum += here;
    }
    for (size_t i = 0; i < count; i++) to[starts[(from[i].key >> shift) % DIGIT_COUNT]++] = from[i];
}

/// `keys` has two arrays of `count`; returns the one with the result.
static sort_key *sort_by_key(sort_key *keys, size_t count, uint64_t key_max) {
    sort_key *from = keys, *to = keys + count;
    for (unsigned shift = 0; shift < 64 && key_max >> shift != 0; shift += DIGIT_BITS) {
        sort_pass(from, to, count, shift);
        sort_key *swap = from;
        from = to;
        to = swap;
    }
    return from;
}

bool fsti_header_sort(fsti_header *header) {
    size_t count = header->tensor_count;
    sort_key *keys = fsti_alloc(2 * count * sizeof *keys);
    fsti_tensor *sorted = fsti_alloc(count * sizeof *sorted);
    if (keys == NULL || sorted == NULL) {
        fsti_free(keys);
        fsti_free(sorted);
        return false;
    }
    // Two stable passes: first by end, then by begin.
    sort_key *order = keys;
    for (int pass = 0; pass < 2; pass++) {
        uint64_t key_max = 0;
        for (size_t i = 0; i < count; i++) {
            uint32_t index = pass == 0 ? (uint32_t)i : order[i].index;
            const fsti_tensor *tensor = &header->tensors[index];
            keys[i + (order == keys ? 0 : count)] =
                (sort_key){pass == 0 ? tensor->end : tensor->begin, index};
            key_max = fsti_max(key_max, pass == 0 ? tensor->end : tensor->begin);
        }
        if (order != keys) memmove(keys, order, count * sizeof *keys);
        order = sort_by_key(keys, count, key_max);
    }
    for (size_t i = 0; i < count; i++) sorted[i] = header->tensors[order[i].index];
    fsti_free(keys);
    fsti_free(header->tensors);
    header->tensors = sorted;
    return true;
}
