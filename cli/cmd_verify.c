// SPDX-License-Identifier: Apache-2.0
/// verify: checks that a model is valid and complete.
#include <dirent.h>
#include <fastsafetensors/experimental.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "commands.h"
#include "hash_store.h"
#include "manifest_commands.h"
#include "rewrite.h"

/// Memory for decoding compressed tensors, and for pieces of larger ones.
#define DECODE_BUDGET_BYTES ((uint64_t)128 << 20)
#define DECODE_PIECE_BYTES ((uint64_t)16 << 20)

typedef struct verify_request {
    fst_open_options open;
    bool quiet, hash;
    bool by_manifest;
    const char *signature, *key;
    const char *manifest; ///< NULL: the one next to the model
} verify_request;

/// The errors found at one path.
typedef struct path_verdict {
    const char *path;
    fst_error first; ///< the error of opening it
    int code;
    size_t display; ///< errors printed
} path_verdict;

static bool ends_with(const char *text, const char *ending) {
    size_t size = strlen(text), ending_size = strlen(ending);
    return size >= ending_size && strcmp(text + size - ending_size, ending) == 0;
}

/// A model with missing shards was readable, so it is "invalid".
static int code_of(const char *path, const fst_error *error) {
    struct stat info;
    bool lacks = error->status == FST_E_NOT_FOUND && stat(path, &info) == 0;
    return lacks ? EXIT_INVALID : cli_code_of(error->status);
}

static void report(path_verdict *verdict, const fst_error *error) {
    if (cli_wants_json()) {
        printf("%s", verdict->display > 0 ? ", " : "");
        cli_print_error_json(error);
    } else {
        cli_print_error(error);
    }
    verdict->display++;
}

/// Checks the other files of a folder, each by itself, and reports unfinished downloads.
static void report_entry(path_verdict *verdict, const char *folder, const char *name,
                         const fst_open_options *options) {
    static const char *const unfinished[] = {".incomplete", ".part", ".crdownload", ".aria2",
                                             ".download"};
    fst_error error = {.byte_offset = FST_NO_OFFSET, .status = FST_E_NOT_FOUND};
    size_t size = strlen(folder) + strlen(name) + 2;
    char *path = malloc(size);
    if (path == NULL) return;
    snprintf(path, size, "%s/%s", folder, name);
    for (size_t i = 0; i < sizeof unfinished / sizeof *unfinished; i++)
        if (ends_with(name, unfinished[i])) {
            snprintf(error.file, sizeof error.file, "%s", path);
            snprintf(error.message, sizeof error.message,
                     "an unfinished download is in the same folder: %.400s", path);
            report(verdict, &error);
        }
    fst_model *model = NULL;
    if (ends_with(name, ".safetensors") && name[0] != '.' &&
        fst_model_open(path, options, &model, &error) != FST_OK &&
        strcmp(error.file, verdict->first.file) != 0)
        report(verdict, &error);
    fst_model_close(model);
    free(path);
}

static void report_all(path_verdict *verdict, const fst_open_options *options) {
    struct dirent **entries;
    struct stat info;
    char *folder = strdup(verdict->path);
    char *slash = folder == NULL ? NULL : strrchr(folder, '/');
    bool is_index = ends_with(verdict->path, ".index.json");
    report(verdict, &verdict->first);
    if (folder != NULL && is_index)
        snprintf(slash == NULL ? folder : slash, 2, slash == NULL ? "." : "");
    if (folder != NULL && stat(folder, &info) == 0 && S_ISDIR(info.st_mode)) {
        int count = scandir(folder, &entries, NULL, alphasort);
        for (int i = 0; i < count; i++) {
            report_entry(verdict, folder, entries[i]->d_name, options);
            free(entries[i]);
        }
        if (count >= 0) free(entries);
    }
    free(folder);
}

static int refuse_path(const char *path, const fst_error *error, const verify_request *request) {
    path_verdict verdict = {.path = path, .first = *error, .code = code_of(path, error)};
    if (cli_wants_json()) {
        printf("{\"path\": ");
        cli_print_json(cli_display_path(path), strlen(cli_display_path(path)));
        printf(", \"valid\": false, \"errors\": [");
    }
    report_all(&verdict, &request->open);
    if (cli_wants_json())
        printf("]}\n");
    else if (verdict.code == EXIT_INVALID) {
        cli_print_path(path);
        printf(": invalid: %s\n", fst_status_name(error->status));
    }
    return verdict.code;
}

