// SPDX-License-Identifier: Apache-2.0
/// convert, extract, merge, split, rescue: one model written as another.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "commands.h"
#include "rewrite.h"
#include "standard_input.h"
#include "torch_file.h"

#define GLOB_COUNT_MAX 256

static const char *const compressions[] = {"float", "all", NULL};

typedef struct rewrite_request {
    const cli_command *command;
    rewrite_plan plan;
    const char *globs[GLOB_COUNT_MAX];
    char **sources;
    size_t source_count;
    uint32_t open_flags;
    bool decompress;
} rewrite_request;

const char *const cli_manifest_words[] = {"xxh3-128", "blake3", "sha256", NULL};
const char *const cli_order_words[] = {"reference", "name", "given", NULL};
const char *const cli_engine_words[] = {"auto", "buffered", "direct", "uring", NULL};

void cli_plan_manifest(rewrite_plan *plan, int digest) {
    plan->save.manifest = "";
    plan->save.digest = (fst_digest)digest;
}

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
    case 'k': plan->save.compress = (fst_compress)(value.word + 1); return EXIT_GOOD;
    case 'm': cli_plan_manifest(plan, value.word); return EXIT_GOOD;
    case 'u': request->decompress = true; return EXIT_GOOD;
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

/// What the target and the other options allow of compressing.
static int check_packing(const rewrite_request *request, bool is_torch_file) {
    const rewrite_plan *plan = &request->plan;
    bool compress = plan->save.compress != FST_COMPRESS_NONE;
    const char *name = request->command->name;
    if (!compress && !request->decompress) return EXIT_GOOD;
    if (compress && request->decompress)
        return cli_usage(name, "--compress and --decompress exclude each other");
    if (cli_is_output(plan->target) || plan->dry_run || (request->decompress && is_torch_file))
        return cli_usage(name, "--%s takes no standard output%s or --dry-run",
                         compress ? "compress" : "decompress", compress ? "" : ", torch file");
    bool has_more = plan->convert || plan->glob_count > 0 || plan->save.alignment_bytes > 0 ||
                    plan->save.order != FST_SAVE_ORDER_REFERENCE || request->open_flags != 0;
    if (request->decompress && has_more)
        return cli_usage(name, "--decompress gives the file as it was: no other option goes with "
                               "it but --quick and --manifest (without it any rewrite is plain)");
    return EXIT_GOOD;
}

/// A manifest is made by the save that writes a file beside which it is to lie.
static int check_manifest(const rewrite_request *request) {
    const rewrite_plan *plan = &request->plan;
    if (plan->save.manifest == NULL) return EXIT_GOOD;
    if (cli_is_output(plan->target) || plan->dry_run)
        return cli_usage(request->command->name,
                         "--manifest takes no standard output or --dry-run");
    return EXIT_GOOD;
}

