// SPDX-License-Identifier: Apache-2.0
/// edit: changes metadata and renames tensors.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "metadata.h"
#include "rewrite.h"
#include "standard_input.h"

#define CHANGE_COUNT_MAX 256

typedef struct edit_request {
    fst_metadata_entry changes[CHANGE_COUNT_MAX]; ///< in the form of fst_edit_options
    tensor_rename renames[CHANGE_COUNT_MAX];
    size_t change_count, rename_count;
    bool clear;
    rewrite_plan plan; ///< for streaming
} edit_request;

static int read_pair_value(char *text, char **left, char **right) {
    char *equal = strchr(text, '=');
    if (equal == NULL || equal == text) return cli_usage("edit", "expected A=B, not '%s'", text);
    *equal = '\0';
    *left = text;
    *right = equal + 1;
    return EXIT_OK;
}

static int take(void *context, int key, cli_value value) {
    edit_request *request = context;
    char *left = NULL, *right = NULL;
    char *text = (char *)(uintptr_t)value.text; // a word of argv, which may be changed
    int code = EXIT_OK;
    if (request->change_count == CHANGE_COUNT_MAX || request->rename_count == CHANGE_COUNT_MAX)
        return cli_usage("edit", "too many changes");
    switch (key) {
    case 's':
        code = read_pair_value(text, &left, &right);
        if (code == EXIT_OK && left != NULL && right != NULL)
            request->changes[request->change_count++] = (fst_metadata_entry){
                .key = left, .key_size = strlen(left), .value = right, .value_size = strlen(right)};
        return code;
    case 'u':
        request->changes[request->change_count++] =
            (fst_metadata_entry){.key = value.text, .key_size = strlen(value.text)};
        return EXIT_OK;
    case 'r':
        code = read_pair_value(text, &left, &right);
        if (code != EXIT_OK || left == NULL || right == NULL) return code;
        if ((strchr(left, '*') == NULL) != (strchr(right, '*') == NULL) ||
            strchr(left, '*') != strrchr(left, '*') || strchr(right, '*') != strrchr(right, '*'))
            return cli_usage("edit", "--rename needs one '*' in both names, or in neither");
        if (*right == '\0')
            return cli_usage("edit", "--rename: the new name of '%s' is empty", left);
        request->renames[request->rename_count++] = (tensor_rename){left, right};
        return EXIT_OK;
    case 'c': request->clear = true; break;
    case 'm': cli_plan_manifest(&request->plan, value.word); break;
    case 'q': request->plan.save.promise = FST_SAVE_QUICK; break;
    default: request->plan.dry_run = true;
    }
    return EXIT_OK;
}

static size_t find_key(const fst_metadata_entry *entries, size_t count,
                       const fst_metadata_entry *wanted) {
    size_t at = 0;
    while (at < count && (entries[at].key_size != wanted->key_size ||
                          memcmp(entries[at].key, wanted->key, wanted->key_size) != 0))
        at++;
    return at;
}

/// The new metadata for streaming: the old entries with the changes. The caller frees it.
static fst_metadata_entry *change_metadata(const edit_request *request, const fst_model *model,
                                           size_t *count) {
    fst_metadata_entry *own = cli_model_metadata(model, count);
    if (request->clear) *count = 0;
    fst_metadata_entry *entries = calloc(*count + request->change_count + 1, sizeof *entries);
    if (own != NULL && entries != NULL) memcpy(entries, own, *count * sizeof *entries);
    for (size_t i = 0; own != NULL && entries != NULL && i < request->change_count; i++) {
        const fst_metadata_entry *change = &request->changes[i];
        size_t at = find_key(entries, *count, change);
        bool is_new = at == *count;
        if (change->value != NULL) {
            entries[at] = *change;
            *count += is_new;
        } else if (!is_new) {
            memmove(&entries[at], &entries[at + 1], (--*count - at) * sizeof *entries);
        }
    }
    free(own);
    return entries;
}

/// Deleting a missing key is not an error, which helps scripts, but is reported.
static void print_absent_keys(const edit_request *request, const fst_model *model) {
    size_t count;
    fst_metadata_entry *own = cli_model_metadata(model, &count);
    for (size_t i = 0; own != NULL && !cli_wants_json() && i < request->change_count; i++)
        if (request->changes[i].value == NULL &&
            find_key(own, count, &request->changes[i]) == count)
            cli_print_note("warning: the metadata has no key '%s'", request->changes[i].key);
    free(own);
}

