// SPDX-License-Identifier: Apache-2.0
/// The command fastsafetensors: finds the subcommand and runs it.
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "cli.h"

static const struct {
    const char *name;
    cli_command run;
    const char *summary;
} commands[] = {
    {"inspect", cmd_inspect, "list tensors, sizes and metadata of a model"},
    {"verify", cmd_verify, "check a model's headers; exit 0 valid, 1 invalid, 2 unreadable"},
    {"load", cmd_load, "load a model and say how fast, by what and why"},
    {"convert", cmd_convert, "write a model anew: dtype, alignment, order; torch files too"},
    {"extract", cmd_extract, "write some tensors of a model to a new file"},
    {"split", cmd_split, "write a model as a sharded set: by size, number or layer"},
    {"merge", cmd_merge, "write a sharded model, or several files, as one file"},
    {"diff", cmd_diff, "compare two models: names, shapes, dtypes, bytes, values"},
    {"hash", cmd_hash, "digests of tensors and files, to be kept beside them or inside"},
    {"bench", cmd_bench, "time every way to load a file, beside plain reads"},
    {"engines", cmd_engines, "what can read files here, and why"},
};

static void print_help(void) {
    printf("fastsafetensors: load, inspect, save and convert safetensors models\n\n"
           "usage: fastsafetensors COMMAND [OPTIONS] PATH\n\n");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        printf("  %-9s %s\n", commands[i].name, commands[i].summary);
    printf("\nPATH is a .safetensors file, an index (*.safetensors.index.json) or a folder.\n"
           "'fastsafetensors COMMAND --help' tells a command's options.\n");
}

/// A full disk behind stdout must not pass for success.
static int finish_output(int code) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return code;
    if (errno != EPIPE) fprintf(stderr, "fastsafetensors: writing: %s\n", strerror(errno));
    return errno == EPIPE ? code : EXIT_UNREADABLE;
}

int main(int argc, char **argv) {
    // A reader that goes away ends us quietly, also under parents that ignore the signal.
    signal(SIGPIPE, SIG_DFL);
    const char *name = argc > 1 ? argv[1] : "--help";
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0) {
        print_help();
        return finish_output(argc > 1 ? EXIT_GOOD : EXIT_USAGE);
    }
    if (strcmp(name, "--version") == 0 || strcmp(name, "-V") == 0) {
        printf("fastsafetensors %s\n", fst_version());
        return finish_output(EXIT_GOOD);
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (strcmp(name, commands[i].name) == 0)
            return finish_output(commands[i].run(argc - 1, argv + 1));
    return cli_usage(NULL, "unknown command '%s'", name);
}
