// SPDX-License-Identifier: Apache-2.0
/// edit: other metadata, other names.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "rewrite.h"

#define CHANGE_COUNT_MAX 256

typedef struct edit_request {
    fst_metadata_entry set[CHANGE_COUNT_MAX];
    const char *unset[CHANGE_COUNT_MAX];
    tensor_rename renames[CHANGE_COUNT_MAX];
    size_t set_count, unset_count;
    bool clear;
    rewrite_plan plan;
} edit_request;

static int take_pair(char *text, char **left, char **right) {
    char *equal = strchr(text, '=');
    if (equal == NULL || equal == text) return cli_usage("edit", "expected A=B, not '%s'", text);
    *equal = '\0';
    *left = text;
    *right = equal + 1;
    return EXIT_GOOD;
}

static int take(void *context, int key, cli_value value) {
    edit_request *request = context;
    char *left = NULL, *right = NULL;
    char *text = (char *)(uintptr_t)value.text; // a word of argv, which is ours
    int code = EXIT_GOOD;
    if (request->set_count == CHANGE_COUNT_MAX || request->unset_count == CHANGE_COUNT_MAX ||
        request->plan.rename_count == CHANGE_COUNT_MAX)
        return cli_usage("edit", "too many changes");
    switch (key) {
    case 's':
        code = take_pair(text, &left, &right);
        if (code == EXIT_GOOD && left != NULL && right != NULL)
            request->set[request->set_count++] = (fst_metadata_entry){
                .key = left, .key_size = strlen(left), .value = right, .value_size = strlen(right)};
        return code;
    case 'r':
        code = take_pair(text, &left, &right);
        if (code != EXIT_GOOD || left == NULL || right == NULL) return code;
        if ((strchr(left, '*') == NULL) != (strchr(right, '*') == NULL) ||
            strchr(left, '*') != strrchr(left, '*') || strchr(right, '*') != strrchr(right, '*'))
            return cli_usage("edit", "--rename takes names with one '*' each, or without");
        request->renames[request->plan.rename_count++] = (tensor_rename){left, right};
        return EXIT_GOOD;
    case 'u': request->unset[request->unset_count++] = value.text; break;
    case 'c': request->clear = true; break;
    case 'q': request->plan.save.promise = FST_SAVE_QUICK; break;
    default: request->plan.dry_run = true;
    }
    return EXIT_GOOD;
}

static bool has_key(const fst_metadata_entry *entry, const char *key, size_t size) {
    return entry->key_size == size && memcmp(entry->key, key, size) == 0;
}

/// What the new file's metadata is: the old, without what goes, with what is set at its place or
/// at the end. To be freed; NULL without memory.
static fst_metadata_entry *change_metadata(const edit_request *request, const fst_model *model,
                                           size_t *count) {
    size_t own_count, kept = 0;
    fst_metadata_entry *own = cli_model_metadata(model, &own_count);
    if (own == NULL) return NULL;
    fst_metadata_entry *entries = calloc(own_count + request->set_count + 1, sizeof *entries);
    for (size_t i = 0; entries != NULL && !request->clear && i < own_count; i++) {
        bool goes = false;
        for (size_t u = 0; u < request->unset_count; u++)
            goes = goes || has_key(&own[i], request->unset[u], strlen(request->unset[u]));
        if (!goes) entries[kept++] = own[i];
    }
    for (size_t s = 0; entries != NULL && s < request->set_count; s++) {
        const fst_metadata_entry *set = &request->set[s];
        size_t at = 0;
        while (at < kept && !has_key(&entries[at], set->key, set->key_size)) at++;
        entries[at] = *set;
        if (at == kept) kept++;
    }
    free(own);
    *count = kept;
    return entries;
}

static int edit_model(edit_request *request, const char *source) {
    fst_model *model;
    fst_error error;
    if (fst_model_open(source, NULL, &model, &error) != FST_OK) return cli_fail(&error);
    int code;
    fst_metadata_entry *entries = change_metadata(request, model, &request->plan.metadata_count);
    if (fst_model_file_count(model) != 1) {
        code = cli_usage("edit", "'%s' is a set of files: edit one of them", source);
    } else if (entries == NULL) {
        code = cli_no_memory();
    } else {
        request->plan.metadata = entries;
        request->plan.renames = request->renames;
        code = cli_rewrite(model, &request->plan);
    }
    free(entries);
    fst_model_close(model);
    return code;
}

static int run(int argc, char **argv) {
    (void)argc;
    edit_request request = {
        .plan.save = {.struct_size = sizeof request.plan.save, .promise = FST_SAVE_DURABLE}};
    cli_operands operands;
    int code = cli_parse(&edit_command, argv, &request, &operands);
    if (code != EXIT_GOOD || operands.is_answered) return code;
    if (request.set_count + request.unset_count + request.plan.rename_count == 0 && !request.clear)
        return cli_usage("edit", "nothing to change: --set, --unset, --clear or --rename");
    request.plan.target = operands.words[operands.count - 1];
    return edit_model(&request, operands.words[0]);
}

static const cli_option options[] = {
    {'s', "set", "KEY=VALUE", NULL, "an entry of __metadata__; may come several times"},
    {'u', "unset", "KEY", NULL, "an entry of __metadata__ that goes; may come several times"},
    {'c', "clear", NULL, NULL, "all entries of __metadata__ go (but for those that are set)"},
    {'r', "rename", "OLD=NEW", NULL,
     "a tensor's new name; one '*' in both stands for any text: 'model.*=*'"},
    {'q', "quick", NULL, NULL, "do not wait until the bytes are on the device"},
    {'d', "dry-run", NULL, NULL, "say what would be written, write nothing"},
    {0},
};

const cli_command edit_command = {
    .name = "edit",
    .operands = "FILE [TARGET]",
    .summary = "change metadata and names of tensors",
    .about = "Writes FILE anew with other metadata or other names of tensors; without TARGET, the\n"
             "new file takes its place, in one step.",
    .examples = "  fastsafetensors edit --set license=mit --unset training_note model.safetensors\n"
                "  fastsafetensors edit --rename 'model.*=*' old.safetensors new.safetensors\n",
    .options = options,
    .operand_min = 1,
    .operand_max = 2,
    .has_json = true,
    .has_progress = true,
    .take = take,
    .run = run,
};
