// SPDX-License-Identifier: Apache-2.0
/// Compares blocks eight bytes at a time, and the bytes of each differing group one by one.
#include "change_list.h"

#include <string.h>

fst_status fsti_change_list_open(change_list *list, fst_error *error) {
    *list = (change_list){.positions = fsti_alloc(CHANGE_LIST_MAX * 4),
                          .values = fsti_alloc(CHANGE_LIST_MAX)};
    if (list->positions != NULL && list->values != NULL) return FST_OK;
    return fsti_error_memory(error, CHANGE_LIST_MAX * 5);
}

void fsti_change_list_close(change_list *list) {
    fsti_free(list->positions);
    fsti_free(list->values);
    *list = (change_list){0};
}

/// Does the work of fsti_change_list_block() for the bytes [begin, end).
static size_t compare_bytes(const change_block *block, size_t begin, size_t end,
                            unsigned char *positions, unsigned char *values) {
    size_t found = 0;
    for (size_t i = begin; i < end; i++) {
        if (block->old[i] == block->made[i]) continue;
        if (positions != NULL)
            (void)fsti_number_store(positions + 4 * found, (uint32_t)(block->begin + i), 4);
        if (values != NULL) values[found] = block->made[i];
        found++;
    }
    return found;
}

size_t fsti_change_list_block(const change_block *block, unsigned char *positions,
                              unsigned char *values) {
    size_t found = 0, at = 0;
    for (; at + 8 <= block->size; at += 8) {
        uint64_t a, b;
        memcpy(&a, block->old + at, 8);
        memcpy(&b, block->made + at, 8);
        if (a != b)
            found +=
                compare_bytes(block, at, at + 8, positions == NULL ? NULL : positions + 4 * found,
                              values == NULL ? NULL : values + found);
    }
    return found + compare_bytes(block, at, block->size,
                                 positions == NULL ? NULL : positions + 4 * found,
                                 values == NULL ? NULL : values + found);
}

void fsti_change_list_add(change_list *list, const change_block *block) {
    // A block that might not fit is only counted, and so are all later ones.
    if (list->count + block->size > CHANGE_LIST_MAX) list->is_kept = false;
    list->count +=
        fsti_change_list_block(block, list->is_kept ? list->positions + 4 * list->count : NULL,
                               list->is_kept ? list->values + list->count : NULL);
}
