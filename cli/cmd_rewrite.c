// SPDX-License-Identifier: Apache-2.0
/// convert, extract, merge, split: one model written as another.
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rewrite.h"
#include "torch_file.h"

#define GLOB_COUNT_MAX 256

typedef struct rewrite_command {
    const char *name, *usage, *summary, *own_options;
    bool has_select, splits, takes_many;
} rewrite_command;

static const rewrite_command convert_command = {"convert",
                                                "SOURCE TARGET",
                                                "Writes a model as one file: converted, aligned or "
                                                "in another order, within 256 MiB of memory.\n"
                                                "SOURCE may also be a torch.save file; it is read "
                                                "by torch's restricted loader (weights_only).\n",
                                                "",
                                                true,
                                                false,
                                                false};
static const rewrite_command extract_command = {
    "extract",
    "--select GLOB SOURCE TARGET",
    "Writes the tensors whose names match to a new file.\n",
    "",
    true,
    false,
    false};
static const rewrite_command merge_command = {
    "merge",
    "SOURCE.. TARGET",
    "Writes a sharded model, or several files, as one file. A name in two files is an error.\n",
    "",
    false,
    false,
    true};
static const rewrite_command split_command = {
    "split",
    "(--size SIZE | --count N | --by-layer) SOURCE FOLDER",
    "Writes a model as a sharded set with an index, as Hugging Face's libraries name them.\n",
    "  --size SIZE       at most this much a file (5G is 5 GiB)\n"
    "  --count N         N files of about the same size\n"
    "  --by-layer        a file for each layer: the first number in the names\n"
    "  --stem NAME       names begin with it (default: model)\n",
    true,
    true,
    false};

typedef struct rewrite_request {
    const rewrite_command *command;
    rewrite_plan plan;
    const char *globs[GLOB_COUNT_MAX];
    char **sources;
    size_t source_count;
    bool lenient;
} rewrite_request;

static void print_help(const rewrite_command *command) {
    printf(
        "usage: fastsafetensors %s [OPTIONS] %s\n\n%s\n%s%s"
        "  --dtype DTYPE     floats become this (integers: wider ones only), e.g. BF16\n"
        "  --align N         tensors begin at multiples of N bytes (64, 4096, ..)\n"
        "  --order ORDER     reference (default: by dtype, then name), name or given\n"
        "  --quick           do not wait until the bytes are on the device\n"
        "  --engine ENGINE   auto (default), buffered, direct or uring\n"
        "  --dry-run         say what would be written, write nothing\n"
        "  --lenient         accept bytes after the last tensor\n"
        "  --no-progress     no progress bar, also on a terminal\n\n"
        "The target comes into place in one step, when it is complete; until then, and after any\n"
        "error or crash, what was there before stays.\n",
        command->name, command->usage, command->summary,
        command->has_select ? "  --select GLOB     only tensors whose names match; may come "
                              "several times\n"
                            : "",
        command->own_options);
}

static bool parse_number(const char *text, unsigned long max, unsigned long *out) {
    char *end;
    if (text[0] < '0' || text[0] > '9') return false;
    *out = strtoul(text, &end, 10);
    return *end == '\0' && *out <= max;
}

static const char *const orders[] = {"reference", "name", "given"};
static const char *const engines[] = {"auto", "buffered", "direct", "uring"};

/// Takes one option with a value; EXIT_GOOD, or the exit code after saying what is wrong.
static int take_option(rewrite_request *request, int option, const char *value) {
    rewrite_plan *plan = &request->plan;
    const char *name = request->command->name;
    unsigned long number = 0;
    int word = 0;
    switch (option) {
    case 'D':
        word = cli_find_dtype(value);
        plan->convert = 1;
        plan->dtype = (fst_dtype)(word < 0 ? 0 : word);
        return word < 0 ? cli_usage(name, "unknown dtype '%s'", value) : EXIT_GOOD;
    case 'a':
        if (!parse_number(value, 1 << 20, &number) || (number & (number - 1)) != 0)
            return cli_usage(name, "--align takes a power of two up to 1048576, not '%s'", value);
        plan->save.alignment_bytes = number;
        return EXIT_GOOD;
    case 'o':
        word = cli_find_word(value, orders, FST_SAVE_ORDER_COUNT);
        plan->save.order = (fst_save_order)(word < 0 ? 0 : word);
        return word < 0 ? cli_usage(name, "unknown order '%s'", value) : EXIT_GOOD;
    case 'e':
        word = cli_find_word(value, engines, FST_SAVE_ENGINE_COUNT);
        plan->save.engine = (fst_save_engine)(word < 0 ? 0 : word);
        return word < 0 ? cli_usage(name, "unknown engine '%s'", value) : EXIT_GOOD;
    case 's':
        if (!request->command->has_select) return cli_usage(name, "--select is not for this");
        if (plan->glob_count == GLOB_COUNT_MAX) return cli_usage(name, "too many --select");
        request->globs[plan->glob_count++] = value;
        return EXIT_GOOD;
    case 'z':
        if (!cli_parse_size(value, &plan->file_bytes_max) || plan->file_bytes_max == 0)
            return cli_usage(name, "bad size '%s'", value);
        return EXIT_GOOD;
    case 'c':
        if (!parse_number(value, 99999, &number) || number == 0)
            return cli_usage(name, "--count takes 1 to 99999, not '%s'", value);
        plan->wanted_files = (uint32_t)number;
        return EXIT_GOOD;
    default: plan->save.stem = value; return EXIT_GOOD;
    }
}