/// Whether two paths lead to the same file.
static bool is_same_file(const char *a, const char *b) {
    struct stat infos[2];
    return stat(a, &infos[0]) == 0 && stat(b, &infos[1]) == 0 &&
           infos[0].st_dev == infos[1].st_dev && infos[0].st_ino == infos[1].st_ino;
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

static int check_rescue(const rewrite_request *request, const fst_model *model) {
    const char *source = request->sources[0];
    // What is left of a tensor that was cut off may be worth another try, or the rest of a
    // download.
    if (is_same_file(source, request->plan.target))
        return cli_usage("rescue",
                         "'%s' would take its own place, and the tensors that are not "
                         "whole be lost: give it another name",
                         source);
    say_loss(source);
    // A target that is there may hold more than what could be saved of this one: nothing.
    if (fst_model_tensor_count(model) > 0) return EXIT_GOOD;
    return cli_refuse(EXIT_INVALID, "NoTensors", "no tensor of it is whole: nothing is written");
}

static int rewrite_sources(const rewrite_request *request) {
    fst_open_options options = {.struct_size = sizeof options, .flags = request->open_flags};
    fst_model *model;
    int code = cli_open_sources((const char *const *)request->sources, request->source_count,
                                &options, &model);
    if (code != EXIT_GOOD) return code;
    if (request->command == &rescue_command) code = check_rescue(request, model);
    if (code == EXIT_GOOD) code = cli_rewrite(model, &request->plan);
    fst_model_close(model);
    return code;
}

static int run(const cli_command *command, char **argv) {
    rewrite_request request = {
        .command = command,
        .plan.save = {.struct_size = sizeof request.plan.save, .promise = FST_SAVE_DURABLE},
        .open_flags = command == &rescue_command ? FST_OPEN_CUT : 0};
    cli_operands operands;
    int code = cli_parse(command, argv, &request, &operands);
    if (code != EXIT_GOOD || operands.is_answered) return code;
    if ((code = check_request(&request)) != EXIT_GOOD) return code;
    request.sources = operands.words;
    request.source_count = (size_t)operands.count - 1;
    request.plan.target = operands.words[operands.count - 1];
    request.plan.globs = request.globs;
    bool is_torch_file = command == &convert_command && cli_is_torch_file(request.sources[0]);
    if ((code = check_packing(&request, is_torch_file)) != EXIT_GOOD) return code;
    if ((code = check_manifest(&request)) != EXIT_GOOD) return code;
    if (is_torch_file && request.open_flags != 0)
        return cli_usage("convert", "--lenient is for safetensors files");
    if (is_torch_file) return cli_convert_torch_file(request.sources[0], &request.plan);
    bool packs = command == &convert_command && request.open_flags == 0 &&
                 cli_packs_alone(&request.plan, request.sources[0]);
    if (request.decompress || packs)
        return cli_pack(request.sources[0], &request.plan, request.decompress);
    return rewrite_sources(&request);
}

/// The commands of this file, for the table of their options.
enum { CONVERT = 1, EXTRACT = 2, SPLIT = 4, MERGE = 8, RESCUE = 16 };

static const cli_option options[] = {
    {'z', "size", "SIZE", NULL, "at most this much a file (5G is 5 GiB)", SPLIT},
    {'c', "count", "N", NULL, "N files of about the same size", SPLIT},
    {'y', "by-layer", NULL, NULL, "a file for each layer: the first number in the names", SPLIT},
    {'n', "stem", "NAME", NULL, "names begin with it (model)", SPLIT},
    CLI_SELECT_OPTION,
    {'D', "dtype", "DTYPE", cli_dtype_words,
     "floats become this (integers: wider ones only), e.g. BF16", ~(unsigned)RESCUE},
    {'a', "align", "N", NULL,
     "tensors begin at multiples of N bytes (64, 4096, ..); where sizes are none, other readers "
     "see "
     "fillers, tensors __padding__.N",
     ~(unsigned)RESCUE},
    {'k', "compress", "[=WHICH]", compressions,
     "compress tensors of floats, or all, without loss (needs libzstd); every reader opens the "
     "file, this library shows it as it was",
     ~(unsigned)RESCUE},
    CLI_MANIFEST_OPTION,
    {'u', "decompress", NULL, NULL, "write the file that a compressed one was made from", CONVERT},
    CLI_LENIENT_OPTION(~(unsigned)RESCUE),
    {'o', "order", "ORDER", cli_order_words,
     "of tensors: by dtype and name (reference), by name, or as given", 0},
    CLI_QUICK_OPTION,
    {'e', "engine", "ENGINE", cli_engine_words,
     "what writes: through the page cache (buffered) or past it; auto: past it unless --quick", 0},
    CLI_DRY_RUN_OPTION,
    {0},
};

#define OF_THIS_FILE(own_bit, most_operands)                                                       \
    .options = options, .bit = own_bit, .operand_min = 2, .operand_max = most_operands,            \
    .inputs = INPUTS_ALL_BUT_LAST, .has_json = true, .has_progress = true, .has_cache = true,      \
    .take = take, .run = run

#define IN_ONE_STEP                                                                                \
    "The target comes into place in one step, when it is complete; until then, and after\n"        \
    "any error or crash, what was there before stays. TARGET may be SOURCE itself; SOURCE may\n"   \
    "be - for standard input, TARGET - for standard output."

const cli_command convert_command = {
    .name = "convert",
    .operands = "SOURCE TARGET",
    .summary = "write a model anew: dtype, alignment, order; torch files too",
    .about =
        "Writes a model as one file: converted, aligned or in another order, within 256 MiB of\n"
        "memory. SOURCE may also be a torch.save file; it is read by torch's restricted loader\n"
        "(weights_only), in the Python beside this command or else the first python3 of PATH.\n"
        "\n"
        "--align puts tensors whose size is a multiple of N first; behind each of the others but\n"
        "the last comes a filler of zeros, since the format knows no holes. This command, the\n"
        "library and the Python package leave fillers out, unless one is asked for by its whole\n"
        "name. Other readers see tensors __padding__.0, .1, .. of U8: safetensors' load_file\n"
        "returns them, and load_state_dict(strict=True) then refuses them as unexpected.\n"
        "\n" IN_ONE_STEP,
    .examples = "  fastsafetensors convert --dtype BF16 model.safetensors small.safetensors\n"
                "  fastsafetensors convert pytorch_model.bin model.safetensors\n"
                "  fastsafetensors convert --compress model.safetensors packed.safetensors\n",
    OF_THIS_FILE(CONVERT, 2),
};

const cli_command extract_command = {
    .name = "extract",
    .operands = "--select GLOB SOURCE TARGET",
    .summary = "write some tensors of a model to a new file",
    .about = "Writes the tensors whose names match to a new file.\n\n" IN_ONE_STEP,
    .examples =
        "  fastsafetensors extract --select 'embeddings.*' model.safetensors emb.safetensors\n",
    OF_THIS_FILE(EXTRACT, 2),
};

const cli_command split_command = {
    .name = "split",
    .operands = "(--size SIZE | --count N | --by-layer) SOURCE FOLDER",
    .summary = "write a model as a sharded set: by size, number or layer",
    .about =
        "Writes a model as a sharded set with an index, as Hugging Face's libraries name them.\n"
        "The index comes into place last: until then the folder holds what it held.",
    .examples = "  fastsafetensors split --size 5G model.safetensors folder\n",
    OF_THIS_FILE(SPLIT, 2),
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
    OF_THIS_FILE(MERGE, 100000),
};

const cli_command rescue_command = {
    .name = "rescue",
    .operands = "SOURCE TARGET",
    .summary = "write what is whole of a file that was cut off",
    .about = "Writes the tensors that are whole of a file that ends before its data does (an\n"
             "interrupted download or copy) to a new file, and says how much is lost.",
    .examples = "  fastsafetensors rescue half.safetensors whole.safetensors\n",
    OF_THIS_FILE(RESCUE, 2),
};
