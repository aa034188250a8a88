// SPDX-License-Identifier: Apache-2.0
/// convert, extract, merge, split, rescue: one model written as another.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "rewrite.h"
#include "torch_file.h"

#define GLOB_COUNT_MAX 256

typedef struct rewrite_request {
    const cli_command *command;
    rewrite_plan plan;
    const char *globs[GLOB_COUNT_MAX];
    char **sources;
    size_t source_count;
    uint32_t open_flags;
} rewrite_request;

static const char *const orders[] = {"reference", "name", "given", NULL};
static const char *const engines[] = {"auto", "buffered", "direct", "uring", NULL};

static int take_number(rewrite_request *request, int key, const char *text) {
    rewrite_plan *plan = &request->plan;
    const char *name = request->command->name;
    uint64_t number = 0;
    switch (key) {
    case 'a':
        if (!cli_parse_count(text, 1 << 20, &number) || (number & (number - 1)) != 0)
            return cli_usage(name, "--align takes a power of two up to 1048576, not '%s'", text);
        plan->save.alignment_bytes = number;
        return EXIT_GOOD;
    case 'z':
        if (!cli_parse_size(text, &plan->file_bytes_max) || plan->file_bytes_max == 0)
            return cli_usage(name, "--size takes a size (5G), not '%s'", text);
        return EXIT_GOOD;
    default:
        if (!cli_parse_count(text, 99999, &number) || number == 0)
            return cli_usage(name, "--count takes 1 to 99999, not '%s'", text);
        plan->wanted_files = (uint32_t)number;
        return EXIT_GOOD;
    }
}

static int take(void *context, int key, cli_value value) {
    rewrite_request *request = context;
    rewrite_plan *plan = &request->plan;
    switch (key) {
    case 'D':
        plan->convert = 1;
        plan->dtype = (fst_dtype)value.word;
        return EXIT_GOOD;
    case 'o': plan->save.order = (fst_save_order)value.word; return EXIT_GOOD;
    case 'e': plan->save.engine = (fst_save_engine)value.word; return EXIT_GOOD;
    case 's':
        if (plan->glob_count == GLOB_COUNT_MAX)
            return cli_usage(request->command->name, "too many --select");
        request->globs[plan->glob_count++] = value.text;
        return EXIT_GOOD;
    case 'y': plan->by_layer = true; return EXIT_GOOD;
    case 'q': plan->save.promise = FST_SAVE_QUICK; return EXIT_GOOD;
    case 'd': plan->dry_run = true; return EXIT_GOOD;
    case 'l': request->open_flags |= FST_OPEN_LENIENT; return EXIT_GOOD;
    case 'n': plan->save.stem = value.text; return EXIT_GOOD;
    default: return take_number(request, key, value.text);
    }
}

static int check_request(const rewrite_request *request) {
    const rewrite_plan *plan = &request->plan;
    int ways = (plan->file_bytes_max > 0) + (plan->wanted_files > 0) + (plan->by_layer ? 1 : 0);
    if (request->command == &split_command && ways != 1)
        return cli_usage("split", "expected one of --size, --count and --by-layer");
    if (request->command == &extract_command && plan->glob_count == 0)
        return cli_usage("extract", "expected --select GLOB");
    return EXIT_GOOD;
}

/// Says how much of a file that was cut off is lost: opening it strictly tells.
static void say_loss(const char *path) {
    fst_model *model = NULL;
    fst_error error;
    bool whole = fst_model_open(path, NULL, &model, &error) == FST_OK;
    if (!cli_wants_json())
        fprintf(stderr, "fastsafetensors: %s\n",
                whole ? "nothing of it is missing" : error.message);
    fst_model_close(model);
}

static int rewrite_sources(const rewrite_request *request) {
    fst_open_options options = {.struct_size = sizeof options, .flags = request->open_flags};
    fst_model *model;
    int code = cli_open_sources((const char *const *)request->sources, request->source_count,
                                &options, &model);
    if (code != EXIT_GOOD) return code;
    if (request->command == &rescue_command) say_loss(request->sources[0]);
    // A target that is there may hold more than what could be saved of this one: nothing.
    if (request->command == &rescue_command && fst_model_tensor_count(model) == 0)
        code =
            cli_refuse(EXIT_INVALID, "NoTensors", "no tensor of it is whole: nothing is written");
    else
        code = cli_rewrite(model, &request->plan);
    fst_model_close(model);
    return code;
}

static int run_command(const cli_command *command, int argc, char **argv) {
    rewrite_request request = {
        .command = command,
        .plan.save = {.struct_size = sizeof request.plan.save, .promise = FST_SAVE_DURABLE},
        .open_flags = command == &rescue_command ? FST_OPEN_CUT : 0};
    cli_operands operands;
    // Operands are moved to the front of argv; the Python side wants it as it was.
    char **words = calloc((size_t)argc + 1, sizeof *words);
    if (words == NULL) return cli_no_memory();
    memcpy(words, argv, (size_t)argc * sizeof *words);
    int code = cli_parse(command, words, &request, &operands);
    if (code == EXIT_GOOD && !operands.is_answered) code = check_request(&request);
    if (code == EXIT_GOOD && !operands.is_answered) {
        request.sources = operands.words;
        request.source_count = (size_t)operands.count - 1;
        request.plan.target = operands.words[operands.count - 1];
        request.plan.globs = request.globs;
        if (command == &convert_command && cli_is_torch_file(request.sources[0]))
            code = cli_convert_torch_file(argc, argv);
        else
            code = rewrite_sources(&request);
    }
    free(words);
    return code;
}

