// SPDX-License-Identifier: Apache-2.0
/// Values of tensors as numbers, for any dtype.
#include <inttypes.h>
#include <stdio.h>
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

bool cli_is_integer(fst_dtype dtype) { return dtype == FST_DTYPE_I64 || dtype == FST_DTYPE_U64; }

/// With the sign bit flipped, two's complement sorts like unsigned integers.
static uint64_t sign_bit(fst_dtype dtype) { return dtype == FST_DTYPE_I64 ? (uint64_t)1 << 63 : 0; }

uint64_t cli_integer_key(const fst_tensor_view *view, uint64_t i) {
    uint64_t bits;
    memcpy(&bits, (const char *)view->data + 8 * i, 8);
    return bits ^ sign_bit(view->dtype);
}

char *cli_integer_text(fst_dtype dtype, uint64_t key, char *text) {
    uint64_t bits = key ^ sign_bit(dtype);
    if (dtype == FST_DTYPE_I64)
        snprintf(text, 32, "%" PRId64, (int64_t)bits);
    else
        snprintf(text, 32, "%" PRIu64, bits);
    return text;
}
