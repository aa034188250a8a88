// SPDX-License-Identifier: Apache-2.0
/// engines: prints which engines work, on this machine or for one file.
#include <stdio.h>
#include <string.h>

#include "commands.h"

static void print_json(const fst_engine_info *infos, size_t count) {
    printf("{\"engines\": [");
    for (size_t i = 0; i < count; i++) {
        printf(
            "%s{\"name\": \"%s\", \"usable\": %s, \"chosen\": %s, \"reason\": ", i > 0 ? ", " : "",
            infos[i].name, infos[i].usable ? "true" : "false", infos[i].chosen ? "true" : "false");
        cli_print_json(infos[i].reason, strlen(infos[i].reason));
        printf("}");
    }
    printf("]}\n");
}

static int run(const cli_command *command, char **argv) {
    cli_operands operands;
    int code = cli_parse(command, argv, NULL, &operands);
    if (code != EXIT_OK || operands.is_answered) return code;
    fst_engine_info infos[16] = {FST_STRUCT_INIT(fst_engine_info)};
    size_t count;
    fst_error error;
    const char *path = operands.count > 0 ? operands.words[0] : NULL;
    bool failed = fst_engines_probe(path, infos, 16, &count, &error) != FST_OK;
    if (failed)
        code = cli_fail(&error);
    else if (cli_wants_json())
        print_json(infos, count);
    else
        for (size_t i = 0; i < count; i++) {
            printf("%s%-7s%s %-9s ", infos[i].chosen ? cli_bold() : "", infos[i].name,
                   infos[i].chosen ? cli_plain() : "",
                   infos[i].chosen   ? "chosen"
                   : infos[i].usable ? "usable"
                                     : "unusable");
            cli_print_name(infos[i].reason, strlen(infos[i].reason));
            printf("\n");
        }
    return code;
}

const cli_command engines_command = {
    .name = "engines",
    .operands = "[PATH]",
    .summary = "show which I/O methods work here, and why",
    .about =
        "Show every I/O method, GPU driver and direct path from storage to a GPU (cuFile,\n"
        "hipFile): whether it works here, or for PATH, whether a load of PATH would use it by\n"
        "default, and why.",
    .operand_max = 1,
    .inputs = INPUTS_FIRST,
    .has_json = true,
    .run = run,
};
