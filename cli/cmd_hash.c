// SPDX-License-Identifier: Apache-2.0
/// hash: digests of a model, printed, kept beside it or inside.
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "digest.h"
#include "hash_store.h"
#include "rewrite.h"

static void print_help(void) {
    printf("usage: fastsafetensors hash [OPTIONS] PATH\n\n"
           "Digests of every tensor and every file, computed at the speed of the disk.\n\n"
           "  --algorithm NAME  xxh3 (default, needs libxxhash) or sha256 (needs libcrypto); a\n"
           "                    file's sha256 is what sha256sum prints\n"
           "  --write           keep them in PATH.digest, for 'verify --hash'\n"
           "  --embed TARGET    write the model anew with tensors' digests in its __metadata__\n"
           "  --dry-run         of --write and --embed: say what would be written\n"
           "  --no-progress     no progress bar, also on a terminal\n");
}

typedef struct hash_request {
    const char *path, *algorithm, *embed;
    bool write, no_progress, dry_run;
} hash_request;

static int embed_digests(fst_model *model, const hash_request *request, const char *text) {
    size_t count;
    fst_metadata_entry *entries = hash_metadata(model, text, &count);
    if (entries == NULL) {
        fprintf(stderr, "fastsafetensors: out of memory\n");
        return EXIT_UNREADABLE;
    }
    rewrite_plan plan = {.target = request->embed,
                         .save = {.struct_size = sizeof plan.save, .promise = FST_SAVE_DURABLE},
                         .no_progress = request->no_progress,
                         .dry_run = request->dry_run,
                         .metadata = entries,
                         .metadata_count = count};
    int code = cli_rewrite(model, &plan);
    hash_metadata_free(entries, count);
    return code;
}

static int hash_model(const hash_request *request) {
    const digest_library *library = cli_digest_library(request->algorithm);
    if (library == NULL) return EXIT_MISSING;
    fst_model *model;
    fst_error error;
    char *text;
    if (fst_model_open(request->path, NULL, &model, &error) != FST_OK) return cli_fail(&error);
    int code = cli_digest_model(model, library, request->no_progress, &text);
    if (code == EXIT_GOOD && request->embed != NULL)
        code = embed_digests(model, request, text);
    else if (code == EXIT_GOOD && request->write && request->dry_run)
        printf("would write %s.digest, %zu bytes\n", request->path, strlen(text));
    else if (code == EXIT_GOOD && request->write)
        code = hash_sidecar_write(request->path, text);
    else if (code == EXIT_GOOD)
        fputs(text, stdout);
    free(text);
    fst_model_close(model);
    return code;
}

int cmd_hash(int argc, char **argv) {
    static const struct option options[] = {
        {"algorithm", required_argument, NULL, 'a'},
        {"write", no_argument, NULL, 'w'},
        {"dry-run", no_argument, NULL, 'd'},
        {"embed", required_argument, NULL, 'e'},
        {"no-progress", no_argument, NULL, 'n'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    hash_request request = {.algorithm = "xxh3"};
    for (int option; (option = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        switch (option) {
        case 'a': request.algorithm = optarg; break;
        case 'w': request.write = true; break;
        case 'd': request.dry_run = true; break;
        case 'e': request.embed = optarg; break;
        case 'n': request.no_progress = true; break;
        case 'h': print_help(); return EXIT_GOOD;
        default: return cli_usage("hash", "wrong option");
        }
    }
    if (optind + 1 != argc) return cli_usage("hash", "expected one PATH");
    if (request.write && request.embed != NULL)
        return cli_usage("hash", "--write or --embed, not both");
    if (request.dry_run && !request.write && request.embed == NULL)
        return cli_usage("hash", "--dry-run is of --write and --embed");
    if (strcmp(request.algorithm, "xxh3") != 0 && strcmp(request.algorithm, "sha256") != 0)
        return cli_usage("hash", "unknown algorithm '%s': xxh3 or sha256", request.algorithm);
    request.path = argv[optind];
    return hash_model(&request);
}
