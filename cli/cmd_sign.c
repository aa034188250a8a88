// SPDX-License-Identifier: Apache-2.0
/// sign: signs a folder in the format of OpenSSF model signing.
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "commands.h"

static int take(void *context, int key, cli_value value) {
    fst_bundle_files *files = context;
    if (key == 'k') files->key = value.text;
    if (key == 'o') files->signature = value.text;
    if (key == 'K') files->keep = value.text;
    return EXIT_OK;
}

static void report_bundle(const fst_bundle_files *files) {
    char path[PATH_MAX];
    const char *folder = files->folder;
    const char *slash = folder[0] != '\0' && folder[strlen(folder) - 1] == '/' ? "" : "/";
    snprintf(path, sizeof path, "%s%smodel.sig", folder, slash);
    cli_print_written(files->signature != NULL ? files->signature : path);
}

static int run(const cli_command *command, char **argv) {
    fst_bundle_files files = FST_STRUCT_INIT(fst_bundle_files);
    fst_manifest_stats stats = FST_STRUCT_INIT(fst_manifest_stats);
    fst_error error;
    cli_operands operands;
    int code = cli_parse(command, argv, &files, &operands);
    if (code != EXIT_OK || operands.is_answered) return code;
    if (files.key == NULL) return cli_usage("sign", "expected --private-key FILE");
    if (files.signature != NULL && cli_is_output(files.signature))
        return cli_usage("sign", "--output - is not supported: the bundle must be a file");
    files.folder = operands.words[0];
    files.progress = cli_progress_begin();
    fst_status status = fst_bundle_sign(&files, &stats, &error);
    cli_progress_end(status == FST_OK);
    if (status != FST_OK) return cli_fail(&error);
    if (cli_wants_json())
        printf("{\"files\": %" PRIu64 ", \"files_kept\": %" PRIu64 ", \"bytes\": %" PRIu64,
               stats.file_count, stats.files_kept, stats.bytes_read);
    else
        printf("signed %" PRIu64 " file%s, %" PRIu64 " reused", stats.file_count,
               cli_plural(stats.file_count), stats.files_kept);
    report_bundle(&files);
    return EXIT_OK;
}

static const cli_option options[] = {
    {'k', "private-key", "FILE", NULL, "private key: unencrypted PEM, P-256, P-384 or P-521", 0},
    {'o', "output", "TARGET", NULL, "write the bundle to TARGET (default: FOLDER/model.sig)", 0},
    {'K', "keep", "OLD", NULL,
     "reuse the digests of bundle OLD, signed with the same key, for unchanged files", 0},
    {0},
};

const cli_command sign_command = {
    .name = "sign",
    .operands = "FOLDER",
    .summary = "sign a folder with a key (OpenSSF model signing)",
    .about =
        "Sign all files of a folder. 'verify --signature' and the model_signing package check\n"
        "the signature. Write the manifest first ('hash --manifest --algorithm sha256'), so\n"
        "that loads can be verified by key. Needs libcrypto.",
    .examples =
        "  fastsafetensors sign --private-key key.pem folder\n"
        "  fastsafetensors sign --private-key key.pem --keep folder/model.sig folder\n"
        "  fastsafetensors verify --signature folder/model.sig --public-key pub.pem folder\n",
    .options = options,
    .operand_min = 1,
    .operand_max = 1,
    .inputs = INPUTS_NONE,
    .has_json = true,
    .has_progress = true,
    .take = take,
    .run = run,
};
