// SPDX-License-Identifier: Apache-2.0
/// What the forms of inspect share.
#ifndef INSPECT_H
#define INSPECT_H

#include "cli.h"

typedef struct inspect_totals {
    size_t count[FST_DTYPE_COUNT];
    uint64_t bytes[FST_DTYPE_COUNT];
    uint64_t all_bytes, elements;
} inspect_totals;

void inspect_count(const fst_model *model, inspect_totals *totals);
/// `index` is in range.
fst_tensor_info inspect_tensor(const fst_model *model, size_t index);
fst_file_info inspect_file(const fst_model *model, size_t index);

void inspect_print_json(const fst_model *model);
int inspect_print_tree(const fst_model *model);

#endif
