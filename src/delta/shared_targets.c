// SPDX-License-Identifier: Apache-2.0
/// Tensors of the caller that share memory, such as tied parameters: a change must give all of them
/// their new bytes.
#include <stdlib.h>
#include <string.h>

#include "live_change.h"

/// The new bytes of one piece of a tensor.
typedef struct made_piece {
    const changed_tensor *tensor;
    size_t index; ///< SIZE_MAX: none yet
    unsigned char *bytes;
} made_piece;

static const unsigned char *end_of(const changed_tensor *tensor) {
    return tensor->target + tensor->size_bytes;
}

/// The new bytes from `at` on. *left gets the smaller of itself and the rest of their piece.
static const unsigned char *make_bytes(made_piece *piece, const unsigned char *at, size_t *left) {
    const changed_tensor *tensor = piece->tensor;
    size_t offset = (size_t)(at - tensor->target), index = offset / CHANGED_PIECE_BYTES;
    size_t begin = index * CHANGED_PIECE_BYTES;
    size_t size = (size_t)fsti_min(CHANGED_PIECE_BYTES, tensor->size_bytes - begin);
    if (piece->index != index) {
        memcpy(piece->bytes, tensor->target + begin, size);
        fsti_changed_piece_write(&tensor->pieces[index], piece->bytes, size);
        piece->index = index;
    }
    *left = (size_t)fsti_min(*left, begin + size - offset);
    return piece->bytes + (offset - begin);
}

/// Compares the new bytes of the memory that both tensors have.
static fst_status compare_shared(made_piece pieces[2], const changed_tensor *first,
                                 const changed_tensor *second, fst_error *error) {
    const unsigned char *end = end_of(first) < end_of(second) ? end_of(first) : end_of(second);
    // One tensor may have many others inside it: its piece is kept for them.
    if (pieces[0].tensor != first) pieces[0] = (made_piece){first, SIZE_MAX, pieces[0].bytes};
    pieces[1] = (made_piece){second, SIZE_MAX, pieces[1].bytes};
    for (const unsigned char *at = second->target; at < end;) {
        size_t left = (size_t)(end - at);
        const unsigned char *a = make_bytes(&pieces[0], at, &left);
        const unsigned char *b = make_bytes(&pieces[1], at, &left);
        if (memcmp(a, b, left) != 0) {
            fsti_error_location location = {.tensor = second->tensor->name,
                                            .tensor_size = second->tensor->name_size,
                                            .byte_offset = FST_NO_OFFSET};
            return fsti_error_set(
                error, FST_E_ARGUMENT, location,
                "the tensor shares memory with tensor '%.*s', and the delta gives "
                "them different values",
                (int)fsti_min(first->tensor->name_size, 100), first->tensor->name);
        }
        at += left;
    }
    return FST_OK;
}

static int compare_places(const void *a_pointer, const void *b_pointer) {
    const changed_tensor *a = *(const changed_tensor *const *)a_pointer,
                         *b = *(const changed_tensor *const *)b_pointer;
    if (a->target != b->target) return a->target < b->target ? -1 : 1;
    return a->tensor < b->tensor ? -1 : a->tensor > b->tensor;
}

/// Compares each tensor with the one before it, by address, that reaches farthest. What it shares
/// with another one it shares with this one, too, and these two were compared.
static fst_status compare_all(const changed_tensor *const *by_place, size_t count,
                              fst_error *error) {
    unsigned char *bytes = fsti_alloc(2 * CHANGED_PIECE_BYTES);
    if (bytes == NULL) return fsti_error_memory(error, 2 * CHANGED_PIECE_BYTES);
    made_piece pieces[2] = {{.bytes = bytes}, {.bytes = bytes + CHANGED_PIECE_BYTES}};
    fst_status status = FST_OK;
    const changed_tensor *farthest = by_place[0];
    for (size_t i = 1; i < count && status == FST_OK; i++) {
        if (by_place[i]->target < end_of(farthest))
            status = compare_shared(pieces, farthest, by_place[i], error);
        if (end_of(by_place[i]) > end_of(farthest)) farthest = by_place[i];
    }
    fsti_free(bytes);
    return status;
}

fst_status fsti_check_shared(const changed_tensor *tensors, size_t count, fst_error *error) {
    if (count < 2) return FST_OK;
    const changed_tensor **by_place = fsti_alloc(count * sizeof(const changed_tensor *));
    if (by_place == NULL) return fsti_error_memory(error, count * sizeof *by_place);
    size_t with_memory = 0;
    for (size_t i = 0; i < count; i++)
        if (tensors[i].size_bytes > 0) by_place[with_memory++] = &tensors[i];
    qsort(by_place, with_memory, sizeof *by_place, compare_places);
    bool is_shared = false;
    const unsigned char *end = NULL;
    for (size_t i = 0; i < with_memory; i++) {
        is_shared = is_shared || (end != NULL && by_place[i]->target < end);
        if (end == NULL || end_of(by_place[i]) > end) end = end_of(by_place[i]);
    }
    fst_status status = is_shared ? compare_all(by_place, with_memory, error) : FST_OK;
    fsti_free(by_place);
    return status;
}
