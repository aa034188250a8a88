// SPDX-License-Identifier: Apache-2.0
/// Splits tensors into contiguous slices, small enough to hold many at a time.
#include <stdlib.h>
#include <string.h>

#include "rewrite.h"

/// The dimension to split: earlier ones have one index, later ones are complete. *row_bytes: bytes
/// per index. UINT32_MAX if the whole tensor is small enough.
static uint32_t cut_dimension(const fst_tensor_info *info, uint64_t bits, uint64_t piece_bytes,
                              uint64_t *row_bytes) {
    uint64_t bytes = (bits + 7) / 8;
    uint32_t dimension = info->rank;
    // Sub-byte elements are not split along the last dimension.
    if (bits % 8 != 0 && dimension > 0) bytes = (info->shape[--dimension] * bits + 7) / 8;
    while (dimension > 0 && bytes * info->shape[dimension - 1] <= piece_bytes)
        bytes *= info->shape[--dimension];
    *row_bytes = bytes;
    return dimension == 0 ? UINT32_MAX : dimension - 1;
}

/// Advances the index of the dimensions before `dimension`. False after the last.
static bool next_index(const fst_tensor_info *info, uint32_t dimension, uint64_t *begin,
                       uint64_t *end) {
    for (uint32_t i = dimension; i-- > 0;) {
        begin[i]++;
        end[i] = begin[i] + 1;
        if (begin[i] < info->shape[i]) return true;
        begin[i] = 0;
        end[i] = 1;
    }
    return false;
}

bool cli_cut_tensor(const fst_tensor_info *info, uint64_t bits, uint64_t piece_bytes,
                    piece_callback take, void *context) {
    uint64_t begin[CLI_RANK_MAX] = {0}, end[CLI_RANK_MAX] = {0}, row_bytes, first = 0;
    if (info->rank == 0 || info->rank > CLI_RANK_MAX || info->element_count == 0 ||
        info->shape[info->rank - 1] * bits % 8 != 0)
        return take(context, NULL, NULL, 0);
    uint32_t cut = cut_dimension(info, bits, piece_bytes, &row_bytes);
    if (cut == UINT32_MAX) return take(context, NULL, NULL, 0);
    uint64_t step = row_bytes == 0 || row_bytes >= piece_bytes ? 1 : piece_bytes / row_bytes;
    uint64_t row_elements = 1;
    for (uint32_t i = 0; i < info->rank; i++) end[i] = i < cut ? 1 : info->shape[i];
    for (uint32_t i = cut + 1; i < info->rank; i++) row_elements *= info->shape[i];
    do {
        for (uint64_t at = 0; at < info->shape[cut]; at += step) {
            begin[cut] = at;
            end[cut] = info->shape[cut] - at < step ? info->shape[cut] : at + step;
            if (!take(context, begin, end, first)) return false;
            first += (end[cut] - at) * row_elements;
        }
    } while (next_index(info, cut, begin, end));
    return true;
}

// ---- the pieces of one tensor ----

const fst_load_tuning cli_unmapped_reads = {.struct_size = sizeof cli_unmapped_reads,
                                            .keep_sigbus_handler = 1};

static bool keep_piece(void *context, const uint64_t *begin, const uint64_t *end,
                       uint64_t first_element) {
    piece_list *list = context;
    uint32_t rank = begin == NULL ? 0 : list->rank;
    (void)first_element;
    if (list->count == list->capacity) {
        list->capacity = 2 * list->capacity + 16;
        void *items = realloc(list->items, list->capacity * sizeof *list->items);
        if (items != NULL) list->items = items;
        void *numbers = realloc(list->numbers, (list->capacity * 2 * rank + 1) * sizeof(uint64_t));
        if (numbers != NULL) list->numbers = numbers;
        if (items == NULL || numbers == NULL) return false;
    }
    if (rank > 0) {
        memcpy(list->numbers + list->count * 2 * rank, begin, rank * sizeof *begin);
        memcpy(list->numbers + (list->count * 2 + 1) * rank, end, rank * sizeof *end);
    }
    list->items[list->count++] = FST_STRUCT_INIT(fst_part);
    return true;
}

bool cli_pieces_cut(piece_list *list, const fst_tensor_info *info, uint64_t bits,
                    uint64_t piece_bytes) {
    list->rank = info->rank;
    return info->size_bytes == 0 || cli_cut_tensor(info, bits, piece_bytes, keep_piece, list);
}

void cli_pieces_of(piece_list *list, size_t tensor_index) {
    for (size_t i = 0; i < list->count; i++) {
        list->items[i].tensor_index = tensor_index;
        if (list->count == 1) continue; // the whole tensor
        list->items[i].begin = list->numbers + i * 2 * list->rank;
        list->items[i].end = list->numbers + (i * 2 + 1) * list->rank;
    }
}

void cli_pieces_clear(piece_list *list) {
    free(list->items);
    free(list->numbers);
}
