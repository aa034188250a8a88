// SPDX-License-Identifier: Apache-2.0
/// inspect: a model's tensors as a table, as JSON, or as a tree of modules.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"
#include "inspect.h"

/// The name column is at most this wide. A longer name moves the rest of its row.
#define NAME_COLUMNS_MAX 72
/// Width of the other columns.
#define OTHER_COLUMNS 70
/// Longer metadata values are cut, unless --wide is given; their size is printed.
#define VALUE_COLUMNS 160

typedef struct inspect_request {
    inspect_choice choice;
    bool tree, wide, lenient;
} inspect_request;

static void print_totals(const inspect_list *list) {
    inspect_totals totals;
    char size[16];
    inspect_count(list, &totals);
    size_t all = fst_model_tensor_count(list->model);
    printf("\n%s%zu", cli_bold(), list->count);
    if (list->count < all) printf(" of %zu", all);
    printf(" tensor%s, %s, %" PRIu64 " elements%s\n", cli_plural(all),
           cli_size_text(totals.all_bytes, size), totals.elements, cli_plain());
    for (int i = 0; i < FST_DTYPE_COUNT; i++)
        if (totals.count[i] > 0)
            printf("  %-11s %8zu tensor%s%s  %10s\n", fst_dtype_name((fst_dtype)i), totals.count[i],
                   cli_plural(totals.count[i]), totals.count[i] == 1 ? " " : "",
                   cli_size_text(totals.bytes[i], size));
}

static bool has_same_metadata(const fst_model *model, size_t a, size_t b) {
    size_t count = inspect_file(model, a).metadata_count;
    if (inspect_file(model, b).metadata_count != count) return false;
    for (size_t i = 0; i < count; i++) {
        fst_metadata_entry left, right;
        if (fst_model_metadata(model, a, i, &left, NULL) != FST_OK ||
            fst_model_metadata(model, b, i, &right, NULL) != FST_OK ||
            left.key_size != right.key_size || left.value_size != right.value_size ||
            memcmp(left.key, right.key, left.key_size) != 0 ||
            memcmp(left.value, right.value, left.value_size) != 0)
            return false;
    }
    return true;
}

static void print_entries(const fst_model *model, size_t file, bool wide) {
    size_t count = inspect_file(model, file).metadata_count;
    for (size_t i = 0; i < count; i++) {
        fst_metadata_entry entry;
        if (fst_model_metadata(model, file, i, &entry, NULL) != FST_OK) continue;
        printf("  ");
        cli_print_name(entry.key, entry.key_size);
        printf(": ");
        int columns = wide ? INT32_MAX : VALUE_COLUMNS;
        if (cli_print_cut(entry.value, entry.value_size, columns) == columns)
            printf(" (%zu bytes; --wide shows all)", entry.value_size);
        putchar('\n');
    }
}

/// Prints the metadata of each file. A run of files with equal metadata is printed once, because
/// all shards of a model usually have the same.
static void print_metadata(const fst_model *model, bool wide) {
    size_t file_count = fst_model_file_count(model);
    for (size_t file = 0, end; file < file_count; file = end) {
        for (end = file + 1; end < file_count && has_same_metadata(model, file, end);) end++;
        if (inspect_file(model, file).metadata_count == 0) continue;
        printf("\n%smetadata of ", cli_bold());
        if (end - file == file_count && file_count > 1)
            printf("all %zu files", file_count);
        else
            cli_print_path(inspect_file(model, file).path);
        if (end - file < file_count && end - file > 1)
            printf(" and the next %zu file%s", end - file - 1, cli_plural(end - file - 1));
        printf("%s\n", cli_plain());
        print_entries(model, file, wide);
    }
}

static void print_files(const fst_model *model) {
    char size[16], header[16];
    for (size_t i = 0; i < fst_model_file_count(model); i++) {
        fst_file_info info = inspect_file(model, i);
        printf("%s", cli_bold());
        cli_print_path(info.path);
        size_t tensors = info.tensor_count - info.padding_count;
        printf("%s  %s, header %s, %zu tensor%s", cli_plain(), cli_size_text(info.size_bytes, size),
               cli_size_text(info.header_bytes, header), tensors, cli_plural(tensors));
        if (info.padding_count > 0)
            printf(", %zu padding tensor%s", info.padding_count, cli_plural(info.padding_count));
        if (info.compressed_count > 0)
            printf(", %zu compressed (zstd): %s stored, %.2f %%", info.compressed_count,
                   cli_size_text(info.stored_bytes, header),
                   100.0 * (double)info.stored_bytes / (double)info.size_bytes);
        putchar('\n');
    }
}

/// Width of the name column: enough for the longest name, limited by the terminal.
static int name_columns(const inspect_list *list, bool wide, int *limit) {
    int columns = 4, terminal = cli_terminal_columns(STDOUT_FILENO);
    *limit = wide || terminal == 0 ? INT32_MAX : terminal - OTHER_COLUMNS;
    if (*limit < 24) *limit = 24;
    int most = *limit < NAME_COLUMNS_MAX ? *limit : NAME_COLUMNS_MAX;
    for (size_t i = 0; i < list->count && columns < most; i++) {
        int wanted = cli_columns(list->infos[i].name, list->infos[i].name_size);
        if (wanted > columns) columns = wanted > most ? most : wanted;
    }
    return columns;
}