static int accept_path(const char *path, fst_model *model, const verify_request *request) {
    size_t tensors = fst_model_tensor_count(model), files = fst_model_file_count(model);
    hash_check check = {0};
    cli_errors_of_path(path);
    int code = request->hash ? hash_gather(path, model, &check) : EXIT_OK;
    cli_errors_of_path(NULL);
    if (code != EXIT_OK) { // the error has been printed
        hash_check_clear(&check);
        return code;
    }
    if (request->quiet && !request->hash) return EXIT_OK;
    if (request->quiet && hash_is_same(model, &check)) {
        hash_check_clear(&check);
        return EXIT_OK;
    }
    if (cli_wants_json()) {
        printf("{\"path\": ");
        cli_print_json(cli_display_path(path), strlen(cli_display_path(path)));
        printf(", \"tensors\": %zu, \"files\": %zu", tensors, files);
    } else if (!request->quiet) {
        cli_print_path(path);
        printf(": %s, %zu tensor%s in %zu file%s\n", request->hash ? "valid headers" : "valid",
               tensors, cli_plural(tensors), files, cli_plural(files));
    }
    if (request->hash) code = hash_compare(path, model, &check, request->quiet);
    if (cli_wants_json()) printf(", \"valid\": %s}\n", code == EXIT_OK ? "true" : "false");
    hash_check_clear(&check);
    return code;
}

static bool has_compressed(const fst_model *model) {
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    for (size_t i = 0; fst_model_file_info(model, i, &info, NULL) == FST_OK; i++)
        if (info.compressed_count > 0) return true;
    return false;
}

/// Decodes the tensors of a compressed file, which verifies its checksums.
static fst_status decode_items(fst_model *model, const fst_part *items, size_t count,
                               fst_error *error) {
    fst_load_options options = {.struct_size = sizeof options,
                                .mode = FST_MODE_LOAD,
                                .parts = items,
                                .part_count = count,
                                .budget_bytes = DECODE_BUDGET_BYTES};
    fst_loader *loader;
    fst_tensor *tensor;
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    if (count == 0) return FST_OK;
    // A sub-byte tensor that cannot be split may exceed the budget.
    if (count == 1 && items->begin == NULL &&
        fst_model_tensor_info(model, items->tensor_index, &info, NULL) == FST_OK &&
        info.size_bytes > DECODE_PIECE_BYTES)
        options.budget_bytes = 0;
    fst_status status = fst_loader_open(model, &options, &loader, error);
    if (status != FST_OK) return status;
    while ((status = fst_loader_next(loader, -1, &tensor, error)) == FST_OK)
        fst_tensor_unref(tensor);
    fst_loader_close(loader);
    return status == FST_END ? FST_OK : status;
}

/// Decodes a large tensor piece by piece.
static fst_status decode_pieces(fst_model *model, size_t index, const fst_tensor_info *info,
                                fst_error *error) {
    piece_list pieces = {0};
    fst_status status = FST_E_NO_MEMORY;
    error->status = status;
    snprintf(error->message, sizeof error->message, "no memory for the pieces of a tensor");
    if (cli_pieces_cut(&pieces, info, fst_dtype_bits(info->dtype), DECODE_PIECE_BYTES)) {
        cli_pieces_of(&pieces, index);
        status = decode_items(model, pieces.items, pieces.count, error);
    }
    cli_pieces_clear(&pieces);
    return status;
}

/// Decodes all tensors of a model with compressed ones; small tensors in one load.
static fst_status decode_all(fst_model *model, fst_error *error) {
    size_t count = fst_model_tensor_count(model), small = 0;
    fst_status status = FST_OK;
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    fst_part *items = calloc(count + 1, sizeof *items);
    if (items == NULL) return decode_items(model, NULL, 0, error);
    for (size_t i = 0; i < count && status == FST_OK; i++) {
        status = fst_model_tensor_info(model, i, &info, error);
        if (status == FST_OK && info.size_bytes > DECODE_PIECE_BYTES)
            status = decode_pieces(model, i, &info, error);
        else
            items[small++] = (fst_part){.struct_size = sizeof(fst_part), .tensor_index = i};
    }
    if (status == FST_OK) status = decode_items(model, items, small, error);
    free(items);
    return status;
}

