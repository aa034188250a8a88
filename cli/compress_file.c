// SPDX-License-Identifier: Apache-2.0
/// Compresses or decompresses one file, keeping its exact bytes including the header.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "rewrite.h"

bool cli_is_compress_only(const rewrite_plan *plan, const char *source) {
    struct stat info;
    size_t size = strlen(source);
    bool is_index = size > 5 && strcmp(source + size - 5, ".json") == 0;
    return plan->save.compress != FST_COMPRESS_NONE && !plan->convert && !plan->dry_run &&
           plan->glob_count == 0 && plan->save.alignment_bytes == 0 &&
           plan->save.order == FST_SAVE_ORDER_REFERENCE &&
           plan->save.engine == FST_SAVE_ENGINE_AUTO && !is_index && stat(source, &info) == 0 &&
           S_ISREG(info.st_mode);
}

static void print_done(uint64_t bytes, const rewrite_plan *plan, bool decompress,
                       const fst_save_stats *stats) {
    char before[16], after[16];
    double seconds = (double)stats->total_ns / 1e9;
    if (cli_wants_json()) {
        printf("{\"target\": ");
        cli_print_json(plan->target, strlen(plan->target));
        printf(", \"tensors\": %zu, \"bytes\": %" PRIu64 ", \"files\": 1, \"converted\": 0"
               ", \"source_bytes\": %" PRIu64 ", \"seconds\": %.6f, \"engine\": \"%s\""
               ", \"promise\": \"%s\"}\n",
               stats->tensor_count, stats->bytes_total, bytes, seconds, stats->engine,
               plan->save.promise == FST_SAVE_DURABLE ? "durable" : "quick");
        return;
    }
    cli_print_path(plan->target);
    printf(": %zu tensor%s, %s %s to %s (%.2f %%), %.2f s\n", stats->tensor_count,
           cli_plural(stats->tensor_count), cli_size_text(bytes, before),
           decompress ? "decompressed" : "compressed", cli_size_text(stats->bytes_total, after),
           bytes == 0 ? 0.0 : 100.0 * (double)stats->bytes_total / (double)bytes, seconds);
}

int cli_pack(const char *source, const rewrite_plan *plan, bool decompress) {
    fst_pack_options options = {.struct_size = sizeof options,
                                .promise = plan->save.promise,
                                .compress = plan->save.compress,
                                .progress = cli_save_begin(),
                                .manifest = plan->save.manifest,
                                .digest = plan->save.digest};
    fst_save_stats stats = {.struct_size = sizeof stats};
    fst_error error;
    struct stat info;
    uint64_t before = stat(source, &info) == 0 ? (uint64_t)info.st_size : 0;
    fst_status status = decompress
                            ? fst_file_decompress(source, plan->target, &options, &stats, &error)
                            : fst_file_compress(source, plan->target, &options, &stats, &error);
    cli_progress_end(status == FST_OK);
    if (status != FST_OK) return cli_fail(&error);
    print_done(before, plan, decompress, &stats);
    return EXIT_OK;
}