static bool has_compressed(const inspect_list *list) {
    for (size_t i = 0; i < list->count; i++)
        if (list->infos[i].stored_bytes != list->infos[i].size_bytes) return true;
    return false;
}

static void print_stored(const fst_tensor_info *info) {
    if (info->stored_bytes == info->size_bytes)
        printf(" %14s %7s", "plain", "");
    else
        printf(" %14" PRIu64 " %5.1f %%", info->stored_bytes,
               100.0 * (double)info->stored_bytes / (double)info->size_bytes);
}

static void print_table(const inspect_list *list, bool wide) {
    int limit, columns = name_columns(list, wide, &limit);
    bool many_files = fst_model_file_count(list->model) > 1;
    bool is_compressed = has_compressed(list);
    print_files(list->model);
    printf("\n%s%-*s  %-11s  %-22s %14s %16s%s%s%s\n", cli_dim(), columns, "name", "dtype", "shape",
           "bytes", "offset", is_compressed ? "         stored   ratio" : "",
           many_files ? "  file" : "", cli_plain());
    for (size_t i = 0; i < list->count; i++) {
        const fst_tensor_info *info = &list->infos[i];
        char shape[160];
        int used = cli_print_cut(info->name, info->name_size, limit);
        printf("%*s  %-11s  %-22s %14" PRIu64 " %16" PRIu64, used < columns ? columns - used : 0,
               "", fst_dtype_name(info->dtype),
               cli_shape_text(info->shape, info->rank, shape, sizeof shape), info->size_bytes,
               info->file_offset);
        if (is_compressed) print_stored(info);
        if (many_files) printf("  %" PRIu32, info->file_index);
        putchar('\n');
    }
    print_totals(list);
    print_metadata(list->model, wide);
}

static int print_model(const fst_model *model, const inspect_request *request) {
    inspect_list list;
    if (!inspect_list_make(model, &request->choice, &list)) return cli_no_memory();
    int code = EXIT_OK;
    if (list.count == 0 && request->choice.glob_count > 0)
        code = cli_refuse(EXIT_INVALID, "NoMatch", "no tensor name matches");
    else if (cli_wants_json())
        inspect_print_json(&list);
    else if (request->tree)
        inspect_print_tree(&list);
    else
        print_table(&list, request->wide);
    inspect_list_clear(&list);
    return code;
}

static input_part part_of(const void *request) {
    (void)request;
    return INPUT_HEADER;
}

static const char *const orders[] = {"file", "name", "size", "dtype", NULL};

static int take(void *context, int key, cli_value value) {
    inspect_request *request = context;
    switch (key) {
    case 't': request->tree = true; break;
    case 'w': request->wide = true; break;
    case 'l': request->lenient = true; break;
    case 'o': request->choice.order = value.word; break;
    default:
        if (request->choice.glob_count == INSPECT_GLOB_COUNT_MAX)
            return cli_usage("inspect", "too many --select");
        request->choice.globs[request->choice.glob_count++] = value.text;
    }
    return EXIT_OK;
}

static int run(const cli_command *command, char **argv) {
    inspect_request request = {0};
    cli_operands operands;
    int code = cli_parse(command, argv, &request, &operands);
    if (code != EXIT_OK || operands.is_answered) return code;
    if (request.tree && (cli_wants_json() || request.choice.order != INSPECT_BY_FILE))
        return cli_usage("inspect", "--tree cannot be combined with --json or --sort");
    fst_model *model;
    fst_error error;
    fst_open_options options = {.struct_size = sizeof options,
                                .flags = request.lenient ? FST_OPEN_LENIENT : 0};
    if (fst_model_open(operands.words[0], &options, &model, &error) != FST_OK)
        return cli_fail(&error);
    code = print_model(model, &request);
    fst_model_close(model);
    return code;
}

static const cli_option options[] = {
    CLI_SELECT_OPTION,
    {'o', "sort", "ORDER", orders, "sort by ORDER (default: file)", 0},
    {'t', "tree", NULL, NULL, "group by module path, with sizes", 0},
    {'w', "wide", NULL, NULL, "do not shorten names and metadata to the terminal's width", 0},
    CLI_LENIENT_OPTION(0),
    {0},
};

const cli_command inspect_command = {
    .name = "inspect",
    .operands = "PATH",
    .summary = "list tensors, sizes and metadata of a model",
    .about = "List the tensors of a model (name, dtype, shape, bytes, offset in the file), totals\n"
             "per dtype, and metadata. Only headers are read.",
    .examples = "  fastsafetensors inspect model.safetensors\n"
                "  fastsafetensors inspect --sort size --select '*.layers.0.*' folder\n"
                "  fastsafetensors inspect --json model.safetensors | jq .totals\n",
    .options = options,
    .operand_min = 1,
    .operand_max = 1,
    .part = part_of,
    .inputs = INPUTS_FIRST,
    .has_json = true,
    .has_cache = true,
    .take = take,
    .run = run,
};