/// Whether a delta was changing the files of a checkpoint folder when its process ended, or still
/// does. Each file is valid by itself then.
static bool is_between_versions(const char *path, fst_error *error) {
    char version[FST_DELTA_VERSION_BYTES];
    int is_interrupted;
    if (fst_delta_version(path, version, &is_interrupted, NULL) != FST_OK || !is_interrupted)
        return false;
    *error = (fst_error){.status = FST_E_VERSION, .byte_offset = FST_NO_OFFSET};
    snprintf(error->file, sizeof error->file, "%s", path);
    snprintf(error->message, sizeof error->message,
             "%.400s: an update by a delta was interrupted, so the files are of two versions; run "
             "'fastsafetensors delta recover'",
             path);
    return true;
}

static int verify_path(const char *path, const verify_request *request) {
    fst_model *model;
    fst_error error;
    if (is_between_versions(path, &error)) return refuse_path(path, &error, request);
    if (fst_model_open(path, &request->open, &model, &error) != FST_OK)
        return refuse_path(path, &error, request);
    if (has_compressed(model) && decode_all(model, &error) != FST_OK) {
        fst_model_close(model);
        return refuse_path(path, &error, request);
    }
    int code = accept_path(path, model, request);
    fst_model_close(model);
    return code;
}

/// Runs the requested check.
static int check_path(const char *path, const verify_request *request) {
    fst_bundle_files files = FST_STRUCT_INIT(fst_bundle_files);
    files.folder = path;
    files.signature = request->signature;
    files.key = request->key;
    if (request->signature != NULL) return signature_verify(&files, request->quiet);
    if (request->by_manifest) return manifest_verify(path, request->manifest, request->quiet);
    return verify_path(path, request);
}

static int take(void *context, int key, cli_value value) {
    verify_request *request = context;
    if (key == 'l') request->open.flags |= FST_OPEN_LENIENT;
    if (key == 'q') request->quiet = true;
    if (key == 'H') request->hash = true;
    if (key == 'm') {
        request->by_manifest = true;
        request->manifest = value.text;
    }
    if (key == 's') request->signature = value.text;
    if (key == 'k') request->key = value.text;
    return EXIT_OK;
}

static input_part part_of(const void *request) {
    return ((const verify_request *)request)->hash ? INPUT_ALL : INPUT_MEASURED;
}

static int run(const cli_command *command, char **argv) {
    verify_request request = {.open = {.struct_size = sizeof request.open}};
    cli_operands operands;
    int worst = cli_parse(command, argv, &request, &operands);
    if (worst != EXIT_OK || operands.is_answered) return worst;
    if ((request.signature == NULL) != (request.key == NULL))
        return cli_usage("verify", "--signature and --public-key must be given together");
    bool has_files = request.by_manifest || request.signature != NULL;
    if (request.hash + request.by_manifest + (request.signature != NULL) > 1)
        return cli_usage("verify", "--hash, --manifest and --signature cannot be combined");
    if (has_files && request.open.flags != 0)
        return cli_usage("verify", "--lenient has no effect with --manifest or --signature");
    for (int i = 0; i < operands.count; i++) {
        int code = check_path(operands.words[i], &request);
        if (code > worst) worst = code;
    }
    return worst;
}

static const cli_option options[] = {
    CLI_LENIENT_OPTION(0),
    {'H', "hash", NULL, NULL, "compare all bytes with the digests that 'hash' stored", 0},
    {'m', "manifest", "[=FILE]", NULL,
     "compare all bytes of all files with their manifest, or with this manifest or sha256sum list",
     0},
    {'s', "signature", "BUNDLE", NULL,
     "compare all files of a folder with an OpenSSF model-signing bundle", 0},
    {'k', "public-key", "FILE", NULL, "with --signature: the public key (PEM)", 0},
    {'q', "quiet", NULL, NULL, "print nothing for valid models", 0},
    {0},
};

const cli_command verify_command = {
    .name = "verify",
    .operands = "PATH...",
    .summary = "check a model: headers, index, checksums, signature",
    .about = "Check headers and, for sharded models, the index and that all files exist. Report\n"
             "every damaged file of a folder. The exit code is that of the worst path. With\n"
             "--json, print one object per path, with the error's name, tensor and byte.",
    .examples = "  fastsafetensors verify folder other.safetensors\n"
                "  fastsafetensors verify --json folder | jq '.errors[].kind'\n",
    .options = options,
    .operand_min = 1,
    .operand_max = 100000,
    .part = part_of,
    .inputs = INPUTS_ALL,
    .has_json = true,
    .has_cache = true,
    .has_progress = true,
    .take = take,
    .run = run,
};
