// SPDX-License-Identifier: Apache-2.0
/// Positions and new bytes of a tensor, collected while it is compared.
#ifndef FSTI_CHANGE_LIST_H
#define FSTI_CHANGE_LIST_H

#include "delta_private.h"

/// Entries that a thread keeps in memory: 5 bytes each.
#define CHANGE_LIST_MAX ((size_t)3 << 19)

/// Of one thread; the arrays are from fsti_alloc.
typedef struct change_list {
    uint64_t count; ///< in all
    bool is_kept;   ///< all of them are in the arrays, which are CHANGE_LIST_MAX long
    unsigned char *positions, *values;
} change_list;

fst_status fsti_change_list_open(change_list *list, fst_error *error);
void fsti_change_list_close(change_list *list);
/// Two states of a block, which begins at `begin` of its tensor.
typedef struct change_block {
    const unsigned char *old, *made;
    size_t size;
    uint64_t begin;
} change_block;
/// Counts, and keeps as far as there is room, the bytes that differ.
void fsti_change_list_add(change_list *list, const change_block *block);
/// What differs in one block: positions (4 bytes each) to `positions`, new bytes to `values`; each
/// may be NULL. Returns how many.
size_t fsti_change_list_block(const change_block *block, unsigned char *positions,
                              unsigned char *values);

#endif
