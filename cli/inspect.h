// SPDX-License-Identifier: Apache-2.0
/// Shared by the output formats of inspect.
#ifndef INSPECT_H
#define INSPECT_H

#include "cli.h"

/// Orders of the list: file order, by name (with natural number order), by size, by dtype.
enum { INSPECT_BY_FILE, INSPECT_BY_NAME, INSPECT_BY_SIZE, INSPECT_BY_DTYPE };

#define INSPECT_GLOB_COUNT_MAX 64

/// The tensors to show.
typedef struct inspect_list {
    const fst_model *model;
    fst_tensor_info *infos;
    size_t count;
} inspect_list;

typedef struct inspect_choice {
    const char *globs[INSPECT_GLOB_COUNT_MAX];
    size_t glob_count;
    int order;
} inspect_choice;

/// Makes the list. False without memory. Free with inspect_list_clear().
bool inspect_list_make(const fst_model *model, const inspect_choice *choice, inspect_list *list);
void inspect_list_clear(inspect_list *list);

typedef struct inspect_totals {
    size_t count[FST_DTYPE_COUNT];
    uint64_t bytes[FST_DTYPE_COUNT];
    uint64_t all_bytes, elements;
} inspect_totals;

void inspect_count(const inspect_list *list, inspect_totals *totals);
/// `index` must be in range.
fst_tensor_info inspect_tensor(const fst_model *model, size_t index);
fst_file_info inspect_file(const fst_model *model, size_t index);

void inspect_print_json(const inspect_list *list);
/// Sorts the list by name.
void inspect_print_tree(inspect_list *list);

#endif
