// SPDX-License-Identifier: Apache-2.0
/// Model queries shared by all output formats of inspect.
#include "inspect.h"

#include <stdlib.h>
#include <string.h>

fst_tensor_info inspect_tensor(const fst_model *model, size_t index) {
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    if (fst_model_tensor_info(model, index, &info, NULL) != FST_OK) info.name = "";
    return info;
}

fst_file_info inspect_file(const fst_model *model, size_t index) {
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    if (fst_model_file_info(model, index, &info, NULL) != FST_OK) info.path = "";
    return info;
}

/// Digits compare as numbers, so that layer 10 follows layer 9.
static int compare_names(const void *a, const void *b) {
    return strverscmp(((const fst_tensor_info *)a)->name, ((const fst_tensor_info *)b)->name);
}

static int compare_sizes(const void *a, const void *b) {
    const fst_tensor_info *x = a, *y = b;
    if (x->size_bytes != y->size_bytes) return x->size_bytes > y->size_bytes ? -1 : 1;
    return compare_names(a, b);
}

static int compare_dtypes(const void *a, const void *b) {
    const fst_tensor_info *x = a, *y = b;
    if (x->dtype != y->dtype) return x->dtype < y->dtype ? -1 : 1;
    return compare_names(a, b);
}

bool inspect_list_make(const fst_model *model, const inspect_choice *choice, inspect_list *list) {
    size_t count = fst_model_tensor_count(model);
    *list = (inspect_list){.model = model, .infos = calloc(count + 1, sizeof *list->infos)};
    if (list->infos == NULL) return false;
    for (size_t i = 0; i < count; i++) {
        fst_tensor_info info = inspect_tensor(model, i);
        if (cli_name_matches(&info, choice->globs, choice->glob_count))
            list->infos[list->count++] = info;
    }
    int (*const orders[])(const void *, const void *) = {NULL, compare_names, compare_sizes,
                                                         compare_dtypes};
    if (choice->order != INSPECT_BY_FILE)
        qsort(list->infos, list->count, sizeof *list->infos, orders[choice->order]);
    return true;
}

void inspect_list_clear(inspect_list *list) { free(list->infos); }

void inspect_count(const inspect_list *list, inspect_totals *totals) {
    memset(totals, 0, sizeof *totals);
    for (size_t i = 0; i < list->count; i++) {
        const fst_tensor_info *info = &list->infos[i];
        if ((unsigned)info->dtype < FST_DTYPE_COUNT) {
            totals->count[info->dtype]++;
            totals->bytes[info->dtype] += info->size_bytes;
        }
        totals->all_bytes += info->size_bytes;
        totals->elements += info->element_count;
    }
}
