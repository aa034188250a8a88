// SPDX-License-Identifier: Apache-2.0
/// verify: is a model what the format says, and is all of it there?
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "commands.h"
#include "hash_store.h"
#include "manifest_commands.h"
#include "rewrite.h"

/// Memory that compressed tensors are decoded in, and the pieces that larger ones are cut in.
#define DECODE_BUDGET_BYTES ((uint64_t)128 << 20)
#define DECODE_PIECE_BYTES ((uint64_t)16 << 20)

typedef struct verify_request {
    fst_open_options open;
    bool quiet, hash;
    bool by_manifest;
    const char *signature, *key;
    const char *manifest; ///< NULL: the one beside the model
} verify_request;

/// What was found wrong with one path.
typedef struct path_verdict {
    const char *path;
    fst_error first; ///< what opening it said
    int code;
    size_t told; ///< errors printed
} path_verdict;

static bool ends_with(const char *text, const char *ending) {
    size_t size = strlen(text), ending_size = strlen(ending);
    return size >= ending_size && strcmp(text + size - ending_size, ending) == 0;
}

/// A set that lacks a file, or a folder without one, is there to be read, and not valid.
static int code_of(const char *path, const fst_error *error) {
    struct stat info;
    bool lacks = error->status == FST_E_NOT_FOUND || error->status == FST_E_NO_TENSORS;
    return lacks && stat(path, &info) == 0 ? EXIT_INVALID : cli_code_of(error->status);
}

static void tell(path_verdict *verdict, const fst_error *error) {
    if (cli_wants_json()) {
        printf("%s", verdict->told > 0 ? ", " : "");
        cli_print_error_json(error);
    } else {
        fprintf(stderr, "fastsafetensors: %s\n", error->message);
    }
    verdict->told++;
}

/// What else is wrong in a folder: its other files, each for itself, and downloads that have not
/// ended.
static void tell_of_entry(path_verdict *verdict, const char *folder, const char *name,
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
                     "a download that has not ended lies beside it, in %.400s", path);
            tell(verdict, &error);
        }
    fst_model *model = NULL;
    if (ends_with(name, ".safetensors") && name[0] != '.' &&
        fst_model_open(path, options, &model, &error) != FST_OK &&
        strcmp(error.file, verdict->first.file) != 0)
        tell(verdict, &error);
    fst_model_close(model);
    free(path);
}

