// SPDX-License-Identifier: Apache-2.0
/// hash: digests of a model, printed, kept beside it or inside.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "digest_model.h"
#include "hash_store.h"
#include "manifest_commands.h"
#include "rewrite.h"
#include "standard_input.h"

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
    int code = cli_rewrite(model, &plan);
    hash_metadata_free(entries, count);
    return code;
}

/// The lines "KIND HEX NAME", whose names are JSON strings already, as an object.
static void print_json(const char *text, const char *algorithm) {
    printf("{\"algorithm\": \"%s\", \"digests\": [", algorithm);
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

/// Writes the file beside the model, and says so.
static int keep_digests(const hash_request *request, const char *text) {
    int code = request->dry_run ? EXIT_GOOD : hash_sidecar_write(request->path, text);
    if (code == EXIT_GOOD && cli_wants_json()) {
        printf("{\"model\": ");
        cli_print_json(request->path, strlen(request->path));
        printf(", \"digest_bytes\": %zu, \"written\": %s}\n", strlen(text),
               request->dry_run ? "false" : "true");
    } else if (code == EXIT_GOOD && request->dry_run) {
        printf("would write ");
        cli_print_path(request->path);
        printf(".digest, %zu bytes\n", strlen(text));
    }
    return code;
}

static int hash_model(const hash_request *request) {
    fst_digest digest = FST_DIGEST_XXH3_64;
    if (!cli_digest_find(request->algorithm, &digest))
        return cli_usage("hash", "unknown algorithm %s", request->algorithm);
    fst_model *model;
    fst_error error;
    char *text;
    if (fst_model_open(request->path, NULL, &model, &error) != FST_OK) return cli_fail(&error);
    int code = cli_digest_model(model, digest, &text);
    if (code == EXIT_GOOD && request->embed != NULL)
        code = embed_digests(model, request, text);
    else if (code == EXIT_GOOD && request->write)
        code = keep_digests(request, text);
    else if (code == EXIT_GOOD && cli_wants_json())
        print_json(text, request->algorithm);
    else if (code == EXIT_GOOD)
        fputs(text, stdout);
    free(text);
    fst_model_close(model);
    return code;
}

static int take(void *context, int key, cli_value value) {
    hash_request *request = context;
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
        if (!cli_parse_size(value.text, &request->manifest.chunk_bytes) ||
            request->manifest.chunk_bytes > UINT32_MAX)
            return cli_usage("hash", "--chunk is a size, like 1M");
    }
    return EXIT_GOOD;
}

static int make_manifest(hash_request *request) {
    if (request->write || request->embed != NULL || request->dry_run)
        return cli_usage("hash",
                         "manifests and sums are made alone: no --write, --embed or --dry-run");
    if (cli_is_input(request->path))
        return cli_usage("hash", "standard input has no name for a manifest or a sum");
    if (request->manifest.target != NULL && cli_is_output(request->manifest.target))
        return cli_usage("hash", "what is made is found by its file's name: --output takes no -");
    if (request->manifest.sums &&
        (request->manifest.keep != NULL || request->manifest.tensors ||
         request->manifest.chunk_bytes != 0 ||
         (request->algorithm != NULL && strcmp(request->algorithm, "sha256") != 0)))
        return cli_usage("hash", "--sums is sha256 of whole files, and goes with --output only");
    request->manifest.algorithm = request->algorithm == NULL ? "xxh3" : request->algorithm;
    return manifest_make(request->path, &request->manifest);
}

static int run(const cli_command *command, char **argv) {
    hash_request request = {0};
    cli_operands operands;
    int code = cli_parse(command, argv, &request, &operands);
    if (code != EXIT_GOOD || operands.is_answered) return code;
    if (request.write && request.embed != NULL)
        return cli_usage("hash", "--write or --embed, not both");
    if (request.dry_run && !request.write && request.embed == NULL)
        return cli_usage("hash", "--dry-run is of --write and --embed");
    request.path = operands.words[0];
    if (cli_is_address(request.path)) return cli_refuse_address("hash", request.path);
    if (request.has_manifest && request.manifest.sums)
        return cli_usage("hash", "--manifest or --sums, not both");
    if (request.has_manifest || request.manifest.sums) return make_manifest(&request);
    if (request.algorithm == NULL) request.algorithm = "xxh3";
    if (request.manifest.target != NULL || request.manifest.keep != NULL ||
        request.manifest.tensors || request.manifest.chunk_bytes != 0)
        return cli_usage("hash", "--output, --keep, --chunk and --tensors are of --manifest");
    if (request.write && cli_is_input(request.path))
        return cli_usage("hash", "standard input has no place for digests beside it: no --write");
    return hash_model(&request);
}

static const cli_option options[] = {
    {'a', "algorithm", "NAME", algorithms,
     "xxh3 (default, 64 bits), xxh3-128, blake3 or sha256 (needs libcrypto; a file's is what "
     "sha256sum prints); with --manifest xxh3-128 (default), blake3 or sha256",
     0},
    {'m', "manifest", NULL, NULL,
     "write digests of every chunk, which loads are verified by: PATH.manifest, or of a folder "
     "model.manifest in it",
     0},
    {'S', "sums", NULL, NULL,
     "write the sha256 of whole files, for 'sha256sum -c' and 'verify --manifest --from': "
     "PATH.sha256, or of a folder SHA256SUMS in it",
     0},
    {'o', "output", "TARGET", NULL, "of --manifest and --sums: put it there", 0},
    {'k', "keep", "OLD", NULL,
     "of --manifest: do not read files that were not changed since that manifest was begun", 0},
    {'c', "chunk", "SIZE", NULL, "of --manifest: 64K to 1M (default), a power of two", 0},
    {'T', "tensors", NULL, NULL, "of --manifest: also digests of tensors, for comparing", 0},
    {'w', "write", NULL, NULL, "keep them in PATH.digest, for 'verify --hash'", 0},
    {'e', "embed", "TARGET", NULL, "write the model anew with tensors' digests in its __metadata__",
     0},
    {'d', "dry-run", NULL, NULL, "of --write and --embed: say what would be written", 0},
    {0},
};

const cli_command hash_command = {
    .name = "hash",
    .operands = "PATH",
    .summary = "digests of tensors and files, to be kept beside them or inside",
    .about = "Digests of every tensor and every file, computed at the speed of the disk.",
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
