// SPDX-License-Identifier: Apache-2.0
/// inspect: a model's tensors as a table, as JSON, or as a tree of modules.
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "inspect.h"

/// Longer names push the other columns, shorter ones line them up.
#define NAME_COLUMNS_MAX 72

static void print_help(void) {
    printf("usage: fastsafetensors inspect [--json | --tree] [--lenient] PATH\n\n"
           "Lists the tensors of a model: name, dtype, shape, bytes, offset in the file; totals\n"
           "per dtype; metadata. Only headers are read.\n\n"
           "  --json      for programs: one object with files, tensors and totals\n"
           "  --tree      grouped by module path, with sizes\n"
           "  --lenient   accept bytes after the last tensor\n");
}

static void print_totals(const fst_model *model) {
    inspect_totals totals;
    char size[16];
    inspect_count(model, &totals);
    printf("\n%s%zu tensors, %s, %" PRIu64 " elements%s\n", cli_bold(),
           fst_model_tensor_count(model), cli_size_text(totals.all_bytes, size), totals.elements,
           cli_plain());
    for (int i = 0; i < FST_DTYPE_COUNT; i++)
        if (totals.count[i] > 0)
            printf("  %-11s %8zu tensors  %10s\n", fst_dtype_name((fst_dtype)i), totals.count[i],
                   cli_size_text(totals.bytes[i], size));
}

static void print_metadata(const fst_model *model) {
    for (size_t file = 0; file < fst_model_file_count(model); file++) {
        fst_file_info info = inspect_file(model, file);
        if (info.metadata_count == 0) continue;
        printf("\n%smetadata of %s%s\n", cli_bold(), info.path, cli_plain());
        for (size_t i = 0; i < info.metadata_count; i++) {
            fst_metadata_entry entry;
            if (fst_model_metadata(model, file, i, &entry, NULL) != FST_OK) continue;
            printf("  ");
            cli_print_name(entry.key, entry.key_size);
            printf(": ");
            cli_print_name(entry.value, entry.value_size);
            putchar('\n');
        }
    }
}

static void print_files(const fst_model *model) {
    char size[16], header[16];
    for (size_t i = 0; i < fst_model_file_count(model); i++) {
        fst_file_info info = inspect_file(model, i);
        printf("%s%s%s  %s, header %s, %zu tensors\n", cli_bold(), info.path, cli_plain(),
               cli_size_text(info.size_bytes, size), cli_size_text(info.header_bytes, header),
               info.tensor_count);
    }
}

static int name_columns(const fst_model *model) {
    int columns = 4;
    for (size_t i = 0; i < fst_model_tensor_count(model) && columns < NAME_COLUMNS_MAX; i++) {
        fst_tensor_info info = inspect_tensor(model, i);
        int wanted = cli_columns(info.name, info.name_size);
        if (wanted > columns) columns = wanted > NAME_COLUMNS_MAX ? NAME_COLUMNS_MAX : wanted;
    }
    return columns;
}

static void print_table(const fst_model *model) {
    int columns = name_columns(model);
    bool many_files = fst_model_file_count(model) > 1;
    print_files(model);
    printf("\n%s%-*s  %-11s  %-22s %14s %16s%s%s\n", cli_dim(), columns, "name", "dtype", "shape",
           "bytes", "offset", many_files ? "  file" : "", cli_plain());
    for (size_t i = 0; i < fst_model_tensor_count(model); i++) {
        fst_tensor_info info = inspect_tensor(model, i);
        char shape[160];
        int used = cli_print_name(info.name, info.name_size);
        printf("%*s  %-11s  %-22s %14" PRIu64 " %16" PRIu64, used < columns ? columns - used : 0,
               "", fst_dtype_name(info.dtype),
               cli_shape_text(info.shape, info.rank, shape, sizeof shape), info.size_bytes,
               info.file_offset);
        if (many_files) printf("  %" PRIu32, info.file_index);
        putchar('\n');
    }
    print_totals(model);
    print_metadata(model);
}

int cmd_inspect(int argc, char **argv) {
    static const struct option options[] = {
        {"json", no_argument, NULL, 'j'},
        {"tree", no_argument, NULL, 't'},
        {"lenient", no_argument, NULL, 'l'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    bool json = false, tree = false;
    fst_open_options open_options = {.struct_size = sizeof open_options};
    for (int option; (option = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        switch (option) {
        case 'j': json = true; break;
        case 't': tree = true; break;
        case 'l': open_options.flags |= FST_OPEN_LENIENT; break;
        case 'h': print_help(); return EXIT_GOOD;
        default: return cli_usage("inspect", "wrong option");
        }
    }
    if (optind + 1 != argc) return cli_usage("inspect", "expected one PATH");
    if (json && tree) return cli_usage("inspect", "--json and --tree exclude each other");
    fst_model *model;
    fst_error error;
    if (fst_model_open(argv[optind], &open_options, &model, &error) != FST_OK)
        return cli_fail(&error);
    int code = EXIT_GOOD;
    if (json)
        inspect_print_json(model);
    else if (tree)
        code = inspect_print_tree(model);
    else
        print_table(model);
    fst_model_close(model);
    return code;
}
