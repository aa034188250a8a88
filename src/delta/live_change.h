// SPDX-License-Identifier: Apache-2.0
/// The changes of tensors in memory. Private to the delta module.
#ifndef FSTI_LIVE_CHANGE_H
#define FSTI_LIVE_CHANGE_H

#include "changed_lines.h"
#include "delta_private.h"

/// The changes of one tensor.
typedef struct changed_tensor {
    const delta_tensor *tensor;
    unsigned char *target; ///< the caller's
    uint64_t size_bytes;
    changed_piece *pieces; ///< from fsti_alloc
} changed_tensor;

/// FST_E_ARGUMENT if tensors share memory and would get different bytes there.
fst_status fsti_check_shared(const changed_tensor *tensors, size_t count, fst_error *error);

#endif