static void tell_all(path_verdict *verdict, const fst_open_options *options) {
    struct dirent **entries;
    struct stat info;
    char *folder = strdup(verdict->path);
    char *slash = folder == NULL ? NULL : strrchr(folder, '/');
    bool is_index = ends_with(verdict->path, ".index.json");
    tell(verdict, &verdict->first);
    if (folder != NULL && is_index)
        snprintf(slash == NULL ? folder : slash, 2, slash == NULL ? "." : "");
    if (folder != NULL && stat(folder, &info) == 0 && S_ISDIR(info.st_mode)) {
        int count = scandir(folder, &entries, NULL, alphasort);
        for (int i = 0; i < count; i++) {
            tell_of_entry(verdict, folder, entries[i]->d_name, options);
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
        cli_print_json(cli_told_path(path), strlen(cli_told_path(path)));
        printf(", \"valid\": false, \"errors\": [");
    }
    tell_all(&verdict, &request->open);
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
    int code = request->hash ? hash_gather(path, model, &check) : EXIT_GOOD;
    // What could not be read, or digested, was said as an object of its own.
    if (code != EXIT_GOOD) {
        hash_check_clear(&check);
        return code;
    }
    if (cli_wants_json()) {
        printf("{\"path\": ");
        cli_print_json(cli_told_path(path), strlen(cli_told_path(path)));
        printf(", \"tensors\": %zu, \"files\": %zu", tensors, files);
    } else if (!request->quiet) {
        cli_print_path(path);
        printf(": %s, %zu tensor%s in %zu file%s\n", request->hash ? "valid headers" : "valid",
               tensors, cli_plural(tensors), files, cli_plural(files));
    }
    if (request->hash) code = hash_compare(path, model, &check, request->quiet);
    if (cli_wants_json()) printf(", \"valid\": %s}\n", code == EXIT_GOOD ? "true" : "false");
    hash_check_clear(&check);
    return code;
}

static bool has_compressed(const fst_model *model) {
    fst_file_info info = {0};
    for (size_t i = 0; fst_model_file_info(model, i, &info, NULL) == FST_OK; i++)
        if (info.compressed_count > 0) return true;
    return false;
}

/// Decodes what is asked for: what is stored is held against its checksums.
static fst_status decode_items(fst_model *model, const fst_request_item *items, size_t count,
                               fst_error *error) {
    fst_load_options options = {.struct_size = sizeof options,
                                .mode = FST_MODE_LOAD,
                                .items = items,
                                .item_count = count,
                                .budget_bytes = DECODE_BUDGET_BYTES};
    fst_loader *loader;
    fst_tensor *tensor;
    fst_tensor_info info;
    if (count == 0) return FST_OK;
    // A tensor that can't be cut (below a byte) may be larger than the budget.
    if (count == 1 && items->slice_begin == NULL &&
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

/// Decodes every tensor of a model with compressed ones: the small ones in one load.
static fst_status decode_all(fst_model *model, fst_error *error) {
    size_t count = fst_model_tensor_count(model), small = 0;
    fst_status status = FST_OK;
    fst_tensor_info info;
    fst_request_item *items = calloc(count + 1, sizeof *items);
    if (items == NULL) return decode_items(model, NULL, 0, error);
    for (size_t i = 0; i < count && status == FST_OK; i++) {
        status = fst_model_tensor_info(model, i, &info, error);
        if (status == FST_OK && info.size_bytes > DECODE_PIECE_BYTES)
            status = decode_pieces(model, i, &info, error);
        else
            items[small++].tensor_index = i;
    }
    if (status == FST_OK) status = decode_items(model, items, small, error);
    free(items);
    return status;
}

static int verify_path(const char *path, const verify_request *request) {
    fst_model *model;
    fst_error error;
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

/// The check that was asked for.
static int check_path(const char *path, const verify_request *request) {
    fst_bundle_files files = FST_STRUCT_INIT(fst_bundle_files);
    files.folder = path;
    files.bundle = request->signature;
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
    if (key == 'm') request->by_manifest = true;
    if (key == 'f') request->manifest = value.text;
    if (key == 's') request->signature = value.text;
    if (key == 'k') request->key = value.text;
    return EXIT_GOOD;
}

static input_part part_of(const void *request) {
    return ((const verify_request *)request)->hash ? INPUT_ALL : INPUT_MEASURED;
}

static int run(const cli_command *command, char **argv) {
    verify_request request = {.open = {.struct_size = sizeof request.open}};
    cli_operands operands;
    int worst = cli_parse(command, argv, &request, &operands);
    if (worst != EXIT_GOOD || operands.is_answered) return worst;
    if ((request.signature == NULL) != (request.key == NULL))
        return cli_usage("verify", "--signature and --key go together");
    if (request.manifest != NULL && !request.by_manifest)
        return cli_usage("verify", "--from is of --manifest");
    for (int i = 0; i < operands.count; i++) {
        int code = check_path(operands.words[i], &request);
        if (code > worst) worst = code;
    }
    return worst;
}

static const cli_option options[] = {
    CLI_LENIENT_OPTION(0),
    {'H', "hash", NULL, NULL, "compare all bytes with the digests that 'hash' has kept", 0},
    {'m', "manifest", NULL, NULL, "compare all bytes of all files with the manifest beside them",
     0},
    {'s', "signature", "BUNDLE", NULL,
     "compare all files of a folder with an OpenSSF model-signing bundle", 0},
    {'k', "key", "FILE", NULL, "of --signature: the public key (PEM)", 0},
    {'f', "from", "FILE", NULL, "of --manifest: this one, or a list of sha256sum's", 0},
    {'q', "quiet", NULL, NULL, "say nothing of valid ones", 0},
    {0},
};

const cli_command verify_command = {
    .name = "verify",
    .operands = "PATH..",
    .summary = "check a model's headers; exit 0 valid, 1 invalid, 2 unreadable",
    .about = "Checks headers and, of sharded models, the index and that all files are there. Of a\n"
             "folder, every damaged file is told. Exit code: 0 all valid, 1 one is invalid (with\n"
             "the error's name, the tensor and the byte), 2 one could not be read. With --json,\n"
             "one object a path.",
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
