// SPDX-License-Identifier: Apache-2.0
/// Two tensors of the same shape, read side by side in pieces.
#ifndef DIFF_PAIR_H
#define DIFF_PAIR_H

#include <math.h>

#include "rewrite.h"

/// One tensor of each model, as streams of the same pieces.
typedef struct tensor_pair {
    fst_model *models[2];
    fst_tensor_info infos[2]; ///< with their struct_size set
    size_t indexes[2];
    piece_list pieces;
} tensor_pair;

/// Statistics of a tensor's differing elements.
typedef struct value_summary {
    uint64_t element_count, differing;
    double max, sum;
    bool known; ///< the dtypes have comparable numbers
} value_summary;

/// Whether a difference is larger than the largest so far, where NaN is larger than any number.
static inline bool diff_exceeds(double difference, double max) {
    return !isnan(max) && !(difference <= max);
}

/// Splits the tensors of a pair whose models, infos and indexes are set. False without memory.
bool diff_pair_cut(tensor_pair *pair);
void diff_pair_clear(tensor_pair *pair);
/// Compares the bytes; the dtypes must be equal.
fst_status diff_pair_bytes(tensor_pair *pair, bool *same, fst_error *error);
/// Compares the values, whatever the dtypes.
fst_status diff_pair_values(tensor_pair *pair, value_summary *summary, fst_error *error);

#endif
