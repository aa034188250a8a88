// SPDX-License-Identifier: Apache-2.0
/// The command fastsafetensors: finds the subcommand and runs it.
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "commands.h"
#include "options.h"

const cli_command *const cli_commands[] = {
    &inspect_command, &show_command,    &verify_command,
    &load_command,    &convert_command, &extract_command,
    &split_command,   &merge_command,   &edit_command,
    &diff_command,    &hash_command,    &sign_command,
    &rescue_command,  &clean_command,   &bench_command,
    &engines_command, &cache_command,   NULL,
};

static void print_help(void) {
    printf("fastsafetensors: load, inspect, save and convert safetensors models\n\n"
           "usage: fastsafetensors COMMAND [OPTIONS] PATH..\n"
           "       fastsafetensors PATH              the same as inspect\n\n");
    for (size_t i = 0; cli_commands[i] != NULL; i++)
        printf("  %-9s %s\n", cli_commands[i]->name, cli_commands[i]->summary);
    printf("\nPATH is a .safetensors file, an index (*.safetensors.index.json), a folder, or -:\n"
           "standard input.\n"
           "'fastsafetensors help COMMAND' tells a command's options and shows examples.\n"
           "Exit codes: 0 success, 1 the answer is no (invalid, different, nothing matches),\n"
           "2 could not be read or written, 3 wrong command line, 4 something is not installed.\n");
}

/// A full disk behind stdout must not pass for success.
static int finish_output(int code) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return code;
    if (errno != EPIPE) fprintf(stderr, "fastsafetensors: writing: %s\n", strerror(errno));
    return errno == EPIPE ? code : EXIT_UNREADABLE;
}

/// What is asked for by a word of other programs, and what says it here.
static const char *word_here(const char *word) {
    static const struct {
        const char *word, *here;
    } words[] = {
        {"info", "inspect"},
        {"list", "inspect"},
        {"ls", "inspect"},
        {"header", "inspect --json"},
        {"metadata", "inspect"},
        {"cat", "show"},
        {"print", "show"},
        {"stats", "show"},
        {"check", "verify"},
        {"validate", "verify"},
        {"checksum", "hash"},
        {"digest", "hash"},
        {"compare", "diff"},
        {"prune", "cache prune"},
        {"rename", "edit --rename OLD=NEW"},
        {"quantize", "convert"},
        {"cast", "convert --dtype"},
        {"compress", "convert --compress"},
        {"decompress", "convert --decompress"},
        {"shard", "split"},
        {"join", "merge"},
        {"repair", "rescue"},
        {"benchmark", "bench"},
        {"version", "--version"},
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(word, words[i].word) == 0) return words[i].here;
    return NULL;
}

static int refuse_command(const char *name) {
    const char *names[32] = {"help"};
    const char *here = word_here(name);
    size_t count = 1;
    if (here != NULL) return cli_usage(NULL, "unknown command '%s': that is '%s' here", name, here);
    for (; cli_commands[count - 1] != NULL; count++) names[count] = cli_commands[count - 1]->name;
    const char *nearest = cli_nearest(name, names, count);
    if (nearest != NULL)
        return cli_usage(NULL, "unknown command '%s'; did you mean '%s'?", name, nearest);
    return cli_usage(NULL, "unknown command '%s', and no such file", name);
}

static bool is_help(const char *name) {
    return strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0;
}

static int run_help(const char *name) {
    if (name != NULL && (is_help(name) || name[0] == '-')) name = NULL;
    const cli_command *command = name == NULL ? NULL : cli_command_find(name);
    if (name != NULL && command == NULL) return refuse_command(name);
    if (command == NULL)
        print_help();
    else
        cli_print_help(command);
    return EXIT_GOOD;
}

/// Options that every command has may stand before its name: puts the name first.
static void put_name_first(int argc, char **argv) {
    static const char *const options[] = {"--json", "--no-progress", NULL};
    int at = 1;
    while (at < argc && cli_find_word(argv[at], options) >= 0)
        if (strcmp(argv[at++], "--json") == 0) cli_set_json(true);
    if (at >= argc) return;
    char *name = argv[at];
    memmove(&argv[2], &argv[1], (size_t)(at - 1) * sizeof *argv);
    argv[1] = name;
}

static int run(int argc, char **argv) {
    put_name_first(argc, argv);
    const char *name = argc > 1 ? argv[1] : "--help";
    struct stat info;
    if (is_help(name)) {
        int code = run_help(argc > 2 ? argv[2] : NULL);
        return argc > 1 ? code : EXIT_USAGE;
    }
    if (strcmp(name, "--version") == 0 || strcmp(name, "-V") == 0) {
        printf("fastsafetensors %s\n", fst_version());
        return EXIT_GOOD;
    }
    if (strcmp(name, "__complete") == 0) return cli_complete(argv + 2, argc - 2);
    const cli_command *command = cli_command_find(name);
    if (command != NULL) return command->run(command, argv + 1);
    // A path alone asks what it is; one that can't be looked at is told of as such.
    if (strcmp(name, "-") == 0 || (name[0] != '-' && stat(name, &info) == 0) ||
        strchr(name, '/') != NULL)
        return inspect_command.run(&inspect_command, argv);
    return refuse_command(name);
}

/// Sets of more shards than the usual 1,024 files are opened at once: what may be asked for is.
static void raise_file_limit(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
    limit.rlim_cur = limit.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &limit); // refused: opening will tell
}

int main(int argc, char **argv) {
    // A reader that goes away ends us quietly, also under parents that ignore the signal.
    signal(SIGPIPE, SIG_DFL);
    raise_file_limit();
    cli_set_json(false);
    cli_set_progress(true);
    int code = finish_output(run(argc, argv));
    if (cli_caught_signal() != 0) { // what was begun is tidied up: end as the signal would have
        signal(cli_caught_signal(), SIG_DFL);
        raise(cli_caught_signal());
    }
    return code;
}
