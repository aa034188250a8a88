// SPDX-License-Identifier: Apache-2.0
/// Simple index expressions: integers, slices with step 1, and an Ellipsis.
#ifndef FSTPY_SLICE_REQUEST_H
#define FSTPY_SLICE_REQUEST_H

#include "module.h"

/// Tensors of higher rank are left to the general planner.
#define FSTPY_SLICE_RANK_MAX 8

/// The range of a tensor that an expression selects, and the resulting shape: dimensions with an
/// integer index are dropped.
typedef struct slice_request {
    uint64_t begin[FSTPY_SLICE_RANK_MAX], end[FSTPY_SLICE_RANK_MAX];
    uint64_t shape[FSTPY_SLICE_RANK_MAX];
    uint32_t rank;  ///< of the resulting shape
    uint64_t count; ///< elements; 0: empty
    int is_whole;   ///< the whole tensor
} slice_request;

/// Parses an expression. 0 without an exception: not simple, out of range, or too many dimensions;
/// the general planner then handles it and reports errors.
int fstpy_read_slice(PyObject *key, const fst_tensor_info *info, slice_request *out);

#endif
