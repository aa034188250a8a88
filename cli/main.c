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
    &inspect_command, &show_command,  &verify_command, &load_command,  &convert_command,
    &extract_command, &split_command, &merge_command,  &edit_command,  &diff_command,
    &hash_command,    &sign_command,  &rescue_command, &clean_command, &bench_command,
    &engines_command, &cache_command, &delta_command,  NULL,
};

static void print_help(void) {
    printf("fastsafetensors: load, inspect, save and convert safetensors models\n\n"
           "usage: fastsafetensors COMMAND [OPTIONS] PATH...\n"
           "       fastsafetensors PATH              same as inspect\n\n");
    for (size_t i = 0; cli_commands[i] != NULL; i++)
        printf("  %-9s %s\n", cli_commands[i]->name, cli_commands[i]->summary);
    printf("\n");
    cli_print_common_options();
    printf(
        "\nPATH is a .safetensors file, an index (*.safetensors.index.json), a folder, a URL, or\n"
        "- for standard input. 'fastsafetensors help COMMAND' shows options and examples.\n"
        "Exit codes: 0 success; 1 invalid, different or no match; 2 a file could not be read\n"
        "or written; 3 wrong command line; 4 something that is needed is not installed.\n");
}

/// Reports a failed write to standard output, for example to a full disk.
static int finish_output(int code) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return code;
    if (errno != EPIPE)
        fprintf(stderr, "fastsafetensors: writing to standard output failed: %s\n",
                strerror(errno));
    return errno == EPIPE ? code : EXIT_UNREADABLE;
}

/// The command to suggest for a word that other programs use, or NULL.
static const char *find_word(const char *word) {
    static const struct {
        const char *word, *position;
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
        if (strcmp(word, words[i].word) == 0) return words[i].position;
    return NULL;
}

static int refuse_command(const char *name) {
    const char *names[32] = {"help"};
    const char *position = find_word(name);
    size_t count = 1;
    if (position != NULL) return cli_usage(NULL, "unknown command '%s'. Use '%s'", name, position);
    for (; cli_commands[count - 1] != NULL; count++) names[count] = cli_commands[count - 1]->name;
    const char *nearest = cli_nearest(name, names, count);
    if (nearest != NULL)
        return cli_usage(NULL, "unknown command '%s'. Did you mean '%s'?", name, nearest);
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
    return EXIT_OK;
}

/// Moves the command's name in front of common options that precede it.
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

/// For an unknown command, whose options nothing reads.
static void find_json(char **argv) {
    for (int i = 1; argv[i] != NULL; i++)
        if (strcmp(argv[i], "--json") == 0) cli_set_json(true);
}

static int run(int argc, char **argv) {
    put_name_first(argc, argv);
    const char *name = argc > 1 ? argv[1] : "--help";
    struct stat info;
    if (is_help(name)) {
        find_json(argv);
        int code = run_help(argc > 2 ? argv[2] : NULL);
        return argc > 1 ? code : EXIT_USAGE;
    }
    if (strcmp(name, "--version") == 0 || strcmp(name, "-V") == 0) {
        printf("fastsafetensors %s\n", fst_version());
        return EXIT_OK;
    }
    if (strcmp(name, "__complete") == 0) return cli_complete(argv + 2, argc - 2);
    const cli_command *command = cli_command_find(name);
    if (command != NULL) return command->run(command, argv + 1);
    // A path alone means inspect. A path that cannot be examined is reported.
    if (strcmp(name, "-") == 0 || (name[0] != '-' && stat(name, &info) == 0) ||
        strchr(name, '/') != NULL)
        return inspect_command.run(&inspect_command, argv);
    find_json(argv);
    return refuse_command(name);
}

/// Sharded models may have more files than the default limit of 1,024, so raise it as far as
/// allowed.
static void raise_file_limit(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
    limit.rlim_cur = limit.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &limit); // failure shows when files are opened
}

/// Prints a warning of the library, also from other threads.
static void print_warning(void *context, fst_log_level level, const char *text) {
    (void)context, (void)level;
    cli_progress_hide();
    cli_print_note("warning: %s", text);
}

int main(int argc, char **argv) {
    // A closed pipe ends the command quietly, also if the parent ignores SIGPIPE.
    signal(SIGPIPE, SIG_DFL);
    signal(SIGXFSZ, SIG_IGN); // an error that is reported
    raise_file_limit();
    fst_log_set(print_warning, NULL, FST_LOG_WARNING);
    cli_set_json(false);
    cli_set_progress(true);
    int code = finish_output(run(argc, argv));
    if (cli_caught_signal() != 0) { // cleanup is done, so end by the signal
        signal(cli_caught_signal(), SIG_DFL);
        raise(cli_caught_signal());
    }
    return code;
}
