// SPDX-License-Identifier: Apache-2.0
/// clean: deletes temporary files that killed saves left behind.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "commands.h"

typedef struct clean_request {
    bool dry_run;
    size_t display;
} clean_request;

static void report(void *context, const fst_leftover *leftover) {
    clean_request *request = context;
    char size[16];
    const char *fate = leftover->in_use   ? "in use, not removed"
                       : request->dry_run ? "would be removed"
                                          : "removed";
    if (cli_wants_json()) {
        printf("%s\n  {\"path\": ", request->display > 0 ? "," : "{\"leftovers\": [");
        cli_print_json(leftover->path, strlen(leftover->path));
        printf(", \"bytes\": %" PRIu64 ", \"in_use\": %s}", leftover->size_bytes,
               leftover->in_use ? "true" : "false");
    } else {
        cli_print_name(leftover->path, strlen(leftover->path));
        printf("  %s, %s\n", cli_size_text(leftover->size_bytes, size), fate);
    }
    request->display++;
}

static int clean_path(const char *path, clean_request *request) {
    fst_error error;
    size_t count = 0;
    uint64_t bytes = 0;
    char size[16];
    struct stat info;
    fst_status status = fst_leftovers_visit(path, report, request, &error);
    // A path without a file is valid if a killed first save left a temporary file for it.
    if (status == FST_OK && request->display == 0 && stat(path, &info) != 0)
        return cli_fail_errno("looking for leftovers", path);
    if (status == FST_OK && !request->dry_run)
        status = fst_leftovers_remove(path, &count, &bytes, &error);
    if (cli_wants_json() && status != FST_OK && request->display > 0) {
        printf("], \"error\": ");
        cli_print_error_json(&error);
        printf("}\n");
        return cli_code_of(status);
    }
    if (status != FST_OK) return cli_fail(&error);
    if (cli_wants_json())
        printf("%s], \"removed\": %zu, \"bytes\": %" PRIu64 "}\n",
               request->display > 0 ? "" : "{\"leftovers\": [", count, bytes);
    else if (!request->dry_run)
        printf("%zu file%s removed, %s\n", count, cli_plural(count), cli_size_text(bytes, size));
    return EXIT_OK;
}

static int take(void *context, int key, cli_value value) {
    (void)key, (void)value;
    ((clean_request *)context)->dry_run = true;
    return EXIT_OK;
}

static int run(const cli_command *command, char **argv) {
    clean_request request = {0};
    cli_operands operands;
    int code = cli_parse(command, argv, &request, &operands);
    if (code != EXIT_OK || operands.is_answered) return code;
    if (cli_is_address(operands.words[0])) return cli_refuse_address("clean", operands.words[0]);
    return clean_path(operands.words[0], &request);
}

static const cli_option options[] = {
    {'d', "dry-run", NULL, NULL, "print what would be deleted; delete nothing", 0},
    {0},
};

const cli_command clean_command = {
    .name = "clean",
    .operands = "FOLDER | FILE",
    .summary = "delete temporary files that killed saves left",
    .about =
        "Delete the temporary files (.NAME.<16 hex digits>.tmp) that killed saves left in a\n"
        "folder or next to a file. Files that a running save or an index uses are kept. The\n"
        "next save of the same file or sharded model deletes them, too. Those of FOLDER.digest\n"
        "lie next to the folder.",
    .examples = "  fastsafetensors clean --dry-run folder\n",
    .options = options,
    .operand_min = 1,
    .operand_max = 1,
    .has_json = true,
    .take = take,
    .run = run,
};
