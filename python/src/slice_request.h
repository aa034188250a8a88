// SPDX-License-Identifier: Apache-2.0
/// Index expressions of the simple kind: whole numbers, slices of step 1, and an Ellipsis.
#ifndef FSTPY_SLICE_REQUEST_H
#define FSTPY_SLICE_REQUEST_H

#include "module.h"

/// More dimensions are left to who plans any expression.
#define FSTPY_SLICE_RANK_MAX 8

/// The box of a tensor that an expression selects, and the shape of what comes of it: the
/// dimensions of numbers are dropped.
typedef struct slice_request {
    uint64_t begin[FSTPY_SLICE_RANK_MAX], end[FSTPY_SLICE_RANK_MAX];
    uint64_t shape[FSTPY_SLICE_RANK_MAX];
    uint32_t rank;  ///< of the shape
    uint64_t count; ///< elements; 0: none are selected
    int is_whole;   ///< the tensor as it is
} slice_request;

/// Reads an expression. 0 without an exception: it is not of that kind, or beyond the tensor, which
/// whoever plans any expression tells; or the tensor has too many dimensions.
int fstpy_read_slice(PyObject *key, const fst_tensor_info *info, slice_request *out);

#endif
