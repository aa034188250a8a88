// SPDX-License-Identifier: Apache-2.0
/// Values of tensors of any dtype as numbers.
#include <string.h>

#include "rewrite.h"

fst_dtype cli_value_dtype(fst_dtype dtype) {
    static const fst_dtype wide[] = {FST_DTYPE_F64, FST_DTYPE_I64, FST_DTYPE_U64};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        if (fst_dtype_convertible(dtype, wide[i])) return wide[i];
    return dtype;
}

bool cli_value_at(const fst_tensor_view *view, uint64_t i, double *value) {
    const char *bytes = view->data;
    int64_t integer;
    uint64_t natural;
    switch (view->dtype) {
    case FST_DTYPE_F64: memcpy(value, bytes + 8 * i, 8); return true;
    case FST_DTYPE_I64:
        memcpy(&integer, bytes + 8 * i, 8);
        *value = (double)integer;
        return true;
    case FST_DTYPE_U64:
        memcpy(&natural, bytes + 8 * i, 8);
        *value = (double)natural;
        return true;
    case FST_DTYPE_BOOL: *value = bytes[i] != 0; return true;
    default: return false;
    }
}
