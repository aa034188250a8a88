// SPDX-License-Identifier: Apache-2.0
/// hash: prints digests of a model, or stores them in a file or in the metadata.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "digest_file.h"
#include "digest_model.h"
#include "hash_store.h"
#include "manifest_commands.h"
#include "rewrite.h"
#include "standard_input.h"
#include "steady_model.h"

typedef struct hash_request {
    const char *path, *algorithm, *embed;
    bool write, dry_run, has_manifest;
    manifest_request manifest;
} hash_request;

static const char *const algorithms[] = {"xxh3", "sha256", "xxh3-128", "blake3", NULL};

static int embed_digests(fst_model *model, const hash_request *request, const char *text) {
    size_t count;
    fst_metadata_entry *entries = hash_metadata(model, text, &count);
    if (entries == NULL) return cli_no_memory();
    rewrite_plan plan = {.target = request->embed,
                         .save = {.struct_size = sizeof plan.save, .promise = FST_SAVE_DURABLE},
                         .dry_run = request->dry_run,
                         .metadata = entries,
                         .metadata_count = count};
    int code = request->dry_run ? cli_check_file_target(plan.target, false) : EXIT_OK;
    if (code == EXIT_OK) code = cli_rewrite(model, &plan);
    hash_metadata_free(entries, count);
    return code;
}

/// Prints lines "KIND HEX NAME", whose names are JSON strings already, as the end of an object.
static void print_json(const char *text, const char *algorithm) {
    printf("\"algorithm\": \"%s\", \"digests\": [", algorithm);
    const char *line = strchr(text, '\n'), *comma = "";
    for (; line != NULL && line[1] != '\0'; line = strchr(line + 1, '\n')) {
        const char *kind = line + 1, *hex = strchr(kind, ' ') + 1, *name = strchr(hex, ' ') + 1;
        printf("%s\n  {\"kind\": \"%.*s\", \"digest\": \"%.*s\", \"name\": %.*s}", comma,
               (int)(hex - kind) - 1, kind, (int)(name - hex) - 1, hex, (int)strcspn(name, "\n"),
               name);
        comma = ",";
    }
    printf("]}\n");
}

/// Writes the .digest file. Saves delete it after they have put their files in place. Here the
/// model is examined again after the .digest file is in place. So none stays next to another model.
static int write_digests(const char *path, const steady_identity *identity, const char *text) {
    digest_file file;
    int code = digest_file_open(path, text, &file);
    if (code == EXIT_OK) code = steady_check(path, identity);
    if (code == EXIT_OK) code = digest_file_place(&file);
    if (code == EXIT_OK) {
        code = steady_check(path, identity);
        if (code != EXIT_OK) digest_file_remove(&file);
    }
    digest_file_close(&file);
    return code;
}

/// Writes the .digest file and reports it.
static int keep_digests(const hash_request *request, const char *path,
                        const steady_identity *identity, const char *text) {
    int code = request->dry_run ? EXIT_OK : write_digests(path, identity, text);
    if (code == EXIT_OK && cli_wants_json()) {
        printf("{\"model\": ");
        cli_print_json(request->path, strlen(request->path));
        printf(", \"digest_bytes\": %zu, \"written\": %s, ", strlen(text),
               request->dry_run ? "false" : "true");
        print_json(text, request->algorithm);
    } else if (code == EXIT_OK && request->dry_run) {
        char *target = digest_file_name(path);
        if (target == NULL) return cli_no_memory();
        printf("would write ");
        cli_print_path(target);
        printf(", %zu bytes\n", strlen(text));
        free(target);
    }
    return code;
}

static int hash_model(const hash_request *request) {
    fst_digest digest = FST_DIGEST_XXH3_64;
    if (!cli_digest_find(request->algorithm, &digest))
        return cli_usage("hash", "unknown algorithm %s", request->algorithm);
    fst_model *model = NULL;
    steady_identity identity;
    char *text = NULL, *settled = request->write ? digest_file_settle(request->path) : NULL;
    const char *path = settled != NULL ? settled : request->path;
    int code = steady_open(path, &model, &identity);
    if (code == EXIT_OK && request->write) code = cli_digest_check_names(model, path);
    if (code == EXIT_OK && request->write) code = digest_file_check(path);
    if (code == EXIT_OK) code = cli_digest_model(model, path, digest, &text);
    if (code == EXIT_OK) code = steady_check(path, &identity);
    if (code == EXIT_OK && request->embed != NULL)
        code = embed_digests(model, request, text);
    else if (code == EXIT_OK && request->write)
        code = keep_digests(request, path, &identity, text);
    else if (code == EXIT_OK && cli_wants_json()) {
        printf("{");
        print_json(text, request->algorithm);
    } else if (code == EXIT_OK)
        fputs(text, stdout);
    free(text);
    free(settled);
    fst_model_close(model);
    return code;
}

static bool is_chunk_size(uint64_t size_bytes) {
    return size_bytes >= 64 << 10 && size_bytes <= 1 << 20 && (size_bytes & (size_bytes - 1)) == 0;
}

