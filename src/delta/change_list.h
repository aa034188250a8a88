// SPDX-License-Identifier: Apache-2.0
/// Positions and new bytes of a tensor, collected while it is compared.
#ifndef FSTI_CHANGE_LIST_H
#define FSTI_CHANGE_LIST_H

#include "delta_private.h"

/// Entries that a thread keeps in memory: 5 bytes each.
#define CHANGE_LIST_MAX ((size_t)3 << 19)

/// Used by one thread. The arrays are from fsti_alloc.
typedef struct change_list {
    uint64_t count; ///< of all changed bytes, kept or not
    bool is_kept;   ///< all of them are in the arrays, which are CHANGE_LIST_MAX long
    unsigned char *positions, *values;
} change_list;

fst_status fsti_change_list_open(change_list *list, fst_error *error);
void fsti_change_list_close(change_list *list);
/// The old and the new bytes of a block that begins at byte `begin` of its tensor.
typedef struct change_block {
    const unsigned char *old, *made;
    size_t size;
    uint64_t begin;
} change_block;
/// Counts the bytes that differ, and stores them while the arrays have space.
void fsti_change_list_add(change_list *list, const change_block *block);
/// Writes the positions (4 bytes each) and the new values of the bytes that differ in one block to
/// `positions` and `values`, each of which may be NULL. Returns their number.
size_t fsti_change_list_block(const change_block *block, unsigned char *positions,
                              unsigned char *values);

#endif