/// The alignment of a file with padding tensors; else 0.
static uint64_t own_alignment(const fst_model *model) {
    static const char key[] = "__padding__";
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    fst_metadata_entry entry;
    uint64_t alignment = 0;
    if (fst_model_file_info(model, 0, &info, NULL) != FST_OK || info.padding_count == 0) return 0;
    for (size_t i = 0; i < info.metadata_count; i++)
        if (fst_model_metadata(model, 0, i, &entry, NULL) == FST_OK &&
            entry.key_size == sizeof key - 1 && memcmp(entry.key, key, sizeof key - 1) == 0 &&
            (!cli_parse_count(entry.value, 1 << 20, &alignment) ||
             (alignment & (alignment - 1)) != 0))
            alignment = 0;
    return alignment;
}

/// Pipes are read and written sequentially.
static int stream(edit_request *request, fst_model *model) {
    fst_metadata_entry *entries = change_metadata(request, model, &request->plan.metadata_count);
    if (entries == NULL) return cli_no_memory();
    request->plan.metadata = entries;
    request->plan.save.alignment_bytes = own_alignment(model);
    int code = cli_rewrite(model, &request->plan);
    free(entries);
    return code;
}

static void print_done(const edit_request *request, const char *target,
                       const fst_save_stats *stats) {
    char size[16], written[16];
    double seconds = (double)stats->total_ns / 1e9;
    uint64_t bytes = stats->bytes_written + stats->bytes_copied;
    const char *promise = request->plan.save.promise == FST_SAVE_DURABLE ? "durable" : "quick";
    if (cli_wants_json()) {
        printf("{\"target\": ");
        cli_print_json(target, strlen(target));
        printf(", \"tensors\": %zu, \"bytes\": %" PRIu64 ", \"bytes_shared\": %" PRIu64
               ", \"bytes_copied\": %" PRIu64 ", \"seconds\": %.6f, \"engine\": \"%s\", "
               "\"promise\": \"%s\"}\n",
               stats->tensor_count, stats->bytes_total, stats->bytes_shared, stats->bytes_copied,
               seconds, stats->engine, promise);
        return;
    }
    cli_print_path(target);
    printf(": %zu tensor%s, %s, %s of it written, %.3f s (%s%s%s, %s)\n", stats->tensor_count,
           cli_plural(stats->tensor_count), cli_size_text(stats->bytes_total, size),
           cli_size_text(bytes, written), seconds, stats->engine,
           stats->reason[0] == '\0' ? "" : ": ", stats->reason, promise);
}

static int edit_header(edit_request *request, const char *source, const fst_tensor_rename *renames,
                       size_t count) {
    fst_tensor_rename *changed = calloc(count + 1, sizeof *changed);
    if (changed == NULL) return cli_no_memory();
    fst_edit_options options = {.struct_size = sizeof options,
                                .promise = request->plan.save.promise,
                                .clear_metadata = request->clear,
                                .metadata = request->changes,
                                .metadata_count = request->change_count,
                                .renames = changed,
                                .progress = cli_save_begin(),
                                .manifest = request->plan.save.manifest,
                                .digest = request->plan.save.digest};
    fst_save_stats stats = FST_STRUCT_INIT(fst_save_stats);
    fst_error error;
    for (size_t i = 0; i < count; i++)
        if (renames[i].to != NULL) changed[options.rename_count++] = renames[i];
    fst_status status = fst_header_edit(source, request->plan.target, &options, &stats, &error);
    cli_progress_end(status == FST_OK);
    free(changed);
    if (status != FST_OK) return cli_fail(&error);
    print_done(request, request->plan.target == NULL ? source : request->plan.target, &stats);
    return EXIT_OK;
}

