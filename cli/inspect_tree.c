// SPDX-License-Identifier: Apache-2.0
/// inspect --tree: tensors grouped by the parts of their names between dots.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inspect.h"

/// Deeper names are printed as one leaf: a hostile name must not exhaust the stack.
#define DEPTH_MAX 64

/// Where the part of the name that begins at `start` ends.
static size_t part_end(const fst_tensor_info *info, size_t start) {
    const char *dot = memchr(info->name + start, '.', info->name_size - start);
    return dot == NULL ? info->name_size : (size_t)(dot - info->name);
}

/// The end of the run of leaves that share the part [start, end) of leaf `first`.
static size_t group_end(const fst_tensor_info *leaves, size_t first, size_t last, size_t start,
                        size_t end) {
    size_t next = first + 1;
    const char *part = leaves[first].name + start;
    for (; next < last; next++) {
        const fst_tensor_info *info = &leaves[next];
        if (info->name_size < end || part_end(info, start) != end ||
            memcmp(info->name + start, part, end - start) != 0)
            break;
    }
    return next;
}

static void print_leaf(const fst_tensor_info *info, size_t start, int indent) {
    char shape[160], size[16];
    printf("%*s", indent, "");
    int used = indent + cli_print_name(info->name + start, info->name_size - start);
    printf("%*s %s%-11s %-22s %10s%s\n", used < 48 ? 48 - used : 0, "", cli_dim(),
           fst_dtype_name(info->dtype),
           cli_shape_text(info->shape, info->rank, shape, sizeof shape),
           cli_size_text(info->size_bytes, size), cli_plain());
}

static void print_level(const fst_tensor_info *leaves, size_t first, size_t last, size_t start,
                        int depth) {
    while (first < last) {
        const fst_tensor_info *info = &leaves[first];
        size_t end = part_end(info, start);
        if (end == info->name_size || depth >= DEPTH_MAX) {
            print_leaf(info, start, 2 * depth);
            first++;
            continue;
        }
        size_t next = group_end(leaves, first, last, start, end);
        uint64_t bytes = 0;
        char size[16];
        for (size_t i = first; i < next; i++) bytes += leaves[i].size_bytes;
        printf("%*s%s", 2 * depth, "", cli_bold());
        cli_print_name(info->name + start, end - start);
        printf("%s  %s%s, %zu tensor%s%s\n", cli_plain(), cli_dim(), cli_size_text(bytes, size),
               next - first, next - first == 1 ? "" : "s", cli_plain());
        print_level(leaves, first, next, end + 1, depth + 1);
        first = next;
    }
}

/// Digits compare as numbers, so that layer 10 follows layer 9.
static int compare_names(const void *a, const void *b) {
    return strverscmp(((const fst_tensor_info *)a)->name, ((const fst_tensor_info *)b)->name);
}

void inspect_print_tree(inspect_list *list) {
    qsort(list->infos, list->count, sizeof *list->infos, compare_names);
    print_level(list->infos, 0, list->count, 0, 0);
}
