// SPDX-License-Identifier: Apache-2.0
/// Makes and checks manifests with the library, and prints results as text or JSON.
#include "manifest_commands.h"

#include <inttypes.h>
#include <limits.h>
#include <string.h>

static fst_digest digest_of(const char *algorithm) {
    for (int digest = 0; digest < FST_DIGEST_XXH3_64; digest++)
        if (strcmp(algorithm, fst_digest_name((fst_digest)digest)) == 0) return (fst_digest)digest;
    return FST_DIGEST_XXH3_128; // "xxh3"
}

int manifest_make(const char *path, const manifest_request *request) {
    fst_manifest_options options = FST_STRUCT_INIT(fst_manifest_options);
    fst_manifest_stats stats = FST_STRUCT_INIT(fst_manifest_stats);
    fst_error error;
    char written[PATH_MAX];
    options.written_path = written;
    options.written_path_size = sizeof written;
    options.digest = request->sums ? FST_DIGEST_SHA256 : digest_of(request->algorithm);
    options.chunk_bytes = (uint32_t)request->chunk_bytes;
    options.keep = request->keep;
    options.flags = request->tensors ? FST_MANIFEST_TENSORS : 0;
    if (request->sums) options.flags |= FST_MANIFEST_SUMS;
    options.progress = cli_progress_begin();
    fst_status status = fst_manifest_write(path, request->target, &options, &stats, &error);
    cli_progress_end(status == FST_OK);
    if (status != FST_OK) return cli_fail(&error);
    double seconds = (double)stats.total_ns / 1e9;
    char size[16];
    if (cli_wants_json())
        printf("{\"algorithm\": \"%s\", \"files\": %" PRIu64 ", \"files_kept\": %" PRIu64
               ", \"bytes_read\": %" PRIu64 ", \"bytes_hashed\": %" PRIu64 ", \"seconds\": %.6f",
               fst_digest_name(options.digest), stats.file_count, stats.files_kept,
               stats.bytes_read, stats.bytes_hashed, seconds);
    else
        printf("%s: %" PRIu64 " file%s, %s read in %.2f s, %" PRIu64 " reused",
               fst_digest_name(options.digest), stats.file_count, cli_plural(stats.file_count),
               cli_size_text(stats.bytes_read, size), seconds, stats.files_kept);
    cli_print_written(written);
    return EXIT_OK;
}

typedef struct difference_list {
    const char *path;
    uint64_t count, unreadable; ///< unreadable: of files that are there and cannot be read
} difference_list;

/// Begins the answer in JSON.
static void begin_answer(const char *path) {
    printf("{\"path\": ");
    cli_print_json(cli_display_path(path), strlen(cli_display_path(path)));
    printf(", \"errors\": [");
}

static void report_difference(void *context, const fst_error *difference) {
    difference_list *list = context;
    if (cli_wants_json()) {
        if (list->count == 0) begin_answer(list->path);
        printf("%s", list->count == 0 ? "" : ", ");
        cli_print_error_json(difference);
    } else {
        char message[sizeof difference->message];
        cli_progress_end(false); // end its line; it is drawn again
        snprintf(message, sizeof message, "%s", difference->message);
        printf("%s\n", message);
    }
    list->count++;
    if (difference->status != FST_E_NOT_FOUND && cli_code_of(difference->status) == EXIT_UNREADABLE)
        list->unreadable++;
}

/// The exit code of a check: files that could not be read are not known to be invalid.
static int code_of_check(fst_status status, const difference_list *list) {
    if (list->count > 0 && list->unreadable == list->count) return EXIT_UNREADABLE;
    return cli_code_of(status);
}

/// The result of a finished check.
typedef struct check_answer {
    const char *words;
    fst_status status;
    const difference_list *differences;
    const fst_manifest_stats *stats;
    const fst_error *error;
    bool quiet;
} check_answer;

static int finish_answer(const check_answer *answer) {
    bool good = answer->status == FST_OK;
    // Differences from a manifest that a save has replaced meanwhile say nothing about the files.
    bool is_listed =
        good || (answer->differences->count > 0 && answer->status != FST_E_FILE_CHANGED);
    if (good && answer->quiet) return EXIT_OK;
    if (cli_wants_json()) {
        if (answer->differences->count == 0) begin_answer(answer->differences->path);
        printf("], \"valid\": %s", good ? "true" : "false");
        if (good)
            printf(", \"files\": %" PRIu64 ", \"bytes\": %" PRIu64, answer->stats->file_count,
                   answer->stats->bytes_read);
        if (!is_listed) {
            printf(", \"error\": ");
            cli_print_error_json(answer->error);
        }
        printf("}\n");
        return good        ? EXIT_OK
               : is_listed ? code_of_check(answer->status, answer->differences)
                           : cli_code_of_error(answer->error);
    }
    if (!is_listed) return cli_fail(answer->error);
    if (good) {
        cli_print_path(answer->differences->path);
        printf(": %s, %" PRIu64 " file%s\n", answer->words, answer->stats->file_count,
               cli_plural(answer->stats->file_count));
    }
    return good ? EXIT_OK : code_of_check(answer->status, answer->differences);
}

int manifest_verify(const char *path, const char *manifest, bool quiet) {
    fst_manifest_stats stats = FST_STRUCT_INIT(fst_manifest_stats);
    difference_list list = {.path = path};
    fst_error error;
    fst_check_options options = {.struct_size = sizeof options,
                                 .manifest = manifest,
                                 .callback = report_difference,
                                 .context = &list,
                                 .progress = cli_progress_begin()};
    fst_status status = fst_manifest_check(path, &options, &stats, &error);
    cli_progress_end(status == FST_OK);
    return finish_answer(&(check_answer){.words = "matches its manifest",
                                         .status = status,
                                         .differences = &list,
                                         .stats = &stats,
                                         .error = &error,
                                         .quiet = quiet});
}

int signature_verify(fst_bundle_files *files, bool quiet) {
    fst_manifest_stats stats = FST_STRUCT_INIT(fst_manifest_stats);
    difference_list list = {.path = files->folder};
    fst_error error;
    files->callback = report_difference;
    files->context = &list;
    files->progress = cli_progress_begin();
    fst_status status = fst_bundle_check(files, &stats, &error);
    cli_progress_end(status == FST_OK);
    return finish_answer(&(check_answer){.words = "matches its signature",
                                         .status = status,
                                         .differences = &list,
                                         .stats = &stats,
                                         .error = &error,
                                         .quiet = quiet});
}
