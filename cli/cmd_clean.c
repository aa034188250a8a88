// SPDX-License-Identifier: Apache-2.0
/// clean: the hidden files that killed saves left behind.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "commands.h"

typedef struct clean_request {
    bool dry_run;
    size_t told;
} clean_request;

static void tell(void *context, const fst_leftover *leftover) {
    clean_request *request = context;
    char size[16];
    const char *fate = leftover->in_use   ? "in use, stays"
                       : request->dry_run ? "would be removed"
                                          : "goes";
    if (cli_wants_json()) {
        printf("%s\n  {\"path\": ", request->told > 0 ? "," : "{\"leftovers\": [");
        cli_print_json(leftover->path, strlen(leftover->path));
        printf(", \"bytes\": %" PRIu64 ", \"in_use\": %s}", leftover->size_bytes,
               leftover->in_use ? "true" : "false");
    } else {
        cli_print_name(leftover->path, strlen(leftover->path));
        printf("  %s, %s\n", cli_size_text(leftover->size_bytes, size), fate);
    }
    request->told++;
}

static int clean_path(const char *path, clean_request *request) {
    fst_error error;
    size_t count = 0;
    uint64_t bytes = 0;
    char size[16];
    struct stat info;
    fst_status status = fst_leftovers_visit(path, tell, request, &error);
    // A first save that was killed has left a hidden file only; without that the name means
    // nothing.
    if (status == FST_OK && request->told == 0 && stat(path, &info) != 0)
        return cli_fail_errno("looking for leftovers of", path);
    if (status == FST_OK && !request->dry_run)
        status = fst_leftovers_remove(path, &count, &bytes, &error);
    if (cli_wants_json() && status != FST_OK && request->told > 0) {
        printf("], \"error\": ");
        cli_print_error_json(&error);
        printf("}\n");
        return cli_code_of(status);
    }
    if (status != FST_OK) return cli_fail(&error);
    if (cli_wants_json())
        printf("%s], \"removed\": %zu, \"bytes\": %" PRIu64 "}\n",
               request->told > 0 ? "" : "{\"leftovers\": [", count, bytes);
    else if (!request->dry_run)
        printf("%zu file%s removed, %s\n", count, cli_plural(count), cli_size_text(bytes, size));
    return EXIT_GOOD;
}

static int take(void *context, int key, cli_value value) {
    (void)key, (void)value;
    ((clean_request *)context)->dry_run = true;
    return EXIT_GOOD;
}

static int run(const cli_command *command, char **argv) {
    clean_request request = {0};
    cli_operands operands;
    int code = cli_parse(command, argv, &request, &operands);
    if (code != EXIT_GOOD || operands.is_answered) return code;
    if (cli_is_address(operands.words[0])) return cli_refuse_address("clean", operands.words[0]);
    return clean_path(operands.words[0], &request);
}

static const cli_option options[] = {
    {'d', "dry-run", NULL, NULL, "say what would be removed, remove nothing", 0},
    {0},
};

const cli_command clean_command = {
    .name = "clean",
    .operands = "FOLDER | FILE",
    .summary = "remove hidden files that killed saves left behind",
    .about =
        "Removes the hidden files (.NAME.<16 hex digits>.tmp) that saves which were killed left "
        "in\n"
        "a folder, or beside one file. What a living save or an index still uses stays. A save\n"
        "of the same name removes them by itself.",
    .examples = "  fastsafetensors clean --dry-run folder\n",
    .options = options,
    .operand_min = 1,
    .operand_max = 1,
    .has_json = true,
    .take = take,
    .run = run,
};
