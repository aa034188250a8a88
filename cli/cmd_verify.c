// SPDX-License-Identifier: Apache-2.0
/// verify: is it a valid model?
#include <getopt.h>
#include <stdio.h>

#include "hash_store.h"

static void print_help(void) {
    printf("usage: fastsafetensors verify [--lenient] [--quiet] [--hash] PATH...\n\n"
           "Checks headers and, of sharded models, the index. Exit code: 0 all valid, 1 one is\n"
           "invalid (with the error's name, the tensor and the byte), 2 one could not be read.\n\n"
           "  --lenient   accept bytes after the last tensor\n"
           "  --hash      compare all bytes with the digests that 'hash' has kept\n"
           "  --quiet     say nothing of valid ones\n");
}

static int verify_path(const char *path, const fst_open_options *options, bool quiet, bool hash) {
    fst_model *model;
    fst_error error;
    if (fst_model_open(path, options, &model, &error) != FST_OK) {
        int code = cli_fail(&error);
        if (code == EXIT_INVALID) printf("%s: invalid: %s\n", path, fst_status_name(error.status));
        return code;
    }
    if (!quiet)
        printf("%s: valid, %zu tensors in %zu file%s\n", path, fst_model_tensor_count(model),
               fst_model_file_count(model), fst_model_file_count(model) == 1 ? "" : "s");
    int code = hash ? hash_verify(path, model, quiet) : EXIT_GOOD;
    fst_model_close(model);
    return code;
}

int cmd_verify(int argc, char **argv) {
    static const struct option options[] = {
        {"lenient", no_argument, NULL, 'l'},
        {"quiet", no_argument, NULL, 'q'},
        {"hash", no_argument, NULL, 'H'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    fst_open_options open_options = {.struct_size = sizeof open_options};
    bool quiet = false, hash = false;
    for (int option; (option = getopt_long(argc, argv, "hq", options, NULL)) != -1;) {
        switch (option) {
        case 'l': open_options.flags |= FST_OPEN_LENIENT; break;
        case 'q': quiet = true; break;
        case 'H': hash = true; break;
        case 'h': print_help(); return EXIT_GOOD;
        default: return cli_usage("verify", "wrong option");
        }
    }
    if (optind >= argc) return cli_usage("verify", "expected a PATH");
    int worst = EXIT_GOOD;
    for (int i = optind; i < argc; i++) {
        int code = verify_path(argv[i], &open_options, quiet, hash);
        if (code > worst) worst = code;
    }
    return worst;
}