static int check_request(const rewrite_request *request) {
    const rewrite_command *command = request->command;
    const rewrite_plan *plan = &request->plan;
    int ways = (plan->file_bytes_max > 0) + (plan->wanted_files > 0) + (plan->by_layer ? 1 : 0);
    if (command->splits && ways != 1)
        return cli_usage(command->name, "expected one of --size, --count and --by-layer");
    if (!command->splits && (ways > 0 || plan->save.stem != NULL))
        return cli_usage(command->name, "--size, --count, --by-layer and --stem are split's");
    if (command == &extract_command && plan->glob_count == 0)
        return cli_usage(command->name, "expected --select GLOB");
    if (request->source_count == 0 || (request->source_count > 1 && !command->takes_many))
        return cli_usage(command->name, "expected %s", command->usage);
    return EXIT_GOOD;
}

static int parse_arguments(int argc, char **argv, rewrite_request *request, bool *done) {
    static const struct option options[] = {
        {"dtype", required_argument, NULL, 'D'},
        {"align", required_argument, NULL, 'a'},
        {"order", required_argument, NULL, 'o'},
        {"engine", required_argument, NULL, 'e'},
        {"select", required_argument, NULL, 's'},
        {"size", required_argument, NULL, 'z'},
        {"count", required_argument, NULL, 'c'},
        {"stem", required_argument, NULL, 'n'},
        {"by-layer", no_argument, NULL, 'y'},
        {"quick", no_argument, NULL, 'q'},
        {"dry-run", no_argument, NULL, 'd'},
        {"lenient", no_argument, NULL, 'l'},
        {"no-progress", no_argument, NULL, 'p'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    request->plan.save.promise = FST_SAVE_DURABLE;
    for (int option; (option = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        int code = EXIT_GOOD;
        switch (option) {
        case 'y': request->plan.by_layer = true; break;
        case 'q': request->plan.save.promise = FST_SAVE_QUICK; break;
        case 'd': request->plan.dry_run = true; break;
        case 'l': request->lenient = true; break;
        case 'p': request->plan.no_progress = true; break;
        case 'h':
            print_help(request->command);
            *done = true;
            return EXIT_GOOD;
        case '?': return cli_usage(request->command->name, "wrong option");
        default: code = take_option(request, option, optarg);
        }
        if (code != EXIT_GOOD) return code;
    }
    request->sources = argv + optind;
    request->source_count = argc > optind ? (size_t)(argc - optind - 1) : 0;
    request->plan.target = argc > optind ? argv[argc - 1] : NULL;
    request->plan.globs = request->globs;
    return check_request(request);
}

static int run_command(const rewrite_command *command, int argc, char **argv) {
    rewrite_request request = {.command = command};
    bool done = false;
    // getopt reorders what argv points to; the Python side wants it as it was.
    int code = parse_arguments(argc, argv, &request, &done);
    if (code != EXIT_GOOD || done) return code;
    if (command == &convert_command && cli_is_torch_file(request.sources[0]))
        return cli_convert_torch_file(argc, argv);
    fst_open_options options = {.struct_size = sizeof options,
                                .flags = request.lenient ? FST_OPEN_LENIENT : 0};
    request.plan.save.struct_size = sizeof request.plan.save;
    fst_model *model;
    fst_error error;
    fst_status status = request.source_count == 1
                            ? fst_model_open(request.sources[0], &options, &model, &error)
                            : fst_model_open_files((const char *const *)request.sources,
                                                   request.source_count, &options, &model, &error);
    if (status != FST_OK) return cli_fail(&error);
    code = cli_rewrite(model, &request.plan);
    fst_model_close(model);
    return code;
}

int cmd_convert(int argc, char **argv) { return run_command(&convert_command, argc, argv); }
int cmd_extract(int argc, char **argv) { return run_command(&extract_command, argc, argv); }
int cmd_merge(int argc, char **argv) { return run_command(&merge_command, argc, argv); }
int cmd_split(int argc, char **argv) { return run_command(&split_command, argc, argv); }