static int edit_model(edit_request *request, const char *source) {
    fst_model *model;
    fst_error error;
    if (fst_model_open(source, NULL, &model, &error) != FST_OK) return cli_fail(&error);
    const char *target = request->plan.target;
    size_t count = fst_model_tensor_count(model);
    fst_tensor_rename *renames = NULL;
    int code = cli_rename_tensors(model, request->renames, request->rename_count, &renames);
    request->plan.renames = renames;
    if (code == EXIT_OK && fst_model_file_count(model) != 1)
        code = cli_refuse(EXIT_UNREADABLE, fst_status_name(FST_E_UNSUPPORTED),
                          "'%s' is a sharded model. Edit one of its files", source);
    if (code == EXIT_OK) print_absent_keys(request, model);
    bool is_stream = request->plan.dry_run || (target != NULL && cli_is_output(target));
    if (request->plan.dry_run && target == NULL) request->plan.target = source;
    if (code == EXIT_OK && request->plan.dry_run)
        code = cli_check_file_target(request->plan.target, true);
    if (code == EXIT_OK)
        code = is_stream ? stream(request, model) : edit_header(request, source, renames, count);
    cli_renames_free(renames, count);
    fst_model_close(model);
    return code;
}

/// Refuses to set and delete the same entry: neither order can be meant.
static int check_changes(const edit_request *request) {
    const fst_metadata_entry *changes = request->changes;
    for (size_t i = 0; i < request->change_count; i++)
        for (size_t j = 0; j < i; j++)
            if ((changes[i].value == NULL) != (changes[j].value == NULL) &&
                strcmp(changes[i].key, changes[j].key) == 0)
                return cli_usage("edit", "--set and --unset cannot be combined for the key '%s'",
                                 changes[i].key);
    return EXIT_OK;
}

static int run(const cli_command *command, char **argv) {
    edit_request request = {
        .plan.save = {.struct_size = sizeof request.plan.save, .promise = FST_SAVE_DURABLE}};
    cli_operands operands;
    int code = cli_parse(command, argv, &request, &operands);
    if (code != EXIT_OK || operands.is_answered) return code;
    if (request.change_count + request.rename_count == 0 && !request.clear)
        return cli_usage("edit", "nothing to change. Use --set, --unset, --clear or --rename");
    if ((code = check_changes(&request)) != EXIT_OK) return code;
    bool has_stream = operands.count > 1 && cli_is_output(operands.words[1]);
    if (cli_is_address(operands.words[0]) && !has_stream)
        return cli_refuse_address("edit", operands.words[0]);
    if (operands.count > 1) request.plan.target = operands.words[1];
    if (request.plan.target != NULL && *request.plan.target == '\0')
        return cli_usage("edit", "TARGET is empty");
    if (operands.count == 1 && cli_is_input(operands.words[0]))
        return cli_usage("edit",
                         "standard input cannot be replaced. Give a TARGET (- is standard output)");
    if (request.plan.save.manifest != NULL && (request.plan.dry_run || has_stream))
        return cli_usage("edit", "--manifest cannot be combined with standard output or --dry-run");
    // Keeps the order of tensors, like fst_header_edit().
    request.plan.save.order = FST_SAVE_ORDER_GIVEN;
    return edit_model(&request, operands.words[0]);
}

static const cli_option options[] = {
    {'s', "set", "KEY=VALUE", NULL, "set an entry of __metadata__; repeatable", 0},
    {'u', "unset", "KEY", NULL, "delete an entry of __metadata__; repeatable", 0},
    {'c', "clear", NULL, NULL, "delete all entries of __metadata__ that --set does not name", 0},
    {'r', "rename", "OLD=NEW", NULL,
     "rename tensors; one '*' in both stands for any text: 'model.*=*'", 0},
    CLI_MANIFEST_OPTION,
    CLI_QUICK_OPTION,
    CLI_DRY_RUN_OPTION,
    {0},
};

const cli_command edit_command = {
    .name = "edit",
    .operands = "FILE [TARGET]",
    .summary = "change metadata and names of tensors",
    .about =
        "Change metadata or tensor names without loading a tensor. The result is TARGET, or\n"
        "atomically replaces FILE. If the file system can share blocks between files (btrfs,\n"
        "XFS), only the header is written; otherwise the kernel copies the rest. An old\n"
        "manifest and .digest file of the result are deleted. Use - for standard input or output.",
    .examples = "  fastsafetensors edit --set license=mit --unset training_note model.safetensors\n"
                "  fastsafetensors edit --rename 'model.*=*' old.safetensors new.safetensors\n",
    .options = options,
    .operand_min = 1,
    .operand_max = 2,
    .inputs = INPUTS_FIRST,
    .has_json = true,
    .has_progress = true,
    .take = take,
    .run = run,
};
