// SPDX-License-Identifier: Apache-2.0
/// engines: what was probed, on this machine or for one file.
#include <getopt.h>
#include <stdio.h>

#include "cli.h"

static void print_help(void) {
    printf(
        "usage: fastsafetensors engines [FILE]\n\n"
        "Lists the ways to read, the GPUs' drivers and their ways straight from storage (cuFile,\n"
        "hipFile), whether each works here (for FILE, if one is given), which ones would be used,\n"
        "and why.\n");
}

int cmd_engines(int argc, char **argv) {
    static const struct option options[] = {{"help", no_argument, NULL, 'h'}, {NULL, 0, NULL, 0}};
    for (int option; (option = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        if (option != 'h') return cli_usage("engines", "wrong option");
        print_help();
        return EXIT_GOOD;
    }
    if (argc - optind > 1) return cli_usage("engines", "expected at most one FILE");
    fst_engine_info infos[16];
    size_t count;
    fst_error error;
    if (fst_engines_probe(argv[optind], infos, 16, &count, &error) != FST_OK)
        return cli_fail(&error);
    for (size_t i = 0; i < count; i++)
        printf("%s%-7s%s %-9s %s\n", infos[i].chosen ? cli_bold() : "", infos[i].name,
               infos[i].chosen ? cli_plain() : "",
               infos[i].chosen   ? "chosen"
               : infos[i].usable ? "usable"
                                 : "unusable",
               infos[i].reason);
    return EXIT_GOOD;
}
