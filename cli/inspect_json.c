// SPDX-License-Identifier: Apache-2.0
/// inspect --json: one object for programs.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "inspect.h"

static void print_metadata(const fst_model *model, size_t file, size_t count) {
    printf("{");
    for (size_t i = 0; i < count; i++) {
        fst_metadata_entry entry;
        if (fst_model_metadata(model, file, i, &entry, NULL) != FST_OK) continue;
        printf("%s", i > 0 ? ", " : "");
        cli_print_json(entry.key, entry.key_size);
        printf(": ");
        cli_print_json(entry.value, entry.value_size);
    }
    printf("}");
}

static void print_files(const fst_model *model) {
    printf("{\"files\": [");
    for (size_t i = 0; i < fst_model_file_count(model); i++) {
        fst_file_info info = inspect_file(model, i);
        printf("%s\n  {\"path\": ", i > 0 ? "," : "");
        cli_print_json(info.path, strlen(info.path));
        printf(", \"bytes\": %" PRIu64 ", \"header_bytes\": %" PRIu64
               ", \"tensors\": %zu, \"padding_tensors\": %zu, \"metadata\": ",
               info.size_bytes, info.header_bytes, info.tensor_count - info.padding_count,
               info.padding_count);
        if (info.has_metadata)
            print_metadata(model, i, info.metadata_count);
        else
            printf("null");
        if (info.compressed_count > 0)
            printf(", \"stored_bytes\": %" PRIu64 ", \"compressed\": %zu, \"coder\": \"zstd\"",
                   info.stored_bytes, info.compressed_count);
        printf("}");
    }
}

static void print_tensors(const inspect_list *list) {
    printf("],\n \"tensors\": [");
    for (size_t i = 0; i < list->count; i++) {
        fst_tensor_info info = list->infos[i];
        printf("%s\n  {\"name\": ", i > 0 ? "," : "");
        cli_print_json(info.name, info.name_size);
        printf(", \"dtype\": \"%s\", \"shape\": [", fst_dtype_name(info.dtype));
        for (uint32_t d = 0; d < info.rank; d++)
            printf("%s%" PRIu64, d > 0 ? ", " : "", info.shape[d]);
        printf("], \"bytes\": %" PRIu64 ", \"offset\": %" PRIu64 ", \"file\": %" PRIu32,
               info.size_bytes, info.file_offset, info.file_index);
        if (info.stored_bytes != info.size_bytes)
            printf(", \"stored_bytes\": %" PRIu64, info.stored_bytes);
        printf("}");
    }
}

void inspect_print_json(const inspect_list *list) {
    inspect_totals totals;
    inspect_count(list, &totals);
    print_files(list->model);
    print_tensors(list);
    printf("],\n \"totals\": {\"tensors\": %zu, \"bytes\": %" PRIu64 ", \"elements\": %" PRIu64
           ", \"dtypes\": {",
           list->count, totals.all_bytes, totals.elements);
    const char *comma = "";
    for (int i = 0; i < FST_DTYPE_COUNT; i++) {
        if (totals.count[i] == 0) continue;
        printf("%s\"%s\": {\"tensors\": %zu, \"bytes\": %" PRIu64 "}", comma,
               fst_dtype_name((fst_dtype)i), totals.count[i], totals.bytes[i]);
        comma = ", ";
    }
    printf("}}}\n");
}