static int take(void *context, int key, cli_value value) {
    hash_request *request = context;
    uint64_t chunk_bytes;
    switch (key) {
    case 'a': request->algorithm = value.text; break;
    case 'w': request->write = true; break;
    case 'd': request->dry_run = true; break;
    case 'e': request->embed = value.text; break;
    case 'm': request->has_manifest = true; break;
    case 'S': request->manifest.sums = true; break;
    case 'o': request->manifest.target = value.text; break;
    case 'k': request->manifest.keep = value.text; break;
    case 'T': request->manifest.tensors = true; break;
    default:
        if (!fst_size_parse(value.text, &chunk_bytes) || !is_chunk_size(chunk_bytes))
            return cli_usage("hash", "--chunk must be a power of two from 64K to 1M, not '%s'",
                             value.text);
        request->manifest.chunk_bytes = (uint32_t)chunk_bytes;
    }
    return EXIT_OK;
}

static int make_manifest(hash_request *request) {
    if (request->write || request->embed != NULL || request->dry_run)
        return cli_usage(
            "hash", "--manifest and --sums cannot be combined with --write, --embed or --dry-run");
    if (cli_is_input(request->path))
        return cli_usage("hash", "--manifest and --sums need a file, not standard input");
    if (request->manifest.target != NULL && cli_is_output(request->manifest.target))
        return cli_usage(
            "hash",
            "--output - is not supported: verification looks for the manifest by its file name");
    if (request->manifest.sums &&
        (request->manifest.keep != NULL || request->manifest.tensors ||
         request->manifest.chunk_bytes != 0 ||
         (request->algorithm != NULL && strcmp(request->algorithm, "sha256") != 0)))
        return cli_usage("hash", "--sums writes the sha256 of files and accepts only --output");
    if (request->algorithm != NULL && strcmp(request->algorithm, "xxh3") == 0)
        return cli_usage("hash", "--manifest needs the algorithm xxh3-128, blake3 or sha256");
    request->manifest.algorithm = request->algorithm == NULL ? "xxh3" : request->algorithm;
    return manifest_make(request->path, &request->manifest);
}

static int run(const cli_command *command, char **argv) {
    hash_request request = {0};
    cli_operands operands;
    int code = cli_parse(command, argv, &request, &operands);
    if (code != EXIT_OK || operands.is_answered) return code;
    if (request.write && request.embed != NULL)
        return cli_usage("hash", "--write and --embed cannot be combined");
    if (request.dry_run && !request.write && request.embed == NULL)
        return cli_usage("hash", "--dry-run needs --write or --embed");
    request.path = operands.words[0];
    if (cli_is_address(request.path)) return cli_refuse_address("hash", request.path);
    if (request.has_manifest && request.manifest.sums)
        return cli_usage("hash", "--manifest and --sums cannot be combined");
    if (request.has_manifest || request.manifest.sums) return make_manifest(&request);
    if (request.algorithm == NULL) request.algorithm = "xxh3";
    if (request.manifest.target != NULL || request.manifest.keep != NULL ||
        request.manifest.tensors || request.manifest.chunk_bytes != 0)
        return cli_usage(
            "hash",
            "--output needs --manifest or --sums; --keep, --chunk and --tensors need --manifest");
    if (request.write && cli_is_input(request.path))
        return cli_usage("hash", "--write needs a file, not standard input");
    return hash_model(&request);
}

static const cli_option options[] = {
    {'a', "algorithm", "NAME", algorithms,
     "use this digest (default: xxh3, with --manifest xxh3-128); sha256 needs libcrypto", 0},
    {'m', "manifest", NULL, NULL,
     "write PATH.manifest, or FOLDER/model.manifest: digests of every chunk, for verified loads",
     0},
    {'S', "sums", NULL, NULL,
     "write PATH.sha256, or FOLDER/SHA256SUMS, for 'sha256sum -c' and 'verify --manifest=FILE'", 0},
    {'o', "output", "TARGET", NULL, "with --manifest or --sums: write to TARGET", 0},
    {'k', "keep", "OLD", NULL,
     "with --manifest: reuse the digests of manifest OLD for unchanged files", 0},
    {'c', "chunk", "SIZE", NULL,
     "with --manifest: chunk size, a power of two from 64K to 1M (default)", 0},
    {'T', "tensors", NULL, NULL, "with --manifest: add digests of tensors, for comparisons", 0},
    {'w', "write", NULL, NULL, "write PATH.digest, for 'verify --hash'", 0},
    {'e', "embed", "TARGET", NULL, "write a copy of the model with the digests in its __metadata__",
     0},
    {'d', "dry-run", NULL, NULL, "with --write or --embed: print what would be written", 0},
    {0},
};

const cli_command hash_command = {
    .name = "hash",
    .operands = "PATH",
    .summary = "compute and store checksums of tensors and files",
    .about = "Compute digests of every tensor and every file. Without --manifest, --sums, --write\n"
             "or --embed only print them.",
    .examples = "  fastsafetensors hash --algorithm sha256 model.safetensors\n"
                "  fastsafetensors hash --manifest folder\n"
                "  fastsafetensors hash --write folder && fastsafetensors verify --hash folder\n",
    .options = options,
    .operand_min = 1,
    .operand_max = 1,
    .inputs = INPUTS_FIRST,
    .has_json = true,
    .has_progress = true,
    .take = take,
    .run = run,
};
