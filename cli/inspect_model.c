// SPDX-License-Identifier: Apache-2.0
/// What all forms of inspect ask of a model.
#include <string.h>

#include "inspect.h"

fst_tensor_info inspect_tensor(const fst_model *model, size_t index) {
    fst_tensor_info info = {0};
    if (fst_model_tensor_info(model, index, &info, NULL) != FST_OK) info.name = "";
    return info;
}

fst_file_info inspect_file(const fst_model *model, size_t index) {
    fst_file_info info = {0};
    if (fst_model_file_info(model, index, &info, NULL) != FST_OK) info.path = "";
    return info;
}

void inspect_count(const fst_model *model, inspect_totals *totals) {
    memset(totals, 0, sizeof *totals);
    for (size_t i = 0; i < fst_model_tensor_count(model); i++) {
        fst_tensor_info info = inspect_tensor(model, i);
        totals->count[info.dtype]++;
        totals->bytes[info.dtype] += info.size_bytes;
        totals->all_bytes += info.size_bytes;
        totals->elements += info.element_count;
    }
}
