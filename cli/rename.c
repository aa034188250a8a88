// SPDX-License-Identifier: Apache-2.0
/// Renames tensors by patterns.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rewrite.h"

/// Applies one pattern. False if it does not match. The caller frees `out`; NULL without memory.
static bool match(const tensor_rename *rename, const fst_tensor_info *info, char **out,
                  size_t *out_size) {
    const char *star = strchr(rename->from, '*'), *new_star = strchr(rename->to, '*');
    size_t before = star == NULL ? strlen(rename->from) : (size_t)(star - rename->from);
    size_t after = star == NULL ? 0 : strlen(star + 1);
    if (info->name_size < before + after || (star == NULL && info->name_size != before) ||
        memcmp(info->name, rename->from, before) != 0 ||
        (star != NULL && memcmp(info->name + info->name_size - after, star + 1, after) != 0))
        return false;
    size_t kept = star == NULL ? 0 : info->name_size - before - after;
    size_t head = new_star == NULL ? strlen(rename->to) : (size_t)(new_star - rename->to);
    const char *tail = new_star == NULL ? "" : new_star + 1;
    *out_size = head + kept + strlen(tail);
    *out = malloc(*out_size + 1);
    if (*out == NULL) return true;
    memcpy(*out, rename->to, head);
    memcpy(*out + head, info->name + before, kept);
    memcpy(*out + head + kept, tail, strlen(tail) + 1);
    return true;
}

static int refuse_unmatched(const tensor_rename *rename, bool is_first) {
    return cli_refuse(EXIT_INVALID, "NoMatch", "no tensor name matches '%s'%s", rename->from,
                      is_first ? "" : ", except those that an earlier --rename matches");
}

int cli_rename_tensors(const fst_model *model, const tensor_rename *renames, size_t rename_count,
                       fst_tensor_rename **out) {
    size_t count = fst_model_tensor_count(model);
    fst_tensor_rename *names = calloc(count + 1, sizeof *names);
    bool *is_used = calloc(rename_count + 1, sizeof *is_used);
    *out = names;
    if (names == NULL || is_used == NULL) {
        free(is_used);
        return cli_no_memory();
    }
    int code = EXIT_OK;
    for (size_t i = 0; i < count && code == EXIT_OK; i++) {
        fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
        char *name = NULL;
        if (fst_model_tensor_info(model, i, &info, NULL) != FST_OK) continue;
        for (size_t r = 0; r < rename_count && names[i].to == NULL && code == EXIT_OK; r++) {
            if (!match(&renames[r], &info, &name, &names[i].to_size)) continue;
            is_used[r] = true;
            names[i].from = info.name;
            names[i].from_size = info.name_size;
            names[i].to = name;
            if (name == NULL) code = cli_no_memory();
        }
    }
    for (size_t r = 0; r < rename_count && code == EXIT_OK; r++)
        if (!is_used[r]) code = refuse_unmatched(&renames[r], r == 0);
    free(is_used);
    return code;
}

void cli_renames_free(fst_tensor_rename *names, size_t count) {
    for (size_t i = 0; names != NULL && i < count; i++) free((void *)(uintptr_t)names[i].to);
    free(names);
}