static int run_convert(int argc, char **argv) { return run_command(&convert_command, argc, argv); }
static int run_extract(int argc, char **argv) { return run_command(&extract_command, argc, argv); }
static int run_split(int argc, char **argv) { return run_command(&split_command, argc, argv); }
static int run_merge(int argc, char **argv) { return run_command(&merge_command, argc, argv); }
static int run_rescue(int argc, char **argv) { return run_command(&rescue_command, argc, argv); }

#define SELECT_OPTION                                                                              \
    {'s', "select", "GLOB", NULL, "only tensors whose names match; may come several times"}
#define SAVE_OPTIONS                                                                               \
    {'o', "order", "ORDER", orders,                                                                \
     "of tensors: by dtype and name (reference), by name, or as given"},                           \
        {'q', "quick", NULL, NULL, "do not wait until the bytes are on the device"},               \
        {'e', "engine", "ENGINE", engines, "what writes the bytes (auto)"},                        \
        {'d', "dry-run", NULL, NULL, "say what would be written, write nothing"}
#define CHANGE_OPTIONS                                                                             \
    {'D', "dtype", "DTYPE", cli_dtype_words,                                                       \
     "floats become this (integers: wider ones only), e.g. BF16"},                                 \
        {'a', "align", "N", NULL, "tensors begin at multiples of N bytes (64, 4096, ..)"},         \
        {'l', "lenient", NULL, NULL, "accept bytes after the last tensor"}

static const cli_option rewrite_options[] = {SELECT_OPTION, CHANGE_OPTIONS, SAVE_OPTIONS, {0}};

static const cli_option split_options[] = {
    {'z', "size", "SIZE", NULL, "at most this much a file (5G is 5 GiB)"},
    {'c', "count", "N", NULL, "N files of about the same size"},
    {'y', "by-layer", NULL, NULL, "a file for each layer: the first number in the names"},
    {'n', "stem", "NAME", NULL, "names begin with it (model)"},
    SELECT_OPTION,
    CHANGE_OPTIONS,
    SAVE_OPTIONS,
    {0}};

static const cli_option rescue_options[] = {SELECT_OPTION, SAVE_OPTIONS, {0}};

#define IN_ONE_STEP                                                                                \
    "The target comes into place in one step, when it is complete; until then, and after\n"        \
    "any error or crash, what was there before stays. TARGET may be SOURCE itself, or - for\n"     \
    "standard output."

const cli_command convert_command = {
    .name = "convert",
    .operands = "SOURCE TARGET",
    .summary = "write a model anew: dtype, alignment, order; torch files too",
    .about =
        "Writes a model as one file: converted, aligned or in another order, within 256 MiB of\n"
        "memory. SOURCE may also be a torch.save file; it is read by torch's restricted loader\n"
        "(weights_only), in the Python beside this command or else the first python3 of PATH.\n"
        "\n" IN_ONE_STEP,
    .examples = "  fastsafetensors convert --dtype BF16 model.safetensors small.safetensors\n"
                "  fastsafetensors convert pytorch_model.bin model.safetensors\n",
    .options = rewrite_options,
    .operand_min = 2,
    .operand_max = 2,
    .has_json = true,
    .has_progress = true,
    .take = take,
    .run = run_convert,
};

const cli_command extract_command = {
    .name = "extract",
    .operands = "--select GLOB SOURCE TARGET",
    .summary = "write some tensors of a model to a new file",
    .about = "Writes the tensors whose names match to a new file.\n\n" IN_ONE_STEP,
    .examples =
        "  fastsafetensors extract --select 'embeddings.*' model.safetensors emb.safetensors\n",
    .options = rewrite_options,
    .operand_min = 2,
    .operand_max = 2,
    .has_json = true,
    .has_progress = true,
    .take = take,
    .run = run_extract,
};

const cli_command split_command = {
    .name = "split",
    .operands = "(--size SIZE | --count N | --by-layer) SOURCE FOLDER",
    .summary = "write a model as a sharded set: by size, number or layer",
    .about =
        "Writes a model as a sharded set with an index, as Hugging Face's libraries name them.\n"
        "The index comes into place last: until then the folder holds what it held.",
    .examples = "  fastsafetensors split --size 5G model.safetensors folder\n",
    .options = split_options,
    .operand_min = 2,
    .operand_max = 2,
    .has_json = true,
    .has_progress = true,
    .take = take,
    .run = run_split,
};

const cli_command merge_command = {
    .name = "merge",
    .operands = "SOURCE.. TARGET",
    .summary = "write a sharded model, or several models, as one file",
    .about =
        "Writes a sharded model, or several files, indexes or folders, as one file. A name in\n"
        "two of them is an error.\n\n" IN_ONE_STEP,
    .examples = "  fastsafetensors merge folder model.safetensors\n"
                "  fastsafetensors merge base.safetensors adapter.safetensors both.safetensors\n",
    .options = rewrite_options,
    .operand_min = 2,
    .operand_max = 100000,
    .has_json = true,
    .has_progress = true,
    .take = take,
    .run = run_merge,
};

const cli_command rescue_command = {
    .name = "rescue",
    .operands = "SOURCE TARGET",
    .summary = "write what is whole of a file that was cut off",
    .about = "Writes the tensors that are whole of a file that ends before its data does (an\n"
             "interrupted download or copy) to a new file, and says how much is lost.",
    .examples = "  fastsafetensors rescue half.safetensors whole.safetensors\n",
    .options = rescue_options,
    .operand_min = 2,
    .operand_max = 2,
    .has_json = true,
    .has_progress = true,
    .take = take,
    .run = run_rescue,
};
